"""The sentence that says what limits a run: each verdict on a small run, and on jobs drawn at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from drawn_jobs import draw_job
from recordings import BEGAN, Recording
from roost.runtime.events.format import line_of
from roost.watch.facts import page_facts
from roost.watch.live import LiveRun
from roost.watch.model import RunModel
from roost.watch.reading import EventReader
from roost.watch.screen import draw_screen
from roost.watch.verdict import judge
from roost.watch.views import Limit

JOBS = 230


@pytest.fixture
def recording(tmp_path):
    return Recording(tmp_path)


def verdict_of(recording, now, bound=None):
    reader, model = EventReader(recording.folder), RunModel()
    model.take(reader.read())
    return judge(model, model.view(BEGAN + now), bound)


def calls(name, seconds, every, start=1.0, until=59.0, wait=None):
    """The calls of a worker, one every few seconds; each waits first, if it waits."""
    lines, t = [], start
    while t + seconds <= until:
        lines.append(line_of("call", name, t=t, d=seconds))
        if wait is not None:
            lines.append(line_of("wait", wait[0], t=t, d=wait[1]))
        t += every
    return lines


def alive(until, cpu=0.0):
    return [line_of("usage", cpu, t=float(t), memory=1) for t in range(2, until, 2)]


def test_whom_the_others_wait_for_sets_the_pace(recording):
    for rank in range(2):
        recording.worker(rank, *calls("generate", 2.0, 2.0), *alive(60), group="rollout")
    recording.worker(0, *calls("train", 2.0, 2.0, wait=("channel 'samples'", 1.7)), *alive(60))
    found = verdict_of(recording, 60)
    assert (found.limit, found.who, found.is_sure) == (Limit.PACE, ("rollout",), True)
    assert str(found) == "rollout sets the pace: actor waits 85% of the time for channel 'samples'"
    assert "rollout (2 workers) works 100%" in found.evidence
    assert "actor (1 worker) works 15%, waits 85% for channel 'samples'" in found.evidence


def test_of_roles_that_take_turns_the_longest_sets_the_pace(recording):
    recording.worker(0, *calls("generate", 2.0, 3.0), *alive(60), group="rollout")
    recording.worker(0, *calls("train", 1.0, 3.0, start=3.0), *alive(60))
    found = verdict_of(recording, 60)
    assert str(found) == "rollout sets the pace: it works 67% of the time, actor 33%"
    recording.write("driver.jsonl", line_of("stopped", "", t=60.0))
    assert str(verdict_of(recording, 99)) == "rollout set the pace: it works 67% of the time, actor 33%"


def test_a_worker_that_hangs_is_named_with_its_cpu_and_first_with_a_doubt(recording):
    known = calls("generate", 1.0, 1.0, until=20.0)
    for rank in range(3):
        recording.worker(rank, *known, *alive(200), group="rollout")
    recording.write("rollout/2.jsonl", line_of("began", "generate", t=20.0))
    recording.worker(0, line_of("began", "train", t=5.0), line_of("waiting", "channel 'samples'", t=20.0), *alive(200))
    assert verdict_of(recording, 25).limit is not Limit.HANG
    assert str(verdict_of(recording, 36)) == ("probably: rollout:2 has been in generate for 15 s; its CPU is at 0%")
    found = verdict_of(recording, 141)
    assert str(found) == "rollout:2 has been in generate for 2 min; its CPU is at 0%"
    assert found.who == ("rollout:2",)
    assert found.evidence[1:] == (
        "before, generate took 1 s at most",
        "`roost stack latest rollout:2` shows where it stands",
    )


def test_who_is_missing_where_the_others_wait_for_each_other_is_named(recording):
    for rank in range(4):
        waits = [line_of("began", "train", t=9.0), line_of("waiting", "torch.distributed", t=10.0)]
        recording.worker(rank, *alive(300), line_of("wait", "torch.distributed", t=2.0, d=1.5), *waits * (rank != 3))
    recording.write("driver.jsonl", line_of("waiting", "actor, train", t=10.0))
    found = verdict_of(recording, 120)
    assert str(found) == "actor:3 is not in torch.distributed, where actor:0, actor:1 and actor:2 wait"
    assert found.limit is Limit.HANG


def test_where_all_wait_the_sentence_says_so(recording):
    for rank, whom in enumerate(("actor:1", "actor:0")):
        waits = [line_of("wait", whom, t=2.0, d=1.5), line_of("waiting", whom, t=10.0)]
        recording.worker(rank, *alive(300), line_of("began", "train", t=9.0), *waits)
    recording.write("driver.jsonl", line_of("waiting", "actor, train", t=10.0))
    assert str(verdict_of(recording, 120)) == ("all wait and nobody works: actor for actor:1 and actor for actor:0")


def test_slow_workers_are_named_and_how_slow_they_are(recording):
    for rank in range(8):
        own = 1.3 if rank in (3, 5) else 1.0
        waits = [line_of("wait", "torch.distributed", t=t + own, d=1.4 - own) for t in map(float, range(1, 58, 2))]
        recording.worker(rank, *calls("step", 1.4, 2.0), *waits, *alive(60), group="learner")
    found = verdict_of(recording, 60)
    assert str(found) == "2 of 8 workers of learner are 30% slower than the others: learner:3 and learner:5"
    assert (found.limit, found.is_sure) == (Limit.STRAGGLER, True)


def test_a_group_that_is_alike_and_waits_for_each_other_communicates(recording):
    for rank in range(4):
        waits = [line_of("wait", "torch.distributed", t=t + 0.6, d=0.4) for t in map(float, range(1, 58))]
        recording.worker(rank, *calls("step", 1.0, 1.0), *waits, *alive(60))
    assert str(verdict_of(recording, 60)) == "all workers of actor wait 40% of the time for torch.distributed"


def test_a_job_at_the_proven_bound_is_limited_by_nothing(recording):
    recording.worker(0, *calls("train", 1.0, 1.0), *alive(60))
    recording.metrics(0, *[line_of("metric", "loss", t=float(t), value=1.0, step=t) for t in range(1, 58)])
    assert str(verdict_of(recording, 60, bound=0.95)) == (
        "nothing: it is at the proven bound, 1 s a step of at least 0.95 s"
    )
    assert verdict_of(recording, 60, bound=0.5).limit is Limit.PACE


def test_a_driver_that_computes_while_the_workers_are_idle_sets_the_pace(recording):
    recording.worker(0, *calls("train", 0.2, 1.0), *alive(60))
    waits = [line_of("wait", "actor, train", t=float(t), d=0.2) for t in range(1, 58)]
    recording.write("driver.jsonl", *waits)
    assert str(verdict_of(recording, 60)).startswith("the driver sets the pace: it computes 8")


def test_updates_of_weights_and_engines_can_set_the_pace(recording):
    recording.worker(0, *calls("train", 0.3, 1.0), *alive(60))
    updates = [line_of("weights", "actor -> rollout", t=float(t), version=t, d=0.6) for t in range(1, 58)]
    recording.write("driver.jsonl", *updates, line_of("waiting", "weights", t=1.0))
    assert str(verdict_of(recording, 60)) == ("updates of weights set the pace: actor -> rollout takes 58% of the time")


def test_an_agent_that_waits_for_the_router_waits_for_the_engines(recording):
    recording.worker(0, *calls("ask", 1.0, 1.0, wait=("the router", 0.9)), *alive(60), group="agent")
    recording.worker(0, line_of("engine", "rollout:0", t=1.0, url="u", version=1), *alive(60), group="rollout")
    found = verdict_of(recording, 60)
    assert str(found) == "the engines set the pace: agent waits 90% of the time for them"
    assert found.who == ("rollout",)


def test_a_death_comes_first_and_ends_with_the_restart(recording):
    recording.worker(0, *calls("train", 1.0, 1.0), *alive(60))
    recording.write("driver.jsonl", line_of("died", "actor:0", t=30.0, text="killed by signal 9"))
    found = verdict_of(recording, 60)
    assert (str(found), found.evidence) == ("actor:0 died", ("actor:0 died: killed by signal 9",))
    recording.write("driver.jsonl", line_of("restarted", "actor:0", t=40.0))
    assert verdict_of(recording, 60).limit is Limit.PACE


def test_a_node_that_is_gone_is_guessed_from_silence(recording):
    for rank in range(4):
        recording.worker(rank, *calls("train", 1.0, 1.0), *(alive(300) if rank > 1 else alive(60)))
    found = verdict_of(recording, 100)
    assert "actor:0 and actor:1 wrote nothing for 40 s: it looks like a node that is gone" in str(found)
    assert found.evidence == ("on node 0",)


def test_it_says_nothing_where_nothing_is_known(recording):
    recording.worker(0, line_of("began", "train", t=1.0), *alive(20))
    found = verdict_of(recording, 20)
    assert (found.limit, found.evidence) == (Limit.UNCLEAR, ())
    view = replace(recording.view(BEGAN + 20), verdict=found)
    assert "not clear" not in draw_screen(view, title="x", status="running", width=100, height=30).plain
    assert page_facts(view, title="", status="")["verdict"] is None


def test_top_page_and_show_begin_with_it(recording, roost):
    recording.worker(0, *calls("generate", 2.0, 3.0), *alive(60), group="rollout")
    recording.worker(0, *calls("train", 1.0, 3.0, start=3.0), *alive(60))
    recording.write("driver.jsonl", line_of("stopped", "", t=60.0))
    view = LiveRun(recording.folder).refresh()
    sentence = "rollout set the pace: it works 67% of the time, actor 33%"
    lines = draw_screen(view, title="x", status="running", width=100, height=30).plain.splitlines()
    assert lines[2] == f"» {sentence}"
    assert lines[3].startswith("  rollout (1 worker) works 67%; actor (1 worker) works 33%; in the last ")
    facts = page_facts(view, title="", status="")["verdict"]
    assert (facts["text"], len(facts["evidence"])) == (sentence, 3)
    code, out, _ = roost("top", str(recording.folder), "--once")
    assert code == 0
    assert sentence in out


def test_the_sentence_is_right_for_drawn_jobs_and_hardly_ever_wrong_with_confidence():
    right, wrong, count = Counter(), Counter(), Counter()
    for seed in range(JOBS):
        job = draw_job(seed)
        found = judge(job.model, job.model.view(job.now))
        is_right = found.limit in job.limits and (not job.who or set(found.who) == job.who)
        count[job.kind] += 1
        right[job.kind] += is_right
        wrong[job.kind] += not is_right and found.is_sure
    told = {kind: (right[kind], wrong[kind], count[kind]) for kind in sorted(count)}
    assert right.total() >= 0.95 * JOBS, told
    assert wrong.total() <= 0.02 * JOBS, told
