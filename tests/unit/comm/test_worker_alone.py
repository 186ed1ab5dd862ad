"""A worker in a plain process, without Ray: the same class with the same attributes."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import replace

import pytest
from ray import cloudpickle

from roost import CallTimedOut, ClusterError, ConfigError, Worker
from roost.comm.devices import DeviceLock, make_device_lock
from roost.runtime.process.timers import measured_call, take_durations, timed
from roost.runtime.worker import own_methods
from roost.testing import as_worker


class Actor(Worker):
    factor = 2

    def __init__(self, start: int) -> None:
        # The identity is set before the base class is called.
        self.first = start + self.rank
        super().__init__()

    def step(self, by: int) -> int:
        with self.worker_timer("step"):
            self.first += by * self.factor
        return self.first

    @Worker.timer
    def whole(self) -> int:
        return 1

    @Worker.timer("named")
    async def later(self) -> int:
        with self.worker_timer():
            return 2

    @classmethod
    def of_class(cls) -> int:
        return cls.factor

    @staticmethod
    def static() -> int:
        return 3

    class Inner:
        """Not a method."""

    @property
    def half(self) -> float:
        return self.first / 2

    def _hidden(self) -> None: ...


def test_a_worker_constructed_by_hand_is_rank_0_of_a_group_of_one():
    actor = Actor(5)
    assert (actor.rank, actor.world_size, actor.local_rank, actor.local_world_size) == (0, 1, 0, 1)
    assert (actor.node_rank, actor.devices, actor.hardware) == (0, (), ())
    assert (actor.group_name, actor.address) == ("Actor", "Actor:0")
    assert actor._rank == actor.rank
    assert actor._world_size == actor.world_size
    assert (actor._group_name, actor._worker_address, actor._node_rank) == ("Actor", "Actor:0", 0)
    assert actor.step(3) == 11


def test_a_worker_can_be_any_rank_of_a_group():
    with as_worker(rank=2, world_size=4, group_name="actor"):
        actor = Actor(5)
        with as_worker(rank=3, world_size=4):
            assert Actor(0).rank == 3
        assert Actor(0).rank == 2
    assert (actor.rank, actor.world_size, actor.first, actor.address) == (2, 4, 7, "actor:2")
    assert Actor(0).rank == 0
    with pytest.raises(ConfigError, match="rank 4 is not in a group of 4"), as_worker(rank=4, world_size=4):
        pass


def test_a_worker_knows_its_identity_with_other_base_classes_too():
    class Base:
        def __init__(self, size: int = 7) -> None:
            self.size = size

    class Mixed(Base, Worker):
        def __init__(self) -> None:
            Worker.__init__(self)
            super().__init__(self.world_size)

    class Other(Worker, Base):
        """One that leaves it to `super()`."""

    assert (Mixed().size, Other().size) == (1, 7)


def test_a_subclass_can_reuse_the_name_of_an_attribute():
    class Own(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.devices = ["mine"]
            self._rank = 9

        def hardware(self) -> str:
            return "my own"

    own = Own()
    assert (own.devices, own._rank, own.rank, own.hardware()) == (["mine"], 9, 0, "my own")
    assert sorted(own_methods(Own)) == ["hardware"]


def test_it_logs_through_logging(caplog):
    actor = Actor(0)
    with caplog.at_level(logging.DEBUG, logger="roost.worker"):
        actor.log_debug("a detail")
        actor.log_info("100% sure")
        actor.log_warning("careful")
        actor.log_error("oh")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "a detail"),
        ("INFO", "100% sure"),
        ("WARNING", "careful"),
        ("ERROR", "oh"),
    ]


def test_durations_are_collected_in_a_call_and_dropped_outside():
    actor = Actor(0)
    assert actor.whole() == 1
    with measured_call("call") as durations:
        actor.step(1)
        actor.step(1)
        actor.whole()
        assert asyncio.run(actor.later()) == 2
    assert set(durations) == {"step", "whole", "named", "later", "call"}
    assert all(seconds >= 0 for seconds in durations.values())
    with pytest.raises(TypeError, match="is a generator"):

        @Worker.timer
        def items():
            yield 1


def test_a_timed_method_of_a_class_in_a_script_can_be_sent_to_its_workers():
    class OfScript(Worker):
        @Worker.timer
        def whole(self) -> int:
            return 1

    assert cloudpickle.loads(cloudpickle.dumps(OfScript))().whole() == 1


def test_a_group_can_call_the_public_methods_that_a_class_adds():
    assert sorted(own_methods(Actor)) == ["later", "of_class", "static", "step", "whole"]
    assert own_methods(Worker) == {}


def test_a_wrong_constructor_argument_is_refused_before_anything_is_launched():
    with pytest.raises(TypeError, match=r"Actor.create_group: missing a required argument: 'start'"):
        Actor.create_group()
    with pytest.raises(TypeError, match=r"Plain.create_group: too many"):
        type("Plain", (Worker,), {}).create_group(3)
    with pytest.raises(TypeError, match="is abstract: step is missing"):
        type("Abstract", (Worker, ABC), {"step": abstractmethod(lambda _: None)}).create_group()
    assert "launch() starts it" in repr(Actor.create_group(3))


def test_a_worker_needs_no_ray():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from roost import Worker\n"
        "class A(Worker):\n"
        "    def f(self): return self.rank\n"
        "assert A().f() == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_process_knows_its_worker_and_forgets_one_that_is_gone():
    actor = Actor(0)
    assert Worker.current_worker is Actor.current_worker is actor.current_worker is actor
    second = Actor(1)
    assert Worker.current_worker is second
    del second
    assert Worker.current_worker is None


def test_torch_is_loaded_when_its_platform_is_asked_for_and_not_before(tmp_path):
    """A stand-in for a torch that sees an Intel GPU."""
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
        "class xpu:\n    is_available = staticmethod(lambda: True)\n"
    )
    code = (
        "import sys\nfrom roost import Worker\nfrom roost.runtime.worker import own_methods\n"
        "own_methods(Worker), Worker().device_lock\nassert 'torch' not in sys.modules\n"
        "assert Worker.torch_device_type == Worker().torch_device_type == 'xpu'\n"
        "import torch\nassert Worker.torch_platform is Worker().torch_platform is torch.xpu\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_device_lock_is_held_by_one_process_and_ends_with_it():
    mine, same, other = (DeviceLock([piece, "node 0/1"]) for piece in ("node 0/0", "node 0/2", "node 0/3"))
    free = DeviceLock(["node 1/0"])
    code = (
        "import sys, time\nfrom roost.comm.devices import DeviceLock\n"
        "lock = DeviceLock(['node 0/1'])\nlock.acquire()\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with free, DeviceLock([]):
            pass
        taken = threading.Event()

        def take() -> None:
            with mine:
                taken.set()

        waiting = threading.Thread(target=take)
        waiting.start()
        assert not taken.wait(0.2)
        with pytest.raises(CallTimedOut, match=r"another worker has had the lock of these accelerators for 0\.1 s"):
            same.acquire(timeout=0.1)
        child.kill()
        assert taken.wait(30)
        waiting.join()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with same:
        later = threading.Thread(target=lambda: other.acquire() or other.release())
        later.start()
        later.join(0.1)
        assert later.is_alive(), "another lock of the same process waits as well"
    later.join(30)
    with pytest.raises(ClusterError, match="not held"):
        same.release()


def test_workers_on_the_same_accelerators_have_the_same_lock():
    worker = Actor(0)
    assert worker.device_lock is worker.device_lock
    with worker.device_lock:
        pass
    places = [replace(worker.placement, local_hardware_ranks=ranks) for ranks in ((0, 1), (1, 0), (1, 2))]
    first, second, third = (make_device_lock(place)._places for place in places)
    assert first == second
    assert set(first) & set(third)
    assert len({*first, *third}) == 3


def test_what_a_call_has_timed_can_be_taken_by_itself():
    with measured_call("call") as durations:
        for tag in ("first", "second", "third"):
            with timed(tag):
                pass
        assert list(take_durations("second")) == ["second"]
        assert take_durations("second") == {}
        assert list(take_durations()) == ["first", "third"]
    assert list(durations) == ["call"]
    assert take_durations() == {}, "outside of a call"
