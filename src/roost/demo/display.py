"""The output of the demo during training: on a terminal the picture of `roost top`, in a pipe plain lines."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from roost.demo.rounds import Restart, Round
from roost.demo.tasks import Task
from roost.watch.live import WatchedRun
from roost.watch.screen import draw_screen

_EVERY_ROUNDS = 4
_MOST_COLUMNS = 100
_MOST_LINES = 16


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
            return nullcontext()
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

    def restarted(self, restart: Restart) -> None:
        self._say(Text(f"    {restart.error}", style="red"))
        back = f"{restart.worker} is back in place after {restart.seconds:.1f} s"
        self._say(Text(f"    {back}: {restart.where}, now pid {restart.pid}", style="green"))

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
