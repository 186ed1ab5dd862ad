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
from roost.weights.update import Membership, Moved, Request, Step, Update, Verb
from roost.weights.versions import Versions

A, R0, R1 = "actor:0", "rollout:0", "rollout:1"
MODEL = {"w": TensorSpec((4, 2), "float32")}
PLAN = make_sync_plan(replicated(MODEL, [A]), replicated(MODEL, [R0, R1]), {A: Place(0), R0: Place(0), R1: Place(1)})
OFFER = Offer(pid=1, node=0, arrays={"w": RemoteArray(dtype="float32", shape=(4, 2), strides=(8, 4))})
ROUTES = {R0: {A: (Route.NODE, "")}, R1: {A: (Route.NETWORK, "")}}


def ask(worker: str, verb: Verb, details: Any = None) -> Request:
    return Request(worker, verb, 7, 3, PLAN.digest, details)


ABORTS = [ask(worker, Verb.ABORT) for worker in (A, R0, R1)]


def begin(**known: Any) -> tuple[Update, Sequence[Request]]:
    return Update(plan=PLAN, attempt=7, version=3, **known).begin()


def answer(update: Update, steps: Sequence[Request], *values: Any) -> tuple[Update, Sequence[Request]]:
    """Answer requests, in their order; only the last answer has consequences."""
    after: Sequence[Request] = ()
    for request, value in zip(steps, values, strict=True):
        assert after == ()
        update, after = update.answered(request, value)
    return update, after


def moving() -> tuple[Update, Sequence[Request]]:
    update, steps = begin(offers={A: (1, OFFER)}, routes=ROUTES)
    return answer(update, steps, None, None, None)


def test_a_first_update_prepares_connects_moves_and_commits():
    update, steps = begin()
    assert steps == [ask(A, Verb.OFFER, 0), ask(R0, Verb.PREPARE), ask(R1, Verb.PREPARE)]
    update, steps = answer(update, steps, (1, OFFER), None, None)
    assert steps == [ask(R0, Verb.CONNECT, {A: OFFER}), ask(R1, Verb.CONNECT, {A: OFFER})]
    update, steps = answer(update, steps, ROUTES[R0], ROUTES[R1])
    assert steps == [ask(A, Verb.SEND, (R1,)), ask(R0, Verb.MOVE), ask(R1, Verb.MOVE)]
    update, steps = answer(update, steps, None, Moved(seconds={A: 1.0}), Moved(seconds={A: 2.0}))
    assert steps == [ask(R0, Verb.COMMIT), ask(R1, Verb.COMMIT)]
    assert update.waits_for() == f"{R0}, {R1}, commit of version {update.version}"
    update, steps = answer(update, steps, 0.1, 0.2)
    assert (steps, update.is_over, update.error) == ((), True, None)
    assert (update.pauses, update.offers) == ({R0: 0.1, R1: 0.2}, {A: (1, OFFER)})
    assert update.detours == []


def test_targets_that_know_the_memory_are_not_connected_again():
    update, steps = begin(offers={A: (4, OFFER)}, routes=ROUTES)
    assert steps[0] == ask(A, Verb.OFFER, 4)
    _, steps = answer(update, steps, None, None, None)
    assert [step.verb for step in steps] == [Verb.SEND, Verb.MOVE, Verb.MOVE]
    # Elsewhere than before: all targets are told.
    _, steps = answer(*begin(offers={A: (4, OFFER)}, routes=ROUTES), (5, OFFER), None, None)
    assert [step.verb for step in steps] == [Verb.CONNECT, Verb.CONNECT]


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
    update, after = update.answered(steps[0], (2, offer))
    assert (after, update.is_over) == (ABORTS, True)
    with pytest.raises(ConfigError, match=wrong):
        raise update.error
    assert update.late() == update.answered(steps[1]) == update.failed(steps[1], WorkerDied("late")) == (update, ())


def test_other_strides_fit():
    turned = replace(OFFER, arrays={"w": RemoteArray(dtype="float32", shape=(4, 2), strides=(4, 16))})
    _, steps = answer(*begin(offers={A: (1, OFFER)}, routes=ROUTES), (2, turned), None, None)
    assert steps[0] == ask(R0, Verb.CONNECT, {A: turned})


def test_what_fails_before_the_decision_ends_the_update_for_all():
    update, steps = moving()
    error = WorkerDied("actor:0 has ended")
    update, after = update.failed(steps[1], error)
    assert (after, update.is_over, update.error) == (ABORTS, True, error)
    assert update.give_up() == ()
    late, after = moving()[0].late()
    assert (after, late.is_over) == (ABORTS, True)
    what = "no answer to 'move' of update 7, to version 3, from actor:0, rollout:0 and rollout:1 in time"
    assert str(late.error) == what
    assert type(late.error) is CallTimedOut
    # As after Ctrl-C.
    assert moving()[0].give_up() == ABORTS


def test_what_fails_after_the_decision_ends_it_for_none():
    moved = [None, Moved(seconds={}), Moved(seconds={})]
    update, commits = answer(*moving(), *moved)
    assert update.give_up() == ()
    dead = WorkerDied("rollout:0 is gone")
    failed, after = update.failed(commits[0], dead)
    assert (after, failed.is_over) == ((), False)
    over, after = failed.answered(commits[1], 0.5)
    assert (after, over.is_over, over.error) == ((), True, dead)
    # A worker that died is the worse news.
    assert failed.late()[0].error is dead
    assert failed.failed(commits[1], ClusterError("no"))[0].error is dead
    assert update.failed(commits[1], ClusterError("no"))[0].failed(commits[0], dead)[0].error is dead
    late, after = update.answered(commits[1], 0.5)[0].late()
    assert (after, late.is_over) == ((), True)
    assert isinstance(late.error, UpdateDecided)
    assert isinstance(late.error, CallTimedOut)
    assert "version 3 is decided, and in use by rollout:1; not heard from" in str(late.error)
    assert "to take it over when it goes on: rollout:0" in str(late.error)


def test_every_pair_that_did_not_go_as_planned_is_named_with_the_reason():
    routes = {R0: {A: (Route.RELAY, "no IPC handle")}, R1: {A: (Route.GROUP, "")}}
    update, steps = answer(*begin(offers={A: (1, OFFER)}, routes=routes), None, None, None)
    assert steps[0] == ask(A, Verb.SEND, (R0, R1))
    refused = Moved(seconds={}, detours={A: "NCCL failed: no route"})
    update, _ = answer(update, steps, None, Moved(seconds={}), refused)
    assert update.detours == [
        Detour(source=A, target=R0, planned=Route.NODE, taken=Route.RELAY, why="no IPC handle"),
        Detour(source=A, target=R1, planned=Route.NETWORK, taken=Route.NETWORK, why="NCCL failed: no route"),
    ]
    assert str(update.detours[0]) == "actor:0 -> rollout:0: same node, sent, not same node: no IPC handle"


PREPARE, MOVE, COMMIT, ABORT = (Request(R0, verb, 2) for verb in (Verb.PREPARE, Verb.MOVE, Verb.COMMIT, Verb.ABORT))
OFFERED = replace(PREPARE, verb=Verb.OFFER)


def member(*requests: Request, overwrites: bool = False) -> Membership:
    state = Membership(who=R0)
    for request in requests:
        state, _ = state.take(request, overwrites=overwrites)
        if request.verb is Verb.MOVE:
            state = replace(state, has_all=True)
    return state


def test_a_member_checks_copies_and_takes_over():
    assert member().take(PREPARE, overwrites=False)[1] == [Step.CHECK]
    assert member().take(OFFERED, overwrites=False)[1] == [Step.OFFER]
    assert member(PREPARE).take(replace(PREPARE, verb=Verb.CONNECT), overwrites=False)[1] == [Step.CONNECT]
    assert member(PREPARE).take(replace(PREPARE, verb=Verb.SEND), overwrites=False)[1] == [Step.SEND]
    assert member(PREPARE).take(MOVE, overwrites=False)[1] == [Step.COPY]
    assert member(PREPARE, MOVE).take(COMMIT, overwrites=False)[1] == [Step.BEGIN, Step.TAKE_OVER, Step.END]
    assert member(PREPARE).take(MOVE, overwrites=True)[1] == [Step.BEGIN, Step.COPY]
    after, steps = member(PREPARE, MOVE, overwrites=True).take(COMMIT, overwrites=True)
    assert (steps, after.is_changing) == ([Step.END], False)


def test_a_member_refuses_what_is_late():
    newer = member(PREPARE, replace(PREPARE, attempt=3))
    for verb in (Verb.OFFER, Verb.PREPARE, Verb.CONNECT, Verb.MOVE, Verb.COMMIT, Verb.SEND):
        for state in (newer, member(PREPARE).abort(2)):
            with pytest.raises(ClusterError, match=r"^update 2 of rollout:0 was broken off$"):
                state.take(replace(PREPARE, verb=verb), overwrites=False)
    with pytest.raises(ClusterError, match=r"^rollout:0 has not got all of update 2$"):
        member(PREPARE).take(COMMIT, overwrites=False)
    # What was moved for an older attempt is nothing for this one.
    with pytest.raises(ClusterError, match="has not got all"):
        member(PREPARE, MOVE, replace(PREPARE, attempt=3)).take(replace(COMMIT, attempt=3), overwrites=False)


def test_weights_that_were_being_overwritten_are_no_version_when_the_attempt_ends():
    changing = member(PREPARE, MOVE, overwrites=True)
    after, steps = changing.abort(2).take(ABORT, overwrites=True)
    assert (steps, after.is_changing) == ([Step.BREAK_OFF], False)
    after, steps = changing.take(replace(PREPARE, attempt=3), overwrites=True)
    assert (steps, after.is_changing) == ([Step.BREAK_OFF, Step.CHECK], False)
    # Of another attempt, and of none.
    assert changing.abort(1).take(replace(ABORT, attempt=1), overwrites=True)[1] == ()
    assert member(PREPARE, MOVE).abort(2).take(ABORT, overwrites=False)[1] == []


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
    noted_by_others = list(FakeMover.read_from)
    assert carry_out(plan, offered, accepted, mover=Noted) == []
    assert accepted[R0]["w"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(Noted.read_from) == [(A, (0, 0), (2, 2)), ("actor:1", (0, 0), (2, 2))]
    assert FakeMover.read_from == noted_by_others


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
