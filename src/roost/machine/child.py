"""A process of ours for work that may hang or end its process, as the calls of Ray do when its head dies.

The task is JSON on the child's command line. The child answers with values, pickled one after the other, so that those
that it sent before its death are not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from roost.machine.limits import END_SECONDS, LOAD_SECONDS
from roost.machine.processes import die_with_parent
from roost.text import shorten

Say = Callable[[Any], None]


class Child:
    """A child process that lives as long as a `with` block, and no longer than its parent.

    `hear` is called in another thread with each value that the child sends, the first of which says that its modules
    are loaded; it returns whether that was the last one.
    """

    def __init__(self, module: str, task: Mapping[str, Any], hear: Callable[[Any], bool]) -> None:
        self.last_words: str = ""
        """The child's standard error, once the block has ended."""
        self._hear = hear
        self._is_loaded = threading.Event()
        self._is_done = threading.Event()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the block
        # -P: a file in the current folder must not replace a module.
        self._process = subprocess.Popen(  # noqa: S603 - our own module, and JSON as its one argument
            [sys.executable, "-P", "-m", module, json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the last value or the child's end, at most `seconds` after it is loaded; return whether it came."""
        self._is_loaded.wait(LOAD_SECONDS)
        return self._is_done.wait(seconds)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        # Do not wait for a child that hangs in the kernel, as on a dead file system.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._reader.join(1)
        with self._stderr:
            self._stderr.seek(0)
            self.last_words = self._stderr.read().decode(errors="replace")

    def _listen(self) -> None:
        pipe: Any = self._process.stdout
        try:
            # A child that is killed may leave half a value.
            with pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
                while not self._hear(pickle.load(pipe)):  # noqa: S301 - from our own child
                    self._is_loaded.set()
        finally:
            self._is_loaded.set()
            self._is_done.set()


def answer(work: Callable[..., None]) -> None:
    """Do the work of a child process: call it with the task, and with `say`, which sends a value to the parent."""
    # Ray prints the output of its nodes to standard output: the answers go elsewhere.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(value: Any) -> None:
        answers.write(pickle.dumps(value))
        answers.flush()

    work(**json.loads(sys.argv[1]), say=say)


def last_line(words: str) -> str:
    """Return the last line that a child wrote, without the time, process and place in the source of Ray's own lines."""
    lines = [line for line in words.splitlines() if line.strip()]
    return shorten(re.sub(r"^\[[^]]*\]( [^ ]+:[0-9]+:)?", "", lines[-1]).strip(), 300) if lines else ""
