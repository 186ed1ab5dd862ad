"""What the demo shows during training: a live picture on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roost.demo.pictures import curve_text
from roost.demo.rounds import Restart, Round
from roost.demo.tasks import Task
from roost.demo.timeline import Timeline

_CURVE_HEIGHT = 9
_EVERY_ROUNDS = 4
_MOST_COLUMNS = 78


class DemoConsole(Console):
    """A console that raises when the reader of a pipe has gone, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Display:
    """The watcher of one run that shows it as it happens."""

    def __init__(self, console: Console, task: Task, goal: float, colours: Mapping[str, str]) -> None:
        self._console = console
        self._task = task
        self._goal = goal
        self._colours = colours
        self._busy: tuple[str, ...] = ()
        self._returns: list[float] = []
        self._timeline: Timeline | None = None
        self._parts: dict[str, float] = {}

    def showing(self) -> AbstractContextManager[object]:
        """Show the live picture while the run trains."""
        if not self._console.is_interactive:
            return nullcontext()
        options: dict[str, Any] = {"refresh_per_second": 8, "redirect_stdout": False, "redirect_stderr": False}
        return Live(console=self._console, get_renderable=self._picture, **options)

    def launched(self, group: str, workers: int, seconds: float) -> None:
        name = (f"{group:<7}", f"bold {self._colours.get(group, '')}")
        self._say(Text.assemble("  ", name, f"  {workers} workers ready in {seconds:.1f} s"))

    def busy(self, *groups: str) -> None:
        self._busy = groups

    def round_ended(self, done: Round, timeline: Timeline) -> None:
        since, until = self._timeline.end if self._timeline else timeline.start, timeline.end
        self._parts = {track.worker: track.at_work(since, until) for track in timeline.tracks}
        self._timeline = timeline
        self._returns.append(done.mean_return)
        if not self._console.is_interactive and (done.number == 1 or done.number % _EVERY_ROUNDS == 0):
            spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in done.seconds.items())
            reached = f"{self._task.noun} {self._task.text(done.mean_return):>4}"
            self._say(Text(f"  round {done.number:2}  {reached}  {spent}"))

    def killing(self, worker: str, pid: int) -> None:
        self._say(Text(f"  killing {worker} (pid {pid}) on purpose", style="bold yellow"))

    def restarted(self, restart: Restart) -> None:
        self._say(Text(f"    {restart.error}", style="red"))
        back = f"{restart.worker} is back in place after {restart.seconds:.1f} s"
        self._say(Text(f"    {back}: {restart.where}, now pid {restart.pid}", style="green"))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _picture(self) -> RenderableType:
        if not self._returns:
            return Text("  the first round", style="dim")
        reached = self._returns[-1]
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._goal, completed=min(reached, self._goal), width=30)
        task = self._task
        said = f"{task.noun} {task.text(reached)}, the goal is {task.text(self._goal)}"
        head.add_row(f"  round {len(self._returns)}", bar, said)
        width = max(1, min(self._console.width, _MOST_COLUMNS) - 8)
        curve = Text(
            "\n".join(curve_text(self._returns, width=width, height=_CURVE_HEIGHT, top=task.top)), style="cyan"
        )
        return Group(head, curve, Text(), self._who())

    def _who(self) -> Table:
        """Return a line for each node: its workers, which are busy, and how much of the last round each worked."""
        table = Table.grid(padding=(0, 2))
        tracks = self._timeline.tracks if self._timeline else ()
        for node in sorted({track.node for track in tracks}):
            line = Text()
            for track in (track for track in tracks if track.node == node):
                is_busy = track.component in self._busy
                line.append("● " if is_busy else "○ ", style=self._colours.get(track.component, ""))
                line.append(f"{track.worker} {self._parts[track.worker]:3.0%}  ", style="" if is_busy else "dim")
            table.add_row(Text(f"  node {node}", style="bold"), line)
        return table


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
