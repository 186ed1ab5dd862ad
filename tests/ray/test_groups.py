"""Groups on real processes: what a worker knows about itself, where it runs, and every way to call it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray

from roost import (
    CallTimedOut,
    Cluster,
    ClusterError,
    ConfigError,
    FlexiblePlacementStrategy,
    NameTaken,
    NodeManager,
    NodePlacementStrategy,
    OutcomeKind,
    PackedPlacementStrategy,
    WorkerDied,
    WorkerFailed,
    WorkerGroup,
    WorkerManager,
    WorkerState,
    WrongPlace,
    make_plan,
)
from waiting import is_gone, wait_until
from workers import Blind, Meddler, Peer, Performer, Talker

pytestmark = pytest.mark.usefixtures("shared_cluster")

JOB = {"cluster": {"num_nodes": 4, "component_placement": {"actor": "1-2,6-8", "rollout": "0-3:0-1"}}}


@pytest.fixture
def actor(shared_cluster: Cluster, keep) -> WorkerGroup:
    """A group over three nodes that the tests share; none of them breaks it."""
    strategy = make_plan(JOB, shared_cluster).get_strategy("actor")
    draft, environment = Performer.create_group("hello"), {"MY_SETTING": "mine"}
    return keep("actor", lambda: draft.launch(shared_cluster, strategy, name="actor", env_vars=environment))


def test_a_worker_knows_who_it_is(shared_cluster, actor):
    found = actor.who().wait(60)
    plan = make_plan(JOB, shared_cluster)
    assert [item["placement"] for item in found] == list(plan.component("actor").placements) == actor.placements
    assert [item["rank"] for item in found] == [item["_rank"] for item in found] == [0, 1, 2, 3, 4]
    assert {item["world_size"] for item in found} == {item["_world_size"] for item in found} == {5}
    assert [item["local_rank"] for item in found] == [0, 1, 0, 1, 0]
    assert [item["local_world_size"] for item in found] == [2, 2, 2, 2, 1]
    assert [item["node_rank"] for item in found] == [0, 0, 1, 1, 2]
    assert [item["address"] for item in found] == [f"actor:{rank}" for rank in range(5)]
    assert [item["devices"] for item in found] == [("1",), ("2",), ("2",), ("3",), ("0",)]
    assert {item["group_name"] for item in found} == {"actor"}
    assert {item["cluster_nodes"] for item in found} == {4}
    assert {item["master"][0] for item in found} == {shared_cluster.get_node_ip(0)}


def test_the_environment_is_the_plans_and_in_force_before_the_module_is_imported(shared_cluster, actor):
    plan = make_plan(JOB, shared_cluster)
    (_, port) = actor[0].who().wait(60)[0]["master"]
    for at in (actor.environment().wait(60), actor.environment_at_import().wait(60)):
        for rank, found in enumerate(at):
            wanted = plan.environment("actor", rank)
            wanted |= {"MASTER_ADDR": shared_cluster.get_node_ip(0), "MASTER_PORT": str(port), "MY_SETTING": "mine"}
            assert {name: found.get(name) for name in wanted} == wanted


def test_the_drivers_environment_is_not_copied(shared_cluster, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    strategy = NodePlacementStrategy([3])
    with Performer.create_group().launch(shared_cluster, strategy, env_vars={"GIVEN": "1"}, name="bare") as bare:
        found = bare.environment().wait(60)[0]
    assert "MY_SECRET_TOKEN" not in found
    assert found["GIVEN"] == "1"


def test_values_of_variables_do_not_appear_in_rays_records(shared_cluster):
    secret = "do-not-show-this-anywhere"  # noqa: S105 - it is made up
    strategy = NodePlacementStrategy([0])
    with Performer.create_group().launch(
        shared_cluster, strategy, env_vars={"API_TOKEN": secret}, name="secret"
    ) as group:
        assert group.environment().wait(60)[0]["API_TOKEN"] == secret
        actor = ray.get_actor("secret:0", namespace=shared_cluster.namespace)
        # What the state API and the dashboard show of an actor comes from its record in Ray's store.
        from ray._private.state import actors  # no public way without the dashboard's server

        assert secret not in str(actors(actor._actor_id.hex()))
        pid = group.pid().wait(60)[0]
        command = subprocess.run(["ps", "-o", "args=", str(pid)], capture_output=True, text=True, timeout=60).stdout
        assert secret not in command


def test_search_paths_are_joined_with_those_of_the_node_and_not_written_over(shared_cluster):
    variables = {"PATH": "/opt/mine/bin", "PYTHONPATH": "/opt/mine/python", "LD_LIBRARY_PATH": "/opt/mine/lib"}
    strategy = NodePlacementStrategy([1])
    with Performer.create_group().launch(shared_cluster, strategy, env_vars=variables, name="paths") as group:
        found = group.environment().wait(60)[0]
        at_import = group.environment_at_import().wait(60)[0]
    for name, value in variables.items():
        before = dict(shared_cluster.nodes[1].search_paths).get(name)
        assert found[name].split(":")[0] == value, name
        assert at_import[name] == found[name]
        if before:
            assert set(before.split(":")) - {""} <= set(found[name].split(":")), name


def test_workers_do_not_load_modules_that_they_do_not_need(actor):
    loaded = set(actor[0].modules().wait(60)[0])
    assert not loaded & {"torch", "omegaconf", "rich", "typer"}


def test_without_a_strategy_there_is_a_worker_on_each_accelerator(shared_cluster):
    with Blind.create_group().launch(shared_cluster) as group:
        assert group.name == "Blind"
        assert len(group) == shared_cluster.num_accelerators == 12
        assert group[0].view().wait(60) == [12]


def test_a_call_on_all_on_some_and_on_one(actor):
    assert actor.rank_of().wait(60) == [0, 1, 2, 3, 4]
    assert actor[1].rank_of().wait(60) == [1]
    assert actor[-1].rank_of().wait(60) == [4]
    assert actor[1:4].rank_of().wait(60) == [1, 2, 3]
    assert actor[1:4][0].rank_of().wait(60) == [1]
    assert actor.on(3, 0).rank_of().wait(60) == [0, 3]
    assert actor.execute_on([0, 3]).rank_of().wait(60) == actor.execute_on(0, 3).rank_of().wait(60) == [0, 3]
    assert actor.rank_of().wait(60) == [0, 1, 2, 3, 4], "nothing is remembered"
    assert (len(actor), len(actor[1:4]), actor.world_size, actor[1:4].ranks) == (5, 3, 5, (1, 2, 3))


def test_a_group_can_be_sent_to_a_worker_and_narrowed_by_any_kind_of_number(actor):
    assert actor[np.int64(1)].ranks == actor.on(np.int64(1)).ranks == (1,)
    (args, _) = actor[0].echo(actor[1:3]).wait(60)[0]
    assert args[0].ranks == (1, 2)
    assert args[0].rank_of().wait(60) == [1, 2]
    assert actor[5:5].rank_of().wait(60) == []
    assert actor[5:5].rank_of().outcomes() == []
    assert actor[0].echo(method=1).wait(60) == [((), {"method": 1})]


@pytest.mark.parametrize("which", [5, -6])
def test_a_rank_that_does_not_exist_raises(actor, which):
    with pytest.raises(IndexError, match=r"no rank .* it has ranks 0-4"):
        actor[which]
    with pytest.raises(ConfigError, match="no rank"):
        actor.on(0, which)
    with pytest.raises(ConfigError, match="once"):
        actor.on(1, 1)


def test_arguments_of_every_kind_arrive(actor):
    assert actor[0].echo(1, "two", key=[3]).wait(60) == [((1, "two"), {"key": [3]})]
    assert actor[0:2].echo().wait(60) == [((), {})] * 2
    array = np.arange(12.0).reshape(3, 4)
    ((arrived,), _) = actor[1].echo(array).wait(60)[0]
    np.testing.assert_array_equal(arrived, array)


def test_large_arguments_are_shipped_once(actor, monkeypatch):
    puts = []
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or real(value))
    data = bytes(3_000_000)
    assert [found[0] for found in actor.length(data).wait(60)] == [len(data)] * 5
    assert len(puts) == 1
    actor.length(b"small").wait(60)
    assert len(puts) == 1


def test_references_are_fetched_before_the_call_and_not_inside_of_others(actor):
    ref = ray.put([1, 2, 3])
    found = actor[0:2].echo(ref, [ref], key=ref).wait(60)
    for (first, inside), keywords in found:
        assert first == keywords["key"] == [1, 2, 3]
        assert isinstance(inside[0], ray.ObjectRef)


def test_map_gives_each_rank_arguments_of_its_own(actor):
    found = actor.map("echo", [(rank, "a") for rank in range(5)]).wait(60)
    assert [args for args, _ in found] == [(rank, "a") for rank in range(5)]
    assert [args for args, _ in actor[0:2].map("echo", ["one", [2]]).wait(60)] == [("one",), ([2],)]
    with pytest.raises(ConfigError, match="2 entries for 5 workers"):
        actor.map("echo", [(1,), (2,)])


def test_generators_stream_as_they_come_and_collect_as_lists(actor):
    streamed = list(actor.stream("items", 3))
    assert sorted(streamed) == [(rank, (rank, index)) for rank in range(5) for index in range(3)]
    for rank in range(5):
        assert [item for found, item in streamed if found == rank] == [(rank, index) for index in range(3)]
    assert actor[1:3].items(2).wait(60) == [[(1, 0), (1, 1)], [(2, 0), (2, 1)]]
    with pytest.raises(ConfigError, match="yields nothing"):
        actor.stream("rank_of")
    taken = []
    with pytest.raises(KeyError, match="no more"):
        taken.extend(item for _, item in actor[0].stream("items_then_fail", 2))
    assert taken == [0, 1]


def test_a_stream_that_is_left_early_leaves_the_workers_free_and_is_one_item_ahead(actor, tmp_path):
    stream = actor[0:2].stream("endless", str(tmp_path))
    taken = [next(stream) for _ in range(6)]
    assert {rank for rank, _ in taken} == {0, 1}
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 7, "each is one item ahead")
    assert actor[0:2].rank_of().wait(60) == [0, 1], "other calls are served meanwhile"
    made = len([path for path in tmp_path.iterdir() if not path.name.startswith("closed")])
    assert made <= len(taken) + 2, "and no more than that"
    stream.close()
    wait_until(lambda: len(list(tmp_path.glob("closed-*"))) == 2, "the generators are closed")
    assert list(stream) == []
    for _, number in actor[0:2].stream("endless", str(tmp_path)):
        if number == 3:
            break
    assert actor.rank_of().wait(60) == [0, 1, 2, 3, 4]


def test_processes_with_the_same_pid_do_not_mix_their_streams(shared_cluster, actor):
    with Peer.create_group().launch(shared_cluster, NodePlacementStrategy([3, 3]), name="peers") as peers:
        peers.meet(actor[0]).wait(60)
        found = peers.map("take_as_pid_2", [("numbers", 0, 40), ("numbers", 1000, 40)]).wait(60)
    assert found == [list(range(40)), list(range(1000, 1040))]


def test_a_generator_ends_when_the_process_that_takes_its_items_is_killed(shared_cluster, actor, tmp_path):
    (tmp_path / "talker").mkdir()
    with (
        Talker.create_group().launch(shared_cluster, NodePlacementStrategy([1]), name="talking") as talker,
        Peer.create_group().launch(shared_cluster, NodePlacementStrategy([3, 3]), name="peers") as peers,
    ):
        peers[0].meet(actor[0]).wait(60)
        peers[1].meet(talker).wait(60)
        folders = [str(tmp_path), str(tmp_path / "talker")]
        ends = peers.map("die_in_a_stream", [("endless", folder) for folder in folders])
        assert {outcome.kind for outcome in ends.outcomes(60)} == {OutcomeKind.DEATH}
        for folder in folders:
            wait_until(Path(folder, "closed-0").exists, "the generator is closed")


def test_a_stream_and_a_result_can_be_taken_with_a_limit(actor, tmp_path):
    stream = actor[3].stream("two_items", str(tmp_path))
    assert next(stream) == (3, "at once")
    limited = stream.within(0.3)
    with pytest.raises(CallTimedOut, match=r"'two_items' of 'actor' .* in 0.3 s from 1 rank of 1: 3 \(node"):
        next(limited)
    result = actor.late(str(tmp_path), 3)
    answered = []
    with pytest.raises(CallTimedOut, match="1 rank of 5: 3"):
        answered.extend(rank for rank, _ in result.within(2))
    assert sorted(answered) == [0, 1, 2, 4]
    with pytest.raises(ConfigError, match="timeout is 'soon'"):
        stream.within("soon")
    (tmp_path / "go").touch()
    assert list(limited) == [(3, "late")], "the stream goes on"
    assert sorted(result.within(60)) == [(rank, rank) for rank in range(5)]


def test_asynchronous_methods_run_at_the_same_time_and_results_can_be_awaited(shared_cluster, tmp_path):
    with Talker.create_group().launch(shared_cluster, PackedPlacementStrategy(0, 1), name="talker") as talker:
        first = talker.meet(first=True)
        with pytest.raises(CallTimedOut, match="from 2 ranks of 2: 0-1"):
            asyncio.run(first.async_wait(0.1))
        assert talker.meet(first=False).wait(60) == ["came", "came"]
        assert first.wait(60) == asyncio.run(first.async_wait(60)) == ["met", "met"]
        assert asyncio.run(first[0].async_wait()) == "met"
        assert sorted(talker.stream("items", 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert talker.items(2).wait(60) == [[0, 1], [0, 1]]
        endless = talker.stream("endless", str(tmp_path))
        assert sorted(number for _, number in (next(endless) for _ in range(4))) != []
        endless.close()
        with pytest.raises(WorkerFailed, match="CancelledError: from inside"):
            talker[0].cancelled().wait(60)
        assert set(talker.timed().consume_durations()) == {"timed"}

        async def both() -> list[list[object]]:
            return list(await asyncio.gather(talker.meet(first=True), talker.meet(first=False)))

        assert asyncio.run(both()) == [["met", "met"], ["came", "came"]]

        async def fail() -> None:
            await talker.fail()

        with pytest.raises(LookupError, match="asynchronously") as caught:
            asyncio.run(fail())
        assert {failure.rank for failure in caught.value.worker_failures} == {0, 1}


def test_max_concurrency_lets_calls_overlap(shared_cluster, tmp_path):
    strategy = NodePlacementStrategy([0])
    with Performer.create_group().launch(shared_cluster, strategy, name="threads", max_concurrency=2) as group:
        waiting = group.wait_for(str(tmp_path), "go")
        wait_until(lambda: (tmp_path / "waiting-0").exists(), "the first call runs")
        assert group.rank_of().wait(60) == [0], "a second call is served at the same time"
        (tmp_path / "go").touch()
        assert waiting.wait(60) == [0]


def test_a_result_is_iterable_as_it_finishes_and_says_when_it_is_done(actor, tmp_path):
    result = actor.late(str(tmp_path), late_rank=0)
    found = []
    for rank, value in result:
        assert rank == value
        found.append(rank)
        if len(found) == 4:
            assert 0 not in found
            assert not result.done()
            (tmp_path / "go").touch()
    assert found[-1] == 0
    assert result.done()
    assert result.wait(60) == [0, 1, 2, 3, 4], "and it can still be waited for"


def test_a_time_out_says_who_is_late_and_the_call_can_be_waited_for_again(actor, tmp_path):
    result = actor.late(str(tmp_path), late_rank=3)
    wait_until(lambda: len([1 for item in result.outcomes(0) if item.is_ok]) == 4, "all but one have answered")
    with pytest.raises(
        CallTimedOut, match=r"'late' of 'actor' has not answered in 0.1 s from 1 rank of 5: 3 "
    ) as caught:
        result.wait(0.1)
    assert isinstance(caught.value, TimeoutError)
    assert "node 1" in str(caught.value)
    kinds = [outcome.kind for outcome in result.outcomes(timeout=0)]
    assert kinds == [OutcomeKind.VALUE] * 3 + [OutcomeKind.TIMEOUT, OutcomeKind.VALUE]
    (tmp_path / "go").touch()
    assert result.wait(60) == [0, 1, 2, 3, 4]
    assert all(outcome.is_ok for outcome in result.outcomes())


def test_a_large_value_that_is_still_on_its_way_at_the_deadline_is_waited_for(actor):
    result = actor[4].make(8_000_000)
    wait_until(result.done, "the worker to have answered, on another node")
    (value,) = result.wait(0)
    assert (len(value), value[-1]) == (8_000_000, 4)


def test_durations_come_by_tag_and_rank_and_are_reduced(actor):
    result = actor.timed()
    by_rank = result.consume_durations(reduction_type=None)
    assert set(by_rank) == {"whole", "half", "timed"}
    assert set(by_rank["half"]) == {0, 1, 2, 3, 4}
    assert all(by_rank["whole"][rank] >= by_rank["half"][rank] >= 0.01 * (1 + rank) for rank in range(5))
    assert result.consume_durations() == {}, "they are given once"
    largest = actor.timed().consume_durations("max")["half"]
    assert largest >= 0.05
    assert actor[0:2].timed().consume_durations("min")["half"] < largest
    assert set(actor.rank_of().consume_durations("mean")) == {"rank_of"}
    with pytest.raises(ConfigError, match="reduction_type is 'sum'"):
        actor.rank_of().consume_durations("sum")


def test_two_threads_call_the_same_group(actor):
    barrier = threading.Barrier(4)

    def work(number: int) -> list[list[tuple[object, ...]]]:
        barrier.wait(60)
        some = actor.on(number % 5, (number + 1) % 5)
        return [some.echo(number, turn).wait(60) for turn in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(work, range(4))):
            assert found == [[((number, turn), {})] * 2 for turn in range(20)]


def test_the_port_of_the_group_is_leased_and_works_between_nodes(shared_cluster, actor):
    ports = set(actor.listen().wait(60))
    assert len(ports) == 1
    before = NodeManager.get_proxy().count_leased_ports()
    with Blind.create_group().launch(shared_cluster, NodePlacementStrategy([1]), name="leases"):
        assert NodeManager.get_proxy().count_leased_ports() == before + 1
    assert NodeManager.get_proxy().count_leased_ports() == before


def test_the_worker_manager_knows_the_workers(actor):
    records = WorkerManager.get_proxy().get_workers([f"actor:{rank}" for rank in range(5)])
    assert [record.rank for record in records] == [0, 1, 2, 3, 4]
    assert [record.accelerators for record in records] == [(1,), (2,), (2,), (3,), (0,)]
    assert {record.state for record in records} == {WorkerState.READY}
    assert {record.group for record in records} == {"actor"}
    assert [record.pid for record in records] == actor.pid().wait(60)


def test_a_group_is_found_by_name_from_another_process_of_the_job(actor, driver, roost_local_cluster):
    code = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
        from roost import Cluster, WorkerGroup
        with Cluster(namespace={actor[0].who().wait(60) and Cluster().namespace!r}):
            group = WorkerGroup.attach("actor")
            print(group.rank_of().wait(60), group[1:3].echo("x").wait(60)[0], group.alive, flush=True)
            try:
                group.rank_off
            except AttributeError as error:
                print(error, flush=True)
            try:
                WorkerGroup.attach("nobody")
            except Exception as error:
                print(error, flush=True)
            group.close()
    """
    said, complained = driver(textwrap.dedent(code), roost_local_cluster).finish()
    assert "[0, 1, 2, 3, 4] (('x',), {}) [0, 1, 2, 3, 4]" in said, complained
    assert "did you mean 'rank_of'?" in said
    assert "the job has no group 'nobody'" in said
    assert actor.rank_of().wait(60) == [0, 1, 2, 3, 4], "its owner still has it"


def test_workers_launch_groups_of_their_own(shared_cluster):
    with Performer.create_group().launch(shared_cluster, NodePlacementStrategy([0, 1]), name="parent") as parent:
        assert parent.launch_children(2).wait(120) == [["parent:0:0", "parent:0:1"], ["parent:1:0", "parent:1:1"]]
        child = WorkerGroup.attach("parent:1")
        assert child.who().wait(60)[1]["group_name"] == "parent:1"
        assert child.who().wait(60)[0]["node_rank"] == 1
        pids = child.pid().wait(60)
        parent[1].close_children().wait(60)
        wait_until(lambda: all(map(is_gone, pids)), "the children are gone")
        assert parent[1].launch_children(1, "tool").wait(120) == [["parent:1:tool:0"]]
        pids = WorkerGroup.attach("parent:0").pid().wait(60)
    wait_until(lambda: all(map(is_gone, pids)), "the children end with their parent")


def test_a_group_launched_again_under_the_same_name_is_new_in_every_respect(shared_cluster):
    strategy = PackedPlacementStrategy(0, 1)
    with Performer.create_group().launch(shared_cluster, strategy, name="again") as first:
        first.count().wait(60)
        first.say("from the first").wait(60)
        pids = first.pid().wait(60)
        with pytest.raises(NameTaken, match=r"'again:0' exists already\n.*close\(\) the group that has it"):
            Performer.create_group().launch(shared_cluster, strategy, name="again")
        assert first.count().wait(60) == [2, 2], "and the first goes on"
        assert WorkerGroup.attach("again").count().wait(60) == [3, 3], "and is found by its name"
        assert "from the first" in (Path(shared_cluster.run_dir) / "logs" / "again" / "0.log").read_text()
    with Performer.create_group().launch(shared_cluster, FlexiblePlacementStrategy([[4], [5]]), name="again") as second:
        assert second.count().wait(60) == [1, 1]
        assert not set(second.pid().wait(60)) & set(pids)
        assert {item["node_rank"] for item in second.who().wait(60)} == {1}
        logs = Path(shared_cluster.run_dir) / "logs"
        assert "from the first" not in (logs / "again" / "0.log").read_text()
        assert "from the first" in (logs / "again.1" / "0.log").read_text()
        with pytest.raises(ClusterError, match="'again' is closed"):
            first.count()
        third = Performer.create_group().launch(shared_cluster, strategy, name="again", replace=True)
        assert third.count().wait(60) == [1, 1]
        with pytest.raises(ClusterError, match="'again' is closed"):
            second.count()
        third.close()
    with Performer.create_group().launch(shared_cluster, strategy, name="again", replace=True) as group:
        assert group.keep_calling("count").result(60) == [1, 1]
        assert group.keep_calling(Performer.count).result(60) == [2, 2]
        with pytest.raises(AttributeError, match="no method '7'"):
            group.keep_calling(7)
        with pytest.raises(AttributeError, match="no method 'cuont'; did you mean 'count'"):
            group.keep_calling("cuont")
        with pytest.raises(WorkerDied):
            group.keep_calling("end", 1, "kill").result(60)
        with pytest.raises(ValueError, match="bad reward"):
            group.on(0).keep_calling("fail", [0]).result(60)


def test_what_a_worker_changes_about_what_it_sees_is_an_error_that_shows_both(shared_cluster):
    with pytest.raises(WrongPlace, match=r"meddler:0 is not as planned: it sees CUDA_VISIBLE_DEVICES='7'") as caught:
        Meddler.create_group().launch(shared_cluster, PackedPlacementStrategy(2, 2), name="meddler")
    assert "planned is '2'" in str(caught.value)
    wait_until(lambda: "meddler:0" not in ray.util.list_named_actors(), "what was started is stopped")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a:b"}, "cannot name a group"),
        ({"name": "7"}, "cannot name a group"),
        ({"name": ""}, "must be a short text"),
        ({"placement_strategy": "0-3"}, "it is a PlacementStrategy"),
        ({"env_vars": {"RANK": "3"}}, "RANK is set by Roost for each worker"),
        ({"env_vars": {"CUDA_VISIBLE_DEVICES": "3"}}, "CUDA_VISIBLE_DEVICES is set by Roost for each worker"),
        ({"env_vars": {"A": 3}}, "the variable A is 3, not text"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"restarts": -1}, "restarts is -1"),
    ],
)
def test_wrong_launch_options_raise_before_anything_starts(shared_cluster, arguments, message):
    with pytest.raises(ConfigError, match=message):
        Blind.create_group().launch(shared_cluster, **arguments)


def test_a_wrong_constructor_argument_raises_immediately():
    with pytest.raises(TypeError, match=r"Performer.create_group: got an unexpected keyword argument 'wrod'"):
        Performer.create_group(wrod="hello")


@pytest.mark.usefixtures("roost_local_cluster")
def test_the_interpreter_of_the_node_group_runs_the_worker(tmp_path):
    own = _other_python(tmp_path / "other")
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    Cluster.close_if_open()

    def groups(path: str) -> dict[str, object]:
        config = [{"node_ranks": "0-1", "env_vars": [{"OF_GROUP": "yes"}], "python_interpreter_path": path}]
        return {"num_nodes": 4, "node_groups": [{"label": "mine", "node_ranks": "0-1", "env_configs": config}]}

    strategy = PackedPlacementStrategy(4, 4, node_group="mine")
    with Cluster(cluster_cfg=groups(str(own))) as cluster:
        group = Performer.create_group().launch(cluster, strategy, name="own")
        assert group.interpreter().wait(60) == [str(own)]
        assert [item["OF_GROUP"] for item in group.environment_at_import().wait(60)] == ["yes"]
    with Cluster(cluster_cfg=groups(str(wrapper))) as cluster:
        with pytest.raises(WrongPlace, match="its node group says") as caught:
            Performer.create_group().launch(cluster, strategy, name="wrapped")
        assert str(wrapper) in str(caught.value)
        assert sys.executable in str(caught.value)


def _other_python(folder: Path) -> Path:
    """A second virtual environment with the packages of the one that runs the tests."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_bytes((Path(sys.prefix) / "pyvenv.cfg").read_bytes())
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    return folder / "bin" / "python"


def test_a_method_of_the_class_can_be_called_and_one_worker_gives_one_value(actor):
    assert actor.call(Performer.rank_of).wait(60) == [0, 1, 2, 3, 4]
    assert actor[3].rank_of().one(60) == 3
    with pytest.raises(ConfigError, match=r"one\(\) is for a call to one worker, and 'rank_of' was called on 5"):
        actor.rank_of().one()
