"""`Channel`: a named queue that any process of the job can use, and `ChannelWorker`, the process that it lives in.

channel = Channel.create("samples", maxsize=64)
rollout.generate(channel)      # in the workers: channel.put(sample)
for sample in channel:         # until it is closed and empty
    train(sample)
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
import zlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roost.comm.channels.client import (
    Ahead,
    Arrival,
    Client,
    LocalClient,
    PutOperation,
    open_one,
    take_all,
    take_back,
    take_one,
)
from roost.comm.channels.frames import Op, Packed, write_key
from roost.comm.channels.home import ChannelSettings, Home
from roost.comm.channels.queues import Want
from roost.comm.limits import ASK_SECONDS, CONNECT_SECONDS
from roost.comm.process import job_context, process_messages
from roost.comm.wire.loop import Handle, check_timeout
from roost.comm.worker import Worker
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ChannelClosed, ClusterError, ConfigError, NameTaken
from roost.runtime.connect.head import check_not_lost
from roost.runtime.events.emitter import emitter
from roost.text import plural, shorten

if TYPE_CHECKING:
    from roost.comm.wire.endpoint import Endpoint
    from roost.runtime.groups.group import WorkerGroup

MAX_BYTES = 1 << 30
DEFAULT_KEY = "default_queue"
_ONE = Want()
_ONE_NOW = Want(waits=False)
_AHEAD = Want(most=64, ahead=True)
_MOST_PEEKED = 1000
_MOST_PLACES = 1 << 12
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 4096
"""How much one frame of `put_many` carries."""
_MOST_VERSION = 1 << 63

_local: weakref.WeakValueDictionary[tuple[int, str], LocalClient] = weakref.WeakValueDictionary()
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
        endpoint = process_messages(self._identity).endpoint
        self._home = Home(endpoint.own, settings, self.group_name)
        self._home.open(endpoint)
        emitter.add_gauge(self._home.gauge)

    def channel_stats(self) -> dict[str, Any]:
        """Return depth, rates and bytes of each key, and who waits."""
        return self._home.stats()


class Channel:
    """A named queue. Make one with `create` or `connect`; it can be an argument of a call to a group.

    Items are anything that pickles; arrays and tensors in them travel as raw buffers. Under each key, items come out in
    the order in which they went in. A key is text or a number. A `put` that has returned is in the queue, whatever
    happens to the process that put it; an item that was handed to a process that dies before it has it goes to another
    one, up to three times: an item that three processes died with is set aside.

    With `async_op=True` a call returns a handle at once; what was put must not be changed until the handle is done.
    """

    def __init__(
        self, name: str, settings: ChannelSettings, identity: Any = None, local: LocalClient | None = None
    ) -> None:
        """Use `create` or `connect`."""
        self._name = name
        self._settings = settings
        self._identity = identity
        self._local = local
        self._clients: Sequence[Client] = [local] if local is not None else []
        """One for each home."""
        self._places: dict[str, tuple[Client, bytes]] = {}
        """By key that is text: its home, and how that knows it."""
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
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
        - `distributed`: one home on each node; which of them a key lives in follows from the key alone.
        - `node_rank`: the node of its home.
        - `local`: queues inside this process, which hand over the objects themselves; needs no Ray.
        - `max_bytes`: how much memory the items of a home may take before `put` waits; 0 is no limit.
        - `timeout`: seconds until it must be ready.
        """
        _check_name(name)
        for label, size in (("maxsize", maxsize), ("max_bytes", max_bytes)):
            if type(size) is not int or size < 0:
                raise ConfigError(f"{label} is {size!r}: it is a whole number, and 0 is no limit")
        for label, value in (("distributed", distributed), ("local", local)):
            if not isinstance(value, bool):
                raise ConfigError(f"{label} is {value!r}: it is True or False")
        if local:
            if distributed:
                raise ConfigError("a channel is either local or distributed")
            settings = ChannelSettings(maxsize=maxsize, max_bytes=max_bytes, distributed=False, nodes=(0,))
            found = _local.get((os.getpid(), name))
            if found is None:
                found = _local[os.getpid(), name] = LocalClient(name, settings)
            elif found.settings != settings:
                raise NameTaken(f"a local channel {name!r} exists with other arguments", hint="choose another name")
            return cls(name, settings, local=found)
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
        if cls._exists(name):
            existing = cls._describe(name, ASK_SECONDS)
        else:
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
        _check_name(name)
        local = _local.get((os.getpid(), name))
        if local is not None:
            return cls(name, local.settings, local=local)
        if job_context() is None:
            check_not_lost()
            raise ClusterError(
                f"there is no channel {name!r} in this process, which belongs to no job",
                hint="make a Cluster first, or Channel.create(…, local=True)",
            )
        seconds = CONNECT_SECONDS if timeout is None else check_timeout(timeout)
        if cls._exists(name):
            return cls._describe(name, ASK_SECONDS, worker)
        try:
            # It may be on its way.
            return cls._describe(name, seconds, worker)
        except CallTimedOut:
            raise ClusterError(
                f"the job has no channel {name!r} after {seconds:g} s", hint="create it with Channel.create"
            ) from None

    @staticmethod
    def _exists(name: str) -> bool:
        """Return whether the job has a channel of a name; NameTaken if that is the name of other workers."""
        context = job_context()
        try:
            if context is None or "channel_stats" in dict(context.worker_manager.get_group(name).methods):
                return context is not None
        except ClusterError:
            return False
        raise NameTaken(f"{name!r} is a group of workers, not a channel", hint="names are unique in a job")

    @classmethod
    def _describe(cls, name: str, seconds: float | None, worker: Worker | None = None) -> Channel:
        """Return a channel that its first home describes: how many homes it has is not known yet."""
        identity = worker._identity if worker is not None else None
        found = cls(name, ChannelSettings(maxsize=0, max_bytes=0, distributed=False, nodes=(0,)), identity)
        found._connect()
        found._settings = found._clients[0].ask("describe").wait(seconds)
        # The next use connects to all of them.
        found._endpoint = None
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
        version: int = 0,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Put an item into the queue of a key; waits while that is full.

        `version` is that of the weights that made it, for a `get` that wants no older items.
        """
        client, place = self._place(key)
        if async_op or timeout is not None:
            timeout = _check_wait(async_op, timeout)
        weight, version = _check_weight(weight), _check_version(version)
        return client.put((PutOperation(client, place, (client.pack(item, weight),), version),), async_op, timeout)

    def put_nowait(self, item: Any, weight: float = 0, key: Hashable = DEFAULT_KEY) -> None:
        """Put an item; asyncio.QueueFull if the queue is full."""
        client, place = self._place(key)
        packed = client.pack(item, _check_weight(weight))
        client.put((PutOperation(client, place, (packed,), waits=False),), False, ASK_SECONDS)

    def put_many(
        self,
        items: Iterable[Any],
        weight: float | Sequence[float] = 0,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        version: int = 0,
        whole: bool = False,
        timeout: float | None = None,
    ) -> Handle[None] | None:
        """Put items, in order, much faster than one by one; `weight` is that of each, or a list with one for each.

        They go in as there is room; with `whole=True` all at once, or none of them.
        """
        client, place = self._place(key)
        timeout = _check_wait(async_op, timeout)
        things = list(items)
        if whole and self.maxsize and len(things) > self.maxsize:
            raise ConfigError(
                f"{plural(len(things), 'item')} can never fit at once: the most are {self.maxsize}",
                hint="put fewer in one call, or make maxsize larger",
            )
        if isinstance(weight, Iterable):
            weights = [_check_weight(each) for each in weight]
        else:
            weights = [_check_weight(weight)] * len(things)
        if len(weights) != len(things):
            raise ConfigError(f"put_many was given {plural(len(things), 'item')} and {plural(len(weights), 'weight')}")
        _check_version(version)
        batches: list[list[Packed]] = []
        size = 0
        try:
            for packed in client.pack_many(things, weights):
                if not batches or (not whole and (size >= _BATCH_BYTES or len(batches[-1]) >= _BATCH_ITEMS)):
                    batches.append([])
                    size = 0
                batches[-1].append(packed)
                size += packed[2]
        except BaseException:
            for batch in batches:
                take_back(batch)
            raise
        puts = [PutOperation(client, place, batch, version, is_whole=whole) for batch in batches]
        return client.put(puts, async_op, timeout)

    def get(
        self,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        min_version: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Take the next item of a key; waits until there is one. ChannelClosed if there will be none.

        With `min_version`, items of an older version are dropped when it is the turn of this call.
        """
        want = _ONE if min_version is None else Want(min_version=_check_version(min_version))
        return self._take(key, want, take_one, async_op, timeout)

    def get_nowait(self, key: Hashable = DEFAULT_KEY) -> Any:
        """Take the next item; asyncio.QueueEmpty if there is none, or if others wait for it."""
        return self._take(key, _ONE_NOW, take_one, timeout=ASK_SECONDS)

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
        if type(target_weight) not in (int, float) or not 0 < target_weight <= sys.float_info.max:
            raise ConfigError(f"target_weight is {target_weight!r}: it is a number above 0")
        return self._take(key, Want(target=float(target_weight)), take_all, async_op, timeout)

    def get_many(
        self,
        n: int,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        *,
        wait: int | None = None,
        min_version: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Take up to `n` items in one go, in a list; waits for `n`, or for as many as `wait` says, and takes more.

        With `wait=0` it does not wait. When the channel is closed, what is left may be fewer. With `min_version`, items
        of an older version are dropped when it is the turn of this call, even if it then times out.
        """
        least = n if wait is None else wait
        if type(n) is not int or n < 1:
            raise ConfigError(f"n is {n!r}: it is a whole number, at least 1")
        if type(least) is not int or not 0 <= least <= n:
            raise ConfigError(f"wait is {wait!r}: it is a whole number from 0 to n, which is {n}")
        if min_version is not None:
            _check_version(min_version)
        want = Want(n, least, None, least > 0, min_version=min_version)
        return self._take(key, want, take_all, async_op, timeout)

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

    def peek(self, n: int = 1, key: Hashable = DEFAULT_KEY, *, timeout: float | None = None) -> list[Any]:
        """Return copies of the first items of a key, at most `n`, which stay in the queue; never waits for one."""
        if type(n) is not int or not 1 <= n <= _MOST_PEEKED:
            raise ConfigError(f"n is {n!r}: it is a whole number from 1 to {_MOST_PEEKED:,}")
        client, place = self._place(key)
        return client.peek(place, n, ASK_SECONDS if timeout is None else check_timeout(timeout))

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
        self._ask("close", timeout)

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return for each key its depth, bytes, counts and who waits, and the rates of the last ten seconds."""
        homes = self._ask("stats", timeout)
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
        depths = ", ".join(f"{key}: {line['depth']}" for key, line in found["keys"].items() if line["depth"]) or "empty"
        return f"{repr(self)[:-1]}, {shorten(depths, 200)}>"

    def __reduce__(self) -> Any:
        if self._local is not None:
            raise ConfigError(
                f"the channel {self._name!r} lives in this process alone",
                hint="create it without local=True to send it",
            )
        return type(self), (self._name, self._settings)

    def _place(self, key: Hashable) -> tuple[Client, bytes]:
        """Return what asks the home of a key, and how that knows the key."""
        if self._local is None and (self._endpoint is None or self._endpoint.is_closed):
            # It has not been used in this process, or the Cluster of that time is closed.
            self._connect()
        if type(key) is str and key in self._places:
            return self._places[key]
        known = write_key(key)
        found = self._clients[zlib.crc32(known) % len(self._clients)], known
        if type(key) is str:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = found
        return found

    def _connect(self) -> None:
        with self._lock:
            endpoint = process_messages(self._identity).endpoint
            homes = range(len(self._settings.nodes))
            self._places = {}
            self._clients = [Client(endpoint, self._name, home, self._settings) for home in homes]
            self._endpoint = endpoint

    def _depth(self, key: Hashable, timeout: float | None) -> tuple[int, bool]:
        """Return how many items a key has, and whether a put would have to wait."""
        client, place = self._place(key)
        found: list[tuple[int, bool]] = self._ask("depth", timeout, place, clients=(client,))
        return found[0]

    def _ask(self, op: Op, timeout: float | None, *arguments: Any, clients: Sequence[Client] = ()) -> list[Any]:
        """Ask all homes, which answer at once: unless it is told, it waits `ASK_SECONDS` for one that hangs."""
        deadline = Deadline.after(ASK_SECONDS if timeout is None else check_timeout(timeout))
        self._place(DEFAULT_KEY)
        calls = [client.ask(op, *arguments) for client in clients or self._clients]
        return [call.wait(deadline.timeout) for call in calls]

    def _take(
        self,
        key: Hashable,
        want: Want,
        take: Callable[[Arrival], Any],
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        client, place = self._place(key)
        if async_op or timeout is not None:
            timeout = _check_wait(async_op, timeout)
        if async_op:
            return client.get_async(place, want, take)
        return client.get(place, want, take, timeout)


class ItemLease:
    """An item that goes back to the queue unless the block around it ends well."""

    def __init__(self, channel: Channel, key: Hashable, seconds: float | None) -> None:
        self._channel = channel
        self._key = key
        self._seconds = seconds
        self._arrival: Arrival | None = None

    def __enter__(self) -> Any:
        client, place = self._channel._place(self._key)
        return client.get(place, _ONE, self._open, self._seconds)

    async def __aenter__(self) -> Any:
        client, place = self._channel._place(self._key)
        return await client.get_async(place, _ONE, self._open).async_wait(self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.give_back()
        elif self._arrival is not None:
            self._arrival.client.acknowledge(self._arrival.number)
            self._arrival = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __del__(self) -> None:
        arrival = getattr(self, "_arrival", None)
        if arrival is not None:
            arrival.client.cancel_soon(arrival.number)

    def give_back(self) -> None:
        """Return the item to the front of the queue; the block may go on."""
        if self._arrival is not None:
            self._arrival.client.cancel(self._arrival.number)
            self._arrival = None

    def _open(self, arrival: Arrival) -> Any:
        value = open_one(arrival)
        self._arrival = arrival
        return value


class ChannelIterator(Iterator[Any], AsyncIterator[Any]):
    """The items of a channel, until it is closed and all of them are taken."""

    def __init__(self, channel: Channel, key: Hashable, seconds: float | None) -> None:
        self._channel = channel
        self._key = key
        self._seconds = seconds
        self._ahead: Ahead | None = None

    def __iter__(self) -> ChannelIterator:
        return self

    def __aiter__(self) -> ChannelIterator:
        return self

    def __next__(self) -> Any:
        while not (found := self._ahead.take() if self._ahead is not None else ()):
            client, place = self._channel._place(self._key)
            try:
                client.get(place, _AHEAD, self._keep, self._seconds)
            except ChannelClosed:
                raise StopIteration from None
        return found[0]

    async def __anext__(self) -> Any:
        while not (found := self._ahead.take() if self._ahead is not None else ()):
            client, place = self._channel._place(self._key)
            try:
                await client.get_async(place, _AHEAD, self._keep).async_wait(self._seconds)
            except ChannelClosed:
                raise StopAsyncIteration from None
        return found[0]

    def close(self) -> None:
        """Return the items that the loop did not get; the end of the loop does that, too."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.complete()

    def __del__(self) -> None:
        ahead = getattr(self, "_ahead", None)
        if ahead is not None:
            ahead.complete_soon()

    def _keep(self, ahead: Ahead) -> None:
        self._ahead = ahead


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{name!r} is not the name of a channel")


def _check_weight(weight: Any) -> float:
    """Return the weight of an item as a number that a frame can carry; ConfigError if it is none."""
    if (type(weight) is int or type(weight) is float) and 0 <= weight <= sys.float_info.max:
        return weight
    if not isinstance(weight, bool | str) and hasattr(weight, "__float__"):
        with contextlib.suppress(OverflowError, ValueError, TypeError):
            if 0 <= float(weight) <= sys.float_info.max:
                return float(weight)
    raise ConfigError(f"weight is {shorten(repr(weight), 100)}: it is a number, 0 or more")


def _check_version(version: Any) -> int:
    if type(version) is not int or not -_MOST_VERSION <= version < _MOST_VERSION:
        raise ConfigError(f"version is {shorten(repr(version), 100)}: it is a whole number of 64 bits")
    return version


def _check_wait(async_op: bool, timeout: float | None) -> float | None:
    """Return the seconds that a call waits; ConfigError if a call that does not wait was given a timeout."""
    if async_op and timeout is not None:
        raise ConfigError(
            "with async_op=True the call does not wait", hint="give the timeout to the handle: wait(timeout)"
        )
    return check_timeout(timeout)
