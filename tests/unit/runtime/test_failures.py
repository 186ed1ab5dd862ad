"""What is said about what failed and what takes long, without Ray."""

from __future__ import annotations

import io
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from roost.runtime.connect.head import _Call
from roost.runtime.connect.stop import Stop
from roost.runtime.events.waits import waiting
from roost.runtime.failures.failure import Failure, FailureKind, asked_at
from roost.runtime.failures.meanwhile import Meanwhile
from roost.runtime.managers import long_waits
from roost.runtime.managers.long_waits import LongWaits
from roost.runtime.process import failed, output
from roost.runtime.runs.console import Console


def failure(kind=FailureKind.DEATH, what="died"):
    return Failure(kind=kind, address="rollout:0", rank=0, node="node 0", what=what, when=1.0, pid=7)


def test_the_line_that_asked_is_named_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError):
        os.getcwd()
    assert asked_at().startswith(f"asked for at {__file__}:")


def test_a_death_that_the_caller_was_told_of_is_not_told_again_by_whoever_notices_it_later():
    known = Meanwhile(lambda _after, _seconds: [])
    known.saw([failure()])
    known.note_death("rollout:0", "died: killed")
    assert known.words() == []
    known.note_death("rollout:0", "")
    known.note_death("rollout:0", "died: killed again")
    assert known.words() == ["meanwhile failed: rollout:0 died: killed again"]


def test_a_worker_whose_manager_hangs_keeps_few_threads_and_says_what_failed_in_one_plain_line(monkeypatch):
    over, told = threading.Event(), []
    identity = SimpleNamespace(address="rollout:0", node="node 0")
    monkeypatch.setattr(failed, "current_identity", lambda: identity)
    monkeypatch.setattr(failed, "TELL_SECONDS", 0)
    monkeypatch.setattr(output, "write", lambda _text: None)

    def hang():
        over.wait(60)
        raise ConnectionError

    # Where Ray begins: looking a manager up hangs with the head.
    monkeypatch.setattr(failed, "_manager", hang)
    monkeypatch.setattr(failed.emitter, "note", lambda _kind, _who, text, **_more: told.append(text))
    try:
        for number in range(30):
            failed.report(failure(FailureKind.EXCEPTION, f"Error{number}: a\x1b[2J\nb"), f"method{number}")
        threads = [thread for thread in threading.enumerate() if thread.name == "roost-failures"]
        assert 0 < len(threads) <= 4
        assert len(told) == 30
        assert not any("\x1b" in text or "\n" in text for text in told)
    finally:
        over.set()
    for thread in threads:
        thread.join(30)


def test_the_record_has_the_wait_that_goes_on_and_none_after_the_end(monkeypatch):
    recorded: list[str] = []
    monkeypatch.setattr(long_waits, "LONG_WAIT_SECONDS", 1e-9)
    context: Any = SimpleNamespace(
        run_dir=SimpleNamespace(id="run"), failures=SimpleNamespace(look=lambda: None, words=list), nodes=()
    )
    recorder: Any = SimpleNamespace(note_long_wait=recorded.append)
    long = LongWaits(context, Console(stream=io.StringIO()), recorder, Stop(lambda _name: None))
    monkeypatch.setattr(long, "_describe", lambda _addresses: "")
    monkeypatch.setattr(waiting, "watched", {})
    with waiting(lambda: "the first"):
        with waiting(lambda: "the second"):
            long._look()
            assert "the second" in recorded[-1]
        long._look()
        assert "the first" in recorded[-1], "the second is over, and this one goes on"
    with waiting(lambda: "the third"):
        long._look()
        long.stop()
    assert recorded[-1] == "", "nobody waits after the end"


def test_what_cannot_be_undone_takes_the_place_of_no_interrupt():
    def undo(_value):
        raise ConnectionError("no Ray")

    call = _Call(lambda: 1, "start an actor", undo)
    call.start()
    assert call.wait(30)
    call.give_up()
