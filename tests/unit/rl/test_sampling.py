"""Samples for a batch of prompts, as the process that asks for them sees it."""

from __future__ import annotations

import threading
from typing import Any

from roost.rl.engines.samples import Prompt
from roost.rl.sampling import Sampler
from roost.runtime.events.waits import waiting
from waiting import wait_until


def test_whoever_waits_for_samples_can_say_how_many_and_which_engines_are_busy(monkeypatch):
    watched: dict[int, Any] = {}
    monkeypatch.setattr(waiting, "watched", watched)
    over = threading.Event()
    dialect: Any = None
    sampler = Sampler(dialect, "http://router", "secret", lambda: ["rollout:1"])
    monkeypatch.setattr(sampler, "_answer", lambda prompt, _: [] if prompt.tokens == (0,) else over.wait(60) and [])
    prompts = [Prompt(tokens=(number,), max_tokens=1) for number in range(3)]
    thread = threading.Thread(target=lambda: list(sampler.run(prompts, 60, 8)))
    thread.start()
    try:
        said = "2 prompts at the router http://router, busy:", ["rollout:1"]
        wait_until(lambda: [wait.details() for wait in list(watched.values())] == [said], "it waits for the others")
    finally:
        over.set()
        thread.join(60)
    assert not watched
