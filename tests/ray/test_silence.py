"""Nothing is silent: exceptions of calls that nobody waits for, and waits that take long."""

from __future__ import annotations

import inspect
import io
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from roost import CallTimedOut, Channel, Cluster, NodePlacementStrategy, WorkerGroup
from roost.runtime.managers import long_waits
from roost.runtime.runs.record import read_record
from roost.watch.live import LiveRun
from roost.weights.link import WeightLink
from waiting import stopped, wait_until
from weight_workers import Server, Trainer
from workers import Peer, Performer, Stubborn

MEANWHILE = "meanwhile failed: "


@pytest.fixture
def actor(shared_cluster: Cluster) -> Iterator[WorkerGroup]:
    """A group of one test, whose failures no other test has seen."""
    strategy = NodePlacementStrategy([0, 1])
    with Performer.create_group().launch(shared_cluster, strategy, name=f"actor-{time.monotonic_ns():x}") as group:
        yield group


def here() -> str:
    """The line of the caller, as errors name it."""
    frame = inspect.currentframe()
    return f"test_silence.py:{frame.f_back.f_lineno}"


def log_of(cluster: Cluster, address: str) -> str:
    return Path(cluster.run_dir, "logs", *address.split(":")).with_suffix(".log").read_text()


def meanwhile(error: BaseException) -> list[str]:
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return [line for line in text.splitlines() if MEANWHILE in line]


def test_an_exception_that_nobody_waits_for_is_in_the_log_the_events_and_the_next_error(shared_cluster, actor):
    name = actor.name
    dropped = actor[1].fail([1], "lost reward")
    missing = pytest.raises(CallTimedOut, match=r"has no item after 3 s")
    with Channel.create(f"scored-{name}") as scored, missing as caught:
        scored.get(timeout=3)
    (said,) = meanwhile(caught.value)
    place = re.escape(str(shared_cluster.nodes[1]))
    assert re.fullmatch(
        rf"meanwhile failed: {name}:1 in fail: ValueError: lost reward on 1 \({place}, pid \d+, \d s ago\)", said
    )
    log = log_of(shared_cluster, f"{name}:1")
    assert f"ERROR {name}:1 failed in fail, pid " in log
    assert 'raise ValueError(f"{text} on {self.rank}")\nValueError: lost reward on 1\n' in log
    folder = Path(shared_cluster.run_dir)
    wait_until(lambda: '"raised"' in (folder / "events" / name / "1.jsonl").read_text(), "the event")
    happened = [event for event in LiveRun(folder).refresh().events if event.who == f"{name}:1"]
    assert [(event.what, event.text) for event in happened] == [("failed", "in fail: ValueError: lost reward on 1")]
    # An error that this process raises itself is not said again.
    with pytest.raises(ValueError, match="lost reward on 1"):
        dropped.wait(60)
    with pytest.raises(CallTimedOut) as later:
        actor[0].wait_for(str(folder), "never").wait(1.5)
    assert not [line for line in meanwhile(later.value) if name in line]


def test_a_stream_and_a_call_of_another_worker_that_fail_unseen_are_said_too(shared_cluster, actor):
    name = actor.name
    stream = actor[0].stream("items_then_fail", 1)
    next(stream)
    with Peer.create_group().launch(shared_cluster, NodePlacementStrategy([2]), name=f"{name}-peer") as peer:
        peer.meet(actor).wait(60)
        asked = peer.ask("fail", [0, 1], "asked by a worker")
        wait_until(asked.done, "the other worker has failed")
        with pytest.raises(CallTimedOut) as caught:
            peer.ask("wait_for", shared_cluster.run_dir, "never").wait(2)
        said = "\n".join(meanwhile(caught.value))
        assert f"{name}:0 in items_then_fail: KeyError: 'no more'" in said
        # What the worker passes on is said once, as its own.
        assert f"{name}-peer:0 in ask: ValueError: asked by a worker on" in said
        assert said.count("asked by a worker") == 1 + len(re.findall(rf"{name}:\d in fail", said)) <= 2


def test_the_error_of_a_call_names_the_line_that_asked(shared_cluster, actor):
    asked, line = actor.fail([1]), here()
    with pytest.raises(ValueError, match="bad reward") as caught:
        asked.wait(60)
    assert any(f"asked for at tests/ray/{line}" in note or f"/{line}" in note for note in caught.value.__notes__)
    late, line = actor[1].wait_for(shared_cluster.run_dir, "never"), here()
    with pytest.raises(CallTimedOut, match=rf"from 1 rank of 1: 1 \(.*\), asked for at \S*{re.escape(line)}"):
        late.wait(0.1)
    (outcome,) = late.outcomes(0.1)
    assert line in str(outcome.error)
    stream, line = actor[0].stream("two_items", shared_cluster.run_dir), here()
    items = stream.within(0.5)
    next(items)
    with pytest.raises(CallTimedOut, match=re.escape(line)):
        next(items)


def test_a_flood_of_exceptions_is_in_the_log_and_the_first_are_told_and_then_one_a_second(shared_cluster, actor):
    began = time.monotonic()
    outcomes = [actor[0].fail([0], f"number {number}") for number in range(200)]
    assert not any(result.outcomes(60)[0].is_ok for result in outcomes)
    seconds = time.monotonic() - began
    assert log_of(shared_cluster, f"{actor.name}:0").count("\nValueError: number ") == 200
    told = [item for item in shared_cluster.worker_manager.get_failures(0) if item.address == f"{actor.name}:0"]
    assert 1 <= len(told) <= 20 + seconds + 2
    assert sum(item.more + 1 for item in told) <= 200


SCRIPT = """
import sys
from roost import Cluster, PackedPlacementStrategy
from workers import Performer

with Cluster(num_nodes=4, run_dir="out", quiet=True) as cluster:
    actor = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 1), name="actor")
    dropped = actor.fail([1], "nobody looks")
    actor.say("over").wait(60)
    raise RuntimeError("something else")
"""


def test_the_end_of_a_run_says_what_else_failed_and_show_has_it(driver, tmp_path):
    script = driver(SCRIPT)
    _, complained = script.finish()
    assert (
        "RuntimeError: something else\nmeanwhile failed: actor:1 in fail: ValueError: nobody looks on 1" in complained
    )
    record = read_record(tmp_path / "out")
    ((failure),) = record.failures
    assert (failure.worker, failure.method, failure.what) == ("actor:1", "fail", "ValueError: nobody looks on 1")
    shown = subprocess.run(
        ["roost", "show", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=warm.environment(),
    ).stdout
    assert re.search(r"failed calls +actor:1 in fail at .*: ValueError: nobody looks on 1", shown)


Wait = Callable[[WorkerGroup, str], object]
WAITS: dict[str, tuple[Wait, str]] = {
    "wait": (lambda group, folder: group[1].wait_for(folder, "go").wait(), "'wait_for' of"),
    "outcomes": (lambda group, folder: group[1].wait_for(folder, "go").outcomes(), "'wait_for' of"),
    "iteration": (lambda group, folder: list(group[1].wait_for(folder, "go")), "'wait_for' of"),
    "durations": (lambda group, folder: group[1].wait_for(folder, "go").consume_durations(), "'wait_for' of"),
    "stream": (lambda group, folder: list(group[1].stream("two_items", folder)), "an item of 'two_items' of"),
}


@pytest.fixture
def lines(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the console shows, where a long wait is one of half a second."""
    monkeypatch.setattr(long_waits, "LONG_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(long_waits, "LONG_WAITS_EVERY_SECONDS", 0.05)
    shown = io.StringIO()
    console = shared_cluster.context.console
    monkeypatch.setattr(console, "stream", shown)
    monkeypatch.setattr(console, "quiet", False)
    return shown


def said_by(lines: io.StringIO) -> list[str]:
    return [line for line in lines.getvalue().splitlines() if line.startswith("waiting for ")]


@pytest.mark.parametrize("kind", WAITS)
def test_a_long_wait_says_for_whom_and_again_later(kind, shared_cluster, actor, lines, tmp_path):
    wait, words = WAITS[kind]
    thread = threading.Thread(target=wait, args=(actor, str(tmp_path)))
    thread.start()
    try:
        wait_until(lambda: len(said_by(lines)) >= 3, "it is said three times")
        recorded = read_record(Path(shared_cluster.run_dir)).waiting
    finally:
        (tmp_path / "go").touch()
        thread.join(60)
    (pid,) = actor[1].pid().wait(60)
    late = rf"{actor.name}:1 on {re.escape(str(shared_cluster.nodes[1]))}, pid {pid}"
    for line in said_by(lines):
        assert re.match(r"waiting for \d+ s, since \d\d:\d\d:\d\d: ", line)
        assert words in line
        assert "asked for at " in line
        assert "test_silence.py:" in line
        assert re.search(rf"{late}; `roost stack \S+ {actor.name}:1` shows what it does$", line)
    assert re.search(late, recorded)
    wait_until(lambda: not read_record(Path(shared_cluster.run_dir)).waiting, "the record no longer has it")
    said = [event for event in LiveRun(Path(shared_cluster.run_dir)).refresh().events if event.what == "waits"]
    assert any(words in event.text for event in said)


def test_a_long_wait_for_a_channel_and_for_a_launch_is_said(shared_cluster, lines, tmp_path):
    with Channel.create("never-filled") as channel, pytest.raises(CallTimedOut):
        channel.get(timeout=1.5)
    assert any("channel 'never-filled' has no item" in line for line in said_by(lines))
    strategy = NodePlacementStrategy([0, 0])
    with pytest.raises(TimeoutError):
        Stubborn.create_group(str(tmp_path), 1).launch(shared_cluster, strategy, name="stubborn", timeout=4)
    assert any(
        re.search(r"the launch of 'stubborn' \(.*\), not ready .*stubborn:1 on ", line) for line in said_by(lines)
    )


def test_a_quiet_run_has_its_long_waits_in_the_record_alone(shared_cluster, actor, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_cluster.context.console, "quiet", True)
    thread = threading.Thread(target=WAITS["wait"][0], args=(actor, str(tmp_path)))
    thread.start()
    try:
        wait_until(lambda: f"{actor.name}:1" in read_record(Path(shared_cluster.run_dir)).waiting, "it is recorded")
    finally:
        (tmp_path / "go").touch()
        thread.join(60)
    assert said_by(lines) == []


STOPPED = """
from roost import Cluster, PackedPlacementStrategy
from workers import Performer

with Cluster(num_nodes=4, run_dir="out") as cluster:
    actor = Performer.create_group().launch(cluster, PackedPlacementStrategy(0, 0), name="actor")
    cluster.on_stop(lambda: actor.say("saved").wait(60))
    hung = actor.wait_for("FOLDER", "go")
    print("waiting", flush=True)
    hung.wait()
"""


def test_a_stop_that_waits_behind_a_call_that_hangs_says_so(driver, tmp_path):
    script = driver(STOPPED.replace("FOLDER", str(tmp_path)))
    assert script.line() == "waiting"
    wait_until((tmp_path / "waiting-0").exists, "the call began")
    command = ["roost", "stop", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=warm.environment()) as stopping:
        said = stopping.stderr.readline()
        pattern = (
            r"run \S+ waits for \d+ s, since \S+: 'say' of 'actor', asked for at \S+, behind 'wait_for', asked for "
        )
        assert re.match(pattern + r"at \S+, not answered by actor:0 on .*, pid \d+$", said.strip()), said
        script.process.send_signal(signal.SIGTERM)
        stopping.wait(60)
    _, complained = script.finish()
    assert "'say' of 'actor'" in complained
    assert "behind 'wait_for'" in complained


def test_a_long_update_of_weights_names_the_worker_that_is_late(shared_cluster, lines):
    with (
        Trainer.create_group("numpy").launch(shared_cluster, NodePlacementStrategy([0]), name="trained") as actor,
        Server.create_group("numpy").launch(shared_cluster, NodePlacementStrategy([1]), name="served") as server,
    ):
        link = WeightLink.between(actor, server)
        link.update(1)
        (late,) = shared_cluster.worker_manager.get_workers(["served:0"])
        with stopped(late.pid), pytest.raises(CallTimedOut):
            link.update(2, timeout=4)
        place = re.escape(str(shared_cluster.nodes[1]))
        said = rf"of version 2 of \S+, not answered by served:0 on {place}, pid {late.pid}; "
        assert any(re.search(said, line) for line in said_by(lines))
        assert link.update(3).version == 3
