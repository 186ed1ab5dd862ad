"""A child process for work that may hang: what it said counts, and it does not outlive the block."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roost.machine.child import Child, last_line
from waiting import is_gone, wait_until

MODULE = """
import os, sys, time
from roost.machine.child import answer

def work(do, say):
    say(os.getpid())
    say({"do": do})
    print("to nowhere in particular")
    if do == "hang":
        time.sleep(600)
    if do == "die":
        print("[2026-01-01 10:00:00,000 C 1 1] gcs.cc:12: the head is gone", file=sys.stderr)
        os._exit(1)
    say("last")

if __name__ == "__main__":
    answer(work)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_child.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "some_child"


def test_values_arrive_in_order_and_the_last_one_ends_the_wait(module):
    heard: list[object] = []

    def hear(said: object) -> bool:
        heard.append(said)
        return said == "last"

    with Child(module, {"do": "answer"}, hear) as child:
        assert child.wait(60)
    assert heard[1:] == [{"do": "answer"}, "last"]
    assert "to nowhere in particular" in child.last_words, "what is printed is no answer"


def test_a_child_that_hangs_is_ended_and_what_it_said_is_known(module):
    heard: list[object] = []
    with Child(module, {"do": "hang"}, lambda said: bool(heard.append(said))) as child:
        wait_until(lambda: len(heard) == 2, "it has answered twice")
        assert not child.wait(0.1)
    assert heard[1] == {"do": "hang"}
    assert is_gone(heard[0])


def test_a_child_that_dies_leaves_its_last_words(module):
    heard: list[object] = []
    with Child(module, {"do": "die"}, lambda said: bool(heard.append(said))) as child:
        assert child.wait(60), "nothing more to wait for"
    assert heard[1:] == [{"do": "die"}]
    assert last_line(child.last_words) == "the head is gone"
    assert last_line("\n") == ""
