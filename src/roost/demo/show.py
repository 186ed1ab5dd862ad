"""The demo from the command to the summary: a cluster, the map, training in one mode or both, and what it leaves."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from roost.demo.display import TOP, Display, WithoutRemarks
from roost.demo.jobs import HARDWARE, Mode, make_job
from roost.demo.pictures import curve_svg, timeline_svg, timeline_text
from roost.demo.training import Goal, Trained, train
from roost.errors import ConfigError
from roost.placement.planner import make_plan
from roost.render.grid import make_grid
from roost.render.svg import draw_svg
from roost.render.terminal import draw_terminal, terminal_colours
from roost.runtime.cluster import Cluster
from roost.testing.local import local_cluster

_GOAL_RETURN = 300.0
_MOST_SECONDS = 60.0
"""Without --minutes a mode trains until the goal, and so long at the most."""
_LEAST_ROUNDS = 16
_SHOWN_ROUNDS = 3
_RISE = 2.0
"""The return has to become this many times as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What was asked for."""

    modes: tuple[Mode, ...] = tuple(Mode)
    minutes: float | None = None
    """How long to train in all; without it until the goal is reached."""
    seed: int = 0
    folder: Path = Path("runs")

    def goal(self) -> Goal:
        """When each of the modes is over."""
        if self.minutes is None:
            return Goal(mean_return=_GOAL_RETURN, seconds=_MOST_SECONDS, least_rounds=_LEAST_ROUNDS)
        # No mean return is above the highest one: only the time ends it.
        return Goal(mean_return=TOP + 1, seconds=60 * self.minutes / len(self.modes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    """A mode that was trained, and the folder with what it left."""

    folder: Path
    trained: Trained


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Show the whole demo; gives whether the return rose in every mode."""
    if find_spec("gymnasium") is None:
        hint = "pip install 'roost[demo]'"
        raise ConfigError("the demo plays Gymnasium's CartPole, which is not installed", hint=hint)
    began = time.monotonic()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    cluster, say = local_cluster(HARDWARE), console.print
    with _new_folders([options.folder / f"{stamp}-{mode}" for mode in options.modes]) as folders:
        say(f"[bold]A cluster on this machine[/]: {HARDWARE}, three Ray nodes with fake accelerators")
        with cluster:
            say(f"  up after {time.monotonic() - began:.1f} s")
            done = [
                _run_mode(mode, folder, options, console, is_first=index == 0)
                for index, (mode, folder) in enumerate(zip(options.modes, folders, strict=True))
            ]
    say("\n[bold]The cluster is gone; what came of it[/]")
    for item in done:
        console.print(_summary(item, console.width), soft_wrap=True)
    _say_files(done, console)
    say(f"\n{time.monotonic() - began:.0f} s in all")
    return all(item.trained.after >= _RISE * item.trained.before for item in done)


def _run_mode(mode: Mode, folder: Path, options: DemoOptions, console: Console, *, is_first: bool) -> _Finished:
    job, goal = make_job(mode), options.goal()
    console.print(f"\n[bold]{mode}[/]: {mode.said}")
    # What Ray remarks on standard output would tear the picture.
    with (
        contextlib.redirect_stdout(WithoutRemarks(sys.stdout)),
        Cluster(cluster_cfg=job["cluster"], run_dir=folder, quiet=True) as cluster,
    ):
        plan = make_plan(job, cluster)
        grid = make_grid(plan, title=f"{mode}: {mode.said}")
        cluster.recorder.note_plan(plan)
        (folder / "map.svg").write_text(draw_svg(plan, grid), encoding="utf-8")
        is_basic = console.color_system == "standard"
        width = min(console.width, 100)
        console.print(draw_terminal(make_grid(plan), width=width, basic_colours=is_basic), soft_wrap=True)
        console.print()
        display = Display(console, min(goal.mean_return, TOP), terminal_colours(grid, basic_colours=is_basic))
        with display.showing():
            trained = train(cluster, plan, mode, seed=options.seed, goal=goal, kill=is_first, watcher=display)
    _write_pictures(folder, trained, terminal_colours(grid))
    return _Finished(folder=folder, trained=trained)


@contextlib.contextmanager
def _new_folders(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Folders for the runs, before anything is started; those that nothing came into are taken away again."""
    made: list[Path] = []
    try:
        for path in paths:
            made.append(_make_folder(path))
        yield made
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already", hint="wait a second, or choose another --out") from None
    except OSError as error:
        hint = "choose another folder with --out"
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}", hint=hint) from None
    return folder


def _write_pictures(folder: Path, trained: Trained, colours: Mapping[str, str]) -> None:
    returns = [item.mean_return for item in trained.rounds]
    rows = ["round,mean_return,episodes,behind,play_s,learn_s,weights_s"]
    rows += [
        f"{item.number},{item.mean_return:.2f},{item.episodes},{item.behind},"
        + ",".join(f"{item.seconds.get(phase, 0):.4f}" for phase in ("play", "learn", "weights"))
        for item in trained.rounds
    ]
    killed = {item.after_round: f"{item.worker} killed" for item in trained.restarts}
    title = f"CartPole, {trained.mode}"
    for name, text in {
        "returns.csv": "\n".join(rows) + "\n",
        "returns.svg": curve_svg(title, returns, top=TOP, marks=killed),
        "timeline.svg": timeline_svg(title, trained.timeline, colours),
        "trace.json": trained.timeline.to_trace(),
    }.items():
        (folder / name).write_text(text, encoding="utf-8")


def _summary(done: _Finished, width: int) -> Text:
    trained = done.trained
    text = Text()
    text.append(f"{trained.mode}", style="bold")
    text.append(f"  mean return {trained.before:.0f} -> ")
    text.append(f"{trained.after:.0f}", style="bold green" if trained.after > trained.before else "bold red")
    text.append(f" in {len(trained.rounds)} rounds")
    behind = max(item.behind for item in trained.rounds)
    text.append("; always the newest weights\n" if behind == 0 else f"; weights at most {behind} version old\n")
    text.append("  seconds   " + ", ".join(f"{name} {spent:.1f}" for name, spent in trained.seconds.items()) + "\n")
    for restart in trained.restarts:
        text.append(f"  killed    {restart.worker}, back in its place after {restart.seconds:.1f} s\n")
    shown = sum(sum(item.seconds.values()) for item in trained.rounds[-_SHOWN_ROUNDS:])
    end = trained.timeline.end
    text.append(f"  the last {shown:.1f} s, who was at work:\n", style="dim")
    for line in timeline_text(trained.timeline, width=max(8, min(62, width - 16)), start=end - shown, end=end):
        text.append(f"    {line}\n")
    return text


def _say_files(done: Sequence[_Finished], console: Console) -> None:
    for item in done:
        names = sorted(f"{path.name}{'/' if path.is_dir() else ''}" for path in item.folder.iterdir())
        # A name may have brackets in it, which would be read as a style.
        console.print(Text(f"{item.folder}/", style="bold"), soft_wrap=True)
        shown = Text("  ".join(name for name in names if not name.startswith(".")))
        console.print(Padding(shown, (0, 0, 0, 2), expand=False))
    first = done[0].folder
    steps = {"see a run again": f"roost show {first.name}"}
    if done[1:]:
        steps["compare the modes"] = f"roost diff {first.name} {done[1].folder.name}"
    steps["see who did what"] = "open trace.json at ui.perfetto.dev"
    steps["start your own"] = "roost new my-job"
    console.print("\n[bold]Go on[/]")
    for what, command in steps.items():
        console.print(f"  {what:<17}  {command}", soft_wrap=True)
