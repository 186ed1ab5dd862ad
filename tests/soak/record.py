"""How the processes of a round write down what happens: one line of JSON for each event, in a file of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def true_time() -> float:
    """Return the time of day, also in a process whose clock was stepped."""
    return time.clock_gettime(time.CLOCK_REALTIME)


class Recorder:
    """Writes events. Whatever is written stays, even if the process is killed right after."""

    def __init__(self, folder: Path, who: str, **always: Any) -> None:
        self._path = folder / f"events-{os.getpid()}.jsonl"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._always = {"who": who, "pid": os.getpid(), **always}
        self._numbers = itertools.count()
        self._who = who

    def note(self, kind: str, **what: Any) -> None:
        """Write an event."""
        line = json.dumps({"e": kind, "t": true_time(), **self._always, **what}, default=repr)
        os.write(self._file, line.encode() + b"\n")

    @contextlib.contextmanager
    def op(self, what: str, limit: float, **more: Any) -> Iterator[Op]:
        """Write when an operation that may take `limit` seconds begins and ends; an error is written, not raised."""
        name = f"{self._who}.{os.getpid()}.{next(self._numbers)}"
        op = Op(self, name)
        self.note("begin", op=name, what=what, limit=limit, **more)
        try:
            yield op
        except Exception as error:
            bases = [base.__name__ for base in type(error).__mro__]
            text = f"{error}\n{''.join(getattr(error, '__notes__', []))}"
            self.note("end", op=name, ok=False, error={"type": bases[0], "bases": bases, "text": text[:2000]})
        else:
            op.ok = True
            self.note("end", op=name, ok=True)


class Op:
    """An operation that is under way."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self.ok = False

    def note(self, kind: str, **what: Any) -> None:
        """Write an event that belongs to the operation."""
        self._recorder.note(kind, op=self._name, **what)

    def expect(self, got: Any, want: Any) -> None:
        """Write down a value that is not the right one."""
        if got != want:
            self.note("wrong", got=got, want=want)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all processes, in the order of their times; half a line at the end of a file is dropped."""
    events = []
    for path in folder.glob("events-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return sorted(events, key=lambda event: event["t"])
