"""Routes by example, and the memory that movers share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import pytest

from roost.comm.move.memory import Memory, Pool
from roost.comm.move.route import End, Route, choose_route, explain

PLANNED = End(process="a", node=0, devices=(0, 1))
HOST = End(process="a", node=0, memory="")
DEVICE = End(process="a", node=0, memory="GPU-1", can_group=True)
NEAR = End(process="b", node=0, devices=("GPU-0", "GPU-1"), memory="GPU-0", can_group=True)


@pytest.mark.parametrize(
    ("source", "target", "route"),
    [
        (PLANNED, End(process="a", node=1), Route.MEMORY),
        (PLANNED, End(process="b", node=0, devices=(1, 2)), Route.DEVICE),
        (PLANNED, End(process="b", node=0, devices=(2,)), Route.NODE),
        (PLANNED, End(process="b", node=1, devices=(0,)), Route.NETWORK),
        (End(process="a"), End(process="b"), Route.NETWORK),
        (HOST, NEAR, Route.NODE),
        (End(process="a", node=0, memory="", closed="ptrace"), NEAR, Route.RELAY),
        (End(process="a", node=1, memory=""), NEAR, Route.NETWORK),
        (DEVICE, NEAR, Route.DEVICE),
        (DEVICE, End(process="b", node=0, devices=("GPU-0",), memory="GPU-0", can_group=True), Route.GROUP),
        (DEVICE, End(process="b", node=0, devices=("GPU-0",), memory="GPU-0"), Route.RELAY),
        (DEVICE, End(process="b", node=1, memory="GPU-0", can_group=True), Route.GROUP),
        # NCCL takes no two processes on one device.
        (End(process="a", node=0, memory="GPU-0", closed="segments", can_group=True), NEAR, Route.RELAY),
    ],
)
def test_the_route_follows_from_what_is_known_of_both_ends(source, target, route):
    assert choose_route(source, target) is route


@pytest.mark.parametrize(
    ("planned", "source", "target", "why"),
    [
        (Route.NODE, HOST, NEAR, ""),
        (Route.NODE, DEVICE, End(process="b", node=0, memory="GPU-0", can_group=True), ""),
        (Route.NODE, DEVICE, End(process="b", node=0, memory="GPU-0"), "b does not see the device of a"),
        (Route.DEVICE, HOST, NEAR, "the weights of a are in host memory"),
        (Route.NODE, End(process="a", node=0, memory="", closed="ptrace"), NEAR, "ptrace"),
        (Route.NODE, End(process="a", node=1, memory=""), NEAR, "a and b are not on the same node"),
        (Route.NETWORK, HOST, NEAR, "a and b are nearer than in the plan"),
    ],
)
def test_what_differs_from_the_plan_has_a_reason(planned, source, target, why):
    assert explain(planned, choose_route(source, target), source, target) == why


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_piece_of_shared_memory_takes_one_descriptor_and_none_when_nothing_looks_at_it():
    before = descriptors()
    pool = Pool()
    own = pool.take(1 << 20)
    assert own is not None
    assert descriptors() == before + 1
    theirs = Memory(own.size, os.dup(own.fd))
    assert descriptors() == before + 2
    own.map[:3] = b"abc"
    returned = []
    view, _ = theirs.borrow(3, lambda: returned.append(True))
    del theirs
    # What looks at it keeps it mapped, and not its descriptor.
    assert descriptors() == before + 1
    array = np.frombuffer(view, np.uint8)
    del view
    assert bytes(array) == b"abc"
    assert not returned
    del array
    assert returned == [True]
    pool.drop(own)
    del own
    assert descriptors() == before


def test_memory_that_cannot_be_mapped_leaves_no_descriptor():
    before = descriptors()
    with pytest.raises(OSError, match=r"Invalid argument|Bad file"):
        Memory(0, os.open("/dev/null", os.O_RDWR))
    assert descriptors() == before


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def private():
    """A pool of private memory, and what it wants to do later."""
    later: list[Callable[[], None]] = []
    return Pool(lambda _seconds, function: later.append(function)), later


def test_private_memory_that_was_not_used_for_a_while_goes_back_to_the_system(private, monkeypatch):
    monkeypatch.setattr("roost.comm.move.memory._KEPT_BYTES", 8 << 20)
    pool, later = private
    before = resident()
    pieces = [pool.take(1 << 20) for _ in range(256)]
    for piece in pieces:
        np.frombuffer(piece.map, np.uint8)[:] = 1
    assert resident() - before > 240 << 20
    while pieces:
        pool.give(pieces.pop())
    assert pool.counts == {"used": 0, "free": 256, "bytes": 256 << 20}
    # When it began to look, all but nine were used.
    later.pop()()
    assert pool.counts["free"] == 255
    used = [pool.take(1 << 20) for _ in range(100)]
    for piece in used:
        pool.give(piece)
    later.pop()()
    assert pool.counts["free"] == 100 + 8
    later.pop()()
    assert (pool.counts, later) == ({"used": 0, "free": 8, "bytes": 8 << 20}, [])
    del piece, used
    assert resident() - before < 100 << 20
    # What has gone back can be had again.
    again = [pool.take(1 << 20) for _ in range(64)]
    for number, piece in enumerate(again):
        np.frombuffer(piece.map, np.uint8)[:] = number
    assert [int(piece.map[-1]) for piece in again] == list(range(64))
