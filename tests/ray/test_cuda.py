"""Tensors on a device that two workers share: they go from one to the other without leaving it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from cuda_workers import Holder
from roost import Channel, Cluster, FlexiblePlacementStrategy, WorkerGroup
from roost.machine.devices import nvidia_devices
from roost.testing import local_cluster
from waiting import wait_until

pytestmark = pytest.mark.skipif(not nvidia_devices()[0], reason="needs a GPU")
IPC = "CUDA IPC"


def used() -> int:
    """How much memory of the first device is in use."""
    return nvidia_devices()[0][0].memory_used or 0


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A Cluster on a machine with a device, on which nothing is left afterwards."""
    before = used()
    with local_cluster("1x1"), Cluster(num_nodes=1) as cluster:
        yield cluster
    wait_until(lambda: used() <= before, "the memory of the device is free")


@pytest.fixture
def pair(keep, shared_cluster: Cluster) -> tuple[WorkerGroup, WorkerGroup]:
    """Two workers on one device."""

    def launch(name: str) -> WorkerGroup:
        place = FlexiblePlacementStrategy([[0]])
        return Holder.create_group().launch(shared_cluster, place, name=name, share=0.5, restarts=1)

    return keep("left", lambda: launch("left")), keep("right", lambda: launch("right"))


def test_tensors_in_an_object_arrive_as_they_were(pair):
    left, right = pair
    heard = right.hear("left", 0)
    left.say("right", 0).wait(120)
    assert heard.wait(60)[0] == [
        ("torch.float32", "cuda", (1000,), False, 499500.0),
        ("torch.float32", "cuda", (500,), False, 249500.0),
        ("torch.bfloat16", "cuda", (3, 4), True, 12.0),
        ("torch.float32", "cuda", (0, 2), False, 0.0),
        ("torch.int64", "cpu", (3,), False, 3.0),
    ]
    assert set(right.fetched_by().wait(60)[0]) == {IPC}
    assert left.lent().wait(60) == [0]


@pytest.mark.parametrize(
    ("source", "target", "way"), [("cuda", "cuda", [IPC]), ("cuda", "cpu", ["messages"]), ("cpu", "cuda", [])]
)
def test_a_tensor_arrives_in_a_buffer_on_either_device(pair, source, target, way):
    left, right = pair
    heard = right.hear_tensor(target, "left", 0)
    left.say_tensor(2.0, source, "right", 0).wait(60)
    assert heard.wait(60) == [2000.0]
    assert right.fetched_by().wait(60) == [way]


def test_a_broadcast_stays_on_the_device(pair):
    left, right = pair
    members = [("left", 0), ("right", 0)]
    shares = left.share(members), right.share(members)
    assert [share.wait(60) for share in shares] == [[10.0], [10.0]]
    assert right.fetched_by().wait(60) == [[IPC]]


def test_a_channel_hands_tensors_on_and_the_producer_gets_them_back(pair):
    left, right = pair
    channel = Channel.create("tensors")
    left.put(channel, 3).wait(60)
    assert left.lent().wait(60) == [3]
    assert right.take(channel, 3).wait(60) == [[(0.0, True), (1.0, True), (2.0, True)]]
    assert right.fetched_by().wait(60) == [[IPC] * 3]
    wait_until(lambda: left.lent().wait(60) == [0], "all are returned")


def test_a_receiver_that_is_killed_is_named_and_gives_the_tensor_back(pair):
    left, right = pair
    pid = right.pid().wait(60)[0]
    sending = left.lend_and_wait("right", 0)
    time.sleep(1)
    assert not sending.done()
    os.kill(pid, signal.SIGKILL)
    assert "right:0" in sending.wait(60)[0]
    assert left.lent().wait(60) == [0]
