"""One file of events: appended to by one process, and never a reason for that process to fail."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from roost.machine.folders import make_folders, open_regular
from roost.runtime.limits import EVENTS_FILE_SECONDS, EVENTS_RETRY_SECONDS

_START = b'{"process":"'


def is_ours(start: bytes) -> bool:
    """Whether a file that begins so was written as a file of events."""
    return start.startswith(_START)


class EventFile:
    """A file that takes lines for as long as it can."""

    def __init__(self, base: Path, name: Path, first: str, again: float = math.inf) -> None:
        """Take the folder that must exist, the file below it, and the line that a new file begins with.

        After `again` bytes the line comes again, for readers that begin at the end of a large file.
        """
        self._base = base
        self._path = base / name
        self._first = first
        self._again = again
        self._since_first = 0
        self._file: int | None = None
        self._is_torn = False
        self._try_again = 0.0
        self._look_again = 0.0

    def write(self, lines: Sequence[str]) -> bool:
        """Append lines; return whether they were written. Never raises."""
        now = time.monotonic()
        try:
            if self._file is not None and now > self._look_again:
                self._look_again = now + EVENTS_FILE_SECONDS
                try:
                    is_same = os.stat(self._path).st_ino == os.fstat(self._file).st_ino
                except FileNotFoundError:
                    is_same = False
                if not is_same:
                    self.close()
            if self._file is None and now < self._try_again:
                return False
            file = self._open() if self._file is None else self._file
            if self._since_first > self._again:
                self._since_first = 0
                lines = [self._first, *lines]
            self._put(file, lines)
        except (OSError, ValueError):
            # A full disk, a folder that was removed or cannot be written, a file server that is gone.
            self._try_again = now + EVENTS_RETRY_SECONDS
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.close(file)
            except OSError:
                self._is_torn = True

    def _open(self) -> int:
        make_folders(self._base, self._path.parent)
        file = self._file = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(file).st_size
        if size and not is_ours(os.pread(file, len(_START), 0)):
            raise FileExistsError(errno.EEXIST, "a file that Roost did not write is in the way", str(self._path))
        # A process that was killed, or a full disk, may have left half a line.
        self._is_torn = bool(size) and os.pread(file, 1, size - 1) != b"\n"
        self._since_first = 0
        self._put(file, [self._first])
        return file

    def _put(self, file: int, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        data = (f"\n{text}" if self._is_torn else text).encode()
        self._since_first += len(data)
        self._is_torn = True
        while data:
            data = data[os.write(file, data) :]
        self._is_torn = False
