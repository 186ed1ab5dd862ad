"""The result of a call as an argument of another: what arrives, by which way, and how failures are passed on."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

import numpy as np
import pytest
import ray

from roost import (
    CallTimedOut,
    Cluster,
    ConfigError,
    NodePlacementStrategy,
    OutcomeKind,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
)
from roost.testing import local_cluster
from waiting import wait_until
from workers import Peer, Performer, Talker

LARGE = 1_000_000
"""Numbers in an array that Ray keeps in its object store."""


@pytest.fixture
def rollout(shared_cluster: Cluster, keep) -> WorkerGroup:
    """Three workers that make what others take; those that a test killed are restarted."""
    strategy = NodePlacementStrategy([0, 0, 1])
    group = keep("rollout", lambda: Performer.create_group().launch(shared_cluster, strategy, name="rollout"))
    for rank in set(group.ranks) - set(group.alive):
        group.restart(rank)
    return group


@pytest.fixture
def actor(shared_cluster: Cluster, keep) -> WorkerGroup:
    """Three workers that take what others make."""
    strategy = NodePlacementStrategy([1, 2, 2])
    return keep("actor", lambda: Performer.create_group().launch(shared_cluster, strategy, name="actor"))


@pytest.fixture
def talker(shared_cluster: Cluster, keep) -> WorkerGroup:
    """A worker with an event loop."""
    strategy = NodePlacementStrategy([3])
    return keep("talker", lambda: Talker.create_group().launch(shared_cluster, strategy, name="talker"))


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_a_result_arrives_as_its_values_and_one_rank_of_it_as_its_value(rollout, actor, talker):
    result = rollout.rank_of()
    given, wanted = (result, result[2], [result[-3], {"some": result[1:]}]), ([0, 1, 2], 2, [0, {"some": [1, 2]}])
    for group in (actor, talker):
        assert group.echo(*given, 5, key=result[1]).wait(60) == [((*wanted, 5), {"key": 1})] * len(group)
    assert list(actor[0].stream("items", rollout[1].rank_of()[0])) == [(0, (0, 0))]
    assert actor.echo(rollout[1].rank_of(), rollout[3:].rank_of()).wait(60) == [(([1], []), {})] * 3
    assert result[2].wait(60) == 2
    assert result[1:].wait(60) == [1, 2]
    assert (len(result), len(result[1:])) == (3, 2)
    with pytest.raises(IndexError, match=r"'rank_of' on 3 workers of 'rollout'> has no rank 3 here: it has 0-2"):
        result[3]


def test_map_over_a_result_gives_each_rank_one_value(rollout, actor):
    assert actor.map("echo", rollout.rank_of()).wait(60) == [((rank,), {}) for rank in range(3)]
    pairs = [(value, "and") for value in (rollout.rank_of()[rank] for rank in (2, 1, 0))]
    assert [args for args, _ in actor.map("echo", pairs).wait(60)] == [(2, "and"), (1, "and"), (0, "and")]
    with pytest.raises(ConfigError, match="2 entries for 3 workers"):
        actor.map("echo", rollout.rank_of()[:2])


def test_large_values_go_from_worker_to_worker_without_a_copy(rollout, actor, monkeypatch):
    got: list[Any] = []
    real = ray.get
    monkeypatch.setattr(ray, "get", lambda *args, **kwargs: got.append(real(*args, **kwargs)) or got[-1])
    made = rollout.make(LARGE)
    assert actor.look(made).wait(60) == [[(rank, LARGE, False) for rank in range(3)]] * 3
    assert not any(isinstance(value, np.ndarray) for values in got for value in values), "the driver got none of them"
    assert set(made.consume_durations()) == {"make"}
    assert not any(isinstance(value, np.ndarray) for value in got), "nor with the durations"


def test_references_are_those_of_the_values(rollout):
    result = rollout.rank_of()
    assert ray.get(result.refs, timeout=60) == [0, 1, 2]
    assert ray.get(result[2].refs, timeout=60) == ray.get(result[2:].refs, timeout=60) == [2]
    with pytest.raises(TypeError, match=r"<CallResult of 'rank_of' .* can only be passed to a method of a group"):
        ray.put(result)
    with pytest.raises(ConfigError, match=r"create_group cannot be sent to a worker: <RankResult of 'rank_of' in roll"):
        Performer.create_group(result[0]).launch(Cluster())


def test_a_result_and_a_chain_can_be_awaited(rollout, talker):
    async def chain() -> tuple[Any, Any]:
        made = rollout.rank_of()
        return await talker.echo(made), await made[1]

    assert asyncio.run(chain()) == ([(([0, 1, 2],), {})], 1)

    async def fail() -> None:
        await talker.echo(rollout.fail([1]))

    with pytest.raises(ValueError, match="bad reward on 1") as caught:
        asyncio.run(fail())
    assert "in rollout:1 on node 0" in notes(caught.value)


def test_the_values_are_freed_once_they_have_arrived(small_cluster):
    def free() -> float:
        return ray.available_resources().get("object_store_memory", 0.0)

    with Performer.create_group().launch(small_cluster, NodePlacementStrategy([0, 0]), name="both") as group:
        full = free()
        kept = [group[1].look(group[0].make(4 * LARGE)) for _ in range(8)]
        assert [result.wait(60) for result in kept] == [[[(0, 4 * LARGE, False)]]] * 8
        wait_until(lambda: free() >= full, "256 MB went through an object store of 100 MB, and nothing is left")


def test_a_worker_serves_others_while_its_argument_is_made(shared_cluster, rollout, actor, tmp_path):
    with Peer.create_group().launch(shared_cluster, NodePlacementStrategy([3]), name="peer") as peer:
        peer.meet(actor).wait(60)
        chained = actor.echo(rollout[0].wait_for(str(tmp_path), "go"))
        wait_until((tmp_path / "waiting-0").exists, "the first call runs")
        assert peer.ask("rank_of").wait(60) == [[0, 1, 2]]
        (tmp_path / "go").touch()
        assert chained.wait(60) == [(([0],), {})] * 3


def test_a_time_out_names_what_is_late_of_both_calls(rollout, actor, tmp_path):
    first = rollout.late(str(tmp_path), late_rank=1)
    try:
        wait_until(lambda: first[0].done() and first[2].done(), "only one rank is late")
        result = actor.echo(first)
        with pytest.raises(
            CallTimedOut, match=r"'echo' of 'actor' has not answered in 0.5 s from 3 ranks of 3: 0-2"
        ) as late:
            result.wait(0.5)
        assert "it waits for its arguments, from 'late' of 'rollout' on rank 1;" in str(late.value)
        with pytest.raises(CallTimedOut, match="from 'late' of 'rollout' on rank 1;"):
            list(result.within(0.1))
    finally:
        (tmp_path / "go").touch()
    assert result.wait(60) == [(([0, 1, 2],), {})] * 3


def test_a_chain_fails_as_its_first_call_failed(rollout, actor):
    failed = actor.echo(rollout.fail([1]))
    with pytest.raises(ValueError, match="bad reward on 1") as caught:
        failed.wait(60)
    said = notes(caught.value)
    assert "in rollout:1 on node 0" in said
    assert ", in 'fail', whose result was passed to 'echo' of 'actor'\n  traceback of rollout:1:" in said
    assert "about to fail with bad reward" in said, "the log of the first"
    (failure,) = caught.value.worker_failures
    assert (failure.address, failure.rank, failure.method) == ("rollout:1", 1, "fail")
    assert failure.passed_to == "'echo' of 'actor'"
    assert failure.log_path.endswith("rollout/1.log")
    with pytest.raises(ValueError, match="bad reward on 1") as caught:
        actor.rank_of().wait(60), actor[0].echo(actor.echo(failed)).wait(60)
    assert "in rollout:1 on node 0" in notes(caught.value), "however long the chain is"
    assert [outcome.kind for outcome in failed.outcomes()] == [OutcomeKind.EXCEPTION] * 3
    with pytest.raises(ValueError, match="bad reward on 1"):
        list(actor.echo(rollout.fail([1])))
    with pytest.raises(ValueError, match="bad reward on 1"):
        list(actor.stream("items", rollout.fail([1])[1]))
    assert actor.rank_of().wait(60) == [0, 1, 2], "they go on"


def test_every_failure_of_the_first_call_and_of_the_second_is_named(rollout, actor):
    with pytest.raises(ValueError, match="bad reward on") as caught:
        actor.echo(rollout.fail([0, 2])).wait(60)
    assert {failure.address for failure in caught.value.worker_failures} == {"rollout:0", "rollout:2"}
    with pytest.raises(WorkerFailed, match=r"rollout:0 .* failed in 'unpicklable_result', whose result was passed to"):
        actor.echo(rollout.unpicklable_result()).wait(60)
    with pytest.raises(TypeError) as own:
        actor.length(rollout.rank_of()[0]).wait(60)
    assert {failure.address for failure in own.value.worker_failures} == {f"actor:{rank}" for rank in range(3)}
    assert "passed to" not in notes(own.value)


def test_ray_logs_no_failure_that_the_caller_got(rollout, actor, driver):
    code = f"""
        from roost import Cluster, WorkerGroup

        with Cluster(namespace={rollout.cluster.namespace!r}, quiet=True):
            rollout, actor = WorkerGroup.attach({rollout.name!r}), WorkerGroup.attach({actor.name!r})
            for make in (lambda: rollout.fail([1]), lambda: actor.echo(rollout.fail([1]))):
                for take in (lambda result: result.wait(60), lambda result: result.outcomes(60)):
                    try:
                        take(make())
                    except ValueError as error:
                        print(error, flush=True)
            rollout.rank_of().wait(60)
    """
    said, complained = driver(textwrap.dedent(code)).finish()
    assert said.splitlines() == ["bad reward on 1"] * 2, complained
    assert "Unhandled error" not in complained


def test_map_fails_only_where_the_first_call_failed(rollout, actor):
    result = actor.map("echo", rollout.fail([1]))
    assert result[2].wait(60) == ((2,), {})
    outcomes = result.outcomes(60)
    assert [outcome.value for outcome in outcomes] == [((0,), {}), None, ((2,), {})]
    assert "in rollout:1 on node 0" in notes(outcomes[1].error)


def test_a_failure_is_raised_while_the_other_ranks_of_the_first_call_still_run(rollout, actor, tmp_path):
    first = rollout.wait_or_fail(str(tmp_path), 1)
    for take in (lambda result: result.wait(60), list, lambda result: asyncio.run(_awaited(result))):
        with pytest.raises(RuntimeError, match="one of us is missing") as caught:
            take(actor.echo(first))
        assert "in rollout:1 on node 0" in notes(caught.value)
        assert "'wait_or_fail', whose result was passed to 'echo' of 'actor'" in notes(caught.value)
    (tmp_path / "go").touch()
    wait_until(first.done, "the others end")


async def _awaited(result: Any) -> Any:
    return await result


def test_the_death_of_the_worker_that_makes_an_argument_is_named(rollout, actor):
    result = actor.echo(rollout.end(1, "exit"))
    with pytest.raises(WorkerDied, match=r"rollout:1 on node 0 .* died in 'end', whose result was passed to 'echo'"):
        result.wait(60)
    outcome = result.outcomes()[0]
    assert (outcome.kind, type(outcome.error)) == (OutcomeKind.EXCEPTION, WorkerDied), "actor:0 is alive"
    assert "ending by exit" in str(outcome.error)
    with pytest.raises(WorkerDied, match=r"rollout:1 on node 0 .* died in a call, whose result was passed to 'echo'"):
        actor[0].echo(result).wait(60)
    assert actor.rank_of().wait(60) == [0, 1, 2]


def test_a_value_that_is_lost_with_its_node_is_named():
    Cluster.close_if_open()
    with local_cluster("3x0") as local, Cluster(num_nodes=3, quiet=True) as cluster:
        maker = Performer.create_group().launch(cluster, NodePlacementStrategy([1]), name="maker")
        taker = Performer.create_group().launch(cluster, NodePlacementStrategy([2]), name="taker")
        made = maker.make(LARGE)
        wait_until(made.done, "it is made")
        local.kill_node(1)
        wait_until(lambda: not maker.alive, "Ray knows that the node is gone")
        with pytest.raises(
            Exception, match=r"maker:0 on node 1 .* failed in 'make', whose result was passed to 'look'"
        ):
            taker.look(made).wait(60)
