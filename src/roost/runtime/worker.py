"""Who a worker is and what it does alone: its rank and place, its logs, metrics and timers, groups of its class.

`roost.Worker` adds talking to others, which is in `roost.comm`.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from roost.config.node_groups import DeclaredHardware
from roost.errors import ConfigError
from roost.machine.processes import die_with
from roost.placement.placement import Placement
from roost.runtime.events.emitter import emitter
from roost.runtime.managers.job_info import JOB_VARIABLE, job_of
from roost.runtime.process.addresses import WorkerAddress
from roost.runtime.process.identity import Master, WorkerIdentity, alone, assume, current_identity, current_master
from roost.runtime.process.output import WORKER_LOG
from roost.runtime.process.timers import timed, timer
from roost.text import shorten

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster
    from roost.runtime.groups.group import GroupDraft

Value = TypeVar("Value")

_current: weakref.ref[PlacedWorker] | None = None
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


class PlacedWorker:
    """A process of a group that knows its place."""

    _roost_is_base = True
    """Not a class of the user's: a group does not call its methods."""
    _identity: WorkerIdentity
    _master: Master

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Set the identity before the first line of a subclass's constructor runs."""
        worker = super().__new__(cls)
        object.__setattr__(worker, "_identity", current_identity() or alone(cls.__name__))
        object.__setattr__(worker, "_master", current_master())
        global _current
        _current = weakref.ref(worker)
        return worker

    def __init__(
        self, *, parent_address: str | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        """Take nothing, except in a process that a worker has started itself, as an engine starts its ranks.

        There `Worker(parent_address="rollout:0", world_size=2, rank=1)` is `rollout:0:1`: it joins the job, and others
        reach it as rank 1 of the group `rollout:0`.
        """
        super().__init__()
        if (parent_address, world_size, rank) != (None, None, None):
            object.__setattr__(self, "_identity", _join_parent(parent_address, world_size, rank))

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

    # The names that the specification uses inside a worker, all in this one place.
    _rank = rank
    _world_size = world_size
    _local_rank = local_rank
    _local_world_size = local_world_size
    _node_rank = node_rank
    _placement = placement
    _group_name = group_name
    _worker_address = address

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


def current_worker() -> Any:
    """Return the worker of this process; None where there is none."""
    return _current() if _current is not None else None


def own_methods(cls: type) -> dict[str, Any]:
    """Return the public methods that a class adds to `Worker` or overrides, by name: what a group can call."""
    bases = [vars(base) for base in cls.__mro__ if "_roost_is_base" in vars(base)]
    # A class may reuse the name of a fact. It may also override a method of Worker, which only itself then calls.
    own = {name for base in bases for name, member in base.items() if not isinstance(member, fact)}
    names = [name for name in dir(cls) if not name.startswith("_") and name not in own]
    # A fact is not even read: reading one of them loads torch.
    members = {
        name: getattr(cls, name, None) for name in names if not isinstance(inspect.getattr_static(cls, name), fact)
    }
    return {name: member for name, member in members.items() if inspect.isroutine(member)}


def group_of(cls: type[Value], /, *args: Any, **kwargs: Any) -> GroupDraft[Value]:
    """Describe a group of workers of any class, which need not be a `Worker`; they are made with these arguments.

    They have the environment of a worker (RANK, WORLD_SIZE, MASTER_ADDR and so on), and the group their public methods.
    """
    if not isinstance(cls, type):
        is_actor = hasattr(cls, "options") and hasattr(cls, "remote")
        raise ConfigError(
            f"group_of takes a class, not {shorten(repr(cls), 100)}",
            hint="give the class itself, without @ray.remote" if is_actor else "for example group_of(Trainer, lr=0.1)",
        )
    from roost.runtime.groups.group import GroupDraft  # as in create_group

    return GroupDraft(cls, own_methods(cls), args, kwargs)


def _join_parent(parent: Any, world_size: Any, rank: Any) -> WorkerIdentity:
    """Join the job of a worker that has started this process, and return the identity of its rank in here.

    In a process without a job it is a worker of a test.
    """
    group, _, number = parent.rpartition(":") if isinstance(parent, str) else ("", "", "")
    if not group or not number.isdecimal():
        raise ConfigError(f"parent_address is {parent!r}: it is that of a worker", hint="for example 'rollout:0'")
    if type(world_size) is not int or type(rank) is not int or not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank!r} and world_size {world_size!r}: ranks are from 0 to world_size - 1")
    mark = os.environ.get(JOB_VARIABLE, "")
    if not mark:
        return alone(parent, rank, world_size)
    from roost.runtime.cluster import Cluster  # a worker in a plain process needs no Ray

    is_new = current_identity() is None
    address, namespace = job_of(mark)
    # A worker may be the parent of another one in its own process, which has its job.
    cluster = Cluster(address=address, namespace=namespace, quiet=True) if is_new else Cluster()
    found = [item for record in cluster.worker_manager.get_groups() for item in record.identities]
    own = next((item for item in found if item.address == parent), None)
    if own is None:
        hint = "a worker starts such a process in a method: its group is not there before all were constructed"
        raise ConfigError(f"the job has no worker {str(parent)!r}", hint=hint)
    placement = replace(own.placement, rank=rank, local_rank=rank, local_world_size=world_size)
    identity = replace(own, group_name=str(parent), placement=placement, world_size=world_size)
    if is_new:
        if pid := cluster.worker_manager.get_workers([parent])[0].pid:
            # Otherwise it would hold the accelerators of a worker that has died.
            die_with(pid)
        assume(identity)
    return identity
