"""The processes of this machine, and what the kernel does for processes that belong together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from roost.text import printable, shorten

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that runs now."""

    pid: int
    name: str
    words: tuple[str, ...]
    """Its command line."""
    since: float
    environment: Mapping[str, str]
    """The variables asked for; none of a process that this user may not read."""

    @property
    def command(self) -> str:
        """The command line as one text."""
        return " ".join(self.words or (self.name,))

    def flag(self, name: str) -> str:
        """Return the value of `--name=value` on its command line, or nothing."""
        start = f"--{name}="
        return next((word.removeprefix(start) for word in self.words if word.startswith(start)), "")


def list_processes(variables: Sequence[str] = ()) -> Iterator[Process]:
    """Yield every process of this machine, with these variables of its environment."""
    for process in psutil.process_iter(["name", "cmdline", "create_time"]):
        environment: Mapping[str, str] = {}
        if variables:
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
        words = tuple(process.info["cmdline"] or ())
        yield Process(
            pid=process.pid,
            name=_process_name(process.info["name"] or "", words),
            words=words,
            since=process.info["create_time"] or 0.0,
            environment={name: environment[name] for name in variables if name in environment},
        )


def find_processes(variable: str) -> list[Process]:
    """Return this user's processes that have a variable in their environment."""
    return [process for process in list_processes([variable]) if process.environment]


def one_line(words: Sequence[str], most: int) -> str:
    """Return a command for display: on one line, and with nothing that upsets a terminal."""
    return shorten(printable(" ".join(" ".join(words).split())), most)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; on other systems than Linux do nothing."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap() -> None:
    """Collect the children that ended: Ray's workers take a raylet that is a zombie for alive."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _process_name(name: str, words: tuple[str, ...]) -> str:
    """Return the title that a process gave itself, as Ray's workers do, or the script that Python runs."""
    if words and words[0].startswith("ray::"):
        return words[0]
    script = next((word for word in words[:4] if word.endswith(".py")), "")
    return Path(script).name if script and name.startswith("python") else name


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
