"""Starts the workers of a group: all together, phase by phase, checked from inside, undone if one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from roost.deadline import Deadline
from roost.errors import ClusterError, LaunchTimedOut, NameTaken, Problem, ReservationLost, WrongPlace
from roost.runtime.connect.calls import get, on_node
from roost.runtime.connect.head import noticing_loss, within
from roost.runtime.events.waits import waiting
from roost.runtime.failures.failure import make_error
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.launch.plan import differences
from roost.runtime.launch.progress import LaunchBoard, Phase
from roost.runtime.limits import ASK_SECONDS, GRACE_SECONDS, LAUNCH_TICK_SECONDS, LOST_LOOK_SECONDS
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.nodes.log_forwarder import Elsewhere
from roost.runtime.nodes.placement_groups import schedule_in, take_share
from roost.runtime.process.identity import Master
from roost.runtime.process.output import read_stack
from roost.runtime.process.spec import Report, WorkerSpec
from roost.runtime.reserve.reservation import describe_loss
from roost.text import join_words

_OVERDUE = 0.8
"""The part of the timeout after which a worker that is not ready is asked where it is."""
_CANDIDATES = 8
"""How many ports are proposed for a group: processes outside the job may use some of them."""


def start_actor(
    remote: Any, name: str, namespace: str, *args: Any, seconds: float = ASK_SECONDS, **options: Any
) -> ActorHandle[Any]:
    """Start an actor where the options say; NameTaken if the name is in use, ClusterError after some seconds."""
    # The visible-devices variable says which accelerators it sees: Ray's own count would choose others.
    options = {"num_cpus": 0, "num_gpus": 0, **options}
    try:
        named = remote.options(name=name, namespace=namespace, **options)
        handle: ActorHandle[Any] = within(seconds, lambda: named.remote(*args), "start an actor", undo=ray.kill)
    except ValueError as error:
        if "already" not in str(error):
            raise
        raise NameTaken(
            f"a worker named {name!r} exists already",
            hint="names are unique in a job: close() the group that has it, launch(…, replace=True) in a cell of a "
            "notebook that runs again, or choose another",
        ) from None
    return handle


class GroupPort:
    """The port at which a group meets, torch's MASTER_PORT: candidates at first, then the chosen one.

    Rank 0 tries the candidates in its own process, which saves starting one for that.
    """

    def __init__(self, node_manager: NodeManager, node_rank: int, holder: str | None) -> None:
        self._node_manager = node_manager
        self._node_rank = node_rank
        self._holder = holder
        self._leases: list[PortLease] = []
        self.master: Master | None = None
        """Where rank 0 listens, once the port is chosen."""

    def propose(self, deadline: Deadline) -> tuple[int, ...]:
        """Lease candidates, and return the ports for rank 0 to try."""
        self._leases = self._node_manager.until(deadline).propose_ports(self._node_rank, _CANDIDATES, self._holder)
        return tuple(lease.port for lease in self._leases)

    def choose(self, free_port: int | None, deadline: Deadline) -> None:
        """Keep the candidate that rank 0 found free and release the others; lease another if none was free."""
        manager = self._node_manager.until(deadline)
        # If that fails, all are still to be released.
        manager.release_ports([lease for lease in self._leases if lease.port != free_port])
        self._leases = [lease for lease in self._leases if lease.port == free_port]
        if not self._leases:
            self._leases = [manager.lease_ports(self._node_rank, 1, self._holder)]
        self.master = Master(address=self._leases[0].address, port=self._leases[0].port)

    def release(self, deadline: Deadline) -> None:
        """Release everything."""
        if self._leases:
            self._node_manager.until(deadline).release_ports(self._leases)
            self._leases = []


@dataclass(kw_only=True, eq=False)
class Launch:
    """One launch of some workers, from the request to all of them being ready.

    `request` asks Ray for the processes without waiting; `run` takes them through their phases.
    """

    context: JobControl
    specs: Sequence[WorkerSpec]
    slots: Sequence[Slot]
    """The accelerators that are reserved for the group."""
    port: GroupPort
    stopped: threading.Event
    """Set when the group is closed meanwhile."""
    constructor: Any
    """The user's class and its arguments, packed."""
    seconds: float
    predecessor: int | None
    """The process that a worker replaces which is started again."""

    def __post_init__(self) -> None:
        """Begin to count the time."""
        self.deadline = Deadline.after(self.seconds)
        """When all must be ready."""
        self._look_again = Deadline.after(LOST_LOOK_SECONDS)
        self.handles: dict[str, ActorHandle[Any]] = {}
        """The actors started so far."""
        self._by_address = {spec.address: spec for spec in self.specs}
        self._reports: dict[str, Report] = {}
        self._pending: dict[Any, str] = {}
        self._checked: list[str] = []
        self._named_overdue: set[str] = set()
        self._name = self.specs[0].identity.group_name
        self.board = LaunchBoard(self.context.console, self._name, list(self._by_address), time.monotonic())

    def request(self, remote: Any, max_concurrency: int | None) -> None:
        """Ask for every process, in rank order."""
        reserved = {(slot.piece.node_rank, slot.piece.local_rank): slot for slot in self.slots}
        for address, spec in self._by_address.items():
            options: dict[str, Any] = {"scheduling_strategy": on_node(spec.ray_id)}
            if reserved and spec.accelerators:
                first = reserved[spec.node_rank, spec.accelerators[0]]
                options = take_share(spec.resource, spec.share) if spec.share is not None else {}
                options["scheduling_strategy"] = schedule_in(first.group, first.bundle)
            wanted = {"env_vars": spec.early_variables, "py_executable": spec.interpreter}
            if runtime_env := {name: value for name, value in wanted.items() if value}:
                options["runtime_env"] = runtime_env
            if max_concurrency is not None:
                options["max_concurrency"] = max_concurrency
            self.handles[address] = start_actor(
                remote, address, self.context.job.namespace, seconds=self.deadline.left, **options
            )

    def run(self, ports: Sequence[int] = ()) -> Mapping[str, Report]:
        """Take every worker to the end and return their reports; the caller undoes a launch that fails.

        Rank 0 tries the ports.
        """
        for address, spec in self._by_address.items():
            to_try = ports if spec.identity.rank == 0 else ()
            begin: Any = self.handles[address]._roost_begin.remote(spec, self.predecessor, to_try)
            self._pending[begin] = address
        with waiting(lambda: f"the launch of {self._name}", details=self._details):
            self._advance_all()
        return self._reports

    def _details(self) -> tuple[str, list[str]]:
        return f"the launch of {self._name!r} ({self.board.summary}), not ready", self.board.late

    def _advance_all(self) -> None:
        while self._pending:
            self.context.check_open()
            with noticing_loss():
                ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
                if not ready:
                    ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=LAUNCH_TICK_SECONDS)
            for call in ready:
                self._advance(call)
            self.board.update()
            if self.deadline.left <= self.seconds * (1 - _OVERDUE - 0.05):
                # Each worker that has used up most of the timeout, once, with its stack.
                for address in [late for late in self.board.late if late not in self._named_overdue]:
                    self._named_overdue.add(address)
                    self.board.say(self._where(address))
            if self._pending and self._look_again.is_over:
                self._check_reservation()
            if self._pending and self.deadline.is_over:
                late = self.board.late
                lines = [f"{len(late)} of {len(self._by_address)} workers were not ready after {self.seconds:g} s:"]
                lines += map(self._where, late[:8])
                lines += [f"and {len(late) - 8} more"] if len(late) > 8 else []
                hint = "give launch a longer timeout, or see what they wait for; everything that was started is stopped"
                raise with_meanwhile(LaunchTimedOut("\n  ".join(lines), hint=hint))
            if self._pending and self.stopped.is_set():
                raise ClusterError(f"closed while {join_words(self.board.late)} was being started")

    def _advance(self, call: Any) -> None:
        """Take one worker from the end of a phase to the next."""
        address = self._pending.pop(call)
        spec = self._by_address[address]
        try:
            report: Report = get(call)
        except RayError as error:
            self._check_reservation()
            raise self._failed(error, address) from None
        now = time.monotonic()
        self._reports[address] = report
        is_constructed = self.board.entered[address][0] is Phase.CONSTRUCTING
        if not is_constructed:
            self.board.advance(address, Phase.UP, now)
            if not report.log.is_shared:
                self.context.logs.fetch(Elsewhere(report.ray_id, spec.node_rank, address, report.log.path))
        # Checked a second time after its constructor, because the user's code may have changed what it sees.
        if found := differences(spec, report, self.context.nodes):
            hint = f"its log is {report.log.path}"
            raise WrongPlace([Problem(message=f"{address} is not as planned: {text}", hint=hint) for text in found])
        if is_constructed:
            self.board.advance(address, Phase.READY, now)
            return
        self.board.advance(address, Phase.CHECKED, now)
        if self.port.master is None and spec.identity.rank == 0:
            self.port.choose(report.free_port, self.deadline)
        self._checked.append(address)
        # They construct their objects as soon as rank 0's port is known.
        while self.port.master is not None and self._checked:
            checked = self._checked.pop(0)
            # Before the deadline, so that the stack is in the log when the error is made.
            overdue = max(0.05, self.deadline.left * _OVERDUE)
            construct: Any = self.handles[checked]._roost_construct.remote(
                self._by_address[checked], self.port.master, self.constructor, overdue
            )
            self._pending[construct] = checked
            self.board.advance(checked, Phase.CONSTRUCTING, time.monotonic())

    def _check_reservation(self) -> None:
        """Raise if a slot is lost, for which Ray would wait forever."""
        self._look_again = Deadline.after(LOST_LOOK_SECONDS)
        own = {(spec.node_rank, local) for spec in self.specs for local in spec.accelerators}
        slots = [slot for slot in self.slots if (slot.piece.node_rank, slot.piece.local_rank) in own]
        lost = describe_loss(self.context, slots)
        if lost is not None:
            late = join_words(self.board.late)
            raise ReservationLost(f"{late} cannot be started: {lost}", hint="launch it again")

    def _failed(self, error: BaseException, address: str) -> Exception:
        """Make the error for the caller, after a moment in which others may fail too."""
        failures = [self.context.describe(self._by_address[address].identity, error)]
        calls = list(self._pending)
        with noticing_loss():
            ended, _ = ray.wait(calls, num_returns=len(calls), timeout=GRACE_SECONDS) if calls else ([], [])
        for call in ended:
            other = self._pending.pop(call)
            try:
                ray.get(call)
            except RayError as second:
                failures.append(self.context.describe(self._by_address[other].identity, second))
        phases = {self.board.entered[failure.address][0] for failure in failures}
        doing = "while it was being constructed" if Phase.CONSTRUCTING in phases else "while its process started"
        self.context.failures.saw(failures)
        return with_meanwhile(make_error(failures, doing))

    def _where(self, address: str) -> str:
        phase, since = self.board.entered[address]
        text = f"{address} on {self._by_address[address].identity.node}: {phase} for {time.monotonic() - since:.1f} s"
        if phase is Phase.REQUESTED:
            return f"{text}: its process is not up yet, or does not answer"
        self.context.logs.catch_up()
        path = self.context.log_path(address)
        indented = "".join(f"\n      {line}" for line in read_stack(path).splitlines())
        return f"{text}, log {path}{indented}"
