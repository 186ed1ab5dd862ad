"""Routes by example, and the memory that movers share."""

from __future__ import annotations

import os

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
