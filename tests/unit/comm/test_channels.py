"""Channels inside one process, without Ray, and what travels between those that are not."""

from __future__ import annotations

import asyncio
import enum
import gc
import pickle
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost import CallTimedOut, Channel, ChannelClosed, ClusterError, ConfigError, NameTaken, Worker
from roost.comm.channels.client import Client, LocalClient, PutOperation
from roost.comm.channels.frames import (
    key_text,
    read_answer,
    read_key,
    read_request,
    write_answer,
    write_key,
    write_request,
)
from roost.comm.channels.home import ChannelSettings, Home
from roost.comm.channels.queues import Answer, Item, Status, Want
from roost.comm.messages import Messages
from roost.comm.move.loans import Lending, _here
from roost.comm.packing import pack, pack_many, unpack
from roost.comm.process import PlainDirectory
from roost.comm.wire.connection import Frame, Kind, PeerInfo
from roost.comm.wire.endpoint import Endpoint, own_instance
from roost.comm.wire.peer import Peer
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
    items = [(pack(thing), weight, 1, None) for thing in things]
    op, (key, put, waits, is_whole) = read_request(
        frame(*write_request("put", (write_key("k"), items, True, False, 7)))
    )
    assert (op, key, waits, is_whole) == ("put", write_key("k"), True, False)
    assert [(item.weight, item.version) for item in put] == [(weight, 7)] * len(sizes)
    answer = read_answer(frame(*write_answer(Answer("c", 1, Status.DONE, put), True)))
    assert answer.status is Status.DONE
    for sent, piece in zip(things, answer.items, strict=True):
        assert (unpack(piece[0], piece[1]) == sent).all()


def test_a_request_arrives_as_it_was_asked():
    for want in (Want(), Want(64, 1, ahead=True), Want(9, 0, None, False), Want(target=2.5), Want(min_version=-3)):
        assert read_request(frame(*write_request("get", (write_key("k"), want)))) == ("get", (write_key("k"), want))


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
        (lambda channel: channel.put(1, weight=10**400), "weight is 10000"),
        (lambda channel: channel.put(1, version=1.0), r"version is 1\.0: it is a whole number"),
        (lambda channel: channel.put_many([1, 2], weight=[1, 10**400]), "weight is 10000"),
        (lambda channel: channel.get_batch(10**400), "target_weight is 10000"),
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


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "key", [True, Colour.RED, np.int64(1), np.float64(1), Text("a"), b"a", None, ("a", 1), [1], float("nan")], ids=repr
)
def test_a_key_is_text_or_a_number_by_exact_type(channel, key):
    with pytest.raises(ConfigError, match="key is ") as refused:
        channel.put(1, key=key)
    assert "a key is a str, an int or a float" in str(refused.value)


def test_a_key_that_cannot_be_encoded_is_refused(channel):
    for key in ("\ud800", "x" * 70_000, 1 << (1 << 19)):
        with pytest.raises(ConfigError, match=r"key is|a key has"):
            channel.get(key, timeout=0)


@given(st.lists(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False)), min_size=2, max_size=2))
def test_keys_that_differ_in_type_or_value_have_queues_of_their_own(keys):
    first, second = keys
    is_same = type(first) is type(second) and first == second
    assert (write_key(first) == write_key(second)) is is_same
    assert read_key(write_key(first)) == first
    assert (key_text(write_key(first)) == key_text(write_key(second))) is is_same


def test_one_and_its_float_and_its_text_are_three_keys(channel):
    for key in (1, 1.0, "1"):
        channel.put(repr(key), key=key)
    assert [channel.get(key) for key in (1, 1.0, "1")] == ["1", "1.0", "'1'"]
    assert set(channel.stats()["keys"]) == {"1", "1.0", "'1'"}


def test_items_that_are_too_old_are_dropped_when_newer_ones_are_wanted(channel):
    channel.put_many(["old", "older"], version=1)
    channel.put("new", version=5)
    with pytest.raises(CallTimedOut):
        channel.get_many(2, min_version=5, timeout=0)
    assert channel.qsize() == 1
    assert channel.get(min_version=5) == "new"
    assert channel.stats()["keys"]["default_queue"]["dropped"] == 2


def test_a_put_as_a_whole_waits_for_room_for_all():
    channel = Channel.create("whole", maxsize=3, local=True)
    channel.put_many([1, 2])
    with pytest.raises(CallTimedOut):
        channel.put_many([3, 4], whole=True, timeout=0)
    assert channel.qsize() == 2
    put = channel.put_many([3, 4], whole=True, async_op=True)
    assert channel.get() == 1
    put.wait(60)
    assert channel.get_many(3) == [2, 3, 4]
    with pytest.raises(ConfigError, match="4 items can never fit at once: the most are 3"):
        channel.put_many(range(4), whole=True)


STEPS = st.one_of(st.lists(st.integers(), min_size=1, max_size=4), st.integers(1, 4), st.just("given back"))


@given(st.lists(STEPS, max_size=30), st.integers(1, 6))
def test_it_is_a_plain_queue_whatever_is_put_as_a_whole_taken_and_given_back(todo, capacity):
    settings = ChannelSettings(maxsize=capacity, max_bytes=0, distributed=False, nodes=(0,))
    channel, expected = Channel("plain", settings, local=LocalClient("plain", settings)), []
    for one in todo:
        if isinstance(one, list):
            if len(one) > capacity:
                continue
            if len(expected) + len(one) > capacity:
                with pytest.raises(CallTimedOut):
                    channel.put_many(one, whole=True, timeout=0)
            else:
                channel.put_many(one, whole=True, timeout=0)
                expected += one
        elif one == "given back":
            if expected:
                lease = channel.lease(timeout=0)
                assert lease.__enter__() == expected[0]
                lease.give_back()
        elif one <= len(expected):
            assert channel.get_many(one, timeout=0) == expected[:one]
            del expected[:one]
        else:
            with pytest.raises(CallTimedOut):
                channel.get_many(one, timeout=0)
        assert channel.qsize() == len(expected)


class Interrupted(BaseException):
    """What a handler of a signal raises."""


@pytest.fixture
def alarm():
    """Raises in the main thread of this process when it waits."""

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    threads = []

    def when(is_time):
        def press():
            wait_until(is_time, "it waits")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

        threads.append(threading.Thread(target=press))
        threads[-1].start()

    yield when
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


def leased(channel):
    with channel.lease():
        pass


@pytest.mark.parametrize(
    "call",
    [Channel.get, leased, lambda one: next(iter(one)), lambda one: one.get_many(2), lambda one: one.get_batch(2)],
    ids=["get", "lease", "loop", "get_many", "get_batch"],
)
def test_a_get_that_a_signal_handler_ends_takes_nothing(channel, alarm, call):
    alarm(lambda: line(channel)["getters"])
    with pytest.raises(Interrupted):
        call(channel)
    wait_until(lambda: not line(channel)["getters"], "it is withdrawn")
    channel.put("kept")
    assert channel.get(timeout=60) == "kept"


def line(channel):
    return channel.stats()["keys"].get("default_queue", {"getters": {}, "putters": {}})


@pytest.mark.parametrize("is_after_another", [False, True])
def test_a_put_that_a_signal_handler_ends_is_withdrawn(alarm, is_after_another):
    channel = Channel.create(f"withdrawn-{is_after_another}", maxsize=1, local=True)
    channel.put("first")
    before = channel.put("before", async_op=True) if is_after_another else None
    alarm(lambda: line(channel)["putters"].get("this process") == 1 + is_after_another)
    with pytest.raises(Interrupted):
        channel.put("second")
    assert channel.get() == "first"
    if before is not None:
        before.wait(60)
        assert channel.get() == "before"
    assert channel.empty()


def test_a_task_that_is_cancelled_in_a_lease_gives_its_item_back(channel):
    async def use():
        async with channel.lease():
            raise asyncio.CancelledError

    channel.put("kept")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(use())
    handle = channel.get(async_op=True)
    del handle
    assert channel.get(timeout=60) == "kept"


class Own:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


PLAIN = [
    None,
    b"",
    b"x" * 8191,
    b"x" * 8192,
    b"x" * (3 << 20),
    bytearray(b"y" * 10_000),
    "",
    "text" * 5000,
    [],
    {"a": [b"z" * 9000, (1, 2.5, None)]},
    np.arange(20_000),
    Own(b"w" * 8192),
]


def is_equal(one, other):
    return type(one) is type(other) and (np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


class Served:
    """A channel with some homes, each with a wire of its own, and a client of all of them, in one process."""

    def __init__(self, homes=1, **settings):
        self.directory = PlainDirectory()
        self.endpoints = []
        self.settings = ChannelSettings(
            **{"maxsize": 0, "max_bytes": 0} | settings, distributed=homes > 1, nodes=tuple(range(homes))
        )
        self.homes = []
        for rank in range(homes):
            endpoint = self.endpoint(f"served:{rank}", rank)
            self.homes.append(Home(endpoint.own, self.settings, "served"))
            self.homes[-1].open(endpoint)
        self.channel = self.client(0)

    def client(self, node):
        made = Channel("served", self.settings)
        with pytest.MonkeyPatch.context() as patch:
            messages = Messages(self.new_endpoint(f"client:{len(self.endpoints)}", node))
            patch.setattr("roost.comm.channels.channel.process_messages", lambda _: messages)
            made._connect()
        return made

    def new_endpoint(self, address, node):
        own = PeerInfo(address=address, instance=own_instance(), node=f"node {node}", node_rank=node)
        self.endpoints.append(Endpoint(own, b"secret", self.directory, "127.0.0.1"))
        return self.endpoints[-1]

    def endpoint(self, address, node):
        return Messages(self.new_endpoint(address, node)).endpoint


@pytest.fixture
def serve():
    made = []

    def start(*args, **kwargs):
        made.append(Served(*args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        for endpoint in one.endpoints:
            endpoint.close()


def test_a_put_of_many_that_is_too_late_sends_no_more_and_later_puts_stay_in_order(serve, monkeypatch):
    served = serve(maxsize=1)
    channel, home = served.channel, served.homes[0]
    sent, send = [], Peer.request

    def request(peer, *arguments):
        sent.append(peer)
        send(peer, *arguments)

    monkeypatch.setattr(Peer, "request", request)
    channel.put("first")
    with pytest.raises(CallTimedOut):
        channel.put_many([np.zeros(1 << 21, np.uint8) for _ in range(30)], timeout=0.3)
    assert len(sent) < 10, "what was not on its way when it was too late stays here"
    with home._lock:
        # It answers late: what was withdrawn is unanswered while more is put.
        with pytest.raises(CallTimedOut):
            channel.put_many([np.zeros(1 << 21, np.uint8) for _ in range(8)], timeout=0.1)
        puts = [channel.put(np.full(1 << 21, number, np.uint8), async_op=True) for number in range(8)]
    got = [channel.get(timeout=30)]
    puts += [channel.put(np.full(1 << 21, number, np.uint8), async_op=True) for number in range(8, 12)]
    got += [int(channel.get(timeout=30)[0]) for _ in range(12)]
    for put in puts:
        put.wait(30)
    assert got == ["first", *range(12)]


def test_a_put_that_is_withdrawn_in_the_moment_in_which_it_is_sent_stays_out(serve, monkeypatch):
    channel = serve(maxsize=1).channel
    channel.put("first")
    send = Client.send_put

    def send_put(client, put):
        put.withdraw()
        send(client, put)

    monkeypatch.setattr(Client, "send_put", send_put)
    late = channel.put("second", async_op=True)
    wait_until(lambda: late.is_done, "it is withdrawn")
    assert channel.get(timeout=30) == "first"
    assert channel.qsize() == 0


@pytest.mark.parametrize("where", ["here", "the same node", "another node"])
def test_plain_values_of_every_kind_arrive_as_they_were_put(serve, channel, where):
    if where != "here":
        channel = serve().client(0 if where == "the same node" else 1)
    for thing in PLAIN:
        channel.put(thing)
        assert is_equal(channel.get(timeout=60), thing)
        channel.put(thing)
        with channel.lease(timeout=60) as leased:
            assert is_equal(leased, thing)
    channel.put_many(PLAIN)
    assert all(map(is_equal, channel.get_many(len(PLAIN), timeout=60), PLAIN))
    channel.put_many(PLAIN)
    channel.close()
    assert all(map(is_equal, channel, PLAIN))


@pytest.mark.parametrize("where", ["here", "the same node", "another node"])
def test_tensors_of_every_kind_arrive_as_they_were_put(serve, channel, where):
    pytest.importorskip("torch")
    from tensors import are_equal, of_every_kind

    if where != "here":
        channel = serve().client(0 if where == "the same node" else 1)
    things = of_every_kind()
    for thing in things:
        channel.put(thing)
        assert are_equal(channel.get(timeout=60), thing)
    for is_loop in (False, True):
        channel.put_many([*things, things])
        if is_loop:
            channel.close()
        *found, together = list(channel) if is_loop else channel.get_many(len(things) + 1, timeout=60)
        for got in (found, together):
            assert all(map(are_equal, got, things))


def test_a_tensor_that_arrived_is_memory_of_its_own(serve):
    torch = pytest.importorskip("torch")
    channel, sent = serve().channel, torch.arange(100_000.0)
    channel.put(sent)
    sent.zero_()
    found = channel.get(timeout=60)
    found += 1
    assert found.tolist() == [number + 1.0 for number in range(100_000)]


def test_each_key_of_a_spread_channel_has_one_home_for_all_clients(serve):
    served = serve(3)
    clients = [served.client(node) for node in range(3)]
    keys = [*range(50), *map(str, range(50)), *(number / 2 for number in range(50))]
    for number, key in enumerate(keys):
        clients[number % 3].put(key, key=key)
    assert all(home.queues.totals()["depth"] for home in served.homes)
    for number, key in enumerate(keys):
        assert clients[(number + 1) % 3].qsize(key) == 1
        assert clients[(number + 2) % 3].get(key, timeout=60) == key


def test_an_item_that_three_processes_died_with_is_set_aside_and_the_log_says_so(serve, caplog):
    served = serve()
    served.channel.put_many(["deadly", "next"])
    for _ in range(3):
        dying = served.client(0)
        lease = dying.lease(timeout=60)
        assert lease.__enter__() == "deadly"
        dying._endpoint.close()
        wait_until(lambda: not line(served.channel)["leased"], "its death is noticed")
    assert served.channel.get(timeout=60) == "next"
    assert line(served.channel)["set_aside"] == 1
    assert "1 item is set aside, since three processes that had got them died" in caplog.text


def test_counts_of_a_key_that_is_empty_are_kept_and_there_are_not_too_many(channel):
    for _ in range(3):
        channel.put(1)
        channel.get()
    assert (line(channel)["puts"], line(channel)["gets"], line(channel)["depth"]) == (3, 3, 0)
    for key in range(1000):
        channel.put(1, key=key)
        channel.get(key)
    assert len(channel.stats()["keys"]) < 300


def test_what_was_lent_for_an_item_comes_back_if_the_item_cannot_be_put(serve):
    channel = serve().channel
    client, key = channel._place("k")
    loans = _here[channel._endpoint.own]

    def put():
        lending = Lending(loans, "")
        lending.number = loans.add(lending)
        client.put([PutOperation(client, key, [(pack(1), 0, 1, lending)])], False, None)

    put()
    assert len(loans._lent) == 1
    channel.close()
    with pytest.raises(ChannelClosed):
        put()
    assert len(loans._lent) == 1
