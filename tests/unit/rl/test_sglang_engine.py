"""SGLang as an engine: its command line, its requests and answers, and bad days, with a stand-in for the server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine_parts import SPEC, STAND_IN, sample, take_two_versions, weights
from roost.errors import CallTimedOut, ClusterError, ConfigError, EngineFailed
from roost.rl.engine import EngineSpec
from roost.rl.engines import Prompt, Sample, SglangEngine, VersionSpan
from roost.rl.engines import sglang_engine as module
from roost.weights.safetensors import save_safetensors
from sockets import free_port
from waiting import is_gone, wait_until

pytestmark = pytest.mark.heavy

# The real start of the server, which finds the stand-in under SGLang's name.
PATHS = f"{Path(module.__file__).with_name('inside')}:{STAND_IN}"


@pytest.fixture
def model(tmp_path) -> Path:
    # As large models are: an index, and files that it names.
    save_safetensors(tmp_path / "model-1.safetensors", weights(1))
    index = {"weight_map": dict.fromkeys(weights(1), "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.fixture
def start(model) -> Iterator[Callable[..., SglangEngine]]:
    """Start an engine whose server misbehaves in some way, and wait until it is healthy."""
    engines = []

    def make(mode: str = "", *, wait: bool = True, rank: int = 0, **options: object) -> SglangEngine:
        engine = SglangEngine(model, environment={"PYTHONPATH": PATHS, "STAND_IN": mode}, **options)
        engines.append(engine)
        engine.start(replace(SPEC, port=free_port(), node_rank=rank, num_nodes=rank + 1))
        if wait:
            wait_until(engine.health, "it is healthy")
        return engine

    yield make
    for engine in engines:
        engine.stop()


@contextlib.contextmanager
def asked(engine: SglangEngine, state: str, **options: object) -> Iterator[list[Sample]]:
    """Ask for a sample, which is there after the block, when the request is waiting or held in the server."""
    got: list[Sample] = []
    thread = threading.Thread(target=lambda: got.append(sample(engine, **options)))
    thread.start()
    wait_until(lambda: engine._ask("/progress")[state], f"the request is {state}")
    yield got
    thread.join(60)
    assert got, "it was not answered"


def processes(engine: SglangEngine) -> list[psutil.Process]:
    watching = psutil.Process(engine._running()[1].pid)
    return [watching, *watching.children(recursive=True)]


def test_it_serves_each_version_that_it_takes(start):
    engine = start()
    staged = take_two_versions(engine)
    assert len(engine.generate(Prompt(tokens=(1,), n=3, max_tokens=1).to_json())["samples"]) == 3
    left = processes(engine)
    engine.stop()
    assert not staged.path.parent.exists()
    assert all(is_gone(one.pid) for one in left)
    with pytest.raises(ClusterError, match="the engine does not run"):
        engine.health()


@pytest.mark.parametrize(
    ("pause", "tokens", "finish"), [("keep", (1, 1, 1, 4, 4), "length"), ("abort", (1, 1, 1), "abort")]
)
def test_what_happens_to_requests_while_weights_change_is_the_users_choice(start, pause, tokens, finish):
    engine = start("hold", pause_mode=pause)
    with asked(engine, "held", max_tokens=5) as got:
        engine.update_weights(weights(4), 1)
    assert (got[0].tokens, got[0].finish) == (tokens, finish)
    assert got[0].versions == tuple(int(one == 4) for one in tokens)
    assert sample(engine).versions == (1, 1, 1), "it goes on"


def test_sglang_has_no_pause_that_lets_requests_finish():
    with pytest.raises(ConfigError, match="pause_mode is 'wait': it is keep or abort"):
        SglangEngine("/models/m", pause_mode="wait")
    with pytest.raises(ConfigError, match="weights_on is 'device': with SGLang it is host"):
        SglangEngine("/models/m", weights_on="device")


@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_requests_wait_while_it_has_no_memory(start, pause):
    engine = start(pause_mode=pause)
    engine.offload()
    engine.offload()
    with asked(engine, "waiting") as got:
        with pytest.raises(ClusterError, match="the engine is offloaded, and cannot take weights"):
            engine.update_weights(weights(2), 1)
        assert engine.health(), "an offloaded engine is healthy"
        assert got == []
        engine.onload()
        engine.onload()
    assert got[0].tokens == (1, 1, 1)


def test_a_server_that_does_not_start_is_known_at_once_with_its_output(start, capfd):
    engine = start("exit", wait=False)
    with pytest.raises(EngineFailed, match=r"the SGLang of engine 0 on 127\.0\.0\.1 ended with code 3"):
        wait_until(engine.health, "it is healthy")
    assert "Not enough memory" in capfd.readouterr().out


def test_a_server_that_cannot_prove_that_it_is_the_job_s_does_not_start(start, capfd):
    with pytest.raises(EngineFailed, match="ended with code 1"):
        wait_until(start("several", wait=False).health, "it fails")
    assert "with tokenizer_worker_num above 1 SGLang cannot prove" in capfd.readouterr().err


def test_a_server_that_does_not_say_which_weights_made_a_token_is_refused(start):
    with pytest.raises(EngineFailed, match=r"SGLang's answer lacks 'weight_versions'[\s\S]*before 0\.5\.23"):
        start("old")


def test_a_server_that_dies_in_an_update_is_named(start):
    engine = start("die-in-update")
    with pytest.raises(ClusterError, match="the SGLang of engine 0"):
        engine.update_weights(weights(2), 1)
    with pytest.raises(EngineFailed, match="ended with code 9"):
        wait_until(engine.health, "it is healthy")


def test_nothing_is_answered_with_weights_in_doubt(start):
    engine = start("refuse-once")
    with pytest.raises(ClusterError, match=r"answered 400: .*no such layer"):
        engine.update_weights(weights(2), 1)
    assert not engine.health()
    with asked(engine, "waiting") as got:
        engine.update_weights(weights(3), 2)
    assert (got[0].tokens, got[0].versions) == ((3, 3, 3), (2, 2, 2))
    assert engine.health()


def test_an_update_that_takes_too_long_is_named(start, monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS_SECONDS", 0.5)
    engine = start("hang-in-update")
    with pytest.raises(CallTimedOut, match=r"the SGLang of engine 0 has not answered in 0\.5 s"):
        engine.update_weights(weights(2), 1)
    assert not engine.health()


def test_an_update_is_done_when_a_step_came_after_it_and_the_version_is_right(start):
    engine = start("no-step")
    with pytest.raises(ClusterError, match="the SGLang of engine 0 answered 503"):
        engine.update_weights(weights(2), 3)
    engine.stop()
    engine = start("wrong-version")
    with pytest.raises(EngineFailed, match="engine 0 serves version 7777 after an update to 3"):
        engine.update_weights(weights(2), 3)
    assert not engine.health()


def test_other_nodes_of_an_engine_are_healthy_as_long_as_their_process_lives(start):
    engine = start(rank=1)
    engine.update_weights(weights(2), 1)
    engine.offload()
    engine.onload()
    assert engine.health()
    wait_until(lambda: len(processes(engine)) == 2, "its process runs")
    processes(engine)[-1].kill()
    with pytest.raises(EngineFailed, match="ended with code -9"):
        wait_until(lambda: not engine.health(), "it is not healthy")


def test_what_is_missing_is_said_before_the_start(model, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder /no/such on 127.0.0.1"):
        SglangEngine("/no/such").start(SPEC)
    with pytest.raises(ConfigError, match=r"has no package sglang[\s\S]*pip install 'sglang\[all\]'"):
        SglangEngine(model, environment={"PYTHONPATH": str(tmp_path)}).start(replace(SPEC, port=free_port()))


def test_the_secret_is_not_on_a_command_line(start):
    # The server answers only those who show it.
    engine = start()
    assert sample(engine).tokens == (1, 1, 1)
    words = [word for one in processes(engine) for word in one.cmdline()]
    assert "roost_sglang_serve" in words
    assert SPEC.secret not in words


KILLED = """
import sys, time
import test_sglang_engine as tests
engine = tests.SglangEngine(sys.argv[1], environment={"PYTHONPATH": tests.PATHS})
engine.start(tests.replace(tests.SPEC, port=tests.free_port(), secret=sys.argv[1]))
print(engine.accept().path, flush=True)
time.sleep(600)
"""


def test_a_worker_that_is_killed_leaves_no_weights_in_shared_memory(model):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    words = [sys.executable, "-c", KILLED, str(model)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stdout is not None
        path = Path(worker.stdout.readline().strip())
        assert path.exists()
        worker.kill()
    wait_until(lambda: not path.parent.exists(), "they are gone")


def words_of(spec: EngineSpec, **options: object) -> str:
    engine = SglangEngine("/models/m", **options)
    return " ".join(engine._command(spec, on_gpu=True)[0])


def test_the_command_line_follows_the_placement():
    alone = words_of(SPEC, python="python")
    assert alone == (
        "python -m roost_sglang_serve --model-path /models/m --host 127.0.0.1 --port 20300 --nccl-port 20301"
        " --tp-size 1 --pp-size 1 --weight-version 0 --log-level warning"
    )
    whole = replace(SPEC, num_nodes=2, num_devices=16, dist_init_addr="[fd00::1]:20302")
    first = words_of(whole, pipeline_parallel=2, can_sleep=True, options={"context_length": 4096, "log_level": None})
    assert "--tp-size 8 --pp-size 2" in first
    assert "--nnodes 2 --node-rank 0 --dist-init-addr [fd00::1]:20302" in first
    assert "--enable-memory-saver --enable-weights-cpu-backup --context-length 4096" in first
    assert "log-level" not in first
    second = words_of(replace(whole, node_rank=1, address="10.0.0.2", port=20400))
    assert "--tp-size 16 --pp-size 1" in second
    assert "--node-rank 1" in second
    assert "--host 10.0.0.2 --port 20400" in second


def test_the_server_gets_the_workers_devices_and_nothing_of_rays_or_the_trainers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    _, variables = SglangEngine("/m")._command(SPEC, on_gpu=True)
    assert variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF"} & {*variables}
    assert variables["ROOST_ENGINE_SECRET"] == SPEC.secret


def test_prompts_are_translated():
    prompt = Prompt(tokens=(7, 8), n=2, max_tokens=4, temperature=0.5, stop_token_ids=(9,))
    sampling = {"n": 2, "max_new_tokens": 4, "temperature": 0.5, "stop_token_ids": [9], "ignore_eos": False}
    assert SglangEngine.to_request(prompt) == {
        "input_ids": [7, 8],
        "sampling_params": sampling,
        "return_logprob": True,
    }
    seeded = SglangEngine.to_request(replace(prompt, n=1, seed=3))
    assert seeded["sampling_params"] == {**sampling, "n": 1, "sampling_seed": 3}


def test_what_sglang_cannot_be_asked_is_refused():
    for options, why in (
        ({"allowed_token_ids": (1,)}, "leave out allowed_token_ids"),
        ({"top_p": 0.9}, "log probabilities are those before it"),
        ({"seed": 1, "n": 2}, "the 2 samples would be alike"),
    ):
        with pytest.raises(ConfigError, match=why):
            SglangEngine.to_request(Prompt(tokens=(1,), **options))


# As the source of SGLang 0.5.23 makes them: fields that an engine does not read included.
ANSWERED = """
{"text": " a b c", "output_ids": [11, 12, 2],
 "meta_info": {"id": "f3", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 2, "weight_version": "4",
   "num_retractions": 1, "reasoning_tokens": 0, "completion_tokens": 3, "cached_tokens": 0, "e2e_latency": 0.2,
   "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
   "input_token_logprobs": [],
   "output_token_logprobs": [[-0.25, 11, null], [-1.5, 12, null], [-0.125, 2, null]]}}
"""
ABORTED = """
{"text": "", "output_ids": [],
 "meta_info": {"id": "f4", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
   "weight_version": "4", "e2e_latency": 0.1, "output_token_logprobs": [], "completion_tokens": 0}}
"""


def test_answers_are_translated():
    prompt = Prompt(tokens=(7, 8))
    stopped, aborted = SglangEngine.from_answer(prompt, json.loads(f"[{ANSWERED}, {ABORTED}]"))
    assert stopped == Sample(
        prompt=(7, 8),
        tokens=(11, 12, 2),
        logprobs=(-0.25, -1.5, -0.125),
        spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        finish="stop",
    )
    assert SglangEngine.from_answer(prompt, json.loads(ANSWERED)) == [stopped], "one is not in a list"
    assert (aborted.tokens, aborted.spans, aborted.finish) == ((), (), "abort")
    with pytest.raises(EngineFailed, match="SGLang's answer lacks 'meta_info'"):
        SglangEngine.from_answer(prompt, {"error": "no"})
