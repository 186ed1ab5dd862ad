"""Stacks on demand: a file asks a worker for the stacks of all its threads, and the thread that writes events answers.

No signal is used, which user code may handle itself, and the worker does not stop. It works while a call hangs, as long
as the code that hangs lets other threads run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from pathlib import Path

from roost.machine.folders import open_regular
from roost.runtime.events.format import worker_file

_TOKEN_BYTES = 64


def request_file(address: str) -> Path:
    """Return the path, in the run folder, of the file that asks for a worker's stacks."""
    return worker_file(address).with_suffix(".ask")


def answer_file(address: str) -> Path:
    """Return the path, in the run folder, of the answer; its first line is what the request said."""
    return worker_file(address).with_suffix(".stack")


def answer_request(base: Path, address: str) -> None:
    """Write the stacks of this process if a file asks for them. Never raises."""
    request, answer = base / request_file(address), base / answer_file(address)
    with contextlib.suppress(OSError, ValueError):
        with open(request, "rb", opener=open_regular) as file:
            token = file.read(_TOKEN_BYTES)
        if not token:
            # It is just being written.
            return
        request.unlink()
        draft = answer.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=open_regular) as file:
            file.write(token.strip() + b"\n")
            file.flush()
            faulthandler.dump_traceback(file=file.fileno(), all_threads=True)
        os.replace(draft, answer)
