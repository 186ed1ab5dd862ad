"""Channels inside one process, without Ray, and what travels between those that are not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import threading

import numpy as np
import pytest

from roost import CallTimedOut, Channel, ChannelClosed, ClusterError, ConfigError, NameTaken, Worker
from roost.comm.channels.frames import (
    read_ask,
    read_contents,
    read_status,
    write_answer,
    write_get,
    write_key,
    write_put,
)
from roost.comm.channels.home import ChannelSettings, Home
from roost.comm.channels.operations import GetOperation, PutOperation, take_one
from roost.comm.channels.queues import Answer, Item, Status, Want
from roost.comm.channels.routes import LentItem
from roost.comm.messages import Messages
from roost.comm.move.loans import Lending, _here
from roost.comm.packing import pack, pack_many, unpack
from roost.comm.process import PlainDirectory
from roost.comm.wire.connection import Frame, Kind, PeerInfo
from roost.comm.wire.endpoint import Endpoint, own_instance
from roost.testing import as_worker
from waiting import wait_until


@pytest.fixture
def channel(request):
    return Channel.create(request.node.name, local=True)


def frame(envelope, data, buffers):
    return Frame(Kind.REQUEST, 1, envelope, bytes(data), [memoryview(buffer) for buffer in buffers])


@pytest.mark.parametrize("sizes", [[5], [0, 3, 70_000], [40_000, 40_000], [9000] * 3])
@pytest.mark.parametrize("weight", [0, 2.5])
def test_items_arrive_as_they_were_put_whatever_their_sizes(sizes, weight):
    things = [np.full(size, size % 251, np.uint8) for size in sizes]
    items = [Item(pack(thing), weight, 1) for thing in things]
    put = read_ask(frame(*write_put(write_key(("k", 1)), items, True)))
    assert (put.key, put.waits, [item.weight for item in put.items]) == (("k", 1), True, [weight] * len(sizes))
    reply = frame(*write_answer(Answer("c", 1, Status.DONE, put.items), True))
    assert read_status(reply)[0] is Status.DONE
    for sent, piece in zip(things, read_contents(reply), strict=True):
        assert (unpack(piece[0], piece[1]) == sent).all()


def test_a_request_arrives_as_it_was_asked():
    for want in (Want(), Want(64, 1, ahead=True), Want(9, 0, None, False), Want(target=2.5)):
        asked = read_ask(frame(write_get(write_key("k"), want), b"", ()))
        assert (asked.key, asked.want) == ("k", want)


def test_many_objects_are_pickled_as_each_alone():
    things = [1, b"x" * 10_000, np.arange(10_000), Item, "text", {"a": np.arange(5)}]
    for thing, (data, buffers) in zip(things, pack_many(things), strict=True):
        alone = pack(thing)
        assert (data, len(buffers)) == (alone[0], len(alone[1]))
    with pytest.raises(ConfigError, match="a lock cannot be sent"):
        pack_many([1, threading.Lock()])


def test_a_worker_made_by_hand_creates_and_finds_channels():
    class Producer(Worker):
        def produce(self):
            self.create_channel("by-hand", maxsize=3).put((self.address, 1))
            return self.connect_channel("by-hand")

    with as_worker(rank=1, world_size=2, group_name="env"):
        found = Producer().produce()
    assert found.get() == ("env:1", 1)


def test_a_local_channel_hands_over_the_object_itself(channel):
    thing = threading.Lock()
    channel.put(thing)
    assert channel.get() is thing


def test_a_local_channel_cannot_be_sent_away(channel):
    with pytest.raises(ConfigError, match="lives in this process alone"):
        pickle.dumps(channel)


def test_a_channel_that_is_not_local_needs_a_cluster():
    with pytest.raises(ClusterError, match="needs a Cluster, and this process has none"):
        Channel.create("no-cluster")
    with pytest.raises(ClusterError, match="there is no channel 'no-cluster' in this process"):
        Channel.connect("no-cluster")


def test_a_name_gives_the_same_channel_until_it_is_not_used_any_more():
    first = Channel.create("again", 2, local=True)
    first.put(1)
    assert Channel.create("again", 2, local=True).get() == Channel.connect("again").qsize() + 1
    with pytest.raises(NameTaken, match="exists with other arguments"):
        Channel.create("again", 3, local=True)
    del first
    gc.collect()
    Channel.create("again", 3, local=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": ""}, "is not the name of a channel"),
        ({"maxsize": -1}, "maxsize is -1: it is a whole number, and 0 is no limit"),
        ({"max_bytes": 1.5}, r"max_bytes is 1\.5"),
        ({"distributed": 1}, "distributed is 1: it is True or False"),
        ({"distributed": True}, "either local or distributed"),
    ],
)
def test_arguments_of_create_are_checked(arguments, text):
    with pytest.raises(ConfigError, match=text):
        Channel.create(**{"name": "checked", "local": True} | arguments)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda channel: channel.put(1, weight=-1), "weight is -1: it is a number, 0 or more"),
        (lambda channel: channel.put(1, weight=True), "weight is True"),
        (lambda channel: channel.put(1, key=[1]), r"key is \[1\]"),
        (lambda channel: channel.put(1, async_op=True, timeout=1), "give the timeout to the handle"),
        (lambda channel: channel.put_many([1, 2], weight=[1]), "given 2 items and 1 weight"),
        (lambda channel: channel.get(timeout="x"), "timeout is 'x'"),
        (lambda channel: channel.get_batch(0), "target_weight is 0: it is a number above 0"),
        (lambda channel: channel.get_many(0), "n is 0"),
        (lambda channel: channel.get_many(2, wait=3), "wait is 3"),
    ],
)
def test_arguments_of_calls_are_checked(channel, call, text):
    with pytest.raises(ConfigError, match=text):
        call(channel)
    assert channel.stats()["keys"] == {}


def test_a_put_that_waits_goes_on_when_there_is_room():
    channel = Channel.create("room", maxsize=1, local=True)
    channel.put(1)
    second = channel.put(2, async_op=True)
    assert not second.done()
    assert channel.get() == 1
    assert second.wait(60) is None
    assert second.wait(60) is None
    assert channel.get() == 2


def test_threads_that_wait_get_what_others_put(channel):
    found = []
    threads = [threading.Thread(target=lambda: found.append(channel.get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    channel.put_many(range(4))
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2, 3]


def test_a_coroutine_that_is_cancelled_takes_nothing(channel):
    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.get(async_op=True), 0.01)
        with pytest.raises(CallTimedOut):
            await channel.get(async_op=True).async_wait(0.01)

    asyncio.run(give_up())
    wait_until(lambda: channel.stats()["keys"] == {}, "both are withdrawn")
    channel.put("kept")
    assert channel.get() == "kept"


def test_a_loop_ends_when_the_channel_is_closed_and_empty(channel):
    channel.put_many("abc")
    channel.close()
    assert list(channel) == ["a", "b", "c"]
    assert list(channel) == []
    for call in (channel.get, channel.get_nowait, lambda: channel.put(1), lambda: channel.get_many(2, wait=0)):
        with pytest.raises(ChannelClosed):
            call()


def test_a_loop_with_a_timeout_raises_and_can_go_on(channel):
    items = channel.iterate(timeout=0.01)
    with pytest.raises(CallTimedOut):
        next(items)
    channel.put(1)
    assert next(items) == 1


def test_it_says_what_it_is(channel):
    channel.put(1, key="k")
    assert repr(channel) == f"<Channel {channel.name!r} in this process>"
    assert str(channel) == f"<Channel {channel.name!r} in this process, k: 1>"


class Spread:
    """A channel with a home on each of two nodes, and a client next to each."""

    def __init__(self):
        self.directory = PlainDirectory()
        self.endpoints = []
        settings = ChannelSettings(maxsize=0, max_bytes=0, distributed=True, nodes=(0, 1))
        self.homes = [Home(self.endpoint(f"spread:{rank}", rank), settings, "spread", rank, 2) for rank in (0, 1)]
        self.clients = [Channel("spread", settings) for _ in (0, 1)]
        for rank, client in enumerate(self.clients):
            client._endpoint = self.endpoint(f"client:{rank}", rank)

    def endpoint(self, address, node):
        own = PeerInfo(address=address, instance=own_instance(), node=f"node {node}", node_rank=node)
        self.endpoints.append(Messages(Endpoint(own, b"secret", self.directory, "127.0.0.1")).endpoint)
        return self.endpoints[-1]

    def release(self, rank, key):
        """Let a home forget a key, as when it has had too many others since that was used."""
        with self.homes[rank]._lock:
            number = self.homes[rank]._owned.pop(key)
        with self.homes[0]._lock:
            self.homes[0]._free(key, number)


@pytest.fixture
def spread():
    made = Spread()
    yield made
    for endpoint in made.endpoints:
        endpoint.close()


def test_a_key_is_assigned_once_although_two_requests_find_out_that_it_moved(spread):
    near, far = spread.clients
    near.put("first", key="k")
    assert far.get("k", timeout=30) == "first"
    late = GetOperation(far, near._endpoint.loop, "k", Want(), take_one)
    late.route, late.place = far.route_of("k"), far.place_of("k")
    spread.release(0, "k")
    near.put("second", key="k")
    # As after many other keys.
    far._places.clear()
    assert far.get("k", timeout=30) == "second"
    # The answer to one that was sent before comes only now.
    far.move(late)
    near.put("third", key="k")
    assert late.wait(30) == "third"


def test_a_get_that_timed_out_while_its_key_moved_takes_nothing(spread, monkeypatch):
    monkeypatch.setattr("roost.comm.channels.operations.GRACE_SECONDS", 0.05)
    near, far = spread.clients
    far.put("first", key="k")
    assert near.get("k", timeout=30) == "first"
    spread.release(1, "k")
    with held_up(spread.endpoints[0]), pytest.raises(CallTimedOut):
        near.get("k", timeout=0.1)
    near.put("second", key="k")
    assert near.get("k", timeout=30) == "second"


@contextlib.contextmanager
def held_up(endpoint):
    """Keep the communication thread of a process busy."""
    gate = threading.Event()
    endpoint.loop.call(gate.wait)
    try:
        yield
    finally:
        gate.set()


def test_what_was_lent_for_an_item_comes_back_if_the_item_cannot_be_put(spread):
    near, _ = spread.clients
    route = near.route_of("k")
    loans = _here[near._endpoint.own]

    def put(key="k"):
        lending = Lending(loans, "")
        lending.number = loans.add(lending)
        near._puts.run(PutOperation(near, route.loop, key, [LentItem(pack(1), 0, 1, lending)], True), False, None)

    put()
    assert len(loans._lent) == 1
    near.close()
    with pytest.raises(ChannelClosed):
        put()
    assert len(loans._lent) == 1
