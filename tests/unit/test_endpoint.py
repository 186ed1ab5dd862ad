"""Two endpoints in one process: who may connect, and what a stranger can do."""

from __future__ import annotations

import functools
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

import numpy as np
import psutil
import pytest

from roost import CallTimedOut, ClusterError, ConfigError, Worker
from roost.comm.connection import Kind, Peer
from roost.comm.endpoint import Endpoint, Listing, own_instance
from roost.comm.loans import Lending, _here
from roost.comm.loop import Handle
from roost.comm.messages import Messages
from roost.comm.process import PlainDirectory
from roost.errors import WorkerDied
from roost.testing import as_worker
from waiting import wait_until


class Pair:
    """Two members of a job, on the same node or on two."""

    def __init__(self, *, is_near: bool) -> None:
        self.directory = PlainDirectory()
        self.one = self.make("a:0", 0)
        self.two = self.make("b:0", 0 if is_near else 1)

    def make(self, address: str, node: int, secret: bytes = b"secret") -> Messages:
        own = Peer(address=address, instance=own_instance(), node=f"node {node}", node_rank=node)
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
    own = Peer(address="a:0", instance=own_instance(), node="node 0", node_rank=0)
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
    wait_until(lambda: list(pair.two.endpoint.mailbox.receives()), "it waits")
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
    connection = pair.one.endpoint.link("b:0").connection
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
    pool = pair.one.endpoint._pools[0]
    wait_until(lambda: pool.counts["used"] == 0, "all memory is back")
    # The news that one is back may come late.
    assert pool.counts["free"] <= 10
    pair.close()


def test_an_array_that_is_kept_is_not_overwritten():
    pair = Pair(is_near=True)
    for value in range(5):
        pair.one.send(np.full(1 << 20, value, np.uint8), "b:0")
    kept = [pair.two.receive("a:0").wait(30) for _ in range(5)]
    pair.one.send(np.full(1 << 20, 77, np.uint8), "b:0")
    pair.close()
    assert [int(array[-1]) for array in kept] == list(range(5))


def test_the_end_of_one_is_noticed_by_the_other_after_what_it_had_sent(pair):
    pair.one.send("last words", "b:0").wait(30)
    first = pair.two.receive("a:0")
    second = pair.two.receive("a:0")
    assert first.wait(30) == "last words"
    pair.one.endpoint.close()
    with pytest.raises(WorkerDied, match="a:0 on node 0 is gone"):
        second.wait(30)


def test_a_new_process_of_the_name_gets_nothing_that_was_meant_for_the_old_one(pair):
    pair.one.send(1, "b:0").wait(30)
    assert pair.two.receive("a:0").wait(30) == 1
    pair.one.send("unheard", "b:0").wait(30)
    pair.two.endpoint.close()
    wait_until(lambda: "b:0" not in pair.one.endpoint._links, "the end is noticed")
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
    dead = Peer(address="c:0", instance=own_instance(), node="node 1", node_rank=1)
    pair.directory.announce(Listing(peer=dead, local_name="", host=found.host, port=found.port))
    handle = pair.one.send(b"x" * 100_000, "c:0")
    time.sleep(0.2)
    assert not handle.done()
    assert pair.two.endpoint.mailbox.size_from("a:0", pair.one.endpoint.own.instance) == 0
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


def test_thousands_of_strangers_that_say_half_a_greeting_hold_nothing_up():
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
    wait_until(lambda: len(pair.two.endpoint._strangers) <= 64, "the oldest are closed")
    assert len(os.listdir("/proc/self/fd")) - before < 300 + 64 + 20
    for sock in socks:
        sock.close()
    pair.close()


@pytest.mark.heavy
def test_ten_thousand_strangers_leave_nothing_behind():
    pair = Pair(is_near=False)
    listing = pair.listing("b:0")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10_000):
        connect(listing, is_local=False).close()
    pair.one.send("fine", "b:0")
    assert pair.two.receive("a:0").wait(60) == "fine"
    wait_until(lambda: not pair.two.endpoint._strangers, "all of them are closed")
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
def test_three_gigabytes_arrive_in_one_piece(pair):
    thing = np.zeros(3 << 30, np.uint8)
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
    for wrong in (-1, True, "0", 1.5):
        with pytest.raises(ConfigError, match="is not a rank of 'plain'"):
            first.send(1, "plain", wrong)
    with pytest.raises(ConfigError, match="is not the name of a group"):
        first.recv("", 0)
