"""The whole demo: a local cluster, the map, training in one mode or both, the files it leaves, the summary."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from roost import Cluster, ConfigError, Topology, make_plan
from roost.config.profile import read_profile
from roost.config.ranks import format_ranks
from roost.config.run import read_run_draft
from roost.demo.limits import PAGE_SECONDS
from roost.demo.rounds import Round, Run
from roost.demo.tasks import Goal, Mode, Task
from roost.render.bars import Bar, draw_bars
from roost.render.grid import make_grid
from roost.render.svg import draw_svg
from roost.render.terminal import draw_terminal, terminal_colours
from roost.search.answer import search
from roost.search.predict import check_runs
from roost.search.problem import seconds
from roost.search.setup import make_setup
from roost.testing import local_cluster
from roost.watch.live import LiveRun, WatchedRun, read_whole
from roost.watch.screen import draw_screen
from roost.watch.trace import to_trace

_RISE = 2.0
"""The factor by which the value has to grow."""
_EVERY_ROUNDS = 4
_MOST_COLUMNS = 100
_MOST_LINES = 16
_STALENESS = 1


def run_demo(
    console: Console, task: Task, modes: Sequence[Mode], *, minutes: float | None, seed: int, runs_dir: Path
) -> bool:
    """Run the whole demo; return whether the value rose enough in every mode.

    Without `minutes`, in all, it trains until the goal is reached.
    """
    for package, hint in task.needs.items():
        if find_spec(package) is None:
            raise ConfigError(f"the demo of {task.title} needs {package}, which is not installed", hint=hint)
    began, stamp = time.monotonic(), time.strftime("%Y%m%d-%H%M%S")
    goal = goal_of(task, modes, minutes)
    with _new_folders([runs_dir / f"{stamp}-{mode}" for mode in modes]) as folders, _page(console) as show:
        console.print(f"[bold]A cluster on this machine[/]: {task.hardware}, real Ray nodes with fake accelerators")
        with local_cluster(task.hardware):
            console.print(f"  up after {time.monotonic() - began:.1f} s")
            kill_in = task.killed_in if task.killed_in in modes else modes[0]
            done = [
                _run_mode(console, task, mode, folder, goal, seed=seed, kill=mode is kill_in, show=show)
                for mode, folder in zip(modes, folders, strict=True)
            ]
        console.print("\n[bold]The cluster is stopped; the results[/]")
        for trained, bars in done:
            console.print(_summary(task, trained, bars, console.width), soft_wrap=True)
        # Why there is none can be long.
        console.print(Text(advise(task, [trained for trained, _ in done])))
        _say_files(folders, console)
        console.print(f"\n{time.monotonic() - began:.0f} s in all")
    return all(trained.after >= _RISE * trained.before for trained, _ in done)


def goal_of(task: Task, modes: Sequence[Mode], minutes: float | None) -> Goal:
    """Return the goal of each mode, which share the minutes."""
    # Nothing exceeds the top, so only the time ends the run.
    return task.goal if minutes is None else Goal(mean_return=task.top + 1, seconds=60 * minutes / len(modes))


def _run_mode(
    console: Console,
    task: Task,
    mode: Mode,
    folder: Path,
    goal: Goal,
    *,
    seed: int,
    kill: bool,
    show: Callable[[Path], None],
) -> tuple[Run, list[Bar]]:
    job = task.make_job(mode)
    console.print(f"\n[bold]{mode}[/]: {mode.said}", soft_wrap=True)
    # Ray's remarks would tear the picture.
    with (
        contextlib.redirect_stderr(WithoutRemarks(sys.stderr)),
        Cluster(cluster_cfg=job["cluster"], run_dir=folder, quiet=True) as cluster,
    ):
        show(folder)
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
        with display.showing():
            train = import_module(task.trainer).train
            trained: Run = train(cluster, plan, mode, seed=seed, goal=goal, kill=kill, watcher=display)
    model = read_whole(folder)
    (folder / "trace.json").write_text(to_trace(model), encoding="utf-8")
    phases = list(trained.rounds[0].seconds)
    rows = [",".join(["round", task.noun.replace(" ", "_"), "episodes", "behind", *(f"{name}_s" for name in phases)])]
    for item in trained.rounds:
        spent = ",".join(f"{item.seconds.get(phase, 0):.4f}" for phase in phases)
        rows.append(f"{item.number},{item.mean_return:.{task.digits + 2}f},{item.episodes},{item.behind},{spent}")
    (folder / "returns.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    bars = []
    for name in plan.names:
        busy = trained.busy.get(name, model.busy_share(name, trained.began, trained.ended))
        bars.append(Bar(name=name, colour=colours[name], parts=(busy, 0.0, 1.0 - busy)))
    return trained, bars


@contextlib.contextmanager
def _page(console: Console) -> Iterator[Callable[[Path], None]]:
    """Yield what shows a run on a page, one for the whole demo, where the packages for that are installed.

    Where somebody can press Enter, the page stays until then.
    """
    served: list[Any] = []

    def show(folder: Path) -> None:
        if served:
            served[0].show(LiveRun(folder))
            return
        try:
            from roost.watch.page import PageServer
        except ConfigError:
            return
        server = PageServer(LiveRun(folder))
        thread = threading.Thread(target=server.serve, name="roost-page", daemon=True)
        thread.start()
        served[:] = [server, thread]
        console.print(Text(f"live page: {server.url}"), soft_wrap=True)

    try:
        yield show
        if served and console.is_interactive and sys.stdin.isatty():
            console.print("the page stays until you press Enter")
            sys.stdin.readline()
    finally:
        if served:
            served[0].stop()
            served[1].join(PAGE_SECONDS)


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


def _summary(task: Task, trained: Run, bars: Sequence[Bar], width: int) -> Text:
    after = (task.text(trained.after), "bold green" if trained.after > trained.before else "bold red")
    text = Text.assemble((f"{trained.mode}", "bold"), f"  {task.noun} {task.text(trained.before)} -> ", after)
    text.append(f" in {len(trained.rounds)} rounds")
    behind = max(item.behind for item in trained.rounds)
    text.append("; always the newest weights\n" if behind == 0 else f"; weights at most {behind} version old\n")
    text.append("  seconds   " + ", ".join(f"{name} {spent:.1f}" for name, spent in trained.seconds.items()) + "\n")
    for remark in trained.remarks:
        text.append(f"  speed     {remark}\n")
    for worker, spent in trained.restarts.items():
        text.append(f"  killed    {worker}, back in place after {spent:.1f} s\n")
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


def advise(task: Task, done: Sequence[Run]) -> str:
    """Search the placements of actor and rollout on the demo's accelerators, from what its rounds took."""
    topology = Topology.from_shorthand(task.hardware)
    times: dict[str, dict[int, float]] = {task.call: {}, "actor.learn": {}}
    updates, runs = [], []
    for trained in done:
        plan = make_plan(task.make_job(trained.mode), topology)
        ranks = {role: plan.component(role).hardware_ranks for role in ("rollout", "actor")}
        # The first rounds warm up.
        rounds = trained.rounds[1:] or trained.rounds
        updates += [item.seconds["weights"] for item in rounds]
        made, learned = (median(item.made_in for item in rounds), median(item.seconds["learn"] for item in rounds))
        times[task.call][len(ranks["rollout"])] = made
        times["actor.learn"][len(ranks["actor"])] = learned
        # What is learned from is there when learning begins, whatever its makers do meanwhile.
        run = {
            "placement": {role: format_ranks(own) for role, own in ranks.items()},
            "step": median(sum(item.seconds.values()) for item in rounds),
            "calls": {
                task.call: {"begins": 0.0, "ends": made},
                "actor.learn": {"begins": made, "ends": made + learned},
            },
        }
        runs.append(run)
    job = {
        "cluster": {"num_nodes": topology.num_nodes, "component_placement": {"actor": "0", "rollout": "0"}},
        "flow": {"step": f"{task.call} -> actor.learn", "weights": "actor -> rollout", "staleness": _STALENESS},
    }
    calls = {call: {"seconds": found} for call, found in times.items()}
    measured = {"version": 1, "calls": calls, "weights": {"seconds": median(updates)}, "runs": runs}
    draft, profile = read_run_draft(job), read_profile(measured)
    if draft.flow is None:
        return ""
    try:
        check_runs(draft.flow, profile)
    except ConfigError as error:
        return f"no other placement can be told from these times: {error.problems[0].message}"
    best = search(make_setup(draft.flow, profile, topology), 1).best
    places = ", ".join(f"{name} on {ranks}" for name, ranks in best.component_placement.items())
    return f"by these times the best placement is {places}: {seconds(best.step_time):.2f} s a step"


class DemoConsole(Console):
    """A console that raises when the reader of a pipe has gone, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Display:
    """The watcher of one run that shows it as it happens."""

    def __init__(self, console: Console, task: Task, goal: float, colours: Mapping[str, str], run: WatchedRun) -> None:
        self._console = console
        self._task = task
        self._goal = goal
        self._colours = colours
        self._run = run
        self._last: Round | None = None

    def showing(self) -> AbstractContextManager[object]:
        """Show the live picture while the run trains."""
        if not self._console.is_interactive:
            return contextlib.nullcontext()
        options: dict[str, Any] = {"refresh_per_second": 4, "redirect_stdout": False, "redirect_stderr": False}
        return Live(console=self._console, get_renderable=self._picture, **options)

    def launched(self, group: str, workers: int, seconds: float) -> None:
        name = (f"{group:<7}", f"bold {self._colours.get(group, '')}")
        self._say(Text.assemble("  ", name, f"  {workers} workers ready in {seconds:.1f} s"))

    def round_ended(self, done: Round) -> None:
        self._last = done
        if not self._console.is_interactive and (done.number == 1 or done.number % _EVERY_ROUNDS == 0):
            spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in done.seconds.items())
            reached = f"{self._task.noun} {self._task.text(done.mean_return):>4}"
            self._say(Text(f"  round {done.number:2}  {reached}  {spent}"))

    def killing(self, worker: str, pid: int) -> None:
        self._say(Text(f"  killing {worker} (pid {pid}) on purpose", style="bold yellow"))

    def restarted(self, worker: str, where: str, seconds: float, error: str) -> None:
        self._say(Text(f"    {error}", style="red"))
        self._say(Text(f"    {worker} is back in place after {seconds:.1f} s: {where}", style="green"))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _picture(self) -> RenderableType:
        task, last = self._task, self._last
        reached = (
            "the first round" if last is None else f"round {last.number}  {task.noun} {task.text(last.mean_return)}"
        )
        goal = Text(f"{reached}, the goal is {task.text(self._goal)}", style="bold")
        goal.truncate(self._console.width)
        size, view = self._console.size, self._run.refresh()
        width, height = min(size.width, _MOST_COLUMNS), min(size.height - 2, _MOST_LINES)
        return Group(
            goal, draw_screen(view, title=self._run.title, status=self._run.status, width=width, height=height)
        )


class WithoutRemarks(io.TextIOBase):
    """A stream without Ray's own remarks on a worker's death, which the demo reports in one line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_remark = False

    def write(self, text: str) -> int:
        # `print` writes the end of the line separately.
        is_end = self._is_remark and text == "\n"
        self._is_remark = "(raylet)" in text
        return len(text) if is_end or self._is_remark else self._stream.write(text)

    def flush(self) -> None:
        # Python also flushes when it deletes the object, and from 3.13 on reports what that raises.
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()
