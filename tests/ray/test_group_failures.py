"""Failures of a group on real processes: what is raised, what the message says, and what is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayTaskError
from ray.util import list_named_actors

from odd_errors import ODD, Odd, OddAsync
from roost import (
    CallResult,
    CallTimedOut,
    Channel,
    Cluster,
    ClusterError,
    ConfigError,
    LaunchTimedOut,
    NodeManager,
    NodePlacementStrategy,
    OutcomeKind,
    PackedPlacementStrategy,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
)
from roost.runtime.nodes.ray_state import is_known_dead
from roost.runtime.process.actor import MethodKind, make_actor_class
from roost.testing import local_cluster
from waiting import is_gone, press_ctrl_c, stop, wait_until
from workers import AsyncWaiter, Peer, Performer, Stubborn, TwoArguments, Waiter

FOUR = PackedPlacementStrategy(2, 5)
"""Two workers on node 0 and two on node 1."""


@pytest.fixture
def actor(shared_cluster: Cluster, keep) -> WorkerGroup:
    """Four workers that the tests share; those that a test killed are restarted."""
    group = keep("actor", lambda: Performer.create_group().launch(shared_cluster, FOUR, name="actor"))
    for rank in set(group.ranks) - set(group.alive):
        group.restart(rank)
    return group


@pytest.fixture
def peer(shared_cluster: Cluster, keep) -> WorkerGroup:
    """A worker of another group."""
    strategy = NodePlacementStrategy([3])
    return keep("peer", lambda: Peer.create_group().launch(shared_cluster, strategy, name="peer"))


def notes(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_an_exception_arrives_as_itself_with_rank_node_traceback_and_log(actor, shared_cluster):
    actor[1].say("a line before").wait(60)
    with pytest.raises(ValueError, match=r"^bad reward on 1\n") as caught:
        actor.fail([1]).wait(60)
    text = notes(caught.value)
    assert f"in actor:1 on {shared_cluster.nodes[0]}" in text
    assert "in 'fail'" in text
    assert "workers.py" in text
    assert 'raise ValueError(f"{text} on {self.rank}")' in text
    assert "about to fail with bad reward" in text
    assert str(Path(shared_cluster.run_dir) / "logs" / "actor" / "1.log") in text
    assert "runtime/shell.py" not in text, "frames of ours say nothing to the reader"
    (failure,) = caught.value.worker_failures
    assert (failure.rank, failure.address, failure.kind) == (1, "actor:1", "exception")
    assert actor.rank_of().wait(60) == [0, 1, 2, 3], "the group goes on"


def test_several_ranks_that_fail_are_reported_together(actor):
    with pytest.raises(ValueError, match=r"^no good on") as caught:
        actor.fail([0, 2, 3], text="no good").wait(60)
    text = notes(caught.value)
    assert "also failed (2):" in text
    for rank in (0, 2, 3):
        assert f"no good on {rank}" in text
    whens = [failure.when for failure in caught.value.worker_failures]
    assert whens == sorted(whens)
    assert {failure.rank for failure in caught.value.worker_failures} == {0, 2, 3}


def test_waiting_again_raises_again_and_not_twice_as_much(actor):
    result = actor.fail([0])
    texts = []
    for _ in range(2):
        with pytest.raises(ValueError, match="bad reward") as caught:
            result.wait(60)
        texts.append(notes(caught.value))
    assert texts[0] == texts[1]
    kinds = [outcome.kind for outcome in result.outcomes()]
    assert kinds == [OutcomeKind.EXCEPTION] + [OutcomeKind.VALUE] * 3
    assert isinstance(result.outcomes()[0].error, ValueError)


def test_one_failure_is_raised_while_the_other_ranks_still_wait(actor, tmp_path):
    result = actor.fail_or_wait(2, str(tmp_path))
    with pytest.raises(RuntimeError, match="one of us is missing") as caught:
        result.wait(120)
    assert "not finished yet: 3 ranks, 0-1,3" in notes(caught.value)
    (tmp_path / "never").touch()


def test_a_large_failure_is_raised_immediately_too(actor, tmp_path):
    result = actor.fail_large(1, str(tmp_path))
    with pytest.raises(WorkerFailed, match=r"actor:1 .* ValueError: xxx") as caught:
        result.wait(120)
    assert "not finished yet: 3 ranks" in str(caught.value)
    (tmp_path / "never").touch()


@pytest.mark.parametrize(("method", "text"), [("interrupt", "KeyboardInterrupt"), ("stop_iteration", "StopIteration")])
def test_exceptions_that_control_the_callers_own_code_arrive_as_worker_failed(actor, method, text):
    with pytest.raises(WorkerFailed, match=f"{text}: from inside"):
        actor[0].call(method).wait(60)
    assert actor.rank_of().wait(60) == [0, 1, 2, 3]


def test_a_worker_that_dies_in_a_stream_is_named_by_the_next_item(shared_cluster):
    with Performer.create_group().launch(shared_cluster, NodePlacementStrategy([0, 0]), name="streamed") as group:
        pids = group.pid().wait(60)
        items = group.stream("items", 10**9)
        next(items)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="streamed:1 on node 0"):
            for _ in items.within(60):
                pass
        assert group[0].rank_of().wait(60) == [0]


@pytest.mark.parametrize("timeout", [-0.5, -1, 0])
def test_a_deadline_that_has_passed_is_a_time_out(actor, tmp_path, timeout):
    result = actor.wait_for(str(tmp_path), "go")
    with pytest.raises(CallTimedOut):
        result.wait(timeout)
    assert {outcome.kind for outcome in result.outcomes(timeout)} == {OutcomeKind.TIMEOUT}
    (tmp_path / "go").touch()
    assert result.wait(float("inf")) == [0, 1, 2, 3]
    for wrong in (float("nan"), "soon"):
        with pytest.raises(ConfigError, match="timeout is"):
            result.wait(wrong)


def test_durations_of_the_others_are_there_when_one_fails(actor):
    found = actor.fail([2]).consume_durations(reduction_type=None)
    assert set(found["fail"]) == {0, 1, 3}


def test_an_exception_that_cannot_be_pickled_is_described(actor):
    with pytest.raises(WorkerFailed, match=r"actor:0 on node 0 .* failed in 'fail_unpicklable'") as caught:
        actor[0].fail_unpicklable().wait(60)
    assert "workers.Unpicklable: it has a lock" in str(caught.value)
    assert "traceback of actor:0" in str(caught.value)
    with pytest.raises(WorkerFailed, match=r"workers.TwoArguments: this and that") as caught:
        actor[0].fail_two_arguments().wait(60)
    assert not isinstance(caught.value, TwoArguments)


@pytest.mark.parametrize("name", ODD)
def test_an_exception_that_cannot_be_shown_or_sent_is_described(name, keep, shared_cluster):
    group = keep("odd", lambda: Odd.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="odd"))
    with pytest.raises(WorkerFailed, match=rf"^odd:0 on node 0 .* failed in 'fail': odd_errors\.{name}: ") as caught:
        group.fail(name).wait(60)
    (failure,) = caught.value.worker_failures
    assert "in fail\n" in failure.traceback
    with pytest.raises(WorkerFailed, match=name):
        list(group.fail(name))
    with pytest.raises(WorkerFailed, match=name):
        list(group.stream("items", name))
    with pytest.raises(WorkerFailed, match=name):
        asyncio.run(_awaited(group.fail(name)))
    (outcome,) = group.fail(name).outcomes(60)
    assert (outcome.kind, type(outcome.error)) == (OutcomeKind.EXCEPTION, WorkerFailed)


def test_an_exception_that_is_described_upsets_no_terminal(keep, shared_cluster):
    group = keep("odd", lambda: Odd.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="odd"))
    with pytest.raises(WorkerFailed, match=r"NoReduce: \\x1b\]0;title\\x07 and \\u202e\nmore") as caught:
        group.fail_with("\x1b]0;title\x07 and \u202e\nmore").wait(60)
    (failure,) = caught.value.worker_failures
    for text in (str(caught.value), failure.what, failure.traceback):
        assert text.replace("\n", "").isprintable()


async def _awaited(result: CallResult) -> object:
    return await result


@pytest.mark.parametrize("name", ["EndsInText", "UnpicklesAtHome"])
def test_a_launch_and_an_async_worker_describe_such_an_exception_too(name, keep, shared_cluster):
    strategy = NodePlacementStrategy([0])
    with pytest.raises(WorkerFailed, match=rf"while it was being constructed: odd_errors\.{name}: "):
        Odd.create_group(name).launch(shared_cluster, strategy, name="odd-too")
    group = keep("odd-async", lambda: OddAsync.create_group().launch(shared_cluster, strategy, name="odd-async"))
    with pytest.raises(WorkerFailed, match=name):
        group.fail(name).wait(60)
    with pytest.raises(WorkerFailed, match=name):
        list(group.stream("items", name))


def test_a_result_that_cannot_be_pickled_is_reported(actor):
    with pytest.raises(WorkerFailed, match=r"actor:1 .*: its result cannot be sent: .*lock") as caught:
        actor[1].unpicklable_result().wait(60)
    assert "unpicklable_result" in str(caught.value)
    assert actor.rank_of().wait(60) == [0, 1, 2, 3]


def test_an_argument_that_cannot_be_pickled_is_named_and_nothing_is_sent(actor):
    before = actor.count().wait(60)
    with pytest.raises(ConfigError, match=r"argument 1 \(lock\) of 'echo' cannot be sent to a worker"):
        actor.echo("fine", threading.Lock())
    with pytest.raises(ConfigError, match=r"argument 'key' \(lock\) of 'echo' cannot be sent"):
        actor.echo(key=threading.Lock())
    with pytest.raises(ConfigError, match="cannot be sent"):
        actor.map("count", [threading.Lock()] * 4)
    assert actor.count().wait(60) == [count + 1 for count in before]


def test_a_constructor_argument_that_cannot_be_pickled_starts_nothing(shared_cluster):
    with pytest.raises(ConfigError, match="an argument of create_group cannot be sent"):
        Performer.create_group(threading.Lock()).launch(shared_cluster, FOUR, name="locked")
    assert not [name for name in list_named_actors() if name.startswith("locked")]


def test_a_method_that_does_not_exist_raises_immediately(actor):
    with pytest.raises(AttributeError, match="have no method 'rank_off'; did you mean 'rank_of'"):
        actor.rank_off  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError, match="no method 'xyz'; it has"):
        actor[0:2].call("xyz")
    with pytest.raises(AttributeError, match="no attribute '_private'"):
        actor._private  # noqa: B018
    with pytest.raises(AttributeError, match="no method 'log_info'"):
        actor.log_info("what every worker has is not for callers")
    assert "rank_of" in dir(actor)


@pytest.mark.parametrize(("how", "said"), [("kill", ""), ("_exit", ""), ("exit", "exit")])
def test_a_worker_that_ends_in_a_call_is_named(actor, how, said):
    with pytest.raises(WorkerDied, match=rf"^actor:2 on node 1 .* died in 'end'.*{said}") as caught:
        actor.end(2, how).wait(60)
    assert f"ending by {how}" in str(caught.value), "the end of its log is shown"
    assert [failure.rank for failure in caught.value.worker_failures] == [2]
    wait_until(lambda: actor.alive == [0, 1, 3], "the group knows who is alive")
    assert actor.on(0, 1, 3).rank_of().wait(60) == [0, 1, 3], "the others go on"
    kinds = [outcome.kind for outcome in actor.rank_of().outcomes(60)]
    assert kinds == [OutcomeKind.VALUE, OutcomeKind.VALUE, OutcomeKind.DEATH, OutcomeKind.VALUE]


def test_a_crash_in_c_code_leaves_its_stack_in_the_log(actor):
    with pytest.raises(WorkerDied, match="actor:3") as caught:
        actor.end(3, "segfault").wait(60)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "in end" in str(caught.value)


def test_a_worker_that_was_killed_while_idle_is_named_by_the_next_call(actor):
    pid = actor[0].pid().wait(60)[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), "it is gone")
    with pytest.raises(WorkerDied, match=r"^actor:0 on node 0"):
        actor.rank_of().wait(60)
    with pytest.raises(WorkerDied, match=r"^actor:0"):
        list(actor.stream("items", 2))


def test_a_constructor_that_raises_on_one_rank_reaches_the_caller_and_leaves_nothing(shared_cluster):
    before = _python_children()
    with pytest.raises(ValueError, match=r"^rank 2 does not want to be made\n") as caught:
        Performer.create_group(fails_on=2).launch(shared_cluster, FOUR, name="unmade")
    text = notes(caught.value)
    assert "in unmade:2 on node 1" in text
    assert "while it was being constructed" in text
    assert "workers.py" in text
    assert not [name for name in list_named_actors() if name.startswith("unmade")]
    wait_until(lambda: not _named_like(_python_children() - before), "its processes are gone")
    with Performer.create_group().launch(shared_cluster, PackedPlacementStrategy(0, 0), name="unmade") as group:
        assert group.rank_of().wait(60) == [0], "the name is free"


def test_a_constructor_that_hangs_on_one_rank_shows_its_stack_at_the_deadline(shared_cluster):
    strategy = PackedPlacementStrategy(0, 1)
    with pytest.raises(LaunchTimedOut, match="1 of 2 workers were not ready after 10 s") as caught:
        Performer.create_group(hangs_on=1).launch(shared_cluster, strategy, name="hanging", timeout=10)
    text = str(caught.value)
    assert "hanging:1 on node 0" in text
    assert "constructing for" in text
    assert "in hang_here" in text, "the stack is in the error"
    assert isinstance(caught.value, TimeoutError)
    log = (Path(shared_cluster.run_dir) / "logs" / "hanging" / "1.log").read_text()
    assert "in hang_here" in log, "and in the log"
    assert not [name for name in list_named_actors() if name.startswith("hanging")]


def test_a_worker_that_is_killed_in_its_constructor_is_named(shared_cluster, tmp_path):
    def kill() -> None:
        wait_until(lambda: list(tmp_path.glob("pid-*")), "the constructor runs")
        os.kill(int(next(tmp_path.glob("pid-*")).name.partition("-")[2]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerDied, match=r"^stubborn:3 on node 1 .* died while it was being constructed"):
        Stubborn.create_group(str(tmp_path), 3).launch(shared_cluster, FOUR, name="stubborn")
    killer.join(60)
    assert not [name for name in list_named_actors() if name.startswith("stubborn")]


def test_a_closed_group_and_a_closed_cluster_refuse_calls(small_cluster):
    strategy = NodePlacementStrategy([0])
    group = Performer.create_group().launch(small_cluster, strategy, name="closed")
    narrowed = group[0]
    group.close()
    group.close()
    for call in (group.rank_of, narrowed.rank_of, lambda: group.stream("items", 1), lambda: group.restart(0)):
        with pytest.raises(ClusterError, match="'closed' is closed"):
            call()
    assert group.alive == []
    other = Performer.create_group().launch(small_cluster, strategy, name="other")
    result = other.rank_of()
    small_cluster.close()
    for call in (other.rank_of, result.wait, result.done, result.outcomes, lambda: list(result)):
        with pytest.raises(ClusterError, match="closed"):
            call()
    assert other.alive == []
    assert not ray.is_initialized(), "nothing of this has started another Ray"
    with pytest.raises(ClusterError, match="this Cluster is closed"):
        Performer.create_group().launch(small_cluster, strategy)


def test_a_dead_rank_is_restarted_in_its_place(actor):
    before = actor.who().wait(60)
    pids = actor.pid().wait(60)
    actor.count().wait(60)
    os.kill(pids[3], signal.SIGKILL)
    wait_until(lambda: actor.alive == [0, 1, 2], "it is known to be dead")
    with pytest.raises(ConfigError, match="actor:1 is alive"):
        actor.restart(1)
    actor.restart(3)
    assert actor.alive == [0, 1, 2, 3]
    assert actor.who().wait(60) == before, "same rank, same hardware, same port"
    assert actor.pid().wait(60)[:3] == pids[:3]
    assert actor.pid().wait(60)[3] != pids[3]
    assert actor[3].count().wait(60) == [1], "its constructor was run again"
    assert set(actor.listen().wait(60)) == {before[0]["master"][1]}


def test_a_rank_that_hangs_is_ended_and_restarted_by_force(actor, shared_cluster):
    before = actor.who().wait(60)
    hung, healthy = actor.pid().wait(60)[1:3]
    stop(hung)
    waiting = actor.count()
    with pytest.raises(ConfigError, match=r"actor:1 is alive\n.*force=True"):
        actor.restart(1)
    actor.restart(1, force=True)
    assert is_gone(hung), "before the new one used its accelerators"
    assert actor.who().wait(60) == before
    assert actor[1].count().wait(60) == [1], "its constructor was run again"
    assert [outcome.kind for outcome in waiting.outcomes(60)] == ["value", "death", "value", "value"]
    actor.restart(2, force=True)
    assert actor[2].pid().wait(60) != [healthy], "one that is well can be restarted too"
    assert is_gone(healthy)
    reasons = {restart.worker: restart.reason for restart in shared_cluster.recorder.record.restarts}
    assert reasons["actor:1"] == reasons["actor:2"] == "restart(force=True) ended it"


def test_a_group_closes_immediately_while_a_restart_hangs(shared_cluster, tmp_path):
    (tmp_path / "go").touch()
    strategy = PackedPlacementStrategy(0, 0)
    group = Waiter.create_group(str(tmp_path)).launch(shared_cluster, strategy, name="waiter", restarts=1)
    (tmp_path / "go").unlink()
    os.kill(group.pid().wait(60)[0], signal.SIGKILL)
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "the second constructor runs")
    group.close()
    assert not [name for name in list_named_actors() if name.startswith("waiter")]


def test_an_attached_group_sees_a_restart(actor):
    attached = WorkerGroup.attach("actor")
    os.kill(actor[1].pid().wait(60)[0], signal.SIGKILL)
    wait_until(lambda: attached.alive == [0, 2, 3], "it is known to be dead")
    with pytest.raises(WorkerDied, match="actor:1"):
        attached.rank_of().wait(60)
    with pytest.raises(ClusterError, match="only be restarted by the process that launched"):
        attached.restart(1)
    actor.restart(1)
    assert attached.rank_of().wait(60) == [0, 1, 2, 3]


def test_another_process_calls_a_restarted_worker_without_an_error(actor, peer):
    peer.meet(actor).wait(60)
    assert peer.ask("rank_of").wait(60) == [[0, 1, 2, 3]]
    os.kill(actor[1].pid().wait(60)[0], signal.SIGKILL)
    wait_until(lambda: actor.alive == [0, 2, 3], "it is known to be dead")
    actor.restart(1)
    assert peer.ask("rank_of").wait(60) == [[0, 1, 2, 3]], "it finds the new process"


@pytest.mark.parametrize(("cls", "concurrency"), [(Waiter, None), (Waiter, 2), (AsyncWaiter, None)])
def test_calls_of_every_process_wait_for_a_restart(shared_cluster, peer, tmp_path, cls, concurrency):
    """Whether they come before the process is up, or while the constructor runs."""
    (tmp_path / "go").touch()
    options = {"name": "waiter", "restarts": 2, "max_concurrency": concurrency, "timeout": 60}
    with cls.create_group(str(tmp_path)).launch(shared_cluster, PackedPlacementStrategy(0, 0), **options) as group:
        peer.meet(group).wait(60)
        pids = group.pid().wait(60)
        assert peer.ask("pid").wait(60) == [pids]
        (tmp_path / "go").unlink()
        (handle,) = group.actor_handles
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: is_known_dead(handle), "Ray knows it")
        early = [peer.ask("pid"), group.pid(), peer.ask("pid")]
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "the second constructor runs")
        late = [group.pid(), group.pid()]
        assert group.alive == WorkerGroup.attach("waiter").alive == [], "alive is one that answers"
        (tmp_path / "go").touch()
        (new,) = group.pid().wait(60)
        assert new != pids[0]
        assert [result.wait(60) for result in early] == [[[new]], [new], [[new]]]
        assert [result.wait(60) for result in late] == [[new], [new]]
        # If it cannot be constructed any more, nobody waits for it.
        (tmp_path / "broken").touch()
        os.kill(new, signal.SIGKILL)
        wait_until(lambda: shared_cluster.recorder.record.restarts[-1].error, "the last restart failed")
        for ask in (lambda: peer.ask("pid"), group.pid):
            with pytest.raises(WorkerDied, match="waiter:0"):
                ask().wait(60)


def test_a_restart_does_not_wait_for_the_arguments_of_other_calls(shared_cluster, actor, tmp_path):
    with Performer.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="needy", restarts=1) as group:
        (handle,) = group.actor_handles
        restarts = shared_cluster.recorder.record.restarts
        os.kill(group.pid().wait(60)[0], signal.SIGKILL)
        wait_until(lambda: is_known_dead(handle), "Ray knows it")
        late = group.echo(actor[1].wait_for(str(tmp_path), "value")[0])
        wait_until(lambda: shared_cluster.recorder.record.restarts[len(restarts) :], "it is restarted")
        assert group.alive == [0]
        assert not late.done()
        (tmp_path / "value").touch()
        assert late.wait(60) == [((1,), {})]


def test_a_call_to_a_rank_that_is_restarted_takes_no_longer_than_its_deadline(shared_cluster):
    with Performer.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="slow", restarts=1) as group:
        pid = group.pid().wait(60)[0]
        (handle,) = group.actor_handles
        # A restart that takes as long as this block.
        with group._members._lock:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_known_dead(handle), "Ray knows it")
            first, second, items = group.count(), group.count(), group.stream("items", 2)
            for wait in (
                first.wait,
                lambda seconds: next(items.within(seconds)),
                lambda seconds: next(first.within(seconds)),
            ):
                with pytest.raises(CallTimedOut, match=r"of 'slow' has not answered in 0.5 s from 1 rank of 1: 0"):
                    wait(0.5)
            assert not second.done()
            assert first.outcomes(0.5)[0].kind is OutcomeKind.TIMEOUT
        # They are sent when it is back, in order.
        assert [second.wait(60), first.wait(60)] == [[2], [1]]
        assert list(items) == [(0, (0, 0)), (0, (0, 1))]


def test_a_call_that_comes_before_the_constructor_ran_says_so(shared_cluster):
    actor = ray.remote(make_actor_class("Early", {"who": MethodKind.PLAIN}))
    early = actor.options(name="early:0", num_cpus=0, namespace=shared_cluster.namespace).remote()
    with pytest.raises(RayTaskError, match="WorkerDied: early:0 is not ready: it is being started"):
        ray.get(early.who.remote(), timeout=60)
    ray.kill(early)


def test_dead_ranks_restart_automatically_as_often_as_allowed(shared_cluster):
    strategy = PackedPlacementStrategy(0, 1)
    with Performer.create_group().launch(shared_cluster, strategy, name="phoenix", restarts=2) as group:
        for _ in range(2):
            pid = group[1].pid().wait(60)[0]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: is_gone(pid), "it is gone")
            wait_until(lambda: _answers(group), "it is there again")
            assert group[1].count().wait(60) == [1]
        os.kill(group[1].pid().wait(60)[0], signal.SIGKILL)
        wait_until(lambda: group.alive == [0], "it is dead")
        with pytest.raises(WorkerDied, match="phoenix:1"):
            group.rank_of().wait(60)


def _answers(group: WorkerGroup) -> bool:
    return all(outcome.is_ok for outcome in group.rank_of().outcomes(60))


def test_a_node_that_is_killed_takes_half_of_the_group_and_is_named():
    with local_cluster("2x2,1x0") as local, Cluster(num_nodes=3) as cluster:
        group = Performer.create_group().launch(cluster, name="half", restarts=9)
        tool = Performer.create_group().launch(cluster, NodePlacementStrategy([2]), name="tool")
        assert [item["node_rank"] for item in group.who().wait(60)] == [0, 0, 1, 1]
        near, far = Channel.create("near"), Channel.create("far", node_rank=1)
        item = far.get(async_op=True)
        local.kill_node(1)
        with pytest.raises(WorkerDied, match=r"^half:[23] on node 1") as caught:
            _call_until_it_fails(group)
        assert {failure.rank for failure in caught.value.worker_failures} <= {2, 3}
        wait_until(lambda: group.alive == [0, 1], "the group knows")
        wait_until(lambda: cluster.dead_nodes == (1,), "the cluster knows")
        deaths = [outcome for outcome in group.rank_of().outcomes(60) if outcome.kind is OutcomeKind.DEATH]
        assert [outcome.rank for outcome in deaths] == [2, 3]
        assert "its node is gone" in str(deaths[0].error)
        assert group[0:2].rank_of().wait(60) == [0, 1]
        assert tool.rank_of().wait(60) == [0]
        with pytest.raises(WorkerDied, match="far:0 on node 1"):
            item.wait(60)
        near.put("unharmed", timeout=60)
        assert near.get(timeout=60) == "unharmed"
        with pytest.raises(ClusterError, match="half:2 cannot be restarted: node 1"):
            group.restart(2)
        with pytest.raises((ClusterError, WorkerDied), match="node 1"):
            Performer.create_group().launch(cluster, PackedPlacementStrategy(2, 3), name="late", timeout=60)


def _call_until_it_fails(group: WorkerGroup) -> None:
    for _ in range(10_000):
        group.rank_of().wait(60)


def test_ctrl_c_in_a_wait_is_the_callers_and_the_group_goes_on(driver, tmp_path):
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
        from roost import Cluster, PackedPlacementStrategy
        from workers import Performer
        with Cluster(num_nodes=4) as cluster:
            group = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="patient")
            result = group.wait_for({str(tmp_path)!r}, "go")
            try:
                print("waiting", flush=True)
                result.wait()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            sys.stdin.readline()
            print(result.wait(60), group.rank_of().wait(60), flush=True)
        print("closed", flush=True)
    """
    process = driver(textwrap.dedent(code))
    assert process.line() == "waiting"
    wait_until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2, "the workers are at it")
    process.process.send_signal(signal.SIGINT)
    assert process.line() == "interrupted"
    (tmp_path / "go").touch()
    process.process.stdin.write("\n")
    process.process.stdin.flush()
    assert process.line() == "[0, 1] [0, 1]"
    assert process.line() == "closed"
    assert process.process.wait(60) == 0


def test_a_fork_is_refused_at_once_and_ends_nothing(actor, shared_cluster):
    result, stream, lease = actor.rank_of(), actor.stream("items", 3), shared_cluster.lease_ports(0)
    uses = [
        lambda: actor.alive,
        actor.rank_of,
        actor.close,
        lambda: actor.restart(0),
        result.wait,
        lambda: next(stream),
        lambda: shared_cluster.lease_ports(0),
        lambda: shared_cluster.release_ports(lease),
        lambda: Cluster(num_nodes=4),
        lambda: WorkerGroup.attach("actor"),
        NodeManager.get_proxy,
        shared_cluster.node_manager.get_nodes,
    ]

    def in_the_fork() -> str:
        for number, use in enumerate(uses):
            try:
                use()
            except ClusterError as error:
                if "is a fork of one that is connected to Ray" in str(error):
                    continue
            return f"use {number} was not refused"
        with actor, shared_cluster:
            stream.close()
        return "refused"

    assert _run_in_a_fork(in_the_fork) == "refused"
    assert result.wait(60) == actor.rank_of().wait(60) == [0, 1, 2, 3]
    assert len(list(stream)) == 12
    shared_cluster.release_ports(lease)


def _run_in_a_fork(function: Callable[[], str]) -> str:
    """What a function returns in a fork of this process, which is killed if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, function().encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        ready, _, _ = select.select([answer], [], [], 60)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return answer.read().decode() if ready else "it hangs"


def test_what_a_driver_launched_ends_with_it(driver, shared_cluster):
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
        from roost import Cluster, PackedPlacementStrategy
        from workers import Performer
        cluster = Cluster(num_nodes=4)
        group = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="orphan")
        print("pids", *group.pid().wait(60), flush=True)
        sys.stdin.readline()
    """
    process = driver(textwrap.dedent(code))
    # Ray may have something to say before.
    line = next(line for line in iter(process.line, "") if line.startswith("pids"))
    pids = [int(word) for word in line.split()[1:]]
    assert len(pids) == 2
    process.end(signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in pids), "its workers are gone")
    assert shared_cluster.num_nodes == 4


def test_a_launch_that_is_interrupted_stops_what_it_started(shared_cluster, tmp_path):
    def interrupt() -> None:
        wait_until(lambda: list(tmp_path.glob("pid-*")), "the constructor runs")
        press_ctrl_c()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Stubborn.create_group(str(tmp_path), 0).launch(shared_cluster, FOUR, name="stopped")
    finally:
        interrupter.join(60)
    assert not [name for name in list_named_actors() if name.startswith("stopped")]


def test_a_call_can_still_succeed_after_a_wait_timed_out(actor, tmp_path):
    result = actor.wait_for(str(tmp_path), "go")
    with pytest.raises(CallTimedOut, match="4 ranks of 4"):
        result.wait(timeout=0.05)
    (tmp_path / "go").touch()
    assert result.wait(60) == [0, 1, 2, 3]


def _python_children() -> set[int]:
    return {process.pid for process in psutil.process_iter()}


def _named_like(pids: set[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid).cmdline()[0])
        except (psutil.Error, IndexError):
            continue
    return [command for command in found if command.startswith("ray::Performer")]


def test_the_driver_is_still_connected(shared_cluster):
    assert ray.is_initialized()
    assert shared_cluster.num_nodes == 4
