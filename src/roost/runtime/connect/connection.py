"""This process's connection to Ray: joins a cluster or starts one, in a namespace, and disconnects."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util import client

from roost.errors import ClusterError, ConfigError, NodesMissing
from roost.machine.processes import account
from roost.runtime.connect.authentication import for_connection, set_variables, use_own_token, use_token_of
from roost.runtime.connect.calls import USER_KEY, check_not_fork
from roost.runtime.connect.find_head import find_heads, has_own_raylet, is_on_loopback
from roost.runtime.connect.guard import Guard
from roost.runtime.connect.head import Head, check_nothing_waits, within
from roost.runtime.connect.local_cluster import read_local_cluster
from roost.runtime.connect.versions import check_ray_version
from roost.runtime.limits import ASK_SECONDS, DISCONNECT_SECONDS, OUTLIVE_SECONDS

log: logging.Logger = logging.getLogger(__name__)

_OUTLIVE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_NOT_COPIED = (".git", ".venv", "venv", "runs", "__pycache__")
"""Ray leaves these out of a copy of the job's folder, beside all that .gitignore names."""
_STARTUP_REMARK = "worker processes have been started on node"
_OTHER_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection of this process to Ray."""

    head: Head
    namespace: str
    ray_job: str
    """Ray's id of this connection; a later one has another."""
    guard: Guard | None
    """The process that ends Ray with this one, if this connection started it."""
    give_back: Callable[[], object] | None = None
    """Ends the use of a connection that the program made, and that the program ends."""

    @property
    def address(self) -> str:
        """Ray's address."""
        return self.head.address

    @property
    def is_current(self) -> bool:
        """Whether this process still has it: it was not closed or given up, and no other one replaced it."""
        return not self.head.is_given_up and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether Ray still has it, even if this process has given it up."""
        context = ray.get_runtime_context() if ray.is_initialized() else None
        return context is not None and (context.get_job_id(), context.gcs_address) == (self.ray_job, self.address)

    @property
    def is_alive(self) -> bool:
        """Whether this process still has it and Ray answers at the other end, after a blip if need be."""
        return self.is_current and self.head.wait()


def check_can_connect(*, may_borrow: bool = False) -> None:
    """Raise ClusterError if Ray is too old, or if this process is connected already and that connection is no use."""
    check_ray_version(ray.__version__)
    check_not_fork()
    if ray.is_initialized() and not may_borrow:
        raise ClusterError(
            "Ray is initialised already in this process, by another call of ray.init",
            hint="make the Cluster first and leave out ray.init, or call ray.shutdown() before; "
            "a Cluster with num_nodes uses the connection that is there",
        )


def borrow(
    address: str | None, namespace: str | None, working_dir: str | None, on_shutdown: Callable[[], object]
) -> Connection:
    """Use the connection that the program's own ray.init made; ConfigError if another one is asked for.

    Ray tells nobody that it shuts down, so `ray.shutdown` is replaced by a function that calls `on_shutdown` first.
    """
    if client.ray.is_connected():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "this process is connected through the Ray client, which cannot place workers on nodes",
            hint="run on a node of the cluster, and give the address that `ray start --head` printed",
        )
    context = ray.get_runtime_context()
    there = {"address": context.gcs_address, "namespace": context.namespace, "working_dir": "what ray.init was given"}
    for name, value in (("address", address), ("namespace", namespace), ("working_dir", working_dir)):
        if value not in (None, there[name]) and (name, value) != ("address", "auto"):
            raise ConfigError(
                f"this process called ray.init, and {name} is {value!r}, not {there[name]}",
                hint=f"give {name} to ray.init, or leave ray.init out: the Cluster connects by itself",
            )
    theirs = ray.shutdown

    def give_back() -> None:
        if ray.shutdown is shutdown:
            ray.shutdown = theirs

    @functools.wraps(theirs)
    def shutdown(*args: Any, **kwargs: Any) -> None:
        give_back()
        try:
            on_shutdown()
        finally:
            theirs(*args, **kwargs)

    head = Head(context.gcs_address)
    _watch_head(head, lambda: None)
    head.use()
    ray.shutdown = shutdown
    job = context.get_job_id()
    return Connection(head=head, namespace=context.namespace, ray_job=job, guard=None, give_back=give_back)


def connect(
    address: str | None,
    namespace: str,
    *,
    may_start: bool,
    timeout: float = ASK_SECONDS,
    num_nodes: int = 1,
    working_dir: str | None = None,
) -> Connection:
    """Join the cluster at `address` or RAY_ADDRESS, the local cluster, or the one of this machine; else start one.

    A local cluster with fewer than `num_nodes` nodes, which gets no others, is a ClusterError, and so is a head that
    does not answer in `timeout` seconds, or 10 if that is less. Ray copies `working_dir` to every node.
    """
    check_nothing_waits()
    timeout = min(timeout, ASK_SECONDS)
    # Ray would end this process a minute after its head died, with no `finally` block and no exit handler. It reads its
    # settings together with the token, and again while it connects; what it starts gets them too and ends with it.
    with contextlib.ExitStack() as undo:
        undo.callback(set_variables({_OUTLIVE: os.environ.get(_OUTLIVE, str(OUTLIVE_SECONDS))}))
        guard = None
        found, is_local = locate(address, timeout, may_start=may_start, num_nodes=num_nodes)
        if found == "local":
            guard = _start_ray(namespace, working_dir)
        else:
            hint = "it is the local cluster: `roost down`, then `roost up` again" if is_local else ""
            if not has_own_raylet(found):
                # Ray itself would wait a minute for it.
                raise ClusterError(f"Ray at {found} could not be joined: the raylet of its node has ended", hint=hint)
            try:
                _init(found, namespace, working_dir)
            except (ConnectionError, RuntimeError, ValueError, RayError) as error:
                # Another version of Ray or Python at the other end, no raylet on this machine.
                raise ClusterError(f"Ray at {found} could not be joined: {error}", hint=hint) from error
    context = ray.get_runtime_context()
    head = Head(context.gcs_address)
    head.use()
    try:
        _watch_head(head, _leave)
    except BaseException:
        within(DISCONNECT_SECONDS, _shutdown, "disconnect")
        if guard is not None:
            guard.stop()
        raise
    return Connection(head=head, namespace=namespace, ray_job=context.get_job_id(), guard=guard)


def locate(address: str | None, timeout: float, *, may_start: bool = False, num_nodes: int = 1) -> tuple[str, bool]:
    """Return where Ray is, and whether that is the local cluster; "local" if there is none and one may be started.

    From then on Ray uses the token that it wants, until the next call.
    """
    for_connection.close()
    _let_ray_connect(os.environ.get("RAY_ENABLE_AUTO_CONNECT") != "0")
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    local = read_local_cluster()
    if local is not None and wanted in ("auto", local.address) and address != "auto":
        wanted = local.address
        if local.num_nodes < num_nodes:
            raise NodesMissing(
                f"the job wants {num_nodes} nodes, and the local cluster {local.spec} has {local.num_nodes}",
                hint=f"`roost down`, then for example `roost up {num_nodes}x4`",
            )
        variables = {key: value for key, value in local.environment.items() if key != "RAY_ADDRESS"}
        for_connection.callback(set_variables(variables))
    if wanted.startswith("ray://"):
        raise ConfigError(
            f"{wanted} is an address of the Ray client, which cannot place workers on nodes",
            hint="run on a node of the cluster, and give the address that `ray start --head` printed",
        )
    found = _find_head(timeout, may_start=may_start) if wanted == "auto" else wanted
    if wanted not in ("auto", "local"):
        use_token_of(found, timeout)
    if found == "local" and not may_start:
        wanted_nodes = f", and the job wants {num_nodes} nodes" if num_nodes > 1 else ""
        raise ClusterError(
            f"there is no Ray cluster to join{wanted_nodes}",
            hint=f"start a local one with `roost up {max(2, num_nodes)}x4`, or a real one with `ray start --head`",
        )
    return found, local is not None and local.address == found


def _watch_head(head: Head, on_lost: Callable[[], object]) -> None:
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in within(ASK_SECONDS, ray.nodes, "list its nodes") if node["NodeID"] == own)
    head.watch(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", on_lost)


def prepare_disconnect() -> None:
    """Import now what Ray imports when it shuts down.

    Python ends an interrupted program with the signal, so that a shell sees Ctrl-C. It does not if that code is first
    imported at exit: the exit code would be 1.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.dag.compiled_dag_node")


def disconnect(made: Connection, timeout: float = DISCONNECT_SECONDS) -> None:
    """Disconnect, which ends Ray if the connection started it; does nothing if another connection replaced it."""
    made.head.stop_watching(timeout)
    try:
        if made.give_back is not None:
            made.give_back()
        elif made.is_open:
            within(timeout, _shutdown, "disconnect")
    except ClusterError as error:
        # Ray would try again at exit, and hang again.
        atexit.unregister(ray.shutdown)
        log.error("%s", error)
    finally:
        if made.guard is not None:
            made.guard.stop()


def _leave() -> None:
    """Disconnect from a head that is gone."""
    _let_ray_connect(False)
    _shutdown()


def _let_ray_connect(by_itself: bool) -> None:
    """Say whether a call of Ray's may connect, which starts a new Ray where there is none.

    Ray's variable for that is read when Ray is loaded.
    """
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = by_itself


def _shutdown() -> None:
    with _own_signal_handlers():
        ray.shutdown()


def _init(address: str, namespace: str, working_dir: str | None) -> None:
    _print_to_stderr(shares_machine=address.startswith("127."))
    place = _on_loopback() if is_on_loopback(address) else contextlib.nullcontext()
    try:
        with place, _own_signal_handlers():
            ray.init(
                address=address,
                namespace=namespace,
                job_config=JobConfig(metadata={USER_KEY: account()}),
                runtime_env={"working_dir": working_dir, "excludes": list(_NOT_COPIED)} if working_dir else None,
                logging_level=logging.WARNING,
            )
    except BaseException:
        # Processes that were started before the failure, or before Ctrl-C, would stay.
        _shutdown()
        raise


def _find_head(timeout: float, *, may_start: bool) -> str:
    """Return the head of a Ray on this machine that takes our token, or "local" if there is none."""
    refusals: list[ClusterError] = []
    for head in find_heads():
        try:
            use_token_of(head, timeout)
        except ClusterError as error:
            refusals.append(error)
        else:
            return head
    if refusals and not may_start:
        raise refusals[0]
    for refusal in refusals:
        log.warning("%s: Roost starts its own Ray", refusal.problems[0].message)
    return "local"


def _start_ray(namespace: str, working_dir: str | None) -> Guard:
    """Start Ray on this machine, on the loopback interface only, until this process ends."""
    use_own_token()
    guard = Guard()
    try:
        with _on_loopback():
            _init("local", namespace, working_dir)
        guard.note_start()
    except BaseException:
        guard.stop()
        raise
    return guard


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray take 127.0.0.1 for the address of this machine: it then listens there, and not on all interfaces.

    That is what Ray does on other systems than Linux. Its variable for it is read when Ray is loaded, so the processes
    that Ray starts get the variable, and this one what was read from it, which has no public name.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    reached, constants.ENABLE_RAY_CLUSTER = getattr(constants, "ENABLE_RAY_CLUSTER", True), False
    restore = set_variables({_OTHER_MACHINES: "0"})
    try:
        yield
    finally:
        restore()
        constants.ENABLE_RAY_CLUSTER = reached


def _print_to_stderr(*, shares_machine: bool) -> None:
    """Let Ray print its remarks, and what tasks of Ray print, to standard error: standard output belongs to the job.

    There is no public way to choose the stream. It does not print that a node has many processes where the nodes of a
    local cluster share the cores of one machine: Ray reads its variable for that when it is loaded.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    printer = getattr(worker, "print_to_stdstream", None)
    if printer is None:
        return
    printer = getattr(printer, "__wrapped__", printer)

    @functools.wraps(printer)
    def to_stderr(data: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        lines = [line for line in data["lines"] if not (shares_machine and _STARTUP_REMARK in line)]
        printer({**data, "lines": lines, "is_err": True}, *args, **kwargs)

    worker.print_to_stdstream = to_stderr


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the process's signal handlers: Ray replaces them, which changes the exit code."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
