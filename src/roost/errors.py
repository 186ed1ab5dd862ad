"""Every error that Roost raises on purpose.

    RoostError                 the base: catch this to catch them all
    ├── ConfigError            a file, dict or flag contains something that cannot be read or is not known
    ├── PlacementError         a placement breaks a rule: ranks that are not there, a worker on two
    │                          nodes, sizes that do not divide (also a ValueError and an AssertionError)
    ├── ChannelClosed          a channel was closed: nothing can be put, or nothing is left to get
    └── ClusterError           something outside the program failed: no Ray, the wrong Ray, a node that is gone
        ├── NodesMissing       fewer nodes than asked for at the deadline (also a TimeoutError)
        ├── CheckFailed        a node's probe, interpreter or hardware is not as the config says
        ├── NameTaken          a worker of that name exists already
        ├── PortsExhausted     no free block of ports on a node
        ├── ManagerDied        a manager of the job is gone
        ├── WrongPlace         a worker is not where the plan says, or does not see what it should
        ├── AcceleratorsTaken  other jobs hold accelerators of the plan at the deadline (also a TimeoutError)
        ├── ReservationLost    the job has lost accelerators that it had reserved
        ├── EngineFailed       the server of an engine has ended, or cannot serve any more
        ├── LaunchTimedOut     a worker was not ready at the deadline (also a TimeoutError)
        ├── CallTimedOut       a worker had not answered at the deadline (also a TimeoutError)
        ├── WorkerFailed       an exception from a worker that cannot be re-raised here
        └── WorkerDied         a worker's process is gone: ended, killed, out of memory, its node lost

The first two are mistakes by the user, the third is how a stream of data ends, the others are failures around the
program. All carry `problems`: everything that was found, each with where it is (if it is in a file or dict), what is
wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from roost.text import cell_width, printable_lines

_EXCERPT_CELLS = 100  # a longer source line is cut around the mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a mistake is: a place in a file, or a key of a dict.

    `text` is the source line (or the value, for a dict), `offset` and `length` the mistake within it.
    """

    key: str
    file: str | None = None
    line: int = 0
    text: str = ""
    offset: int = 0
    length: int = 1

    def __str__(self) -> str:
        return self.key if self.file is None else f"{self.file}:{self.line}:{self.offset + 1}"

    def excerpt(self) -> str:
        """Return the source line with the mistake underlined, or nothing if there is no text."""
        if not self.text.strip():
            return ""
        indent = len(self.text) - len(self.text.lstrip())
        start = min(indent, self.offset)
        text, offset = self.text[start:], self.offset - start
        if len(text) > _EXCERPT_CELLS:
            cut = max(0, offset - _EXCERPT_CELLS // 2)
            tail = "…" if cut + _EXCERPT_CELLS < len(text) else ""
            text = ("…" if cut else "") + text[cut : cut + _EXCERPT_CELLS] + tail
            offset = offset - cut + (1 if cut else 0)
        text = "".join(c if c.isprintable() else " " for c in text).rstrip()
        length = max(1, min(self.length, len(text) - offset))
        pad = " " * cell_width(text[:offset])
        return f"    {text}\n    {pad}{'^' * max(1, cell_width(text[offset : offset + length]))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake: what is wrong, where, and what to do about it."""

    message: str
    hint: str = ""
    where: Where | None = None
    ranks: tuple[int, ...] = ()
    """The hardware ranks it is about, so that a caller can point at them in the user's file."""

    def at(self, where: Where | None) -> Problem:
        """Return the same problem, located at `where`."""
        return replace(self, where=where)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}" if self.where else self.message]
        if self.where and (excerpt := self.where.excerpt()):
            lines.append(excerpt)
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        # A message may quote a file, or the name of another user's job.
        return printable_lines("\n".join(lines))


class RoostError(Exception):
    """The base of all errors that Roost raises on purpose; `problems` has everything that was found, one by one."""

    def __init__(
        self, problems: str | Problem | Iterable[Problem], *, hint: str = "", where: Where | None = None
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(message=problems, hint=hint, where=where)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        # BaseException pickles `args` back into __init__: with the tuple in it, errors survive Ray.
        super().__init__(self.problems)

    def add(self, problem: Problem) -> None:
        """Add what was found besides."""
        self.problems = (*self.problems, problem)
        self.args = (self.problems,)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class ConfigError(RoostError, ValueError):
    """A file, dict or flag contains something that cannot be read or is not known."""


class PlacementError(RoostError, ValueError, AssertionError):
    """A placement breaks a rule of the documents."""


class ChannelClosed(RoostError):  # noqa: N818 - what happened
    """A channel was closed: nothing can be put any more, or nothing is left to get."""


class ClusterError(RoostError, RuntimeError):
    """Something outside the program failed: no Ray, the wrong Ray, a node that is gone."""


class NodesMissing(ClusterError, TimeoutError):  # noqa: N818 - what happened, as in WorkerDied
    """Fewer nodes than asked for came before the deadline."""


class CheckFailed(ClusterError):  # noqa: N818 - what happened
    """A node's probe, interpreter or hardware is not as the config says."""


class NameTaken(ClusterError):  # noqa: N818 - what happened
    """A worker of that name exists already."""


class PortsExhausted(ClusterError):  # noqa: N818 - what happened
    """A node has no free block of ports of the size asked for."""


class ManagerDied(ClusterError):  # noqa: N818 - what happened
    """A manager of the job is gone."""


class WrongPlace(ClusterError):  # noqa: N818 - what happened
    """A worker is not where the plan says, or does not see what it should."""


class AcceleratorsTaken(ClusterError, TimeoutError):  # noqa: N818 - what happened
    """Other jobs hold accelerators of the plan, and did not release them before the deadline."""


class ReservationLost(ClusterError):  # noqa: N818 - what happened
    """The job has lost accelerators that it had reserved: a node is gone, or a placement group was removed."""


class LaunchTimedOut(ClusterError, TimeoutError):  # noqa: N818 - what happened
    """A worker was not ready at the deadline."""


class EngineFailed(ClusterError):  # noqa: N818 - what happened
    """The server of an engine has ended, or cannot serve any more; an engine's `health` may raise it."""


class CallTimedOut(ClusterError, TimeoutError):  # noqa: N818 - what happened
    """A worker had not answered at the deadline; the call goes on, and can be waited for again."""


class WorkerFailed(ClusterError):  # noqa: N818 - what happened
    """An exception from a worker that cannot be re-raised here: it, or the result, cannot be pickled or shown."""


class WorkerDied(ClusterError):  # noqa: N818 - what happened
    """A worker's process is gone: it ended, was killed or ran out of memory, or its node is lost."""
