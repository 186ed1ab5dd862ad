"""`Cluster`: the object that owns a job's presence on Ray.

    with Cluster(num_nodes=2) as cluster:
        print(cluster.topology.num_accelerators)

It joins the Ray cluster that is running or starts one here, waits for the nodes, finds out what they have, gives them
their ranks, and starts the job's managers. `Cluster()` without arguments attaches to a job that is running.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle

from roost.config.job import ClusterConfig
from roost.config.node_groups import NodeGroup
from roost.config.topology import Topology
from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError, NameTaken
from roost.placement.plan import Plan
from roost.placement.strategies import PlacementStrategy
from roost.runtime.connect import connection
from roost.runtime.connect.calls import end_actors, is_worker
from roost.runtime.connect.connection import Connection
from roost.runtime.connect.stop import Stop
from roost.runtime.events.emitter import EVENTS_VARIABLE, emitter, start_driver_events
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.launch.allocate import allocate
from roost.runtime.limits import (
    CLOSE_DISCONNECT_SECONDS,
    CLOSE_STEP_SECONDS,
    CLUSTER_CLOSE_SECONDS,
    MEANWHILE_EVERY_SECONDS,
    RESERVE_SECONDS,
    TIMEOUT_SECONDS,
)
from roost.runtime.managers.collective_manager import CollectiveManager
from roost.runtime.managers.context import JobContext, process_lock
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.job_info import JobInfo
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.namespaces import (
    Managers,
    choose_namespace,
    find_job,
    find_managers,
    job_namespaces,
    start_managers,
    used_namespaces,
)
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.log_forwarder import LogForwarder
from roost.runtime.nodes.ray_state import name_of_job
from roost.runtime.options import ClusterOptions
from roost.runtime.reserve.pool import Pool, reserve_seats
from roost.runtime.reserve.reservation import Reservation, check_timeout
from roost.runtime.reserve.reserver import reserve_plan
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import own_run_dir
from roost.runtime.runs.recorder import Recorder
from roost.text import join_words, plural

log: logging.Logger = logging.getLogger(__name__)

_MAX_TRIES = 100


class _on_the_cluster:  # noqa: N801 - a decorator
    """A method that can be called on the class too, as the specification does: it then uses this process's Cluster."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, cluster: Cluster | None, owner: type[Cluster]) -> Callable[..., Any]:
        @functools.wraps(self._function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Only a call asks for the Cluster: looking at the class must not connect to anything.
            return self._function(cluster or owner(), *args, **kwargs)

        return call


class Cluster:
    """A job's presence on Ray: connection, nodes in order, node groups, managers.

    - `num_nodes`: how many nodes to wait for; if there are more, the first ones are used.
    - `cluster_cfg`: the `cluster` section of a config, or a `ClusterConfig`, for num_nodes and node groups.
    - neither: attach to the job that this process belongs to, or to the only one that is running.
    - `address`: Ray's address; by default RAY_ADDRESS, else the local cluster, else the cluster of this machine.
    - `namespace`: the job's namespace; a second job on the same Ray gets one automatically.
    - `timeout`: seconds until the cluster must be complete.
    - `port_range`: first and last port to lease from, on every node.
    - `run_dir`: the run's folder, for the workers' logs; by default a new one in ROOST_RUNS_DIR or the user's folder.
    - `quiet`: do not show launches and what workers print; by default as ROOST_QUIET says.
    - `working_dir`: a folder with your code that Ray copies to every node; workers start in the copy.
    - `record`: keep a record of the run in its folder, for `roost runs` and `roost show`, unless it is False.
    """

    NAMESPACE = "roost"
    """The namespace of a job that is alone on its Ray."""

    context: JobControl
    """The job as launching, reserving and calling take it."""
    namespace: str
    """The job's namespace on Ray."""
    address: str
    """Ray's address."""
    topology: Topology
    """Nodes, accelerators and node groups as the planner takes them."""
    nodes: tuple[NodeInfo, ...]
    """The nodes, in the order of their ranks."""
    num_nodes: int
    """How many nodes the job has."""
    num_accelerators: int
    """How many accelerators there are on all nodes."""
    accelerator_ranks: tuple[tuple[int, ...], ...]
    """The hardware ranks of each node's accelerators, counted over the cluster."""
    master_address: str
    """The address of node 0."""
    master_port: int
    """A port on node 0 that is leased for the job."""
    job: JobInfo
    """Who runs the job, and where its run's folder is."""
    run_dir: str
    """The run's folder on the driver's machine, which has the workers' logs."""
    logs: LogForwarder
    """The thread that fetches and shows the workers' logs."""
    recorder: Recorder
    """The writer of the run's record."""
    node_manager: NodeManager
    """The proxy to the job's node manager."""
    worker_manager: WorkerManager
    """The proxy to the job's worker manager."""
    _current: Cluster | None = None

    def __new__(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | ClusterConfig | None = None,
        *,
        address: str | None = None,
        namespace: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        port_range: tuple[int, int] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        quiet: bool | None = None,
        record: bool | None = None,
        working_dir: str | os.PathLike[str] | None = None,
    ) -> Cluster:
        """Return the Cluster that this process has, or open or attach to one: a process has one at a time."""
        with process_lock:
            current = Cluster._current
            options = ClusterOptions.check(
                num_nodes,
                cluster_cfg,
                address=address,
                namespace=namespace,
                timeout=timeout,
                port_range=port_range,
                run_dir=run_dir,
                quiet=quiet,
                record=record,
                working_dir=working_dir,
            )
            # A fork has the object of its parent, but not its connection.
            if current is not None and current._pid == os.getpid():
                current._check_same(current.context, options)
                return current
            made = super().__new__(cls)
            made._begin(options)
            return made

    def _begin(self, options: ClusterOptions) -> None:
        """Open a job, or attach to one; what was done is undone if that fails."""
        self._pid = os.getpid()
        self._options = options
        self.recorder = Recorder()
        # How to undo each step, last first, whatever goes wrong on the way.
        self._undo = contextlib.ExitStack()
        self._handlers = contextlib.ExitStack()
        self._close_by = Deadline(0.0)
        self._stop = Stop(self.recorder.note_signal)
        deadline = Deadline.after(options.timeout)
        try:
            # An actor that another program started may have no job of Roost, and open one.
            if is_worker() and (options.attaches or ray.get_runtime_context().namespace in job_namespaces()):
                context = JobContext.attach(deadline)
                manager = CollectiveManager.get_proxy(context.job.namespace)
            else:
                connection.check_can_connect(may_borrow=not options.attaches)
                # Undone last.
                self._handlers.enter_context(self._stop.on_sigterm())
                made, managers = self._attach(options) if options.attaches else self._open(options, deadline)
                # While the managers start.
                connection.prepare_disconnect()
                node_manager, worker_manager, manager = managers
                owner = name_of_job(made.ray_job) if options.attaches else None
                context = JobContext.join(node_manager, worker_manager, made, owner, deadline)
            control = JobControl.over(context, manager, Console(quiet=options.quiet), self.recorder, self._stop)
            if control.connection is None:
                # A mistake in the arguments must not end what the worker talks through.
                self._check_same(control, options)
            for end in (control.watch.stop, control.logs.stop, control.leave, lambda: self._close_groups(control)):
                self._undo.callback(end)
            if control.connection is not None:
                control.long_waits.start()
                self._undo.callback(control.long_waits.stop)
            if control.owner is None:
                control.watch.add_managers(managers)
                control.failures.on_new = self.recorder.note_failure
                control.watch.add_look(control.failures.look, MEANWHILE_EVERY_SECONDS)
                self._undo.callback(self._look_last, control)
            control.make_current()
            self.context = control
            self.job, self.nodes, self.topology = control.job, control.nodes, control.topology
            self.namespace, self.address, self.run_dir = self.job.namespace, self.job.cluster, self.job.run_dir.path
            self.node_manager, self.worker_manager = control.node_manager, control.worker_manager
            self.master_address, self.master_port = self.nodes[0].address, control.master_port
            self.num_nodes, self.num_accelerators = len(self.nodes), self.topology.num_accelerators
            ends = itertools.accumulate(node.num_accelerators for node in self.nodes)
            self.accelerator_ranks = tuple(
                tuple(range(end - node.num_accelerators, end)) for node, end in zip(self.nodes, ends, strict=True)
            )
            self.logs = control.logs
            Cluster._current = self
            atexit.register(self._close_at_exit)
        except BaseException as error:
            self.recorder.note_error(error)
            self.close()
            raise

    def _open(self, options: ClusterOptions, deadline: Deadline) -> tuple[Connection, Managers]:
        """Make a job: connect, find the nodes, start the managers."""
        if ray.is_initialized():
            made = connection.borrow(options.address, options.namespace, options.working_dir, self.close)
            self._undo.callback(lambda: connection.disconnect(made))
            return made, self._start_job(made, options, deadline)
        namespace = options.namespace or Cluster.NAMESPACE
        for _ in range(_MAX_TRIES):
            # A Ray that is started here has one node, which no other machine can reach.
            made = self._connect(options, namespace, may_start=options.num_nodes in (None, 1))
            free = choose_namespace(namespace, used_namespaces())
            if free == namespace:
                try:
                    return made, self._start_job(made, options, deadline)
                except NameTaken:
                    # Two drivers began together, and the other one was faster.
                    free = choose_namespace(namespace, {*used_namespaces(), namespace})
            if options.namespace is not None:
                raise NameTaken(
                    f"another job has namespace {options.namespace!r}",
                    hint=f"attach to it with Cluster(namespace={options.namespace!r}), or choose another name",
                )
            self._undo.close()
            namespace = free
        raise ClusterError(f"no free namespace after {_MAX_TRIES} tries")

    def _connect(self, options: ClusterOptions, namespace: str, *, may_start: bool) -> Connection:
        made = connection.connect(
            options.address,
            namespace,
            may_start=may_start,
            timeout=options.timeout,
            num_nodes=options.num_nodes or 1,
            working_dir=options.working_dir,
        )
        self._undo.callback(lambda: connection.disconnect(made, max(CLOSE_DISCONNECT_SECONDS, self._seconds_left)))
        return made

    def _start_job(self, made: Connection, options: ClusterOptions, deadline: Deadline) -> Managers:
        found = discover.wait_for_nodes(options.num_nodes or 1, deadline)
        if options.preload:
            # Before any process of the job starts there.
            discover.preload(found, options.preload)
        nodes, notice = discover.discover(found, deadline, options.groups, options.num_nodes)
        if notice:
            log.warning("%s", notice)
        topology = discover.make_topology(nodes, options.groups)
        discover.check_groups(nodes, options.groups, deadline)
        run_dir = self._undo.enter_context(own_run_dir(options.run_dir))
        keeps_record = options.record is not False
        keeps_events = keeps_record and os.environ.get(EVENTS_VARIABLE) != "off"
        job = JobInfo.of_this_process(made.address, made.namespace, run_dir, keeps_events=keeps_events)
        if job.keeps_events:
            start_driver_events(job.run_dir)
            self._undo.callback(emitter.stop)
        self._undo.callback(self.recorder.end)
        managers = start_managers(job, nodes, options.groups, options.port_range)
        handles = {manager.NAME: manager.handle for manager in managers}
        # Callers of `close` rely on the names being free.
        self._undo.callback(lambda: made.is_alive and end_actors(handles, Deadline.after(self._seconds_left)))
        if keeps_record:
            self.recorder.begin(job, nodes, topology)
        return managers

    def _attach(self, options: ClusterOptions) -> tuple[Connection, Managers]:
        """Join the job that is running, or the one of several that is asked for."""
        # Connect to a namespace without a job first, to see which jobs there are.
        self._connect(options, f"{Cluster.NAMESPACE}-attach-{os.getpid()}", may_start=False)
        namespace = find_job(options.namespace)
        self._undo.close()
        return self._connect(options, namespace, may_start=False), find_managers(namespace)

    def _check_same(self, context: JobControl, options: ClusterOptions) -> None:
        """Raise ConfigError if the arguments contradict the job that this process has."""
        address = options.address if options.address not in ("auto", self._options.address) else None
        record = options.record if context.owner is None else None
        asked_and_ours = {
            "num_nodes": (options.num_nodes, len(context.nodes)),
            "the namespace": (options.namespace, context.job.namespace),
            "the address": (address, context.job.cluster),
            "port_range": (options.port_range, context.port_range),
            "run_dir": (options.run_dir and os.path.abspath(options.run_dir), context.run_dir.path),
            "quiet": (options.quiet, context.console.quiet),
            "record": (record, self._options.record is not False),
        }
        contradictions = [
            f"{what} is {ours!r}, not {asked!r}"
            for what, (asked, ours) in asked_and_ours.items()
            if asked is not None and asked != ours
        ]
        if options.groups and options.groups != context.topology.groups:
            contradictions.append("the node groups differ")
        if contradictions:
            raise ConfigError(
                f"this process has a Cluster, and {join_words(contradictions)}",
                hint="leave the arguments out to get the existing one, or close() it first",
            )

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return not self.context.is_closed.is_set()

    @property
    def dead_nodes(self) -> tuple[int, ...]:
        """The ranks of nodes that have gone since the Cluster was made, as far as is known."""
        return self.context.watch.dead_nodes

    def get_node_group(self, label: str) -> NodeGroup:
        """Return a node group by its label."""
        return self.topology.group(label)

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """Return what is known about a node."""
        return self.context.node(node_rank)

    def get_node_ip(self, node_rank: int) -> str:
        """Return the address of a node."""
        return self.context.node(node_rank).address

    def lease_ports(self, node_rank: int, count: int = 1, holder: str | None = None) -> PortLease:
        """Lease consecutive ports on a node; `holder` is the worker whose death releases them, by default the job."""
        self.context.check_open()
        if holder is None and self.context.connection is None:
            holder = ray.get_runtime_context().get_actor_name() or None
        return self.node_manager.lease_ports(self.context.node(node_rank).rank, count, holder)

    def release_ports(self, lease: PortLease) -> None:
        """Release a lease."""
        self.context.check_open()
        self.node_manager.release_ports([lease])

    @_on_the_cluster
    def allocate(
        self,
        cls: type,
        worker_name: str,
        node_id: int,
        gpu_id: int | None,
        env_vars: Mapping[str, str] | None = None,
        cls_args: Sequence[Any] = (),
        cls_kwargs: Mapping[str, Any] | None = None,
    ) -> ActorHandle[Any]:
        """Start an actor of `cls` on a node and return its handle without waiting.

        `node_id` is a node's rank. `gpu_id` is the local rank of the accelerator that the actor sees; with None it
        sees all of its node. The environment is set before the module of `cls` is imported there.
        """
        return allocate(self.context, cls, worker_name, node_id, gpu_id, env_vars or {}, cls_args, cls_kwargs or {})

    def reserve(
        self, plan: Plan, *, shares: Mapping[str, float] | None = None, timeout: float = RESERVE_SECONDS
    ) -> Reservation:
        """Reserve every accelerator of a plan, all or none; groups that are launched on them afterwards share them.

        `shares` says what part of an accelerator a worker of each component uses; on one accelerator they add up to at
        most 1. Accelerators that other jobs hold are waited for until `timeout`.
        """
        return reserve_plan(self.context, plan, shares or {}, timeout=timeout)

    def reserve_seats(
        self,
        seats: Sequence[int] | PlacementStrategy | Plan,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Pool:
        """Reserve seats to launch groups into, all or none, before it is known which groups go where.

        - `seats`: how many processes on each node, by node rank, with one free accelerator each (a node without
          accelerators gives CPU seats); or a strategy, one seat for each of its processes; or a plan, one seat for each
          of its accelerators.
        - `name`: the pool's name in messages and in `roost status`.
        - `timeout`: seconds to wait for accelerators that are taken, by default as long as `reserve` does.
        """
        return reserve_seats(
            self.context, seats, "pool" if name is None else name, RESERVE_SECONDS if timeout is None else timeout
        )

    def log_metric(self, name: str, value: float, step: float | None = None) -> None:
        """Add a value to a metric of the run, as `Worker.log_metric` does in a worker."""
        self.context.check_open()
        emitter.metric(str(name), float(value), None if step is None else float(step))

    def on_stop(self, callback: Callable[[], object], *, seconds: float = 30.0) -> None:
        """Call a function when SIGTERM or Ctrl-C ends this driver, while all workers still run: for a checkpoint.

        `seconds` is how long it may take: after SIGTERM the process has that long, and one minute for the rest.
        """
        self.context.check_open()
        check_timeout(seconds)
        if self.context.connection is None:
            raise ClusterError("on_stop is for the driver: a worker ends when its group is closed")
        self._stop.add(callback, seconds)

    def close(self) -> None:
        """End what this job started, and only that; then disconnect."""
        if self._pid == os.getpid():
            self._stop.run_hooks()
        with process_lock:
            atexit.unregister(self._close_at_exit)
            if Cluster._current is self:
                Cluster._current = None
            context: JobControl | None = getattr(self, "context", None)
            if context is not None:
                context.is_closed.set()
            if self._pid == os.getpid():
                self._close_by = Deadline.after(CLUSTER_CLOSE_SECONDS)
                self.recorder.note_close()
                with self._handlers:
                    self._undo.close()

    @classmethod
    def close_if_open(cls, address: str | None = None) -> None:
        """Close this process's Cluster, if there is one; with an address, only if it is on that Ray."""
        current = cls._current
        if current is not None and address in (None, current.address):
            current.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                with_meanwhile(error)
        finally:
            self.recorder.note_error(error)
            self.close()

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"<Cluster {plural(self.num_nodes, 'node')}, {plural(self.num_accelerators, 'accelerator')}{state}>"

    def _close_at_exit(self) -> None:
        self.recorder.note_exit()
        if self._pid == os.getpid() and not hasattr(sys, "ps1"):
            self._stop.run_hooks(getattr(sys, "last_value", None))
        self.close()

    @property
    def _seconds_left(self) -> float:
        """How long a step of `close` may take: all of them share one deadline."""
        return max(CLOSE_STEP_SECONDS, self._close_by.left)

    def _close_groups(self, context: JobControl) -> None:
        if context.actors and context.is_reachable:
            end_actors(context.actors, Deadline.after(self._seconds_left))
        context.actors.clear()
        for close in reversed(list(context.open_groups.values())):
            try:
                # The steps after the groups need time, too.
                close(self._seconds_left / 2)
            except ClusterError as error:
                # Disconnecting ends the job on Ray, which ends its workers.
                log.error("%s", error)
        context.open_groups.clear()

    def _look_last(self, context: JobControl) -> None:
        """Let the record have what failed before the groups end."""
        if context.is_reachable:
            context.failures.look(is_last=True)
