"""Ray handles of workers: one reference to the value, the user's exceptions, and what Ray prints of them."""

from __future__ import annotations

import asyncio
import textwrap
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayTaskError

from odd_errors import ODD, Odd
from roost import CallTimedOut, Channel, Cluster, NodePlacementStrategy, Worker, WorkerFailed, WorkerGroup
from waiting import wait_until
from workers import Performer

VALUES = [None, 0, -1.5, "", "text", b"", b"x" * 300_000, [], {"a": [1, (2,)]}, np.arange(100_000)]


class Caller(Worker):
    """Calls another group's workers through their Ray handles."""

    def ask(self, group: WorkerGroup, method: str, *args: Any) -> Any:
        (handle,) = group.actor_handles
        return ray.get(getattr(handle, method).remote(*args), timeout=60)


class Both(Worker):
    """Methods of every kind, and one that only the class itself calls."""

    async def wait(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def fail(self) -> None:
        raise LookupError("not here")

    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    def plain(self) -> str:
        return "plain"


class Impatient(Worker):
    """Its method raises what Ray raises where a program waits in vain, or what Ray raises at all."""

    def fail(self, kind: type[Exception]) -> None:
        raise kind("told by the worker")

    def take(self, value: Any) -> Any:
        return value


class Chosen(Worker):
    """A helper that waits does not make its worker asynchronous."""

    async def _helper(self) -> int:
        return 1

    def inside(self) -> int:
        # An event loop of Ray's would refuse it.
        return asyncio.run(self._helper())


@pytest.fixture
def actor(shared_cluster: Cluster, keep: Any) -> WorkerGroup:
    strategy = NodePlacementStrategy([0, 1])
    return keep("handled", lambda: Performer.create_group().launch(shared_cluster, strategy, name="handled"))


@pytest.fixture
def both(shared_cluster: Cluster) -> Iterator[WorkerGroup]:
    with Both.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="both") as group:
        yield group


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{len(repr(value)[:40])}")
def test_a_method_takes_any_value_and_returns_one_reference_to_it(actor, value):
    ref = actor.actor_handles[0].echo.remote(value, key=value)
    assert isinstance(ref, ray.ObjectRef)
    (returned,), named = ray.get(ref, timeout=60)
    for found in (returned, named["key"]):
        assert type(found) is type(value)
        assert np.array_equal(found, value)


def test_handles_are_those_of_ray(actor):
    first, second = actor.actor_handles
    assert ray.get([first.rank_of.remote(), second.rank_of.remote()], timeout=60) == [0, 1]
    # As with any actor: a reference is fetched, and one inside of a list is not.
    made = second.make.remote(3)
    assert ray.get(first.look.remote([ray.get(made, timeout=60)]), timeout=60)[0][:2] == (1, 3)
    (got,), _ = ray.get(first.echo.remote(made), timeout=60)
    assert got.tolist() == [1, 1, 1]
    ((inside,),), _ = ray.get(first.echo.remote([made]), timeout=60)
    assert isinstance(inside, ray.ObjectRef)
    assert [ray.get(item, timeout=60) for item in second.items.remote(3)] == [(1, 0), (1, 1), (1, 2)]
    with pytest.raises(AttributeError):
        first.not_there  # noqa: B018 - the access is the test


def test_calls_of_the_group_and_of_its_handles_keep_their_order(actor):
    handle = actor.actor_handles[0]
    first = actor[0].count()
    second, third = handle.count.remote(), actor[0].count()
    (begin,) = first.wait(60)
    assert (ray.get(second, timeout=60), third.wait(60)) == (begin + 1, [begin + 2])


def test_every_kind_of_method_works_by_handle_and_by_group(both):
    (handle,) = both.actor_handles
    assert ray.get([handle.wait.remote(5), handle.plain.remote()], timeout=60) == [5, "plain"]
    assert [ray.get(item, timeout=60) for item in handle.numbers.remote(3)] == [0, 1, 2]
    assert (both.wait(5).wait(60), both.plain().wait(60), both.numbers(3).wait(60)) == ([5], ["plain"], [[0, 1, 2]])
    assert list(both.stream("numbers", 2)) == [(0, 0), (0, 1)]
    for call in (lambda: ray.get(handle.fail.remote(), timeout=60), lambda: both.fail().wait(60)):
        with pytest.raises(LookupError, match="not here") as caught:
            call()
        assert "in both:0 on node 0" in notes(caught.value)

    async def awaited() -> Any:
        return await handle.wait.remote(7)

    assert asyncio.run(awaited()) == 7


def test_an_asynchronous_helper_does_not_make_the_worker_asynchronous(shared_cluster):
    with Chosen.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="chosen") as group:
        assert group.inside().wait(60) == [1]


def test_a_worker_calls_the_handles_of_another_group(shared_cluster, actor):
    with Caller.create_group().launch(shared_cluster, NodePlacementStrategy([1]), name="caller") as caller:
        assert caller.ask(actor[1], "rank_of").wait(60) == [1]
        with pytest.raises(ValueError, match=r"^far on 1\n") as caught:
            caller.ask(actor[1], "fail", [1], "far").wait(60)
        assert type(caught.value) is ValueError
        assert "in handled:1 on node 1" in notes(caught.value)
        assert "in caller:0 on node 1" in notes(caught.value)


@pytest.mark.parametrize("how", ["handle", "refs", "await"])
def test_an_exception_is_the_user_s_with_rank_node_and_log(shared_cluster, actor, how):
    ref = actor[1].fail([1]).refs[0] if how == "refs" else actor.actor_handles[1].fail.remote([1])

    async def awaited() -> Any:
        return await ref

    with pytest.raises(ValueError, match="bad reward on 1") as caught:
        asyncio.run(awaited()) if how == "await" else ray.get(ref, timeout=60)
    assert isinstance(caught.value, RayTaskError), "as plain Ray raises it"
    assert type(caught.value.cause) is ValueError
    (note,) = caught.value.__notes__
    assert note.startswith(f"in handled:1 on {shared_cluster.nodes[1]}, pid ")
    assert ", in 'fail'\n" in note
    assert "logs/handled/1.log" in note
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.partition("the end of its log")[0].count('raise ValueError(f"{text} on {self.rank}")') == 1
    (failure,) = caught.value.worker_failures
    assert (failure.address, failure.rank, failure.method) == ("handled:1", 1, "fail")
    assert 'raise ValueError(f"{text} on {self.rank}")' in failure.traceback


def test_an_item_s_exception_is_the_user_s(actor):
    stream = actor.actor_handles[0].items_then_fail.remote(1)
    assert ray.get(next(stream), timeout=60) == 0
    with pytest.raises(KeyError, match="no more") as caught:
        ray.get(next(stream), timeout=60)
    assert "in handled:0 on node 0" in notes(caught.value)


@pytest.mark.parametrize("name", sorted(ODD))
def test_an_odd_exception_is_one_of_its_class_or_says_what_it_was(shared_cluster, keep, name):
    group = keep("odd", lambda: Odd.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="odd"))
    with pytest.raises((type(ODD[name]()), WorkerFailed, RayTaskError)) as caught:
        ray.get(group.actor_handles[0].fail.remote(name), timeout=60)
    assert f"{name}" in str(caught.value)
    assert "in odd:0 on node 0" in str(caught.value)


@pytest.mark.parametrize("kind", [GetTimeoutError, ObjectStoreFullError])
def test_an_exception_of_ray_s_that_a_method_raises_is_the_worker_s_and_no_timeout(shared_cluster, kind):
    with Impatient.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="impatient") as group:
        ways = [
            lambda: group.fail(kind).wait(60),
            lambda: group.fail(kind).one(),
            lambda: list(group.fail(kind)),
            lambda: asyncio.run(group.fail(kind).async_wait(60)),
            lambda: group.take(group.fail(kind)).wait(60),
        ]
        for way in ways:
            with pytest.raises(kind, match="told by the worker") as caught:
                way()
            assert "in impatient:0 on node 0" in notes(caught.value)
        (outcome,) = group.fail(kind).outcomes(60)
        assert isinstance(outcome.error, kind)


def test_ray_get_of_a_result_says_what_to_write(actor):
    with pytest.raises(TypeError, match=r"<CallResult of 'rank_of' .*> \(its values: result.wait\(\), or ray.get\(res"):
        ray.get([actor.rank_of()])


def test_durations_reach_the_caller_also_of_calls_that_fail(actor):
    result = actor.timed()
    result.wait(60)
    assert set(result.consume_durations()) == {"whole", "half", "timed"}
    failed = actor.fail([0])
    assert set(failed.consume_durations(None)["fail"]) == {1}


PROGRAM = """
import ray
from roost import CallTimedOut, Channel, Cluster, PackedPlacementStrategy
from workers import Performer

with Cluster(num_nodes=4, quiet=True):
    actor = Performer.create_group().launch(Cluster(), PackedPlacementStrategy(0, 1), name="actor")
    handle = actor.actor_handles[0]

    def take(call):
        try:
            call()
        except ValueError as error:
            print("handled", type(error).__name__, flush=True)

BODY
    actor.rank_of().wait(60)
    with Channel.create("quiet") as channel:
        for _ in range(2):
            try:
                channel.get(timeout=1)
            except CallTimedOut as error:
                print(error, flush=True)
"""


def run(driver: Any, body: str) -> tuple[str, str]:
    return driver(PROGRAM.replace("BODY", textwrap.indent(textwrap.dedent(body), "    "))).finish()


def test_ray_prints_nothing_of_a_failure_that_was_handled(driver):
    body = """
        take(lambda: actor.fail([0]).wait(60))
        take(lambda: list(actor.fail([0])))
        take(lambda: actor.echo(actor[0].fail([0])[0]).wait(60))
        outcomes = [type(outcome.error).__name__ for outcome in actor.fail([0, 1]).outcomes(60)]
        print(outcomes, flush=True)
        take(lambda: ray.get(actor[0].fail([0]).refs, timeout=60))
        take(lambda: ray.get(handle.fail.remote([0]), timeout=60))
    """
    said, complained = run(driver, body)
    ways = ["handled ValueError"] * 3 + ["['ValueError', 'ValueError']"] + ["handled RayTaskError(ValueError)"] * 2
    assert said.splitlines()[:6] == ways
    assert "Unhandled error" not in complained


@pytest.mark.parametrize("call", ["actor[1].fail([1], 'unseen')", "actor.actor_handles[1].fail.remote([1], 'unseen')"])
def test_a_failure_that_nobody_looks_at_is_printed_once_and_said_with_the_next_error(driver, call):
    said, complained = run(driver, call)
    (printed,) = complained.split("Unhandled error")[1:]
    assert "in actor:1 on node 1" in printed or "in actor:1 on node 0" in printed
    assert "ValueError: unseen on 1" in printed
    # Ray has unpickled the exception to print it, which is not to tell the program.
    assert said.count("meanwhile failed: actor:1 in fail: ValueError: unseen on 1") == 2


def test_an_error_of_a_handle_that_ends_the_program_is_not_said_again(driver):
    _, complained = run(driver, "ray.get(handle.fail.remote([0], 'the end'), timeout=60)")
    assert "ValueError: the end on 0" in complained
    assert "in actor:0 on node 0" in complained
    assert "meanwhile failed" not in complained


def test_a_failure_that_ray_get_did_not_raise_is_said_with_the_next_error(actor):
    refs = [handle.fail.remote([0, 1], "both") for handle in actor.actor_handles]
    wait_until(lambda: len(ray.wait(refs, num_returns=2, timeout=1)[0]) == 2, "both have failed")
    with pytest.raises(ValueError, match="both on 0"):
        ray.get(refs, timeout=60)
    with Channel.create("never") as channel, pytest.raises(CallTimedOut) as caught:
        channel.get(timeout=1)
    assert "meanwhile failed: handled:1 in fail: ValueError: both on 1" in notes(caught.value)
