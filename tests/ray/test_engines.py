"""Engines with servers of their own under a rollout manager: prompts, weights from a link, kills; with a stand-in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from roost import (
    Cluster,
    ClusterError,
    ConfigError,
    EngineFailed,
    LaunchTimedOut,
    NodePlacementStrategy,
    WorkerDied,
    WorkerGroup,
)
from roost.machine.devices import nvidia_devices
from roost.rl import RolloutManager, create_placement_groups, create_rollout_engines
from roost.rl.engines import Prompt, Sample, VllmEngine
from roost.rl.engines.server_engine import _INSIDE
from roost.rl.engines.staging import staging_folder
from roost.rl.rollout_engines import EngineWorker
from roost.testing import NumpyEngine, local_cluster
from roost.weights.link import WeightLink
from roost.weights.safetensors import save_safetensors
from staging_engines import Giver, NeverReady, PausingEngine, StagingEngine
from stored_weights import Holder
from waiting import is_gone, wait_until

STAND_IN = Path(__file__).parents[1] / "stand_in"
SECONDS = 120.0
FLAGS = {"rollout_num_gpus": 2, "debug_rollout_only": True}


def weights(value: float) -> dict[str, np.ndarray]:
    return {"embed": np.full((40, 30), value, np.float32), "scale": np.array(value, np.float32)}


@pytest.fixture
def model(tmp_path) -> Path:
    save_safetensors(tmp_path / "model.safetensors", weights(0))
    return tmp_path


def manage(groups, model: Path, mode: str = "", flags: dict[str, object] = FLAGS, **options: object) -> RolloutManager:
    # Where the engine has its own part of vLLM, which the stand-in uses too.
    paths = f"{STAND_IN}:{_INSIDE}"
    environment = {"PYTHONPATH": paths, "STAND_IN": mode, "STAND_IN_SECONDS": "0.02"}
    return RolloutManager(
        flags,
        VllmEngine,
        groups["rollout"],
        engine_args=(str(model),),
        engine_kwargs={"environment": environment, **options},
        health_timeout=SECONDS,
    )


@pytest.fixture
def groups(shared_cluster) -> Iterator[object]:
    with create_placement_groups(FLAGS, shared_cluster) as made:
        yield made


@pytest.fixture
def trainer(shared_cluster) -> Iterator[WorkerGroup]:
    with Holder.create_group().launch(shared_cluster, NodePlacementStrategy([0]), name="actor") as group:
        yield group


def generate(manager: RolloutManager, count: int, tokens: int) -> tuple[threading.Thread, list[tuple[int, Sample]]]:
    """Let engines answer prompts, next to the test."""
    finished: list[tuple[int, Sample]] = []
    prompts = [Prompt(tokens=(1, place), n=2, max_tokens=tokens) for place in range(count)]
    thread = threading.Thread(target=lambda: finished.extend(manager.generate(prompts, SECONDS)))
    thread.start()
    return thread, finished


def test_prompts_are_answered_once_through_updates_and_the_death_of_an_engine(groups, trainer, model, shared_cluster):
    with manage(groups, model, pause_mode="abort") as manager:
        link = WeightLink.between(trainer, manager.engines.group)
        trainer.set(3.0).wait(SECONDS)
        manager.update_weights(link, 1)
        assert manager.engine_versions() == [1, 1]
        thread, finished = generate(manager, 40, 30)
        record = shared_cluster.worker_manager.get_workers(["rollout:1"])[0]
        children = psutil.Process(record.pid).children(recursive=True)
        assert len(children) >= 2, "its server, and what watches over it"
        os.kill(record.pid, signal.SIGKILL)
        trainer.set(5.0).wait(SECONDS)
        with pytest.raises((WorkerDied, ClusterError), match="rollout:1"):
            manager.update_weights(link, 2, 30)
        link.without("rollout:1")
        manager.update_weights(link, 3)
        thread.join(SECONDS)
        assert sorted(place for place, _ in finished) == sorted([*range(40)] * 2)
        for _, sample in finished:
            assert (len(sample.tokens), sample.finish) == (30, "length")
            made = {1: 3, 3: 5}
            assert sample.tokens == tuple(made[version] for version in sample.versions)
        for child in children:
            wait_until(lambda child=child: is_gone(child.pid), "its server has ended with it")
        manager.restart_engine(1, weights=link, timeout=SECONDS)
        assert manager.engine_versions() == [3, 3]
        (answer,) = manager.engines.generate(Prompt(tokens=(1,), max_tokens=2).to_json(), 1).wait(SECONDS)
        assert Sample.from_json(answer["samples"][0]).tokens == (5, 5)
        link.close()
        folders = [staging_folder(spec) for spec in manager.engines.specs]
        assert all(folder.exists() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_an_engine_that_cannot_start_is_said_at_once_with_its_last_words(groups, model):
    with pytest.raises(EngineFailed, match=r"ended with code 3[\s\S]*not enough memory for the cache") as caught:
        manage(groups, model, "exit")
    # Nor do ten lines about the call that found it stand in their place.
    assert "Traceback" not in str(caught.value)


def test_engines_whose_weights_are_in_doubt_get_no_requests_until_an_update_succeeds(groups, model):
    with manage(groups, model, "refuse-once") as manager:
        with pytest.raises(ClusterError, match="no such layer"):
            manager.update_weights(weights(3), 1)
        assert manager.engines.health() == [False, False]
        for state in manager.engine_states():
            assert (state.healthy, state.why[:24]) == (False, "its engine does not have")
        with pytest.raises(ClusterError, match="none of 2 engines could serve"):
            list(manager.generate([Prompt(tokens=(1,))], timeout=2))
        manager.update_weights(weights(5), 2)
        ((_, sample),) = manager.generate([Prompt(tokens=(1,), max_tokens=2)], SECONDS)
        assert (sample.tokens, sample.versions) == ((5, 5), (2, 2))


def test_an_engine_that_is_restarted_before_the_first_version_is_in_the_link_again(groups, trainer, model):
    with manage(groups, model) as manager, WeightLink.between(trainer, manager.engines.group) as link:
        manager.restart_engine(1, weights=link, timeout=SECONDS)
        trainer.set(3.0).wait(SECONDS)
        manager.update_weights(link, 1)
        assert manager.engine_versions() == [1, 1]


def test_an_engine_that_cannot_be_filled_serves_after_the_next_update(shared_cluster, trainer, model):
    flags = {**FLAGS, "rollout_num_gpus": 1}
    with (
        create_placement_groups(flags, shared_cluster) as groups,
        manage(groups, model, flags=flags) as manager,
        WeightLink.between(trainer, manager.engines.group) as link,
    ):
        manager.update_weights(link, 1)
        trainer.set(2.0).wait(SECONDS)
        os.kill(shared_cluster.worker_manager.get_workers(["rollout:0"])[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rollout:0"):
            manager.update_weights(link, 2, 30)
        with pytest.raises(ClusterError, match="no other target has version 1, and the sources have version 2"):
            manager.restart_engine(0, weights=link, timeout=SECONDS)
        assert not manager.engine_states()[0].healthy
        manager.update_weights(link, 2)
        ((_, sample),) = manager.generate([Prompt(tokens=(1,), max_tokens=2)], SECONDS)
        assert (sample.tokens, sample.versions) == ((2, 2), (2, 2))


def test_engines_that_do_not_come_up_are_stopped(groups, tmp_path):
    with pytest.raises(LaunchTimedOut):
        create_rollout_engines(FLAGS, NeverReady, groups["rollout"], engine_args=(str(tmp_path),), health_timeout=0.5)
    assert len([*tmp_path.iterdir()]) == 2


def test_an_engine_over_two_nodes_uses_weights_when_both_have_them(tmp_path):
    flags = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "debug_rollout_only": True}
    with (
        local_cluster("1x1,1x1"),
        Cluster(num_nodes=2) as cluster,
        create_placement_groups(flags, cluster) as groups,
        RolloutManager(flags, StagingEngine, groups["rollout"], engine_args=(str(tmp_path),)) as manager,
    ):
        manager.update_weights("w1", 1)
        assert (tmp_path / "used-1").read_text() == "w1-0 w1-1"
        manager.restart_engine(0, "w2", 2)
        assert (tmp_path / "used-2").read_text() == "w2-0 w2-1"
        assert manager.engine_versions() == [2]


def test_engines_without_tokens_take_no_prompts_and_links_in_place_are_refused(groups, trainer, model):
    with manage(groups, model) as manager:
        with pytest.raises(ConfigError, match="timeout is 0"):
            manager.generate([Prompt(tokens=(1,))], timeout=0)
        assert list(manager.generate([])) == []
        # Its weights are memory beside those in use: in place is the same.
        WeightLink.between(trainer, manager.engines.group, in_place=True).update(1)
        assert manager.engine_versions() == [1, 1]
    with RolloutManager(FLAGS, NumpyEngine, groups["rollout"]) as manager:
        with pytest.raises(ConfigError, match="the engines take no prompts"):
            manager.generate([Prompt(tokens=(1,))])
        with pytest.raises(ConfigError, match="NumpyEngine has no method accept"):
            WeightLink.between(trainer, manager.engines.group)


@pytest.mark.skipif(not nvidia_devices()[0], reason="needs a GPU")
def test_weights_reach_a_server_on_the_device_of_the_trainer_without_leaving_it(model):
    flags = {**FLAGS, "rollout_num_gpus": 1}
    with (
        local_cluster("1x1"),
        Cluster(num_nodes=1) as cluster,
        create_placement_groups(flags, cluster) as groups,
        Holder.create_group("cuda").launch(cluster, NodePlacementStrategy([0]), name="actor") as trainer,
        manage(groups, model, flags=flags, weights_on="device") as manager,
        WeightLink.between(trainer, manager.engines.group) as link,
    ):
        for version in (1, 20):
            trainer.set(float(version + 2)).wait(SECONDS)
            manager.update_weights(link, version)
            (answer,) = manager.engines.generate(Prompt(tokens=(1,), max_tokens=2).to_json(), 0).wait(SECONDS)
            sample = Sample.from_json(answer["samples"][0])
            assert (sample.tokens, sample.versions) == ((version + 2,) * 2, (version,) * 2)
            manager.engines.offload().wait(SECONDS)
            with pytest.raises(ClusterError, match="the engine is offloaded, and cannot take weights"):
                manager.update_weights(link, version + 1)
            manager.engines.onload().wait(SECONDS)


def test_two_links_in_place_to_the_same_engines_never_wait_for_each_other(shared_cluster):
    places = [NodePlacementStrategy(nodes) for nodes in ([0], [1], [0, 1, 0])]
    with (
        Giver.create_group().launch(shared_cluster, places[0], name="even", reserve=False) as even,
        Giver.create_group().launch(shared_cluster, places[1], name="odd", reserve=False) as odd,
        EngineWorker.create_group(PausingEngine, (), {}).launch(
            shared_cluster, places[2], name="engines", reserve=False, max_concurrency=8
        ) as engines,
    ):
        links = [WeightLink.between(source, engines, in_place=True) for source in (even, odd)]
        for number in range(25):
            versions = 2 * number, 2 * number + 1
            even.set(versions[0]).wait(SECONDS)
            odd.set(versions[1]).wait(SECONDS)
            with ThreadPoolExecutor(2) as aside:
                older, newer = (
                    aside.submit(link.update, version, timeout=SECONDS)
                    for link, version in zip(links, versions, strict=True)
                )
            newer.result()
            assert older.exception() is None or "only go up" in str(older.exception())
            assert engines.served_version().wait(SECONDS) == [versions[1]] * 3
            assert engines.generate(None).wait(SECONDS) == [[versions[1]]] * 3
