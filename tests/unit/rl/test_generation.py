"""The thread that continues sequences: who runs with whom, which version made which token, and what a pause does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from roost.errors import CallTimedOut, ClusterError
from roost.rl.engines import Prompt, VersionSpan
from roost.rl.engines import generation as generation_module
from roost.rl.engines.generation import Generation
from roost.rl.engines.token_batch import Drawn
from waiting import wait_until

LONG = 60.0


class CountingBatch:
    """Draws 0, 1, 2, … for each row, which is its length after the prompt; a test holds it before a step."""

    def __init__(self):
        self.rows = []
        self.steps = []
        """The rows after each step: the prompt's first token, and how many were drawn."""
        self.hold_from = 10**9
        self.is_held = threading.Event()
        self.may_go = threading.Event()
        self.error = None

    def start(self, prefixes, choices):
        new = [[prefix[0], sum(one >= 1000 for one in prefix)] for prefix in prefixes]
        drawn = self._draw(new, choices)
        self.rows += new
        return drawn

    def step(self, tokens, choices):
        assert list(tokens) == [999 + count for _, count in self.rows]
        return self._draw(self.rows, choices)

    def keep(self, rows):
        self.rows = [self.rows[row] for row in rows]

    def clear(self):
        self.rows = []

    def _draw(self, rows, choices):
        assert len(rows) == len(choices)
        if len(self.steps) >= self.hold_from:
            self.is_held.set()
            assert self.may_go.wait(LONG)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for row in rows:
            row[1] += 1
        self.steps.append([tuple(row) for row in rows])
        return [Drawn(999 + count, -0.5) for _, count in rows]

    def hold(self, after):
        """Stop before the step after so many."""
        self.is_held.clear()
        self.may_go.clear()
        self.hold_from = after

    def let_go(self):
        self.hold_from = 10**9
        self.may_go.set()


@pytest.fixture
def batch():
    return CountingBatch()


@pytest.fixture
def make(batch):
    """Starts generations, and ends them after the test."""
    made = []

    def started(pause_mode="keep", max_batch=8):
        made.append(Generation(batch, max_batch=max_batch, pause_mode=pause_mode, random=Random(0), name="steps"))  # noqa: S311 - no secret
        return made[-1]

    yield started
    batch.let_go()
    for generation in made:
        generation.close(LONG)


@pytest.fixture
def aside(batch):
    with ThreadPoolExecutor(8) as pool:
        yield pool
        batch.let_go()


def ask(generation, first=0, stops=frozenset(), **options):
    return generation.submit(Prompt(tokens=(first, 7), **options), stops)


def change(generation, version):
    with generation.changing(version):
        return version


def test_a_sample_has_as_many_tokens_as_asked_for_or_ends_with_a_stop(make):
    generation = make()
    [long] = ask(generation, max_tokens=4).result(LONG)
    assert (long.prompt, long.tokens, long.logprobs, long.finish) == (
        (0, 7),
        (1000, 1001, 1002, 1003),
        (-0.5,) * 4,
        "length",
    )
    assert long.spans == (VersionSpan(0, 0, 4),)
    [short] = ask(generation, max_tokens=4, stops=frozenset([1001])).result(LONG)
    assert (short.tokens, short.finish) == ((1000, 1001), "stop")


def test_requests_run_together_and_leave_when_they_end(make, batch):
    generation = make()
    batch.hold(after=2)
    first = ask(generation, 1, max_tokens=5)
    assert batch.is_held.wait(LONG)
    second = ask(generation, 2, n=2, max_tokens=2)
    batch.let_go()
    assert [len(one.tokens) for one in [*first.result(LONG), *second.result(LONG)]] == [5, 2, 2]
    assert batch.steps == [
        [(1, 1)],
        [(1, 2)],
        [(1, 3)],
        [(2, 1), (2, 1)],
        [(1, 4), (2, 2), (2, 2)],
        [(1, 5)],
    ]


def test_no_more_sequences_run_at_a_time_than_there_is_room_for(make, batch):
    generation = make(max_batch=2)
    assert len(ask(generation, n=5, max_tokens=3).result(LONG)) == 5
    assert max(map(len, batch.steps)) == 2


def test_an_update_in_the_middle_is_in_the_spans_and_nothing_is_lost(make, batch, aside):
    generation = make()
    batch.hold(after=3)
    samples = ask(generation, max_tokens=6)
    assert batch.is_held.wait(LONG)
    changed = aside.submit(change, generation, 7)
    wait_until(lambda: generation._is_paused, "the pause is asked for")
    assert not changed.done()
    batch.let_go()
    assert changed.result(LONG) == 7
    [sample] = samples.result(LONG)
    assert sample.tokens == tuple(range(1000, 1006))
    assert sample.spans == (VersionSpan(0, 0, 4), VersionSpan(7, 4, 6))
    assert sample.versions == (0, 0, 0, 0, 7, 7)


def test_a_pause_that_waits_lets_sequences_finish_and_starts_no_others(make, batch, aside):
    generation = make("wait", max_batch=2)
    batch.hold(after=1)
    samples = ask(generation, n=3, max_tokens=4)
    assert batch.is_held.wait(LONG)
    changed = aside.submit(change, generation, 1)
    wait_until(lambda: generation._is_paused, "the pause is asked for")
    batch.let_go()
    assert changed.result(LONG) == 1
    assert [one.spans for one in samples.result(LONG)] == [(VersionSpan(version, 0, 4),) for version in (0, 0, 1)]


def test_a_pause_that_the_engine_does_not_reach_is_given_up(make, batch, monkeypatch):
    monkeypatch.setattr(generation_module, "WEIGHTS_SECONDS", 0.1)
    generation = make()
    batch.hold(after=1)
    samples = ask(generation, max_tokens=4)
    assert batch.is_held.wait(LONG)
    with pytest.raises(CallTimedOut, match="has not paused within"):
        change(generation, 1)
    batch.let_go()
    assert samples.result(LONG)[0].versions == (0,) * 4
    assert change(generation, 2) == 2


def test_a_pause_that_aborts_ends_sequences_with_the_tokens_so_far(make, batch, aside):
    generation = make("abort", max_batch=2)
    batch.hold(after=2)
    samples = ask(generation, n=3, max_tokens=5)
    assert batch.is_held.wait(LONG)
    changed = aside.submit(change, generation, 1)
    wait_until(lambda: generation._is_paused, "the pause is asked for")
    batch.let_go()
    assert changed.result(LONG) == 1
    first, second, third = samples.result(LONG)
    assert [one.finish for one in (first, second, third)] == ["abort", "abort", "length"]
    assert first.tokens == second.tokens == (1000, 1001, 1002)
    assert first.spans == (VersionSpan(0, 0, 3),)
    assert third.spans == (VersionSpan(1, 0, 5),)


def test_no_token_is_made_from_weights_whose_change_broke_off(make, batch, aside):
    generation = make()
    batch.hold(after=2)
    samples = ask(generation, max_tokens=9)
    assert batch.is_held.wait(LONG)

    def break_off():
        with generation.changing(1):
            raise OSError("the file ends early")

    broken = aside.submit(break_off)
    wait_until(lambda: generation._is_paused, "the pause is asked for")
    batch.let_go()
    with pytest.raises(OSError, match="ends early"):
        broken.result(LONG)
    for asked in (lambda: samples.result(LONG), lambda: ask(generation)):
        with pytest.raises(ClusterError, match="an update of its weights was broken off: OSError: the file ends early"):
            asked()
    assert not generation.is_well
    assert generation.version == 0
    assert len(batch.steps) == 3
    change(generation, 2)
    assert generation.is_well
    [sample] = ask(generation, max_tokens=2).result(LONG)
    assert sample.spans == (VersionSpan(2, 0, 2),)


def test_asleep_it_takes_no_requests_and_afterwards_goes_on_where_it_was(make, batch, aside):
    generation = make()
    batch.hold(after=3)
    samples = ask(generation, max_tokens=6)
    assert batch.is_held.wait(LONG)

    def fall_asleep():
        with generation.falling_asleep():
            return list(batch.rows)

    asleep = aside.submit(fall_asleep)
    wait_until(lambda: generation._is_paused, "the pause is asked for")
    batch.let_go()
    assert asleep.result(LONG) == []
    with pytest.raises(ClusterError, match="it is offloaded"):
        ask(generation)
    change(generation, 1)
    assert len(batch.steps) == 4
    assert generation.is_well
    with generation.waking_up():
        pass
    [sample] = samples.result(LONG)
    assert sample.tokens == tuple(range(1000, 1006))
    assert sample.spans == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6))


def test_a_cancelled_request_leaves_and_others_go_on(make, batch):
    generation = make()
    batch.hold(after=2)
    gone, stays = ask(generation, 1, n=2, max_tokens=50), ask(generation, 2, max_tokens=5)
    assert batch.is_held.wait(LONG)
    assert gone.cancel()
    batch.let_go()
    assert len(stays.result(LONG)[0].tokens) == 5
    assert [first for first, _ in batch.steps[-1]] == [2]
    assert len(batch.steps) < 20


def test_a_request_that_is_cancelled_before_its_turn_is_never_started(make, batch):
    generation = make(max_batch=1)
    batch.hold(after=2)
    first, gone, last = (ask(generation, number, max_tokens=4) for number in (1, 2, 3))
    assert batch.is_held.wait(LONG)
    assert gone.cancel()
    batch.let_go()
    assert [len(one.result(LONG)) for one in (first, last)] == [1, 1]
    assert {number for step in batch.steps for number, _ in step} == {1, 3}


def test_a_step_without_memory_fails_its_requests_only(make, batch):
    generation = make()
    batch.hold(after=2)
    failed = ask(generation, max_tokens=5)
    assert batch.is_held.wait(LONG)
    batch.error = ClusterError("no memory left")
    batch.let_go()
    with pytest.raises(ClusterError, match="no memory left"):
        failed.result(LONG)
    assert generation.is_well
    assert len(ask(generation, max_tokens=2).result(LONG)) == 1


def test_after_any_other_failure_it_has_ended(make, batch, caplog):
    generation = make()
    batch.error = RuntimeError("an illegal memory access")
    failed = ask(generation)
    for asked in (lambda: failed.result(LONG), lambda: ask(generation), lambda: change(generation, 1)):
        with pytest.raises(ClusterError, match="it has failed: RuntimeError: an illegal memory access"):
            asked()
    assert not generation.is_well
    assert "an illegal memory access" in caplog.text


def test_closing_fails_what_is_under_way_and_leaves_no_thread(make, batch, aside):
    generation = make()
    batch.hold(after=2)
    samples = ask(generation, max_tokens=50)
    assert batch.is_held.wait(LONG)
    closed = aside.submit(generation.close, LONG)
    wait_until(lambda: generation._end, "the end is asked for")
    batch.let_go()
    closed.result(LONG)
    with pytest.raises(ClusterError, match="it was stopped"):
        samples.result(LONG)
    assert not generation._thread.is_alive()
    assert batch.rows == []


def test_a_step_that_does_not_end_is_reported(make, batch):
    generation = make()
    batch.hold(after=0)
    ask(generation)
    assert batch.is_held.wait(LONG)
    with pytest.raises(ClusterError, match="has not ended in"):
        generation.close(0.1)
