"""The driver's side of the logs: fetch those that are on other machines, and show all of them as they grow."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.runtime.logs import printable
from roost.runtime.processes import die_with_parent
from roost.runtime.progress import Screen
from roost.runtime.run_dir import RunDir, log_file

log = logging.getLogger(__name__)

_EVERY_SECONDS = 0.2
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
                Path(path).parent.rmdir()


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

    def __init__(self, run_dir: RunDir, screen: Screen) -> None:
        self._run_dir = run_dir
        self._screen = screen
        self._sources: dict[str, _Source] = {}
        # By file and not by name: a closed group's logs are put aside when its name is used again.
        self._shown: dict[tuple[int, int], _Shown] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if there is something to do."""
        if self._thread is None and (not self._screen.quiet or self._sources):
            self._thread = threading.Thread(target=self._run, name="roost-logs", daemon=True)
            self._thread.start()

    def fetch_from(self, ray_id: str, address: str, path: str) -> None:
        """Fetch a worker's log from its node from now on."""
        with self._lock:
            source = self._sources.get(ray_id)
            if source is None:
                where = NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
                reader: Any = ray.remote(LogReader)
                handle = reader.options(num_cpus=0, scheduling_strategy=where).remote()
                source = self._sources[ray_id] = _Source(reader=handle)
            local = log_file(self._run_dir.logs, address)
            local.parent.mkdir(parents=True, exist_ok=True)
            is_known = path in source.files and local.exists()
            source.files[path] = local
            source.offsets[path] = source.offsets[path] if is_known else 0
        self.start()

    def is_fetched(self, ray_id: str) -> bool:
        """Whether logs of that node are fetched."""
        return ray_id in self._sources

    def catch_up(self, timeout: float = _STOP_SECONDS) -> None:
        """Fetch what there is by now: for an error that shows the end of a log."""
        deadline = time.monotonic() + timeout
        with self._lock:
            for source in self._sources.values():
                while time.monotonic() < deadline and self._fetch(source, deadline - time.monotonic()):
                    pass

    def show(self) -> None:
        """Show what there is by now."""
        with self._lock:
            if not self._screen.quiet:
                self._show()

    def stop(self, *, is_connected: bool) -> None:
        """Fetch and show the rest, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_SECONDS)
        with contextlib.suppress(Exception):
            if is_connected:
                self.catch_up()
                for source in self._sources.values():
                    ray.get(source.reader.remove.remote(list(source.files)), timeout=_STOP_SECONDS)
                    ray.kill(source.reader)
        self._sources.clear()
        self.show()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            try:
                with self._lock:
                    for source in self._sources.values():
                        self._fetch(source, 0)
                self.show()
            except Exception as error:
                log.debug("logs are not shown any more: %s", error)
                return

    def _fetch(self, source: _Source, timeout: float) -> bool:
        """Take what was asked for, if it is there, and ask again; tells whether something came."""
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
                with source.files[path].open("ab") as file:
                    file.write(data)
                source.offsets[path] += len(data)
        return any(found)

    def _show(self) -> None:
        for folder, _, names in os.walk(self._run_dir.logs):
            for name in sorted(names):
                if name.endswith(".log"):
                    self._show_file(Path(folder) / name)

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
        address = ":".join(path.relative_to(self._run_dir.logs).with_suffix("").parts)
        shown.offset += len(data)
        *lines, shown.begun = (shown.begun + data).split(b"\n")
        if skipped > 0:
            self._screen.line(f"… {skipped / 2**20:.1f} MiB not shown, see {path}", of=address)
        if len(shown.begun) > _SHOW_BYTES:
            lines, shown.begun = [*lines, shown.begun], b""
        for line in lines:
            self._screen.line(printable(line.decode(errors="replace").rstrip("\r")), of=address)
