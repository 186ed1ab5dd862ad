"""vLLM as an engine: its command line, its requests and answers, and bad days, with a stand-in for the server."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine_parts import SPEC, STAND_IN, sample, take_two_versions, weights
from roost.errors import CallTimedOut, ClusterError, ConfigError, EngineFailed
from roost.rl.engine import EngineSpec
from roost.rl.engines import Prompt, Sample, VllmEngine
from roost.rl.engines import vllm_engine as module
from roost.weights.safetensors import save_safetensors
from sockets import free_port
from waiting import is_gone, wait_until

pytestmark = pytest.mark.heavy


@pytest.fixture
def model(tmp_path) -> Path:
    save_safetensors(tmp_path / "model.safetensors", weights(1))
    return tmp_path


@pytest.fixture
def start(model) -> Iterator[Callable[..., VllmEngine]]:
    """Start an engine whose server misbehaves in some way, and wait until it is healthy."""
    engines = []

    def make(mode: str = "", seconds: float = 0.0, *, wait: bool = True, **options: object) -> VllmEngine:
        environment = {"PYTHONPATH": str(STAND_IN), "STAND_IN": mode, "STAND_IN_SECONDS": str(seconds)}
        engine = VllmEngine(model, environment=environment, **options)
        engines.append(engine)
        engine.start(replace(SPEC, port=free_port()))
        if wait:
            wait_until(engine.health, "it is healthy")
        return engine

    yield make
    for engine in engines:
        engine.stop()


def test_it_serves_each_version_that_it_takes(start):
    engine = start()
    staged = take_two_versions(engine)
    engine.offload()
    engine.onload()
    engine.stop()
    assert not staged.path.exists()
    with pytest.raises(ClusterError, match="the engine does not run"):
        engine.health()


@pytest.mark.parametrize(
    ("pause", "tokens", "finish"), [("keep", (1, 4), "length"), ("wait", (1,), "length"), ("abort", (1,), "abort")]
)
def test_what_happens_to_requests_while_weights_change_is_the_users_choice(start, pause, tokens, finish):
    engine = start(seconds=0.02, pause_mode=pause)
    got: list[Sample] = []
    thread = threading.Thread(target=lambda: got.append(sample(engine, max_tokens=40)))
    thread.start()
    wait_until(lambda: engine._ask("/health") == {}, "it answers")
    # Some tokens are made by then.
    threading.Event().wait(0.3)
    engine.update_weights(weights(4), 1)
    thread.join(60)
    assert (tuple(dict.fromkeys(got[0].tokens)), got[0].finish) == (tokens, finish)
    assert set(got[0].versions) == ({0, 1} if pause == "keep" else {0})
    assert sample(engine).versions == (1, 1, 1), "it goes on"


def test_a_server_that_does_not_start_is_known_at_once_with_its_output(start, capfd):
    engine = start("exit", wait=False)
    with pytest.raises(EngineFailed, match=r"the vLLM of engine 0 on 127\.0\.0\.1 ended with code 3"):
        wait_until(engine.health, "it is healthy")
    assert "not enough memory for the cache" in capfd.readouterr().out


def test_a_server_that_dies_in_an_update_is_named(start):
    engine = start("die-in-update")
    with pytest.raises(ClusterError, match="the vLLM of engine 0"):
        engine.update_weights(weights(2), 1)
    with pytest.raises(EngineFailed, match="ended with code 9"):
        wait_until(engine.health, "it is healthy")


def ask_aside(engine: VllmEngine) -> tuple[threading.Thread, list[Sample]]:
    """Ask for a sample next to the test, which has arrived at the server."""
    got: list[Sample] = []
    thread = threading.Thread(target=lambda: got.append(sample(engine)))
    thread.start()
    wait_until(lambda: engine._ask("/progress")["active"], "the request is there")
    return thread, got


def test_nothing_is_answered_with_weights_in_doubt(start):
    engine = start("refuse-once")
    with pytest.raises(ClusterError, match=r"answered 500: .*no such layer"):
        engine.update_weights(weights(2), 1)
    assert not engine.health()
    thread, got = ask_aside(engine)
    assert engine._ask("/progress")["paused"]
    engine.update_weights(weights(3), 2)
    thread.join(60)
    assert (got[0].tokens, got[0].versions) == ((3, 3, 3), (2, 2, 2))
    assert engine.health()


def test_an_engine_with_weights_in_doubt_does_not_wake_up_with_them(start):
    engine = start("refuse-once")
    with pytest.raises(ClusterError, match="no such layer"):
        engine.update_weights(weights(2), 1)
    engine.offload()
    with pytest.raises(ClusterError, match=r"the weights of the engine are in doubt[\s\S]*restart it"):
        engine.onload()


def test_an_update_whose_end_is_not_known_leaves_weights_in_doubt(start, monkeypatch):
    engine = start("hang-once")
    with monkeypatch.context() as patch:
        patch.setattr(module, "WEIGHTS_SECONDS", 0.5)
        with pytest.raises(CallTimedOut, match=r"the vLLM of engine 0 has not answered in 0\.5 s"):
            engine.update_weights(weights(2), 1)
    assert not engine.health()
    assert engine._ask("/progress")["paused"]
    engine.update_weights(weights(3), 2)
    assert (engine.health(), sample(engine).versions) == (True, (2, 2, 2))


def test_an_update_that_did_not_begin_lets_requests_go_on(start):
    engine = start("refuse-start")
    with pytest.raises(ClusterError, match="answered 500"):
        engine.update_weights(weights(2), 1)
    assert (engine.health(), sample(engine).versions) == (True, (0, 0, 0))


def test_a_server_that_reports_another_version_is_not_trusted(start):
    engine = start("wrong-version", wait=False)
    wait_until(engine.health, "it is healthy")
    with pytest.raises(EngineFailed, match="engine 0 serves version 7777 after an update to 3"):
        engine.update_weights(weights(2), 3)
    assert not engine.health()
    assert engine._ask("/progress")["paused"]


def test_weights_that_do_not_fit_are_refused_before_anything_changes(start):
    engine = start()
    for wrong, names in (
        ({**weights(2), "more": np.zeros(1)}, "more"),
        ({**weights(2), "embed": np.zeros(2)}, "embed"),
    ):
        with pytest.raises(ConfigError, match=f"the weights do not fit the model: {names}"):
            engine.update_weights(wrong, 1)
    with pytest.raises(ConfigError, match="weights are arrays by name, or a path, not int"):
        engine.update_weights(3, 1)
    assert sample(engine).versions == (0, 0, 0)


def test_no_process_of_the_server_is_left(start, capfd):
    engine = start("child")
    child = int(capfd.readouterr().out.split("child ")[1].split()[0])
    assert psutil.pid_exists(child)
    engine.stop()
    assert is_gone(child)


def test_what_is_missing_is_said_before_the_start(model, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder /no/such on 127.0.0.1"):
        VllmEngine("/no/such").start(SPEC)
    with pytest.raises(ConfigError, match=r"has no package vllm[\s\S]*pip install vllm"):
        VllmEngine(model, environment={"PYTHONPATH": str(tmp_path)}).start(replace(SPEC, port=free_port()))
    with pytest.raises(ConfigError, match="the interpreter /no/python cannot be run: No such file"):
        VllmEngine(model, python="/no/python").start(replace(SPEC, port=free_port()))
    with pytest.raises(ConfigError, match="pause_mode is 'stop': it is keep, wait or abort"):
        VllmEngine(model, pause_mode="stop")
    with pytest.raises(ConfigError, match="weights_on is 'disk': with vLLM it is host or device"):
        VllmEngine(model, weights_on="disk")
    with pytest.raises(ConfigError, match="engine 0 has 2 nodes, and weights on a device reach one"):
        VllmEngine(model, weights_on="device").start(replace(SPEC, num_nodes=2))


def test_weights_on_a_device_need_one(start):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one: tests/ray/test_engines.py")
    engine = start(weights_on="device")
    with pytest.raises(ConfigError, match="torch finds no CUDA device for the weights"):
        engine.update_weights(weights(2), 1)
    assert sample(engine).versions == (0, 0, 0)


def test_an_engine_that_sleeps_takes_no_weights_and_can_be_told_twice(start):
    engine = start()
    for _ in range(2):
        engine.offload()
    with pytest.raises(ClusterError, match="the engine is offloaded, and cannot take weights"):
        engine.update_weights(weights(2), 1)
    for _ in range(2):
        engine.onload()
    engine.update_weights(weights(2), 1)
    assert sample(engine).tokens == (2, 2, 2)


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(model):
    with socket.create_server(("127.0.0.1", free_port())) as other, pytest.raises(OSError, match="is in use"):
        VllmEngine(model).start(replace(SPEC, port=other.getsockname()[1]))


def words_of(spec: EngineSpec, on_gpu: bool = True, **options: object) -> str:
    engine = VllmEngine("/models/m", python="python", **options)
    command, _ = engine._command(spec, on_gpu=on_gpu)
    return " ".join(command)


def test_the_command_line_follows_the_placement():
    alone = words_of(SPEC)
    assert alone.startswith("python -m roost_vllm_serve serve /models/m --tensor-parallel-size 1")
    assert "--host 127.0.0.1 --port 20300 --middleware roost_proof.Lock" in alone
    assert "nnodes" not in alone
    whole = replace(SPEC, num_nodes=2, num_devices=16, dist_init_addr="[fd00::1]:20302")
    first = words_of(whole, pipeline_parallel=2, can_sleep=True, options={"max_model_len": 4096, "logprobs_mode": None})
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in first
    assert "--nnodes 2 --node-rank 0 --master-addr fd00::1 --master-port 20302" in first
    assert "--enable-sleep-mode --max-model-len 4096" in first
    assert "logprobs-mode" not in first
    second = words_of(replace(whole, node_rank=1))
    assert "--node-rank 1" in second
    assert "--headless" in second
    assert "--port 20300" not in second


def test_the_server_gets_the_workers_devices_and_nothing_of_rays(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    _, variables = VllmEngine("/m", environment={"VLLM_LOGGING_LEVEL": "INFO"})._command(SPEC, on_gpu=True)
    assert variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert "RAY_ADDRESS" not in variables
    assert variables["PYTHONPATH"].endswith("rl/engines/inside")
    assert variables["VLLM_LOGGING_LEVEL"] == "INFO"
    assert variables["ROOST_ENGINE_SECRET"] == SPEC.secret
    assert os.environ["RAY_ADDRESS"], "this process keeps its own"


def test_prompts_and_answers_are_translated():
    prompt = Prompt(tokens=(7,), n=2, max_tokens=4, temperature=0.5, stop_token_ids=(9,), seed=3)
    assert VllmEngine.to_request(prompt) == {
        "token_ids": [7],
        "sampling_params": {
            "n": 2,
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": 1.0,
            "stop_token_ids": (9,),
            "ignore_eos": False,
            "seed": 3,
            "logprobs": 0,
            "detokenize": False,
        },
    }
    with pytest.raises(ClusterError, match="vLLM's answer lacks 'weight_versions'"):
        VllmEngine.from_answer(prompt, {"choices": [{"token_ids": [], "logprobs": {"content": []}}]})
    for wrong in ({"tokens": ()}, {"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}):
        with pytest.raises(ConfigError, match="a prompt cannot have"):
            Prompt(**{"tokens": (1,), **wrong})
    with pytest.raises(ConfigError, match="not a prompt"):
        Prompt.from_json({"tokens": [1], "max_token": 3})
    assert Prompt.from_json(prompt.to_json()) == prompt
