"""`Worker`: the class that users derive from. It knows who it is, even in a plain process without Ray.

class Actor(Worker):
    def train(self, step):
        self.log_info(f"step {step} on rank {self.rank} of {self.world_size}")
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from roost.comm.addresses import WorkerAddress
from roost.config.node_groups import DeclaredHardware
from roost.placement.placement import Placement
from roost.runtime.events.emitter import emitter
from roost.runtime.process.identity import Master, WorkerIdentity, alone, current_identity, current_master
from roost.runtime.process.output import WORKER_LOG
from roost.runtime.process.timers import timed, timer

if TYPE_CHECKING:
    from roost.comm.channels.channel import Channel
    from roost.comm.devices import DeviceLock
    from roost.comm.options import CollectiveGroupOptions
    from roost.comm.talk import Talk
    from roost.comm.wire.loop import Handle
    from roost.runtime.cluster import Cluster
    from roost.runtime.groups.group import GroupDraft

Value = TypeVar("Value")

_current: weakref.ref[Worker] | None = None
"""The worker that was made last in this process, which has one unless it is a test."""


class fact(Generic[Value]):  # noqa: N801 - a decorator, like property
    """Something that a worker knows about itself. A subclass may reuse the name for something else."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, worker: object | None, owner: type) -> Value:
        # As with a property, the class gives the descriptor itself.
        return self._function(worker) if worker is not None else self  # type: ignore[return-value]


class process_fact(fact[Value]):  # noqa: N801 - likewise
    """Something that is the same for the whole process, so that the class knows it, too."""

    def __get__(self, worker: object | None, owner: type) -> Value:
        return self._function(worker if worker is not None else owner)


class Worker:
    """One process of a group.

    Derive from it, call `super().__init__()`, and launch a group with `create_group(…).launch(cluster)`. A worker that
    you construct yourself in a plain process is rank 0 of a group of one.
    """

    _identity: WorkerIdentity
    _master: Master

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Worker:
        """Set the identity before the first line of a subclass's constructor runs."""
        worker = super().__new__(cls)
        object.__setattr__(worker, "_identity", current_identity() or alone(cls.__name__))
        object.__setattr__(worker, "_master", current_master())
        global _current
        _current = weakref.ref(worker)
        return worker

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupDraft[Self]:
        """Describe a group of workers that are constructed with these arguments; `launch` starts it."""
        from roost.runtime.groups.group import GroupDraft  # a worker in a plain process needs no Ray

        return GroupDraft(cls, own_methods(cls), args, kwargs)

    @fact
    def rank(self) -> int:
        """This worker's rank in its group."""
        return self._identity.rank

    @fact
    def world_size(self) -> int:
        """How many workers the group has."""
        return self._identity.world_size

    @fact
    def local_rank(self) -> int:
        """This worker's index among the group's workers on its node. The variable LOCAL_RANK is a device index."""
        return self._identity.placement.local_rank

    @fact
    def local_world_size(self) -> int:
        """How many workers of the group are on its node."""
        return self._identity.placement.local_world_size

    @fact
    def node_rank(self) -> int:
        """The rank of its node in the cluster. The variable NODE_RANK counts the group's nodes only."""
        return self._identity.placement.cluster_node_rank

    @fact
    def placement(self) -> Placement:
        """Where this worker sits."""
        return self._identity.placement

    @fact
    def group_name(self) -> str:
        """The name of the group."""
        return self._identity.group_name

    @fact
    def address(self) -> WorkerAddress:
        """This worker's name in the job, such as `actor:3`: a string that knows its parts."""
        return WorkerAddress(self._identity.address)

    @fact
    def devices(self) -> tuple[str, ...]:
        """The accelerators it may use, as the visible-devices variable names them."""
        return self._identity.placement.visible_accelerators

    @fact
    def hardware(self) -> tuple[DeclaredHardware, ...]:
        """The declared hardware it was given, such as its robot, with its settings."""
        return self._identity.hardware

    @fact
    def master_address(self) -> str:
        """The address of rank 0's node."""
        return self._master.address

    @fact
    def master_port(self) -> int:
        """The port that the group leased on rank 0's node; 0 in a plain process."""
        return self._master.port

    @fact
    def cluster(self) -> Cluster:
        """The job's Cluster, as this process sees it."""
        from roost.runtime.cluster import Cluster  # likewise

        return Cluster()

    @process_fact
    def current_worker(self) -> Worker | None:
        """The worker of this process, for code that does not get it passed; None where there is none."""
        return _current() if _current is not None else None

    @process_fact
    def torch_device_type(self) -> str:
        """What torch calls the accelerators that it sees here: `cuda`, `npu`, `xpu`; `cpu` if it sees none."""
        from roost.comm.devices import torch_device_type  # torch loads when it is used

        return torch_device_type(_process_placement())

    @process_fact
    def torch_platform(self) -> Any:
        """The module of torch for them, such as `torch.cuda`: `Worker.torch_platform.synchronize()`."""
        from roost.comm.devices import torch_platform  # likewise

        return torch_platform(_process_placement())

    @fact
    def device_lock(self) -> DeviceLock:
        """A lock for workers that share accelerators: `with self.device_lock:` is for one of them at a time."""
        made: DeviceLock | None = vars(self).get("_roost_device_lock")
        if made is None:
            from roost.comm.devices import make_device_lock  # few workers use it

            made = vars(self).setdefault("_roost_device_lock", make_device_lock(self._identity.placement))
        return made

    # The names that the specification uses inside a worker, all in this one place.
    _rank = rank
    _world_size = world_size
    _local_rank = local_rank
    _local_world_size = local_world_size
    _node_rank = node_rank
    _placement = placement
    _group_name = group_name
    _worker_address = address

    def send(
        self,
        object: Any,  # noqa: A002 - the name in the contract
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        piggyback_payload: Any = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Send any picklable object to a worker of the job, or to several ranks of a group.

        Arrays and tensors, nested in anything, travel as raw buffers. What was sent may be changed when this returns,
        or with `async_op` when the handle is done. `tag` keeps conversations apart; `piggyback_payload` travels along.
        """
        peers = dst_group_name, dst_rank
        return self._roost_talk.send(object, peers, async_op, options, tag, timeout, piggyback_payload)

    def recv(
        self,
        src_group_name: str,
        src_rank: int | str | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive an object: the k-th receive from a worker gets the k-th that it sent under this tag.

        Returns `(object, payload)` if a payload was sent along. `recv(ANY)` and `recv("rollout", ANY)` receive from any
        worker, or any of a group, and return `(object, address of the sender)`.
        """
        return self._roost_talk.recv(None, (src_group_name, src_rank), async_op, options, tag, timeout)

    def send_tensor(
        self,
        tensor: Any,
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Send the content of a tensor or array, for `recv_tensor` at the other end: quicker than `send` if large."""
        return self._roost_talk.send_tensor(tensor, (dst_group_name, dst_rank), async_op, options, tag, timeout)

    def recv_tensor(
        self,
        tensor: Any,
        src_group_name: str,
        src_rank: int | str | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        tag: Hashable = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive into a tensor or array that has the size of the one that was sent with `send_tensor`."""
        return self._roost_talk.recv(tensor, (src_group_name, src_rank), async_op, options, tag, timeout)

    def create_channel(
        self,
        channel_name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        max_bytes: int | None = None,
    ) -> Channel:
        """Create a channel, as `Channel.create` does; in a process without Ray it is a local one."""
        from roost.comm.channels.channel import MAX_BYTES, Channel  # a worker that does not communicate pays nothing
        from roost.comm.process import job_context

        is_local = local or job_context() is None
        limit = MAX_BYTES if max_bytes is None else max_bytes
        return Channel.create(channel_name, maxsize, distributed and not is_local, node_rank, is_local, max_bytes=limit)

    def connect_channel(self, channel_name: str, *, timeout: float | None = None) -> Channel:
        """Return a channel that exists, as `Channel.connect` does."""
        from roost.comm.channels.channel import Channel  # likewise

        return Channel.connect(channel_name, self, timeout=timeout)

    def broadcast(
        self,
        object: Any = None,  # noqa: A002 - likewise
        groups: Sequence[tuple[str, int | Sequence[int]]] = (),
        src: tuple[str, int] | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Send an object from one worker to all members of several groups; every member calls it and gets the object.

        `groups` is `[("actor", [0, 1]), ("rollout", 0)]`; `src` is the worker that has the object, by default the first
        that is listed.
        """
        from roost.comm.collectives import broadcast  # likewise

        return broadcast(self._roost_talk, self._identity.address, object, groups, src, async_op, options, timeout)

    def collective(
        self,
        group_name: str,
        ranks: Sequence[int] | None = None,
        backend: str | None = None,
        *,
        name: str | None = None,
        options: CollectiveGroupOptions | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Return a process group of `torch.distributed` over workers of a group, all of which call this.

        Use it with torch's own functions: `dist.all_reduce(tensor, group=worker.collective("actor"))`. The backend is
        NCCL if torch sees a GPU here, else Gloo. Each call makes a group of its own; `name` tells those apart that are
        not asked for in the same order everywhere. CallTimedOut names the workers that did not come.
        """
        from roost.comm.collectives import make_process_group  # likewise

        own = self._identity.address
        return make_process_group(self.cluster.context, own, group_name, ranks, backend, name, options, timeout)

    @property
    def _roost_talk(self) -> Talk:
        made: Talk | None = vars(self).get("_roost_made")
        if made is None or made.messages.endpoint.is_closed:
            from roost.comm.process import process_talk  # a worker that does not communicate pays nothing

            made = process_talk(self._identity)
            object.__setattr__(self, "_roost_made", made)
        return made

    def log_debug(self, message: object) -> None:
        """Write a debug line into this worker's log."""
        self._roost_logger.debug("%s", message)

    def log_info(self, message: object) -> None:
        """Write a line into this worker's log; the driver shows it."""
        self._roost_logger.info("%s", message)

    def log_warning(self, message: object) -> None:
        """Write a warning into this worker's log."""
        self._roost_logger.warning("%s", message)

    def log_error(self, message: object) -> None:
        """Write an error into this worker's log."""
        self._roost_logger.error("%s", message)

    def log_metric(self, name: str, value: float, step: float | None = None) -> None:
        """Add a value to a metric of the run, such as the reward of a step: `roost top` and `roost watch` show it.

        Never blocks: a thread writes it into the run folder. In a plain process, without a run, nothing is written.
        """
        emitter.metric(str(name), float(value), None if step is None else float(step))

    @property
    def _roost_logger(self) -> logging.Logger:
        return logging.getLogger(f"{WORKER_LOG}.{self._identity.address}")

    def worker_timer(self, tag: str | None = None) -> AbstractContextManager[None]:
        """Time a piece of a method: `with self.worker_timer("forward"): …`; without a tag under the method's name."""
        return timed(sys._getframe(1).f_code.co_name if tag is None else tag)

    timer: Callable[..., Any] = staticmethod(timer)
    """Decorator: `@Worker.timer` or `@Worker.timer("forward")` times a whole method."""


def own_methods(cls: type) -> dict[str, Any]:
    """Return the public methods that a class adds to `Worker` or overrides, by name: what a group can call."""
    # A class may reuse the name of a fact. It may override a method of Worker too, but only for itself to call.
    own = [name for name, member in vars(Worker).items() if not isinstance(member, fact)]
    names = [name for name in dir(cls) if not name.startswith("_") and name not in own]
    # Not even read: one of the facts loads torch.
    members = {
        name: getattr(cls, name, None) for name in names if not isinstance(inspect.getattr_static(cls, name), fact)
    }
    return {name: member for name, member in members.items() if inspect.isroutine(member)}


def _process_placement() -> Placement:
    return (current_identity() or alone("worker")).placement
