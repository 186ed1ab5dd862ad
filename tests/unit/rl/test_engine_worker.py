"""The worker around an engine: its weights only ever get newer, in whatever order updates end."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from roost.errors import ConfigError
from roost.rl.rollout_engines import EngineWorker
from waiting import wait_until

LONG = 60.0


class SlowEngine:
    """Takes weights in its own time: a test says when it begins and may end with each version."""

    def __init__(self):
        self.began = {version: threading.Event() for version in range(9)}
        self.may_end = {version: threading.Event() for version in range(9)}
        self.served = []

    def update_weights(self, weights, version):
        self.began[version].set()
        assert self.may_end[version].wait(LONG)
        if weights is None:
            raise RuntimeError("broken weights")
        self.served.append(version)

    def let_end(self, *versions):
        for version in versions:
            self.may_end[version].set()


@pytest.fixture
def worker():
    worker = EngineWorker(SlowEngine, (), {})
    yield worker
    worker._engine.let_end(*range(9))


@pytest.fixture
def aside(worker):
    """Threads that run next to the test, as the calls of an engine's worker do."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool
        worker._engine.let_end(*range(9))


def is_refused(worker, version):
    try:
        worker._roost_versions.check(version, may_repeat=True)
    except ConfigError:
        return True
    return False


def test_an_update_that_takes_long_never_overwrites_a_newer_one(worker, aside):
    engine = worker._engine
    old = aside.submit(worker.update_weights, "w", 2)
    assert engine.began[2].wait(LONG)
    # The caller of version 2 has given up by now, and version 3 comes.
    new = aside.submit(worker.update_weights, "w", 3)
    engine.let_end(3)
    wait_until(lambda: is_refused(worker, 2), "version 3 was asked for")
    assert not new.done()
    engine.let_end(2)
    old.result(LONG)
    new.result(LONG)
    assert engine.served == [2, 3]
    assert worker.served_version() == 3


def test_an_update_that_waits_for_its_turn_is_refused_if_a_newer_one_was_asked_for(worker, aside):
    engine = worker._engine
    engine.let_end(2, 3, 4)
    first = aside.submit(worker.update_weights, "w", 1)
    assert engine.began[1].wait(LONG)
    for version in (2, 3, 4):
        aside.submit(worker.update_weights, "w", version)
        wait_until(lambda version=version: is_refused(worker, version - 1), "it was asked for")
        assert not first.done()
    with pytest.raises(ConfigError, match="takes no weights of version 3: version 4 was asked for"):
        worker.update_weights("w", 3)
    engine.let_end(1)
    first.result(LONG)
    aside.shutdown()
    assert engine.served == [1, 4]
    assert worker.served_version() == 4


def test_the_same_version_can_be_sent_again_and_an_older_one_cannot(worker):
    worker._engine.let_end(*range(9))
    for version in (3, 3, 5):
        worker.update_weights("w", version)
    with pytest.raises(ConfigError, match=r"takes no weights of version 4: version 5 was asked for[\s\S]*only go up"):
        worker.update_weights("w", 4)
    assert worker.served_version() == 5


def test_what_an_engine_serves_is_not_known_before_the_first_update_and_after_one_that_failed(worker):
    worker._engine.let_end(*range(9))
    assert worker.served_version() is None
    worker.update_weights("w", 1)
    with pytest.raises(RuntimeError, match="broken weights"):
        worker.update_weights(None, 2)
    assert worker.served_version() is None
    worker.update_weights("w", 2)
    assert worker.served_version() == 2


class PausingEngine:
    """An engine that pauses for one change of its weights at a time."""

    def __init__(self):
        self.pause = threading.Lock()

    def update_weights(self, weights, version): ...

    @contextlib.contextmanager
    def weights_changing(self, _version):
        with self.pause:
            yield


def test_two_links_that_change_the_same_engines_in_place_never_wait_for_each_other(aside):
    first, second = (EngineWorker(PausingEngine, (), {}) for _ in range(2))
    both = threading.Barrier(2)

    def update(version, *workers):
        with contextlib.ExitStack() as changing:
            for worker in workers:
                versions = worker._roost_versions
                changing.enter_context(versions.changing(version, lambda: None, worker.weights_changing))
                if worker is workers[0]:
                    both.wait(LONG)

    newer = aside.submit(update, 6, second, first)
    with pytest.raises(ConfigError, match="only go up"):
        update(5, first, second)
    newer.result(LONG)
    assert [worker.served_version() for worker in (first, second)] == [6, 6]


def test_a_link_and_a_call_share_the_version_of_an_engine():
    worker = EngineWorker(PausingEngine, (), {})
    versions = worker._roost_versions
    worker.update_weights("w", 3)
    assert worker.weights_version == 3
    with pytest.raises(ConfigError, match="a whole number above 3"):
        versions.check(3)
    with versions.changing(4, lambda: None, worker.weights_changing):
        assert (worker.weights_version, worker.served_version()) == (-1, 3)
    assert (worker.weights_version, worker.served_version()) == (4, 4)
    with pytest.raises(ConfigError, match="takes no weights of version 3: version 4 was asked for"):
        worker.update_weights("w", 3)
    worker.update_weights("w", 4)
    with pytest.raises(RuntimeError, match="cut"), versions.changing(6, lambda: None, worker.weights_changing):
        raise RuntimeError("cut")
    assert worker.served_version() is None
    # A refill brings what the others have.
    versions.check(5)


@pytest.mark.parametrize("version", [-1, 1.0, "1", None, True])
def test_what_is_not_a_version_is_refused(worker, version):
    with pytest.raises(ConfigError, match="a version is a whole number from 0 on"):
        worker.update_weights("w", version)


class Sleeper:
    """An engine that can give its memory back."""

    def start(self, spec): ...
    def update_weights(self, weights, version): ...
    def offload(self): ...
    def onload(self): ...


def test_its_state_is_there_for_events():
    worker = EngineWorker(Sleeper, (), {})
    ((kind, name, values),) = worker._gauge()
    assert (kind, name) == ("engine", str(worker.address))
    assert values == {"url": None, "version": None, "asleep": None}
    worker.start_engine(SimpleNamespace(url="http://127.0.0.1:1"))
    worker.update_weights("w", 3)
    worker.offload()
    assert worker._gauge()[0][2] == {"url": "http://127.0.0.1:1", "version": 3, "asleep": True}
    worker.onload()
    assert worker._gauge()[0][2]["asleep"] is None
