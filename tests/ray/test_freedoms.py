"""What a program that was written for something else needs of groups: any class, private methods, keywords by rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import roost
from roost import Channel, Cluster, ConfigError, NodePlacementStrategy, Worker, WorkerDied, WorkerGroup
from waiting import is_gone, wait_until
from workers import Performer

TWO = NodePlacementStrategy([0, 1])


class Theirs:
    """A class that knows nothing of Roost."""

    kind = "theirs"

    def __init__(self, lr: float, *, name: str = "none") -> None:
        self.lr = lr
        self.name = name

    def where(self) -> tuple[str, str, str]:
        return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]

    def made_with(self) -> tuple[float, str]:
        return self.lr, self.name

    def items(self, count: int) -> Iterator[int]:
        yield from range(count)

    def _init_model(self, size: int) -> str:
        return f"{size} parameters in rank {os.environ['RANK']}"

    def __call__(self, value: int) -> int:
        return value + 1

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def name_of_class(cls) -> str:
        return cls.kind

    async def _helper(self) -> int:
        return 1


class Careful(Worker):
    def _reset(self) -> int:
        return self.rank


@pytest.fixture
def theirs(shared_cluster: Cluster, keep: Any) -> WorkerGroup:
    draft = roost.group_of(Theirs, 0.5, name="a").also("_init_model", "__call__")
    return keep("theirs", lambda: draft.launch(shared_cluster, TWO, name="theirs"))


def test_any_class_is_a_worker(theirs):
    where = theirs.where().wait(60)
    assert [rank for rank, *_ in where] == ["0", "1"]
    assert {size for _, size, _ in where} == {"2"}
    assert len({port for *_, port in where}) == 1
    assert theirs.made_with().wait(60) == [(0.5, "a")] * 2
    assert (theirs.double(4).wait(60), theirs.name_of_class().wait(60)) == ([8, 8], ["theirs"] * 2)
    assert sorted(theirs.stream("items", 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ray.get(theirs.actor_handles[1].double.remote(3), timeout=60) == 6


def test_methods_that_begin_with_a_score_are_called_where_they_are_chosen(theirs, shared_cluster):
    assert theirs._init_model(7).wait(60) == ["7 parameters in rank 0", "7 parameters in rank 1"]
    assert theirs.call("__call__", 1).wait(60) == [2, 2]
    assert WorkerGroup.attach("theirs")._init_model(8)[1].wait(60) == "8 parameters in rank 1"
    assert ray.get(theirs.actor_handles[0]._init_model.remote(9), timeout=60) == "9 parameters in rank 0"
    for name in ("_helper", "_missing", "__bool__"):
        with pytest.raises(AttributeError, match=name):
            getattr(theirs, name)
    draft = Careful.create_group().also("_reset")
    with draft.launch(shared_cluster, TWO, name="careful") as group:
        assert group._reset().wait(60) == [0, 1]


@pytest.mark.parametrize(
    "name", ["_init_modl", "missing", "__init__", "__class__", "kind", "", None, 3, b"_init_model"]
)
def test_a_method_that_is_chosen_and_not_there_is_named(name):
    with pytest.raises(ConfigError, match="has no method") as caught:
        roost.group_of(Theirs, 1.0).also(name)
    assert repr(name) in str(caught.value)
    assert "'_init_model'" in str(caught.value) or name != "_init_modl"


@pytest.mark.parametrize("name", ["_rank", "_roost_messages"])
def test_what_roost_has_in_a_worker_is_no_method(name):
    with pytest.raises(ConfigError, match=name):
        Careful.create_group().also(name)


@pytest.mark.parametrize(
    "thing", [None, 1, "Theirs", [], {}, Theirs(1.0), len, ray.remote(Theirs)], ids=lambda thing: type(thing).__name__
)
def test_what_is_no_class_is_refused(thing):
    with pytest.raises(ConfigError, match="group_of takes a class, not"):
        roost.group_of(thing)


def test_arguments_that_do_not_fit_are_refused_at_once():
    with pytest.raises(TypeError, match=r"group_of\(Theirs\): missing a required argument: 'lr'"):
        roost.group_of(Theirs)


class Sharer(Worker):
    """Sends and receives rows, and knows how to end."""

    def give(self, group: str, rows: Any) -> None:
        self.send_to(rows, group, timeout=60)

    def take(self, group: str, timeout: float = 60) -> Any:
        return self.recv_from(group, timeout=timeout)

    def end(self) -> None:
        os._exit(3)


def test_a_batch_goes_from_the_ranks_of_a_group_to_those_of_another(shared_cluster):
    three = NodePlacementStrategy([0, 1, 2])
    with (
        Sharer.create_group().launch(shared_cluster, TWO, name="givers") as givers,
        Sharer.create_group().launch(shared_cluster, three, name="takers") as takers,
    ):
        batch = np.arange(70_000).reshape(7, -1)
        given = givers.map("give", [("takers", batch[:5]), ("takers", batch[5:])])
        parts = takers.take("givers").wait(60)
        given.wait(60)
        assert [len(part) for part in parts] == [3, 2, 2]
        assert (np.concatenate(parts) == batch).all()
        # The first says nothing and lives; the second, which is waited for after it, dies.
        taken = takers.take("givers", 600)
        givers[1].end()
        with pytest.raises(WorkerDied, match="givers:1"):
            taken.wait(60)


class Engine(Worker):
    """Starts processes of its own that are workers, too."""

    def start(self, size: int) -> list[Any]:
        spawn = multiprocessing.get_context("spawn")
        # Its names in shared memory go when this returns: the process is killed in the end.
        heard = spawn.Queue()
        arguments = [(str(self.address), size, rank, heard) for rank in range(size)]
        self.children = [spawn.Process(target=be_child, args=each, daemon=True) for each in arguments]
        for child in self.children:
            child.start()
        return sorted(heard.get(timeout=60) for _ in self.children)

    def ask(self, size: int) -> list[Any]:
        for rank in range(size):
            self.send(("hello", rank), self.address, rank)
        return [self.recv(self.address, rank, timeout=60) for rank in range(size)]

    def kill(self, rank: int) -> None:
        self.children[rank].kill()

    def adopt(self, parent: str) -> str:
        return str(Worker(parent_address=parent, world_size=2, rank=1).address)

    def pids(self) -> list[int]:
        return [os.getpid(), *(child.pid for child in self.children)]

    def hear(self, name: str, rank: int) -> Any:
        return self.recv(name, rank, timeout=60)


def be_child(parent: str, size: int, rank: int, heard: Any) -> None:
    worker = Worker(parent_address=parent, world_size=size, rank=rank)
    place = worker.placement
    heard.put((str(worker.address), worker.group_name, worker.world_size, place.cluster_node_rank, place.local_rank))
    said, number = worker.recv("engine", 0, timeout=60)
    worker.send(number, parent, (rank + 1) % size)
    worker.send((said, worker.recv(parent, (rank - 1) % size, timeout=60)), "engine", 0)
    # Until it is ended.
    worker.recv("engine", 0)


def test_a_process_that_a_worker_starts_is_a_worker_of_its_own(shared_cluster):
    with Engine.create_group().launch(shared_cluster, NodePlacementStrategy([1]), name="engine") as group:
        assert group.start(2).wait(120) == [[(f"engine:0:{rank}", "engine:0", 2, 1, rank) for rank in range(2)]]
        assert group.ask(2).wait(60) == [[("hello", 1), ("hello", 0)]]
        group.kill(1).wait(60)
        with pytest.raises(WorkerDied, match="engine:0:1"):
            group.hear("engine:0", 1).wait(60)


def test_a_process_that_a_worker_starts_ends_with_it_however_it_ends(shared_cluster):
    with Engine.create_group().launch(shared_cluster, TWO, name="engine") as group:
        first = group.on(0)
        first.start(2).wait(120)
        pids = first.pids().wait(60)[0]
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in pids), "all ended")
        with pytest.raises(WorkerDied, match="engine:0:7"):
            group.on(1).hear("engine:0", 7).wait(60)


def test_a_process_of_no_worker_of_the_job_is_refused(shared_cluster):
    with Engine.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="engine") as group:
        for name in ("engine:1", "other:0"):
            with pytest.raises(ConfigError, match=f"no worker '{name}'"):
                group.adopt(name).wait(60)
        assert group.adopt("engine:0").wait(60) == ["engine:0:1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"parent_address": None, "world_size": 2, "rank": 0},
        {"parent_address": "actor", "world_size": 2, "rank": 0},
        {"parent_address": 3, "world_size": 2, "rank": 0},
        {"parent_address": "0", "world_size": 2, "rank": 0},
        {"parent_address": ":0", "world_size": 2, "rank": 0},
        {"parent_address": "actor:\u00b2", "world_size": 2, "rank": 0},
        {"parent_address": "actor:0", "rank": 0},
        {"parent_address": "actor:0", "world_size": 2},
        {"parent_address": "actor:0", "world_size": 2, "rank": 2},
        {"parent_address": "actor:0", "world_size": 2, "rank": -1},
        {"parent_address": "actor:0", "world_size": "2", "rank": 0},
        {"world_size": 2, "rank": 0},
    ],
    ids=str,
)
def test_a_child_without_a_place_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"parent_address is|rank is"):
        Worker(**wrong)


def test_a_child_in_a_plain_process_is_for_tests():
    child = Worker(parent_address="actor:0", world_size=2, rank=1)
    assert (child.address, child.group_name, child.rank, child.world_size) == ("actor:0:1", "actor:0", 1, 2)


@pytest.fixture
def actor(shared_cluster: Cluster, keep: Any) -> WorkerGroup:
    return keep("mapped", lambda: Performer.create_group().launch(shared_cluster, TWO, name="mapped"))


def test_map_takes_arguments_and_keywords_by_rank(actor):
    both = actor.map("echo", args=[(1, 2), 3], kwargs=[{"a": 1}, {"b": [2]}])
    assert both.wait(60) == [((1, 2), {"a": 1}), ((3,), {"b": [2]})]
    assert actor.map("echo", kwargs=[{"a": None}, {}]).wait(60) == [((), {"a": None}), ((), {})]
    assert actor.map("echo", [(), None]).wait(60) == [((), {}), ((None,), {})]
    assert actor.map("echo", actor.rank_of(), [{"key": b""}, {"key": ()}]).wait(60) == [
        ((0,), {"key": b""}),
        ((1,), {"key": ()}),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "was given no arguments"),
        ({"args": 3}, "was given 3"),
        ({"args": "ab"}, "was given 'ab'"),
        ({"args": {"a": 1, "b": 2}}, "was given {'a': 1, 'b': 2}"),
        ({"args": [1]}, "1 entry for 2 workers"),
        ({"kwargs": [{}]}, "1 entry for 2 workers"),
        ({"kwargs": {"a": 1}}, "was given {'a': 1}"),
        ({"kwargs": [{}, None]}, "kwargs of map.* has None"),
        ({"kwargs": [{}, {1: 2}]}, "kwargs of map.* has {1: 2}"),
    ],
)
def test_what_does_not_fit_map_is_refused(actor, given, words):
    with pytest.raises(ConfigError, match=words):
        actor.map("echo", **given)


def test_keywords_of_map_are_not_the_values_of_a_call(actor):
    with pytest.raises(ConfigError, match="was given <CallResult"):
        actor.map("echo", kwargs=actor.rank_of())


def test_durations_by_call_tag_and_rank(actor):
    assert actor.rank_of().consume_duration() > 0
    assert set(actor.timed().consume_duration(None)) == {0, 1}
    reduced, by_rank = actor.timed().consume_durations("min", return_per_rank=True)
    assert set(reduced) == {"whole", "half", "timed"}
    assert [set(found) for found in by_rank] == [set(reduced)] * 2
    assert reduced["half"] == min(found["half"] for found in by_rank)
    taken = actor.timed()
    by_tag, by_rank = taken.consume_durations(None, return_per_rank=True)
    assert by_tag["half"] == {rank: found["half"] for rank, found in enumerate(by_rank)}
    with pytest.raises(ConfigError, match="no duration of 'timed'"):
        taken.consume_duration()


IN_A_SCRIPT = """
import roost
from roost import Cluster, PackedPlacementStrategy, Worker

class Actor(Worker):
    @Worker.timer
    def train(self):
        return self.rank

    @Worker.timer("load")
    def load(self, value):
        return value

class Theirs:
    def _run(self):
        return 5

with Cluster(num_nodes=4, quiet=True) as cluster:
    actor = Actor.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="actor")
    print(actor.train().wait(60), sorted(actor.load(3).consume_durations()))
    with roost.group_of(Theirs).also("_run").launch(cluster, PackedPlacementStrategy(0, 0), name="theirs") as group:
        print(group._run().wait(60))
"""


def test_classes_of_a_script_with_timers(driver):
    said, complained = driver(IN_A_SCRIPT).finish()
    assert said.splitlines() == ["[0, 1] ['load']", "[5]"], complained
    assert "eprecat" not in complained


@pytest.mark.usefixtures("shared_cluster")
def test_the_first_items_of_a_channel_are_seen_as_copies():
    array = np.arange(100_000)
    things = [None, 1, "text", b"x" * 20_000, array, {"a": [array]}]
    with Channel.create("peeked") as channel:
        assert channel.peek() == []
        channel.put_many(things)
        seen = channel.peek(10)
        assert seen[:4] == things[:4]
        seen[4][:] = -1
        seen[5]["a"][0][:] = -1
        assert channel.qsize() == len(things)
        assert [len(channel.peek(n)) for n in (1, 5)] == [1, 5]
        taken = channel.get_many(6)
        assert np.array_equal(taken[4], array)
        assert np.array_equal(taken[5]["a"][0], array)
        assert channel.peek(key="other") == []
        for n in (0, -1, 1.5, "2", None, True, 1001):
            with pytest.raises(ConfigError, match="n is"):
                channel.peek(n)


def test_the_first_items_of_a_local_channel_are_copies_too():
    with Channel.create("here", local=True) as channel:
        thing = {"list": [1, 2]}
        channel.put(thing)
        (seen,) = channel.peek(3)
        seen["list"].append(3)
        assert channel.get() is thing
        assert thing == {"list": [1, 2]}
