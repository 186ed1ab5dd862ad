"""`Cluster`: the one object that owns a job's presence on Ray.

    with Cluster(num_nodes=2) as cluster:
        print(cluster.topology.num_accelerators)

It starts Ray here or joins the cluster that is there, waits for the nodes, finds out what they have, gives them
their ranks, and starts the job's managers. `Cluster()` without arguments attaches to a job that is running.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from roost.config.job import ClusterConfig
from roost.config.node_groups import NodeGroup
from roost.config.topology import Topology
from roost.errors import ClusterError, ConfigError, NameTaken
from roost.placement.fit import Components
from roost.placement.plan import Piece, Plan
from roost.runtime.connect import connection
from roost.runtime.launch import allocate as allocation
from roost.runtime.launch.log_forwarder import FoundLog, LogShow
from roost.runtime.launch.progress import Screen
from roost.runtime.managers.actors import start_managers
from roost.runtime.managers.ledgers.ports import PortLease
from roost.runtime.managers.namespaces import choose_namespace, find_job
from roost.runtime.managers.proxies import CollectiveManager, JobInfo, Manager, NodeManager, WorkerManager
from roost.runtime.managers.watch import Watch
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.ray_state import name_of_job
from roost.runtime.options import TIMEOUT_SECONDS, ClusterOptions
from roost.runtime.reserve.reservation import Reservation, check_timeout, plan_accelerators, plan_components
from roost.runtime.reserve.reserver import RESERVE_SECONDS, Reserver
from roost.runtime.runs.folder import own_run_dir
from roost.runtime.runs.recorder import Recorder
from roost.text import join_words, plural

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_MAX_TRIES = 100


class _OnePerProcess(type):
    """A process has one Cluster: asking for it again gives the one that is there."""

    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with cls._lock:
            current = Cluster._current
            # A fork has the object of its parent, and not its connection.
            if current is not None and current._pid == os.getpid():
                current._check_same(ClusterOptions.check(*args, **kwargs))
                return current
            return super().__call__(*args, **kwargs)


class _on_the_cluster:  # noqa: N801 - a decorator
    """A method that can be called on the class too, as the documents do: then this process's Cluster is meant."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, cluster: Cluster | None, owner: type[Cluster]) -> Callable[..., Any]:
        if cluster is not None:
            return MethodType(self._function, cluster)

        # Only a call asks for the Cluster: a look at the class must not connect to anything.
        @functools.wraps(self._function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._function(owner(), *args, **kwargs)

        return call


class Cluster(metaclass=_OnePerProcess):
    """A job's presence on Ray: connection, nodes in order, node groups, managers.

    - `num_nodes`: how many nodes to wait for; the first of them are used where there are more.
    - `cluster_cfg`: the section `cluster` of a config, or a `ClusterConfig`, for num_nodes and node groups.
    - neither: attach to the job that this process belongs to, or to the only one that is there.
    - `address`: where Ray is; else RAY_ADDRESS, else the practice cluster, else the cluster of this machine.
    - `namespace`: the job's own namespace; a second job on the same Ray gets one by itself.
    - `timeout`: seconds until the cluster has to be there.
    - `port_range`: first and last port to lease from, on every node.
    - `run_dir`: the run's folder, for the workers' logs; else a new one in ROOST_RUNS_DIR or this user's own folder.
    - `quiet`: do not show launches and what workers print; else as ROOST_QUIET says.
    - `record`: keep a record of the run in its folder, for `roost runs` and `roost show`, unless it is False.
    """

    NAMESPACE = "roost"
    """The namespace of a job that is alone on its Ray."""

    _current: Cluster | None = None

    def __init__(
        self,
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
    ) -> None:
        wish = ClusterOptions.check(
            num_nodes,
            cluster_cfg,
            address=address,
            namespace=namespace,
            timeout=timeout,
            port_range=port_range,
            run_dir=run_dir,
            quiet=quiet,
            record=record,
        )
        self._pid = os.getpid()
        self._is_open = False
        self._is_own_job = False
        self._keeps_record = wish.record is not False
        self._asked_address = wish.address
        self._allocated: dict[str, ActorHandle[Any]] = {}
        self._watch: Watch | None = None
        self._crews: dict[str, Callable[[], None]] = {}
        self._screen = Screen(quiet=wish.quiet)
        self._recorder = Recorder()
        self._nodes: tuple[NodeInfo, ...] = ()
        # What was done and has to be undone, the last first, whatever goes wrong on the way.
        self._undo = contextlib.ExitStack()
        deadline = time.monotonic() + wish.timeout
        try:
            self._is_worker = connection.is_worker()
            if self._is_worker:
                self._attach(ray.get_runtime_context().namespace, deadline)
                self._check_same(wish)
            elif wish.attaches:
                connection.check_can_connect()
                self._connect_and_attach(wish, deadline)
            else:
                connection.check_can_connect()
                self._open(wish, deadline)
            self._is_open = True
            Cluster._current = self
            atexit.register(self._close_at_exit)
        except BaseException as error:
            self._recorder.note_error(error)
            self.close()
            raise

    def _open(self, wish: ClusterOptions, deadline: float) -> None:
        """Make a job: connect, find the nodes, start the managers."""
        namespace = wish.namespace or Cluster.NAMESPACE
        for _ in range(_MAX_TRIES):
            self._connect(wish, namespace, may_start=True)
            free = choose_namespace(namespace, _used_namespaces())
            if free == namespace:
                self._find_nodes(wish, deadline)
                try:
                    self._start_managers(namespace, wish, deadline)
                    return
                except NameTaken:
                    # Two drivers began at once, and the other one was quicker.
                    free = choose_namespace(namespace, {*_used_namespaces(), namespace})
            if wish.namespace is not None:
                raise NameTaken(
                    f"another job has namespace {wish.namespace!r}",
                    hint=f"attach to it with Cluster(namespace={wish.namespace!r}), or choose another name",
                )
            self._undo.close()
            namespace = free
        raise ClusterError(f"no free namespace after {_MAX_TRIES} tries")

    def _connect(self, wish: ClusterOptions, namespace: str, *, may_start: bool) -> None:
        made = connection.connect(wish.address, namespace, may_start=may_start)
        self._undo.callback(connection.disconnect, made)
        self._connection = made
        self._address = made.address
        if made.started_ray:
            self._undo.enter_context(connection.ended_before_sigterm(self._close_at_sigterm))

    def _find_nodes(self, wish: ClusterOptions, deadline: float) -> None:
        found = discover.wait_for_nodes(wish.num_nodes or 1, deadline)
        nodes, notice = discover.first_nodes(discover.discover(found, deadline), wish.num_nodes)
        if notice:
            log.warning("%s", notice)
        self._topology = discover.make_topology(nodes, wish.groups)
        discover.check_groups(nodes, wish.groups, deadline)
        self._nodes = discover.with_hardware(nodes, wish.groups)
        self._groups = wish.groups
        self._port_range = wish.port_range

    def _start_managers(self, namespace: str, wish: ClusterOptions, deadline: float) -> None:
        self._job = JobInfo(
            cluster=self._address,
            namespace=namespace,
            host=socket.gethostname(),
            pid=os.getpid(),
            user=_user(),
            command=" ".join(sys.argv)[:200],
            since=time.time(),
            run_dir=self._undo.enter_context(own_run_dir(wish.run_dir)),
        )
        self._is_own_job = True
        self._undo.callback(self._recorder.end)
        managers = start_managers(namespace, self._nodes, self._groups, self._job, wish.port_range)
        self._undo.callback(self._end_job)
        if self._keeps_record:
            self._recorder.begin(self._job, self._nodes, self._topology)
        self._node_manager, self._worker_manager, self._collective_manager = managers
        self._watch = Watch(self._nodes, managers, self._connection)
        self._undo.callback(self._watch.stop)
        self._logs = LogShow(self._job.run_dir, self._screen, self)
        self._undo.callback(self._stop_logs)
        self._undo.callback(self._close_groups)
        # While the managers start.
        connection.prepare_disconnect()
        self._master_port = self._node_manager.get_view(_seconds_until(deadline)).master_port

    def _connect_and_attach(self, wish: ClusterOptions, deadline: float) -> None:
        # A look around first, from a namespace of nobody: which jobs are there?
        self._connect(wish, f"{Cluster.NAMESPACE}-attach-{os.getpid()}", may_start=False)
        namespace = find_job(wish.namespace)
        self._undo.close()
        self._connect(wish, namespace, may_start=False)
        connection.prepare_disconnect()
        self._attach(namespace, deadline)

    def _attach(self, namespace: str, deadline: float) -> None:
        """Take the shared state from the job's managers."""
        self._node_manager = NodeManager.get_proxy(namespace)
        self._worker_manager = WorkerManager.get_proxy(namespace)
        self._collective_manager = CollectiveManager.get_proxy(namespace)
        view = self._node_manager.get_view(_seconds_until(deadline))
        self._nodes, self._groups, self._job, self._master_port = view.nodes, view.groups, view.job, view.master_port
        self._port_range = view.port_range
        self._address = view.job.cluster
        self._topology = discover.make_topology(self._nodes, self._groups)
        self._logs = LogShow(self._job.run_dir, self._screen, None)
        self._undo.callback(self._close_groups)

    def _check_same(self, wish: ClusterOptions) -> None:
        """Refuse a wish that this Cluster does not fulfil."""
        contradictions = []
        if wish.num_nodes is not None and wish.num_nodes != self.num_nodes:
            contradictions.append(f"num_nodes is {self.num_nodes}, not {wish.num_nodes}")
        if wish.namespace is not None and wish.namespace != self.namespace:
            contradictions.append(f"the namespace is {self.namespace!r}, not {wish.namespace!r}")
        if wish.address not in (None, "auto", self._address, self._asked_address):
            contradictions.append(f"the address is {self.address}, not {wish.address}")
        if wish.port_range is not None and wish.port_range != self._port_range:
            contradictions.append(f"port_range is {self._port_range}, not {wish.port_range}")
        if wish.groups and wish.groups != self._groups:
            contradictions.append("the node groups differ")
        if wish.run_dir is not None and os.path.abspath(wish.run_dir) != self.run_dir:
            contradictions.append(f"run_dir is {self.run_dir}, not {wish.run_dir}")
        if wish.quiet is not None and wish.quiet != self._screen.quiet:
            contradictions.append(f"quiet is {self._screen.quiet}, not {wish.quiet}")
        if wish.record is not None and self._is_own_job and wish.record != self._keeps_record:
            contradictions.append(f"record is {self._keeps_record}, not {wish.record}")
        if contradictions:
            raise ConfigError(
                f"this process has a Cluster, and {join_words(contradictions)}",
                hint="leave the arguments out to get the one that is there, or close() it first",
            )

    @property
    def namespace(self) -> str:
        """The job's namespace on Ray."""
        return self._job.namespace

    @property
    def address(self) -> str:
        """Where Ray is."""
        return self._address

    @property
    def topology(self) -> Topology:
        """Nodes, accelerators and node groups as the planner takes them."""
        return self._topology

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """What is known of each node, in the order of their ranks."""
        return self._nodes

    @property
    def num_nodes(self) -> int:
        """How many nodes the job has."""
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """How many accelerators there are on all nodes."""
        return self._topology.num_accelerators

    @property
    def accelerator_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The hardware ranks of each node's accelerators, counted over the cluster."""
        out: list[tuple[int, ...]] = []
        for node in self._nodes:
            first = sum(len(ranks) for ranks in out)
            out.append(tuple(range(first, first + node.num_accelerators)))
        return tuple(out)

    @property
    def master_address(self) -> str:
        """The address of node 0."""
        return self._nodes[0].address

    @property
    def master_port(self) -> int:
        """A port on node 0 that was leased for the job."""
        return self._master_port

    @property
    def job(self) -> JobInfo:
        """Who runs the job, and where its run's folder is."""
        return self._job

    @property
    def run_dir(self) -> str:
        """The run's folder, on the driver's machine: the workers' logs are in it."""
        return self._job.run_dir.path

    @property
    def screen(self) -> Screen:
        """Where the user reads what goes on."""
        return self._screen

    @property
    def logs(self) -> LogShow:
        """What brings the workers' logs here and shows them."""
        return self._logs

    @property
    def recorder(self) -> Recorder:
        """What keeps the record of the run."""
        return self._recorder

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._is_open

    @property
    def node_manager(self) -> NodeManager:
        """The proxy to the job's node manager."""
        return self._node_manager

    @property
    def worker_manager(self) -> WorkerManager:
        """The proxy to the job's worker manager."""
        return self._worker_manager

    @property
    def dead_nodes(self) -> tuple[int, ...]:
        """The ranks of nodes that are gone since the Cluster was made, as far as is known now."""
        return self._watch.dead_nodes if self._watch else ()

    def get_node_group(self, label: str) -> NodeGroup:
        """A node group by its label."""
        return self._topology.group(label)

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """What is known of a node."""
        return self._nodes[self._check_node(node_rank)]

    def get_node_ip(self, node_rank: int) -> str:
        """The address of a node."""
        return self.get_node_info(node_rank).address

    def lease_ports(self, node_rank: int, count: int = 1, holder: str | None = None) -> PortLease:
        """Lease consecutive ports on a node; `holder` is the worker that they end with, else the job."""
        self.check_open()
        if holder is None and self._is_worker:
            holder = ray.get_runtime_context().get_actor_name() or None
        return self._node_manager.lease_ports(self._check_node(node_rank), count, holder)[0]

    def propose_ports(self, node_rank: int, count: int) -> list[PortLease]:
        """Lease single ports without a trial on their node: their holder tries them, and gives back the rest."""
        holder = (ray.get_runtime_context().get_actor_name() or None) if self._is_worker else None
        return self._node_manager.propose_ports(self._check_node(node_rank), count, holder)

    def release_ports(self, lease: PortLease) -> None:
        """Give a lease back."""
        self.check_open()
        self._node_manager.release_ports([lease])

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
        """Start an actor of `cls` on a node and give its handle at once.

        `node_id` is a node's rank. `gpu_id` is the local rank of the accelerator that the actor sees; with None it
        sees all of its node. The environment is in force before the module of `cls` is imported there.
        """
        self.check_open()
        seat = allocation.choose_seat(self._topology, self._check_node(node_id), gpu_id)
        if node_id in self.dead_nodes:
            raise ClusterError(f"{self._nodes[node_id]} is gone", hint="choose another node, or make a new Cluster")
        handle = allocation.start_actor(
            cls,
            worker_name,
            node=self._nodes[node_id],
            environment=allocation.make_environment(
                seat, env_vars or {}, f"{self._job.id}/{worker_name}", self._nodes[node_id]
            ),
            namespace=self.namespace,
            arguments=cls_args,
            keywords=cls_kwargs or {},
        )
        if not self._allocated:
            self._undo.callback(self._end_workers)
        self._allocated[worker_name] = handle
        allocation.register(self._worker_manager, worker_name, seat)
        return handle

    def reserve(
        self, plan: Plan, *, shares: Mapping[str, float] | None = None, timeout: float = RESERVE_SECONDS
    ) -> Reservation:
        """Reserve every accelerator of a plan, all or none; groups that are launched on them afterwards share them.

        `shares` says for components what part of an accelerator a worker uses, and is checked to add up. Where
        accelerators are somebody else's they are waited for until `timeout`.
        """
        self.check_open()
        check_timeout(timeout)
        if not isinstance(plan, Plan):
            raise ConfigError(f"reserve takes a Plan, not a {type(plan).__name__}", hint="make_plan(config, cluster)")
        for component in plan.components:
            plan.get_strategy(component.name).get_placement(self)
        # Each group declares its share when it is launched.
        pieces = dict.fromkeys(plan_accelerators(plan, shares or {}))
        return self.reserve_accelerators("plan", pieces, plan_components(plan), timeout=timeout)

    def reserve_accelerators(
        self, name: str, shares: Mapping[Piece, float | None], components: Components, *, timeout: float
    ) -> Reservation:
        """Reserve accelerators under a name, with the part of each that is used; `components` is for messages."""
        user = f"{name}#{secrets.token_hex(4)}"
        if not shares:
            return Reservation(self, user, ())
        slots = Reserver(self, user).reserve(shares, timeout=timeout, components=components)
        return Reservation(self, user, slots)

    @property
    def owner_name(self) -> str | None:
        """Who this process is to the job, if it can end before the job does: a worker, or one that attached."""
        context = ray.get_runtime_context()
        if self._is_worker:
            return context.get_actor_name() or name_of_job(context.get_job_id())
        return None if self._is_own_job else name_of_job(context.get_job_id())

    def keep_group(self, name: str, close: Callable[[], None]) -> None:
        """Close a group with this Cluster, at the latest."""
        self._crews[name] = close
        self._logs.start()

    def forget_group(self, name: str, close: Callable[[], None]) -> None:
        """A group is closed."""
        if self._crews.get(name) == close:
            del self._crews[name]

    def close(self) -> None:
        """End what this job started, and only that; then give the connection back."""
        with _OnePerProcess._lock:
            atexit.unregister(self._close_at_exit)
            self._is_open = False
            if Cluster._current is self:
                Cluster._current = None
            if self._pid == os.getpid():
                self._recorder.note_close()
                self._undo.close()
                WorkerManager.forget_registrations()

    @classmethod
    def close_if_open(cls, address: str | None = None) -> None:
        """Close this process's Cluster, if there is one, on that Ray if an address is given."""
        current = cls._current
        if current is not None and address in (None, current.address):
            current.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.note_error(error)
        self.close()

    def _close_at_exit(self) -> None:
        self._recorder.note_exit()
        self.close()

    def _close_at_sigterm(self) -> None:
        self._recorder.note_signal("SIGTERM")
        self.close()

    def __repr__(self) -> str:
        state = "" if self._is_open else ", closed"
        return f"<Cluster {plural(self.num_nodes, 'node')}, {plural(self.num_accelerators, 'accelerator')}{state}>"

    def _close_groups(self) -> None:
        for close in reversed(list(self._crews.values())):
            close()
        self._crews.clear()

    def _stop_logs(self) -> None:
        self._logs.stop()

    def logs_elsewhere(self) -> list[FoundLog]:
        """The logs of workers that are on their own nodes only."""
        workers = self._worker_manager.get_workers()
        return [
            FoundLog(ray_id=self._nodes[worker.node_rank].ray_id, address=worker.address, path=worker.log)
            for worker in workers
            if worker.log
        ]

    def _end_workers(self) -> None:
        ended = dict(self._allocated)
        self._allocated.clear()
        if self.is_connected():
            for handle in reversed(ended.values()):
                ray.kill(handle)
            connection.wait_for_names_to_go(set(ended), _CLOSE_SECONDS)

    def _end_job(self) -> None:
        managers: tuple[Manager, ...] = (self._collective_manager, self._worker_manager, self._node_manager)
        if self.is_connected():
            for manager in managers:
                with contextlib.suppress(Exception):
                    ray.kill(manager.handle)
            # Ray does this in the background: whoever closes a Cluster may count on the names being free.
            connection.wait_for_names_to_go({manager.NAME for manager in managers}, _CLOSE_SECONDS)

    def is_connected(self) -> bool:
        """Whether there is something left to talk to: not where Ray is gone, or another took the connection."""
        return self._is_worker or connection.is_alive(self._connection)

    def check_open(self) -> None:
        """Refuse to go on with a Cluster that was closed."""
        if not self._is_open:
            raise ClusterError("this Cluster is closed", hint="make a new one")

    def _check_node(self, node_rank: int) -> int:
        if type(node_rank) is not int or not 0 <= node_rank < len(self._nodes):
            has = "only 0" if len(self._nodes) == 1 else f"0-{len(self._nodes) - 1}"
            raise ConfigError(f"there is no node {node_rank!r}: the cluster has {has}")
        return node_rank


def _seconds_until(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user that it does not know.
        return str(os.getuid())


def _used_namespaces() -> set[str]:
    return {entry["namespace"] for entry in list_named_actors(all_namespaces=True)}
