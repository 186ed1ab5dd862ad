"""Two endpoints in one process: who may connect, and what a stranger can do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import importlib
import os
import resource
import secrets
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from roost import CallTimedOut, ClusterError, ConfigError, Worker
from roost.comm.collectives import broadcast
from roost.comm.devices import DeviceLock
from roost.comm.messages import Messages
from roost.comm.move.cuda import DeviceMemory
from roost.comm.move.loans import Lending, Loan, _here
from roost.comm.move.memory import copy
from roost.comm.process import JobDirectory, PlainDirectory, _plain_directory
from roost.comm.wire.connection import Kind, PeerInfo
from roost.comm.wire.endpoint import Endpoint, Listing, own_instance
from roost.comm.wire.loop import Handle
from roost.errors import WorkerDied, WorkerFailed
from roost.testing import as_worker
from waiting import wait_until

pytestmark = pytest.mark.heavy


class Pair:
    """Two members of a job, on the same node or on two."""

    def __init__(self, *, is_near: bool) -> None:
        self.directory = PlainDirectory()
        self.one = self.make("a:0", 0)
        self.two = self.make("b:0", 0 if is_near else 1)

    def make(self, address: str, node: int, secret: bytes = b"secret") -> Messages:
        own = PeerInfo(address=address, instance=own_instance(), node=f"node {node}", node_rank=node)
        return Messages(Endpoint(own, secret, self.directory, "127.0.0.1"))

    def listing(self, address: str) -> Listing:
        return self.directory.find(address, "", lambda: None).result(10)

    def close(self) -> None:
        self.one.endpoint.close()
        self.two.endpoint.close()


@pytest.fixture(params=[True, False], ids=["near", "far"])
def pair(request):
    made = Pair(is_near=request.param)
    yield made
    made.close()


def test_what_is_sent_arrives_in_order_large_and_small(pair):
    things = [number if number % 3 else np.full(100_000 * (number + 1), number) for number in range(12)]
    for thing in things:
        pair.one.send(thing, "b:0")
    for thing in things:
        np.testing.assert_equal(pair.two.receive("a:0").wait(30), thing)


def test_an_address_that_this_machine_does_not_have_is_named():
    own = PeerInfo(address="a:0", instance=own_instance(), node="node 0", node_rank=0)
    # An address for documentation, which no machine has.
    with pytest.raises(ClusterError, match=r"a:0 cannot listen at 192\.0\.2\.1: Cannot assign requested address"):
        Messages(Endpoint(own, b"secret", PlainDirectory(), "192.0.2.1"))


def test_threads_that_read_themselves_and_those_that_do_not_all_get_theirs(pair):
    count = 300
    got = {tag: [] for tag in range(4)}

    def receive(tag):
        for number in range(count):
            # Some find it there, some read it themselves, and some give up reading and sleep.
            time.sleep(0.03 if number % 100 == tag else 0)
            got[tag].append(pair.two.wait_for_next("a:0", tag, None, 30))

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in got]
    for thread in threads:
        thread.start()
    handles = [pair.two.receive("a:0", "not waited for") for _ in range(count)]
    for number in range(count):
        time.sleep(0.03 if number % 100 == 50 else 0)
        for tag in (*got, "not waited for"):
            pair.one.send(number, "b:0", tag)
    for thread in threads:
        thread.join(60)
    assert got == {tag: list(range(count)) for tag in got}
    assert [handle.wait(30) for handle in handles] == list(range(count))


def test_a_thread_that_reads_itself_notices_the_end_of_the_endpoint(pair):
    pair.one.send(1, "b:0")
    assert pair.two.receive("a:0").wait(30) == 1
    errors = []

    def receive():
        with pytest.raises(ClusterError) as found:
            pair.two.wait_for_next("a:0", None, None, 30)
        errors.append(str(found.value))

    thread = threading.Thread(target=receive)
    thread.start()
    wait_until(lambda: list(pair.two.mailbox.receives()), "it waits")
    pair.two.endpoint.close()
    thread.join(30)
    assert errors == ["the communication of this process has ended"]


def test_a_pickle_of_many_bytes_arrives(pair):
    thing = [str(number) * 10 for number in range(300_000)]
    pair.one.send(thing, "b:0")
    assert pair.two.receive("a:0").wait(30) == thing


@pytest.mark.heavy
def test_more_buffers_than_two_bytes_count_arrive(monkeypatch):
    monkeypatch.setattr("roost.comm.packing._OUT_OF_BAND", 1)
    pair = Pair(is_near=True)
    pair.one.send([np.uint8([number % 256]) for number in range(1 << 16)], "b:0")
    arrived = pair.two.receive("a:0").wait(60)
    assert [int(array[0]) for array in arrived] == [number % 256 for number in range(1 << 16)]
    pair.close()


def test_requests_that_arrive_before_there_is_an_answer_wait_for_it(pair):
    count = 600
    handles = [Handle(pair.one.endpoint.loop) for _ in range(count)]
    for handle in handles:
        pair.one.endpoint.request("b:0", b"ask", bytes(1000), (), handle)
    two = pair.two.endpoint
    wait_until(lambda: len(two._early) >= 256, "some of them are there")
    two.serve(lambda connection, frame: connection.send(Kind.REPLY, frame.number, b"yes"))
    assert [handle.wait(30).envelope for handle in handles] == [b"yes"] * count


def test_a_wait_for_a_worker_that_is_not_there_is_logged_once(caplog):
    pair = Pair(is_near=True)
    waits = []
    find = pair.directory.find
    pair.directory.find = lambda address, but_not, on_wait: (waits.append(on_wait), find(address, but_not, on_wait))[1]
    waiting = pair.two.receive("late:0")
    for _ in range(3):
        waits[0]()
    wait_until(lambda: caplog.messages, "it is logged")
    late = pair.make("late:0", 0)
    late.send("here", "b:0")
    assert waiting.wait(30) == "here"
    assert caplog.messages == ["b:0 waits for late:0, which is not launched or has not communicated yet"]
    late.endpoint.close()
    pair.close()


def test_a_manager_that_is_being_restarted_is_asked_again():
    exceptions = pytest.importorskip("ray.exceptions")
    answers = [Future(), Future()]
    answers[0].set_exception(exceptions.ActorUnavailableError("restarting", None))
    answers[1].set_result("a listing")
    asked = []

    def ask(*arguments):
        asked.append(arguments[:2])
        return SimpleNamespace(future=lambda: answers[len(asked) - 1])

    handle = SimpleNamespace(get_endpoint=SimpleNamespace(remote=ask))
    directory = JobDirectory(SimpleNamespace(worker_manager=SimpleNamespace(handle=handle)))
    assert directory.find("b:0", "old", lambda: None).result(30) == "a listing"
    assert asked == [("b:0", "old")] * 2


class Interrupted:
    """A socket that writes a part of what it is given, and then has the user press Ctrl-C."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def send(self, data, flags=0):
        return self.sendmsg([data], (), flags)

    def sendmsg(self, parts, ancillary=(), flags=0):
        count = self.sock.sendmsg([parts[0][:7]], ancillary, flags)
        signal.raise_signal(signal.SIGINT)
        return count


def test_ctrl_c_between_a_write_and_the_note_of_it_leaves_the_stream_whole(pair):
    pair.one.send("first", "b:0").wait(30)
    connection = pair.one.endpoint.peer("b:0").connection
    connection._sock = Interrupted(connection._sock)
    with pytest.raises(KeyboardInterrupt):
        pair.one.send("second", "b:0")
    connection._sock = connection._sock.sock
    pair.one.send("third", "b:0")
    assert [pair.two.receive("a:0").wait(30) for _ in range(3)] == ["first", "second", "third"]


def test_shared_memory_comes_back_when_the_array_is_dropped():
    pair = Pair(is_near=True)
    for value in range(20):
        pair.one.send(np.full(1 << 20, value, np.uint8), "b:0")
        array = pair.two.receive("a:0").wait(30)
        assert array[0] == value
        del array
    pool = pair.one.endpoint.shared
    wait_until(lambda: pool.counts["used"] == 0, "all memory is back")
    # The news that one is back may come late.
    assert pool.counts["free"] <= 10
    pair.close()


def test_shared_memory_that_is_not_kept_is_unmapped_at_both_ends(monkeypatch):
    monkeypatch.setattr("roost.comm.move.memory._KEPT_BYTES", 1 << 20)
    pair = Pair(is_near=True)
    for value in range(5):
        pair.one.send(np.full(1 << 21, value, np.uint8), "b:0")
        assert pair.two.receive("a:0").wait(30)[0] == value
    one, two = pair.one.endpoint.peer("b:0"), pair.two.endpoint.peer("a:0").connection
    wait_until(lambda: not one._numbers and not two._maps, "both ends have forgotten it")
    pair.close()


def test_an_array_that_is_kept_is_not_overwritten():
    pair = Pair(is_near=True)
    for value in range(5):
        pair.one.send(np.full(1 << 20, value, np.uint8), "b:0")
    kept = [pair.two.receive("a:0").wait(30) for _ in range(5)]
    pair.one.send(np.full(1 << 20, 77, np.uint8), "b:0")
    pair.close()
    assert [int(array[-1]) for array in kept] == list(range(5))


def test_one_that_keeps_many_arrays_has_copies_of_them_and_leaves_shared_memory_to_others():
    pair = Pair(is_near=True)
    meet(pair)
    kept = []
    for value in range(200):
        pair.one.send(np.full(1 << 17, value, np.uint8), "b:0")
        kept.append(pair.two.receive("a:0").wait(30))
    pool = pair.one.endpoint.shared
    wait_until(lambda: pool.counts["used"] <= 64, "what is copied comes back")
    assert pool.counts["used"] > 60
    assert [(int(array[0]), int(array[-1])) for array in kept] == [(value, value) for value in range(200)]
    del kept
    wait_until(lambda: pool.counts["used"] == 0, "all memory is back")
    pair.close()


def test_ctrl_c_while_scarce_memory_is_copied_loses_nothing(monkeypatch):
    pair = Pair(is_near=True)
    meet(pair)
    kept = []
    for value in range(80):
        pair.one.send(np.full(1 << 17, value, np.uint8), "b:0")
        kept.append(pair.two.receive("a:0").wait(30))
    pressed = []

    sender = threading.Thread(
        target=lambda: [pair.one.send(np.full(1 << 17, value, np.uint8), "b:0") for value in (80, 81)]
    )

    def copy_and_press(source, target, size):
        copy(source, target, size)
        # Not while the sender copies.
        if threading.current_thread() is not sender and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("roost.comm.wire.peer.copy", copy_and_press)
    first, second = pair.two.receive("a:0"), pair.two.receive("a:0")

    def send_and_wait():
        sender.start()
        first.wait(30)
        second.wait(30)

    with pytest.raises(KeyboardInterrupt):
        send_and_wait()
    assert [int(handle.wait(30)[-1]) for handle in (first, second)] == [80, 81]
    assert [int(array[-1]) for array in kept] == list(range(80))
    pair.close()


def test_the_end_of_one_is_noticed_by_the_other_after_what_it_had_sent(pair):
    pair.one.send("last words", "b:0").wait(30)
    first = pair.two.receive("a:0")
    second = pair.two.receive("a:0")
    assert first.wait(30) == "last words"
    pair.one.endpoint.close()
    with pytest.raises(WorkerDied, match="a:0 on node 0 is gone"):
        second.wait(30)


@contextlib.contextmanager
def held_up(messages):
    """Keep the communication thread of a process busy."""
    gate = threading.Event()
    messages.endpoint.loop.start()
    messages.endpoint.loop.call(gate.wait)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Where Ctrl-C can interrupt, the main thread leaves some things to the one that is held up.
            patch.setattr("roost.comm.wire.loop._signals", [])
            yield
    finally:
        gate.set()


def meet(pair):
    pair.one.send(1, "b:0").wait(30)
    assert pair.two.receive("a:0").wait(30) == 1


def test_a_send_that_waits_for_a_process_that_dies_fails(pair):
    meet(pair)
    with held_up(pair.two):
        sent = pair.one.send([str(number) * 200 for number in range(60_000)], "b:0")
        assert not sent.done()
        # It waits in the end for its thread, which is held up.
        ending = threading.Thread(target=pair.two.endpoint.close)
        ending.start()
        with pytest.raises(WorkerDied, match=r"b:0 on node \d is gone"):
            sent.wait(30)
    ending.join()


@pytest.mark.parametrize("whose", ["two", "one"])
def test_a_tensor_that_is_not_received_ends_with_either_process(whose):
    pair = Pair(is_near=True)
    meet(pair)
    sent = pair.one.send_tensor(np.zeros(1 << 24, np.uint8), "b:0")
    wait_until(lambda: pair.two._arriving, "a part of it is there")
    getattr(pair, whose).endpoint.close()
    with pytest.raises(ClusterError, match="is gone" if whose == "two" else "communication of this process has ended"):
        sent.wait(30)
    pair.close()


def part_of_a_tensor(pair, tensor):
    """Send a tensor while the sender is held up: two chunks of it arrive."""
    sent = pair.one.send_tensor(tensor, "b:0")
    wait_until(lambda: [one for one in pair.two._arriving.values() if one.missing == tensor.nbytes - (1 << 22)], "two")
    return sent


def test_the_receiver_of_a_part_of_a_tensor_ends_with_its_process():
    pair = Pair(is_near=True)
    meet(pair)
    with held_up(pair.one):
        part_of_a_tensor(pair, np.zeros(1 << 24, np.uint8))
        handle = pair.two.receive("a:0", into=np.empty(1 << 24, np.uint8))
        pair.two.endpoint.close()
        with pytest.raises(ClusterError, match="the communication of this process has ended"):
            handle.wait(30)
    pair.close()


def test_a_tensor_of_which_a_part_is_there_at_a_timeout_goes_to_the_next_receive():
    pair = Pair(is_near=True)
    meet(pair)
    tensor = np.arange(1 << 22, dtype=np.int32)
    late, target = np.zeros_like(tensor), np.zeros_like(tensor)
    with held_up(pair.one):
        sent = part_of_a_tensor(pair, tensor)
        with pytest.raises(CallTimedOut, match="b:0 has got no message from a:0"):
            pair.two.wait_for_next("a:0", None, late, 0.05)
        at_the_timeout = late.copy()
    pair.two.wait_for_next("a:0", None, target, 30)
    sent.wait(30)
    assert np.array_equal(target, tensor)
    assert np.array_equal(late, at_the_timeout)
    pair.close()


def test_the_rest_of_a_tensor_comes_although_too_much_else_waits(monkeypatch):
    monkeypatch.setattr("roost.comm.messages._MOST_WAITING", 1 << 20)
    pair = Pair(is_near=True)
    meet(pair)
    tensor, target = np.arange(1 << 22, dtype=np.int32), np.zeros(1 << 22, np.int32)
    pair.one.send_tensor(tensor, "b:0", "tensor")
    pair.one.send(np.zeros(1 << 22), "b:0")
    wait_until(lambda: pair.two._holding, "too much waits")
    handle = pair.two.receive("a:0", "tensor", target)
    wait_until(handle.done, "all of it is there")
    assert np.array_equal(target, tensor)
    pair.close()


class Unreadable:
    """A tag that the receiver cannot make."""

    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how


UNREADABLE = {
    "No module named 'no_such_module'": (importlib.import_module, ("no_such_module",)),
    "SystemExit: 3": (sys.exit, (3,)),
    "unhashable type: 'list'": (list, ()),
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_a_tag_that_cannot_be_read_is_the_error_of_its_message_alone(pair, why):
    for number in range(5):
        pair.one.send(number, "b:0")
    bad = pair.one.send("bad", "b:0", Unreadable(*UNREADABLE[why]))
    for number in range(5, 10):
        pair.one.send(number, "b:0")
    after = pair.one.send("after", "b:0", "tag")
    with pytest.raises(WorkerFailed, match=f"b:0 cannot read the tag of a message from a:0: .*{why}"):
        bad.wait(30)
    assert [pair.two.receive("a:0").wait(30) for _ in range(10)] == list(range(10))
    assert pair.two.receive("a:0", "tag").wait(30) == "after"
    after.wait(30)


@pytest.mark.parametrize("tag", [float("nan"), (1, float("nan")), ["a", "list"], {}], ids=repr)
def test_a_tag_that_nobody_could_name_is_refused(pair, tag):
    for use in (
        lambda: pair.one.send("lost", "b:0", tag),
        lambda: pair.two.receive("a:0", tag),
        lambda: pair.two.wait_for_next("a:0", tag, None, 0.01),
    ):
        with pytest.raises(ConfigError, match="tag is"):
            use()


@pytest.mark.parametrize("timeout", ["1", b"", [], True, float("nan"), np.arange(3), {}], ids=repr)
def test_what_is_no_number_of_seconds_is_refused(timeout):
    pair = Pair(is_near=True)
    for use in (
        lambda: pair.two.wait_for_next("a:0", None, None, timeout),
        lambda: pair.two.receive("a:0").wait(timeout),
        lambda: DeviceLock([]).acquire(timeout),
    ):
        with pytest.raises(ConfigError, match=r"timeout is .*: it is a number of seconds, or None"):
            use()
    pair.one.send("sent", "b:0")
    assert pair.two.wait_for_next("a:0", None, None, 10**400) == "sent"
    pair.close()


class Own:
    """A class of the test's own, as a tag and as a thing."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Own and other.value == self.value

    def __hash__(self):
        return hash(self.value)


PLAIN = [
    None, 0, "", b"", "text", bytes(8191), bytes(8192), b"x" * 3_000_000, bytearray(8192), [], [b"x" * 9000, {"a": ()}],
    np.arange(5), np.zeros(0), np.arange(100_000.0), {"nested": [np.ones(20_000), b"y" * 70_000]}, Own(3),
]  # fmt: skip


@pytest.mark.parametrize("to", ["b:0", "a:0"], ids=["another", "oneself"])
def test_plain_values_of_every_kind_arrive(pair, to):
    target = pair.two if to == "b:0" else pair.one
    for thing in PLAIN:
        pair.one.send(thing, to, Own(1)).wait(30)
        pair.one.send(thing, to, payload=7).wait(30)
    for thing in PLAIN:
        for got in (target.receive("a:0", Own(1)).wait(30), target.receive("a:0").wait(30)):
            kept, payload = got if isinstance(got, tuple) else (got, 7)
            assert payload == 7
            assert type(kept) is type(thing)
            np.testing.assert_equal(kept, thing)


@pytest.mark.parametrize("size", [0, 1, 8192, 3_000_000])
def test_a_tensor_to_oneself_arrives(pair, size):
    target = np.zeros(size, np.uint8)
    pair.one.send_tensor(np.full(size, 7, np.uint8), "a:0").wait(30)
    pair.one.receive("a:0", into=target).wait(30)
    assert (target == 7).all()


def test_a_receive_whose_handle_is_dropped_takes_no_message(pair):
    meet(pair)
    handles = [pair.two.receive("a:0") for _ in range(3)]
    del handles[1]
    pair.one.send("first", "b:0")
    pair.one.send("second", "b:0")
    assert [handle.wait(30) for handle in handles] == ["first", "second"]
    unread = pair.two.receive("a:0")
    pair.one.send("third", "b:0")
    wait_until(unread.done, "it is here")
    del unread
    assert pair.two.receive("a:0").wait(30) == "third"


def test_a_task_that_was_cancelled_in_a_receive_takes_no_message(pair):
    """Also while the program keeps the task, and so its error."""
    meet(pair)

    async def cancel():
        async def receive():
            return await pair.two.receive("a:0")

        tasks = [asyncio.create_task(receive()) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        kept = await asyncio.gather(
            *(tasks[0], asyncio.wait_for(receive(), 0.01), pair.two.receive("a:0").async_wait(0.01)),
            return_exceptions=True,
        )
        with pytest.raises(CallTimedOut) as late:
            pair.two.receive("a:0").wait(0.01)
        kept.append(late.value)
        pair.one.send("first", "b:0")
        pair.one.send("second", "b:0")
        return kept, await tasks[1], await pair.two.receive("a:0")

    kept, *got = asyncio.run(asyncio.wait_for(cancel(), 30))
    assert [type(error) for error in kept] == [asyncio.CancelledError, TimeoutError, CallTimedOut, CallTimedOut]
    assert got == ["first", "second"]


def test_what_a_handler_of_a_signal_raises_takes_no_message(pair):
    meet(pair)

    def stop(*_):
        raise SystemExit

    before = signal.signal(signal.SIGUSR1, stop)
    # To this thread, which waits: another one would run the handler only after the wait.
    timer = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1])
    try:
        timer.start()
        with pytest.raises(SystemExit):
            pair.two.wait_for_next("a:0", None, None, 30)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    pair.one.send("for the next", "b:0")
    assert pair.two.wait_for_next("a:0", None, None, 30) == "for the next"


def reset(connection):
    """Break a connection as a network does: neither end has closed it."""
    sock = connection._sock
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            sock.shutdown(socket.SHUT_RDWR)
        else:
            # To an address of no family: the kernel resets the connection.
            ctypes.CDLL(None).connect(sock.fileno(), bytes(16), 16)


@pytest.mark.heavy
def test_nothing_is_lost_doubled_or_reordered_by_connections_that_break(pair):
    """In both directions at once, small and large, with shared buffers."""
    meet(pair)
    count, stopped = 5000, threading.Event()

    def thing(number):
        return np.full(20_000 + number, number, np.int64) if number % 50 == 0 else number

    def send(messages, to):
        for number in range(count):
            handle = messages.send(thing(number), to)
            if number % 100 == 0:
                handle.wait(60)

    got = {"b:0": [], "a:0": []}

    def receive(messages, source):
        for _ in range(count):
            got[source].append(messages.wait_for_next(source, None, None, 60))

    def breaks():
        for which in range(1, 20):
            # By what has arrived, and not by time: however quick the machine is, as many break.
            while len(got["a:0"]) < which * count // 20 and not stopped.wait(0.001):
                pass
            peer = (pair.one.endpoint.peers["b:0"], pair.two.endpoint.peers["a:0"])[which % 2]
            connection = peer.connection
            if connection is not None:
                reset(connection)

    threads = [
        threading.Thread(target=send, args=(pair.one, "b:0")),
        threading.Thread(target=send, args=(pair.two, "a:0")),
        threading.Thread(target=receive, args=(pair.two, "a:0")),
        threading.Thread(target=receive, args=(pair.one, "b:0")),
    ]
    breaker = threading.Thread(target=breaks)
    for thread in (*threads, breaker):
        thread.start()
    for thread in threads:
        thread.join(240)
    stopped.set()
    breaker.join()
    assert pair.one.endpoint.peers["b:0"].epoch > 3, "some of the breaks found a connection"
    for values in got.values():
        assert len(values) == count
        for number, value in enumerate(values):
            np.testing.assert_equal(value, thing(number))


def test_shared_memory_is_not_used_again_before_its_receiver_is_done_whatever_carried_it_first():
    """What was written inline to a connection that broke, and then through shared memory, is the receiver's."""
    pair = Pair(is_near=True)
    meet(pair)
    peer, first = pair.one.endpoint.peers["b:0"], np.full(100_000, 7)

    def send_over_what_breaks():
        connection = peer.connection
        connection.cut(ConnectionResetError())
        pair.one.send(first, "b:0")
        # As to another node, where a process goes that was not reached on its own.
        connection.is_inline = True
        peer._write_kept(connection)

    # In its thread, so that the connection that it reads is not opened again meanwhile.
    done = Handle(pair.one.endpoint.loop)
    pair.one.endpoint.loop.call(lambda: (send_over_what_breaks(), done.complete(None)))
    done.wait(30)
    for number in range(20):
        pair.one.send(np.full(100_000, 100 + number), "b:0")
        pair.one.send(number, "b:0", "next")
        assert pair.two.wait_for_next("a:0", "next", None, 30) == number
    np.testing.assert_equal(pair.two.wait_for_next("a:0", None, None, 30), first)
    pair.close()


def test_requests_are_answered_once_although_connections_break(pair):
    meet(pair)
    asked = []
    pair.two.endpoint.serve(
        lambda peer, frame: (asked.append(frame.number), peer.send(Kind.REPLY, frame.number, b"", frame.data))
    )
    handles = []
    for number in range(2000):
        handle = Handle(pair.one.endpoint.loop)
        pair.one.endpoint.request("b:0", b"", str(number).encode(), (), handle)
        handles.append(handle)
        if number % 300 == 0:
            connection = pair.one.endpoint.peers["b:0"].connection
            if connection is not None:
                reset(connection)
    assert [handle.wait(60).data for handle in handles] == [str(number).encode() for number in range(2000)]
    assert len(asked) == len(set(asked)) == 2000


def test_two_that_connect_at_once_have_one_wire_in_the_end():
    for _ in range(20):
        pair = Pair(is_near=True)
        with held_up(pair.one), held_up(pair.two):
            pair.one.send("to b", "b:0")
            pair.two.send("to a", "a:0")
        assert pair.two.receive("a:0").wait(30) == "to b"
        assert pair.one.receive("b:0").wait(30) == "to a"
        one, two = pair.one.endpoint.peers["b:0"], pair.two.endpoint.peers["a:0"]
        wait_until(lambda one=one, two=two: one.is_open and two.is_open, "both are connected")
        assert one.session == two.session
        pair.close()


def test_two_that_connected_at_once_have_the_same_wire_after_a_break_whoever_connects_again():
    others = 0
    while others < 3:
        pair = Pair(is_near=True)
        with held_up(pair.one), held_up(pair.two):
            pair.one.send("to b", "b:0")
            pair.two.send("to a", "a:0")
        assert pair.two.receive("a:0").wait(30) == "to b"
        assert pair.one.receive("b:0").wait(30) == "to a"
        one, two = pair.one.endpoint.peers["b:0"], pair.two.endpoint.peers["a:0"]
        wait_until(lambda one=one, two=two: one.is_open and two.is_open, "both are connected")
        # This end had proposed another name for the wire than it has now.
        others += one.proposed not in ("", one.session)
        epoch = one.epoch
        with held_up(pair.two):
            reset(one.connection)
            wait_until(lambda one=one: one.dialing is not None, "it connects again")
        wait_until(lambda one=one, epoch=epoch: one.is_over or (one.is_open and one.epoch > epoch), "it is connected")
        assert (one.error, two.error) == (None, None)
        for number in range(2):
            pair.one.send(number, "b:0")
            pair.two.send(number, "a:0")
            assert pair.two.receive("a:0").wait(30) == pair.one.receive("b:0").wait(30) == number
        pair.close()


def test_a_process_that_has_given_a_peer_up_says_so_to_it(monkeypatch):
    monkeypatch.setattr("roost.comm.wire.endpoint.LOST_SECONDS", 0.2)
    pair = Pair(is_near=False)
    meet(pair)
    errors = []
    waiting = [pair.two.receive("a:0"), pair.one.receive("b:0")]
    with held_up(pair.one):
        two = pair.two.endpoint.peers["a:0"]
        two.listing = replace(two.listing, port=1)
        reset(two.connection)
        with pytest.raises(WorkerDied) as found:
            waiting[0].wait(30)
        errors.append(str(found.value))
    with pytest.raises(WorkerDied) as found:
        waiting[1].wait(30)
    errors.append(str(found.value))
    assert all("is lost" in error or "is gone" in error for error in errors)
    pair.one.send("a new wire", "b:0")
    assert pair.two.receive("a:0").wait(30) == "a new wire"
    pair.close()


def test_a_receiver_without_descriptors_gets_buffers_through_the_socket(caplog):
    pair = Pair(is_near=True)
    meet(pair)
    pair.one.send(np.full(1 << 20, 1, np.uint8), "b:0")
    kept = [pair.two.receive("a:0").wait(30)]
    connection = pair.two.endpoint.peers["a:0"].connection
    # As the kernel does when the table of the process is full: the bytes come, the descriptor does not.
    connection._sock = Full(connection._sock)
    for value in range(2, 12):
        pair.one.send(np.full(1 << 20, value, np.uint8), "b:0")
        pair.one.send(value, "b:0")
    for value in range(2, 12):
        kept.append(pair.two.receive("a:0").wait(30))
        assert pair.two.receive("a:0").wait(30) == value
    assert [int(array[-1]) for array in kept] == list(range(1, 12))
    assert "this process has no descriptor left" in caplog.text
    del kept
    wait_until(lambda: pair.one.endpoint.shared.counts["used"] == 0, "all memory is back")
    pair.close()


def test_a_piece_of_a_tensor_whose_connection_broke_before_it_was_written_is_done_when_it_has_arrived():
    pair = Pair(is_near=True)
    meet(pair)
    peer, content = pair.one.endpoint.peers["b:0"], bytes(1 << 20)
    shared = peer.share(content, len(content))
    with held_up(pair.two):
        reset(peer.connection)
        wait_until(lambda: not peer.is_open, "the break is noticed")
        sent = peer.send(Kind.MESSAGE, buffers=[shared], late=lambda: "b:0 has not taken it")
        assert not sent.done()
    assert pair.two.receive("a:0").wait(30) == content
    sent.wait(30)
    pair.close()


class Full:
    """A socket of a process whose table of descriptors is full."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def recvmsg_into(self, buffers, ancillary_size, flags=0):  # noqa: ARG002 - no room for any
        return self.sock.recvmsg_into(buffers, 0, flags)


def test_a_process_made_by_fork_does_not_keep_connections_open(pair):
    meet(pair)
    endpoints = pair.one.endpoint, pair.two.endpoint
    socks = {os.readlink(f"/proc/self/fd/{one.fileno()}") for each in endpoints for one in each._listeners}
    socks |= {os.readlink(f"/proc/self/fd/{peer.connection.fd}") for each in endpoints for peer in each.peers.values()}
    assert len(socks) == 6
    child = os.fork()
    if not child:
        left = {os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry)}
        os._exit(len(left & socks))
    assert os.waitpid(child, 0)[1] == 0
    meet(pair)


def test_a_new_process_of_the_name_gets_nothing_that_was_meant_for_the_old_one(pair):
    pair.one.send(1, "b:0").wait(30)
    assert pair.two.receive("a:0").wait(30) == 1
    pair.one.send("unheard", "b:0").wait(30)
    pair.two.endpoint.close()
    wait_until(lambda: "b:0" not in pair.one.endpoint.peers, "the end is noticed")
    pair.two = pair.make("b:0", pair.two.endpoint.own.node_rank)
    pair.one.send("for the new one", "b:0").wait(30)
    assert pair.two.receive("a:0").wait(30) == "for the new one"


def connect(listing: Listing, *, is_local: bool) -> socket.socket:
    if not is_local:
        return socket.create_connection((listing.host, listing.port), timeout=30)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(listing.local_name)
    return sock


def test_another_member_that_listens_at_the_port_of_a_dead_one_gets_nothing(pair):
    found = pair.listing("b:0")
    dead = PeerInfo(address="c:0", instance=own_instance(), node="node 1", node_rank=1)
    pair.directory.announce(Listing(peer=dead, local_name="", host=found.host, port=found.port))
    handle = pair.one.send(b"x" * 100_000, "c:0")
    time.sleep(0.2)
    assert not handle.done()
    assert pair.two.mailbox.size_from("a:0", pair.one.endpoint.own.instance) == 0
    third = pair.make("c:0", 1)
    handle.wait(30)
    assert third.receive("a:0").wait(30) == b"x" * 100_000
    third.endpoint.close()


def test_a_loan_ends_with_the_process_that_would_fetch_it_and_with_this_one():
    pair = Pair(is_near=True)
    pair.one.send(1, "b:0").wait(30)
    assert pair.two.receive("a:0").wait(30) == 1
    errors = {}
    for to in ("b:0", "c:0"):
        lending = Lending(_here[pair.one.endpoint.own], to)
        lending.number = _here[pair.one.endpoint.own].add(lending)
        lending.on_back = functools.partial(errors.__setitem__, to)
    pair.two.endpoint.close()
    wait_until(lambda: errors, "the end of the other is noticed")
    assert str(errors["b:0"]).startswith("b:0 on node 0 is gone")
    pair.one.endpoint.close()
    assert str(errors["c:0"]) == "the communication of this process has ended"


def test_a_restarted_process_does_not_answer_for_what_the_old_one_had_lent(monkeypatch):
    torch = pytest.importorskip("torch")
    pair = Pair(is_near=True)
    own, there = pair.one.endpoint.own, _here[pair.two.endpoint.own]
    loans = _here[own]
    # As in another process.
    monkeypatch.delitem(_here, own)
    lending = Lending(loans, "b:0")
    lending.tensors = [torch.ones(8, dtype=torch.uint8)]
    number = loans.add(lending)
    memory = DeviceMemory(device="GPU-0", handle=b"", offset=0, nbytes=8)
    old = PeerInfo(address="a:0", instance=own_instance(), node="node 0", node_rank=0)
    loan = Loan(owner=old, number=number, place=0, memory=memory, dtype="uint8", shape=(8,))
    with pytest.raises(WorkerDied, match="a:0 on node 0 has ended, and with it the tensor"):
        there.fetch(loan, torch.zeros(8, dtype=torch.uint8))
    there.give_back(old, number, [])
    pair.two.send("after it", "a:0")
    assert pair.one.receive("b:0").wait(30) == "after it"
    target = torch.zeros(8, dtype=torch.uint8)
    there.fetch(replace(loan, owner=own), target)
    assert target.sum() == 8
    there.give_back(own, number, [])
    wait_until(lambda: loans.tensor(number, 0) is None, "it is returned")
    pair.close()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_stranger_is_not_listened_to(pair, is_local):
    listing = pair.listing("b:0")
    for said in (secrets.token_bytes(200), struct.pack("<BBHIIQ", 1, 0, 0, 0, 3, 0) + b"xyz" * 100):
        with connect(listing, is_local=is_local) as sock:
            assert len(sock.recv(32)) == 32
            sock.sendall(said)
            try:
                answer = sock.recv(1)
            except ConnectionError:
                answer = b""
            assert answer == b""
    pair.one.send("fine", "b:0")
    assert pair.two.receive("a:0").wait(30) == "fine"


def test_one_with_another_secret_gets_nothing_through():
    pair = Pair(is_near=True)
    stranger = pair.make("c:0", 0, b"another secret")
    stranger.send("evil", "b:0")
    with pytest.raises(CallTimedOut, match="b:0 has got no message from any worker"):
        pair.two.receive("*").wait(0.5)
    stranger.endpoint.close()
    pair.close()


def test_thousands_of_strangers_that_say_half_a_greeting_hold_nothing_up(monkeypatch):
    monkeypatch.setattr("roost.comm.wire.endpoint._MOST_STRANGERS", 64)
    pair = Pair(is_near=False)
    listing = pair.listing("b:0")
    before = len(os.listdir("/proc/self/fd"))
    socks = []
    for _ in range(300):
        sock = connect(listing, is_local=False)
        sock.sendall(b"half")
        socks.append(sock)
    pair.one.send("fine", "b:0")
    assert pair.two.receive("a:0").wait(30) == "fine"
    wait_until(lambda: len(pair.two.endpoint._ungreeted) <= 64, "the oldest are closed")
    assert len(os.listdir("/proc/self/fd")) - before < 300 + 64 + 20
    for sock in socks:
        sock.close()
    pair.close()


def test_a_stranger_that_says_nothing_is_disconnected(monkeypatch):
    monkeypatch.setattr("roost.comm.wire.endpoint.GREET_SECONDS", 0.05)
    pair = Pair(is_near=False)
    with connect(pair.listing("b:0"), is_local=False) as sock:
        assert len(sock.recv(32)) == 32
        assert sock.recv(1) == b""
    pair.close()


def test_many_members_that_connect_at_once_are_not_taken_for_strangers():
    pair = Pair(is_near=True)
    members = []
    with held_up(pair.two):
        for rank in range(80):
            own = PeerInfo(address=f"c:{rank}", instance=own_instance(), node="node 0", node_rank=0)
            members.append(Messages(Endpoint(own, b"secret", pair.directory, None)))
            members[-1].send(rank, "b:0")
        for member in members:
            wait_until(lambda member=member: member.endpoint.peers["b:0"].dialing, "it has begun to connect")
    handles = [pair.two.receive(f"c:{rank}") for rank in range(80)]
    assert [handle.wait(60) for handle in handles] == list(range(80))
    for member in members:
        member.endpoint.close()
    pair.close()


def test_a_living_process_that_could_not_be_reached_is_tried_again():
    pair = Pair(is_near=True)
    own = PeerInfo(address="c:0", instance=own_instance(), node="node 1", node_rank=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    pair.directory.announce(Listing(peer=own, local_name="", host="127.0.0.1", port=port))
    pair.one.send("at last", "c:0")
    wait_until(lambda: pair.one.endpoint.peers["c:0"].tries, "it was refused")
    third = Messages(Endpoint(own, b"secret", PlainDirectory(), "127.0.0.1", port))
    assert third.receive("a:0").wait(60) == "at last"
    third.endpoint.close()
    pair.close()


def test_a_process_without_descriptors_accepts_later_and_does_not_spin():
    pair = Pair(is_near=False)
    listing = pair.listing("b:0")
    two, calls = pair.two.endpoint, []
    accept = two._accept
    two._accept = lambda listener: (calls.append(time.monotonic()), accept(listener))[1]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        sock.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno(), limits[1]))
        try:
            sock.connect((listing.host, listing.port))
            wait_until(lambda: len(calls) >= 3, "it tries again")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert calls[2] - calls[0] > 0.15
        assert len(sock.recv(32)) == 32
    pair.close()


@pytest.mark.heavy
def test_two_thousand_strangers_leave_nothing_behind():
    pair = Pair(is_near=False)
    listing = pair.listing("b:0")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2000):
        connect(listing, is_local=False).close()
    pair.one.send("fine", "b:0")
    assert pair.two.receive("a:0").wait(60) == "fine"
    wait_until(lambda: not pair.two.endpoint._ungreeted, "all of them are closed")
    assert len(os.listdir("/proc/self/fd")) - before < 20
    pair.close()


def test_few_descriptors_are_enough():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        pair = Pair(is_near=True)
        kept = []
        for value in range(100):
            pair.one.send(np.full(1 << 20, value, np.uint8), "b:0")
            kept.append(pair.two.receive("a:0").wait(60))
        assert [int(array[-1]) for array in kept] == list(range(100))
        pair.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.heavy
@pytest.mark.skipif(psutil.virtual_memory().available < 10 << 30, reason="needs 10 GB of memory")
def test_more_than_two_gigabytes_arrive_in_one_piece(pair):
    thing = np.zeros((1 << 31) + (1 << 20), np.uint8)
    thing[[0, 1 << 31, -1]] = 1, 2, 3
    sent = pair.one.send(thing, "b:0")
    arrived = pair.two.receive("a:0").wait(120)
    sent.wait(120)
    assert arrived.size == thing.size
    assert arrived[[0, 1 << 31, -1]].tolist() == [1, 2, 3]


def test_tensors_keep_what_numpy_does_not_have(pair):
    torch = pytest.importorskip("torch")
    things = [
        torch.arange(50_000).to(torch.bfloat16),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.zeros(0, 4, dtype=torch.bfloat16),
    ]
    pair.one.send(things, "b:0")
    for sent, came in zip(things, pair.two.receive("a:0").wait(60), strict=True):
        assert type(came) is type(sent)
        assert (came.dtype, came.shape, came.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
        assert torch.equal(came, sent)
    target = torch.zeros(50_000, dtype=torch.bfloat16)
    pair.one.send_tensor(things[0], "b:0")
    pair.two.receive("a:0", into=target).wait(60)
    assert torch.equal(target, things[0])


def test_arrays_that_are_read_only_or_overlap_arrive_as_they_look(pair):
    plain = np.arange(100_000.0)
    fixed = plain.copy()
    fixed.flags.writeable = False
    windows = np.lib.stride_tricks.sliding_window_view(plain, 3)
    wide = np.broadcast_to(plain[:1000], (50, 1000))
    for thing in (fixed, windows, wide, plain[::-2], {"both": (windows[5], fixed)}):
        pair.one.send(thing, "b:0")
        got = pair.two.receive("a:0").wait(30)
        np.testing.assert_equal(got, thing)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount")
@pytest.mark.parametrize("size", ["64k", "1m"])
def test_a_tiny_shared_memory_folder_does_not_matter(size):
    test = f"{__file__}::test_shared_memory_comes_back_when_the_array_is_dropped"
    run = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test])
    command = f"mount -t tmpfs -o size={size} none /dev/shm && exec {run}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=120)
    if done.returncode == 32:
        pytest.skip("this user cannot mount")
    assert done.returncode == 0, done.stdout


def test_workers_of_a_plain_process_talk_without_ray():
    with as_worker(rank=0, world_size=2, group_name="plain"):
        first = Worker()
    with as_worker(rank=1, world_size=2, group_name="plain"):
        second = Worker()
    second.send([1, 2], "plain", 0)
    assert first.recv("plain", 1, timeout=30) == [1, 2]
    first.send("me", "plain", 0)
    assert first.recv("plain", 0, timeout=30) == "me"
    for wrong in (-1, True, "0", 1.5, np.arange(3)):
        with pytest.raises(ConfigError, match="is not a rank of 'plain'"):
            first.send(1, "plain", wrong)
    for wrong in ("", None, np.arange(3)):
        with pytest.raises(ConfigError, match="is not the name of a group"):
            first.recv(wrong, 0)


def test_one_that_knows_the_code_does_not_know_the_secret_of_a_plain_process():
    with as_worker(rank=0, world_size=1, group_name="guarded"):
        guarded = Worker()
    own = PeerInfo(address="evil:0", instance=own_instance(), node="", node_rank=0)
    stranger = Messages(Endpoint(own, b"plain", _plain_directory, None))
    handle = guarded.recv("evil", 0, async_op=True)
    stranger.send("evil", "guarded:0")
    with pytest.raises(CallTimedOut):
        handle.wait(0.5)
    stranger.endpoint.close()


@pytest.mark.parametrize("node", [0, 1], ids=["near", "far"])
def test_a_driver_that_listens_nowhere_lives_through_a_reset_and_is_gone_when_it_ends(node):
    pair = Pair(is_near=True)
    own = PeerInfo(address="driver", instance=own_instance(), node="", node_rank=node)
    driver = Messages(Endpoint(own, b"secret", pair.directory, None))
    driver.send("first", "b:0")
    assert pair.two.receive("driver").wait(30) == "first"
    reset(pair.two.endpoint.peers["driver"].connection)
    driver.send("second", "b:0")
    assert pair.two.receive("driver").wait(30) == "second"
    waiting = [pair.two.receive("driver") for _ in range(3)]
    driver.endpoint.close()
    with pytest.raises(WorkerDied, match="driver is gone"):
        waiting[-1].wait(30)
    pair.close()


class Waits:
    """Notes the waits that the events of a process would have."""

    is_on, has_calls = True, False

    def __init__(self) -> None:
        self.began, self.ended = [], []

    def wait_began(self, key, whom, started, is_aside=False):  # noqa: ARG002 - as the emitter does
        self.began.append(whom())

    def wait_ended(self, key, whom, started, is_aside=False):  # noqa: ARG002 - likewise
        self.ended.append(whom())


def wait_in_a_coroutine(handle):
    async def wait():
        return await handle

    return asyncio.run(wait())


@pytest.mark.parametrize(
    "wait",
    [
        lambda two: two.wait_for_next("a:0", None, None, 30),
        lambda two: two.receive("a:0").wait(30),
        lambda two: wait_in_a_coroutine(two.receive("a:0")),
        lambda two: broadcast(two, "b:0", None, [("a", 0), ("b", 0)], None, False, None, 30),
        lambda two: broadcast(two, "b:0", None, [("a", 0), ("b", 0)], None, True, None, None).wait(30),
    ],
    ids=["recv", "handle.wait", "await", "broadcast", "broadcast with a handle"],
)
def test_each_wait_is_recorded_once(monkeypatch, wait):
    pair = Pair(is_near=True)
    meet(pair)
    waits, got = Waits(), []
    monkeypatch.setattr("roost.runtime.events.waits.emitter", waits)
    thread = threading.Thread(target=lambda: got.append(wait(pair.two)))
    thread.start()
    wait_until(lambda: waits.began, "it waits")
    (receive,) = pair.two.mailbox.receives()
    pair.one.send("sent", "b:0", receive.tag)
    thread.join(30)
    assert got == ["sent"]
    assert waits.began == waits.ended == ["a:0"]
    pair.close()


def test_a_send_that_is_held_up_is_recorded_as_one_wait(monkeypatch):
    pair = Pair(is_near=True)
    meet(pair)
    waits = Waits()
    monkeypatch.setattr("roost.runtime.events.waits.emitter", waits)
    with held_up(pair.two):
        thread = threading.Thread(target=pair.one.send([str(number) * 200 for number in range(60_000)], "b:0").wait)
        thread.start()
        wait_until(lambda: waits.began, "it waits")
    thread.join(30)
    assert waits.began == waits.ended == ["b:0"]
    pair.close()


def test_a_process_that_is_looked_for_in_the_moment_in_which_it_connects_has_one_wire(pair):
    endpoint = pair.two.endpoint
    lock, begun = endpoint.lock, []

    class Late:
        """The lock of the endpoint, before which another thread is quicker once."""

        def __enter__(self) -> None:
            if not begun and sys._getframe(1).f_code.co_name == "admit":
                begun.append(endpoint.peer("a:0"))
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    endpoint.lock = Late()
    pair.one.send("first", "b:0")
    # A receive would begin to look for it, too.
    wait_until(lambda: begun, "it connects")
    assert pair.two.receive("a:0").wait(30) == "first"
    assert begun == [endpoint.peers["a:0"]]
    pair.two.send("second", "a:0")
    assert pair.one.receive("b:0").wait(30) == "second"


def test_a_process_that_is_gone_before_its_wire_is_made_fails_what_is_asked_of_it(pair, monkeypatch):
    endpoint = pair.one.endpoint
    gone: Future[Listing] = Future()
    gone.set_exception(WorkerDied("c:0 is gone"))
    monkeypatch.setattr(pair.directory, "find", lambda *_: gone)
    do = endpoint.loop.do

    def slowly(function):
        """Go on only when the thread that reads has found that the process is gone."""
        do(function)
        wait_until(lambda: "c:0" not in endpoint.peers, "it is over")

    monkeypatch.setattr(endpoint.loop, "do", slowly)
    with pytest.raises(WorkerDied, match="c:0 is gone"):
        pair.one.send("lost", "c:0").wait(30)
