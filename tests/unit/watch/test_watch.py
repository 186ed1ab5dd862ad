"""Reading events back: what each worker does, also from broken files and from nodes whose clocks differ."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from recordings import BEGAN, Recording
from roost.runtime.events.format import header, line_of
from roost.runtime.events.pending import Call, Pending
from roost.runtime.events.stacks import answer_request, request_file
from roost.runtime.runs.index import LOCK_FILE
from roost.watch.facts import chart_facts, page_facts
from roost.watch.live import LiveRun, PlayedRun, read_bound, read_whole
from roost.watch.measures import prometheus_text
from roost.watch.model import RunModel
from roost.watch.reading import EventReader
from roost.watch.screen import draw_screen
from roost.watch.stack import stack_of
from roost.watch.trace import to_trace
from roost.watch.views import State

LARGE = 128 * 2**20
GOLDEN = Path(__file__).resolve().parents[2] / "golden"


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path)


def states(view):
    return {worker.address: (str(worker.state), worker.doing) for worker in view.workers}


def test_each_worker_is_busy_idle_silent_dead_or_ended(recording):
    recording.worker(0, line_of("began", "train", t=19.0))
    recording.worker(1, line_of("call", "train", t=5.0, d=2.0), line_of("usage", 0.1, t=19.0))
    recording.worker(2, line_of("began", "train", t=3.0))
    recording.worker(3, line_of("call", "train", t=5.0, d=2.0))
    recording.worker(0, line_of("call", "score", t=1.0, d=0.5), group="judge")
    recording.write("driver.jsonl", line_of("died", "actor:3", t=8.0), line_of("closed", "judge", t=9.0))
    view = recording.view(BEGAN + 21)
    assert states(view) == {
        "actor:0": ("busy", "train"),
        "actor:1": ("idle", "train"),
        "actor:2": ("silent", "train"),
        "actor:3": ("dead", "train"),
        "judge:0": ("ended", "score"),
    }
    assert view.workers[0].since == BEGAN + 20
    assert view.workers[1].last_seconds == 2.0
    assert view.workers[1].idle_share == pytest.approx(0.9)
    assert [event.what for event in view.events] == ["closed", "died"]


def test_an_announced_call_ends_with_its_line_and_the_next_one_goes_on(recording):
    recording.worker(
        0,
        line_of("began", "train", t=1.0),
        line_of("call", "train", t=1.0, d=2.0),
        line_of("began", "train", t=3.0),
    )
    assert states(recording.view(BEGAN + 5)) == {"actor:0": ("busy", "train")}


def test_of_calls_at_the_same_time_only_the_one_that_ended_has_ended(recording):
    recording.worker(
        0,
        line_of("began", "generate", t=1.0),
        line_of("began", "generate", t=1.5),
        line_of("call", "generate", t=1.0, d=4.0),
        # Shorter ones around it share a line.
        line_of("call", "generate", t=0.5, d=5.0, n=3, busy=0.2),
    )
    model, reader = RunModel(), EventReader(recording.folder)
    model.take(reader.read())
    (span,) = model.under_way("actor:0", BEGAN + 9)
    assert (span.name, span.start - BEGAN) == ("generate", 2.5)
    assert states(model.view(BEGAN + 9)) == {"actor:0": ("busy", "generate")}


def test_a_group_that_is_launched_again_under_its_name_is_not_dead(recording):
    recording.write("driver.jsonl", line_of("launched", "actor", t=1.0), line_of("restarted", "actor:0", t=2.0))
    recording.write("driver.jsonl", line_of("died", "actor:0", t=3.0), line_of("died", "judge:0", t=3.5))
    recording.write("driver.jsonl", line_of("closed", "actor", t=4.0), line_of("launched", "actor", t=5.0))
    recording.worker(0, line_of("usage", 0.0, t=0.5), wall=BEGAN + 5, pid=200)
    recording.worker(0, line_of("usage", 0.0, t=0.5), group="judge")
    actor, judge = recording.view(BEGAN + 6).workers
    assert (actor.state, actor.restarts) == (State.IDLE, 0)
    assert judge.state is State.DEAD


def test_steps_and_curves_have_a_limit_that_keeps_the_newest(recording, monkeypatch):
    monkeypatch.setattr("roost.watch.model._MOST_STEPS", 3)
    monkeypatch.setattr("roost.watch.model._MOST_CURVES", 1)
    lines = [line_of("metric", "reward", t=step, value=step, step=step) for step in range(1, 6)]
    recording.worker(0, *lines, line_of("metric", "loss", t=6.0, value=1.0))
    view = recording.view(BEGAN + 8)
    assert view.steps == ((4.0, 1.0), (5.0, 1.0))
    assert [curve.name for curve in view.curves] == ["reward"]
    assert view.notices == ("1 values of metrics are not shown: there is room for 1 curves",)
    assert view.dropped == 0


def test_what_happened_long_ago_to_the_job_is_known_to_a_reader_that_comes_late(recording, monkeypatch):
    monkeypatch.setattr("roost.watch.reading._FIRST_BYTES", 2048)
    recording.write("driver.jsonl", line_of("launched", "actor", t=1.0), line_of("died", "actor:0", t=2.0))
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0))
    calls = [line_of("wait", "actor", t=3.0 + at, d=0.5) for at in range(500)]
    again = header("driver", run="abc", pid=1, host="head", wall=BEGAN)
    recording.write("driver.jsonl", *calls)
    # The limit may fall into the line of a process, too.
    for extra in range(0, 200, 7):
        recording.write("other.jsonl", again, *calls[:40], "x" * extra, again)
    reader, model = EventReader(recording.folder), RunModel()
    model.take(reader.read())
    assert reader.trouble.skipped > 20_000
    assert reader.trouble.broken < 40
    (worker,) = model.view(BEGAN + 600).workers
    assert worker.state is State.DEAD


def test_a_restart_brings_a_worker_back_and_is_counted(recording):
    recording.worker(0, line_of("began", "train", t=1.0))
    recording.write("driver.jsonl", line_of("died", "actor:0", t=3.0), line_of("restarted", "actor:0", t=5.0, text="x"))
    recording.worker(0, line_of("usage", 0.0, t=0.5), wall=BEGAN + 4, pid=200)
    (worker,) = recording.view(BEGAN + 6).workers
    assert (worker.state, worker.restarts, worker.pid) == (State.IDLE, 1, 200)


def test_when_the_driver_stopped_the_run_is_over_whatever_the_time(recording):
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0))
    recording.write("driver.jsonl", line_of("stopped", "", t=7.0))
    view = recording.view(BEGAN + 10**6)
    assert view.is_over
    assert view.now == BEGAN + 7
    assert view.workers[0].state is State.ENDED


def test_lines_that_are_added_are_read_once_and_half_a_line_waits(recording):
    reader, model = EventReader(recording.folder), RunModel()
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0))
    model.take(reader.read())
    recording.write("actor/0.jsonl", '{"call":"train","t":3', end="")
    model.take(reader.read())
    recording.write("actor/0.jsonl", '.0,"d":1.0}')
    model.take(reader.read())
    assert reader.trouble.broken == 0
    assert model.view().workers[0].calls == 2
    assert [*reader.read()] == []


@pytest.mark.parametrize(
    "broken",
    [
        "not json",
        '{"call":"train"',
        "[]",
        "{}",
        '{"call":"train","t":"x","d":1}',
        '{"call":"train","t":NaN,"d":1}',
        '{"process":{},"v":1}',
        '{"process":"actor:0","v":1,"run":"abc","pid":Infinity,"host":"h","wall":1.0}',
        '{"process":"actor:0","v":1,"run":"abc","pid":1,"host":"h","wall":1.0,"node":1e999}',
        "[" * 5000,
        "\x00\x00\x00",
    ],
)
def test_a_broken_line_is_left_out_and_said(recording, broken):
    recording.worker(0, broken, line_of("call", "train", t=1.0, d=1.0))
    view = recording.view()
    assert view.workers[0].calls == 1
    assert "1 broken lines of events were left out" in view.notices


@pytest.mark.parametrize(
    "odd",
    [
        '{"call":"train","t":1,"d":[]}',
        '{"call":"train","t":1,"d":Infinity}',
        '{"usage":0.5,"t":1,"memory":NaN}',
        '{"metric":"m","t":1,"value":{}}',
        '{"usage":[],"t":1}',
    ],
)
def test_a_line_with_odd_values_spoils_nothing(recording, odd):
    recording.worker(0, odd, line_of("call", "train", t=1.0, d=1.0))
    view = recording.view()
    assert view.workers[0].calls == 1
    assert view.dropped == 1


def test_odd_figures_of_a_node_and_a_link_in_place_of_the_folder_spoil_nothing(recording, tmp_path_factory):
    first = header("node 0", run="abc", pid=9, host="head", wall=BEGAN, node=0)
    devices = ('[["0.5",1,2]]', "[[0.5,1]]", "[[NaN,1,2]]", "[1]")
    odd = [f'{{"node":0.5,"t":1,"memory":1,"of":2,"devices":{each}}}' for each in devices]
    recording.write("node-0.jsonl", first, *odd, line_of("node", 0.25, t=2.0, memory=1, of=2, devices=[[0.5, None, 2]]))
    view = recording.view(BEGAN + 3)
    assert (view.nodes[0].cpu, view.nodes[0].devices, view.dropped) == (0.25, ((0.5, None, 2),), 4)
    json.dumps(page_facts(view, title="", status=""), allow_nan=False)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (recording.folder / "events").rename(elsewhere / "events")
    (recording.folder / "events").symlink_to(elsewhere / "events")
    assert [*EventReader(recording.folder).read()] == []


def test_lines_of_a_newer_roost_are_left_out_and_said(recording):
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0))
    recording.write("actor/1.jsonl", '{"process":"actor:1","v":2,"other":1}', '{"thing":1}')
    view = recording.view()
    assert [worker.address for worker in view.workers] == ["actor:0"]
    assert "2 lines of a newer Roost were left out" in view.notices


def test_a_file_that_is_a_link_is_not_read_and_said(recording):
    recording.worker(0)
    (recording.folder / "events" / "actor" / "1.jsonl").symlink_to("/etc/passwd")
    assert any("a symbolic link is in the way" in notice for notice in recording.view().notices)


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_a_clock_that_differs_is_corrected_and_said(recording, skew):
    recording.write("driver.jsonl", line_of("launched", "actor", t=2.0))
    recording.worker(0, line_of("call", "train", t=5.0, d=1.0))
    recording.worker(1, line_of("call", "train", t=5.0, d=1.0), host="far", wall=BEGAN + 1 + skew)
    view = recording.view(BEGAN + 6.5)
    near, far = view.workers
    assert abs(near.since - far.since) <= 1.0
    assert (near.state, far.state) == (State.BUSY, State.BUSY)
    assert any(notice.startswith("the clock of far differs by about") for notice in view.notices)


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 3600.0])
def test_a_reader_whose_clock_differs_sees_what_others_see(recording, monkeypatch, skew):
    passed = 0.0
    clock = SimpleNamespace(monotonic=lambda: 500.0 + passed, time=lambda: BEGAN + 1000 + skew + passed)
    monkeypatch.setattr("roost.watch.live.time", clock)
    recording.worker(0, line_of("call", "train", t=700.0, d=1.0))
    with (recording.folder / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        live = LiveRun(recording.folder)
        first = live.refresh().workers[0].state
        assert first is (State.BUSY if skew < 0 else State.SILENT), "no line is of the future"
        for _ in range(70):
            passed += 0.1
            recording.write("actor/0.jsonl", line_of("call", "train", t=998.5 + passed, d=0.1))
            view = live.refresh()
        assert abs(view.now - (BEGAN + 1000 + passed)) <= 1.0
        assert view.workers[0].state is State.BUSY
        said = [notice for notice in view.notices if notice.startswith("the clock here differs by about")]
        assert [notice.split()[6] for notice in said] == [f"{skew:+.0f}"] * bool(skew)
        # Nothing comes any more.
        passed += 60
        assert live.refresh().workers[0].state is State.SILENT


def alive(seconds):
    """The lines of a process that does nothing but be there."""
    return [line_of("usage", 0.0, t=float(t), memory=1) for t in range(2, seconds, 2)]


def test_a_call_without_progress_is_stuck_when_it_takes_much_longer_than_the_others(recording):
    known = [line_of("call", "train", t=1.0, d=2.0), line_of("call", "train", t=3.0, d=1.0)]
    slow = [line_of("call", "generate", t=1.0, d=30.0)]
    recording.worker(0, *alive(800), *known, line_of("began", "train", t=10.0))
    recording.worker(1, *alive(800), *known, line_of("began", "train", t=10.0), line_of("waiting", "actor:0", t=10.5))
    recording.worker(0, *alive(800), *slow, line_of("began", "generate", t=40.0), group="rollout")
    recording.worker(0, *alive(800), line_of("began", "load", t=10.0), group="judge")
    recording.worker(0, *alive(800), *known, line_of("began", "train", t=10.0), group="critic")
    recording.metrics(0, *[line_of("metric", "loss", t=float(t), value=1) for t in range(10, 790)], group="critic")

    def states_at(t):
        return {worker.address: str(worker.state) for worker in recording.view(BEGAN + 1 + t).workers}

    calm = {"actor:0": "busy", "actor:1": "waiting", "critic:0": "busy", "judge:0": "busy", "rollout:0": "busy"}
    assert states_at(69) == calm
    # Who waits for the one that is stuck is not; who logs a metric makes progress.
    assert states_at(71) == calm | {"actor:0": "stuck"}
    assert states_at(189) == calm | {"actor:0": "stuck"}
    assert states_at(191) == calm | {"actor:0": "stuck", "rollout:0": "stuck"}
    assert states_at(611) == calm | {"actor:0": "stuck", "rollout:0": "stuck", "judge:0": "stuck"}
    view = recording.view(BEGAN + 1 + 110)
    assert view.notices[0] == "actor:0 is in train without progress for 100 s; none before took more than 2 s"
    text = draw_screen(view, title="x", status="running", width=100, height=40).plain
    assert "! 1 stuck" in text
    assert "stuck in train" in text
    assert page_facts(view, title="", status="")["counts"]["stuck"] == 1


def test_where_all_wait_for_each_other_and_the_driver_too_they_are_stuck(recording):
    for rank in range(2):
        waits = [line_of("wait", "torch.distributed", t=2.0, d=1.5), line_of("waiting", "torch.distributed", t=10.0)]
        recording.worker(rank, *alive(300), line_of("began", "train", t=9.0), *waits)
    view = recording.view(BEGAN + 1 + 80)
    assert {str(worker.state) for worker in view.workers} == {"waiting"}, "the driver may be computing"
    recording.write("driver.jsonl", line_of("waiting", "actor, train", t=10.0))
    assert {str(worker.state) for worker in recording.view(BEGAN + 1 + 60).workers} == {"waiting"}
    view = recording.view(BEGAN + 1 + 80)
    assert {(str(worker.state), worker.waits_for) for worker in view.workers} == {("stuck", "torch.distributed")}
    assert "waits for torch.distributed without progress for 70 s" in view.notices[0]


def test_the_time_of_a_step_grows_while_it_goes_on(recording):
    recording.worker(0, *alive(100))
    recording.metrics(0, *[line_of("metric", "loss", t=2.0 * step, value=1, step=step) for step in range(1, 11)])

    def last(t):
        view = recording.view(BEGAN + 1 + t)
        (chart,) = [chart for chart in chart_facts(view) if chart["title"] == "Step time"]
        return view.step.number, view.step.usual, chart["series"][0]["points"][-1]

    assert last(21) == (10, 2.0, [10, 2.0])
    assert last(30) == (10, 2.0, [11, 10.0])
    assert last(50) == (10, 2.0, [11, 30.0])
    assert (
        "step 11 for 30.0s, usually 2.0s"
        in draw_screen(recording.view(BEGAN + 51), title="x", status="running", width=120, height=20).plain
    )


def test_of_a_long_file_the_end_is_read_first(recording, monkeypatch):
    monkeypatch.setattr("roost.watch.reading._FIRST_BYTES", 8192)
    recording.worker(0, *[line_of("call", "train", t=float(i), d=0.5) for i in range(5000)])
    reader, model = EventReader(recording.folder), RunModel()
    model.take(reader.read())
    worker = model.view().workers[0]
    assert 0 < worker.calls < 200
    assert worker.pid == 100
    assert model.spans("actor:0")[-1].start == BEGAN + 1 + 4999
    assert reader.trouble.broken == 0
    assert reader.trouble.skipped > 100_000


@pytest.mark.parametrize("words", [("top", "--once"), ("show", "--trace"), ("stack", "nobody:0")])
def test_files_that_are_larger_than_the_memory_are_read_in_pieces(recording, words):
    recording.worker(0, line_of("call", "train", t=3.0, d=0.5), line_of("dropped", 7, t=3.0, why="disk"))
    recording.metrics(0, line_of("metric", "loss", t=1.0, value=1.0, step=1))
    for path in [*(recording.folder / "events").rglob("0*.jsonl")]:
        # A hole takes no room on the disk, and as much memory as any other line that does not end.
        os.truncate(path, path.stat().st_size + LARGE)
    recording.worker(0, "", line_of("call", "train", t=70.0, d=0.5))
    recording.metrics(0, line_of("metric", "loss", t=2.0, value=0.5, step=2))
    code = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_AS, ({LARGE}, {LARGE}))
runpy.run_module("roost", run_name="__main__")
"""
    command = [sys.executable, "-c", code, words[0], f"{recording.folder}/", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "MemoryError" not in done.stderr
    expected = {"top": "7 events were left out: the disk was full", "show": '"train"', "stack": "it has actor:0"}
    assert expected[words[0]] in done.stdout + done.stderr


def test_of_a_long_file_of_metrics_values_of_the_whole_run_are_shown(recording, monkeypatch):
    monkeypatch.setattr("roost.watch.reading._FIRST_BYTES", 64 * 1024)
    recording.worker(0)
    values = [line_of("metric", "loss", t=float(i), value=1 / (i + 1), step=i) for i in range(50_000)]
    recording.metrics(0, *values)
    (recording.folder / "events/actor/1.jsonl").write_text("")
    view = recording.view()
    (curve,) = view.curves
    steps = [step for step, _, _ in curve.points]
    assert (steps[0], steps[-1]) == (0, 49_999)
    assert max(after - before for before, after in itertools.pairwise(steps)) < 2500
    assert {seconds for _, seconds in view.steps} == {1.0}, "time between samples is not that of a step"


def test_values_of_several_names_and_of_the_driver_are_curves(recording):
    recording.worker(0)
    recording.metrics(0, line_of("metrics", "loss", t=3.0, after=[0, 0.5, 1], value=[3, 2, "nan"], step=[1, 2, 3]))
    recording.metrics(0, line_of("metrics", "lr", t=3.0, after=[0, 1], value=[3, 2]))
    recording.write("driver.metrics.jsonl", header("driver", run="abc", pid=1, host="head", wall=BEGAN))
    recording.write("driver.metrics.jsonl", line_of("metric", "score", t=9.0, value=9, step=3))
    # A line that does not fit is left out, with its reason.
    recording.metrics(0, line_of("metrics", "odd", t=3.0, after=[0], value=[3, 2]))
    view = recording.view()
    curves = {(curve.worker, curve.name): [point[:2] for point in curve.points] for curve in view.curves}
    assert curves["actor:0", "loss"][:2] == [(1, 3), (2, 2)]
    assert math.isnan(curves["actor:0", "loss"][2][1])
    assert curves["actor:0", "lr"] == [(None, 3), (None, 2)]
    assert curves["driver", "score"] == [(3, 9)]
    assert view.steps == ((2, 0.5), (3, 0.5))
    assert view.lost == ("1 lines of events were left out: they say what cannot be",)


def test_what_is_missing_is_said_with_its_reason(recording):
    recording.worker(0, line_of("dropped", 5, t=1.0, why="rate 1000"), line_of("dropped", 2, t=1.0))
    recording.worker(1, line_of("dropped", 6, t=1.0, why="rate 1000"), line_of("dropped", 3, t=1.0, why="\x1b[2J"))
    recording.write("driver.jsonl", line_of("dropped", 1, t=1.0, why="buffer"))
    recording.write("driver.jsonl", line_of("dropped", 4, t=1.0, why="rate 100"))
    view = recording.view()
    assert view.dropped == 21
    assert view.lost == (
        "1 events were left out: they came faster than a thread could write them",
        "4 values of metrics were left out: driver logged more than 100 a second, "
        "which is what a file of metrics takes after 86,400,000 values",
        "11 values of metrics were left out: actor:0 and actor:1 logged more than 1000 a second",
        "5 events were dropped because a buffer or the disk was full",
    )
    assert set(view.lost) <= set(view.notices)


def test_metrics_become_curves_and_what_is_not_a_number_is_empty_on_the_page(recording):
    recording.worker(
        0,
        line_of("metric", "reward", t=1.0, value=0.5, step=1),
        line_of("metric", "reward", t=2.0, value="nan", step=2),
    )
    view = recording.view()
    (curve,) = view.curves
    assert (curve.worker, curve.name, len(curve.points)) == ("actor:0", "reward", 2)
    (chart,) = [item for item in chart_facts(view) if item["title"] == "reward"]
    assert chart["series"] == [{"name": "actor:0", "role": "actor", "points": [[1.0, 0.5]]}]
    json.dumps(chart_facts(view), allow_nan=False)


def test_samples_of_nodes_are_kept(recording):
    recording.write(
        "node-0.jsonl",
        header("node 0", run="abc", pid=9, host="head", wall=BEGAN, node=0),
        line_of("node", 0.5, t=1.0, memory=100, of=200, devices=[[0.9, 10, 20]]),
    )
    (node,) = recording.view().nodes
    assert (node.cpu, node.memory, node.memory_total, node.devices) == (0.5, 100, 200, ((0.9, 10, 20),))


def test_events_of_an_earlier_run_in_the_same_folder_do_not_count(recording):
    recording.write("actor/0.jsonl", header("actor:0", run="old", pid=1, host="head", wall=BEGAN - 99, node=0))
    assert recording.view().workers == ()


def test_a_run_without_events_has_an_empty_view(tmp_path):
    reader, model = EventReader(tmp_path), RunModel()
    assert not reader.exists
    model.take(reader.read())
    assert model.view().workers == ()


def test_the_trace_has_a_thread_for_each_worker_and_the_events(recording):
    recording.worker(0, line_of("call", "train", t=1.0, d=0.5))
    recording.worker(2, line_of("call", "train", t=2.0, d=0.5, n=3, busy=0.4))
    recording.write("driver.jsonl", line_of("died", "actor:2", t=4.0))
    events = json.loads(to_trace(read_whole(recording.folder)))["traceEvents"]
    calls = [(item["pid"], item["ts"], item["dur"], item["args"]["calls"]) for item in events if item["ph"] == "X"]
    assert calls == [(0, 0, 500_000, 1), (1, 1_000_000, 500_000, 3)]
    assert {item["args"]["name"] for item in events if item["name"] == "thread_name"} == {"actor:0", "actor:2"}
    assert [item["name"] for item in events if item["ph"] == "i"] == ["actor:2 died"]


@pytest.fixture
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_the_screen_shows_a_run_at_80_by_24(recording, golden):
    recording.busy()
    text = draw_screen(recording.view(BEGAN + 61), title="train.py", status="running", width=80, height=24).plain
    lines = text.split("\n")
    assert len(lines) <= 24
    assert max(map(cell_len, lines)) <= 80
    golden(GOLDEN / "top.txt", text + "\n")


@pytest.mark.parametrize(("width", "height"), [(40, 6), (80, 24), (200, 60), (1, 1)])
@pytest.mark.parametrize("workers", [0, 1, 300])
def test_the_screen_fits_whatever_its_size_and_the_number_of_workers(recording, width, height, workers):
    recording.busy(workers)
    recording.traffic()
    text = draw_screen(recording.view(BEGAN + 61), title="t" * 300, status="running", width=width, height=height).plain
    assert len(text.split("\n")) <= height
    assert max(map(cell_len, text.split("\n"))) <= max(40, width)


def test_values_of_a_metric_as_far_apart_as_numbers_are_can_be_drawn(recording):
    lines = [
        line_of("metric", "loss", t=float(step), value=value, step=step) for step, value in ((1, 1e308), (2, -1e308))
    ]
    recording.worker(0, *lines)
    recording.worker(1, *lines)
    view = recording.view(BEGAN + 5)
    text = draw_screen(view, title="x", status="running", width=80, height=24).plain
    assert re.search(r"loss +-1e\+308 █▁", text)
    json.dumps(chart_facts(view), allow_nan=False)


def test_no_escape_reaches_the_terminal(recording):
    bad = "a\x1b[2J\x1b]0;x\x07\r\n\u202e<script>"
    lines = line_of("began", bad, t=1.0), line_of("metric", bad, t=1.0, value=1)
    first = header(f"{bad}:0", run="abc", pid=1, host=bad, wall=BEGAN, node=0)
    recording.write("bad/0.jsonl", first, *lines)
    recording.write("driver.jsonl", line_of("died", bad, t=3.0, text=bad))
    text = draw_screen(recording.view(BEGAN + 5), title=bad, status=bad, width=80, height=24).plain
    assert "died" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.split("\n")) <= 24


def test_top_prints_one_picture_where_there_is_no_terminal(recording, roost):
    recording.busy()
    code, out, _ = roost("top", str(recording.folder) + "/")
    assert code == 0
    assert "actor" in out
    assert "reward" in out


def test_top_gives_its_figures_as_json_with_keys_that_stay(recording, roost):
    recording.busy()
    recording.traffic()
    recording.worker(0, line_of("usage", 0.5, t=60.0, memory=2048))
    code, out, err = roost("top", f"{recording.folder}/", "--json")
    assert code == 0, err
    found = json.loads(out)
    about = "version run what folder status now began is_over"
    parts = "limits step workers nodes channels links engines metrics events notices"
    assert list(found) == f"{about} {parts}".split()
    assert (found["version"], found["run"], found["folder"]) == (1, recording.folder.name, str(recording.folder))
    worker = next(item for item in found["workers"] if item["address"] == "actor:0")
    keys = "address component rank node devices host pid state doing waits_for since calls failed restarts"
    assert list(worker) == [*keys.split(), "idle_share", "last_seconds", "cpu", "memory"]
    assert (worker["pid"], worker["memory"], worker["cpu"]) == (100, 2048, 0.5)
    assert len(found["workers"]) == 14
    assert found["metrics"]["reward"].keys() == {f"actor:{rank}" for rank in range(8)}


def test_many_workers_are_listed_with_the_middle_left_out(recording):
    recording.busy(40)
    lines = draw_screen(recording.view(BEGAN + 61), title="x", status="running", width=100, height=30).plain.split("\n")
    place = next(index for index, line in enumerate(lines) if line.split()[:3] == ["worker", "node", "pid"])
    assert lines[place + 1].startswith("x actor:3 ")
    listed = [int(found[1]) for line in lines[place + 2 :] if (found := re.search(r"(\d+)%  [a-z]", line))]
    assert 4 <= len(listed) < 40
    assert listed == sorted(listed, reverse=True), "from the busiest to the idlest"
    (left,) = [line for line in lines if line.endswith("more in between")]
    assert int(left.split()[1]) == 41 - 1 - len(listed)


def test_top_and_show_say_that_a_folder_has_no_events(tmp_path, roost):
    for words in (["top"], ["show", "--trace"]):
        code, _, err = roost(*words, str(tmp_path) + "/")
        assert code == 2
        assert "there are no events in" in err


def test_a_trace_of_a_run_without_events_is_an_error_and_writes_nothing(tmp_path, roost):
    (tmp_path / "events").mkdir()
    code, out, err = roost("show", str(tmp_path) + "/", "--trace", "--out", str(tmp_path / "trace.json"))
    assert (code, out) == (2, "")
    assert "there are no events in" in err
    assert not (tmp_path / "trace.json").exists()


def test_the_slices_of_a_trace_are_inside_one_another_or_apart(recording):
    """Perfetto drops a slice that begins inside another one and ends after it."""
    draw = random.Random(3)  # noqa: S311 - to be repeated
    # As a worker writes them: calls with waits inside that end with them or a little before, three calls at once.
    pending, calls, at = Pending(0.0), [], 3.0
    for _ in range(300):
        at, end = at + draw.random() / 50, at + draw.random() / 10
        inside = sorted(draw.uniform(at, end) for _ in range(4))
        calls += [Call("act", at, end, True), Call("rollout:0", inside[0], inside[1], True, True)]
        calls += [Call("channel 'x'", inside[3], end, True, True)]
    recording.worker(0, *pending.lines(at, calls))
    events = json.loads(to_trace(read_whole(recording.folder)))["traceEvents"]
    slices = [(item["tid"], item["ts"], item["ts"] + item["dur"]) for item in events if item["ph"] == "X"]
    assert len(slices) > 300
    for thread, begin, end in slices:
        others = [(b, e) for other, b, e in slices if other == thread]
        assert not [1 for b, e in others if b < begin < e < end]


def test_trace_writes_a_file(recording, roost, tmp_path):
    recording.busy()
    code, _, err = roost("show", str(recording.folder) + "/", "--trace", "--out", str(tmp_path / "trace.json"))
    assert code == 0, err
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_run_whose_driver_is_gone_has_ended_and_one_whose_folder_is_removed_keeps_its_view(recording):
    recording.busy()
    live = LiveRun(recording.folder)
    # No driver locks the folder.
    assert live.refresh().is_over
    shutil.rmtree(recording.folder / "events")
    recording.folder.rmdir()
    view = live.refresh()
    assert len(view.workers) == 9
    assert any("the run folder is gone" in notice for notice in view.notices)


def test_a_worker_that_waits_says_for_whom_and_waits_count_as_idle(recording):
    recording.worker(0, line_of("began", "train", t=1.0), line_of("waiting", "channel 'samples'", t=6.0))
    view = recording.view(BEGAN + 11)
    (worker,) = view.workers
    assert (worker.state, worker.waits_for, worker.doing) == (State.WAITING, "channel 'samples'", "train")
    # Of the ten seconds it was busy in those between the first and the sixth.
    assert worker.idle_share == pytest.approx(0.5)
    recording.write("actor/0.jsonl", line_of("wait", "channel 'samples'", t=6.0, d=4.0))
    (worker,) = recording.view(BEGAN + 11).workers
    assert (worker.state, worker.waits_for) == (State.BUSY, "")
    assert worker.idle_share == pytest.approx(0.5)


def test_what_goes_between_the_workers_is_counted(recording):
    recording.busy()
    recording.traffic()
    view = recording.view(BEGAN + 61)
    (channel,) = view.channels
    assert (channel.name, channel.depth, channel.most) == ("samples", 22, 64)
    assert (channel.puts_per_second, channel.gets_per_second) == (
        pytest.approx(40, rel=0.2),
        pytest.approx(39, rel=0.2),
    )
    (link,) = view.links
    assert (link.name, link.version, round(link.seconds, 3), link.size) == ("actor -> rollout", 5, 0.6, 512)
    first, second = view.engines
    assert (first.worker, first.version, first.behind, first.is_asleep) == ("rollout:0", 5, 0, False)
    assert (second.version, second.behind, second.is_asleep, second.failed) == (4, 1, True, 1)
    assert first.latency == pytest.approx(0.7 / 9)
    states = {worker.address: str(worker.state) for worker in view.workers}
    assert (states["rollout:1"], states["reward:1"]) == ("asleep", "waiting")
    assert view.steps == tuple((float(step), 1.0) for step in range(1, 9))


def test_a_channel_whose_process_is_restarted_counts_on(recording):
    lines = [line_of("channel", "samples", t=float(t), depth=1, puts=10 * t, gets=0) for t in range(5)]
    recording.worker(0, *lines, group="samples")
    recording.worker(0, line_of("channel", "samples", t=1.0, depth=1, puts=3, gets=0), wall=BEGAN + 6, group="samples")
    (channel,) = recording.view(BEGAN + 8).channels
    assert channel.puts_per_second >= 0


def test_reservations_are_events_in_words(recording):
    recording.write("driver.jsonl", line_of("waits", "rollout", t=1.0, text="for 2 accelerators"))
    recording.write("driver.jsonl", line_of("reserved", "rollout", t=2.0, text="2 accelerators"))
    assert [event.what for event in recording.view().events] == ["reserved", "waits"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"bound_seconds": "x"}', '{"bound_seconds": -1}', "NaN"])
def test_a_broken_search_gives_no_bound(tmp_path, text):
    path = tmp_path / "search.json"
    assert read_bound(path) is None
    path.write_text(text)
    assert read_bound(path) is None


def test_the_bound_of_a_search_is_drawn_with_the_steps(recording):
    recording.busy()
    (recording.folder / "search.json").write_text('{"bound_seconds": 0.75}')
    live = LiveRun(recording.folder)
    view = live.refresh()
    assert chart_facts(view, live.bound)[0]["bound"] == 0.75


@pytest.mark.usefixtures("utc")
def test_the_screen_shows_queues_engines_and_who_waits(recording):
    recording.busy()
    recording.traffic()
    text = draw_screen(recording.view(BEGAN + 61), title="train.py", status="running", width=80, height=30).plain
    assert re.search(r"~ reward:1 +\d+ +\d+ .* 0%  waits for channel 's", text)
    assert "samples            22/64 items" in text
    assert "rollout:0          weights 5  8.1 requests/s in 0.078 s" in text
    assert "z 1 asleep" in text


def test_a_recording_is_played_at_its_speed_and_ends_as_the_run_did(recording, monkeypatch):
    recording.busy()
    recording.write("driver.jsonl", line_of("stopped", "", t=60.0))
    now = 100.0
    monkeypatch.setattr("roost.watch.live.time.monotonic", lambda: now)
    run = PlayedRun([*EventReader(recording.folder, whole=True).read()])
    assert run.refresh().workers == ()
    now += 45
    view = run.refresh()
    assert {worker.address for worker in view.workers if worker.state is State.DEAD} == {"actor:3"}
    assert [worker.restarts for worker in view.workers if worker.address == "actor:2"] == [0]
    assert (run.status, view.is_over) == ("playing a recording", False)
    now += 100
    view = run.refresh()
    assert (run.status, view.is_over) == ("the recording has ended", True)


def test_the_recording_in_the_package_has_all_that_the_page_shows(monkeypatch):
    now = 100.0
    monkeypatch.setattr("roost.watch.live.time.monotonic", lambda: now)
    run = PlayedRun.shipped()
    assert {worker.component for worker in run.refresh().workers} >= {"actor", "rollout"}
    now += 1000
    view = run.refresh()
    assert {"died", "restarted", "launched", "reserved"} <= {event.what for event in view.events}
    assert min(map(len, (view.channels, view.links, view.curves, view.nodes, view.steps))) > 0
    assert view.notices == ()


def test_the_trace_has_waits_of_a_category_of_their_own(recording):
    recording.worker(0, line_of("call", "train", t=1.0, d=2.0), line_of("wait", "actor:1", t=1.5, d=1.0))
    found = json.loads(to_trace(read_whole(recording.folder)))["traceEvents"]
    assert [(item["name"], item["cat"]) for item in found if item["ph"] == "X"] == [
        ("train", "actor"),
        ("waits for actor:1", "wait"),
    ]


def test_a_time_of_day_that_jumps_moves_no_call(recording):
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0), line_of("clock", BEGAN - 86400.0, t=2.0))
    recording.write("actor/0.jsonl", line_of("call", "train", t=3.0, d=1.0))
    reader, model = EventReader(recording.folder), RunModel()
    model.take(reader.read())
    assert [span.start - BEGAN for span in model.spans("actor:0")] == [2.0, 4.0]


def test_a_job_that_starts_again_in_the_same_folder_is_shown_from_its_beginning(recording):
    recording.busy()
    live = LiveRun(recording.folder)
    assert len(live.refresh().workers) == 9
    shutil.rmtree(recording.folder / "events")
    again = header("driver", run="def", pid=2, host="head", wall=BEGAN + 100)
    recording.write("driver.jsonl", again, line_of("launched", "actor", t=1.0, text="1 worker"))
    recording.write("actor/0.jsonl", header("actor:0", run="def", pid=7, host="head", wall=BEGAN + 101, node=0))
    view = live.refresh()
    # The record is still that of the run before.
    assert view.is_over
    live._is_gone = False
    assert not live.model.view(BEGAN + 102).is_over
    assert [(worker.address, worker.pid, worker.calls) for worker in view.workers] == [("actor:0", 7, 0)]
    assert [event.what for event in view.events] == ["launched"]


@pytest.mark.parametrize("kind", ["channel", "weights", "engine", "requests", "wait", "waiting"])
@pytest.mark.parametrize(
    "odd", ["x", [1], {}, None, -1, 1e400, float("nan"), 10**400, True], ids=lambda odd: repr(odd)[:9]
)
def test_odd_values_between_workers_spoil_nothing(recording, kind, odd):
    names = ("depth", "puts", "gets", "getters", "most", "version", "d", "pause", "size", "url", "served", "seconds")
    recording.busy()
    recording.traffic()
    recording.worker(5, line_of("call", "train", t=1.0, d=1.0), json.dumps({kind: odd, "t": 2.0}))
    for name in names:
        values = {"puts": 1, "gets": 1, "version": 1, "d": 1, "served": 1, "seconds": 1, name: odd}
        recording.write("actor/5.jsonl", json.dumps({kind: "thing", "t": 3.0, **values}))
    view = recording.view(BEGAN + 61)
    json.dumps(page_facts(view, title="", status=""), allow_nan=False)
    json.dumps(chart_facts(view), allow_nan=False)
    prometheus_text(view)
    assert len(draw_screen(view, title="", status="").plain.split("\n")) <= 24
    assert "samples" in {channel.name for channel in view.channels}


def test_two_that_ask_for_the_stacks_of_a_worker_both_get_them(recording, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    recording.worker(0, line_of("usage", 0.0, t=0.5))
    view = recording.view(BEGAN + 2)
    # Left by one that was killed.
    (recording.folder / request_file("actor:0")).write_text("abandoned")
    got = []
    askers = [
        threading.Thread(target=lambda: got.append(stack_of(recording.folder, view, "actor:0", 20.0))) for _ in range(3)
    ]
    for asker in askers:
        asker.start()
    while any(asker.is_alive() for asker in askers):
        answer_request(recording.folder, "actor:0")
    assert len(got) == 3
    assert all("test_two_that_ask" in text for text in got)
    assert not (recording.folder / request_file("actor:0")).exists()
