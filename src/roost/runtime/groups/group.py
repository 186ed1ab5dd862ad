"""`WorkerGroup`: all workers of one class under one name, called together.

with MyWorker.create_group(lr=0.1).launch(cluster, name="actor") as actor:
    losses = actor.train(batch).wait()
    actor[0].save("out.pt").wait()
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, Self, SupportsIndex, TypeVar, overload

import ray
from ray.actor import ActorHandle

from roost.config.ranks import format_ranks
from roost.errors import ConfigError
from roost.placement.placement import Placement
from roost.placement.strategies import PlacementStrategy
from roost.runtime.cluster import Cluster
from roost.runtime.connect.calls import check_not_fork, is_fork
from roost.runtime.groups.again import keep_calling
from roost.runtime.groups.members import Members, OwnMembers
from roost.runtime.groups.result import CallResult, Value
from roost.runtime.groups.stream import ItemStream
from roost.runtime.launch.plan import plan_launch
from roost.runtime.limits import GROUP_CLOSE_SECONDS
from roost.runtime.limits import LAUNCH_SECONDS as LAUNCH_SECONDS
from roost.runtime.process.actor import make_actor_class, method_kind
from roost.runtime.process.identity import current_identity
from roost.runtime.process.packing import pack_call, ship
from roost.runtime.runs.folder import check_group_name
from roost.text import did_you_mean, plural, shorten

log: logging.Logger = logging.getLogger(__name__)

Class = TypeVar("Class")
"""The class of the workers."""
Parameters = ParamSpec("Parameters")


class GroupDraft(Generic[Class]):
    """A group that is not launched yet: the class, and the arguments that every worker is constructed with."""

    def __init__(
        self,
        cls: type[Class],
        methods: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_top: bool = False,
    ) -> None:
        """Take the class, its methods and arguments; `is_top`: its name does not follow that of a worker."""
        self._is_top = is_top
        self._cls = cls
        self._methods = {name: method_kind(member) for name, member in methods.items()}
        self._args = tuple(args)
        self._kwargs = dict(kwargs)
        if inspect.isabstract(cls):
            raise TypeError(
                f"{cls.__name__} is abstract: {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))} is missing"
            )
        # A class whose constructor Python knows nothing about raises ValueError.
        with contextlib.suppress(ValueError):
            signature = inspect.signature(cls.__init__)
            try:
                # Worker's own __new__ takes anything.
                signature.bind(None, *args, **kwargs)
            except TypeError as error:
                called = f"{cls.__name__}.create_group" if hasattr(cls, "create_group") else f"group_of({cls.__name__})"
                raise TypeError(f"{called}: {error}{_meant(signature, kwargs)}") from None

    @property
    def methods(self) -> Collection[str]:
        """The methods that can be called on the group."""
        return self._methods

    def also(self, *methods: str) -> Self:
        """Let methods be called, too, whose names begin with `_`: `group_of(Theirs).also("_init_model").launch(…)`."""
        for name in methods:
            member = getattr(self._cls, name, None) if isinstance(name, str) else None
            is_special = str(name).startswith(("__", "_roost_")) and name != "__call__"
            if is_special or not (inspect.isfunction(member) or inspect.ismethod(member)):
                close = did_you_mean(str(name), [each for each in vars(self._cls) if not each.startswith("__")])
                raise ConfigError(
                    f"{self._cls.__name__} has no method {name!r} that a group can call",
                    hint=f"did you mean {close!r}?" if close else "name methods of the class, as also('_reset')",
                )
            self._methods[name] = method_kind(member)
        return self

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | None = None,
        name: str | None = None,
        isolate_accelerator: bool = True,
        env_vars: Mapping[str, str] | None = None,
        max_concurrency: int | None = None,
        timeout: float = LAUNCH_SECONDS,
        restarts: int = 0,
        reserve: bool = True,
        share: float | None = None,
        replace: bool = False,
        bind: str = "numa",
    ) -> WorkerGroup[Class]:
        """Start one worker for each placement, all together, and wait until every one is ready.

        - `placement_strategy`: where they go; by default one worker on each accelerator, or on each node.
        - `name`: the group's name in the job, by default that of the class; in a worker it follows its address.
        - `isolate_accelerator`: whether a worker sees only its own accelerators.
        - `env_vars`: environment variables for all of them.
        - `max_concurrency`: how many calls a worker serves at a time.
        - `timeout`: seconds until all must be ready.
        - `restarts`: how often each rank is restarted in its place when its worker dies.
        - `reserve`: reserve the accelerators on Ray; without it other jobs may get them too.
        - `share`: the part of each of its accelerators that a worker uses; on one accelerator they add up to 1 at most.
        - `replace`: close this process's group of that name first, as a cell of a notebook that runs again wants.
        - `bind`: `"numa"`: on the cores and memory near its accelerators, where the machine tells; or `"none"`.
        """
        if not isinstance(cluster, Cluster):
            kind = type(cluster).__name__
            raise ConfigError(f"launch takes a Cluster, not a {kind}", hint="for example launch(Cluster(num_nodes=2))")
        context = cluster.context
        context.check_open()
        cls_name = self._cls.__name__
        full_name = check_group_name(cls_name if name is None else name)
        if not self._is_top and (parent := current_identity()) is not None:
            # `actor:0:1` is rank 1 of the group that actor:0 launched; a second group of actor:0 needs a name.
            full_name = parent.address if name is None else f"{parent.address}:{name}"
        if replace and (close := context.open_groups.get(full_name)) is not None:
            close(GROUP_CLOSE_SECONDS)
        plan = plan_launch(
            full_name,
            context.topology,
            context.nodes,
            context.job,
            strategy=placement_strategy,
            isolate_accelerator=isolate_accelerator,
            env_vars=env_vars,
            max_concurrency=max_concurrency,
            timeout=timeout,
            restarts=restarts,
            reserve=reserve,
            share=share,
            bind=bind,
        )
        remote: Any = ray.remote(make_actor_class(cls_name, self._methods))
        own = (self._cls, *self._args), self._kwargs
        constructor = ship(own, lambda: f"{cls_name} or an argument of create_group")
        for method in self._methods:
            if hasattr(WorkerGroup, method):
                label = f"{cls_name}.{method}"
                log.warning("%s is called with group.call(%r): group.%s is the group's own", label, method, method)
        members = OwnMembers(context, plan, self._methods, remote, constructor)
        placements = [spec.identity.placement for spec in plan.specs]
        with context.recorder.launching(full_name, self._cls, placement_strategy, placements) as note:
            began = time.monotonic()
            note({phase: when - began for phase, when in members.launch().items()})
        return WorkerGroup(members, range(members.size))

    def __repr__(self) -> str:
        return f"<GroupDraft of {self._cls.__name__}: launch() starts it>"


class WorkerGroup(Generic[Class]):
    """Workers that are called together: any public method of their class is a method of the group.

    `group.train(batch)` calls `train` on every worker and returns a `CallResult` without waiting. `group[0]`,
    `group[0:4]` and `group.on(0, 3)` are groups of some of the workers.
    """

    def __init__(self, members: Members, ranks: Iterable[int]) -> None:
        self._members = members
        self._ranks = tuple(ranks)

    @classmethod
    def attach(cls, name: str) -> WorkerGroup[Any]:
        """Return a group that another process of the job launched, by its name."""
        context = Cluster().context
        record = context.worker_manager.get_group(name)
        return cls(Members(context, record), range(len(record.identities)))

    @property
    def cluster(self) -> Cluster:
        """The job's Cluster, as this process sees it."""
        return Cluster()

    @property
    def name(self) -> str:
        """The group's name."""
        return self._members.name

    @property
    def world_size(self) -> int:
        """How many workers were launched under the name."""
        return self._members.size

    @property
    def is_own(self) -> bool:
        """Whether this process launched the group, and ends its workers."""
        return isinstance(self._members, OwnMembers)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are called."""
        return self._ranks

    @property
    def placements(self) -> list[Placement]:
        """Where these workers sit."""
        return [self._members.identity(rank).placement for rank in self._ranks]

    @property
    def actor_handles(self) -> list[ActorHandle[Any]]:
        """The Ray actors behind these workers, in rank order."""
        return self._members.handles(self._ranks)

    @property
    def alive(self) -> list[int]:
        """The ranks whose workers are alive now."""
        return [rank for rank in self._members.alive() if rank in self._ranks]

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, which: SupportsIndex | slice | Iterable[int]) -> WorkerGroup[Class]:
        """Return the group of one rank or of several: by rank, slice or list of ranks."""
        if isinstance(which, slice):
            return WorkerGroup(self._members, self._ranks[which])
        if isinstance(which, Iterable):
            return self.on(*which)
        index = operator.index(which)
        if not -len(self._ranks) <= index < len(self._ranks):
            raise IndexError(f"{self.name!r} has no rank {index} here: it has {_name_ranks(self._ranks)}")
        return WorkerGroup(self._members, [self._ranks[index]])

    def on(self, *ranks: int) -> WorkerGroup[Class]:
        """Return the group of these ranks."""
        for rank in ranks:
            if isinstance(rank, bool) or not hasattr(rank, "__index__") or operator.index(rank) not in self._ranks:
                raise ConfigError(f"{self.name!r} has no rank {rank!r} here: it has {_name_ranks(self._ranks)}")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ConfigError(f"on{ranks!r}: name each rank once", hint="for all of them leave out on()")
        return WorkerGroup(self._members, sorted(map(operator.index, ranks)))

    def execute_on(self, *ranks: int | Iterable[int]) -> WorkerGroup[Class]:
        """Do the same as `on`; also takes a list of ranks."""
        return self.on(*(rank for item in ranks for rank in (item if isinstance(item, Iterable) else [item])))

    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> CallResult[Any]: ...
    @overload
    def call(
        self,
        method: Callable[Concatenate[Class, Parameters], Value],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> CallResult[Value]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call a method by its name, which the group itself may use; or as `Actor.train`, which editors check."""
        method = _method_name(method)
        self._check_call(method)
        return self._members.call(method, self._ranks, [pack_call(method, args, kwargs)] * len(self._ranks))

    def keep_calling(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call a method, and again on each rank that dies in it and is restarted; return a future of the values.

        For a loop over a channel that can begin again in a new process. `launch(restarts=)` says how often; the future
        has the death of a rank after that, or the first other exception.
        """
        name = _method_name(method)
        self._check_call(name)
        tries = {rank: 1 + self._members.restarts_left(rank) for rank in self._ranks}
        return keep_calling(lambda rank: self.on(rank).call(name, *args, **kwargs), tries)

    def map(
        self,
        method: str,
        args: Sequence[Any] | CallResult[Any] | None = None,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> CallResult[Any]:
        """Call a method with different arguments on each rank: a tuple of them, or one that is not a tuple.

        `kwargs` has a dict of keyword arguments for each rank. With the result of another call as `args`, the first
        rank gets the first value, and so on.
        """
        self._check_call(method)
        for given, no in ((args, str | bytes | Mapping), (kwargs, str | bytes | Mapping | CallResult)):
            if given is not None and (not hasattr(given, "__len__") or isinstance(given, no)):
                raise ConfigError(
                    f"map({method!r}) was given {shorten(repr(given))}",
                    hint="args is a list with a tuple for each rank, and kwargs a list with a dict for each",
                )
            if given is not None and len(given) != len(self._ranks):
                raise ConfigError(
                    f"map({method!r}) was given {plural(len(given), 'entry', 'entries')} for "
                    f"{plural(len(self._ranks), 'worker')}",
                    hint="give one tuple of arguments for each rank, in rank order",
                )
        if args is None and kwargs is None:
            raise ConfigError(f"map({method!r}) was given no arguments", hint=f"without any: group.{method}()")
        named = [{}] * len(self._ranks) if kwargs is None else kwargs
        for item in named:
            if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
                raise ConfigError(
                    f"kwargs of map({method!r}) has {shorten(repr(item), 100)}",
                    hint="it has a dict of keyword arguments for each rank, in rank order",
                )
        if args is None:
            args = [()] * len(self._ranks)
        if isinstance(args, CallResult):
            # Iterating over it would wait for the values.
            args = [args[index] for index in range(len(args))]
        sent = [
            pack_call(method, item if isinstance(item, tuple) else (item,), names)
            for item, names in zip(args, named, strict=True)
        ]
        return self._members.call(method, self._ranks, sent)

    def stream(self, method: str, /, *args: Any, **kwargs: Any) -> ItemStream:
        """Return the items of a generator method as `(rank, item)`, as they come; workers stay at most one ahead."""
        self._check_call(method)
        if not self._members.methods[method].is_generator:
            raise ConfigError(f"{method!r} yields nothing", hint=f"call it: group.{method}(…).wait()")
        return ItemStream(self._members, method, self._ranks, pack_call(method, args, kwargs))

    def restart(self, rank: int, *, force: bool = False, timeout: float | None = None) -> None:
        """Start a dead rank again in its place: same node, accelerators and ports; its constructor runs again.

        With `force`, a worker that is alive is ended first, even one that hangs. `timeout` is that of the launch unless
        it is given.
        """
        self._members.check_open()
        self._members.restart(self.on(rank).ranks[0], force=force, timeout=timeout)

    def close(self, timeout: float = GROUP_CLOSE_SECONDS) -> None:
        """End all workers of the group; in a process that attached, only forget it.

        ClusterError names what could not be ended within `timeout` seconds; the group can then be closed again.
        """
        check_not_fork()
        if self.is_own:
            self._members.context.stop.run_hooks()
        self._members.close(timeout)

    def __enter__(self) -> WorkerGroup[Class]:
        return self

    def __exit__(self, *_error: object) -> None:
        # A fork that leaves the block has nothing to end.
        if not is_fork():
            self.close()

    def __getattr__(self, method: str) -> Callable[..., CallResult[Any]]:
        if method.startswith("_") and method not in getattr(vars(self).get("_members"), "methods", ()):
            raise AttributeError(f"a group has no attribute {method!r}")
        self._check_method(method)
        return functools.partial(self.call, method)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._members.methods})

    def __repr__(self) -> str:
        state = ", closed" if self._members.is_closed else ""
        return f"<WorkerGroup {self.name!r}, {_name_ranks(self._ranks)} of {self._members.size}{state}>"

    def __reduce__(self) -> Any:
        return _attached, (self.name, self._ranks)

    def _check_call(self, method: str) -> None:
        self._check_method(method)
        # Storing an argument needs a connection.
        self._members.check_open()

    def _check_method(self, method: str) -> None:
        if method in self._members.methods:
            return
        close = did_you_mean(method, self._members.methods)
        has = f"did you mean {close!r}?" if close else f"it has {shorten(', '.join(self._members.methods), 200)}"
        raise AttributeError(f"the workers of {self.name!r} have no method {method!r}; {has}")


def _method_name(method: object) -> str:
    """Return the name of a method that is named, or given as `Actor.train`."""
    return method if isinstance(method, str) else str(getattr(method, "__name__", method))


def _meant(signature: inspect.Signature, given: Iterable[str]) -> str:
    """Say which arguments may be misspelt ones of a constructor."""
    known = list(signature.parameters)[1:]
    meant = {name: did_you_mean(name, known) for name in given if name not in known}
    words = [f"; {name!r} is none: did you mean {close!r}?" for name, close in meant.items() if close]
    return "".join(words)


def _attached(name: str, ranks: tuple[int, ...]) -> WorkerGroup[Any]:
    """Return a group that was sent to another process of the job."""
    return WorkerGroup(WorkerGroup.attach(name)._members, ranks)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}" if ranks else "no rank"
