"""The driver's side of the logs: fetch those that are on other machines, and show all of them as they grow."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.machine.processes import die_with_parent
from roost.runtime.launch.progress import Screen
from roost.runtime.runs.folder import RunDir, log_file
from roost.text import printable

log = logging.getLogger(__name__)

_EVERY_SECONDS = 0.2
_LOOK_EVERY_SECONDS = 2.0
_CATCH_UP_EVERY_SECONDS = 1.0
_FETCH_BYTES = 4 * 2**20
_SHOW_BYTES = 256 * 2**10
"""How much of one log is shown in one round; of what comes faster than this the middle is left out."""
_STOP_SECONDS = 5.0


class LogReader:
    """An actor on a machine whose logs the driver does not see."""

    def __init__(self) -> None:
        die_with_parent()

    def read(self, wanted: list[tuple[str, int]]) -> list[bytes]:
        """What is in each file from its offset on, not too much at a time."""
        found = []
        for path, offset in wanted:
            try:
                with open(path, "rb") as file:
                    file.seek(offset)
                    found.append(file.read(_FETCH_BYTES))
            except OSError:
                found.append(b"")
        return found

    def remove(self, paths: list[str]) -> None:
        """Remove logs that were fetched."""
        for path in paths:
            with contextlib.suppress(OSError):
                Path(path).unlink()
                # As far up as there is nothing else.
                for folder in Path(path).parents:
                    folder.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLog:
    """A worker's log that is on its own node only."""

    ray_id: str
    address: str
    path: str


class JobWithLogs(Protocol):
    """What is asked of the job."""

    def is_connected(self) -> bool:
        """Whether Ray can be asked."""

    def logs_elsewhere(self) -> list[FoundLog]:
        """The logs of workers that are on their own nodes only."""


@dataclass(slots=True)
class _Source:
    """The logs of one node that are fetched from there."""

    reader: ActorHandle[Any]
    files: dict[str, Path] = field(default_factory=dict)
    """What is there, and where it goes."""
    offsets: dict[str, int] = field(default_factory=dict)
    call: Any = None
    asked: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Shown:
    """How far one log was shown."""

    offset: int = 0
    begun: bytes = b""
    """A line without its end."""


class LogShow:
    """A thread that fetches and shows logs until it is stopped."""

    def __init__(self, run_dir: RunDir, screen: Screen, job: JobWithLogs | None) -> None:
        """Without a job this process has no logs to care for: the driver cares for those of all groups."""
        self._run_dir = run_dir
        self._screen = screen
        self._job = job
        self._looked = self._caught_up = 0.0
        self._sources: dict[str, _Source] = {}
        # By file and not by name: a closed group's logs are put aside when its name is used again.
        self._shown: dict[tuple[int, int], _Shown] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if job is not None:
            self._pass_over_what_is_there()

    def start(self) -> None:
        """Begin, if there is something to do."""
        if self._job is not None and self._thread is None and (not self._screen.quiet or self._sources):
            self._thread = threading.Thread(target=self._run, name="roost-logs", daemon=True)
            self._thread.start()

    def fetch_from(self, ray_id: str, address: str, path: str) -> None:
        """Fetch a worker's log from its node from now on; the driver does so for all groups of the job."""
        if self._job is None:
            return
        with self._lock:
            source = self._sources.get(ray_id)
            if source is None:
                where = NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
                reader: Any = ray.remote(LogReader)
                handle = reader.options(num_cpus=0, scheduling_strategy=where).remote()
                source = self._sources[ray_id] = _Source(reader=handle)
            local = log_file(self._run_dir.logs, address)
            local.parent.mkdir(parents=True, exist_ok=True)
            source.files[path] = local
            source.offsets.setdefault(path, 0)
        self.start()

    def forget(self, addresses: Sequence[str]) -> None:
        """A group is closed: bring and show the rest of its logs, and leave none elsewhere."""
        if self._job is None:
            return
        with self._lock:
            self._caught_up = 0.0
            self.catch_up()
            wanted = {log_file(self._run_dir.logs, address) for address in addresses}
            for ray_id, source in list(self._sources.items()):
                ended = [path for path, local in source.files.items() if local in wanted]
                # An answer that is on its way has offsets of files that are gone.
                source.call = None
                for path in ended:
                    del source.files[path], source.offsets[path]
                if ended:
                    self._remove(ray_id, ended)
        self.show()

    def catch_up(self, timeout: float = _STOP_SECONDS) -> None:
        """Fetch what there is by now, for an error that shows the end of a log; not again for every worker."""
        if not self._sources or self._job is None or not self._job.is_connected():
            return
        with self._lock:
            if time.monotonic() - self._caught_up < _CATCH_UP_EVERY_SECONDS:
                return
            deadline = time.monotonic() + timeout
            for ray_id in list(self._sources):
                # What was asked before may be old: once more at least, and on for as long as something comes.
                for turn in itertools.count():
                    came = ray_id in self._sources and self._fetch(ray_id, max(0.0, deadline - time.monotonic()))
                    if time.monotonic() > deadline or (turn > 0 and not came):
                        break
            self._caught_up = time.monotonic()

    def show(self) -> None:
        """Show what there is by now."""
        with self._lock:
            if self._job is not None and not self._screen.quiet:
                self._show()

    def stop(self) -> None:
        """Fetch and show the rest, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_SECONDS)
        with self._lock:
            self._caught_up = 0.0
            self.catch_up()
            if self._job is not None and self._job.is_connected():
                for ray_id, source in list(self._sources.items()):
                    self._remove(ray_id, list(source.files))
                    with contextlib.suppress(Exception):
                        ray.kill(source.reader)
            self._sources.clear()
            self.show()
            for path, shown in self._open_lines():
                self._show_lines(path, [shown.begun])

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            try:
                if self._sources and self._job is not None and self._job.is_connected():
                    self._look_for_more(self._job)
                    with self._lock:
                        for ray_id in list(self._sources):
                            self._fetch(ray_id, 0)
                self.show()
            except Exception as error:
                log.debug("logs could not be shown just now: %s", error)

    def _look_for_more(self, job: JobWithLogs) -> None:
        """Now and then, where nodes keep their own logs: workers launch groups, too."""
        if time.monotonic() - self._looked < _LOOK_EVERY_SECONDS:
            return
        self._looked = time.monotonic()
        for found in job.logs_elsewhere():
            source = self._sources.get(found.ray_id)
            if source is None or found.path not in source.files:
                self.fetch_from(found.ray_id, found.address, found.path)

    def _fetch(self, ray_id: str, timeout: float) -> bool:
        """Take what was asked for, if it is there, and ask again; tells whether something came."""
        try:
            return self._fetch_some(self._sources[ray_id], timeout)
        except RayError:
            # Its node is gone: what was fetched is what there is.
            del self._sources[ray_id]
            return False

    def _fetch_some(self, source: _Source, timeout: float) -> bool:
        if source.call is None:
            source.asked = list(source.files)
            source.call = source.reader.read.remote([(path, source.offsets[path]) for path in source.asked])
        ready, _ = ray.wait([source.call], timeout=timeout)
        if not ready:
            return False
        call, source.call = source.call, None
        found: Sequence[bytes] = ray.get(call)
        for path, data in zip(source.asked, found, strict=True):
            if data:
                source.files[path].parent.mkdir(parents=True, exist_ok=True)
                with source.files[path].open("ab") as file:
                    file.write(data)
                source.offsets[path] += len(data)
        return any(found)

    def _remove(self, ray_id: str, paths: list[str]) -> None:
        with contextlib.suppress(Exception):
            ray.get(self._sources[ray_id].reader.remove.remote(paths), timeout=_STOP_SECONDS)

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self._run_dir.logs):
            yield from (Path(folder) / name for name in sorted(names) if name.endswith(".log"))

    def _pass_over_what_is_there(self) -> None:
        """A run's folder may have been used before."""
        for path in self._files():
            with contextlib.suppress(OSError):
                found = path.stat()
                self._shown[found.st_dev, found.st_ino] = _Shown(offset=found.st_size)

    def _show(self) -> None:
        for path in self._files():
            self._show_file(path)

    def _open_lines(self) -> Iterator[tuple[Path, _Shown]]:
        """The logs whose last line has no end."""
        for path in self._files():
            with contextlib.suppress(OSError):
                shown = self._shown.get((path.stat().st_dev, path.stat().st_ino))
                if shown is not None and shown.begun:
                    yield path, shown

    def _show_file(self, path: Path) -> None:
        try:
            found = path.stat()
            key = (found.st_dev, found.st_ino)
            shown = self._shown.setdefault(key, _Shown())
            if shown.offset > found.st_size:
                shown = self._shown[key] = _Shown()
            if found.st_size == shown.offset:
                return
            with path.open("rb") as file:
                skipped = found.st_size - shown.offset - _SHOW_BYTES
                if skipped > 0:
                    shown.begun = b""
                    shown.offset += skipped
                file.seek(shown.offset)
                data = file.read(_SHOW_BYTES)
        except OSError:
            return
        shown.offset += len(data)
        *lines, shown.begun = (shown.begun + data).split(b"\n")
        if len(shown.begun) > _SHOW_BYTES:
            lines, shown.begun = [*lines, shown.begun], b""
        if skipped > 0:
            lines = [f"… {skipped / 2**20:.1f} MiB not shown, see {path}".encode(), *lines]
        self._show_lines(path, lines)

    def _show_lines(self, path: Path, lines: Sequence[bytes]) -> None:
        address = ":".join(path.relative_to(self._run_dir.logs).with_suffix("").parts)
        for line in lines:
            # Of a line that was written over, as progress bars do, the last state.
            self._screen.line(printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")), of=address)
