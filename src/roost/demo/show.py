"""The whole demo: a local cluster, the map, training in one mode or both, the files it leaves, the summary."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from roost import Cluster, ConfigError, make_plan
from roost.demo.advice import advise
from roost.demo.display import Display, WithoutRemarks
from roost.demo.jobs import Mode
from roost.demo.rounds import Goal, Run
from roost.demo.tasks import CARTPOLE, Task
from roost.render.bars import Bar, draw_bars
from roost.render.grid import make_grid
from roost.render.svg import draw_svg
from roost.render.terminal import draw_terminal, terminal_colours
from roost.testing import local_cluster
from roost.watch.live import LiveRun, read_whole
from roost.watch.trace import to_trace

_RISE = 2.0
"""The factor by which the value has to grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `roost demo`."""

    task: Task = CARTPOLE
    modes: tuple[Mode, ...] = tuple(Mode)
    minutes: float | None = None
    """How long to train in all; None trains until the goal is reached."""
    seed: int = 0
    folder: Path = Path("runs")
    show_page: Callable[[Path], AbstractContextManager[str]] = lambda _: contextlib.nullcontext("")
    """Serves a page of the run in a folder for the time of a block, and returns its address, or nothing."""

    def goal(self) -> Goal:
        """Return the goal of each mode."""
        if self.minutes is None:
            return self.task.goal
        # Nothing exceeds the top, so only the time ends the run.
        return Goal(mean_return=self.task.top + 1, seconds=60 * self.minutes / len(self.modes))


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the whole demo; return whether the value rose enough in every mode."""
    task = options.task
    task.check()
    began, stamp = time.monotonic(), time.strftime("%Y%m%d-%H%M%S")
    cluster, say = local_cluster(task.hardware), console.print
    with _new_folders([options.folder / f"{stamp}-{mode}" for mode in options.modes]) as folders:
        say(f"[bold]A cluster on this machine[/]: {task.hardware}, real Ray nodes with fake accelerators")
        with cluster:
            say(f"  up after {time.monotonic() - began:.1f} s")
            done = [
                _run_mode(mode, folder, options, console) for mode, folder in zip(options.modes, folders, strict=True)
            ]
    say("\n[bold]The cluster is stopped; the results[/]")
    for trained, bars in done:
        console.print(_summary(task, trained, bars, console.width), soft_wrap=True)
    console.print(advise(task, [trained for trained, _ in done]), soft_wrap=True)
    _say_files(folders, console)
    say(f"\n{time.monotonic() - began:.0f} s in all")
    return all(trained.after >= _RISE * trained.before for trained, _ in done)


def _run_mode(mode: Mode, folder: Path, options: DemoOptions, console: Console) -> tuple[Run, list[Bar]]:
    task, goal = options.task, options.goal()
    job = task.make_job(mode)
    console.print(f"\n[bold]{mode}[/]: {mode.said}", soft_wrap=True)
    # Ray's remarks would tear the picture.
    with (
        contextlib.redirect_stderr(WithoutRemarks(sys.stderr)),
        Cluster(cluster_cfg=job["cluster"], run_dir=folder, quiet=True) as cluster,
        options.show_page(folder) as address,
    ):
        if address:
            console.print(Text(f"live page: {address}"), soft_wrap=True)
        plan = make_plan(job, cluster)
        grid = make_grid(plan, title=f"{mode}: {mode.said}")
        cluster.recorder.note_plan(plan)
        (folder / "map.svg").write_text(draw_svg(plan, grid), encoding="utf-8")
        is_basic = console.color_system == "standard"
        drawn = draw_terminal(make_grid(plan), width=min(console.width, 100), basic_colours=is_basic)
        console.print(drawn, soft_wrap=True)
        console.print()
        colours = terminal_colours(grid, basic_colours=is_basic)
        display = Display(console, task, min(goal.mean_return, task.top), colours, LiveRun(folder))
        kill = mode is (task.killed_in if task.killed_in in options.modes else options.modes[0])
        with display.showing():
            train = import_module(task.trainer).train
            trained: Run = train(cluster, plan, mode, seed=options.seed, goal=goal, kill=kill, watcher=display)
    model = read_whole(folder)
    (folder / "trace.json").write_text(to_trace(model), encoding="utf-8")
    (folder / "returns.csv").write_text(_rounds_csv(task, trained), encoding="utf-8")
    bars = []
    for name in plan.names:
        busy = trained.busy.get(name, model.busy_share(name, trained.began, trained.ended))
        bars.append(Bar(name=name, colour=colours[name], parts=(busy, 0.0, 1.0 - busy)))
    return trained, bars


@contextlib.contextmanager
def _new_folders(paths: Sequence[Path]) -> Iterator[Sequence[Path]]:
    """Make the folders of the runs before anything starts; remove the empty ones at the end."""
    made: list[Path] = []
    try:
        for path in paths:
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                raise ConfigError(
                    f"{path} already exists", hint="wait a second, or choose another --runs-dir"
                ) from None
            except OSError as error:
                hint = "choose another folder with --runs-dir"
                raise ConfigError(f"cannot make {path}: {error.strerror or error}", hint=hint) from None
            made.append(path)
        yield made
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _rounds_csv(task: Task, trained: Run) -> str:
    phases = list(trained.rounds[0].seconds)
    rows = [",".join(["round", task.noun.replace(" ", "_"), "episodes", "behind", *(f"{name}_s" for name in phases)])]
    rows += [
        f"{item.number},{item.mean_return:.{task.digits + 2}f},{item.episodes},{item.behind},"
        + ",".join(f"{item.seconds.get(phase, 0):.4f}" for phase in phases)
        for item in trained.rounds
    ]
    return "\n".join(rows) + "\n"


def _summary(task: Task, trained: Run, bars: Sequence[Bar], width: int) -> Text:
    after = (task.text(trained.after), "bold green" if trained.after > trained.before else "bold red")
    text = Text.assemble((f"{trained.mode}", "bold"), f"  {task.noun} {task.text(trained.before)} -> ", after)
    text.append(f" in {len(trained.rounds)} rounds")
    behind = max(item.behind for item in trained.rounds)
    text.append("; always the newest weights\n" if behind == 0 else f"; weights at most {behind} version old\n")
    text.append("  seconds   " + ", ".join(f"{name} {spent:.1f}" for name, spent in trained.seconds.items()) + "\n")
    for remark in trained.remarks:
        text.append(f"  speed     {remark}\n")
    for restart in trained.restarts:
        text.append(f"  killed    {restart.worker}, back in place after {restart.seconds:.1f} s\n")
    for line in draw_bars(bars, width=width - 2).split("\n"):
        text.append("  ").append_text(line).append("\n")
    return text


def _say_files(folders: Sequence[Path], console: Console) -> None:
    for folder in folders:
        names = sorted(f"{path.name}{'/' if path.is_dir() else ''}" for path in folder.iterdir())
        # `Text`, because rich reads brackets in a plain string as a style.
        console.print(Text(f"{folder}/", style="bold"), soft_wrap=True)
        shown = Text("  ".join(name for name in names if not name.startswith(".")))
        console.print(Padding(shown, (0, 0, 0, 2), expand=False))
    first, *others = folders
    steps = {"see a run again": f"roost show {first.name}", "open its page": f"roost watch {first.name}"}
    if others:
        steps["compare the modes"] = f"roost diff {first.name} {others[0].name}"
    steps |= {"see who did what": "open trace.json at ui.perfetto.dev", "start your own": "roost new my-job"}
    console.print("\n[bold]Next[/]")
    for what, command in steps.items():
        console.print(f"  {what:<17}  {command}", soft_wrap=True)
