"""Starting the workers of a group: all at once, phase by phase, checked from inside, undone if it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from roost.errors import ClusterError, LaunchTimedOut, NameTaken, Problem, ReservationLost, WrongPlace
from roost.runtime.failures.failure import Failure, make_error
from roost.runtime.launch.progress import LaunchBoard, LaunchView, Phase
from roost.runtime.launch.worker_spec import Seat, differences
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.process.actor import Master, Report
from roost.runtime.runs.folder import RunDir
from roost.text import join_words

_TICK_SECONDS = 0.2
_GRACE_SECONDS = 1.0
_LOOK_EVERY_SECONDS = 1.0
_OVERDUE = 0.8
"""The part of the time after which a worker that is not ready is asked where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker that is ready: its actor, and what it said of itself."""

    handle: ActorHandle[Any]
    report: Report


class LaunchSite(Protocol):
    """What a launch needs of the job around it."""

    @property
    def run_dir(self) -> RunDir:
        """Where logs go."""

    @property
    def is_closing(self) -> bool:
        """Whether somebody wants the group closed meanwhile."""

    @property
    def ports_to_try(self) -> tuple[int, ...]:
        """Ports for rank 0 to try."""

    def take_master(self, report: Report | None) -> Master:
        """Where rank 0 listens, after what it found; without a report, as it was found before."""

    def describe(self, error: BaseException, address: str) -> Failure:
        """What an error of Ray says of a worker."""

    def lost_reservation(self) -> str | None:
        """What of the reservation is not the job's any more, in words."""

    def note_report(self, address: str, report: Report) -> None:
        """A worker has said for the first time where it is."""

    def read_stack(self, address: str) -> tuple[str, str]:
        """The path of a worker's log, and the stack that was dumped into it."""


def start_process(
    remote: Any, name: str, namespace: str, runtime_env: Mapping[str, Any], *args: Any, **options: Any
) -> ActorHandle[Any]:
    """Start an actor where the options say; NameTaken where the name is in use."""
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    # Which accelerator it sees is said by its variable: Ray's own count would choose another.
    options = {"num_cpus": 0, "num_gpus": 0, **options}
    try:
        handle: ActorHandle[Any] = remote.options(name=name, namespace=namespace, **options).remote(*args)
    except ValueError as error:
        if "already" not in str(error):
            raise
        raise NameTaken(
            f"a worker named {name!r} is there already", hint="names are unique in a job: choose another"
        ) from None
    return handle


class Launch:
    """One launch of some seats, from the request to all of them being ready.

    `request` asks Ray for the processes and comes back at once; `run` takes them through their phases.
    """

    def __init__(self, seats: Sequence[Seat], nodes: Sequence[NodeInfo], seconds: float) -> None:
        self._seats = {seat.address: seat for seat in seats}
        self._nodes = nodes
        self._seconds = seconds
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._reports: dict[str, Report] = {}
        self._pending: dict[Any, str] = {}
        self._checked: list[str] = []
        self._master: Master | None = None
        self._told: set[str] = set()
        self._looked_at = self._began
        self.board = LaunchBoard(list(self._seats), self._began)

    @property
    def handles(self) -> dict[str, ActorHandle[Any]]:
        """What was started so far."""
        return dict(self._handles)

    def request(self, remote: Any, namespace: str, options: Mapping[str, Any]) -> None:
        """Ask for every process, in rank order."""
        for address, seat in self._seats.items():
            runtime_env: dict[str, Any] = {}
            if seat.early_variables:
                runtime_env["env_vars"] = seat.early_variables
            if seat.interpreter is not None:
                runtime_env["py_executable"] = seat.interpreter
            self._handles[address] = start_process(remote, address, namespace, runtime_env, **seat.schedule, **options)

    def run(
        self,
        made_of: Any,
        view: LaunchView,
        site: LaunchSite,
        *,
        is_restart: bool,
    ) -> dict[str, Member]:
        """Take every worker to the end; raises with what went wrong, and leaves the undoing to the caller."""
        self._site, self._made_of = site, made_of
        self._master = site.take_master(None) if is_restart else None
        for address, seat in self._seats.items():
            ports = site.ports_to_try if seat.identity.rank == 0 and not is_restart else ()
            setup = seat.setup(site.run_dir, ports, is_restart=is_restart)
            begin: Any = self._handles[address]._roost_begin.remote(setup)
            self._pending[begin] = address
        while self._pending:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
            if not ready:
                ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=_TICK_SECONDS)
            for call in ready:
                self._take(call)
            view.update()
            self._tell_overdue(view)
            if self._pending:
                self._check_reservation()
            if self._pending and time.monotonic() >= self._deadline:
                raise self._timed_out()
            if self._pending and site.is_closing:
                raise ClusterError(f"closed while {join_words(self.board.late)} was being started")
        return {
            address: Member(handle=self._handles[address], report=self._reports[address]) for address in self._seats
        }

    def _take(self, call: Any) -> None:
        """One worker has come to the end of a phase."""
        address = self._pending.pop(call)
        try:
            report: Report = ray.get(call)
        except RayError as error:
            self._check_reservation(at_once=True)
            raise self._failed(error, address) from None
        now = time.monotonic()
        self._reports[address] = report
        if self.board.phase(address) is Phase.REQUESTED:
            self.board.advance(address, Phase.UP, now)
            self._site.note_report(address, report)
            self._check(address, report)
            self.board.advance(address, Phase.CHECKED, now)
            if self._master is None and self._seats[address].identity.rank == 0:
                self._master = self._site.take_master(report)
            self._checked.append(address)
            self._construct_checked()
        else:
            # Once more: the user's code may have changed what it sees.
            self._check(address, report)
            self.board.advance(address, Phase.READY, now)

    def _construct_checked(self) -> None:
        """Let those that are checked make their objects, once it is known where rank 0 listens."""
        if self._master is None:
            return
        for address in self._checked:
            now = time.monotonic()
            # Before the deadline, so that the stack is there when the error is made.
            overdue = max(0.05, (self._deadline - now) * _OVERDUE)
            construct: Any = self._handles[address]._roost_construct.remote(self._master, self._made_of, overdue)
            self._pending[construct] = address
            self.board.advance(address, Phase.CONSTRUCTING, now)
        self._checked.clear()

    def _check_reservation(self, *, at_once: bool = False) -> None:
        """Ray waits for ever for a place that is not the job's any more."""
        now = time.monotonic()
        if at_once or now - self._looked_at >= _LOOK_EVERY_SECONDS:
            self._looked_at = now
            lost = self._site.lost_reservation()
            if lost is not None:
                raise ReservationLost(
                    f"{join_words(self.board.late)} cannot be started: {lost}", hint="launch it again"
                )

    def _check(self, address: str, report: Report) -> None:
        found = differences(self._seats[address], report, self._nodes)
        if found:
            raise WrongPlace(
                [
                    Problem(message=f"{address} is not as planned: {text}", hint=f"its log is {report.log.path}")
                    for text in found
                ]
            )

    def _failed(self, error: BaseException, address: str) -> Exception:
        """The error for the caller, after a moment in which others may fail too."""
        failures = [self._site.describe(error, address)]
        calls = list(self._pending)
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=_GRACE_SECONDS) if calls else ([], [])
        for call in ended:
            other = self._pending.pop(call)
            try:
                ray.get(call)
            except RayError as second:
                failures.append(self._site.describe(second, other))
        phases = {self.board.phase(failure.address) for failure in failures}
        doing = "while it was being made" if Phase.CONSTRUCTING in phases else "while its process started"
        return make_error(failures, doing)

    def _tell_overdue(self, view: LaunchView) -> None:
        """Say once for each worker, with its stack, that it takes most of the time that there is."""
        if time.monotonic() < self._began + (self._deadline - self._began) * (_OVERDUE + 0.05):
            return
        for address in [address for address in self.board.late if address not in self._told]:
            self._told.add(address)
            view.say(self._where(address))

    def _where(self, address: str) -> str:
        seat = self._seats[address]
        seconds = time.monotonic() - self.board.since(address)
        phase = self.board.phase(address)
        text = f"{address} on {seat.node}: {phase} for {seconds:.1f} s"
        if phase is Phase.REQUESTED:
            return f"{text}: its process is not up yet, or does not answer"
        path, stack = self._site.read_stack(address)
        indented = "".join(f"\n      {line}" for line in stack.splitlines())
        return f"{text}, log {path}{indented}"

    def _timed_out(self) -> LaunchTimedOut:
        late = self.board.late
        shown = [f"  {self._where(address)}" for address in late[:8]]
        more = [f"  and {len(late) - 8} more"] if len(late) > 8 else []
        first = f"{len(late)} of {len(self._seats)} workers were not ready after {self._seconds:g} s:"
        return LaunchTimedOut(
            "\n".join([first, *shown, *more]),
            hint="give launch a longer timeout, or see what they wait for; what was started has been stopped",
        )
