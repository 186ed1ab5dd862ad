"""Weights go from the trainer's workers to the engines': what arrives, and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from link_workers import Bulky, Hidden, ResetServer, ResetTrainer, Watched
from roost import (
    CallTimedOut,
    Cluster,
    ClusterError,
    ConfigError,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    WorkerDied,
    WorkerGroup,
)
from roost.machine.devices import nvidia_devices
from roost.testing import LocalNode, local_cluster
from roost.weights import UpdateDecided
from roost.weights.link import WeightLink
from roost.weights.safetensors import save_safetensors
from waiting import stop, wait_until
from weight_workers import SHAPES, Both, Odd, Server, Stored, Trainer, value


def launch(cluster: Cluster, kind: type, name: str, nodes: list[int], *arguments: object) -> WorkerGroup:
    place = NodePlacementStrategy(nodes)
    return kind.create_group(*arguments).launch(cluster, place, name=name, restarts=0)


def contents(group: WorkerGroup) -> list[tuple[int, set[float]]]:
    return group.content().wait(60)


def pid_of(group: WorkerGroup, rank: int) -> int:
    return group[rank].pid().wait(60)[0]


@pytest.fixture
def pair(shared_cluster: Cluster) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Two trainers and two servers on one node, without torch."""
    with (
        launch(shared_cluster, Trainer, "actor", [0, 0], "numpy") as actor,
        launch(shared_cluster, Server, "rollout", [0, 0], "numpy") as rollout,
    ):
        yield actor, rollout


@pytest.mark.parametrize(
    ("kind", "in_place"), [pytest.param("torch", False, marks=pytest.mark.wants("torch")), ("numpy", True)]
)
def test_all_targets_get_each_version_wholly(shared_cluster, kind, in_place):
    with (
        launch(shared_cluster, Trainer, "a", [0, 0, 1], kind) as actor,
        launch(shared_cluster, Server, "r", [0, 0, 1, 1], kind) as rollout,
    ):
        link = WeightLink.between(actor, rollout, in_place=in_place, bucket_bytes=1 << 14)
        assert contents(rollout) == [(-1, {0.0})] * 4
        for version in (1, 2, 5):
            # Once in other memory than before.
            actor.set_version(version, anew=version == 5).wait(60)
            report = link.update(version, timeout=60)
            assert contents(rollout) == [(version, {float(version)})] * 4
            assert report.nbytes == sum(link.plan.traffic.values())
        assert link.versions() == {f"r:{rank}": 5 for rank in range(4)}
        with pytest.raises(ConfigError, match="above 5"):
            link.update(5)


@pytest.mark.wants("torch")
def test_types_are_cast_and_a_worker_can_be_source_and_target(shared_cluster):
    with launch(shared_cluster, Both, "both", [0, 0], "torch", "float32", "bfloat16") as both:
        link = WeightLink.between(both, both)
        both.set_version(0).wait(60)
        link.update(1)
        # bfloat16 has eight digits: enough for the values of version 0.
        assert both.accepted().wait(60) == [True, True]


def test_unusual_types_and_strides_and_tied_weights_arrive_on_the_same_node_and_on_another(shared_cluster):
    with (
        launch(shared_cluster, Odd, "odd", [0], 1) as source,
        launch(shared_cluster, Odd, "even", [0, 1], 0) as target,
    ):
        link = WeightLink.between(source, target)
        link.update(1)
        wanted = source.sums().wait(60)[0]
        assert min(wanted) > 0
        assert target.sums().wait(60) == [wanted, wanted]
        # What a target has besides is left alone.
        target.widen().wait(60)
        link.update(2)
        assert target.unwanted().wait(60) == [[-1.0] * 3] * 2
        link.close()


def test_what_does_not_fit_is_listed_for_all_workers(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout)
    rollout[1].lose("up").wait(60)
    actor.retype("down", "int8").wait(60)
    with pytest.raises(ConfigError) as caught:
        WeightLink(link.plan, actor, rollout)
    assert sorted(str(caught.value).splitlines()) == [
        "down of actor:0 is int8, not float32",
        "down of actor:1 is int8, not float32",
        "rollout:1 has no up",
    ]
    with pytest.raises(ConfigError, match="down: int8 cannot be stored as float32"):
        WeightLink.between(actor, rollout)


def test_a_worker_that_can_open_nothing_when_a_link_begins_is_named(pair):
    actor, rollout = pair
    rollout[1].open_nothing_more().wait(60)
    with pytest.raises(ClusterError, match=r"rollout:1 cannot take part in .*: Too many open files"):
        WeightLink.between(actor, rollout)


def test_members_with_another_plan_refuse_an_update(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout)
    link.plan = WeightLink.between(actor, rollout, bucket_bytes=1 << 14).plan
    with pytest.raises(ConfigError, match=f"has another plan than {link.plan.digest[:8]}"):
        link.update(1)
    assert contents(rollout) == [(-1, {0.0})] * 2


@pytest.mark.parametrize("nodes", [[0, 0], [1, 1]])
def test_a_source_whose_arrays_change_is_compared_with_the_plan_before_a_byte_moves(shared_cluster, nodes):
    with (
        launch(shared_cluster, Trainer, "a", [0, 0], "numpy") as actor,
        launch(shared_cluster, Server, "r", nodes, "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout)
        actor.set_version(1).wait(60)
        link.update(1)
        version = 1
        for how, message in {
            "short": r"down of a:1 has shape \[16, 256\]\n  hint: it had \[32, 256\]",
            "long": r"down of a:1 has shape \[64, 256\]\n  hint: it had \[32, 256\]",
            "flat": r"down of a:1 has shape \[8192\]\n  hint: it had \[32, 256\]",
            "reshaped in place": r"down of a:1 has shape \[256, 32\]\n  hint: it had \[32, 256\]",
            "float64": "down of a:1 is float64, not float32",
            "int32": "down of a:1 is int32, not float32",
        }.items():
            actor[1].transform("down", how).wait(60)
            version += 1
            with pytest.raises(ConfigError, match=message):
                link.update(version)
            assert contents(rollout) == [(1, {1.0})] * 2
            actor[1].restore().wait(60)
        # Other strides are as good.
        actor.set_version(2).wait(60)
        actor[1].transform("down", "turned").wait(60)
        link.update(version + 1)
        assert contents(rollout) == [(version + 1, {2.0})] * 2


def rounds_of_two_links(cluster: Cluster, count: int, *, in_place: bool) -> None:
    """Let two links bring versions to the same targets at the same time, again and again."""
    with (
        launch(cluster, Trainer, "even", [0], "numpy") as even,
        launch(cluster, Trainer, "odd", [0], "numpy") as odd,
        launch(cluster, Server, "r", [0, 0], "numpy") as rollout,
    ):
        links = [WeightLink.between(source, rollout, in_place=in_place) for source in (even, odd)]
        for number in range(count):
            versions = 2 * number, 2 * number + 1
            for source, version in zip((even, odd), versions, strict=True):
                source.set_version(version).wait(60)
            refused: dict[int, str] = {}

            def update(place: int, version: int, refused: dict[int, str] = refused) -> None:
                try:
                    links[place].update(version, timeout=60)
                except (ClusterError, ConfigError) as error:
                    refused[version] = str(error)

            threads = [threading.Thread(target=update, args=pair) for pair in enumerate(versions)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            # The newer one is never refused, and no target ends on the older.
            assert all("only go up" in words for words in refused.values()), refused
            assert versions[1] not in refused
            assert contents(rollout) == [(versions[1], {float(versions[1])})] * 2


@pytest.mark.parametrize("in_place", [False, True])
def test_two_links_to_the_same_targets_end_on_the_newer_version(shared_cluster, in_place):
    rounds_of_two_links(shared_cluster, 25, in_place=in_place)


@pytest.mark.soak
@pytest.mark.parametrize("in_place", [False, True])
def test_two_links_to_the_same_targets_end_on_the_newer_version_in_500_rounds(shared_cluster, in_place):
    rounds_of_two_links(shared_cluster, 500, in_place=in_place)


def test_an_update_that_is_late_after_the_decision_says_who_has_it_and_who_takes_it(shared_cluster):
    with (
        launch(shared_cluster, Trainer, "actor", [0], "numpy") as actor,
        launch(shared_cluster, Watched, "rollout", [0, 0], "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout)
        actor.set_version(1).wait(60)
        rollout[1].hold().wait(60)
        with pytest.raises(UpdateDecided, match=r"version 1 is decided, and in use by rollout:0; [^;]*: rollout:1"):
            link.update(1, timeout=3)
        assert link.version == 1
        rollout[1].let_held_go_on().wait(60)
        wait_until(lambda: link.versions() == {"rollout:0": 1, "rollout:1": 1}, "both have it")
        assert contents(rollout) == [(1, {1.0})] * 2


def test_the_report_names_each_pair_that_did_not_go_as_planned(shared_cluster):
    with (
        launch(shared_cluster, Trainer, "actor", [0], "numpy") as actor,
        launch(shared_cluster, Hidden, "hidden", [0], "numpy") as hidden,
        launch(shared_cluster, Server, "rollout", [0], "numpy") as rollout,
    ):
        assert WeightLink.between(actor, rollout).update(1).detours == ()
        link = WeightLink.between(hidden, rollout)
        hidden.set_version(2).wait(60)
        (detour,) = link.update(2).detours
        assert str(detour).startswith("hidden:0 -> rollout:0: same node, sent, not same node: process "), (
            "which is another one here, as in a container"
        )
        assert contents(rollout) == [(2, {2.0})]


def test_a_target_that_hangs_is_named_and_the_others_keep_their_version(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout)
    link.update(1)
    stop(pid := pid_of(rollout, 1))
    try:
        with pytest.raises(CallTimedOut, match="rollout:1"):
            link.update(2, timeout=2)
        assert rollout[0].content().wait(60)[0][0] == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    # What it was asked for meanwhile comes too late.
    assert link.versions() == {"rollout:0": 1, "rollout:1": 1}
    actor.set_version(3).wait(60)
    link.update(3)
    assert contents(rollout) == [(3, {3.0})] * 2


def test_two_updates_at_once_come_one_after_the_other(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout)
    errors: list[Exception] = []

    def update(version: int) -> None:
        try:
            link.update(version)
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=update, args=(version,)) for version in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert link.version == 3
    assert contents(rollout) == [(3, {0.0})] * 2
    assert all("only go up" in str(error) or "above" in str(error) for error in errors)


def test_a_restarted_target_is_filled_from_a_peer_and_one_can_be_left_out(shared_cluster):
    with (
        launch(shared_cluster, Trainer, "actor", [0, 0], "numpy") as actor,
        launch(shared_cluster, Server, "rollout", [0] * 4, "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout)
        actor.set_version(1).wait(60)
        link.update(1)
        # What the trainer has now is another version.
        actor.set_version(9, anew=True).wait(60)
        for _ in range(2):
            os.kill(pid_of(rollout, 2), signal.SIGKILL)
            with pytest.raises(WorkerDied, match="rollout:2"):
                link.update(2, timeout=20)
            rollout.restart(2)
            assert link.refill("rollout:2").version == 1
            assert contents(rollout) == [(1, {1.0})] * 4
        for rank in (2, 3):
            os.kill(pid_of(rollout, rank), signal.SIGKILL)
        rollout.restart(2)
        assert link.refill("rollout:2").version == 1
        with pytest.raises(WorkerDied, match="rollout:3"):
            link.update(2, timeout=20)
        link.without("rollout:3")
        link.update(2)
        assert contents(rollout.on(0, 1, 2)) == [(2, {9.0})] * 3
        rollout.restart(3)
        assert link.refill("rollout:3").version == 2
        link.update(3)
        assert contents(rollout) == [(3, {9.0})] * 4
        with pytest.raises(ConfigError, match="no source holds"):
            link.without("actor:0")


def test_a_death_between_the_move_and_the_commit_leaves_no_mixture(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout)
    link.update(0)
    actor.set_version(1).wait(60)
    # A source is not needed any more.
    rollout[0].kill_at_change(pid_of(actor, 0)).wait(60)
    assert link.update(1, timeout=20).version == 1
    assert contents(rollout) == [(1, {1.0})] * 2
    actor.restart(0)
    link.rejoin("actor:0")
    actor.set_version(2).wait(60)
    rollout[0].kill_at_change(pid_of(rollout, 0)).wait(60)
    with pytest.raises(WorkerDied, match="rollout:0"):
        link.update(2, timeout=20)
    assert contents(rollout.on(1)) == [(2, {2.0})]
    rollout.restart(0)
    assert link.refill("rollout:0").version == 2
    assert contents(rollout) == [(2, {2.0})] * 2


def test_a_target_is_not_filled_with_newer_weights_under_an_old_version(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout)
    actor.set_version(1).wait(60)
    link.update(1)
    for version in (2, 3):
        os.kill(pid_of(rollout, 1), signal.SIGKILL)
        if version == 2:
            # The trainer is as it was in the last update, and the other target has another half.
            rollout.restart(1)
            assert link.refill("rollout:1").version == 1
            assert contents(rollout) == [(1, {1.0})] * 2
            continue
        actor.set_version(version).wait(60)
        with pytest.raises(WorkerDied, match="rollout:1"):
            link.update(version, timeout=20)
        rollout.restart(1)
        with pytest.raises(
            ClusterError, match=r"no other target has version 1, and the sources have version 3[\s\S]*update"
        ):
            link.refill("rollout:1")
        link.update(version)
        assert contents(rollout) == [(version, {float(version)})] * 2


def test_what_an_update_that_was_broken_off_sent_does_not_stay(shared_cluster):
    with (
        launch(shared_cluster, Trainer, "a", [0, 0], "numpy") as actor,
        launch(shared_cluster, Watched, "r", [1, 1], "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout, bucket_bytes=1 << 14)
        rollout[1].fail_at_accept().wait(60)
        with pytest.raises(ClusterError, match="r:1 failed in an update: RuntimeError: not now"):
            link.update(1, timeout=20)
        wait_until(lambda: rollout[1].waiting_messages().wait(60)[0], "what was sent is there")
        actor.set_version(2).wait(60)
        link.update(2)
        assert contents(rollout) == [(2, {2.0})] * 2
        assert rollout.waiting_messages().wait(60) == [0, 0]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_commit_that_is_held_up_never_overwrites_a_newer_version(shared_cluster, is_new):
    with (
        launch(shared_cluster, Trainer, "actor", [0], "numpy") as actor,
        Watched.create_group("numpy").launch(
            shared_cluster, NodePlacementStrategy([0, 0]), name="rollout", max_concurrency=4
        ) as rollout,
        ThreadPoolExecutor() as aside,
    ):
        link = WeightLink.between(actor, rollout)
        actor.set_version(1).wait(60)
        rollout[1].hold().wait(60)
        with pytest.raises(CallTimedOut, match="rollout:1"):
            link.update(1, timeout=2)
        if is_new:
            link = WeightLink.between(actor, rollout)
        else:
            link.rejoin("rollout:1")
        actor.set_version(2).wait(60)
        newer = aside.submit(link.update, 2)
        wait_until(lambda: rollout[0].seen_changes().wait(60)[0][-1][0] == "done 2", "the other target has it")
        assert [one for one, _ in rollout[1].seen_changes().wait(60)[0]] == ["to 1"], "it waits for its turn"
        rollout[1].let_held_go_on().wait(60)
        newer.result(60)
        ended = "done 1" if is_new else "broken: update 1 of rollout:1 was broken off"
        assert [one for one, _ in rollout[1].seen_changes().wait(60)[0]] == ["to 1", ended, "to 2", "done 2"]
        assert contents(rollout) == [(2, {2.0})] * 2


@pytest.mark.wants("torch")
@pytest.mark.parametrize("in_place", [False, True])
def test_memory_of_updates_can_be_given_back_between_them(shared_cluster, in_place):
    with (
        launch(shared_cluster, Trainer, "actor", [0], "torch") as actor,
        launch(shared_cluster, Watched, "rollout", [0, 0], "torch") as rollout,
    ):
        link = WeightLink.between(actor, rollout, in_place=in_place)
        for version in (1, 2):
            actor.set_version(version).wait(60)
            link.update(version)
            assert rollout.kept().wait(60) == [[True]] * 2
            rollout.let_go_of_weights().wait(60)
            assert rollout.kept().wait(60) == [[False]] * 2
            assert contents(rollout) == [(version, {float(version)})] * 2
        # Not in the middle of a change, which it waits for.
        rollout[0].hold().wait(60)
        with pytest.raises(CallTimedOut):
            link.update(3, timeout=2)
        with pytest.raises(CallTimedOut, match=r"rollout:0 has not let go of the memory of updates after 0\.1 s"):
            rollout[0].let_go_of_weights(0.1).wait(60)
        rollout[0].let_held_go_on().wait(60)
        rollout.let_go_of_weights().wait(60)


@pytest.mark.wants("torch")
def test_types_that_only_torch_has_reach_arrays_of_numpy(shared_cluster):
    with (
        launch(shared_cluster, Trainer, "actor", [0], "torch", "bfloat16") as actor,
        launch(shared_cluster, Watched, "rollout", [0, 0], "numpy") as rollout,
    ):
        rollout.import_torch().wait(60)
        link = WeightLink.between(actor, rollout)
        link.update(1)
        assert contents(rollout) == [(1, {0.0})] * 2


def test_a_worker_is_told_from_the_first_byte_on_that_its_weights_are_overwritten(pair):
    actor, rollout = pair
    link = WeightLink.between(actor, rollout, in_place=True)
    actor.set_version(1).wait(60)
    link.update(1)
    assert rollout.seen_changes().wait(60) == [[("to 1", {0.0}), ("done", {1.0})]] * 2
    actor.set_version(2).wait(60)
    rollout[1].kill_at_change(pid_of(rollout, 1), delay=1.0).wait(60)
    with pytest.raises(WorkerDied, match="rollout:1"):
        link.update(2, timeout=20)
    # It is told, and not waited for.
    wait_until(lambda: len(rollout[0].seen_changes().wait(60)[0]) == 4, "the update is broken off")
    begun, broken = rollout[0].seen_changes().wait(60)[0][2:]
    assert begun == ("to 2", {1.0})
    assert broken[0].startswith("broken: update 2")
    assert link.version == 1
    assert contents(rollout.on(0))[0][0] == -1
    rollout.restart(1)
    link.rejoin("rollout:1")
    link.update(2)
    assert contents(rollout) == [(2, {2.0})] * 2


def test_weights_come_from_a_file(shared_cluster, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_safetensors(path, {name: value(name, 3) for name in SHAPES})
    with (
        launch(shared_cluster, Stored, "stored", [0], str(path)) as stored,
        launch(shared_cluster, Server, "rollout", [0, 0], "numpy") as rollout,
    ):
        WeightLink.between(stored, rollout).update(3)
        assert contents(rollout) == [(3, {3.0})] * 2


@contextlib.contextmanager
def names(worker: str) -> Iterator[None]:
    """An error inside names a worker."""
    try:
        yield
    except ClusterError as error:
        if worker not in str(error):
            raise AssertionError(f"{error} does not name {worker}") from error
        raise


def rounds_of_kills(cluster: Cluster, numbers: Iterator[int], seed: int) -> None:
    """Kill a random member at a random moment of an update, again and again."""
    choose = random.Random(seed)  # noqa: S311 - to be repeated
    with (
        launch(cluster, Trainer, "actor", [0, 0], "numpy") as actor,
        launch(cluster, Server, "rollout", [0, 0, 0], "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout, bucket_bytes=1 << 14)
        version = 0
        for _ in numbers:
            version += 1
            actor.set_version(version).wait(60)
            group, rank = choose.choice([(actor, 0), (actor, 1), (rollout, 0), (rollout, 1), (rollout, 2)])
            victim = f"{group.name}:{rank}"
            if group is rollout and choose.random() < 0.5:
                rollout[rank].die_at_accept(choose.randint(1, 3)).wait(60)
            else:
                group[rank].die_in(choose.uniform(0.0, 0.03)).outcomes(60)
            # It may be over before the kill.
            with contextlib.suppress(ClusterError), names(victim):
                link.update(version, timeout=20)
            alive = [one for one in rollout.ranks if f"rollout:{one}" != victim]
            for one in alive:
                has, found = rollout[one].content().wait(60)[0]
                assert found == {float(max(has, 0))}, f"rollout:{one} says {has}"
                assert has in (version, version - 1, -1)
            group[rank].kill_now().outcomes(60)
            group.restart(rank)
            if group is actor:
                link.rejoin(victim)
            actor.set_version(version + 1).wait(60)
            version += 1
            if group is rollout:
                link.rejoin(victim)
            link.update(version, timeout=20)
            assert contents(rollout) == [(version, {float(version)})] * 3


def test_a_member_that_is_killed_in_an_update_leaves_the_others_on_one_version(shared_cluster):
    rounds_of_kills(shared_cluster, iter(range(6)), 5)


def test_a_member_rejoins_although_the_wire_has_not_noticed_the_death_before(shared_cluster):
    with (
        launch(shared_cluster, Trainer, "actor", [0, 0], "numpy") as actor,
        launch(shared_cluster, Server, "rollout", [0], "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout)
        actor.set_version(1).wait(60)
        link.update(1, timeout=60)
        over = threading.Event()
        # The communication thread of this process, which would notice it, is busy.
        link._endpoint.loop.call(lambda: over.wait(60))
        actor[1].kill_now().outcomes(60)
        actor.restart(1)
        release = threading.Timer(1.0, over.set)
        release.start()
        link.rejoin("actor:1")
        release.join()
        actor.set_version(2).wait(60)
        link.update(2, timeout=60)
        assert contents(rollout) == [(2, {2.0})]


@pytest.mark.soak
def test_members_that_are_killed_in_updates_for_minutes(shared_cluster, rounds):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rounds_of_kills(shared_cluster, rounds(), seed)


@pytest.mark.parametrize("in_place", [False, True])
def test_connections_that_are_reset_in_the_middle_of_updates_end_none_and_tear_no_version(shared_cluster, in_place):
    with (
        launch(shared_cluster, ResetTrainer, "a", [0, 0], "numpy") as actor,
        launch(shared_cluster, ResetServer, "r", [0, 0, 1, 1], "numpy") as rollout,
    ):
        link = WeightLink.between(actor, rollout, in_place=in_place, bucket_bytes=1 << 14)
        for group in (actor, rollout):
            group.reset_until_told(0.05).wait(60)
        for version in range(1, 21):
            actor.set_version(version).wait(60)
            assert link.update(version, timeout=60).version == version
            assert contents(rollout) == [(version, {float(version)})] * 4
        assert min(count for group in (actor, rollout) for count in group.stop_resets().wait(60)) > 0


needs_gpu = pytest.mark.skipif(not nvidia_devices()[0], reason="needs a GPU")


@needs_gpu
def test_expandable_segments_which_no_other_process_can_map_are_said_and_weights_go_by_messages(capfd):
    place = FlexiblePlacementStrategy([[0], [0]])
    node = LocalNode(accelerators=1, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    with (
        local_cluster([node]),
        Cluster(num_nodes=1) as cluster,
        Trainer.create_group("cuda", "float32").launch(cluster, place, name="actor", share=0.2) as actor,
        Server.create_group("cuda", "bfloat16").launch(cluster, place, name="rollout", share=0.2) as rollout,
    ):
        link = WeightLink.between(actor, rollout, bucket_bytes=1 << 14)
        for version in (0, 1):
            actor.set_version(0).wait(60)
            link.update(version)
            assert contents(rollout) == [(version, {0.0})] * 2
        said: list[str] = []
        wait_until(
            lambda: said.append(capfd.readouterr().err) or "expandable segments" in "".join(said), "the cause is said"
        )


@pytest.mark.parametrize("in_place", [True, False])
@needs_gpu
def test_weights_go_from_one_process_to_another_on_the_device(in_place):
    place = FlexiblePlacementStrategy([[0], [0]])
    with (
        local_cluster("1x1"),
        Cluster(num_nodes=1) as cluster,
        Trainer.create_group("cuda", "float32").launch(cluster, place, name="actor", share=0.2) as actor,
        Server.create_group("cuda", "bfloat16").launch(cluster, place, name="rollout", share=0.2) as rollout,
    ):
        link = WeightLink.between(actor, rollout, in_place=in_place)
        for version in (0, 1):
            # Once in other memory than before.
            actor.set_version(0, anew=version == 1).wait(60)
            link.update(version)
            assert rollout.content().wait(60) == [(version, {0.0})] * 2
        os.kill(actor[0].pid().wait(60)[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="actor:0"):
            link.update(2, timeout=30)


@needs_gpu
def test_memory_that_a_source_replaced_is_free_on_the_device():
    with (
        local_cluster("1x1"),
        Cluster(num_nodes=1) as cluster,
        Bulky.create_group().launch(cluster, FlexiblePlacementStrategy([[0]]), name="actor", share=0.2) as actor,
        Bulky.create_group().launch(cluster, FlexiblePlacementStrategy([[0]]), name="rollout", share=0.2) as rollout,
    ):
        link, free = WeightLink.between(actor, rollout), []
        for version in range(1, 6):
            actor.renew(version).wait(60)
            link.update(version)
            assert rollout.first().wait(60) == [float(version)]
            free += actor.free_bytes().wait(60)
        # Torch keeps the memory of the tensor before for the next one; none is added after that.
        assert free[-1] > free[1] - (1 << 27)
