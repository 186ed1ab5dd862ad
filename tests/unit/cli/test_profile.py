"""`roost profile`: what the calls of a run took, apart from what they waited for."""

from __future__ import annotations

import pytest
import yaml

from recordings import Recording
from roost.config.profile import read_profile
from roost.config.run import read_run_draft
from roost.config.topology import Topology
from roost.placement.planner import make_plan
from roost.runtime.events.format import line_of
from roost.watch.roles import own_seconds
from roost.watch.views import Span

JOB = """
cluster:
  num_nodes: 1
  component_placement: {rollout: 0-1, actor: 2-3}
workers: {rollout: job:Rollout, actor: job:Actor}
entry: job:main
flow: {step: rollout.generate -> actor.train, weights: actor -> rollout}
"""


def call(start, end, **more):
    return Span(name="train", start=start, end=end, busy=end - start, **more)


def wait(start, end, **more):
    return Span(name="channel 'x'", start=start, end=end, busy=end - start, is_wait=True, **more)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([call(0, 10), wait(2, 5), wait(8, 10)], [5]),
        # One inside the other, and two that overlap, as of two threads of one call.
        ([call(0, 10), wait(2, 6), wait(3, 5), wait(5.5, 7)], [5]),
        # A wait that begins before the call, as of a call before, and one that goes on after it.
        ([wait(0, 3), call(1, 10), wait(9, 12)], [6]),
        ([call(0, 4), call(5, 9), wait(6, 7)], [4, 3]),
        # Two calls at once that both wait; and one of two that waits.
        ([call(0, 10), call(0, 10), wait(2, 6), wait(2, 6)], [6, 6]),
        ([call(0, 10), call(0, 10), wait(2, 6)], [8, 8]),
        ([call(0, 10), wait(2, 6, is_aside=True)], [10]),
        ([call(0, 0), call(1, 1), wait(0, 2)], [0, 0]),
    ],
)
def test_a_moment_of_waiting_is_subtracted_once(spans, expected):
    assert [round(seconds, 9) for _, seconds in own_seconds(spans)] == expected


def test_lines_of_several_calls_and_waits_share_what_was_waited():
    calls = Span(name="train", start=0.0, end=10.0, calls=20, busy=8.0)
    waits = Span(name="actor:0", start=0.0, end=10.0, calls=30, busy=3.0, is_wait=True)
    ((_, seconds),) = own_seconds([calls, waits])
    assert seconds == pytest.approx(5.0)


def test_a_profile_has_no_waits_and_says_where_the_run_sat_and_how_long_its_steps_took(tmp_path, roost):
    recording = Recording(tmp_path)
    for rank in range(2):
        # Each step takes half a second: generate works for 0.2 s, train for 0.1 s, and waits for the rest of it.
        generated = [line_of("call", "generate", t=step / 2, d=0.2) for step in range(8)]
        trained = [line_of("call", "train", t=step / 2 + 0.01, d=0.4) for step in range(8)]
        waited = [line_of("wait", "channel 'x'", t=step / 2 + 0.02, d=0.3) for step in range(8)]
        recording.worker(rank, *generated, group="rollout")
        recording.worker(rank, *trained, *waited, line_of("call", "save", t=9.0, d=1.0), group="actor")
    draft = read_run_draft(yaml.safe_load(JOB))
    plan = make_plan(draft, Topology.from_shorthand("1x4"))
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "job.yaml").write_text(JOB)
    code, out, err = roost("profile", f"{tmp_path}/")
    assert code == 0, err
    written = yaml.safe_load(out)
    assert written["calls"]["actor.train"]["seconds"][2] == pytest.approx([0.1] * 7)
    assert written["calls"]["rollout.generate"]["seconds"][2] == pytest.approx([0.2] * 7)
    assert set(written["calls"]) == {"actor.train", "rollout.generate"}
    spans = {"rollout.generate": {"begins": 0.0, "ends": 0.2}, "actor.train": {"begins": 0.01, "ends": 0.41}}
    (written_run,) = written["runs"]
    assert written_run.pop("calls") == {name: pytest.approx(span) for name, span in spans.items()}
    assert written_run == {"placement": {"rollout": "0-1", "actor": "2-3"}, "step": pytest.approx([0.5] * 6)}
    (run,) = read_profile(written).runs
    assert (run.placement, run.step.median) == ({"rollout": (0, 1), "actor": (2, 3)}, 500_000_000)
