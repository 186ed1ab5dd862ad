"""The processes of this machine, and what the kernel does for processes that belong together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from roost.deadline import Deadline
from roost.machine.limits import LOOK_SECONDS, TERMINATE_SECONDS
from roost.redact import hide_in_words
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
        words, name = tuple(process.info["cmdline"] or ()), process.info["name"] or ""
        # The title that a process gave itself, as Ray's workers do, or the script that Python runs.
        if words and words[0].startswith("ray::"):
            name = words[0]
        elif name.startswith("python"):
            name = Path(next((word for word in words[:4] if word.endswith(".py")), name)).name
        yield Process(
            pid=process.pid,
            name=name,
            words=words,
            since=process.info["create_time"] or 0.0,
            environment={name: environment[name] for name in variables if name in environment},
        )


def find_processes(variable: str, user: str | None = None, *, also: Sequence[str] = ()) -> list[Process]:
    """Return the processes that have a variable in their environment, as far as this user may read it.

    With `user`, only those of this account; with `also`, other variables of theirs too. A process in a container is not
    returned: its process ids are others.
    """
    found = [process for process in list_processes([variable, *also]) if variable in process.environment]
    return found if user is None else [process for process in found if _is_ours(process.pid, user)]


def end_processes(processes: Sequence[Process], user: str) -> None:
    """End processes of an account that `find_processes` returned, if they are still the same ones."""
    asked = []
    for item in processes:
        with contextlib.suppress(psutil.Error, OSError):
            # psutil refuses to signal a later process with the same id.
            process = psutil.Process(item.pid)
            environment = process.environ()
            is_same = all(environment.get(name) == value for name, value in item.environment.items())
            if process.create_time() == item.since and is_same and _is_ours(item.pid, user):
                process.terminate()
                asked.append(process)
    _, stubborn = psutil.wait_procs(asked, timeout=TERMINATE_SECONDS)
    for process in stubborn:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(stubborn, timeout=TERMINATE_SECONDS)


def stop_process(pid: int, began: float, timeout: float, on_wait: Callable[[], object] = lambda: None) -> bool:
    """Ask a process that began at this time after the boot to end, and return whether it has after `timeout` seconds.

    `on_wait` is called again and again meanwhile. PermissionError if it is another user's.
    """
    try:
        process = psutil.Process(pid)
        if not is_same(pid, began):
            return True
        process.terminate()
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        raise PermissionError(f"process {pid} is another user's") from None
    return _has_ended(process, timeout, on_wait)


def began_after_boot(pid: int | None = None) -> float:
    """Return how many seconds after the machine booted a process began, by default this one.

    A process id is used again, but not with the same beginning. Unlike the time of day, a step of the clock does not
    change it.
    """
    boot = psutil.boot_time()
    return psutil.Process(pid).create_time() - boot


def is_same(pid: int, began: float) -> bool:
    """Return whether the process that began at this time after the boot runs; psutil.Error if that is kept secret."""
    try:
        return abs(began_after_boot(pid) - began) <= 1
    except psutil.NoSuchProcess:
        return False


def account() -> str:
    """Return the name of the account that this process runs as, or its number where it has no name."""
    return psutil.Process().username()


def one_line(words: Sequence[str], most: int) -> str:
    """Return a command for display: on one line, without secrets, and with nothing that upsets a terminal."""
    return shorten(printable(" ".join(" ".join(hide_in_words(words)).split())), most)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; on other systems than Linux do nothing."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(pid: int) -> None:
    """Let a thread kill this process when another one ends that need not be its parent; only on Linux."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    if hasattr(os, "pidfd_open"):
        threading.Thread(target=watch, name="roost-die-with", daemon=True).start()


def end_sibling(pid: int, seconds: float) -> bool:
    """Kill an older process with the same parent, and return whether it is gone after at most `seconds`.

    A process that does not match is another process that got the number later, and is left alone.
    """
    try:
        process, this = psutil.Process(pid), psutil.Process()
        if process.ppid() != this.ppid() or process.create_time() > this.create_time():
            return True
        process.kill()
    except psutil.NoSuchProcess:
        return True
    return _has_ended(process, seconds)


def _has_ended(process: psutil.Process, timeout: float, on_wait: Callable[[], object] = lambda: None) -> bool:
    """Wait until a process has ended; a zombie has, and its parent has not noticed yet."""
    deadline = Deadline.after(timeout)
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            if deadline.is_over:
                return False
            on_wait()
            time.sleep(LOOK_SECONDS)
    return True


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap() -> None:
    """Collect the children that ended: Ray's workers take a raylet that is a zombie for alive."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _is_ours(pid: int, user: str) -> bool:
    """Whether a process belongs to this account, and to the same process ids and network as this process."""
    try:
        names = ("pid", "net") if sys.platform.startswith("linux") else ()
        is_near = all(os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}") for name in names)
        return is_near and psutil.Process(pid).username() == user
    except (psutil.Error, OSError):
        return False


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
