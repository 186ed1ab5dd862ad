"""The wire on its bad days, between real workers: broken connections, strangers, and what cannot be read or opened."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import psutil
import pytest

from roost import Channel, Cluster, NodePlacementStrategy, WorkerGroup
from soak.inject import accepted_from_peers, impossible_here, reset
from waiting import wait_until
from wire_workers import Wired

needs_resets = pytest.mark.skipif("reset" in impossible_here(), reason=impossible_here().get("reset", ""))


@pytest.fixture
def wired(keep, shared_cluster: Cluster) -> WorkerGroup:
    """Two workers on node 0 and two on node 1."""
    return keep(
        "wired", lambda: Wired.create_group().launch(shared_cluster, NodePlacementStrategy([0, 0, 1, 1]), name="wired")
    )


@contextlib.contextmanager
def connections_that_break(pids: Sequence[int], broken: list[str]) -> Iterator[None]:
    """Reset all connections between these processes again and again, and note the kind of each that was reset."""
    over = threading.Event()

    def run() -> None:
        for pid in itertools.cycle(pids):
            if over.wait(0.02):
                return
            for connection in accepted_from_peers(psutil.Process(pid)):
                # It may have been closed meanwhile.
                with contextlib.suppress(OSError):
                    reset(connection)
                    broken.append(connection.family.name)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def is_enough(broken: Sequence[str]) -> bool:
    """Whether connections on a node and to another one broke several times."""
    return min(broken.count(kind) for kind in ("AF_UNIX", "AF_INET")) >= 3


@needs_resets
def test_no_message_is_lost_doubled_or_reordered_when_connections_between_living_workers_break(wired):
    pids = wired.pid().wait(60)
    broken: list[str] = []
    with connections_that_break(pids, broken):
        for _ in range(20):
            # 10,000 near, and 10,000 far, half of them in each direction.
            calls = [wired[0].exchange([1, 2], 5000), wired.on(1, 2).exchange([0], 5000)]
            assert [call.wait(240) for call in calls] == [[[]], [[], []]]
            if is_enough(broken):
                break
    assert is_enough(broken)
    assert wired.pid().wait(60) == pids


@needs_resets
def test_no_item_is_lost_doubled_or_reordered_when_connections_to_a_home_break(shared_cluster, wired):
    broken: list[str] = []
    for turn in range(20):
        name = f"broken{turn}"
        with Channel.create(name, node_rank=1) as channel:
            (home,) = [one.pid for one in shared_cluster.worker_manager.get_workers() if one.address == f"{name}:0"]
            with connections_that_break([home], broken):
                consuming = [wired[1].consume(channel, 0, by_loop=True), wired[3].consume(channel, 1, by_loop=False)]
                wired.on(0, 2).produce(channel, 2000, 2).wait(240)
                channel.close()
                taken = [call.wait(240)[0] for call in consuming]
        for found in taken:
            for producer in (0, 2):
                assert [number for source, number in found if source == producer] == list(range(2000))
            assert len(found) == 4000
        if is_enough(broken):
            break
    assert is_enough(broken)


@pytest.mark.parametrize("to", [1, 2], ids=["same node", "another node"])
def test_a_tag_that_the_receiver_cannot_import_is_the_error_of_its_message_alone(wired, tmp_path, to):
    (tmp_path / "only_here.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Tag:\n    number: int\n", encoding="utf-8"
    )
    hearing = wired[to].hear_ten(0)
    (said,) = wired[0].say_under_odd_tag(str(tmp_path), to).wait(60)
    assert f"wired:{to} cannot read the tag of a message from wired:0: No module named 'only_here'" in said
    assert hearing.wait(60) == [[*range(10), "after"]]


def test_a_receiver_that_can_open_nothing_more_gets_its_arrays(wired):
    # They have talked before: no descriptor is left for a connection.
    wired[0].say_plain(1).wait(60)
    assert wired[1].hear_plain(0).wait(60) == [[]]
    hearing = wired[1].hear_arrays_without_descriptors(12, 0)
    wired[0].say_arrays(12, 1).wait(60)
    assert hearing.wait(60) == [[(value, value) for value in range(12)]]


def name_of(pid: int) -> str:
    """The name of the socket that a worker listens at for others of its node."""
    (found,) = {
        one.laddr for one in psutil.Process(pid).net_connections("unix") if str(one.laddr).startswith("@roost-")
    }
    return "\0" + found[1:]


def test_strangers_on_its_node_cost_a_worker_no_descriptors_but_their_sockets(wired):
    wired[0].say_plain(1).wait(60)
    assert wired[1].hear_plain(0).wait(60) == [[]]
    name = name_of(wired[1].pid().wait(60)[0])
    before = wired[1].open_files().wait(60)[0]
    read_end, write_end = os.pipe()
    with contextlib.ExitStack() as stack:
        for end in (read_end, write_end):
            stack.callback(os.close, end)

        def connect() -> socket.socket:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(60)
            sock.connect(name)
            assert len(sock.recv(32)) == 32
            return sock

        silent = [connect() for _ in range(10)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read_end] * 16))]
        for sock in [connect() for _ in range(20)]:
            # One byte at a time, so that its greeting does not end.
            for _ in range(20):
                sock.sendmsg([b"x"], rights)
        assert wired[1].open_files().wait(60)[0] <= before + 30 + 2
        wired[0].say_plain(1).wait(60)
        assert wired[1].hear_plain(0).wait(60) == [[]]
        for sock in silent:
            assert sock.recv(1) == b"", "it is disconnected"
    wait_until(lambda: wired[1].open_files().wait(60)[0] <= before + 2, "their sockets are closed")


@pytest.mark.parametrize("to", [0, 1, 2], ids=["itself", "same node", "another node"])
def test_plain_values_of_every_kind_arrive_as_they_were(wired, to):
    said = wired[0].say_plain(to)
    if to == 0:
        said.wait(60)
    assert wired[to].hear_plain(0).wait(60) == [[]]
    said.wait(60)


@pytest.mark.wants("torch")
def test_plain_values_and_tensors_reach_all_members_of_a_broadcast(shared_cluster):
    pytest.importorskip("torch")
    with Wired.create_group().launch(shared_cluster, NodePlacementStrategy([0, 0, 1]), name="torch") as group:
        group.import_torch().wait(60)
        assert group.share_plain(1).wait(60) == [[]] * 3
        said = group[0].say_plain(2)
        assert group[2].hear_plain(0).wait(60) == [[]]
        said.wait(60)
