"""Events: their format, the allowance of a file, and an emitter that nothing stops."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roost.comm.worker import Worker
from roost.runtime.events import emitter as emitter_module
from roost.runtime.events import file as file_module
from roost.runtime.events.emitter import Emitter
from roost.runtime.events.file import EventFile
from roost.runtime.events.format import line_of, metrics_file, node_file, number, worker_file
from roost.runtime.events.metrics import MetricLines, Value
from roost.runtime.events.pending import BYTES_PER_SECOND, SAVED_BYTES, Call, Pending, Running
from roost.runtime.events.sampler import Sampler
from roost.runtime.events.stacks import answer_file, answer_request, request_file
from roost.runtime.events.waits import record_waits_of_torch, waiting
from roost.runtime.process.timers import measured_call
from roost.runtime.runs.folder import RunDir
from waiting import wait_until


def parsed(lines):
    return [json.loads(line) for line in lines]


def read(folder, name):
    return parsed((folder / name).read_text().splitlines())


def flushed(folder, made):
    made.flush(60)
    return read(folder, NAME)


def test_the_files_of_workers_are_named_like_their_logs():
    assert str(worker_file("actor:3")) == "events/actor/3.jsonl"
    assert str(worker_file("actor:3:1")) == "events/actor/3/1.jsonl"
    assert str(node_file(2)) == "events/node-2.jsonl"


def test_a_line_is_json_whatever_a_name_has_in_it():
    line = line_of("call", 'a"b\n\x1b[2J</script>', t=1.0)
    assert "\n" not in line
    assert "\x1b" not in line
    assert json.loads(line) == {"call": 'a"b\n\x1b[2J</script>', "t": 1.0}
    assert json.loads(line_of("metric", "x", value=number(float("inf")))) == {"metric": "x", "value": "inf"}


def test_while_there_is_room_each_call_has_its_own_line():
    pending = Pending(100.0)
    calls = [Call("train", 101.0, 101.5, True), Call("train", 101.6, 101.7, False)]
    assert parsed(pending.lines(102.0, calls)) == [
        {"call": "train", "t": 1.0, "d": 0.5},
        {"call": "train", "t": 1.6, "d": 0.1, "failed": 1},
    ]


def test_a_call_under_way_is_announced_once_when_it_is_old_enough():
    pending = Pending(0.0)
    assert pending.lines(1.0, [], running=[Running("train", 0.95)], age=0.1) == []
    assert parsed(pending.lines(1.2, [], running=[Running("train", 0.95)], age=0.1)) == [{"began": "train", "t": 0.95}]
    assert pending.lines(1.4, [], running=[Running("train", 0.95)], age=0.1) == []


def hour(calls_per_second, methods=1, tick=0.2):
    """The lines that a worker with so many calls a second writes in an hour."""
    pending, out, now, made = Pending(0.0), [], 0.0, 0
    while now < 3600:
        due = int(now * calls_per_second) - made
        calls = [Call(f"method_{(made + i) % methods}", now - 0.09, now - 0.01, True) for i in range(due)]
        made += due
        out += pending.lines(now, calls)
        now += tick
    return [*out, *pending.rest()], made


@pytest.mark.parametrize(("rate", "methods"), [(10, 1), (10, 5), (100, 30)])
def test_an_hour_of_calls_stays_within_the_allowance_and_no_call_is_lost(rate, methods):
    lines, made = hour(rate, methods)
    size = sum(len(line) + 1 for line in lines)
    # 64 workers: less than 100 MB, with the samples of nodes.
    assert size <= SAVED_BYTES + 3600 * BYTES_PER_SECOND + 4000
    assert 64 * size < 95e6
    assert sum(item.get("n", 1) for item in parsed(lines)) == made
    assert max(item["t"] + item["d"] for item in parsed(lines)) <= 3600


def test_a_quiet_worker_keeps_every_call_for_ever():
    lines, made = hour(2)
    assert len(lines) == made


def test_many_calls_at_once_and_many_notes_do_not_keep_ended_calls_from_being_written():
    pending, size, last = Pending(0.0), 0, 0.0
    notes = 0
    for tick in range(5 * 1800):
        now = tick / 5
        # Twelve calls of a second each at any time, and four gauges a second.
        running = [Running("generate", round(now - part / 12, 4)) for part in range(12)]
        calls = [Call("generate", now - 1.1 - part / 100, now - 0.1, True) for part in range(2)]
        note = line_of("engine", "rollout:0", t=now, version=3, url="http://127.0.0.1:30000", size="x" * 40)
        lines = pending.lines(now, calls, running=running, notes=[note], age=0.1)
        size += sum(len(line) + 1 for line in lines)
        notes += len(note) + 1
        if any(line.startswith('{"call"') for line in lines):
            assert now - last < 5
            last = now
    assert 1799 - last < 5
    assert size - notes <= SAVED_BYTES + 1800 * BYTES_PER_SECOND + 4000


def test_when_there_is_no_room_the_oldest_call_is_announced_first():
    pending = Pending(0.0)
    pending.for_announcements.left = 0.0
    many = [Running("short", 9.0 + part / 100) for part in range(20)]
    hanging = Running("hang", 1.0)
    assert pending.lines(0.0, [], running=[*many, hanging], age=0.1) == []
    first, *_ = parsed(pending.lines(10.0, [], running=[*many, hanging], age=0.1))
    assert first == {"began": "hang", "t": 1.0}


def test_a_wait_that_follows_another_at_the_same_address_is_announced_too():
    pending = Pending(0.0)
    (first,) = parsed(pending.lines(1.0, [], running=[Running("actor:1", 0.5, True)], age=0.1))
    lines = pending.lines(
        1.4, [Call("actor:1", 0.5, 1.1, True, True)], running=[Running("actor:1", 1.2, True)], age=0.1
    )
    assert [first, *parsed(lines)] == [
        {"waiting": "actor:1", "t": 0.5},
        {"waiting": "actor:1", "t": 1.2},
        {"wait": "actor:1", "t": 0.5, "d": 0.6},
    ]


def test_a_call_that_was_announced_has_a_line_of_its_own_at_its_end_even_if_there_is_no_room():
    pending = Pending(0.0)
    pending.lines(1.0, [], running=[Running("a", 0.5), Running("b", 0.6)], age=0.1)
    pending.for_calls.left = 0.0
    calls = [Call("a", 0.5, 1.1, True), *(Call("a", 1.0 + part / 10, 1.05, True) for part in range(1, 4))]
    # Of the other one the end was dropped.
    assert parsed(pending.lines(1.2, calls)) == [{"call": "a", "t": 0.5, "d": 0.6}, {"call": "b", "t": 0.6, "d": 0.6}]


def test_merged_calls_say_how_many_they_were_and_how_long_they_took():
    pending = Pending(0.0)
    pending.for_calls.left = SAVED_BYTES / 4
    calls = [Call("a", 1.0, 1.1, True), Call("b", 1.1, 1.2, True), Call("a", 1.3, 1.5, False)]
    assert parsed(pending.lines(0.0, calls)) == [
        {"call": "a", "t": 1.0, "d": 0.5, "n": 2, "busy": 0.3, "failed": 1},
        {"call": "b", "t": 1.1, "d": 0.1},
    ]


def log(metrics, seconds, per_second, names=1, began=0.0, tick=0.2):
    """The lines of a process that logs so many values a second, and how many those are."""
    lines, made = [], 0
    for turn in range(1, round(seconds / tick) + 1):
        due = round(turn * tick * per_second) - made
        at = began + turn * tick
        lines += metrics.lines(at, [Value(f"metric_{(made + i) % names}", 0.5, made + i, at - 0.1) for i in range(due)])
        made += due
    return lines, made


def count_of(lines):
    return sum(len(item["value"]) if "metrics" in item else 1 for item in parsed(lines))


@pytest.mark.parametrize(("per_second", "seconds", "names"), [(12, 75, 1), (1000, 20, 1), (1000, 20, 300)])
def test_every_value_of_a_metric_is_kept_up_to_a_thousand_a_second(per_second, seconds, names):
    metrics = MetricLines(0.0)
    lines, made = log(metrics, seconds, per_second, names)
    assert count_of([*lines, *metrics.rest()]) == made == per_second * seconds
    assert not metrics.left_out
    steps = sorted(step for item in parsed(lines) for step in (item["step"] if "metrics" in item else [item["step"]]))
    assert steps == list(range(made))


def test_of_a_flood_of_metrics_a_thousand_a_second_are_kept_and_the_others_counted():
    metrics = MetricLines(0.0)
    lines, made = log(metrics, 90, 4000, names=3)
    kept = count_of([*lines, *metrics.rest()])
    assert 140_000 < kept <= 90_000 + 60_000
    assert metrics.left_out == {1000: made - kept}
    # A quiet metric loses nothing meanwhile.
    assert json.loads(metrics.lines(91.0, [Value("eval", 1.0, None, 90.9)])[-1])["metric"] == "eval"


def test_a_file_of_metrics_has_a_bound():
    """A day at the full rate, then another one, then a year: what one hour of it adds at each time."""
    metrics, size = MetricLines(0.0), []
    for began, written in ((0.0, 0), (86_400.0, 86_400_000), (172_800.0, 95_040_000), (3e7, 10**9)):
        # All that was written before is not written again here.
        metrics.written = written
        metrics.lines(began, [])
        lines, _ = log(metrics, 200, 1000, names=10, began=began, tick=1.0)
        size.append(sum(len(line) + 1 for line in lines) / 200)
    full, tenth, hundredth, later = size
    assert 86_400 * full < 4e9
    assert tenth < full / 4
    # What is saved up for a burst is in these minutes too.
    assert 86_400 * hundredth < 0.2e9
    assert later == pytest.approx(hundredth, rel=0.2)
    assert set(metrics.left_out) == {100, 10}


def test_a_thousand_metrics_a_second_reach_the_file_of_a_process(tmp_path, made):
    began = time.perf_counter()
    for step in range(3000):
        made.metric("loss", 1 / (step + 1), step)
    made.metric("\n" + "x" * 500, float("nan"))
    made.stop()
    assert time.perf_counter() - began < 60
    values, last = read(tmp_path, METRICS)[1:-1], read(tmp_path, METRICS)[-1]
    found = [pair for item in values for pair in zip(item["step"], item["value"], strict=True)]
    assert found == [(step, 1 / (step + 1)) for step in range(3000)]
    assert (last["metric"], last["value"]) == ("\n" + "x" * 99, "nan")
    assert not any("dropped" in item for item in read(tmp_path, NAME))


def test_a_process_that_may_start_no_thread_goes_on_and_its_events_come_later(tmp_path):
    code = f"""
import resource, threading
from pathlib import Path
from roost.runtime.events.emitter import emitter
from roost.runtime.process.timers import measured_call
threading.stack_size(64 << 20)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), hard))
emitter.start(Path({str(tmp_path)!r}), Path("events/actor/0.jsonl"), "actor:0", run="abc", node=0)
assert emitter._thread is None
with measured_call("early"):
    pass
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
emitter._next_start = 0.0
with measured_call("late"):
    pass
emitter.stop()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [item["call"] for item in read(tmp_path, NAME) if "call" in item] == ["early", "late"]


@pytest.fixture
def made(tmp_path):
    """An emitter that writes to `events/actor/0.jsonl` in a folder."""
    made = Emitter()
    made.start(tmp_path, worker_file("actor:0"), "actor:0", run="abc", node=0, devices=(1,))
    yield made
    made.stop()


NAME = worker_file("actor:0")
METRICS = metrics_file(NAME)
FIRST = '{"process":"actor:0"}'


def test_an_emitter_writes_what_happens(tmp_path, made):
    made.call_began(1, "train", 0.0)
    made.call_ended(1, "train", 0.0, True)
    made.metric("reward", 0.7, 3)
    made.note("died", "actor:1", "killed")
    made.stop()
    first, *rest = read(tmp_path, NAME)
    assert first["process"] == "actor:0"
    assert (first["v"], first["run"], first["pid"], first["devices"]) == (1, "abc", os.getpid(), [1])
    kinds = [next(iter(item)) for item in rest]
    assert {"usage", "call", "died"} <= set(kinds)
    assert kinds[-1] == "stopped"
    first, metric = read(tmp_path, METRICS)
    assert (first["process"], metric["metric"], metric["value"], metric["step"]) == ("actor:0", "reward", 0.7, 3)


def test_an_emitter_that_sleeps_is_woken_by_a_call(tmp_path, made):
    wait_until(lambda: made._is_asleep, "it to sleep")
    made.call_began(1, "train", 0.0)
    wait_until(lambda: '"began":"train"' in (tmp_path / NAME).read_text(), "the call to be announced")
    wait_until(lambda: made._is_asleep, "it to sleep during the call")
    made.call_ended(1, "train", 0.0, True)
    wait_until(lambda: '"call":"train"' in (tmp_path / NAME).read_text(), "the call to be written")


def test_before_start_and_after_stop_nothing_is_taken(tmp_path, made):
    made.stop()
    size = (tmp_path / NAME).stat().st_size
    made.metric("reward", 1.0)
    made.note("died", "x")
    assert not made._values
    assert not made._notes
    assert (tmp_path / NAME).stat().st_size == size
    never = Emitter()
    never.metric("reward", 1.0)
    never.stop()


def test_a_full_buffer_drops_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(emitter_module, "MOST_WAITING", 3)
    held = threading.Event()
    writes = EventFile.write

    def hang(self, lines):
        held.wait()
        return writes(self, lines)

    monkeypatch.setattr(EventFile, "write", hang)
    made = Emitter()
    made.start(tmp_path, NAME, "actor:0", run="abc")
    # A file server that hangs: calls go on.
    for number_ in range(50):
        made.call_ended(number_, "train", 0.0, True)
    held.set()
    made.stop()
    dropped = sum(item.get("dropped", 0) for item in read(tmp_path, NAME))
    calls = sum("call" in item for item in read(tmp_path, NAME))
    assert dropped + calls == 50
    assert dropped >= 44


def test_a_full_disk_drops_and_counts_and_the_rest_is_written_later(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "EVENTS_RETRY_SECONDS", 0.0)
    file = EventFile(tmp_path, NAME, '{"process":"actor:0"}')
    assert file.write(['{"call":"a"}'])
    real = os.write

    def full(descriptor, data):
        if len(data) > 4:
            return real(descriptor, data[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not file.write(['{"call":"b"}'])
    monkeypatch.setattr(os, "write", real)
    assert file.write(['{"call":"c"}'])
    lines = (tmp_path / NAME).read_text().splitlines()
    # Half a line, and after it whole ones.
    assert json.loads(lines[-1]) == {"call": "c"}
    assert json.loads(lines[-2]) == {"process": "actor:0"}


def test_lines_lost_to_a_full_disk_are_counted_in_the_file(tmp_path, made, monkeypatch):
    monkeypatch.setattr(file_module, "EVENTS_RETRY_SECONDS", 0.0)
    real, is_full = os.write, True

    def write(descriptor, data):
        if is_full and b"call" in bytes(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    made.call_ended(1, "lost", 0.0, True)
    wait_until(lambda: made._missing, "the loss to be noticed")
    is_full = False
    made.call_ended(1, "kept", 0.0, True)
    made.stop()
    found = read(tmp_path, NAME)
    assert sum(item.get("dropped", 0) for item in found) >= 1
    assert any(item.get("call") == "kept" for item in found)


def test_a_removed_run_folder_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "EVENTS_FILE_SECONDS", -1.0)
    monkeypatch.setattr(file_module, "EVENTS_RETRY_SECONDS", 0.0)
    base = tmp_path / "run"
    base.mkdir()
    file = EventFile(base, NAME, FIRST)
    assert file.write(["{}"])
    shutil.rmtree(base)
    assert not file.write(["{}"])
    assert not base.exists()
    # Its folder of events alone is.
    base.mkdir()
    assert file.write(["{}"])


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "events" / "actor").mkdir(parents=True)
    (tmp_path / NAME).symlink_to(tmp_path / "secret")
    assert not EventFile(tmp_path, NAME, FIRST).write(["{}"])
    assert not (tmp_path / "secret").exists()


@pytest.fixture
def folder_of_a_plain_user() -> Iterator[Path]:
    """A folder of this process's user, who is not root while the test runs: modes of files do not hold for root."""
    with tempfile.TemporaryDirectory() as name:
        if is_root := os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody").pw_uid
            os.chown(name, nobody, -1)
            os.seteuid(nobody)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


def test_a_read_only_folder_costs_the_events_and_nothing_else(folder_of_a_plain_user):
    folder_of_a_plain_user.chmod(0o500)
    assert not EventFile(folder_of_a_plain_user, NAME, FIRST).write(["{}"])
    folder_of_a_plain_user.chmod(0o700)
    assert EventFile(folder_of_a_plain_user, NAME, FIRST).write(["{}"])


def test_a_process_that_continues_a_file_begins_a_new_line(tmp_path):
    path = tmp_path / NAME
    path.parent.mkdir(parents=True)
    path.write_text('{"process":"actor:0"}\n{"call":"tr')
    assert EventFile(tmp_path, NAME, '{"process":"again"}').write(["{}"])
    assert path.read_text().splitlines()[1:] == ['{"call":"tr', '{"process":"again"}', "{}"]


def test_one_process_of_a_node_samples_it(tmp_path):
    samplers = [Sampler(tmp_path, "abc", 0) for _ in range(2)]
    for sampler in samplers:
        sampler.look()
        sampler.look()
    assert [sampler._thread is not None for sampler in samplers] == [True, False]
    wait_until(lambda: (tmp_path / node_file(0)).is_file(), "the first sample")
    wait_until(lambda: len((tmp_path / node_file(0)).read_text().splitlines()) > 1, "the first sample")
    first, sample, *_ = read(tmp_path, node_file(0))
    assert first["node"] == 0
    assert 0 <= sample["node"] <= 1
    assert 0 < sample["memory"] <= sample["of"]


def test_measured_calls_become_events_and_failures_are_marked(tmp_path, monkeypatch):
    made = Emitter()
    monkeypatch.setattr("roost.runtime.process.timers.emitter", made)
    made.start(tmp_path, NAME, "actor:0", run="abc")
    with measured_call("good"):
        pass
    with pytest.raises(ValueError, match="no"), measured_call("bad"):
        raise ValueError("no")
    made.stop()
    calls = {item["call"]: item.get("failed") for item in read(tmp_path, NAME) if "call" in item}
    assert calls == {"good": None, "bad": 1}
    assert not made._running


def test_log_metric_in_a_plain_process_does_nothing():
    Worker().log_metric("reward", 0.7, step=3)


def test_a_file_of_the_users_is_neither_removed_nor_appended_to(tmp_path, monkeypatch):
    made = Emitter()
    monkeypatch.setattr(emitter_module, "emitter", made)
    folder = tmp_path / "events"
    folder.mkdir()
    (folder / "mine.jsonl").write_text('{"mine": 1}\n')
    (folder / "driver.jsonl").write_text('{"mine": 2}\n')
    (folder / "old.jsonl").write_text(FIRST + "\n")
    run_dir = RunDir(path=str(tmp_path), token="abc", id="x")  # noqa: S106 - names a marker
    emitter_module.start_driver_events(run_dir)
    made.stop()
    assert sorted(path.name for path in folder.iterdir()) == ["driver.jsonl", "mine.jsonl"]
    assert (folder / "driver.jsonl").read_text() == '{"mine": 2}\n'


def test_flush_writes_what_waits_before_it_returns(tmp_path, made):
    for number_ in range(20):
        made.metric("reward", 0.5, number_)
        made.flush(30)
        assert (tmp_path / METRICS).read_text().count('"metric"') == number_ + 1
    Emitter().flush(30)


def test_a_process_that_is_asked_writes_its_stacks_once(tmp_path):
    request, answer = tmp_path / request_file("actor:0"), tmp_path / answer_file("actor:0")
    answer_request(tmp_path, "actor:0")
    assert not answer.exists()
    request.parent.mkdir(parents=True)
    request.write_text("abc")
    answer_request(tmp_path, "actor:0")
    assert answer.read_text().startswith("abc\n")
    assert "in test_a_process_that_is_asked_writes_its_stacks_once" in answer.read_text()
    assert not request.exists()
    request.symlink_to("/etc/passwd")
    answer_request(tmp_path, "actor:0")
    assert answer.read_text().startswith("abc\n")


def test_a_wait_is_a_line_of_its_own_and_short_ones_are_none(tmp_path, made):
    now = time.perf_counter()
    made.wait_began(1, lambda: "channel 'samples'", now)
    made.wait_ended(1, lambda: "channel 'samples'", now)
    made.wait_began(2, lambda: "actor:1", now - 1)
    made.wait_ended(2, lambda: "actor:1", now - 1)
    made.wait_began(3, lambda: 1 / 0, now - 1)
    made.wait_ended(3, lambda: 1 / 0, now - 1)
    made.stop()
    waits = [item["wait"] for item in read(tmp_path, NAME) if "wait" in item]
    assert waits == ["actor:1", "another process"]


def test_a_long_wait_is_announced_while_it_lasts(tmp_path, made):
    made.wait_began(1, lambda: "actor:1", time.perf_counter())
    made.flush(60)
    wait_until(lambda: any(item.get("waiting") == "actor:1" for item in read(tmp_path, NAME)), "the wait")


def test_what_was_inside_a_call_is_inside_its_line():
    for start, begin, end in ((1.00003, 1.000031, 1.10004), (2.00006, 2.00006, 2.000149), (3.1234567, 3.2, 3.23456789)):
        call, wait = parsed(Pending(0.0).lines(9.0, [Call("a", start, end, True), Call("b", begin, end, True, True)]))
        assert call["t"] <= wait["t"]
        assert round(wait["t"] + wait["d"], 6) == round(call["t"] + call["d"], 6)


def test_a_wait_outside_any_call_is_marked_in_a_worker(tmp_path, made, monkeypatch):
    monkeypatch.setattr("roost.runtime.events.waits.emitter", made)
    monkeypatch.setattr("roost.runtime.process.timers.emitter", made)

    def wait(name, since):
        with waiting(lambda: name, since):
            pass

    now = time.perf_counter()
    with measured_call("train"):
        wait("inside", now - 1)
        thread = threading.Thread(target=wait, args=("beside", now - 1))
        thread.start()
        thread.join(60)
    made.stop()
    found = {item["wait"]: item.get("aside") for item in read(tmp_path, NAME) if "wait" in item}
    assert found == {"inside": None, "beside": 1}


def test_a_wait_in_torch_distributed_is_a_wait(tmp_path, made, monkeypatch):
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setattr("roost.runtime.events.waits.emitter", made)
    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)
    monkeypatch.setattr(dist.Work, "_roost_wait", None, raising=False)
    del dist.Work._roost_wait
    record_waits_of_torch()
    store, groups = dist.HashStore(), [None, None]

    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first = groups[0].allreduce([torch.ones(1)])
    waits = threading.Thread(target=first.wait)
    waits.start()
    wait_until(lambda: any(item.get("waiting") == "torch.distributed" for item in flushed(tmp_path, made)), "the wait")
    groups[1].allreduce([torch.ones(1)]).wait()
    waits.join(60)
    made.stop()
    assert [item["wait"] for item in read(tmp_path, NAME) if "wait" in item][:1] == ["torch.distributed"]


def test_short_waits_share_a_line_from_the_start():
    waits = [Call("actor:1", 1 + i / 100, 1.005 + i / 100, True, True) for i in range(10)]
    found = parsed(Pending(0.0).lines(2.0, [*waits, Call("actor:1", 1.5, 1.6, True, True)]))
    assert [(item["d"], item.get("n")) for item in found] == [(0.1, None), (0.095, 10)]


def test_many_waits_share_a_line_apart_from_the_calls_around_them():
    pending = Pending(0.0)
    pending.for_calls.left = SAVED_BYTES / 4
    calls = [Call("a", 1.0, 2.0, True), Call("a", 1.1, 1.2, True, True), Call("a", 1.3, 1.5, True, True)]
    assert parsed(pending.lines(0.0, calls)) == [
        {"call": "a", "t": 1.0, "d": 1.0},
        {"wait": "a", "t": 1.1, "d": 0.4, "n": 2, "busy": 0.3},
    ]


class Queue:
    """Something with a gauge."""

    depth = 1

    def gauge(self):
        return [("channel", "samples", {"depth": self.depth})]

    def broken(self):
        raise ValueError("no")


def test_a_gauge_is_written_when_it_changes_and_ends_with_its_object(tmp_path, made):
    def depths():
        return [item["depth"] for item in read(tmp_path, NAME) if "channel" in item]

    made.flush(60)
    queue = Queue()
    made.add_gauge(queue.broken)
    made.add_gauge(queue.gauge)
    wait_until(lambda: depths() == [1], "the first value")
    queue.depth = 2
    wait_until(lambda: depths() == [1, 2], "the second value")
    del queue
    made.stop()
    assert depths() == [1, 2]


def test_waiting_surrounds_a_wait_of_this_process(tmp_path, monkeypatch):
    made = Emitter()
    monkeypatch.setattr("roost.runtime.events.waits.emitter", made)
    with waiting(lambda: "nobody"):
        pass
    made.start(tmp_path, NAME, "actor:0", run="abc")
    with waiting(lambda: "actor:1"):
        time.sleep(0.01)
    made.stop()
    (found,) = [item for item in read(tmp_path, NAME) if "wait" in item]
    assert found["wait"] == "actor:1"
    assert found["d"] >= 0.01


def test_a_collector_that_breaks_ends_and_the_process_goes_on(tmp_path, monkeypatch):
    made = Emitter()
    made.start(tmp_path, NAME, "actor:0", run="abc")
    thread = made._thread

    def broken(*_, **__):
        raise RuntimeError("the collector is broken")

    monkeypatch.setattr(made, "_write", broken)
    made.note("died", "actor:1")
    thread.join(60)
    assert not thread.is_alive()
    assert not made.is_on
    made.call_began(1, "train", 0.0)
    made.call_ended(1, "train", 0.0, True)
    made.metric("reward", 1.0)
    made.flush(60)
    made.stop()


def test_a_fork_writes_nothing_and_never_waits_for_a_lock_of_its_parent(tmp_path):
    emitter = emitter_module.emitter
    emitter.start(tmp_path, worker_file("actor:0"), "actor:0", run="one")
    try:
        # As the thread does for a moment now and then.
        with emitter._wake._cond:
            child = os.fork()
            if not child:
                emitter.note("died", "actor:1")
                emitter.call_began(1, "train", time.perf_counter())
                emitter.stop()
                os._exit(7)
        ended: list[int] = []
        wait_until(lambda: ended.append(os.waitpid(child, os.WNOHANG)[1]) or ended[-1], "the fork has ended", 20)
        assert os.waitstatus_to_exitcode(ended[-1]) == 7
    finally:
        emitter.stop()
    assert "died" not in (tmp_path / worker_file("actor:0")).read_text()
