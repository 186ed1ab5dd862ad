"""An update, step by step: what a link asks for, and what a member does, without any of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roost import CallTimedOut, ClusterError, ConfigError, WorkerDied
from roost.comm.move.mover import Offer, RemoteArray, RemoteMemory, make_offer
from roost.comm.move.route import Route
from roost.testing import FakeMover, carry_out
from roost.weights import Detour, Layout, Place, SyncPlan, TensorSpec, UpdateDecided, make_sync_plan
from roost.weights.layout import replicated
from roost.weights.rules import Split, make_layout
from roost.weights.transfer import ArraysSeen
from roost.weights.update import (
    Abort,
    Answered,
    Ask,
    BeginChange,
    BreakOff,
    CheckTarget,
    Commit,
    Connect,
    CopyAll,
    Decide,
    End,
    EndChange,
    Failed,
    Late,
    LinkStep,
    Membership,
    Move,
    Moved,
    OfferWeights,
    Phase,
    Prepare,
    Refuse,
    Send,
    TakeOver,
    Tell,
    Update,
)
from roost.weights.versions import Versions

A, R0, R1 = "actor:0", "rollout:0", "rollout:1"
MODEL = {"w": TensorSpec((4, 2), "float32")}
PLAN = make_sync_plan(replicated(MODEL, [A]), replicated(MODEL, [R0, R1]), {A: Place(0), R0: Place(0), R1: Place(1)})
OFFER = Offer(pid=1, node=0, arrays={"w": RemoteArray(dtype="float32", shape=(4, 2), strides=(8, 4))})
ROUTES = {R0: {A: (Route.NODE, "")}, R1: {A: (Route.NETWORK, "")}}
ABORTS = [Tell(worker, Abort(7)) for worker in (A, R0, R1)]


def begin(**known: Any) -> tuple[Update, Sequence[LinkStep]]:
    return Update(plan=PLAN, attempt=7, version=3, **known).begin()


def answer(update: Update, steps: Sequence[LinkStep], *values: Any) -> tuple[Update, Sequence[LinkStep]]:
    """Answer the requests of some steps, in their order; only the last answer has consequences."""
    asks = [step for step in steps if isinstance(step, Ask)]
    after: Sequence[LinkStep] = ()
    for ask, value in zip(asks, values, strict=True):
        assert after == ()
        update, after = update.take(Answered(ask.worker, ask.request, value))
    return update, after


def moving() -> tuple[Update, Sequence[LinkStep]]:
    update, steps = begin(offers={A: (1, OFFER)}, routes=ROUTES)
    return answer(update, steps, None, None, None)


def test_a_first_update_prepares_connects_moves_decides_and_commits():
    update, steps = begin()
    assert steps == [
        Ask(A, Prepare(7, 3, PLAN.digest, is_source=True)),
        Ask(R0, Prepare(7, 3, PLAN.digest, is_source=False)),
        Ask(R1, Prepare(7, 3, PLAN.digest, is_source=False)),
    ]
    update, steps = answer(update, steps, (1, OFFER), None, None)
    assert steps == [Ask(R0, Connect(PLAN.digest, {A: OFFER})), Ask(R1, Connect(PLAN.digest, {A: OFFER}))]
    update, steps = answer(update, steps, ROUTES[R0], ROUTES[R1])
    assert steps == [
        Ask(A, Send(7, PLAN.digest, (R1,))),
        Ask(R0, Move(7, PLAN.digest)),
        Ask(R1, Move(7, PLAN.digest)),
    ]
    update, steps = answer(update, steps, None, Moved(seconds={A: 1.0}), Moved(seconds={A: 2.0}))
    assert steps == [Decide(3), Ask(R0, Commit(7, PLAN.digest)), Ask(R1, Commit(7, PLAN.digest))]
    update, steps = answer(update, steps, 0.1, 0.2)
    assert steps == [End()]
    assert (update.phase, update.pauses, update.offers) == (Phase.OVER, {R0: 0.1, R1: 0.2}, {A: (1, OFFER)})
    assert update.detours == []


def test_targets_that_know_the_memory_are_not_connected_again():
    update, steps = begin(offers={A: (4, OFFER)}, routes=ROUTES)
    assert steps[0] == Ask(A, Prepare(7, 3, PLAN.digest, is_source=True, known=4))
    _, steps = answer(update, steps, None, None, None)
    assert [type(step.request) for step in steps] == [Send, Move, Move]
    # Elsewhere than before: all targets are told.
    _, steps = answer(*begin(offers={A: (4, OFFER)}, routes=ROUTES), (5, OFFER), None, None)
    assert [type(step.request) for step in steps] == [Connect, Connect]


@pytest.mark.parametrize(
    ("array", "wrong"),
    [
        (RemoteArray(dtype="float32", shape=(2, 4), strides=(16, 4)), r"w of actor:0 has shape \[2, 4\]: \[4, 2\]"),
        (RemoteArray(dtype="float32", shape=(8,), strides=(4,)), r"w of actor:0 has shape \[8\]: \[4, 2\] is needed"),
        (RemoteArray(dtype="float16", shape=(4, 2), strides=(4, 2)), "w of actor:0 is float16, not float32"),
        (None, "actor:0 has no w"),
    ],
)
def test_an_offer_that_does_not_fit_the_plan_ends_the_update_before_a_byte_moves(array, wrong):
    update, steps = begin(offers={A: (1, OFFER)}, routes=ROUTES)
    offer = replace(OFFER, arrays={} if array is None else {"w": array})
    update, (*aborts, end) = update.take(Answered(A, steps[0].request, (2, offer)))
    assert aborts == ABORTS
    with pytest.raises(ConfigError, match=wrong):
        raise end.error
    assert update.phase is Phase.OVER
    assert update.take(Late()) == (update, ())


def test_other_strides_fit():
    turned = replace(OFFER, arrays={"w": RemoteArray(dtype="float32", shape=(4, 2), strides=(4, 16))})
    _, steps = answer(*begin(offers={A: (1, OFFER)}, routes=ROUTES), (2, turned), None, None)
    assert steps[0] == Ask(R0, Connect(PLAN.digest, {A: turned}))


def test_what_fails_before_the_decision_ends_the_update_for_all():
    update, steps = moving()
    error = WorkerDied("actor:0 has ended")
    update, after = update.take(Failed(R0, steps[1].request, error))
    assert after == [*ABORTS, End(error)]
    assert update.give_up() == ()
    late, after = moving()[0].take(Late())
    assert after[:-1] == ABORTS
    what = "no answer to 'move' of update 7, to version 3, from actor:0, rollout:0 and rollout:1 in time"
    assert str(after[-1].error) == what
    assert type(after[-1].error) is CallTimedOut
    assert late.phase is Phase.OVER
    # As after Ctrl-C.
    assert moving()[0].give_up() == ABORTS


def test_what_fails_after_the_decision_ends_it_for_none():
    moved = [None, Moved(seconds={}), Moved(seconds={})]
    update, steps = answer(*moving(), *moved)
    commits = steps[1:]
    assert update.give_up() == ()
    dead = WorkerDied("rollout:0 is gone")
    failed, after = update.take(Failed(R0, commits[0].request, dead))
    assert after == ()
    assert failed.take(Answered(R1, commits[1].request, 0.5))[1] == [End(dead)]
    # A worker that died is the worse news.
    assert failed.take(Late())[1] == [End(dead)]
    one, _ = update.take(Answered(R1, commits[1].request, 0.5))
    _, (end,) = one.take(Late())
    assert isinstance(end.error, UpdateDecided)
    assert isinstance(end.error, CallTimedOut)
    assert "version 3 is decided, and in use by rollout:1; not heard from" in str(end.error)
    assert "to take it over when it goes on: rollout:0" in str(end.error)


def test_every_pair_that_did_not_go_as_planned_is_named_with_the_reason():
    routes = {R0: {A: (Route.RELAY, "no IPC handle")}, R1: {A: (Route.GROUP, "")}}
    update, steps = answer(*begin(offers={A: (1, OFFER)}, routes=routes), None, None, None)
    assert steps[0] == Ask(A, Send(7, PLAN.digest, (R0, R1)))
    refused = Moved(seconds={}, detours={A: "NCCL failed: no route"})
    update, _ = answer(update, steps, None, Moved(seconds={}), refused)
    assert update.detours == [
        Detour(source=A, target=R0, planned=Route.NODE, taken=Route.RELAY, why="no IPC handle"),
        Detour(source=A, target=R1, planned=Route.NETWORK, taken=Route.NETWORK, why="NCCL failed: no route"),
    ]
    assert str(update.detours[0]) == "actor:0 -> rollout:0: same node, sent, not same node: no IPC handle"


PREPARE, MOVE, COMMIT = Prepare(2, 5, "d", is_source=False), Move(2, "d"), Commit(2, "d")


def member(*requests: Any, overwrites: bool = False) -> Membership:
    state = Membership(who=R0)
    for request in requests:
        state, steps = state.take(request, overwrites=overwrites)
        assert not any(isinstance(step, Refuse) for step in steps)
        if isinstance(request, Move):
            state = state.copied()
    return state


def refused(state: Membership, request: Any) -> str:
    after, (step,) = state.take(request, overwrites=False)
    assert isinstance(step, Refuse)
    assert after == state
    return str(step.error)


def test_a_member_checks_copies_and_takes_over():
    assert member().take(PREPARE, overwrites=False)[1] == [CheckTarget(5, "d")]
    assert member().take(replace(PREPARE, is_source=True, known=9), overwrites=False)[1] == [OfferWeights("d", 9)]
    assert member(PREPARE).take(MOVE, overwrites=False)[1] == [CopyAll("d")]
    assert member(PREPARE, MOVE).take(COMMIT, overwrites=False)[1] == [TakeOver(5, "d")]
    assert member(PREPARE).take(MOVE, overwrites=True)[1] == [BeginChange(5), CopyAll("d")]
    after, steps = member(PREPARE, MOVE, overwrites=True).take(COMMIT, overwrites=True)
    assert (steps, after.is_changing) == ([EndChange()], False)


def test_a_member_refuses_what_is_late():
    newer = member(PREPARE, replace(PREPARE, attempt=3))
    for request in (PREPARE, MOVE, COMMIT, Send(2, "d", ())):
        assert refused(newer, request) == "update 2 of rollout:0 was broken off"
        assert refused(member(PREPARE).abort(2), request) == "update 2 of rollout:0 was broken off"
    assert refused(member(PREPARE), COMMIT) == "rollout:0 has not got all of update 2"
    # What was moved for an older attempt is nothing for this one.
    assert "has not got all" in refused(member(PREPARE, MOVE, replace(PREPARE, attempt=3)), replace(COMMIT, attempt=3))


def test_weights_that_were_being_overwritten_are_no_version_when_the_attempt_ends():
    changing = member(PREPARE, MOVE, overwrites=True)
    after, steps = changing.abort(2).take(Abort(2), overwrites=True)
    assert (steps, after.is_changing) == ([BreakOff("update 2 was broken off")], False)
    _, steps = changing.take(replace(PREPARE, attempt=3), overwrites=True)
    assert steps == [BreakOff("update 2 was not completed"), CheckTarget(5, "d")]
    # Of another attempt, and of none.
    assert changing.abort(1).take(Abort(1), overwrites=True)[1] == ()
    assert member(PREPARE, MOVE).abort(2).take(Abort(2), overwrites=False)[1] == []


def test_of_two_changes_of_the_same_weights_the_newer_waits_and_the_older_is_refused():
    versions, order = Versions(R0), []
    inside, may_end = threading.Event(), threading.Event()

    def change(version: int) -> None:
        with versions.changing(version, lambda: None):
            inside.set()
            may_end.wait(60)
            order.append((version, versions.whole))

    first = threading.Thread(target=change, args=(2,))
    first.start()
    assert inside.wait(60)
    with pytest.raises(ConfigError, match="a whole number above 2, which rollout:0 has"):
        versions.check(1)
    with pytest.raises(ConfigError, match="only go up"), versions.changing(2, lambda: None):
        order.append("never")
    second = threading.Thread(target=change, args=(3,))
    second.start()
    may_end.set()
    first.join(60)
    second.join(60)
    assert (order, versions.whole) == ([(2, -1), (3, -1)], 3)
    with pytest.raises(RuntimeError, match="no"), versions.changing(4, lambda: None):
        raise RuntimeError("no")
    assert versions.whole == -1, "what was overwritten in part is no version"

    def broken_off() -> None:
        raise ClusterError("broken off")

    with pytest.raises(ClusterError, match="broken off"), versions.changing(5, broken_off):
        order.append("never")


@pytest.mark.parametrize("change", ["shape", "dtype", "place"])
def test_the_same_array_with_another_form_is_other_memory(change):
    array = np.zeros((4, 6), np.float32)
    seen = ArraysSeen({"w": array})
    assert seen.is_same({"w": array})
    if change == "shape":
        array.shape = (6, 4)
    elif change == "dtype":
        array.dtype = np.int32
    else:
        array.resize((40, 60), refcheck=False)
    assert not seen.is_same({"w": array})


def test_the_same_tensor_with_other_strides_is_other_memory():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 4)
    seen = ArraysSeen({"w": tensor})
    assert seen.is_same({"w": tensor})
    assert not seen.is_same({"w": tensor.t_()})


def half() -> tuple[SyncPlan, dict[str, Any], dict[str, Any]]:
    """A plan from two halves to a whole on another node, and the weights of each worker."""
    source = make_layout(MODEL, "actor", {"dp": 2}, [Split("dp", 0, ("*",))])
    places = {A: Place(0), "actor:1": Place(1), R0: Place(0)}
    plan = make_sync_plan(source, replicated(MODEL, [R0]), places)
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)

    class Half:
        def __init__(self, number: int) -> None:
            self.number = number

        def tensors(self) -> dict[str, Any]:
            return {"w": whole[2 * self.number :][:2]}

        def held(self) -> list[Any]:
            return list(source.held_by(f"actor:{self.number}"))

    return plan, {f"actor:{number}": Half(number) for number in range(2)}, {R0: {"w": np.zeros((4, 2), np.float32)}}


def test_a_plan_can_be_carried_out_in_one_process_and_the_mover_says_what_it_copied():
    class Noted(FakeMover):
        pass

    plan, offered, accepted = half()
    assert carry_out(plan, offered, accepted, mover=Noted) == []
    assert accepted[R0]["w"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(Noted.read_from) == [(A, (0, 0), (2, 2)), ("actor:1", (0, 0), (2, 2))]
    assert FakeMover.read_from == []


def test_a_fake_mover_fails_where_it_is_told():
    class Closed(FakeMover):
        closed = "no IPC handle"

    class Dead(FakeMover):
        dead = ("actor:1",)

    plan, offered, accepted = half()
    assert [str(one) for one in carry_out(plan, offered, accepted, mover=Closed)] == [
        "actor:0 -> rollout:0: same node, sent, not same node: no IPC handle"
    ]
    with pytest.raises(WorkerDied, match="actor:1 has ended"):
        carry_out(plan, offered, accepted, mover=Dead)
    with pytest.raises(ConfigError, match=r"w of actor:0 has shape \[1, 2\]: \[2, 2\] is needed"):
        carry_out(plan, {**offered, A: {"w": np.zeros((1, 2), np.float32)}}, accepted)


@pytest.mark.parametrize(("at", "shape"), [((0, 0), (5, 2)), ((3, 0), (2, 2)), ((0, -1), (1, 1)), ((0,), (4,))])
def test_nothing_outside_of_an_array_is_read(at, shape):
    memory = RemoteMemory(A, make_offer({"w": np.ones((4, 2), np.float32)}, 0, may_share=False))
    with pytest.raises(ConfigError, match=r"w of actor:0 has shape \[4, 2\]: there is no"):
        memory.read("w", at, np.zeros(shape, np.float32))
    with pytest.raises(ConfigError, match="there is no"):
        memory.view("w", at, shape)


def test_a_process_of_that_number_which_is_another_one_is_not_read():
    offer = make_offer({"w": np.ones(4, np.float32)}, 0, may_share=False)
    assert RemoteMemory(A, offer).end(["w"]).closed == ""
    address, content = offer.cookie
    other = RemoteMemory(A, replace(offer, cookie=(address, bytes(len(content)))))
    assert "is another one here" in other.end(["w"]).closed
    gone = RemoteMemory(A, replace(offer, pid=2**22 - 1))
    assert "cannot read the memory of process 4194303: No such process" in gone.end(["w"]).closed


def test_what_a_worker_holds_is_found_by_the_split_and_not_by_each_tensor():
    layout = make_layout(
        {f"t{n}": TensorSpec((4, 2), "float32") for n in range(3)}, "a", {"dp": 2}, [Split("dp", 0, ("*",))]
    )
    assert [(held.name, held.box) for held in layout.held_by("a:1")] == [(f"t{n}", ((2, 4), (0, 2))) for n in range(3)]
    assert Layout.from_value(layout.to_value()) == layout
