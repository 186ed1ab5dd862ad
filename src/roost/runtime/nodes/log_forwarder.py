"""The driver's side of logs and events: fetches those on other machines, and shows all logs as they grow."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from roost.deadline import NEVER, Deadline
from roost.machine.folders import make_folders, open_regular
from roost.machine.processes import die_with_parent
from roost.runtime.connect.calls import on_node
from roost.runtime.events.format import metrics_file, node_file, worker_file
from roost.runtime.limits import (
    LOGS_ALL_SECONDS,
    LOGS_CATCH_UP_SECONDS,
    LOGS_EVERY_SECONDS,
    LOGS_FIND_SECONDS,
    LOGS_LATELY_SECONDS,
    LOGS_READER_SECONDS,
    LOGS_STOP_SECONDS,
)
from roost.runtime.process.output import folder_of_run, run_folder_name
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import RunDir, log_file
from roost.text import printable

log: logging.Logger = logging.getLogger(__name__)

_SHARE = 0.2
"""Fetching and showing may take this share of the time."""
_ALL_SHARE = 0.02
"""Looking at all logs may take this share of it; in between, the driver looks at the logs that grew lately."""
_FETCH_BYTES = 4 * 2**20
_SHOW_BYTES = 256 * 2**10
"""How much of one log is shown in one round; if more comes, the middle is left out."""


class Elsewhere(NamedTuple):
    """A worker's log on a machine whose files the driver does not see; its events are next to it."""

    ray_id: str
    """Of the node."""
    node_rank: int
    address: str
    path: str


class LogReader:
    """An actor that reads logs and events on a machine whose files the driver does not see."""

    def __init__(self, folder_name: str) -> None:
        die_with_parent()
        self._folder_name = folder_name

    def read(self, wanted: list[tuple[str, int]]) -> list[bytes]:
        """Read each file from its offset on, a bounded amount at a time."""
        found = []
        for path, offset in wanted:
            data = b""
            with contextlib.suppress(OSError):
                if os.lstat(path).st_size > offset:
                    with open(path, "rb", opener=open_regular) as file:
                        file.seek(offset)
                        data = file.read(_FETCH_BYTES)
            found.append(data)
        return found

    def remove(self, paths: list[str]) -> None:
        """Remove files that were fetched, and the folders of the run that are empty then."""
        for path in paths:
            with contextlib.suppress(OSError):
                Path(path).unlink()
                # Who samples a node holds this one.
                Path(path).with_name(f".{Path(path).stem}.lock").unlink(missing_ok=True)
                for folder in Path(path).parents:
                    folder.rmdir()
                    if folder.name == self._folder_name:
                        break


@dataclass(slots=True)
class _NodeFiles:
    """The files that are fetched from one node."""

    reader: ActorHandle[Any]
    files: dict[str, Path] = field(default_factory=dict)
    """The path on that node, and the local copy."""
    offsets: dict[str, int] = field(default_factory=dict)
    call: Any = None
    asked: list[str] = field(default_factory=list)
    behind: set[str] = field(default_factory=set)
    """The files of which the driver could not store everything yet, as on a full disk."""


@dataclass(slots=True)
class _Shown:
    """How much of one log was shown."""

    path: str
    offset: int = 0
    begun: bytes = b""
    """The beginning of a line that is not complete yet."""
    grew: float = 0.0
    """When more of it was found last."""


class LogForwarder:
    """A thread that fetches and shows logs until it is stopped."""

    def __init__(
        self,
        run_dir: RunDir,
        console: Console,
        find_logs: Callable[[], Iterable[Elsewhere]] | None = None,
        is_connected: Callable[[], bool] = bool,
    ) -> None:
        """Take `find_logs` in the driver, which forwards the logs of all groups; elsewhere this does nothing."""
        self._run_dir = run_dir
        self._console = console
        self._find_logs = find_logs
        self._is_connected = is_connected
        self._looked = self._caught_up = self._look_at_all = 0.0
        self._sources: dict[str, _NodeFiles] = {}
        self._lost: dict[str, tuple[_NodeFiles, Deadline]] = {}
        """The nodes whose reader has ended, and when to try again."""
        # By file and not by name: the logs of a closed group are renamed when its name is used again.
        self._shown: dict[tuple[int, int], _Shown] = {}
        self._lately: dict[tuple[int, int], _Shown] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # The logs of an earlier run in the same folder are not shown.
        for path, found in self._find_files() if find_logs is not None else ():
            self._shown[found.st_dev, found.st_ino] = _Shown(path, offset=found.st_size)

    def start(self) -> None:
        """Start the thread, if there is something to do."""
        if self._find_logs is not None and self._thread is None and (not self._console.quiet or self._sources):
            self._thread = threading.Thread(target=self._run, name="roost-logs", daemon=True)
            self._thread.start()

    def fetch(self, log: Elsewhere) -> None:
        """Fetch a worker's log and events from its node from now on, and the samples of that node."""
        if self._find_logs is None:
            return
        with self._lock:
            source = self._sources.get(log.ray_id)
            if source is None:
                where = on_node(log.ray_id)
                reader: Any = ray.remote(LogReader)
                options = reader.options(num_cpus=0, scheduling_strategy=where)
                handle = options.remote(run_folder_name(self._run_dir))
                before, _ = self._lost.pop(log.ray_id, (_NodeFiles(reader=handle), NEVER))
                source = self._sources[log.ray_id] = replace(before, reader=handle, call=None)
            base, own = folder_of_run(self._run_dir, log.path), Path(self._run_dir.path)
            source.files[log.path] = log_file(self._run_dir.logs, log.address)
            own_events = worker_file(log.address)
            for events in (own_events, metrics_file(own_events), node_file(log.node_rank)):
                source.files[str(base / events)] = own / events
            for path in source.files:
                source.offsets.setdefault(path, 0)
        self.start()

    def forget(self, addresses: Sequence[str]) -> None:
        """Fetch and show the rest of a closed group's logs, and remove them from their nodes."""
        if self._find_logs is None:
            return
        with self._lock:
            self._caught_up = 0.0
            self.catch_up()
            own = Path(self._run_dir.path)
            wanted = {log_file(self._run_dir.logs, address) for address in addresses}
            wanted |= {own / name for each in map(worker_file, addresses) for name in (each, metrics_file(each))}
            for ray_id, source in list(self._sources.items()):
                ended = [path for path, local in source.files.items() if local in wanted]
                # The pending answer is for files that are forgotten now.
                source.call = None
                for path in ended:
                    del source.files[path], source.offsets[path]
                if ended:
                    self._remove(ray_id, [path for path in ended if path not in source.behind])
        self.show()

    def catch_up(self) -> None:
        """Fetch everything written so far, for an error that shows the end of a log; at most once a second."""
        if not self._sources or not self._is_connected():
            return
        with self._lock:
            if time.monotonic() - self._caught_up < LOGS_CATCH_UP_SECONDS:
                return
            deadline = Deadline.after(LOGS_STOP_SECONDS)
            for ray_id in list(self._sources):
                # The pending answer may be old: ask at least once more, and go on while data comes.
                for turn in itertools.count():
                    came = ray_id in self._sources and self._fetch(ray_id, deadline.left)
                    if deadline.is_over or (turn > 0 and not came):
                        break
            self._caught_up = time.monotonic()

    def show(self, *, only_lately: bool = False) -> None:
        """Show everything written so far, or most of the time only what came to the logs that grew lately."""
        with self._lock:
            if self._find_logs is None or self._console.quiet:
                return
            began, found = time.monotonic(), []
            only_lately = only_lately and began < self._look_at_all
            for path, file in self._files_that_grew_lately(began) if only_lately else self._find_files():
                shown = self._shown.get((file.st_dev, file.st_ino))
                if shown is not None:
                    # A closed group's logs may have been renamed since.
                    shown.path = path
                if shown is None or shown.offset != file.st_size:
                    found.append((path, file))
            ended = time.monotonic()
            if not only_lately:
                self._look_at_all = ended + min(LOGS_ALL_SECONDS, (ended - began) / _ALL_SHARE)
            for path, file in sorted(found):
                self._show_file(path, file)

    def stop(self) -> None:
        """Fetch and show the rest, and end the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=LOGS_STOP_SECONDS)
        with self._lock:
            self._caught_up = 0.0
            self.catch_up()
            if self._is_connected():
                for ray_id, source in list(self._sources.items()):
                    self._remove(ray_id, [path for path in source.files if path not in source.behind])
                    with contextlib.suppress(Exception):
                        ray.kill(source.reader)
            self._sources.clear()
            self.show()
            for shown in self._shown.values():
                self._show_lines(shown.path, [shown.begun] if shown.begun else [])

    def _run(self) -> None:
        pause = LOGS_EVERY_SECONDS
        while not self._stopped.wait(pause):
            began = time.monotonic()
            try:
                if (self._sources or self._lost) and self._is_connected():
                    if self._find_logs is not None and began - self._looked >= LOGS_FIND_SECONDS:
                        self._looked = began
                        # Workers launch groups as well.
                        for worker in self._find_logs():
                            is_lost = worker.ray_id in self._lost and not self._lost[worker.ray_id][1].is_over
                            source = self._sources.get(worker.ray_id)
                            if not is_lost and (source is None or worker.path not in source.files):
                                self.fetch(worker)
                    with self._lock:
                        for ray_id in list(self._sources):
                            self._fetch(ray_id, 0)
                self.show(only_lately=True)
            except Exception as error:
                log.debug("logs could not be shown: %s", error)
            pause = min(LOGS_ALL_SECONDS, max(LOGS_EVERY_SECONDS, (time.monotonic() - began) / _SHARE))

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
            # The node is gone, or only the reader.
            self._lost[ray_id] = self._sources.pop(ray_id), Deadline.after(LOGS_READER_SECONDS)
            return False
        came = False
        for path, data in zip(source.asked, found, strict=True):
            if not data:
                continue
            local = source.files[path]
            # What cannot be stored now is fetched again.
            source.behind.add(path)
            try:
                make_folders(Path(self._run_dir.path), local.parent)
                with open(local, "ab", buffering=0, opener=open_regular) as file:
                    written = file.write(data)
            except OSError as error:
                log.debug("%s cannot be written: %s", local, error)
                continue
            came = True
            source.offsets[path] += written
            if written == len(data):
                source.behind.discard(path)
        return came

    def _remove(self, ray_id: str, paths: list[str]) -> None:
        with contextlib.suppress(Exception):
            ray.get(self._sources[ray_id].reader.remove.remote(paths), timeout=LOGS_STOP_SECONDS)

    def _files_that_grew_lately(self, now: float) -> Iterator[tuple[str, os.stat_result]]:
        self._lately = {key: shown for key, shown in self._lately.items() if now - shown.grew < LOGS_LATELY_SECONDS}
        for key, shown in self._lately.items():
            with contextlib.suppress(OSError):
                found = os.lstat(shown.path)
                # Another file has this path if the logs of a closed group were renamed.
                if (found.st_dev, found.st_ino) == key:
                    yield shown.path, found

    def _find_files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Find all logs, and no links to others' files."""
        folders = [str(self._run_dir.logs)]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.name.endswith(".log") and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(OSError):
                            yield entry.path, entry.stat(follow_symlinks=False)

    def _show_file(self, path: str, found: os.stat_result) -> None:
        key = (found.st_dev, found.st_ino)
        shown = self._shown.get(key)
        if shown is None or shown.offset > found.st_size:
            shown = self._shown[key] = _Shown(path)
        shown.grew = time.monotonic()
        self._lately[key] = shown
        try:
            with open(path, "rb", opener=open_regular) as file:
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

    def _show_lines(self, path: str, lines: Sequence[bytes]) -> None:
        address = ":".join(Path(path).relative_to(self._run_dir.logs).with_suffix("").parts)
        for line in lines:
            # Of a line that was overwritten, as progress bars do, show the last state.
            self._console.line(printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")), of=address)
