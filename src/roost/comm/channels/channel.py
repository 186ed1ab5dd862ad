"""`Channel`: a named queue that any process of the job can use, and `ChannelWorker`, the process that it lives in.

channel = Channel.create("samples", maxsize=64)
rollout.generate(channel)      # in the workers: channel.put(sample)
for sample in channel:         # until it is closed and empty
    train(sample)
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roost.comm.channels.checks import check_async, check_key, check_name, check_size, check_weight
from roost.comm.channels.frames import Op
from roost.comm.channels.home import ChannelSettings, Home
from roost.comm.channels.items import ONE, ChannelIterator, ItemLease, wait_get
from roost.comm.channels.operations import (
    DEFAULT_KEY,
    Arrival,
    AsyncGetOperation,
    GetOperation,
    Operation,
    Place,
    PutOperation,
    take_all,
    take_one,
)
from roost.comm.channels.puts import Puts
from roost.comm.channels.queues import Item, Want
from roost.comm.channels.routes import LocalRoute, RemoteRoute, Route
from roost.comm.process import job_context, process_talk
from roost.comm.wire.loop import Handle, check_timeout
from roost.comm.worker import Worker
from roost.errors import CallTimedOut, ChannelClosed, ClusterError, ConfigError, NameTaken
from roost.runtime.connect.head import check_not_lost
from roost.runtime.events.emitter import emitter
from roost.text import plural, shorten

if TYPE_CHECKING:
    from roost.comm.wire.endpoint import Endpoint
    from roost.runtime.groups.group import WorkerGroup

MAX_BYTES = 1 << 30
_CONNECT_SECONDS = 30.0
_ASK_SECONDS = 60.0
_ONE_NOW = Want(waits=False)
_MOST_PLACES = 1 << 12
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 4096
"""How much one frame of `put_many` carries."""

_local: weakref.WeakValueDictionary[tuple[int, str], LocalRoute] = weakref.WeakValueDictionary()
"""By process and name: the local channels that are in use."""


class ChannelWorker(Worker):
    """The process that a channel lives in. `Channel.create` launches it; it can be launched as any group, too.

    It answers in its communication thread, however many processes use it.
    """

    def __init__(self, maxsize: int = 0, max_bytes: int = MAX_BYTES, distributed: bool = False) -> None:
        super().__init__()
        placement = self._identity.placement
        first = placement.cluster_node_rank - self.rank if self.world_size > 1 else placement.cluster_node_rank
        nodes = tuple(range(first, first + self.world_size))
        settings = ChannelSettings(maxsize=maxsize, max_bytes=max_bytes, distributed=distributed, nodes=nodes)
        endpoint = process_talk(self._identity).messages.endpoint
        self._home = Home(endpoint, settings, self.group_name, self.rank, self.world_size)
        emitter.add_gauge(self._home.gauge)

    def channel_stats(self) -> dict[str, Any]:
        """Return depth, rates and bytes of each key, and who waits."""
        return self._home.stats()


class Channel:
    """A named queue. Make one with `create` or `connect`; it can be an argument of a call to a group.

    Items are anything that pickles; arrays and tensors in them travel as raw buffers. Under each key, items come out in
    the order in which they went in. A `put` that has returned is in the queue, whatever happens to the process that put
    it; an item that was handed to a process that dies before it has it goes to another one.

    With `async_op=True` a call returns a handle at once; what was put must not be changed until the handle is done.
    """

    def __init__(
        self, name: str, settings: ChannelSettings, identity: Any = None, local: LocalRoute | None = None
    ) -> None:
        """Use `create` or `connect`."""
        self._name = name
        self._settings = settings
        self._identity = identity
        self._local = local
        self._routes: dict[int, Route] = {}
        self._places: dict[Hashable, Place] = {}
        self._puts = Puts()
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._pid = os.getpid()
        self._group: WorkerGroup[Any] | None = None
        """The group of its home, if this object launched it."""

    @classmethod
    def create(
        cls,
        name: str,
        maxsize: int = 0,
        distributed: bool = False,
        node_rank: int = 0,
        local: bool = False,
        *,
        max_bytes: int = MAX_BYTES,
        timeout: float | None = None,
    ) -> Channel:
        """Start a channel, or connect to the one of that name if it was created with the same arguments.

        - `maxsize`: how many items each key can have before `put` waits; 0 is no limit.
        - `distributed`: one home on each node; a key lives on the node where it was first used.
        - `node_rank`: the node of its home.
        - `local`: queues inside this process, which hand over the objects themselves; needs no Ray.
        - `max_bytes`: how many bytes a home can have before `put` waits; 0 is no limit.
        - `timeout`: seconds until it must be ready.
        """
        check_name(name)
        check_size("maxsize", maxsize)
        check_size("max_bytes", max_bytes)
        for label, value in (("distributed", distributed), ("local", local)):
            if not isinstance(value, bool):
                raise ConfigError(f"{label} is {value!r}: it is True or False")
        if local:
            if distributed:
                raise ConfigError("a channel is either local or distributed")
            settings = ChannelSettings(maxsize=maxsize, max_bytes=max_bytes, distributed=False, nodes=(0,))
            return cls._create_local(name, settings)
        context = job_context()
        if context is None:
            check_not_lost()
            raise ClusterError(
                f"the channel {name!r} needs a Cluster, and this process has none",
                hint="make a Cluster first, or write local=True for a channel inside this process",
            )
        nodes = len(context.nodes)
        if type(node_rank) is not int or not 0 <= node_rank < nodes:
            raise ConfigError(f"node_rank is {node_rank!r}: the cluster has {plural(nodes, 'node')}, counted from 0")
        settings = ChannelSettings(
            maxsize=maxsize,
            max_bytes=max_bytes,
            distributed=distributed,
            nodes=tuple(range(nodes)) if distributed else (node_rank,),
        )
        existing = cls._find(name)
        if existing is None:
            try:
                return cls._launch(name, settings, timeout)
            except NameTaken:
                # Another process creates it at the same time.
                existing = cls.connect(name, timeout=timeout)
        differences = [
            f"{label} is {getattr(existing._settings, label)!r}, not {getattr(settings, label)!r}"
            for label in ("maxsize", "max_bytes", "distributed", "nodes")
            if getattr(existing._settings, label) != getattr(settings, label)
        ]
        if differences:
            raise NameTaken(
                f"a channel {name!r} exists with other arguments: {'; '.join(differences)}",
                hint="choose another name, or connect to that one with Channel.connect",
            )
        return existing

    @classmethod
    def connect(cls, name: str, worker: Worker | None = None, *, timeout: float | None = None) -> Channel:
        """Return a channel that exists, or will within `timeout` seconds, which are 30 unless it is given.

        `worker` matters only in a plain process in which several workers were made by hand.
        """
        check_name(name)
        local = _local.get((os.getpid(), name))
        if local is not None:
            return cls(name, local.settings, local=local)
        if job_context() is None:
            check_not_lost()
            raise ClusterError(
                f"there is no channel {name!r} in this process, which belongs to no job",
                hint="make a Cluster first, or Channel.create(…, local=True)",
            )
        seconds = _CONNECT_SECONDS if timeout is None else check_timeout(timeout)
        found = cls._find(name, worker)
        if found is None:
            # It may be on its way.
            identity = worker._identity if worker is not None else None
            found = cls(name, ChannelSettings(maxsize=0, max_bytes=0, distributed=False, nodes=(0,)), identity)
            try:
                found._describe(seconds)
            except CallTimedOut:
                raise ClusterError(
                    f"the job has no channel {name!r} after {seconds:g} s", hint="create it with Channel.create"
                ) from None
        return found

    @classmethod
    def _create_local(cls, name: str, settings: ChannelSettings) -> Channel:
        key = os.getpid(), name
        local = _local.get(key)
        if local is None:
            local = _local[key] = LocalRoute(name, settings)
        elif local.settings != settings:
            raise NameTaken(f"a local channel {name!r} exists with other arguments", hint="choose another name")
        return cls(name, settings, local=local)

    @classmethod
    def _find(cls, name: str, worker: Worker | None = None) -> Channel | None:
        """Return the channel of a name, if there is one; ConfigError if that is the name of other workers."""
        context = job_context()
        if context is None:
            return None
        try:
            record = context.worker_manager.get_group(name)
        except ClusterError:
            return None
        if "channel_stats" not in dict(record.methods):
            raise NameTaken(f"{name!r} is a group of workers, not a channel", hint="names are unique in a job")
        identity = worker._identity if worker is not None else None
        found = cls(name, ChannelSettings(maxsize=0, max_bytes=0, distributed=False, nodes=(0,)), identity)
        found._describe(_ASK_SECONDS)
        return found

    @classmethod
    def _launch(cls, name: str, settings: ChannelSettings, timeout: float | None) -> Channel:
        from roost.placement.strategies import NodePlacementStrategy
        from roost.runtime.cluster import Cluster
        from roost.runtime.groups.group import LAUNCH_SECONDS, GroupDraft
        from roost.runtime.worker import own_methods

        arguments = settings.maxsize, settings.max_bytes, settings.distributed
        draft = GroupDraft(ChannelWorker, own_methods(ChannelWorker), arguments, {}, is_top=True)
        strategy = NodePlacementStrategy(settings.nodes)
        seconds = LAUNCH_SECONDS if timeout is None else timeout
        group = draft.launch(Cluster(), strategy, name=name, reserve=False, timeout=seconds)
        made = cls(name, settings)
        made._group = group
        return made

    def _describe(self, seconds: float | None) -> None:
        self._settings = self._route_to(0).call(Op.DESCRIBE).wait(seconds)

    @property
    def name(self) -> str:
        """Its name, which is that of the group of its homes."""
        return self._name

    @property
    def maxsize(self) -> int:
        """How many items each key can have before `put` waits; 0 is no limit."""
        return self._settings.maxsize

    @property
    def max_bytes(self) -> int:
        """How many bytes a home can have before `put` waits; 0 is no limit."""
        return self._settings.max_bytes

    def put(
        self,
        item: Any,
        weight: float = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Put an item into the queue of a key; waits while that is full."""
        route = self.route_of(key)
        put = PutOperation(self, route.loop, key, (route.pack(item, check_weight(weight)),), True)
        return self._puts.run(put, async_op, timeout)

    def put_nowait(self, item: Any, weight: float = 0, key: Hashable = DEFAULT_KEY) -> None:
        """Put an item; asyncio.QueueFull if the queue is full."""
        route = self.route_of(key)
        self._puts.run(
            PutOperation(self, route.loop, key, (route.pack(item, check_weight(weight)),), False), False, None
        )

    def put_many(
        self,
        items: Iterable[Any],
        weight: float | Sequence[float] = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Put items, in order, much faster than one by one; `weight` is that of each, or a list with one for each."""
        route = self.route_of(key)
        things = list(items)
        weights = list(weight) if isinstance(weight, Iterable) else [weight] * len(things)
        if len(weights) != len(things):
            raise ConfigError(f"put_many was given {plural(len(things), 'item')} and {plural(len(weights), 'weight')}")
        for each in set(weights):
            check_weight(each)
        batches: list[list[Item]] = []
        size = _BATCH_BYTES
        for packed in route.pack_many(things, weights):
            if size >= _BATCH_BYTES or len(batches[-1]) >= _BATCH_ITEMS:
                batches.append([])
                size = 0
            batches[-1].append(packed)
            size += packed.size
        puts = [PutOperation(self, route.loop, key, batch, True) for batch in batches]
        if not puts:
            done: Handle[None] = Handle(route.loop)
            done.complete(None)
            return done if async_op else None
        if len(puts) == 1:
            return self._puts.run(puts[0], async_op, timeout)
        return self._puts.run_all(puts, route.loop, async_op, timeout)

    def get(self, key: Hashable = DEFAULT_KEY, async_op: bool = False, *, timeout: float | None = None) -> Any:
        """Take the next item of a key; waits until there is one. ChannelClosed if there will be none."""
        return self._get(key, ONE, take_one, async_op, timeout)

    def get_nowait(self, key: Hashable = DEFAULT_KEY) -> Any:
        """Take the next item; asyncio.QueueEmpty if there is none, or if others wait for it."""
        return self._get(key, _ONE_NOW, take_one, False, None)

    def get_batch(
        self,
        target_weight: float,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Take items in order while their weights fit into a target; waits until it is reached.

        It is also complete when the next item does not fit any more. Nothing is taken before it is complete. An item
        that is heavier than the target by itself is a ConfigError, and stays. When the channel is closed, what is left
        is a batch.
        """
        if isinstance(target_weight, bool) or not isinstance(target_weight, int | float) or not target_weight > 0:
            raise ConfigError(f"target_weight is {target_weight!r}: it is a number above 0")
        return self._get(key, Want(target=float(target_weight)), take_all, async_op, timeout)

    def get_many(
        self,
        n: int,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        wait: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Take up to `n` items in one go, in a list; waits for `n`, or for as many as `wait` says, and takes more.

        With `wait=0` it does not wait. When the channel is closed, what is left may be fewer.
        """
        least = n if wait is None else wait
        if type(n) is not int or n < 1:
            raise ConfigError(f"n is {n!r}: it is a whole number, at least 1")
        if type(least) is not int or not 0 <= least <= n:
            raise ConfigError(f"wait is {wait!r}: it is a whole number from 0 to n, which is {n}")
        return self._get(key, Want(n, least, None, least > 0), take_all, async_op, timeout)

    def lease(self, key: Hashable = DEFAULT_KEY, *, timeout: float | None = None) -> ItemLease:
        """Take an item for a block: `with channel.lease() as item`.

        It goes back to the front of the queue if this process dies before the block ends, or if the block raises.
        """
        return ItemLease(self, key, check_timeout(timeout))

    def iterate(self, key: Hashable = DEFAULT_KEY, *, timeout: float | None = None) -> ChannelIterator:
        """Return an iterator over the items of a key, until the channel is closed and they are all taken.

        It has a few items ahead of the loop, if no other process waits for them. They are not lost if the loop is left.
        `timeout` is for each item. `for item in channel` and `async for` do the same under the default key.
        """
        return ChannelIterator(self, key, check_timeout(timeout))

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.iterate()

    def qsize(self, key: Hashable = DEFAULT_KEY, *, timeout: float | None = None) -> int:
        """Return how many items a key has."""
        return self._depth(key, timeout)[0]

    def empty(self, key: Hashable = DEFAULT_KEY, *, timeout: float | None = None) -> bool:
        """Whether a key has no item."""
        return self._depth(key, timeout)[0] == 0

    def full(self, key: Hashable = DEFAULT_KEY, *, timeout: float | None = None) -> bool:
        """Whether a `put` would have to wait."""
        return self._depth(key, timeout)[1]

    def close(self, *, timeout: float | None = None) -> None:
        """Let no process put any more. What is in the queues can still be taken; then iterations end.

        The homes end with the Cluster, or at the end of a `with` block around the channel.
        """
        for home in range(self._size):
            self._route_to(home).call(Op.CLOSE).wait(check_timeout(timeout))

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return for each key its depth, bytes, counts and who waits, and the rates of the last ten seconds."""
        seconds = check_timeout(timeout)
        calls = [self._route_to(home).call(Op.STATS) for home in range(self._size)]
        homes = [call.wait(seconds) for call in calls]
        keys: dict[str, Any] = {}
        for home in homes:
            keys |= home["keys"]
        added = ("puts", "gets", "bytes", "puts_per_second", "gets_per_second")
        return {
            "name": self._name,
            "maxsize": self.maxsize,
            "max_bytes": self.max_bytes,
            "is_closed": all(home["is_closed"] for home in homes),
            **{name: sum(home[name] for home in homes) for name in added},
            "keys": keys,
            "homes": [{"address": home["home"], "node": home["node"], "routes": home["routes"]} for home in homes],
        }

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.close()
        elif self._local is not None:
            self.close()

    def __repr__(self) -> str:
        if self._local is not None:
            where = "in this process"
        else:
            nodes = self._settings.nodes
            where = f"on node {nodes[0]}" if len(nodes) == 1 else f"on {len(nodes)} nodes"
        limit = f", maxsize {self.maxsize}" if self.maxsize else ""
        return f"<Channel {self._name!r} {where}{limit}>"

    def __str__(self) -> str:
        try:
            found = self.stats(timeout=1.0)
        except (ClusterError, ChannelClosed):
            return repr(self)
        depths = ", ".join(f"{key}: {line['depth']}" for key, line in found["keys"].items()) or "empty"
        return f"{repr(self)[:-1]}, {shorten(depths, 200)}>"

    def __reduce__(self) -> Any:
        if self._local is not None:
            raise ConfigError(
                f"the channel {self._name!r} lives in this process alone",
                hint="create it without local=True to send it",
            )
        return Channel, (self._name, self._settings)

    # Where a key lives.

    @property
    def _size(self) -> int:
        return len(self._settings.nodes)

    def _route_to(self, home: int) -> Route:
        """Return the way to a home, over the connections that this process has now."""
        if self._local is not None:
            return self._local
        endpoint = self._endpoint
        if endpoint is None or endpoint.is_closed or self._pid != os.getpid():
            with self._lock:
                endpoint = self._endpoint = process_talk(self._identity).messages.endpoint
                self._pid = os.getpid()
                self._routes.clear()
        route = self._routes.get(home)
        if route is None:
            route = self._routes[home] = RemoteRoute(endpoint, f"{self._name}:{home}")
        return route

    def route_of(self, key: Hashable) -> Route:
        """Return the way to the home of a key."""
        if key is not DEFAULT_KEY:
            check_key(key)
        if self._size == 1:
            return self._route_to(0)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _MOST_PLACES:
                # What is in use is found again.
                self._places.clear()
            place = self._places[key] = self._locate(key, 0, assigns=True).wait(_ASK_SECONDS)
        return self._route_to(place[0])

    def known_route(self, key: Hashable) -> Route:
        """Return the way to the home where a key was last."""
        place = self._places.get(key)
        return self._route_to(place[0] if place is not None else 0)

    def place_of(self, key: Hashable) -> Place | None:
        """Return where a key lives, as far as is known."""
        return self._places.get(key)

    def release(self, put: PutOperation) -> None:
        """Note that a put has ended, so that another one may be sent."""
        self._puts.release(put)

    def _locate(self, key: Hashable, but_not: int, *, assigns: bool) -> Handle[Any]:
        directory = self._route_to(0)
        nodes = self._settings.nodes
        node_rank = self._endpoint.own.node_rank if self._endpoint is not None else -1
        near = nodes.index(node_rank) if node_rank in nodes else 0
        return directory.call(Op.LOCATE, key, near, but_not, assigns)

    def move(self, operation: Operation) -> None:
        """Start an operation where its key lives now; in the thread that reads."""
        key = operation.key
        place = self._places.get(key)
        if place is not None and (place != operation.place or self._route_to(place[0]) is not operation.route):
            # Another operation has found out meanwhile. The directory would assign the key again.
            self._restart(operation, place)
            return
        located = self._locate(key, place[1] if place is not None else 0, assigns=True)

        def go_on() -> None:
            try:
                found = located.wait(0)
            except Exception as error:
                operation.fail(error)
                return
            self._places[key] = found
            self._restart(operation, found)

        located.on_done(go_on)

    def _restart(self, operation: Operation, place: Place) -> None:
        operation.start(self._route_to(place[0]))
        if operation.is_given_up:
            # Meanwhile, and so at the home before this one.
            operation.give_up()

    def _depth(self, key: Hashable, timeout: float | None) -> tuple[int, bool]:
        check_key(key)
        seconds = check_timeout(timeout)
        route = self._route_to(0)
        if self._size > 1:
            place = self._locate(key, 0, assigns=False).wait(seconds)
            if place is None:
                return 0, False
            route = self._route_to(place[0])
        found: tuple[int, bool] = route.call(Op.DEPTH, key).wait(seconds)
        return found

    # Gets.

    def _get(
        self, key: Hashable, want: Want, take: Callable[[Arrival], Any], async_op: bool, timeout: float | None
    ) -> Any:
        check_async(async_op, timeout)
        seconds = check_timeout(timeout)
        route = self.route_of(key)
        if async_op:
            handle = AsyncGetOperation(self, route.loop, key, want, take)
            handle.start(route)
            return handle
        get = GetOperation(self, route.loop, key, want, take)
        return wait_get(get, route, seconds)
