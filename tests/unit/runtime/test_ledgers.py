"""The ledgers of the managers, without Ray."""

from __future__ import annotations

import asyncio

import pytest

from roost import CollectiveGroup, NameTaken, WorkerRecord, WorkerState
from roost.runtime.managers.job_info import JobInfo
from roost.runtime.managers.ledgers.collectives import CollectiveLedger
from roost.runtime.managers.ledgers.workers import RollCall, WorkerLedger
from roost.runtime.managers.namespaces import choose_namespace
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.runs.folder import RunDir


def record(address: str) -> WorkerRecord:
    return WorkerRecord(address=address, node_rank=0)


def test_a_worker_goes_from_requested_to_ready_to_dead_and_never_back():
    ledger = WorkerLedger()
    ledger.register([record("a")], now=1)
    assert ledger.update(WorkerState.READY, {"a": 7}, now=2) == ["a"]
    assert ledger.update(WorkerState.READY, {"a": 7}, now=3) == []
    assert ledger.update(WorkerState.DEAD, {"a": None}, now=4) == ["a"]
    assert ledger.update(WorkerState.READY, {"a": 9}, now=5) == []
    assert ledger.get(["a"]) == [WorkerRecord(address="a", node_rank=0, state=WorkerState.DEAD, since=4, pid=7)]
    assert ledger.living == set()


def test_a_name_is_taken_until_its_worker_is_dead():
    ledger = WorkerLedger()
    ledger.register([record("a")], now=1)
    with pytest.raises(NameTaken):
        ledger.register([record("b"), record("a")], now=2)
    assert [item.address for item in ledger.get()] == ["a"], "all or none"
    ledger.update(WorkerState.DEAD, {"a": None}, now=3)
    ledger.register([record("a")], now=4)
    assert ledger.get(["a"])[0].state is WorkerState.REQUESTED


def test_only_a_process_that_was_seen_alive_can_be_missing():
    roll = RollCall()
    assert roll.missing({"a", "b"}, alive=set()) == set()
    assert roll.missing({"a", "b"}, alive={"a", "x"}) == set()
    assert roll.missing({"a", "b"}, alive=set()) == {"a"}
    roll.expect(["b"])
    assert roll.has_seen("b")
    assert roll.missing({"a"}, alive=set()) == set(), "a death is reported once, and only for names that were asked for"
    assert roll.missing({"a", "b"}, alive=set()) == {"b"}


def test_a_worker_may_be_ready_before_it_is_registered():
    ledger = WorkerLedger()
    assert ledger.update(WorkerState.READY, {"a": 7}, now=1) == []
    ledger.register([record("a")], now=2)
    assert ledger.get(["a"])[0].state is WorkerState.READY
    assert ledger.get(["a"])[0].pid == 7


def test_what_a_dead_worker_would_have_started_does_not_come():
    ledger = WorkerLedger()
    ledger.register([record("engine:0")], now=1)
    later = ["engine:0:1", "engine:0:tool:1", "engine:1:0", "engine", "other:0"]
    assert not any(map(ledger.will_not_come, ["engine:0", *later]))
    ledger.update(WorkerState.DEAD, {"engine:0": None}, now=2)
    assert list(map(ledger.will_not_come, ["engine:0", *later])) == [True, True, True, False, False, False]


def test_a_communication_group_is_created_once():
    ledger = CollectiveLedger()
    group = CollectiveGroup(name="g", members=("a", "b"), node_rank=0, address="x", port=1)
    assert ledger.find("g", ["a", "b"], 0) is None
    ledger.groups["g"] = group
    assert ledger.find("g", ["a", "b"], 0) is group
    with pytest.raises(NameTaken, match="a and b, not b and a"):
        ledger.find("g", ["b", "a"], 0)
    with pytest.raises(NameTaken, match=r"on node 0, not on node 1\n.*ends when a, which listens, is closed"):
        ledger.find("g", ["a", "b"], 1)


def test_a_communication_group_is_over_when_its_first_member_is_gone_or_another_one():
    ledger = CollectiveLedger()
    assert not ledger.is_over("g", None), "it was never seen"
    assert not ledger.is_over("g", "first")
    assert not ledger.is_over("g", "first")
    assert ledger.is_over("g", None)
    assert ledger.is_over("g", "second")
    ledger.remove("g")
    assert not ledger.is_over("g", "second")


def test_what_a_dead_worker_waited_for_is_forgotten():
    manager = object.__new__(NodeManager)
    made = RunDir(path="/nowhere", token="abc", id="x")  # noqa: S106 - names a marker
    manager._begin((), (), JobInfo.of_this_process("head:1", "roost", made, keeps_events=False), None)
    # As if the worker had been seen alive, and the manager were watching.
    manager._roll, manager._watching = RollCall(), object()
    manager._roll.expect(["parent:0"])
    asyncio.run(NodeManager.note_wait.served(manager, "parent:0:child#1", "2 accelerators", "parent:0"))
    asyncio.run(NodeManager.note_wait.served(manager, "actor#2", "1 accelerator"))
    assert manager._known() == {"parent:0"}, "its death is noticed before it has reserved anything"
    manager._bury({"parent:0"})
    assert asyncio.run(NodeManager.get_waits.served(manager)) == {"actor": "1 accelerator"}


@pytest.mark.parametrize(
    ("used", "chosen"), [(set(), "roost"), ({"roost"}, "roost-2"), ({"roost", "roost-2", "roost-4"}, "roost-3")]
)
def test_a_second_job_gets_the_next_namespace(used, chosen):
    assert choose_namespace("roost", used) == chosen
