"""Samples for a batch of prompts, as the process that asks for them sees it."""

from __future__ import annotations

import threading
from typing import Any

from roost.rl.engines.samples import Prompt
from roost.rl.sampling import draw_samples
from roost.runtime.events.waits import waiting
from waiting import wait_until


class NoSamples:
    """An engine's server that takes prompts and answers with none."""

    path = "/generate"

    @staticmethod
    def to_request(prompt):
        return {"tokens": prompt.tokens}

    @staticmethod
    def from_answer(_prompt, _answer):
        return []


def test_whoever_waits_for_samples_can_say_how_many_and_which_engines_are_busy(monkeypatch):
    watched: dict[int, Any] = {}
    monkeypatch.setattr(waiting, "watched", watched)
    over = threading.Event()
    dialect: Any = NoSamples

    def send(_path, request, _seconds):
        assert request["tokens"] == (0,) or over.wait(60)

    def details(missing):
        return f"{missing} at the router, busy:", ["rollout:1"]

    prompts = [Prompt(tokens=(number,), max_tokens=1) for number in range(3)]
    thread = threading.Thread(target=lambda: list(draw_samples(dialect, send, prompts, 60, 8, details)))
    thread.start()
    try:
        said = "2 prompts at the router, busy:", ["rollout:1"]
        wait_until(lambda: [wait.details() for wait in list(watched.values())] == [said], "it waits for the others")
    finally:
        over.set()
        thread.join(60)
    assert not watched
