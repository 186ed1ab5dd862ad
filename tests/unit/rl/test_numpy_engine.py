"""The engine that needs no accelerator: its policy is right, and its server is a real one."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roost.rl
import roost.testing
from engine_parts import spec_here
from roost.errors import ClusterError, ConfigError
from roost.rl.engine import RolloutEngine, check_engine_class
from roost.testing import NumpyEngine, TinyPolicy
from routing import Held
from sockets import free_port
from waiting import wait_until

OBSERVATIONS = [[1.0, 0.0, -1.0, 0.5], [0.0, 2.0, 0.0, 0.0]]
LONG = 60.0
SECRET = "the job's own"  # noqa: S105 - of the tests
OURS = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}


spec = partial(spec_here, SECRET)


def ask(where, method, path, body=None, headers=OURS):
    connection = http.client.HTTPConnection(where.address, where.port, timeout=LONG)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def refuses(where):
    try:
        socket.create_connection((where.address, where.port), timeout=LONG).close()
    except ConnectionError:
        return True
    return False


@pytest.fixture
def start():
    """Starts engines, and stops them after the test."""
    engines = []

    def started(engine=None, **changes):
        engine = engine or NumpyEngine()
        engines.append(engine)
        while True:
            try:
                engine.start(spec(**changes))
            except OSError as error:
                # Another program on this machine was quicker to take the port.
                if "port" in changes or error.errno != errno.EADDRINUSE:
                    raise
            else:
                return engine

    yield started
    for engine in engines:
        engine.stop()


# The policy


def test_a_policy_gives_each_action_its_softmax_probability():
    policy = TinyPolicy({"w": [[1.0, 2.0], [0.0, -1.0]], "b": [0.5, 0.0]})
    assert policy.logits([[1.0, 1.0]]).tolist() == [[1.5, 1.0]]
    expected = np.exp([1.5, 1.0]) / np.exp([1.5, 1.0]).sum()
    np.testing.assert_allclose(policy.probabilities([[1.0, 1.0]]), [expected])


def test_large_logits_neither_overflow_nor_vanish():
    policy = TinyPolicy({"w": [[1e4, -1e4]], "b": [0.0, 0.0]})
    actions, logprobs = policy.sample([[1.0], [-1.0]], np.random.default_rng(0))
    assert actions.tolist() == [0, 1]
    assert logprobs.tolist() == [0.0, 0.0]


def test_random_policies_are_the_same_for_the_same_seed_only():
    first, again, other = (TinyPolicy.random(3, 2, seed).weights["w"] for seed in (1, 1, 2))
    assert first.shape == (3, 2)
    assert (first == again).all()
    assert (first != other).all()


def test_actions_are_drawn_as_often_as_they_are_probable():
    policy = TinyPolicy({"w": [[0.0, 1.0, -1.0]], "b": [0.2, 0.0, 0.3]})
    observations = np.ones((20000, 1))
    actions, logprobs = policy.sample(observations, np.random.default_rng(3))
    probabilities = policy.probabilities(observations)
    np.testing.assert_allclose(np.bincount(actions) / 20000, probabilities[0], atol=0.02)
    np.testing.assert_allclose(np.exp(logprobs), probabilities[np.arange(20000), actions])


def numbers(*shape):
    size = int(np.prod(shape))
    values = st.lists(st.floats(-2, 2), min_size=size, max_size=size)
    return values.map(lambda flat: np.array(flat).reshape(shape))


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_the_gradient_is_the_slope_of_the_objective(data, features, actions, batch):
    policy = TinyPolicy({"w": data.draw(numbers(features, actions)), "b": data.draw(numbers(actions))})
    observations, advantages = data.draw(numbers(batch, features)), data.draw(numbers(batch))
    taken = np.array(data.draw(st.lists(st.integers(0, actions - 1), min_size=batch, max_size=batch)))

    def objective(weights):
        chosen = TinyPolicy(weights).probabilities(observations)[np.arange(batch), taken]
        return (advantages * np.log(chosen)).mean()

    gradient = policy.gradient(observations, taken, advantages)
    step = 1e-5
    for name, array in policy.weights.items():
        for place in np.ndindex(array.shape):
            up, down = policy.weights, policy.weights
            up[name][place] += step
            down[name][place] -= step
            slope = (objective(up) - objective(down)) / (2 * step)
            assert gradient[name][place] == pytest.approx(slope, abs=1e-6)


def test_steps_up_the_gradient_teach_the_action_that_pays():
    policy, rng = TinyPolicy.random(2, 2, seed=0), np.random.default_rng(0)
    observations = np.array([[1.0, 0.0], [0.0, 1.0]] * 32)
    right = np.array([0, 1] * 32)
    before = policy.probabilities(observations)[np.arange(64), right].mean()
    for _ in range(50):
        actions, _ = policy.sample(observations, rng)
        policy.apply(policy.gradient(observations, actions, (actions == right) - 0.5), lr=2.0)
    assert before < 0.6
    assert policy.probabilities(observations)[np.arange(64), right].min() > 0.9


def test_weights_are_copied_both_ways():
    policy = TinyPolicy.random(2, 2)
    mine = policy.weights
    mine["w"][:] = 7.0
    assert (policy.weights["w"] != 7.0).all()
    policy.weights = mine
    mine["w"][:] = 8.0
    assert (policy.weights["w"] == 7.0).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"w": np.zeros((3, 2)), "b": np.zeros(2)}, r"shapes \(3, 2\) and \(2,\), not \(2, 2\) and \(2,\)"),
        ({"w": np.zeros((2, 2)), "b": np.zeros(3)}, r"shapes \(2, 2\) and \(3,\), not \(2, 2\) and \(2,\)"),
        ({"w": np.zeros((2, 2))}, "are w and b, not w"),
        ({"w": np.zeros((2, 2)), "b": np.zeros(2), "c": 1}, "are w and b, not b, c and w"),
        ({"w": [[1, 2], [3]], "b": [0, 0]}, "the weights w are rows of different lengths"),
        ({"w": [["1", "2"], ["3", "4"]], "b": [0, 0]}, "the weights w are not all numbers"),
        ({"w": np.full((2, 2), np.nan), "b": [0, 0]}, "the weights w are not all finite numbers"),
        ([1, 2], r"are w and b, not \[1, 2\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(weights, message):
    policy = TinyPolicy.random(2, 2)
    before = policy.weights
    with pytest.raises(ConfigError, match=message):
        policy.weights = weights
    assert (policy.weights["w"] == before["w"]).all()


@pytest.mark.parametrize(
    ("actions", "advantages"),
    [([0], [1.0, 1.0]), ([0, 1], [1.0]), ([0, 2], [1.0, 1.0]), ([0, -1], [1.0, 1.0]), ([0, 0.5], [1.0, 1.0])],
)
def test_a_gradient_of_what_does_not_belong_together_is_refused(actions, advantages):
    with pytest.raises(ConfigError, match="action"):
        TinyPolicy.random(1, 2).gradient([[1.0], [2.0]], actions, advantages)


@pytest.mark.parametrize(("features", "actions"), [(0, 2), (2, 0), (1.5, 2)])
def test_a_policy_without_features_or_actions_is_refused(features, actions):
    with pytest.raises(ConfigError, match="at least one feature and one action"):
        TinyPolicy.random(features, actions)


# The engine


def test_it_is_an_engine():
    assert check_engine_class(NumpyEngine) is NumpyEngine
    assert isinstance(NumpyEngine(), RolloutEngine)


def test_it_serves_at_exactly_its_address_and_port(start):
    engine = start(engine_rank=3)
    assert ask(engine.spec, "GET", "/health") == (200, {"healthy": True})
    status, answer = ask(engine.spec, "POST", "/generate", {"observations": OBSERVATIONS, "seed": 5})
    assert status == 200
    assert (answer["version"], answer["engine"]) == (0, 3)
    actions, logprobs = TinyPolicy.random(4, 2, 0).sample(OBSERVATIONS, np.random.default_rng(5))
    assert answer["actions"] == actions.tolist()
    np.testing.assert_allclose(answer["logprobs"], logprobs)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", engine.spec.port), timeout=LONG)


def test_it_serves_on_ipv6_too(start):
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    engine = start(address="::1", port=port)
    assert ask(engine.spec, "GET", "/version") == (200, {"version": 0})


def test_a_port_that_another_engine_has_is_in_use(start):
    first, second = start(), NumpyEngine()
    with pytest.raises(OSError, match=r"in use") as raised:
        second.start(spec(port=first.spec.port))
    assert raised.value.errno == errno.EADDRINUSE
    assert not second.health()
    assert ask(first.spec, "GET", "/health")[0] == 200


def test_without_http_it_answers_the_same_as_with(start):
    engine = start()
    request = {"observations": OBSERVATIONS, "seed": 11}
    assert ask(engine.spec, "POST", "/generate", request) == (200, engine.generate(request))


def test_without_a_seed_actions_differ_from_time_to_time_and_from_engine_to_engine(start):
    engines = [start(engine_rank=rank) for rank in range(2)]
    request = {"observations": [[0.0] * 4] * 64}
    drawn = {tuple(engine.generate(request)["actions"]) for engine in engines for _ in range(2)}
    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "there are no observations"),
        ([1], "there are no observations"),
        ({"observations": []}, "one or more rows of 4 numbers"),
        ({"observations": [[1.0, 2.0]]}, "one or more rows of 4 numbers"),
        ({"observations": [1.0, 2.0, 3.0, 4.0]}, "one or more rows of 4 numbers"),
        ({"observations": [[1.0, 2.0, 3.0, "x"]]}, "not all numbers"),
        ({"observations": [[1.0, 2.0, 3.0, None]]}, "not all numbers"),
        ({"observations": [[1.0, 2.0, 3.0, float("nan")]]}, "not all finite"),
        ({"observations": [[1e308] * 4]}, "so large"),
        ({"observations": [[1.0], [2.0, 3.0]]}, "rows of different lengths"),
        ({"observations": OBSERVATIONS, "seed": -1}, "a seed is a whole number"),
        ({"observations": OBSERVATIONS, "seed": "7"}, "a seed is a whole number"),
        ({"observations": OBSERVATIONS, "sead": 7}, "a request has no sead"),
    ],
)
def test_a_bad_request_is_refused_with_what_is_expected(start, request_, message):
    # Weights that add up, so that what is too large for a float shows.
    engine = start(NumpyEngine())
    engine.update_weights({"w": np.full((4, 2), 3.0), "b": np.zeros(2)}, version=1)
    with pytest.raises(ConfigError, match=message):
        engine.generate(request_)
    status, answer = ask(engine.spec, "POST", "/generate", request_)
    assert status == 400
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100000])
def test_a_body_that_is_not_json_is_refused(start, body):
    status, answer = ask(start().spec, "POST", "/generate", body)
    assert status == 400
    assert "the body is not JSON" in answer["error"]["message"]


def test_what_it_does_not_know_is_not_found(start):
    engine = start()
    for method, path in (("GET", "/generate"), ("POST", "/health"), ("GET", "/"), ("PUT", "/nothing")):
        status, answer = ask(engine.spec, method, path)
        assert (status, answer["error"]["message"]) == (404, f"there is no {method} {path}")


def test_weights_can_be_updated_over_http(start):
    engine = start()
    weights = {"w": np.zeros((4, 2)).tolist(), "b": [50.0, 0.0]}
    assert ask(engine.spec, "POST", "/update_weights", {"weights": weights, "version": 9}) == (200, {"version": 9})
    assert ask(engine.spec, "GET", "/version") == (200, {"version": 9})
    answer = engine.generate({"observations": OBSERVATIONS})
    assert (answer["actions"], answer["version"]) == ([0, 0], 9)


WEIGHTS = {"weights": {"w": np.zeros((4, 2)).tolist(), "b": [50.0, 0.0]}, "version": 77}


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (401, {"Content-Type": "application/json"}),
        (401, OURS | {"Authorization": "Bearer guess"}),
        (403, OURS | {"Origin": "http://evil.example"}),
        (403, OURS | {"Host": "evil.example"}),
        (415, OURS | {"Content-Type": "text/plain"}),
    ],
)
def test_a_stranger_can_neither_replace_the_weights_nor_use_them(start, status, headers):
    engine = start()
    assert ask(engine.spec, "POST", "/update_weights", WEIGHTS, headers)[0] == status
    assert engine.version == 0
    if status != 415:
        for method, path in (("POST", "/generate"), ("GET", "/health"), ("GET", "/version")):
            assert ask(engine.spec, method, path, {"observations": OBSERVATIONS}, headers)[0] == status


def test_the_secret_of_an_engine_does_not_show():
    assert SECRET not in repr(spec())
    assert SECRET not in str(spec())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"version": 1}, "the body is"),
        ([], "the body is"),
        ({"weights": {"w": [[1.0]], "b": [1.0]}, "version": 1}, "have shapes"),
        ({"weights": {"w": np.zeros((4, 2)).tolist(), "b": [0.0, 0.0]}, "version": "1"}, "a version is"),
        ({"weights": {"w": np.zeros((4, 2)).tolist(), "b": [0.0, 0.0]}, "version": -1}, "a version is"),
    ],
)
def test_weights_that_cannot_be_taken_change_nothing(start, body, message):
    engine = start()
    before = engine.generate({"observations": OBSERVATIONS, "seed": 1})
    status, answer = ask(engine.spec, "POST", "/update_weights", body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert engine.generate({"observations": OBSERVATIONS, "seed": 1}) == before


def test_every_answer_is_of_one_version_while_weights_are_updated(start):
    engine = start(NumpyEngine(features=1, actions=2))
    request = {"observations": [[1.0]] * 8}

    def weights(version):
        # Even versions always pick action 0, odd ones action 1.
        return {"w": [[0.0, 0.0]], "b": [80.0, -80.0] if version % 2 == 0 else [-80.0, 80.0]}

    engine.update_weights(weights(0), 0)
    over = threading.Event()

    def keep_asking():
        answers = []
        while not over.is_set():
            answers.append(engine.generate(request))
        return answers

    with ThreadPoolExecutor(max_workers=4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(3)]
        for version in range(1, 300):
            engine.update_weights(weights(version), version)
        over.set()
        answers = [answer for one in asking for answer in one.result(LONG)]
    assert answers
    for answer in answers:
        assert answer["actions"] == [answer["version"] % 2] * 8


def test_an_offloaded_engine_stays_up_and_serves_nothing(start):
    engine = start()
    request = {"observations": OBSERVATIONS}
    engine.offload()
    assert engine.health()
    assert ask(engine.spec, "GET", "/health")[0] == 200
    status, answer = ask(engine.spec, "POST", "/generate", request)
    assert (status, answer["error"]["message"]) == (503, "the engine does not serve: it is offloaded")
    with pytest.raises(ClusterError, match="offloaded"):
        engine.generate(request)
    engine.onload()
    assert ask(engine.spec, "POST", "/generate", request)[0] == 200


def test_an_engine_that_takes_long_to_load_listens_and_is_not_healthy_yet(start):
    slow = start(NumpyEngine(start_seconds=3600))
    assert not slow.health()
    assert ask(slow.spec, "GET", "/health") == (503, {"healthy": False})
    status, answer = ask(slow.spec, "POST", "/generate", {"observations": OBSERVATIONS})
    assert (status, answer["error"]["message"]) == (503, "the engine does not serve: it is starting")
    quick = start(NumpyEngine(start_seconds=0.1))
    wait_until(quick.health, "the engine is loaded")
    assert ask(quick.spec, "GET", "/health")[0] == 200


def test_other_nodes_of_an_engine_have_no_server_and_are_healthy():
    where = spec(node_rank=1, num_nodes=2)
    engine = NumpyEngine()
    engine.start(where)
    assert engine.health()
    assert engine.spec == where
    with pytest.raises(ConnectionRefusedError):
        ask(where, "GET", "/health")
    with pytest.raises(ClusterError, match="node 1 of engine 0 has no server"):
        engine.generate({"observations": OBSERVATIONS})
    engine.stop()
    assert not engine.health()


def test_it_stops_twice_and_starts_again_at_the_same_place(start):
    engine = start()
    where = engine.spec
    assert ask(where, "GET", "/health")[0] == 200
    with pytest.raises(ClusterError, match="engine 0 is running already"):
        engine.start(where)
    engine.stop()
    engine.stop()
    assert not engine.health()
    with pytest.raises(ClusterError, match="it is not running"):
        engine.generate({"observations": OBSERVATIONS})
    with pytest.raises(ConnectionRefusedError):
        ask(where, "GET", "/health")
    engine.start(where)
    assert ask(where, "GET", "/health")[0] == 200


def test_stopping_ends_connections_that_are_kept_open_and_all_threads(start):
    engine = start(engine_rank=77)
    connections = [http.client.HTTPConnection("127.0.0.1", engine.spec.port, timeout=LONG) for _ in range(3)]
    for connection in connections:
        connection.request("GET", "/health", headers=OURS)
        connection.getresponse().read()

    def threads():
        return [thread.name for thread in threading.enumerate() if "engine 77" in thread.name]

    assert threads() == ["roost engine 77"], "one thread for all connections"
    engine.stop()
    wait_until(lambda: not threads(), "no thread is left")
    for connection in connections:
        assert connection.sock.recv(1) == b""
        connection.close()


def test_a_request_in_flight_is_still_answered_when_the_engine_stops(start):
    engine = start(Held())
    where = engine.spec
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, where, "POST", "/generate", {"observations": OBSERVATIONS})
        assert engine.asked.wait(LONG)
        stopping = pool.submit(engine.stop, LONG)
        wait_until(lambda: refuses(where), "the engine takes no more requests")
        engine.go.set()
        assert asked.result(LONG)[0] == 200
        stopping.result(LONG)


def test_a_request_that_takes_too_long_is_broken_off_when_the_engine_stops(start):
    engine = start(Held())
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, engine.spec, "POST", "/generate", {"observations": OBSERVATIONS})
        assert engine.asked.wait(LONG)
        stopping = pool.submit(engine.stop, 0.0)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            asked.result(LONG)
        engine.go.set()
        stopping.result(LONG)


# Imports


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=False)


def test_importing_roost_testing_and_roost_rl_loads_neither_numpy_nor_aiohttp():
    done = run_python("import sys, roost.testing, roost.rl, roost.rl.flags; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"aiohttp", "numpy"}


@pytest.mark.parametrize("name", ["roost.rl.RolloutManager", "roost.rl.Router", "roost.testing.NumpyEngine"])
def test_without_aiohttp_the_error_names_the_extra_to_install(name):
    module, _, attribute = name.rpartition(".")
    done = run_python(f"import sys; sys.modules['aiohttp'] = None\nfrom {module} import {attribute}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "ImportError: the router and NumpyEngine need aiohttp: pip install 'roost[rl]'"
    )


def test_the_toy_engine_is_not_in_roost_rl():
    assert not {"NumpyEngine", "TinyPolicy"} & set(roost.rl.__all__)
    with pytest.raises(AttributeError, match="attribute NumpyEngine"):
        roost.rl.NumpyEngine  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError, match="attribute nothing"):
        roost.testing.nothing  # noqa: B018 - the access is the test
