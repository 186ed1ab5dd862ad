"""Keeping the record of a run while it goes on: in the run's folder, and never in the way of the job.

Whatever goes wrong here is said once and forgotten: a full disk must not end a training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import psutil

from roost.placement.from_groups import Placed, gather_plan
from roost.placement.plan import seat
from roost.runtime.runs.index import claim_id
from roost.runtime.runs.record import (
    PLAN_FILE,
    RECORD_FILE,
    GitState,
    RunGroup,
    RunJob,
    RunNode,
    RunOutcome,
    RunRecord,
    RunRestart,
    Status,
    files_of_others,
    outcome_of,
)
from roost.runtime.runs.snapshot import environment_of, git_state, loaded_versions, with_changes
from roost.text import shorten

if TYPE_CHECKING:
    from roost.config.topology import Topology
    from roost.placement.placement import Placement
    from roost.placement.plan import Plan
    from roost.placement.strategies import PlacementStrategy
    from roost.runtime.managers.node_manager import JobInfo
    from roost.runtime.nodes.info import NodeInfo

log: logging.Logger = logging.getLogger(__name__)

_WRITE_SECONDS = 1.0
_WRITE_SHARE = 0.02
"""So much of a run's time, beside the seconds above, may go into writing its record while it goes on."""

Parameters = ParamSpec("Parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """The file that a job came from, as it was, and what it was run with."""

    text: str
    job: RunJob


def _harmless(method: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """What goes wrong in recording is no reason for a job to fail."""

    @functools.wraps(method)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            recorder = args[0]
            if isinstance(recorder, Recorder):
                recorder.complain(error)

    return call


class Recorder:
    """The record of this process's run. One that was never begun takes everything and writes nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folder: Path | None = None
        self._others: set[str] = set()
        self._record: RunRecord | None = None
        self._topology: Topology | None = None
        self._placed: dict[str, Placed] = {}
        self._plan_is_given = False
        self._plan_is_behind = False
        self._write_seconds = 0.0
        self._outcome: RunOutcome | None = None
        self._git: GitState | None = None
        self._began = time.monotonic()
        # As the user set it: whoever connects to Ray adds to it.
        self._environment = environment_of(os.environ)
        self._has_complained = False
        # Errors that were there before have nothing to do with this run.
        self._earlier = (sys.exception(), getattr(sys, "last_value", None))

    @property
    def record(self) -> RunRecord | None:
        """The record as it is now; None where none is kept."""
        return self._record

    @_harmless
    def begin(self, job: JobInfo, nodes: Sequence[NodeInfo], topology: Topology) -> None:
        """Keep a record from now on, in the job's run folder."""
        folder = Path(job.run_dir.path)
        cwd = Path.cwd()
        self._others = files_of_others(folder)
        if RECORD_FILE in self._others:
            raise _taken(folder / RECORD_FILE)
        if PLAN_FILE not in self._others:
            # Of an earlier run in the same folder.
            (folder / PLAN_FILE).unlink(missing_ok=True)
        self._git = git_state(cwd)
        self._topology = topology
        self._folder = folder
        self._began = time.monotonic()
        self._record = RunRecord(
            id=claim_id(folder),
            began=_now(),
            command=tuple(sys.orig_argv),
            cwd=str(cwd),
            user=job.user,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_began=psutil.Process().create_time(),
            address=job.cluster,
            namespace=job.namespace,
            versions=loaded_versions(),
            environment=self._environment,
            git=self._git,
            nodes=tuple(_node(node) for node in nodes),
        )
        self._write()
        if self._git is not None:
            # Large checkouts take git a while: whoever starts a job does not wait for it.
            threading.Thread(target=self._look_for_changes, args=(self._git, cwd), daemon=True).start()

    @_harmless
    def note_job(self, source: JobSource) -> None:
        """The job came from a file: keep that as it was, and what it was run with."""
        if self._folder is None:
            return
        kept = self._folder / source.job.stored
        # The job may be in the run's folder itself.
        if kept.name not in self._others or kept.read_text(encoding="utf-8") != source.text:
            self._put(kept.name, source.text)
        self._change(job=source.job)

    @_harmless
    def note_plan(self, plan: Plan) -> None:
        """The job has a plan as a whole, before anything is launched."""
        self._plan_is_given = True
        self._put(PLAN_FILE, plan.to_json() + "\n")
        self._change(plan=plan.hash)

    @contextlib.contextmanager
    def launching(
        self, name: str, cls: type, strategy: PlacementStrategy | None, placements: Sequence[Placement]
    ) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Record the launch of a group, however it ends; what is given takes the seconds of its phases."""
        began = time.monotonic()
        phases: dict[str, float] = {}
        place = self._add_group(name, cls, strategy, placements)
        try:
            yield phases.update
        except BaseException as error:
            self._end_group(place, time.monotonic() - began, phases, type(error).__name__)
            raise
        self._end_group(place, time.monotonic() - began, phases, "")

    def _add_group(
        self, name: str, cls: type, strategy: PlacementStrategy | None, placements: Sequence[Placement]
    ) -> int:
        with self._lock:
            self._note_group(name, cls, strategy, placements)
            return len(self._record.groups) - 1 if self._record is not None else -1

    @_harmless
    def _note_group(
        self, name: str, cls: type, strategy: PlacementStrategy | None, placements: Sequence[Placement]
    ) -> None:
        if self._record is None or self._topology is None:
            return
        group = RunGroup(
            name=name,
            class_name=f"{cls.__module__}.{cls.__qualname__}",
            began=_now(),
            placements=tuple(map(seat, placements)),
        )
        self._record = replace(self._record, groups=(*self._record.groups, group))
        if not self._plan_is_given:
            self._placed[name] = Placed(placements=placements, strategy=strategy)
            self._plan_is_behind = True
            if self._may_write():
                self._gather_plan()
        self._write_soon()

    @_harmless
    def _gather_plan(self) -> None:
        """Write the plan that the groups make together."""
        if self._record is None or self._topology is None or not self._plan_is_behind:
            return
        with self._timed():
            plan = gather_plan(self._topology, self._placed)
            self._put(PLAN_FILE, plan.to_json() + "\n")
            self._record = replace(self._record, plan=plan.hash)
            self._plan_is_behind = False

    @_harmless
    def _end_group(self, place: int, seconds: float, phases: Mapping[str, float], error: str) -> None:
        with self._lock:
            if self._record is None or place < 0:
                return
            groups = list(self._record.groups)
            told = tuple((name, round(after, 3)) for name, after in phases.items())
            groups[place] = replace(groups[place], seconds=round(seconds, 3), phases=told, error=error)
            self._record = replace(self._record, groups=tuple(groups))
            self._write_soon()

    @_harmless
    def note_restart(self, worker: str, reason: str, seconds: float, error: BaseException | None) -> None:
        """A rank was started again in its place, or could not be."""
        with self._lock:
            if self._record is None:
                return
            restart = RunRestart(
                worker=worker,
                when=_now(),
                reason=reason,
                seconds=round(seconds, 3),
                error="" if error is None else shorten(f"{type(error).__name__}: {error}", 300),
            )
            self._record = replace(self._record, restarts=(*self._record.restarts, restart))
            self._write_soon()

    @_harmless
    def note_error(self, error: BaseException | None) -> None:
        """The run is ended by this exception, or by none; what is known first counts."""
        if self._outcome is None:
            self._outcome = outcome_of(error)

    @_harmless
    def note_signal(self, name: str) -> None:
        """The run is ended by a signal."""
        if self._outcome is None:
            self._outcome = RunOutcome(status=Status.INTERRUPTED, error=name)

    @_harmless
    def note_close(self) -> None:
        """Somebody closes the Cluster: because of the exception that is on its way, if there is one."""
        error = sys.exception()
        self.note_error(None if error is self._earlier[0] else error)

    @_harmless
    def note_exit(self) -> None:
        """The script is over and did not close its Cluster; the interpreter remembers the exception that ended it."""
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._earlier[1] and not hasattr(sys, "ps1"):
            self.note_error(error)
        elif self._outcome is None:
            self._outcome = RunOutcome(status=Status.ENDED)

    @_harmless
    def end(self) -> None:
        """Write down how it ended; nothing comes after that."""
        with self._lock:
            self._gather_plan()
            outcome = self._outcome or RunOutcome(status=Status.FINISHED)
            self._change(ended=_now(), seconds=round(time.monotonic() - self._began, 3), outcome=outcome)
            self._record = None

    def complain(self, error: Exception) -> None:
        """Say once that this run is not recorded as it should be."""
        if not self._has_complained:
            self._has_complained = True
            log.warning("this run's record is not complete: %s: %s", type(error).__name__, error)

    def _look_for_changes(self, state: GitState, cwd: Path) -> None:
        # It goes into the file with whatever is written next.
        self._git = with_changes(state, cwd)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            if self._record is not None:
                self._record = replace(self._record, **changes)
                self._write()

    def _write_soon(self) -> None:
        """Write what came to pass now or, where very much did, with what comes next."""
        if self._may_write():
            self._write()

    def _may_write(self) -> bool:
        return self._write_seconds <= _WRITE_SECONDS + _WRITE_SHARE * (time.monotonic() - self._began)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._write_seconds += time.monotonic() - began

    def _write(self) -> None:
        with self._lock, self._timed():
            if self._record is not None:
                self._record = replace(self._record, versions=loaded_versions(), git=self._git)
                self._put(RECORD_FILE, self._record.to_json())

    def _put(self, name: str, text: str) -> None:
        """Write a file of the run's folder: whole or not at all, and for this user's eyes."""
        if self._folder is None:
            return
        if name in self._others:
            raise _taken(self._folder / name)
        draft = self._folder / f".{name}-{os.getpid()}-{threading.get_ident()}"
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text.encode())
            draft.replace(self._folder / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _taken(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} is a file of yours; give the run a folder of its own")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def _node(info: NodeInfo) -> RunNode:
    counts: dict[str, int] = {}
    for item in info.accelerators:
        model = item.model or str(item.type)
        counts[model] = counts.get(model, 0) + 1
    return RunNode(rank=info.rank, name=info.name, address=info.address, accelerators=tuple(counts.items()))
