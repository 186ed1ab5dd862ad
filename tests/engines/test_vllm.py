"""vLLM itself, and transformers, on CPUs: what they generate with each version of the weights, and bad days."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from language_models import Trainer
from roost import Cluster, ClusterError, EngineFailed, NodePlacementStrategy, WorkerGroup
from roost.demo.llm.model import write_model
from roost.rl import RolloutManager, create_placement_groups
from roost.rl.engines import Prompt, Sample, TransformersEngine, VllmEngine
from roost.rl.json_request import ask
from roost.testing import local_cluster
from roost.weights import WeightLink
from waiting import wait_until

SECONDS = 300.0
OPTIONS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": "64M", "max_model_len": 512}
SHORT = Prompt(tokens=(5, 6, 7), max_tokens=8, temperature=0.0, ignore_eos=True)
# Longer than a block of vLLM's cache, so that it is looked up there.
LONG = Prompt(tokens=tuple(range(200)) + tuple(range(100)), max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two models whose heads are their own, and two whose heads are tied to their embeddings."""
    made = {}
    for seed, is_tied in ((0, False), (1, False), (2, True), (3, True)):
        name = f"{'tied' if is_tied else 'plain'}{seed % 2}"
        made[name] = tmp_path_factory.mktemp(name)
        write_model(made[name], seed, layers=2, width=64, is_tied=is_tied)
    return made


Start = Callable[..., tuple[RolloutManager, WorkerGroup, WeightLink]]


@pytest.fixture
def start(models) -> Iterator[Start]:
    """Start engines and a trainer with a model, and a link between them."""
    with ExitStack() as stack:

        def make(
            model: str,
            *,
            engine: type = VllmEngine,
            nodes: str = "1x2",
            engines: int = 1,
            per_engine: int = 1,
            in_place: bool = False,
            **options,
        ):
            stack.enter_context(local_cluster(nodes))
            cluster = stack.enter_context(Cluster(num_nodes=len(nodes.split(",")), quiet=True))
            sizes = {"rollout_num_gpus": engines * per_engine, "rollout_num_gpus_per_engine": per_engine}
            flags = {**sizes, "debug_rollout_only": True}
            groups = stack.enter_context(create_placement_groups(flags))
            actor = Trainer.create_group(str(models[model])).launch(cluster, NodePlacementStrategy([0]), name="actor")
            if engine is VllmEngine:
                options["options"] = {**OPTIONS, **options.get("options", {})}
            manager = RolloutManager(
                flags,
                engine,
                groups["rollout"],
                engine_args=(str(models[model]),),
                engine_kwargs=options,
                health_timeout=SECONDS,
            )
            stack.enter_context(manager)
            link = WeightLink.between(actor, manager.engines.group, in_place=in_place)
            return manager, actor, stack.enter_context(link)

        yield make


def sample(manager: RolloutManager, prompt: Prompt, engine: int = 0) -> Sample:
    answer = manager.engines.generate(prompt.to_json(), engine).wait(SECONDS)[0]
    return Sample.from_json(answer["samples"][0])


def check_same(manager: RolloutManager, actor: WorkerGroup, prompt: Prompt, version: int, within: float = 1e-4) -> None:
    """The engines generate what the trainer's model does, and say which version that is."""
    tokens, logprobs = actor.greedy(prompt.tokens, prompt.max_tokens).wait(SECONDS)[0]
    for engine in range(manager.engines.num_engines):
        got = sample(manager, prompt, engine)
        assert got.tokens == tokens
        assert got.versions == (version,) * prompt.max_tokens
        assert max(abs(mine - theirs) for mine, theirs in zip(got.logprobs, logprobs, strict=True)) < within


def test_engines_generate_what_the_trainers_model_does_with_every_version(start, models):
    manager, actor, link = start("tied0", engines=2)
    check_same(manager, actor, LONG, 0)
    for version in (1, 2, 3):
        actor.load(str(models[f"tied{version % 2}"])).wait(SECONDS)
        manager.update_weights(link, version)
        check_same(manager, actor, LONG, version)
        check_same(manager, actor, SHORT, version)
    assert manager.engine_versions() == [3, 3]
    url = manager.engines.urls[0]
    with pytest.raises(ClusterError, match="its proof is of another secret"):
        ask(url, "/health", secret="another", timeout=30, who="it")  # noqa: S106 - no secret
    for path in ("/pause", "/collective_rpc", "/v1/models", "/health"):
        with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)) as line:
            line.request("POST", path, "{}", {"Authorization": "Bearer another"})
            assert line.getresponse().status == 401


@pytest.mark.parametrize(
    ("engine", "in_place"), [(VllmEngine, False), (TransformersEngine, False), (TransformersEngine, True)]
)
def test_requests_in_flight_go_on_with_the_new_weights(start, models, engine, in_place):
    manager, actor, link = start("plain0", engine=engine, in_place=in_place)
    # Computed once with the old weights.
    check_same(manager, actor, LONG, 0)
    prompts = [Prompt(tokens=(9, place), max_tokens=400, ignore_eos=True) for place in range(16)]
    finished: list[tuple[int, Sample]] = []
    thread = threading.Thread(target=lambda: finished.extend(manager.generate(prompts, SECONDS)))
    thread.start()
    actor.load(str(models["plain1"])).wait(SECONDS)
    version = 0
    while thread.is_alive():
        version += 1
        report = link.update(version, SECONDS)
        assert report.version == version
        # Nothing that the old weights computed is used for a new request.
        check_same(manager, actor, LONG, version)
    assert sorted(place for place, _ in finished) == list(range(16))
    assert all(len(one.tokens) == 400 == len(one.versions) == len(one.logprobs) for _, one in finished)
    assert any(len(one.spans) > 1 for _, one in finished), "an update came in the middle"
    assert all([*one.versions] == sorted(one.versions) for _, one in finished)


def test_aborted_samples_go_on_from_their_old_tokens(start):
    manager, _, link = start("plain0", pause_mode="abort")
    prompts = [Prompt(tokens=(9, place), max_tokens=400, ignore_eos=True) for place in range(8)]
    is_broken_off = False
    version = 0
    # An update that comes after the last token breaks nothing off: then it is tried again.
    while not is_broken_off:
        finished: list[tuple[int, Sample]] = []
        thread = threading.Thread(target=lambda got: got.extend(manager.generate(prompts, SECONDS)), args=(finished,))
        thread.start()
        wait_until(lambda: manager.engine_states()[0].busy, "the engine has the prompts")
        version += 1
        link.update(version, SECONDS)
        thread.join(SECONDS)
        assert sorted(place for place, _ in finished) == list(range(8))
        assert all((len(one.tokens), one.finish) == (400, "length") for _, one in finished)
        is_broken_off = any(len(one.spans) > 1 for _, one in finished)


def test_an_engine_that_is_killed_under_load_loses_no_prompt(start, models):
    manager, actor, link = start("plain0", engines=2)
    actor.load(str(models["plain1"])).wait(SECONDS)
    manager.update_weights(link, 1)
    prompts = [Prompt(tokens=(place % 256, 3), n=2, max_tokens=64, ignore_eos=True) for place in range(200)]
    finished: list[tuple[int, Sample]] = []
    thread = threading.Thread(target=lambda: finished.extend(manager.generate(prompts, SECONDS)))
    thread.start()
    record = manager.engines.group.cluster.worker_manager.get_workers(["rollout:1"])[0]
    server = psutil.Process(record.pid).children(recursive=True)
    time.sleep(1.0)
    os.kill(record.pid, signal.SIGKILL)
    manager.restart_engine(1, weights=link, timeout=SECONDS)
    thread.join(SECONDS)
    assert sorted(place for place, _ in finished) == sorted([*range(200)] * 2)
    assert all(len(one.tokens) == 64 and set(one.versions) == {1} for _, one in finished)
    check_same(manager, actor, SHORT, 1)
    gone, alive = psutil.wait_procs(server, timeout=60)
    assert gone
    assert not alive, "its server ended with it"


def test_an_engine_over_two_nodes_gets_weights_on_both(start, models):
    # Each node is one core's process: with fewer threads than ranks vLLM does not start.
    options = {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    manager, actor, link = start("plain0", nodes="1x1,1x1", per_engine=2, **options)
    assert [spec.num_nodes for spec in manager.engines.specs] == [2, 2]
    check_same(manager, actor, SHORT, 0)
    actor.load(str(models["plain1"])).wait(SECONDS)
    manager.update_weights(link, 1)
    check_same(manager, actor, SHORT, 1)


def test_a_trainer_in_float32_updates_an_engine_in_bfloat16(start, models):
    manager, actor, link = start("plain0", options={"dtype": "bfloat16"})
    actor.load(str(models["plain1"])).wait(SECONDS)
    manager.update_weights(link, 1)
    check = Prompt(tokens=SHORT.tokens, max_tokens=1, temperature=0.0, ignore_eos=True)
    _, logprobs = actor.greedy(check.tokens, 1).wait(SECONDS)[0]
    assert abs(sample(manager, check).logprobs[0] - logprobs[0]) < 0.1


def test_a_model_that_vllm_cannot_load_is_said_with_its_own_words(models, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(models["plain0"], broken)
    (broken / "config.json").write_text('{"model_type": "no_such_model"}')
    with local_cluster("1x1"), Cluster(num_nodes=1, quiet=True):
        flags = {"rollout_num_gpus": 1, "debug_rollout_only": True}
        with create_placement_groups(flags) as groups, pytest.raises(EngineFailed, match="no_such_model"):
            RolloutManager(flags, VllmEngine, groups["rollout"], engine_args=(str(broken),), health_timeout=SECONDS)


def test_nothing_is_left():
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("roost-", "psm_", "vllm"))]  # noqa: S108
    assert not [one for one in psutil.process_iter(["cmdline"]) if "roost_vllm_serve" in (one.info["cmdline"] or ())]
