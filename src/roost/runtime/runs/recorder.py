"""The recorder: it writes the record of a run while the run goes on, and never gets in the job's way.

Whatever goes wrong here is logged once and dropped: a full disk must not end a training run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from roost.config.topology import Topology
from roost.machine.folders import open_regular
from roost.machine.processes import began_after_boot
from roost.placement.from_groups import Placed, gather_plan
from roost.placement.placement import Placement
from roost.placement.plan import Plan, seat
from roost.placement.strategies import PlacementStrategy
from roost.redact import hide_in_words
from roost.runtime.limits import RECORD_WRITE_SECONDS
from roost.runtime.runs.record import (
    PLAN_FILE,
    RECORD_FILE,
    GitState,
    RunFailure,
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
    from roost.runtime.failures.meanwhile import CallFailure
    from roost.runtime.managers.job_info import JobInfo
    from roost.runtime.nodes.info import NodeInfo

log: logging.Logger = logging.getLogger(__name__)

_WRITE_SHARE = 0.02
"""While a run goes on, writing its record may take this share of its time, in addition to the seconds above."""

_MOST_FAILURES = 100

Parameters = ParamSpec("Parameters")
Method = Callable[Concatenate["Recorder", Parameters], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """The text of a job's file, and how the job was run."""

    text: str
    job: RunJob


def _harmless(method: Method[Parameters]) -> Method[Parameters]:
    """Let a method take the recorder's lock, and log its exceptions instead of raising them."""

    @functools.wraps(method)
    def call(self: Recorder, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            with self._lock:
                method(self, *args, **kwargs)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("this run's record is not complete: %s: %s", type(error).__name__, error)

    return call


class Recorder:
    """The record of this process's run. Before `begin` and after `end` it accepts every note and writes nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folder = Path()
        self._others: set[str] = set()
        self.record: RunRecord | None = None
        """The record as it is now; None if this process keeps none."""
        self._topology: Topology | None = None
        self._groups: dict[object, RunGroup] = {}
        self._placed: dict[str, Placed] = {}
        self._planned: list[str] | None = None
        self._plan_is_behind = False
        self._write_seconds = 0.0
        self._outcome: RunOutcome | None = None
        self._git: GitState | None = None
        self._began = time.monotonic()
        # As the user set it: connecting to Ray adds variables.
        self._environment = environment_of(os.environ)
        self._has_warned = False
        # Exceptions from before the run have nothing to do with it.
        self._earlier = (sys.exception(), getattr(sys, "last_value", None))

    @_harmless
    def begin(self, job: JobInfo, nodes: Sequence[NodeInfo], topology: Topology) -> None:
        """Start to keep a record in the run folder."""
        self._folder, cwd = Path(job.run_dir.path), Path.cwd()
        self._others = files_of_others(self._folder)
        self._check_ours(RECORD_FILE)
        if PLAN_FILE not in self._others:
            # From an earlier run in the same folder.
            (self._folder / PLAN_FILE).unlink(missing_ok=True)
        self._git = git_state(cwd)
        self._topology = topology
        self._began = time.monotonic()
        self.record = RunRecord(
            id=job.run_dir.id,
            began=_now(),
            command=tuple(hide_in_words(sys.orig_argv)),
            cwd=str(cwd),
            user=job.user,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_began=began_after_boot(),
            address=job.cluster,
            namespace=job.namespace,
            environment=self._environment,
            nodes=tuple(
                RunNode(
                    rank=node.rank,
                    name=node.name,
                    address=node.address,
                    accelerators=tuple(Counter(item.model or str(item.type) for item in node.accelerators).items()),
                )
                for node in nodes
            ),
        )
        self._change()
        if self._git is not None:
            threading.Thread(target=self._ask_git, args=(self._git, cwd), daemon=True).start()

    def _ask_git(self, state: GitState, cwd: Path) -> None:
        """Ask whether files changed, which takes a while in a large checkout; the next write has the answer."""
        self._git = with_changes(state, cwd)

    @_harmless
    def note_job(self, source: JobSource) -> None:
        """Keep the text of the job's file, and how the job was run."""
        if self.record is None:
            return
        kept = self._folder / source.job.stored
        # The job's file may be in the run folder itself.
        if kept.name not in self._others or not kept.is_file() or kept.read_text(encoding="utf-8") != source.text:
            self._put(kept.name, source.text)
        self._change(job=source.job)

    @_harmless
    def note_plan(self, plan: Plan) -> None:
        """Keep the plan of the whole job, before anything is launched."""
        self._planned = plan.names
        self._put_plan(plan)
        self._change()

    @contextlib.contextmanager
    def launching(
        self, name: str, cls: type, strategy: PlacementStrategy | None, placements: Sequence[Placement]
    ) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Record the launch of a group, whether or not it succeeds; yield a function that takes its phases' seconds."""
        class_name = f"{cls.__module__}.{cls.__qualname__}"
        group = RunGroup(name=name, class_name=class_name, began=_now(), placements=tuple(map(seat, placements)))
        key, began, error = object(), time.monotonic(), ""
        phases: dict[str, float] = {}
        self._note_group(key, group, Placed(placements=placements, strategy=strategy))
        try:
            yield phases.update
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            rounded = tuple((phase, round(after, 3)) for phase, after in phases.items())
            seconds = round(time.monotonic() - began, 3)
            self._note_group(key, replace(group, seconds=seconds, phases=rounded, error=error))

    @_harmless
    def _note_group(self, key: object, group: RunGroup, placed: Placed | None = None) -> None:
        if self.record is None:
            return
        self._groups[key] = group
        if placed is not None and self._planned is None:
            self._placed[group.name] = placed
            self._plan_is_behind = True
        self._change(may_wait=True)

    @_harmless
    def note_restart(self, worker: str, reason: str, seconds: float, error: BaseException | None) -> None:
        """Record that a rank was restarted in its place, or that its restart failed."""
        if self.record is not None:
            text = "" if error is None else shorten(f"{type(error).__name__}: {error}", 300)
            restart = RunRestart(worker=worker, when=_now(), reason=reason, seconds=round(seconds, 3), error=text)
            self._change(may_wait=True, restarts=(*self.record.restarts, restart))

    @_harmless
    def note_failure(self, failure: CallFailure) -> None:
        """Record an exception of a worker's method."""
        if self.record is not None:
            when = datetime.fromtimestamp(failure.when).astimezone().isoformat(timespec="milliseconds")
            what = shorten(failure.what, 300)
            new = RunFailure(worker=failure.address, when=when, method=failure.method, what=what, more=failure.more)
            self._change(may_wait=True, failures=(*self.record.failures, new)[-_MOST_FAILURES:])

    @_harmless
    def note_wait(self, group: str, what: str) -> None:
        """Record for which accelerators a group waits; an empty text ends that."""
        if self.record is not None:
            others = {name: text for name, text in self.record.waits.items() if name != group}
            self._change(waits=others | ({group: what} if what else {}))

    @_harmless
    def note_long_wait(self, what: str) -> None:
        """Record what the driver has waited for so long; an empty text ends that."""
        if self.record is not None:
            self._change(waiting=what)

    @_harmless
    def note_error(self, error: BaseException | None) -> None:
        """Record that this exception ends the run, or that none does; only the first outcome counts."""
        self._outcome = self._outcome or outcome_of(error)

    @_harmless
    def note_signal(self, name: str) -> None:
        """Record that a signal ends the run."""
        self._outcome = self._outcome or RunOutcome(status=Status.INTERRUPTED, error=name)

    @_harmless
    def note_close(self) -> None:
        """Record that the Cluster is closed: because of the exception that is being handled, if there is one."""
        error = sys.exception()
        self.note_error(None if error is self._earlier[0] else error)

    @_harmless
    def note_exit(self) -> None:
        """Record that the script ended without closing its Cluster; the interpreter knows the exception, if any."""
        error = getattr(sys, "last_value", None)
        if error is not None and error is not self._earlier[1] and not hasattr(sys, "ps1"):
            self.note_error(error)
        self._outcome = self._outcome or RunOutcome(status=Status.ENDED)

    @_harmless
    def end(self) -> None:
        """Write how the run ended, and nothing after that."""
        outcome = self._outcome or RunOutcome(status=Status.FINISHED)
        try:
            self._change(ended=_now(), seconds=round(time.monotonic() - self._began, 3), outcome=outcome)
        finally:
            self.record = None

    def _change(self, *, may_wait: bool = False, **changes: Any) -> None:
        """Change the record and write it, or let a later change write it if too much time went into writing."""
        if self.record is None:
            return
        # Groups that are launched together begin in any order: the plan's is the one to show, the others come after it.
        places = {name: place for place, name in enumerate(self._planned or ())}
        groups = sorted(self._groups.values(), key=lambda group: places.get(group.name, len(places)))
        self.record = replace(self.record, groups=tuple(groups), **changes)
        began = time.monotonic()
        if may_wait and self._write_seconds > RECORD_WRITE_SECONDS + _WRITE_SHARE * (began - self._began):
            return
        try:
            self._gather_plan()
            self.record = replace(self.record, versions=loaded_versions(), git=self._git)
            self._put(RECORD_FILE, self.record.to_json())
        finally:
            self._write_seconds += time.monotonic() - began

    @_harmless
    def _gather_plan(self) -> None:
        """Write the plan that the launched groups make together."""
        if self._plan_is_behind and self._topology is not None:
            self._put_plan(gather_plan(self._topology, self._placed))
            self._plan_is_behind = False

    def _put_plan(self, plan: Plan) -> None:
        if self.record is not None:
            self._put(PLAN_FILE, plan.to_json() + "\n")
            self.record = replace(self.record, plan=plan.hash)

    def _put(self, name: str, text: str) -> None:
        """Write a file of the run folder in one step, readable by this user alone."""
        self._check_ours(name)
        draft = self._folder / f".{name}-{secrets.token_hex(8)}"
        with open(draft, "xb", opener=open_regular) as file:
            try:
                file.write(text.encode())
                file.close()
                draft.replace(self._folder / name)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise

    def _check_ours(self, name: str) -> None:
        if name in self._others:
            raise FileExistsError(f"{self._folder / name} is a file of yours; give the run a folder of its own")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
