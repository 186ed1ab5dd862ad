"""The engine around a model of transformers: its tokens, log probabilities and versions are the model's own."""

from __future__ import annotations

import errno
import http.client
import json
import math
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from engine_parts import spec_here
from roost.comm.move.arrays import copy, cut
from roost.errors import ClusterError, ConfigError
from roost.rl.engine import RolloutEngine, check_engine_class
from roost.rl.engines import Prompt, Sample, TransformersEngine, VersionSpan
from roost.rl.engines.token_batch import Choice, TokenBatch
from roost.rl.rollout_engines import EngineWorker
from roost.weights.adapters import as_weights
from waiting import wait_until

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file

LONG = 60.0
SECRET = "the job's own"  # noqa: S105 - of the tests
OURS = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
PROMPTS = [(5, 6, 7), (11,), (3, 1, 4, 1, 5, 9, 2, 6), (300, 12)]
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}


def configuration(**changes):
    # Larger than by default, so that the model has opinions.
    values = {"initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None}
    return transformers.Qwen3Config(**SIZES, **HEADS, **(values | changes))


@pytest.fixture(autouse=True, scope="module")
def _one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models, each in a folder: version 0 and version 1."""
    folders = [tmp_path_factory.mktemp(f"model{version}") for version in range(2)]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(configuration()).save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def plain(models):
    """The same models, to compare with."""
    return [transformers.AutoModelForCausalLM.from_pretrained(folder).eval() for folder in models]


spec = partial(spec_here, SECRET)


@pytest.fixture
def aside():
    """Threads that run next to the test."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def start(models, aside):  # noqa: ARG001 - engines stop first, which ends what threads wait for
    """Starts engines, and stops them after the test."""
    engines = []

    def started(model=None, *, engine_rank=0, device="cpu", **options):
        engine = TransformersEngine(models[0] if model is None else model, device=device, **options)
        engines.append(engine)
        while True:
            try:
                engine.start(spec(engine_rank=engine_rank))
            except OSError as error:
                # Another program on this machine was quicker to take the port.
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return engine

    yield started
    for engine in engines:
        engine.stop(0)


class Gate:
    """Counts the forwards of an engine's model and their rows, and holds it before one of them."""

    def __init__(self, engine, hold_from=math.inf):
        self.rows = []
        self.hold_from = hold_from
        self.is_held = threading.Event()
        self.may_go = threading.Event()
        engine.accept().register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _model, _args, inputs):
        if len(self.rows) >= self.hold_from:
            self.is_held.set()
            assert self.may_go.wait(LONG)
        self.rows.append(len(inputs["input_ids"]))

    def wait(self):
        assert self.is_held.wait(LONG)

    def let_go(self):
        self.hold_from = math.inf
        self.may_go.set()


@pytest.fixture
def gate(start):  # noqa: ARG001 - gates open before engines stop
    """Puts a gate before the model of an engine, and opens it after the test."""
    gates = []

    def put(engine, hold_from=math.inf):
        gates.append(Gate(engine, hold_from))
        return gates[-1]

    yield put
    for one in gates:
        one.let_go()


def sequences_in(engine):
    return len(engine._generation._running) + len(engine._generation._waiting)


def ask(where, method, path, body=None, headers=OURS):
    connection = http.client.HTTPConnection(where.address, where.port, timeout=LONG)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def samples_of(engine, **options):
    return [Sample.from_json(one) for one in engine.generate(Prompt(**options))["samples"]]


def logprobs_of(model, sample, temperature=1.0, allowed=None):
    """What the model itself says of the tokens of a sample, all of them in one forward and without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sample.prompt + sample.tokens]), use_cache=False).logits[0]
    logits = logits[len(sample.prompt) - 1 : -1] / temperature
    if allowed is not None:
        others = [token for token in range(320) if token not in allowed]
        logits[:, others] = -torch.inf
    return logits.log_softmax(-1)


def assert_made_by(model, sample, **options):
    own = logprobs_of(model, sample, **options)
    taken = own[range(len(sample.tokens)), list(sample.tokens)]
    torch.testing.assert_close(torch.tensor(sample.logprobs), taken, atol=2e-5, rtol=1e-5)


# What it generates


def test_it_is_an_engine():
    assert check_engine_class(TransformersEngine) is TransformersEngine
    assert isinstance(TransformersEngine("folder"), RolloutEngine)


def test_greedy_tokens_and_their_logprobs_are_those_of_a_plain_forward(start, plain, aside, gate):
    engine = start()
    held = gate(engine, hold_from=0)
    options = [{"tokens": prompt, "max_tokens": 8 + 5 * row} for row, prompt in enumerate(PROMPTS)]
    asked = [aside.submit(samples_of, engine, temperature=0.0, **one) for one in options]
    held.wait()
    wait_until(lambda: sequences_in(engine) == len(PROMPTS), "all requests are there")
    held.let_go()
    for row, one in enumerate(asked):
        [sample] = one.result(LONG)
        assert (sample.prompt, sample.finish, len(sample.tokens)) == (PROMPTS[row], "length", 8 + 5 * row)
        assert sample.tokens == tuple(logprobs_of(plain[0], sample).argmax(-1).tolist())
        assert_made_by(plain[0], sample)
    assert len(PROMPTS) in held.rows
    assert len(held.rows) < sum(one["max_tokens"] for one in options)


def test_a_sequence_that_joins_and_leaves_changes_nothing_for_the_others(start, plain, aside, gate):
    engine = start()
    held = gate(engine, hold_from=4)
    first = aside.submit(samples_of, engine, tokens=(7,), max_tokens=20, temperature=0.0)
    held.wait()
    longer = aside.submit(samples_of, engine, tokens=tuple(range(1, 40)), n=2, max_tokens=3, temperature=0.0)
    wait_until(lambda: sequences_in(engine) == 3, "the second request waits")
    held.let_go()
    for one in (*first.result(LONG), *longer.result(LONG)):
        assert one.tokens == tuple(logprobs_of(plain[0], one).argmax(-1).tolist())
        assert_made_by(plain[0], one)
    assert 3 in held.rows


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LlamaConfig", {}),
        ("MistralConfig", {"sliding_window": 4}),
        ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_other_kinds_of_models_are_continued_as_a_plain_forward_does(start, aside, gate, kind, options):
    options = {"initializer_range": 0.15, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None} | options
    engine = start(getattr(transformers, kind)(**SIZES, **HEADS, **options))
    held = gate(engine, hold_from=0)
    asked = [aside.submit(samples_of, engine, tokens=prompt, max_tokens=9, seed=1) for prompt in PROMPTS]
    held.wait()
    wait_until(lambda: sequences_in(engine) == len(PROMPTS), "all requests are there")
    held.let_go()
    for one in asked:
        assert_made_by(engine.accept(), *one.result(LONG))
    assert len(PROMPTS) in held.rows


def test_a_model_with_a_state_is_refused():
    model = transformers.MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="MambaForCausalLM keeps a state, which cannot be padded"):
        TransformersEngine(model).start(spec())
    assert engine_threads() == []


def test_the_same_prompt_is_computed_once_for_all_its_samples(start, gate):
    engine = start()
    held = gate(engine)
    assert len(samples_of(engine, tokens=(1, 2), n=6, max_tokens=3)) == 6
    assert held.rows == [1, 6, 6]


def test_no_more_sequences_run_at_a_time_than_max_batch(start, plain, gate):
    engine = start(max_batch=2)
    held = gate(engine)
    for sample in samples_of(engine, tokens=(1, 2), n=5, max_tokens=4, seed=3):
        assert_made_by(plain[0], sample)
    assert max(held.rows) == 2


def test_logprobs_are_after_temperature_and_allowed_tokens(start, plain):
    engine = start()
    allowed = (4, 90, 91, 92, 250)
    [sample] = samples_of(engine, tokens=(5, 6), max_tokens=30, temperature=0.6, allowed_token_ids=allowed)
    assert set(sample.tokens) <= set(allowed)
    assert_made_by(plain[0], sample, temperature=0.6, allowed=allowed)


def test_top_p_leaves_the_most_probable_tokens_and_their_logprobs_sum_to_one(start, plain):
    engine = start()
    [sample] = samples_of(engine, tokens=(5, 6), max_tokens=60, temperature=0.8, top_p=0.5, seed=1)
    own = logprobs_of(plain[0], sample, temperature=0.8)
    was_cut = False
    for token, logprob, row in zip(sample.tokens, sample.logprobs, own, strict=True):
        ordered = row.exp().sort(descending=True)
        count = int((ordered.values.cumsum(0) < 0.5).sum()) + 1
        kept = ordered.indices[:count].tolist()
        assert token in kept
        assert logprob == pytest.approx(float(row[token] - row[kept].logsumexp(0)), abs=1e-4)
        was_cut = was_cut or count < 320
    assert was_cut


def test_tokens_are_drawn_as_often_as_they_are_probable(start, plain):
    engine = start()
    made = samples_of(engine, tokens=(5, 6), n=4000, max_tokens=1, seed=2)
    probabilities = logprobs_of(plain[0], made[0])[0].exp()
    counts = torch.bincount(torch.tensor([one.tokens[0] for one in made]), minlength=320)
    torch.testing.assert_close(counts / 4000, probabilities, atol=0.03, rtol=0)
    assert len({one.tokens for one in made}) > 20


def test_each_row_of_a_batch_is_drawn_in_its_own_way(plain):
    prefix = (5, 6)
    with torch.no_grad():
        own = plain[0](input_ids=torch.tensor([prefix])).logits[0, -1].log_softmax(-1)
    greedy = {"temperature": 0.0, "top_p": 0.1, "allowed": (), "number": 0.9}
    drawn = {"temperature": 1.0, "top_p": 1.0, "allowed": (7, 9), "number": 0.0}
    last = drawn | {"number": 1 - 2**-48}
    choices = [Choice(**one) for one in (greedy, drawn, last)]
    made = TokenBatch(plain[0]).start([prefix] * 3, choices)
    both = own[[7, 9]].log_softmax(0).tolist()
    assert [one.token for one in made] == [int(own.argmax()), 7, 9]
    assert [one.logprob for one in made] == pytest.approx([float(own.max()), *both], abs=1e-4)


def test_a_seed_gives_the_same_samples_and_no_two_samples_are_the_same(start):
    engine, other = start(), start(engine_rank=1)
    options = {"tokens": (5, 6), "n": 3, "max_tokens": 12}
    seeded = samples_of(engine, **options, seed=9)
    again = samples_of(other, **options, seed=9)
    assert [one.tokens for one in seeded] == [one.tokens for one in again]
    unseeded = [samples_of(one, **options) for one in (engine, engine, other)]
    assert len({one.tokens for made in (seeded, *unseeded) for one in made}) == 12


def test_samples_end_with_a_stop_token_or_the_end_of_text_unless_that_is_ignored(start, plain):
    def model():
        made = transformers.AutoModelForCausalLM.from_config(configuration())
        made.load_state_dict(plain[0].state_dict())
        made.generation_config.eos_token_id = [tokens[4], 319]
        return made

    options = {"tokens": (5, 6, 7), "max_tokens": 9, "seed": 1}
    [free] = samples_of(start(), **options)
    tokens = free.tokens
    assert len(set(tokens[:5])) == 5
    engine = start(model)
    [ended] = samples_of(engine, **options)
    assert (ended.tokens, ended.finish) == (tokens[:5], "stop")
    [stopped] = samples_of(engine, **options, stop_token_ids=(tokens[2],))
    assert (stopped.tokens, stopped.finish) == (tokens[:3], "stop")
    [ignored] = samples_of(engine, **options, ignore_eos=True)
    assert (ignored.tokens, ignored.finish) == (tokens, "length")


def test_random_weights_are_the_same_in_all_engines_with_a_seed(start):
    prompt = {"tokens": (5, 6), "max_tokens": 5, "temperature": 0.0}
    made = [
        samples_of(start(configuration(), seed=seed, engine_rank=rank), **prompt)[0].logprobs
        for rank, seed in enumerate((4, 4, 5))
    ]
    assert made[0] == made[1] != made[2]


def test_weights_have_the_type_that_is_asked_for(start):
    assert start(dtype="bfloat16").accept().dtype is torch.bfloat16
    assert start(configuration(), dtype="bfloat16").accept().dtype is torch.bfloat16


# Weights


def test_an_update_in_the_middle_goes_on_with_the_old_keys_and_says_so(start, models, plain, aside, gate):
    engine = start()
    held = gate(engine, hold_from=5)
    asked = aside.submit(samples_of, engine, tokens=(5, 6), max_tokens=12, temperature=0.0)
    held.wait()
    updated = aside.submit(engine.update_weights, load_file(models[1] / "model.safetensors"), 3)
    wait_until(lambda: engine._generation._is_paused, "the update waits for the step")
    held.let_go()
    updated.result(LONG)
    [sample] = asked.result(LONG)
    assert sample.spans == (VersionSpan(0, 0, 6), VersionSpan(3, 6, 12))
    assert engine.version == 3
    old_tokens = sample.prompt + sample.tokens
    with torch.no_grad():
        cache = plain[0](input_ids=torch.tensor([old_tokens[:7]]), use_cache=True).past_key_values
        logits = plain[1](input_ids=torch.tensor([old_tokens[7:-1]]), past_key_values=cache).logits[0]
    assert sample.tokens[6:] == tuple(logits.argmax(-1).tolist())
    taken = logits.log_softmax(-1)[range(6), list(sample.tokens[6:])]
    torch.testing.assert_close(torch.tensor(sample.logprobs[6:]), taken, atol=2e-5, rtol=1e-5)
    [new] = samples_of(engine, tokens=(5, 6), max_tokens=5)
    assert_made_by(plain[1], new)


@pytest.mark.parametrize("form", ["arrays", "file", "folder", "by link"])
def test_weights_come_as_arrays_as_a_file_or_by_a_link(start, models, plain, form):
    engine = start()
    file = models[1] / "model.safetensors"
    if form == "arrays":
        engine.update_weights({name: one.numpy() for name, one in load_file(file).items()}, 1)
    elif form == "by link":
        live = as_weights(engine.accept(), "accept").tensors()
        new = as_weights(plain[1], "offer").tensors()
        with engine.weights_changing(1):
            for name, one in live.items():
                copy(cut(one, (0,) * one.ndim, tuple(one.shape)), new[name].detach())
    else:
        engine.update_weights(file if form == "file" else str(models[1]), 1)
    [sample] = samples_of(engine, tokens=(5, 6, 7), max_tokens=10)
    assert sample.spans == (VersionSpan(1, 0, 10),)
    assert_made_by(plain[1], sample)


def test_tied_weights_are_given_once(start):
    engine = start(configuration(tie_word_embeddings=True))
    weights = dict(engine.accept().named_parameters())
    assert "lm_head.weight" not in weights
    engine.update_weights({name: torch.zeros_like(one) for name, one in weights.items()}, 1)
    assert not engine.accept().lm_head.weight.any()


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(start, models, plain):
    engine = start()
    good = load_file(models[1] / "model.safetensors")
    name = "model.norm.weight"
    for weights, message in [
        ({one: tensor for one, tensor in good.items() if one != name}, "model.norm.weight is missing"),
        (good | {name: torch.zeros(3)}, r"model.norm.weight has shape \[3\], not \[64\]"),
        (good | {"model.nrom.weight": torch.zeros(3)}, "model.nrom.weight is not in the model"),
        (7, "weights are tensors by name, or the path of a safetensors file, not int"),
        (models[0] / "none.safetensors", "none.safetensors cannot be read: .*No such file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.update_weights(weights, 1)
    with pytest.raises(ConfigError, match="a version is a whole number from 0 on, not True"):
        engine.update_weights(good, True)
    assert engine.health()
    assert engine.version == 0
    assert_made_by(plain[0], samples_of(engine, tokens=(5, 6), max_tokens=5)[0])


def test_an_update_that_breaks_off_makes_it_unhealthy_until_the_next(start, models):
    engine = start()
    with pytest.raises(RuntimeError, match="the link is cut"), engine.weights_changing(1):
        raise RuntimeError("the link is cut")
    assert ask(engine.spec, "GET", "/health") == (503, {"healthy": False})
    status, answer = ask(engine.spec, "POST", "/generate", {"tokens": [1]})
    assert (status, "the link is cut" in answer["error"]["message"]) == (503, True)
    engine.update_weights(models[1], 2)
    assert ask(engine.spec, "GET", "/health") == (200, {"healthy": True})
    assert ask(engine.spec, "GET", "/version") == (200, {"version": 2})


def test_weights_that_are_not_numbers_fail_requests_and_nothing_else(start):
    engine = start()
    engine.update_weights({name: one * math.nan for name, one in engine.accept().state_dict().items()}, 1)
    for temperature in (0.0, 1.0):
        with pytest.raises(ClusterError, match="the model's logits are not numbers"):
            samples_of(engine, tokens=(1,), temperature=temperature)
    assert engine.health()


def test_offloaded_in_the_middle_it_goes_on_where_it_was(start, plain, aside, gate):
    engine = start()
    held = gate(engine, hold_from=5)
    asked = aside.submit(samples_of, engine, tokens=(5, 6), n=2, max_tokens=12, seed=4)
    held.wait()
    offloaded = aside.submit(engine.offload)
    wait_until(lambda: engine._generation._is_paused, "the pause is asked for")
    held.let_go()
    offloaded.result(LONG)
    assert engine.health()
    assert ask(engine.spec, "POST", "/generate", {"tokens": [1]})[0] == 503
    forwards = len(held.rows)
    engine.offload()
    engine.onload()
    for sample in asked.result(LONG):
        assert sample.spans == (VersionSpan(0, 0, 12),)
        assert_made_by(plain[0], sample)
    # The keys and values of both were computed again, together.
    assert held.rows[forwards:] == [2] * 6
    assert samples_of(engine, tokens=(5, 6), max_tokens=2)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
def test_offloaded_it_leaves_the_device_and_comes_back_to_it(start):
    engine = start(device=None)
    first = samples_of(engine, tokens=(5, 6), max_tokens=3, seed=1)
    memory = torch.get_device_module().memory_allocated
    before, parameters = memory(), [*engine.accept().parameters()]
    size = sum(one.nbytes for one in parameters)
    for _ in range(2):
        engine.offload()
        assert {one.device.type for one in parameters} == {"cpu"}
        assert memory() <= before - size
        engine.onload()
        assert {one.device.type for one in engine.accept().parameters()} == {
            torch.accelerator.current_accelerator().type
        }
        assert samples_of(engine, tokens=(5, 6), max_tokens=3, seed=1) == first


def test_weights_arrive_while_it_is_offloaded(start, models, plain):
    engine = start()
    engine.offload()
    engine.update_weights(models[1], 5)
    engine.onload()
    [sample] = samples_of(engine, tokens=(5, 6), max_tokens=3)
    assert sample.versions == (5, 5, 5)
    assert_made_by(plain[1], sample)


# Its server and its life


def test_over_http_it_answers_the_same_as_without(start):
    engine = start(engine_rank=3)
    prompt = Prompt(tokens=(5, 6), n=2, max_tokens=4, seed=1)
    status, answer = ask(engine.spec, "POST", "/generate", prompt.to_json())
    assert status == 200
    assert answer["engine"] == 3
    assert [Sample.from_json(one) for one in answer["samples"]] == samples_of(engine, **prompt.to_json())
    assert ask(engine.spec, "GET", "/version") == (200, {"version": 0})


def test_without_the_secret_it_answers_nothing(start):
    engine = start()
    for method, path in (("POST", "/generate"), ("GET", "/health"), ("GET", "/version")):
        assert ask(engine.spec, method, path, headers={})[0] == 401


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        ([1], "not a prompt"),
        ({"tokens": [1], "max_token": 3}, "max_token"),
        ({"tokens": []}, "a prompt cannot have tokens"),
        ({"tokens": [1], "temperature": -1}, "a prompt cannot have temperature -1"),
        ({"tokens": [1, 320]}, "tokens are whole numbers from 0 to 319, not (1, 320)"),
        ({"tokens": [1], "stop_token_ids": ["a"]}, "stop_token_ids are whole numbers"),
        ({"tokens": [1], "allowed_token_ids": 3}, "allowed_token_ids are whole numbers"),
        ({"tokens": [1], "allowed_token_ids": [-1]}, "allowed_token_ids are whole numbers"),
        ({"tokens": [1], "seed": "x"}, "a seed is a whole number, not 'x'"),
        ({"tokens": [1], "max_tokens": 512}, "a prompt of 1 tokens and 512 more are too many: the model takes 512"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_wrong(start, body, message):
    status, answer = ask(start().spec, "POST", "/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_a_client_that_goes_away_ends_its_sequences(start, gate):
    engine = start()
    held = gate(engine, hold_from=3)
    body = json.dumps({"tokens": [1], "n": 2, "max_tokens": 250, "ignore_eos": True})
    connection = http.client.HTTPConnection(engine.spec.address, engine.spec.port, timeout=LONG)
    connection.request("POST", "/generate", body, OURS)
    held.wait()
    [request] = {sequence.request for sequence in engine._generation._running}
    connection.close()
    wait_until(request.answer.cancelled, "the request is cancelled")
    held.let_go()
    wait_until(lambda: not engine._generation._running, "its sequences have left")
    assert len(held.rows) < 10
    assert samples_of(engine, tokens=(1,), max_tokens=2)


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("roost engine")]


def test_stopped_while_it_generates_it_leaves_nothing(start, aside, gate):
    engine = start()
    where = engine.spec
    held = gate(engine, hold_from=3)
    asked = aside.submit(samples_of, engine, tokens=(1,), max_tokens=250)
    over_http = aside.submit(ask, where, "POST", "/generate", {"tokens": [2], "max_tokens": 250})
    held.wait()
    wait_until(lambda: sequences_in(engine) == 2, "both are there")
    stopped = aside.submit(engine.stop, 0)
    wait_until(lambda: engine._generation is None, "it stops")
    held.let_go()
    stopped.result(LONG)
    with pytest.raises(ClusterError, match="it was stopped"):
        asked.result(LONG)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        over_http.result(LONG)
    assert engine_threads() == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.address, where.port), timeout=LONG)
    for use in (lambda: engine.generate({"tokens": [1]}), engine.accept, engine.offload):
        with pytest.raises(ClusterError, match="it is not running"):
            use()
    assert not engine.health()
    engine.stop()
    engine.start(spec())
    assert samples_of(engine, tokens=(1,), max_tokens=2)


def test_a_request_under_way_may_finish_when_it_stops(start, aside, gate):
    engine = start()
    held = gate(engine, hold_from=2)
    over_http = aside.submit(ask, engine.spec, "POST", "/generate", {"tokens": [2], "max_tokens": 9})
    held.wait()
    stopped = aside.submit(engine.stop, LONG)
    wait_until(lambda: engine._generation is None, "it stops")
    held.let_go()
    stopped.result(LONG)
    assert over_http.result(LONG)[0] == 200


def test_a_port_that_is_in_use_is_an_error_and_leaves_nothing(start, models):
    first = start()
    before = engine_threads()
    second = TransformersEngine(models[0], device="cpu")
    with pytest.raises(OSError, match="in use"):
        second.start(spec(port=first.spec.port))
    second.stop()
    assert engine_threads() == before
    with pytest.raises(ClusterError, match="engine 0 is running already"):
        first.start(spec())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("no/such/folder", {}, "there is no model in no/such/folder: it has no config.json"),
        (7, {}, "7 is not a model"),
        (None, {"dtype": "bfloat61"}, "dtype is 'bfloat61'"),
        (None, {"dtype": "nn"}, "dtype is 'nn'"),
        (None, {"max_batch": 0}, "max_batch is 0"),
        (None, {"pause_mode": "stop"}, "pause_mode is 'stop': it is keep, wait or abort"),
    ],
)
def test_what_cannot_be_a_model_is_refused_and_leaves_nothing(models, model, options, message):
    with pytest.raises(ConfigError, match=message):
        TransformersEngine(models[0] if model is None else model, **options).start(spec())
    assert engine_threads() == []


def test_a_folder_without_weights_or_with_some_missing_is_refused(tmp_path, models):
    configuration().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be loaded[\s\S]*for random weights, give the configuration"):
        TransformersEngine(tmp_path).start(spec())
    weights = load_file(models[0] / "model.safetensors")
    del weights["model.norm.weight"]
    sys.modules["safetensors.torch"].save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"is not whole: it has no model\.norm\.weight"):
        TransformersEngine(tmp_path).start(spec())


@pytest.mark.parametrize("changes", [{"num_nodes": 2}, {"num_devices": 2}])
def test_an_engine_over_several_accelerators_is_refused(models, changes):
    with pytest.raises(ConfigError, match="TransformersEngine has one accelerator"):
        TransformersEngine(models[0]).start(spec(**changes))


def test_without_transformers_it_says_what_to_install(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs transformers[\s\S]*pip install torch transformers safetensors"):
        TransformersEngine(models[0]).start(spec())
    assert engine_threads() == []


def test_a_forward_without_memory_fails_its_requests_only(start):
    engine = start()

    def fill_memory(*_):
        hook.remove()
        raise torch.OutOfMemoryError("no memory")

    hook = engine.accept().register_forward_pre_hook(fill_memory)
    with pytest.raises(ClusterError, match="no memory left for 1 sequences"):
        samples_of(engine, tokens=(1,), n=3)
    assert engine.health()
    assert samples_of(engine, tokens=(1,), max_tokens=2)


def test_in_its_worker_it_serves_and_takes_weights(models, plain):
    worker = EngineWorker(TransformersEngine, (models[0],), {"device": "cpu"})
    try:
        assert worker.start_engine(spec()) == []
        assert worker.health()
        worker.update_weights(str(models[1]), 2)
        assert worker.served_version() == 2
        answer = worker.generate({"tokens": [5, 6], "max_tokens": 3})
        [sample] = [Sample.from_json(one) for one in answer["samples"]]
        assert sample.versions == (2, 2, 2)
        assert_made_by(plain[1], sample)
    finally:
        worker.stop()
    assert engine_threads() == []
