"""The driver's side of the logs: fetches those that are on other machines, and shows all of them as they grow."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.machine.processes import die_with_parent
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import RunDir, log_file
from roost.text import printable

log: logging.Logger = logging.getLogger(__name__)

_EVERY_SECONDS = 0.2
_LOOK_EVERY_SECONDS = 2.0
_CATCH_UP_EVERY_SECONDS = 1.0
_FETCH_BYTES = 4 * 2**20
_SHOW_BYTES = 256 * 2**10
"""How much of one log is shown in one round; if more comes, the middle is left out."""
_STOP_SECONDS = 5.0


class LogReader:
    """An actor that reads logs on a machine whose files the driver does not see."""

    def __init__(self) -> None:
        die_with_parent()

    def read(self, wanted: list[tuple[str, int]]) -> list[bytes]:
        """Read each file from its offset on, a bounded amount at a time."""
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
        """Remove logs that were fetched, and the folders that are empty then."""
        for path in paths:
            with contextlib.suppress(OSError):
                Path(path).unlink()
                for folder in Path(path).parents:
                    folder.rmdir()


@dataclass(slots=True)
class _Source:
    """The logs that are fetched from one node."""

    reader: ActorHandle[Any]
    files: dict[str, Path] = field(default_factory=dict)
    """The path on that node, and the local copy."""
    offsets: dict[str, int] = field(default_factory=dict)
    call: Any = None
    asked: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Shown:
    """How much of one log was shown."""

    path: Path
    offset: int = 0
    begun: bytes = b""
    """The beginning of a line that is not complete yet."""


class LogForwarder:
    """A thread that fetches and shows logs until it is stopped."""

    def __init__(
        self,
        run_dir: RunDir,
        console: Console,
        find_logs: Callable[[], Iterable[tuple[str, str, str]]] | None = None,
        is_connected: Callable[[], bool] = bool,
    ) -> None:
        """Take `find_logs` in the driver, which forwards the logs of all groups; elsewhere this does nothing."""
        self._run_dir = run_dir
        self._console = console
        self._find_logs = find_logs
        self._is_connected = is_connected
        self._looked = self._caught_up = 0.0
        self._sources: dict[str, _Source] = {}
        # By file and not by name: the logs of a closed group are renamed when its name is used again.
        self._shown: dict[tuple[int, int], _Shown] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # What an earlier run left in the folder is not shown.
        for path in self._files() if find_logs is not None else ():
            with contextlib.suppress(OSError):
                found = path.stat()
                self._shown[found.st_dev, found.st_ino] = _Shown(path, offset=found.st_size)

    def start(self) -> None:
        """Start the thread, if there is something to do."""
        if self._find_logs is not None and self._thread is None and (not self._console.quiet or self._sources):
            self._thread = threading.Thread(target=self._run, name="roost-logs", daemon=True)
            self._thread.start()

    def fetch_from(self, ray_id: str, address: str, path: str) -> None:
        """Fetch a worker's log from its node from now on."""
        if self._find_logs is None:
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
        """Fetch and show the rest of a closed group's logs, and remove them from their nodes."""
        if self._find_logs is None:
            return
        with self._lock:
            self._caught_up = 0.0
            self.catch_up()
            wanted = {log_file(self._run_dir.logs, address) for address in addresses}
            for ray_id, source in list(self._sources.items()):
                ended = [path for path, local in source.files.items() if local in wanted]
                # The pending answer is for files that are forgotten now.
                source.call = None
                for path in ended:
                    del source.files[path], source.offsets[path]
                if ended:
                    self._remove(ray_id, ended)
        self.show()

    def catch_up(self, timeout: float = _STOP_SECONDS) -> None:
        """Fetch everything written so far, for an error that shows the end of a log; at most once a second."""
        if not self._sources or not self._is_connected():
            return
        with self._lock:
            if time.monotonic() - self._caught_up < _CATCH_UP_EVERY_SECONDS:
                return
            deadline = time.monotonic() + timeout
            for ray_id in list(self._sources):
                # The pending answer may be old: ask at least once more, and go on while data comes.
                for turn in itertools.count():
                    came = ray_id in self._sources and self._fetch(ray_id, max(0.0, deadline - time.monotonic()))
                    if time.monotonic() > deadline or (turn > 0 and not came):
                        break
            self._caught_up = time.monotonic()

    def show(self) -> None:
        """Show everything written so far."""
        with self._lock:
            if self._find_logs is not None and not self._console.quiet:
                for path in self._files():
                    self._show_file(path)

    def stop(self) -> None:
        """Fetch and show the rest, and end the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_SECONDS)
        with self._lock:
            self._caught_up = 0.0
            self.catch_up()
            if self._is_connected():
                for ray_id, source in list(self._sources.items()):
                    self._remove(ray_id, list(source.files))
                    with contextlib.suppress(Exception):
                        ray.kill(source.reader)
            self._sources.clear()
            self.show()
            for shown in self._shown.values():
                self._show_lines(shown.path, [shown.begun] if shown.begun else [])

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            try:
                if self._sources and self._is_connected():
                    self._look_for_more()
                    with self._lock:
                        for ray_id in list(self._sources):
                            self._fetch(ray_id, 0)
                self.show()
            except Exception as error:
                log.debug("logs could not be shown: %s", error)

    def _look_for_more(self) -> None:
        """Find the logs of groups that workers launched, now and then, if nodes keep their own logs."""
        if time.monotonic() - self._looked < _LOOK_EVERY_SECONDS:
            return
        self._looked = time.monotonic()
        for ray_id, address, path in self._find_logs() if self._find_logs else ():
            if ray_id not in self._sources or path not in self._sources[ray_id].files:
                self.fetch_from(ray_id, address, path)

    def _fetch(self, ray_id: str, timeout: float) -> bool:
        """Store what the last request returned, if it did, and ask again; return whether data came."""
        source = self._sources[ray_id]
        try:
            if source.call is None:
                source.asked = list(source.files)
                source.call = source.reader.read.remote([(path, source.offsets[path]) for path in source.asked])
            if not ray.wait([source.call], timeout=timeout)[0]:
                return False
            call, source.call = source.call, None
            found: Sequence[bytes] = ray.get(call)
        except RayError:
            # The node is gone: nothing more will come.
            del self._sources[ray_id]
            return False
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

    def _show_file(self, path: Path) -> None:
        try:
            found = path.stat()
            key = (found.st_dev, found.st_ino)
            shown = self._shown.get(key)
            if shown is None or shown.offset > found.st_size:
                shown = self._shown[key] = _Shown(path)
            # A closed group's logs may have been renamed since.
            shown.path = path
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
            # Of a line that was overwritten, as progress bars do, show the last state.
            self._console.line(printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")), of=address)
