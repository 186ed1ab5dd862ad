"""`allocate`: one actor, on that node, with that environment before its class is imported."""

from __future__ import annotations

import os
import sys

import pytest
import ray
from ray.exceptions import ActorDiedError

from roost import Cluster, ConfigError, NameTaken, WorkerManager, WorkerState
from waiting import wait_until

MODULE = """
import os
AT_IMPORT = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "MY_SETTING", "RANK")}

class Keeper:
    def __init__(self, *args, **kwargs):
        self.made_with = (args, kwargs)
    def at_import(self):
        return AT_IMPORT
"""


class Worker:
    """A class with every kind of method."""

    kind = "worker"

    def __init__(self, first: int = 0, *, second: str = "b") -> None:
        if first < 0:
            raise ValueError(f"first is {first}")
        self.first, self.second = first, second

    def where(self) -> str:
        return ray.util.get_node_ip_address()

    def made_with(self) -> tuple[int, str]:
        return self.first, self.second

    def variable(self, name: str, default: str | None = None) -> str | None:
        return os.environ.get(name, default)

    def early(self) -> tuple[list[str], str | None]:
        return sys.path, os.environ.get("PYTHONHASHSEED")

    def count(self, to: int):
        yield from range(to)

    @ray.method(num_returns=2)
    def pair(self) -> tuple[int, int]:
        return 1, 2

    @classmethod
    def name_of_class(cls) -> str:
        return cls.kind

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise KeyError("lost")


class AsyncWorker:
    """Methods that wait."""

    async def ask(self, what: str) -> str:
        return what

    async def stream(self, to: int):
        for number in range(to):
            yield number


def test_the_actor_is_on_its_node_and_sees_its_accelerator(shared_cluster):
    handles = [shared_cluster.allocate(Worker, f"w{node}-{gpu}", node, gpu, {}) for node in (0, 2) for gpu in (1, 3)]
    addresses = [shared_cluster.get_node_ip(node) for node in (0, 0, 2, 2)]
    assert ray.get([handle.where.remote() for handle in handles], timeout=60) == addresses
    seen = ray.get([handle.variable.remote("CUDA_VISIBLE_DEVICES") for handle in handles], timeout=60)
    assert seen == ["1", "3", "1", "3"]
    everything = shared_cluster.allocate(Worker, "all", 1, None, {})
    nothing = shared_cluster.allocate(Worker, "none", 3, None, {"A": "b"})
    assert ray.get(everything.variable.remote("CUDA_VISIBLE_DEVICES"), timeout=60) == "0,1,2,3"
    assert ray.get(nothing.variable.remote("A"), timeout=60) == "b"
    own = Cluster.allocate(Worker, "own", 0, 0, {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert ray.get(own.variable.remote("CUDA_VISIBLE_DEVICES"), timeout=60) == "2,0", (
        "what the caller says goes over it"
    )


def test_the_environment_is_in_force_before_the_module_is_imported(shared_cluster, tmp_path, monkeypatch):
    (tmp_path / "keeper_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import keeper_module

    environment = {"MY_SETTING": "early", "RANK": "3", "PYTHONPATH": str(tmp_path)}
    handle = shared_cluster.allocate(
        keeper_module.Keeper, "keeper", 1, 2, environment, cls_args=[keeper_module.Keeper], cls_kwargs={"k": 1}
    )
    seen = ray.get(handle.at_import.remote(), timeout=60)
    assert seen == {"CUDA_VISIBLE_DEVICES": "2", "MY_SETTING": "early", "RANK": "3"}


def test_variables_that_python_reads_first_are_there_when_it_begins(shared_cluster, tmp_path):
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    handle = shared_cluster.allocate(Worker, "early", 0, 0, {"PYTHONPATH": path, "PYTHONHASHSEED": "7"})
    path, seed = ray.get(handle.early.remote(), timeout=60)
    assert str(tmp_path) in path
    assert seed == "7"


def test_every_kind_of_method_works_as_on_a_plain_actor(shared_cluster):
    ref = ray.put(41)
    handle = shared_cluster.allocate(Worker, "kinds", 0, 0, {}, [ref], {"second": "c"})
    assert ray.get(handle.made_with.remote(), timeout=60) == (41, "c"), "a reference is fetched, as Ray would do"
    assert ray.get(handle.pair.remote(), timeout=60) == [1, 2]
    assert [ray.get(item, timeout=60) for item in handle.count.options(num_returns="streaming").remote(3)] == [0, 1, 2]
    assert ray.get(handle.name_of_class.remote(), timeout=60) == "worker"
    assert ray.get(handle.double.remote(4), timeout=60) == 8
    with pytest.raises(KeyError, match="lost"):
        ray.get(handle.fail.remote(), timeout=60)
    with pytest.raises(AttributeError):
        handle.not_there  # noqa: B018 - the access is the test
    waits = shared_cluster.allocate(AsyncWorker, "waits", 0, 0, {})
    assert ray.get(waits.ask.remote("x"), timeout=60) == "x"
    assert [ray.get(item, timeout=60) for item in waits.stream.options(num_returns="streaming").remote(2)] == [0, 1]


class Like:
    """Compares as an array does: element by element."""

    def __eq__(self, other: object) -> object:
        return Like()

    __hash__ = None

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


class Taker:
    """Keeps what it was made with."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def types(self) -> list[str]:
        return [type(item).__name__ for item in self.arguments]

    def nested(self) -> object:
        return ray.get(self.arguments[0]["inside"])


def test_arguments_arrive_as_they_were_and_references_inside_them_stay_references(shared_cluster):
    taker = shared_cluster.allocate(Taker, "odd", 0, 0, {}, [(Like(), 0), ("roost-ref", 0), ray.put([1])])
    assert ray.get(taker.types.remote(), timeout=60) == ["tuple", "tuple", "list"]
    holder = shared_cluster.allocate(Taker, "nested", 0, 0, {}, [{"inside": ray.put("kept")}])
    assert ray.get(holder.nested.remote(), timeout=60) == "kept"


def test_a_constructor_that_raises_is_reported_with_its_cause(shared_cluster):
    handle = shared_cluster.allocate(Worker, "bad", 0, 0, {}, [-1])
    with pytest.raises(ActorDiedError, match="first is -1"):
        ray.get(handle.where.remote(), timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Worker, "w", 4, 0, {}), "no node 4: the cluster has 0-3"),
        ((Worker, "w", -1, 0, {}), "no node -1"),
        ((Worker, "w", "0", 0, {}), "no node '0'"),
        ((Worker, "w", 0, 4, {}), "no accelerator 4 on node 0, which has 0-3"),
        ((Worker, "w", 3, 0, {}), "no accelerator 0 on node 3, which has none"),
        ((Worker, "w", 0, True, {}), "no accelerator True"),
        ((Worker, " ", 0, 0, {}), "worker_name is ' '"),
        ((Worker(), "w", 0, 0, {}), "starts a class"),
        ((Worker, "w", 0, 0, {"RANK": 3}), "the variable RANK is 3, not text"),
        ((Worker, "w", 0, 0, {"A=B": "x"}), "'A=B' cannot name an environment variable"),
        ((Worker, "w", 0, 0, {"A": "x\0"}), "zero byte"),
    ],
)
def test_what_is_not_there_is_refused_and_nothing_is_started(shared_cluster, arguments, message):
    before = [worker.address for worker in WorkerManager.get_proxy().get_workers()]
    with pytest.raises(ConfigError, match=message):
        shared_cluster.allocate(*arguments)
    assert [worker.address for worker in WorkerManager.get_proxy().get_workers()] == before


def test_a_name_that_is_taken_is_refused(shared_cluster):
    handle = shared_cluster.allocate(Worker, "twin", 0, 0, {})
    with pytest.raises(NameTaken, match="'twin' exists already"):
        shared_cluster.allocate(Worker, "twin", 1, 1, {})
    with pytest.raises(NameTaken, match="name of a manager"):
        shared_cluster.allocate(Worker, "NodeManager", 0, 0, {})
    ray.kill(handle)
    manager = WorkerManager.get_proxy()
    wait_until(lambda: manager.get_workers(["twin"])[0].state is WorkerState.DEAD, "its death is noticed")
    again = shared_cluster.allocate(Worker, "twin", 1, 1, {})
    assert ray.get(again.where.remote(), timeout=60) == shared_cluster.get_node_ip(1)
    assert manager.get_workers(["twin"])[0].node_rank == 1


def test_the_worker_manager_follows_an_actor_from_its_request_to_its_end(shared_cluster):
    manager = WorkerManager.get_proxy()
    handle = shared_cluster.allocate(Worker, "life", 2, 3, {})
    first = manager.get_workers(["life"])[0]
    assert (first.node_rank, first.accelerators) == (2, (3,))
    assert first.since > 0
    ray.get(handle.where.remote(), timeout=60)
    wait_until(lambda: manager.get_workers(["life"])[0].state is WorkerState.READY, "it is ready")
    ready = manager.get_workers(["life"])[0]
    assert ready.pid is not None
    os.kill(ready.pid, 9)
    wait_until(lambda: manager.get_workers(["life"])[0].state is WorkerState.DEAD, "its death is noticed")
    assert manager.get_workers(["life"])[0].since > ready.since
