"""The search by examples: flows, profiles, answers, proofs, pictures and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from roost import ConfigError, JobConfig, Topology, make_plan
from roost.cli.commands.search import with_placement
from roost.config.flow import FlowConfig
from roost.config.profile import Timing, read_profile
from roost.config.run import read_job_text
from roost.render.bars import Bar, draw_bars, draw_bars_svg
from roost.render.flow import flow_lines
from roost.runtime.events.format import header, line_of, worker_file
from roost.search.answer import Answer, search
from roost.search.find import Found, find_best
from roost.search.layout import lay_out, placement_text
from roost.search.measured import CallTime, Placed, RunTimes, make_profile
from roost.search.predict import check_runs
from roost.search.problem import SECOND, Call, Problem, Role
from roost.search.sensitivity import deciding
from roost.search.setup import make_setup
from roost.search.simulate import draw, simulate

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "examples" / "search.yaml"
PROFILE = ROOT / "examples" / "search-profile.yaml"


def read_flow(step: str, more: str = "") -> FlowConfig:
    names = sorted({part.split(".")[0] for part in step.replace("[", " ").replace(",", " ").split() if "." in part})
    placed = ", ".join(f"{name}: 0" for name in names)
    draft = read_job_text(
        f"cluster: {{component_placement: {{{placed}}}}}\nflow:\n  step: {step}\n{more}", name="j.yaml"
    )
    draft.notes.raise_if_any()
    assert draft.flow is not None
    return draft.flow


def answer_of(step: str, calls: dict, cluster: str, more: str = "", interpolate: bool = False, **sections) -> Answer:
    profile = read_profile({"version": 1, "calls": calls, **sections})
    setup = make_setup(read_flow(step, more), profile, Topology.from_shorthand(cluster), interpolate=interpolate)
    return search(setup)


TWO = "rollout.generate -> actor.train"
ASYNCHRONOUS = "  weights: actor -> rollout\n  staleness: 1\n"


def test_flow_order_takes_the_call_that_is_written_first_of_those_that_are_ready():
    flow = read_flow("[a.late -> d.end, b.one -> c.two, c.two -> a.late]")
    assert flow.calls == ("a.late", "d.end", "b.one", "c.two")
    assert flow.order == ("b.one", "c.two", "a.late", "d.end")


def test_a_flow_is_drawn_as_chains_with_every_arrow_once():
    flow = read_flow("[a.x -> b.y -> d.z, c.y -> d.z]", "  weights: d -> a\n  staleness: 2\n")
    assert flow_lines(flow) == ["a.x → b.y → d.z", "c.y → d.z", "weights: d → a, at most 2 steps behind"]


def test_a_single_call_is_a_flow():
    assert flow_lines(read_flow("a.x")) == ["a.x"]


def test_roles_that_cannot_overlap_share_all_devices():
    calls = {name: {"seconds": {2: 10.0, 4: 6.0}} for name in ("rollout.generate", "actor.train")}
    best = answer_of(TWO, calls, "1x4", "  weights: actor -> rollout\n").best
    assert best.component_placement == {"rollout": "0-3", "actor": "0-3"}
    assert best.step_time == 12 * SECOND
    assert best.critical_cycle.events == ("rollout.generate", "actor.train", "weights")


def test_with_stale_weights_the_roles_overlap_on_devices_of_their_own():
    calls = {"rollout.generate": {"seconds": {2: 10.0, 4: 6.0}}, "actor.train": {"seconds": {2: 9.0, 4: 6.0}}}
    answer = answer_of(TWO, calls, "1x4", ASYNCHRONOUS, weights={"seconds": 0.5})
    assert answer.best.component_placement == {"rollout": "0-1", "actor": "2-3"}
    assert answer.best.step_time == Fraction(21, 2) * SECOND
    assert str(answer.best.critical_cycle) == "rollout.generate → weights → rollout.generate: 10.5 s"
    assert [other.component_placement for other in answer.others] == [{"rollout": "0-3", "actor": "0-3"}]
    assert answer.loss(answer.others[0]) == (
        "loses 2 s (19 %) to rollout.generate → actor.train → weights; rollout with actor on the same devices"
    )


def test_switches_are_paid_between_roles_that_share_and_shown_for_each():
    calls = {name: {"seconds": {4: 6.0}} for name in ("rollout.generate", "actor.train")}
    switch = {"rollout": {"wake": 2.0, "sleep": 1.0}, "actor": {"wake": 4.0, "sleep": 3.0}}
    best = answer_of(TWO, calls, "1x4", switch=switch).best
    assert best.step_time == (6 + 1 + 4 + 6 + 3 + 2) * SECOND
    shares = best.shares()
    assert shares["rollout"].switching == pytest.approx(3 / 22)
    assert shares["actor"].switching == pytest.approx(7 / 22)
    assert shares["actor"].idle == pytest.approx(9 / 22)


def test_ties_go_to_fewer_devices_then_to_fewer_shared_ones():
    calls = {"rollout.generate": {"seconds": {2: 10.0}}, "actor.train": {"seconds": {1: 3.0, 2: 3.0}}}
    best = answer_of(TWO, calls, "1x4").best
    assert best.component_placement == {"rollout": "0-1", "actor": "2"}
    tight = answer_of(TWO, calls, "1x2").best
    assert tight.component_placement == {"rollout": "0-1", "actor": "0"}


def test_a_role_without_devices_takes_its_time_and_has_no_placement():
    calls = {"rollout.generate": {"seconds": {4: 6.0}}, "reward.score": {"seconds": {0: 9.0}}}
    answer = answer_of("rollout.generate -> reward.score", calls, "1x4")
    assert answer.best.component_placement == {"rollout": "0-3"}
    assert answer.best.step_time == 9 * SECOND
    assert answer.to_dict()["roles"]["reward"] == {"devices": 0, "busy": 1.0, "switching": 0.0, "idle": 0.0}


def test_interpolated_times_are_marked_and_the_winner_says_which_to_measure(roost, tmp_path):
    calls = {name: {"seconds": {8: 16.0, 32: 4.0}} for name in ("rollout.generate", "actor.train")}
    measured = answer_of(TWO, calls, "4x8", ASYNCHRONOUS)
    between = answer_of(TWO, calls, "4x8", ASYNCHRONOUS, interpolate=True)
    assert not measured.best.interpolated
    assert between.best.component_placement == {"rollout": "0-15", "actor": "16-31"}
    assert between.best.step_time == 8 * SECOND
    told = ("rollout.generate with 16 devices", "actor.train with 16 devices")
    assert between.best.interpolated == told
    assert between.to_dict()["interpolated"] == list(told)
    job, profile = tmp_path / "job.yaml", tmp_path / "p.yaml"
    job.write_text(
        f"cluster:\n  component_placement:\n    rollout: 0\n    actor: 1\nflow:\n  step: {TWO}\n{ASYNCHRONOUS}"
    )
    profile.write_text(json.dumps({"version": 1, "calls": calls}))
    code, out, _ = roost("search", str(job), "-c", "4x8", "-p", str(profile), "--interpolate")
    assert code == 0
    assert "measure rollout.generate with 16 devices and actor.train with 16 devices to decide" in out


def test_sensitivity_names_the_measurements_that_decide():
    calls = {"rollout.generate": {"seconds": {2: 10.0, 4: 5.4}}, "actor.train": {"seconds": {2: 10.0, 4: 5.4}}}
    answer = answer_of(TWO, calls, "1x4", ASYNCHRONOUS)
    found = deciding(answer.setup.problem, Found(answer.best.family, answer.best.step_time))
    assert [(doubt.call, doubt.devices, doubt.factor > 1) for doubt in found] == [
        ("rollout.generate", 2, True),
        ("actor.train", 2, True),
    ]


def test_a_worker_s_devices_stay_on_one_node_even_if_that_leaves_gaps():
    roles = (Role(name="a", counts=((2,),)), Role(name="b", counts=((8,),), devices_per_worker=4))
    calls = tuple(Call(name=f"{role.name}.x", role=role.name, times=({role.counts[0][0]: 1},)) for role in roles)
    problem = Problem(roles=roles, calls=calls, edges=(), weights=None, nodes=(6, 6), kinds=(0, 0))
    best = find_best(problem)[0]
    ranks = lay_out(problem, best.family)
    assert {name: placement_text(problem, name, own) for name, own in ranks.items()} == {
        "a": "0-1",
        "b": "2-9:0-1",
    }
    third = replace(roles[0], name="c")
    more = replace(problem, roles=(*roles, third), calls=(*calls, replace(calls[0], name="c.x", role="c")))
    ranks = lay_out(more, find_best(more)[0].family)
    assert placement_text(more, "b", ranks["b"]) in ("2-9:0-1", "2-5:0,6-9:1")


def test_the_answer_as_json_has_the_keys_of_the_reference(roost):
    code, out, _ = roost("search", str(JOB), "-c", "4x8:H100", "-p", str(PROFILE), "--format", "json")
    answer = json.loads(out)
    assert code == 0
    assert list(answer) == [
        "version", "step_seconds", "bound_seconds", "devices", "component_placement", "critical_cycle", "interpolated",
        "roles", "alternatives",
    ]  # fmt: skip
    assert answer["component_placement"] == {"rollout": "0-15:0-3", "actor": "16-31"}
    assert (answer["step_seconds"], answer["bound_seconds"], answer["devices"]) == (62.5, 62.5, 32)
    assert answer["critical_cycle"] == ["rollout.generate", "weights"]
    assert list(answer["alternatives"][0]) == ["component_placement", "step_seconds", "why"]


def test_the_best_placement_is_written_into_the_job_and_the_rest_stays(roost, tmp_path):
    best = tmp_path / "best.yaml"
    code, _, _ = roost("search", str(JOB), "-c", "2x8", "-p", str(PROFILE), "--apply", str(best))
    assert code == 0
    before, after = JOB.read_text().splitlines(), best.read_text().splitlines()
    assert [line for line in after if line not in before] == ["    actor: 0-15"]
    assert [part.name for part in JobConfig.from_file(best).cluster.components] == ["rollout", "actor", "reward"]


def test_a_shared_entry_is_split_and_components_outside_the_flow_keep_theirs():
    env = "    env: {node_group: node, placement: 0}\n\nseed: 1\n"
    text = f"cluster:\n  component_placement:\n    actor,rollout: 0-7\n{env}"
    assert with_placement(text, "job.yaml", {"actor": "0-3", "rollout": "4-7"}) == (
        f"cluster:\n  component_placement:\n    actor: 0-3\n    rollout: 4-7\n{env}"
    )
    with pytest.raises(ConfigError, match="on one line"):
        with_placement("cluster: {component_placement: {actor: 0}}\n", "job.yaml", {"actor": "1"})


def test_what_does_not_change_stays_as_it_is_written_comments_included():
    text = """# The job.
cluster:
  component_placement:
    # Trains.
    actor:   "0-3"  # all of node 0

    # Generates.
    rollout: 4-7    # node 1
    reward:
      node_group: node   # on the head
      placement: 0
    env, sim: 0-1  # both
flow: {}  # nothing
"""
    changed = with_placement(text, "job.yaml", {"actor": "0-3", "rollout": "0-7", "env": "0-1", "sim": "2"})
    expected = text.replace("    rollout: 4-7    # node 1", "    rollout: 0-7    # node 1")
    assert changed == expected.replace("    env, sim: 0-1  # both", "    env: 0-1\n    sim: 2  # both")
    assert with_placement(text, "job.yaml", {"actor": "0-3"}) == text


def test_a_proof_is_written_and_holds_and_a_changed_one_does_not(roost, tmp_path):
    proof = tmp_path / "proof.json"
    assert roost("search", str(JOB), "-c", "4x8", "-p", str(PROFILE), "--prove", str(proof))[0] == 0
    code, out, _ = roost("search", "--check", str(proof))
    assert (code, out.split(" (")[0]) == (0, "the proof holds: no placement takes less than 62.5 s a step")
    proof.write_text(proof.read_text().replace("62500000000", "61500000000"))
    code, _, err = roost("search", "--check", str(proof))
    assert (code, "the proof does not hold" in err) == (2, True)
    proof.write_text("[]")
    assert "a proof is a mapping" in roost("search", "--check", str(proof))[2]


def test_the_checker_has_at_most_200_lines_and_shares_only_values_with_the_search():
    text = (ROOT / "src" / "roost" / "search" / "check.py").read_text()
    assert len(text.splitlines()) <= 200
    imported = [line for line in text.splitlines() if line.startswith("from roost")]
    assert imported == [
        "from roost.errors import ConfigError",
        "from roost.search.problem import WEIGHTS, Group, Problem, digest",
    ]


@pytest.mark.parametrize(("form", "mark"), [("svg", "<svg"), ("html", "<!doctype html>")])
def test_pictures_show_a_bar_for_each_role(roost, form, mark):
    code, out, _ = roost("search", str(JOB), "-c", "4x8", "-p", str(PROFILE), "--format", form)
    assert code == 0
    assert out.startswith(mark)
    for name in ("rollout", "actor", "reward"):
        assert f">{name}<" in out
    assert "30 % idle" in out


def test_bars_add_up_and_show_what_is_small():
    bars = [Bar("a", "#000000", (0.5, 0.001, 0.499)), Bar("long", "#000000", (1.0, 0.0, 0.0), "8 devices")]
    first, second = draw_bars(bars, width=60).plain.splitlines()
    assert first.count("▒") == 1
    assert first.count("█") + first.count("▒") + first.count("░") == second.count("█")
    assert "fill-opacity" in draw_bars_svg(bars, "bars")


def test_the_plan_shows_the_flow_under_the_map(roost):
    code, out, _ = roost("plan", str(JOB), "-c", "4x8")
    assert code == 0
    assert "rollout.generate → reward.score → actor.train\nweights: actor → rollout, at most 1 step behind" in out
    assert "<h2>Flow</h2>" in roost("plan", str(JOB), "-c", "4x8", "--format", "html")[1]


def test_the_simulation_without_spread_is_the_step_time_and_long_tails_cost():
    calls = {"rollout.generate": {"seconds": {2: 10.0}}, "actor.train": {"seconds": {2: 9.0}}}
    flat = answer_of(TWO, calls, "1x4", ASYNCHRONOUS)
    found = simulate(flat.setup.problem, flat.best.family, flat.setup.timings)
    assert (found.mean, found.p90) == (pytest.approx(10.0), pytest.approx(10.0))
    calls["rollout.generate"]["seconds"][2] = {"p50": 10.0, "p90": 20.0}
    tailed = answer_of(TWO, calls, "1x4", ASYNCHRONOUS)
    assert tailed.best.step_time == flat.best.step_time
    one, again = (simulate(tailed.setup.problem, tailed.best.family, tailed.setup.timings, seed=7) for _ in range(2))
    assert one == again
    assert one.mean > 11
    assert one.p90 > 18
    assert one != simulate(tailed.setup.problem, tailed.best.family, tailed.setup.timings, seed=8)


def test_draws_are_quantiles_of_what_was_measured():
    assert [draw(Timing(median=2, samples=(3 * SECOND, SECOND)), luck) for luck in (0.1, 0.9)] == [1.0, 3.0]
    spread = Timing(median=10 * SECOND, p90=20 * SECOND)
    assert draw(spread, 0.5) == pytest.approx(10.0)
    assert draw(spread, 0.9) == pytest.approx(20.0)
    assert draw(Timing(median=SECOND), 0.9) == 1.0


def test_a_profile_from_runs_takes_the_slowest_rank_and_leaves_the_first_call_out():
    def run(devices: int, seconds: list[list[float]]):
        times = [
            CallTime("actor.train", str(rank), float(at), took, end=at + took)
            for rank, own in enumerate(seconds)
            for at, took in enumerate(own)
        ]
        return RunTimes({"actor": Placed(devices, 2)}, times)

    found = make_profile([run(4, [[9.0, 4.0, 4.2], [9.5, 4.1, 4.0]]), run(8, [[2.5]])])
    assert found == {
        "version": 1,
        "calls": {"actor.train": {"seconds": {4: [4.1, 4.2], 8: 2.5}, "devices_per_worker": 2}},
        "runs": [{"placement": {}, "step": 1.1, "calls": {"actor.train": {"begins": 0.0, "ends": 4.15}}}],
    }
    assert read_profile(found).calls["actor.train"].timings[""][4].median == round(4.15 * SECOND)
    with pytest.raises(ConfigError, match="no call of a component"):
        make_profile([RunTimes({}, [CallTime("actor.train", "0", 0.0, 1.0)])])


def test_a_call_that_failed_on_any_rank_does_not_count():
    times = [
        CallTime("actor.train", rank, at, 1.0 + at, is_ok=(rank, at) != ("1", 2.0))
        for rank in "01"
        for at in (0.0, 1.0, 2.0, 3.0)
    ]
    placed = {"actor": Placed(2, 1)}
    assert make_profile([RunTimes(placed, times)])["calls"] == {"actor.train": {"seconds": {2: [2.0, 4.0]}}}
    with pytest.raises(ConfigError, match="no call of a component"):
        make_profile([RunTimes(placed, [CallTime("actor.train", "0", 0.0, 1.0, is_ok=False)])])


def test_a_profile_names_the_kinds_if_the_runs_had_several():
    def run(kind: str, seconds: float, per_worker: int = 1):
        times = [CallTime("actor.train", "0", 0.0, seconds), CallTime("reward.score", "0", 0.0, 0.5)]
        return RunTimes({"actor": Placed(4, per_worker, kind), "reward": Placed(0, 1)}, times)

    assert make_profile([run("H100", 2.0), run("H100", 3.0)])["calls"] == {
        "actor.train": {"seconds": {4: [2.0, 3.0]}},
        "reward.score": {"seconds": {0: [0.5, 0.5]}},
    }
    both = make_profile([run("H100", 2.0), run("4090", 7.0)])
    assert both["calls"] == {
        "actor.train": {"kinds": {"4090": {4: 7.0}, "H100": {4: 2.0}}},
        "reward.score": {"seconds": {0: [0.5, 0.5]}},
    }
    assert read_profile(both).calls["actor.train"].timings["4090"][4].median == 7 * SECOND
    with pytest.raises(ConfigError, match="had 1 devices in one run, and 2 in another"):
        make_profile([run("H100", 2.0), run("H100", 3.0, per_worker=2)])


def test_a_long_run_leaves_a_hundred_samples_with_the_same_distribution():
    times = [CallTime("actor.train", "0", float(at), float(at)) for at in range(1001)]
    seconds = make_profile([RunTimes({"actor": Placed(2, 1)}, times)])["calls"]["actor.train"]["seconds"][2]
    assert len(seconds) == 100
    assert (seconds[0], seconds[50], seconds[-1]) == (6.0, 506.0, 996.0)


def apart(
    generate: float, train: float, begins: float, step: float, waits: float = 0.0, more: tuple[str, float, float] = ()
) -> RunTimes:
    """Steps of a run: when training begins in each, how long it waits, and another call with its begin and its time."""

    def call(name: str, rank: str, start: float, lasts: float, waits: float = 0.0) -> CallTime:
        return CallTime(name, rank, start, lasts - waits, end=start + lasts)

    times = [call("actor.init", "actor:0", -1.0, 0.3)]
    for at in (number * step for number in range(6)):
        times.append(call("rollout.generate", "rollout:0", at, generate))
        times.append(call("actor.train", "actor:0", at + begins, train, waits))
        times += [call(more[0], "rollout:0", at + more[1], more[2])] if more else []
    placed = {"rollout": Placed(2, 1, "H100", (0, 1)), "actor": Placed(2, 1, "H100", (2, 3))}
    return RunTimes(placed, times, ("rollout.generate", "actor.train"))


def test_a_call_that_comes_several_times_in_a_step_counts_with_all_of_them():
    run = apart(0.2, 0.4, 0.8, 1.2)
    score = [CallTime("reward.score", "reward:0", at * 0.3, 0.1, end=at * 0.3 + 0.1) for at in range(24)]
    placed = run.placed | {"reward": Placed(0, 1)}
    found = make_profile([RunTimes(placed, [*run.times, *score], (*run.flow, "reward.score"))])
    assert found["calls"]["reward.score"]["seconds"][0] == pytest.approx([0.4] * 5)
    assert found["runs"][0]["step"] == pytest.approx([1.2] * 4)
    assert found["runs"][0]["calls"]["reward.score"] == {"begins": 0.0, "ends": 1.0}
    assert "actor.init" not in found["runs"][0]["calls"]


SYNCHRONOUS = "  weights: actor -> rollout\n"


@pytest.mark.parametrize(
    ("run", "step"),
    [(apart(0.6, 0.4, 0.6, 1.04), "1 s"), (apart(0.06, 0.061, 0.01, 0.073, waits=0.053), "0.068 s")],
    ids=["one after the other", "a call that waits for a channel in which the other puts"],
)
def test_a_search_predicts_the_run_that_it_was_measured_in(run, step):
    profile = read_profile(make_profile([run]))
    (prediction,) = check_runs(read_flow(TWO, SYNCHRONOUS), profile)
    assert str(prediction).endswith(f"and by these times it takes {step}")


@pytest.mark.parametrize(
    ("run", "more", "reason"),
    [
        (
            apart(0.6, 0.6, 0.1, 0.73, waits=0.3),
            SYNCHRONOUS,
            "actor.train begins 0.5 s before rollout.generate has ended, for which the search lets it wait",
        ),
        (
            apart(0.6, 0.4, 0.6, 1.5),
            "",
            "rollout.generate begins 0.9 s later than the flow lets it",
        ),
        (
            apart(0.6, 0.4, 0.6, 1.5),
            SYNCHRONOUS,
            "rollout.generate begins 0.5 s later than the flow lets it; the profile has no seconds for the update",
        ),
        (
            apart(0.6, 0.4, 0.6, 1.5, more=("rollout.onload", 1.0, 0.4)),
            SYNCHRONOUS,
            "later than the flow lets it; rollout.onload, which is not in the flow, takes 0.4 s of a step",
        ),
        (
            apart(0.6, 0.9, 0.6, 1.5, waits=0.5),
            SYNCHRONOUS,
            "actor.train lasts 0.9 s there, and by this profile it works for 0.4 s of them",
        ),
        (apart(0.6, 0.4, 0.6, 1.02), ASYNCHRONOUS, "rollout.generate begins 0.42 s later than the flow lets it"),
    ],
    ids=["overlap", "driver", "weights", "another call", "waits", "no overlap"],
)
def test_a_search_refuses_a_run_that_it_does_not_predict_and_names_the_call(run, more, reason):
    profile = read_profile(make_profile([run]))
    with pytest.raises(ConfigError) as caught:
        check_runs(read_flow(TWO, more), profile)
    assert reason in str(caught.value)
    assert "with rollout on 0-1 and actor on 2-3 a step took" in str(caught.value)


def test_a_run_that_the_search_cannot_model_is_left_out():
    run = apart(0.6, 0.4, 0.6, 1.5)
    for placed in (
        {"rollout": Placed(2, 1, "", (0, 1)), "actor": Placed(2, 1, "", (1, 2))},
        {"rollout": Placed(2, 1, "", (0, 1)), "actor": Placed(2, 1, "", ())},
    ):
        profile = read_profile(make_profile([run._replace(placed=placed)]))
        assert check_runs(read_flow(TWO), profile) == []


def test_a_search_by_a_run_that_it_does_not_predict_is_refused_with_the_place_in_the_profile(roost, tmp_path):
    job, profile = tmp_path / "job.yaml", tmp_path / "p.yaml"
    job.write_text(f"cluster:\n  component_placement:\n    rollout: 0-1\n    actor: 2-3\nflow:\n  step: {TWO}\n")
    command = ("search", str(job), "-c", "1x4", "-p", str(profile))
    profile.write_text(yaml.safe_dump(make_profile([apart(0.6, 0.4, 0.6, 1.5)]), sort_keys=False))
    code, out, err = roost(*command)
    assert (code, out) == (2, "")
    assert "p.yaml:" in err
    assert "rollout.generate begins 0.9 s later than the flow lets it" in err
    profile.write_text(yaml.safe_dump(make_profile([apart(0.6, 0.6, 0.0, 0.65)]), sort_keys=False))
    code, out, err = roost(*command)
    assert code == 0, err
    assert "with rollout on 0-1 and actor on 2-3 a step took 0.65 s, and by these times it takes 0.6 s" in out
    assert json.loads(roost(*command, "--format", "json")[1])["runs"] == [
        {"step_seconds": 0.65, "predicted_seconds": 0.6}
    ]


def folder_of_run(folder: Path, lines: dict[str, list[str]], cluster: str = "1x2") -> Path:
    """A run folder with a plan of two workers, and events."""
    job = {"cluster": {"component_placement": {"actor": "0-1"}}}
    folder.mkdir()
    (folder / "plan.json").write_text(make_plan(job, Topology.from_shorthand(cluster)).to_json())
    for who, own in lines.items():
        path = folder / worker_file(who)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([header(who, run="r", pid=1, host="h", wall=1e9, node=0), *own, ""]))
    return folder


def test_events_of_any_run_make_a_profile_also_where_calls_share_a_line(roost, tmp_path):
    many = line_of("call", "train", t=2.0, d=9.0, n=3, busy=1.5)
    lines = {
        "actor:0": [line_of("call", "train", t=0.0, d=4.0), many, line_of("call", "save", t=20.0, d=1.0), "{half"],
        "actor:2": [line_of("wait", "channel 'samples'", t=0.0, d=4.0)],
        "actor:1": [line_of("call", "train", t=0.0, d=5.0), *(line_of("call", "train", t=t, d=0.25) for t in (6, 7))],
        "other:0": [line_of("call", "train", t=0.0, d=5.0)],
    }
    folder = folder_of_run(tmp_path / "run", lines)
    code, out, _ = roost("profile", str(folder))
    assert code == 0
    every = {"actor.save": {"seconds": {2: 1.0}}, "actor.train": {"seconds": {2: [0.5, 0.5]}}}
    assert yaml.safe_load(out)["calls"] == every
    (folder / "job.yaml").write_text("cluster:\n  component_placement:\n    actor: 0-1\nflow:\n  step: actor.train\n")
    assert yaml.safe_load(roost("profile", str(folder))[1])["calls"] == {"actor.train": every["actor.train"]}


def test_a_run_without_times_and_a_component_on_two_kinds_are_explained(roost, tmp_path):
    silent = folder_of_run(tmp_path / "silent", {})
    code, _, err = roost("profile", str(silent))
    assert (code, "there are no events in" in err) == (2, True)
    mixed = folder_of_run(tmp_path / "mixed", {"actor:0": [line_of("call", "train", t=0.0, d=4.0)]}, "1x1:A,1x1:B")
    code, _, err = roost("profile", str(mixed))
    assert (code, "actor ran on A and B" in err) == (2, True)


def test_nodes_may_differ_in_size_and_sets_are_consecutive_where_that_is_possible():
    calls = {"rollout.generate": {"seconds": {8: 6.0}, "devices_per_worker": 4}, "actor.train": {"seconds": {6: 6.0}}}
    assert answer_of(TWO, calls, "1x6:H100,1x8:H100").best.component_placement == {
        "rollout": "6-13:0-1",
        "actor": "0-5",
    }
    calls["actor.train"]["seconds"] = {4: 6.0}
    assert answer_of(TWO, calls, "2x6").best.component_placement == {"rollout": "0-3:0,6-9:1", "actor": "4-5,10-11"}


def test_a_role_takes_the_kind_of_device_on_which_the_step_is_shortest():
    calls = {
        "rollout.generate": {"kinds": {"H100": {4: 6.0}, "4090": {4: 8.0, 8: 5.0}}},
        "actor.train": {"kinds": {"H100": {4: 7.0}, "4090": {4: 30.0}}},
        "reward.score": {"seconds": {0: 1.0}},
    }
    step = "rollout.generate -> reward.score -> actor.train"
    best = answer_of(step, calls, "1x4:H100,1x4:4090,1x4:4090").best
    assert best.component_placement == {"rollout": "4-11", "actor": "0-3"}
    assert best.step_time == 7 * SECOND
    fewer = answer_of(step, calls, "1x4:4090,1x4:H100")
    assert fewer.best.component_placement == {"rollout": "0-3", "actor": "4-7"}
    assert fewer.best.step_time == 8 * SECOND
    assert fewer.best.shares()["actor"].busy == pytest.approx(7 / 8)


def test_kinds_between_which_a_role_chooses_are_named_where_one_decides():
    calls = {
        "rollout.generate": {"kinds": {"H100": {2: 4.0, 8: 1.0}, "4090": {2: 4.1, 8: 1.3}}},
        "actor.train": {"kinds": {"H100": {2: 4.0, 8: 1.0}, "4090": {2: 9.0, 8: 9.0}}},
    }
    answer = answer_of(TWO, calls, "1x8:H100,1x8:4090", ASYNCHRONOUS, interpolate=True)
    assert answer.best.component_placement == {"rollout": "8-15", "actor": "0-7"}
    coarse = answer_of(TWO, calls, "1x6:H100,1x6:4090", ASYNCHRONOUS, interpolate=True)
    assert "rollout.generate with 6 devices of 4090" in coarse.best.interpolated


def test_a_call_goes_where_its_memory_fits():
    calls = {"rollout.generate": {"kinds": {"H100": {4: 6.0}, "4090": {4: 1.0}}, "memory": "40GiB"}}
    calls["actor.train"] = {"kinds": {"H100": {4: 1.0}, "4090": {4: 9.0}}}
    nodes = [{"accelerators": {"count": 4, "model": m, "memory": s}} for m, s in (("4090", "24GiB"), ("H100", "80GiB"))]
    profile = read_profile({"version": 1, "calls": calls})
    best = search(make_setup(read_flow(TWO), profile, Topology.from_dict({"nodes": nodes}))).best
    assert best.component_placement == {"rollout": "4-7", "actor": "4-7"}
    assert best.step_time == 7 * SECOND


def test_roles_without_devices_alone_have_a_step_time_and_no_map(roost, tmp_path):
    job, profile, proof = tmp_path / "job.yaml", tmp_path / "p.yaml", tmp_path / "proof.json"
    job.write_text("cluster:\n  component_placement:\n    a: 0\n    b: 0\n    c: 0\nflow:\n  step: a.x -> b.y\n")
    profile.write_text("version: 1\ncalls:\n  a.x: {seconds: {0: 2}}\n  b.y: {seconds: {0: 3}}\n")
    code, out, err = roost("search", str(job), "-c", "1x2", "-p", str(profile), "--prove", str(proof))
    assert (code, out.splitlines()[0]) == (0, "3 s a step, and no legal placement is quicker")
    assert "c is not in the flow" in err
    assert roost("search", "--check", str(proof))[0] == 0
    assert "there is no map" in roost("search", str(job), "-c", "1x2", "-p", str(profile), "--format", "html")[2]


def test_every_picture_marks_interpolated_times(roost, tmp_path):
    calls = {name: {"seconds": {8: 16.0, 32: 4.0}} for name in ("rollout.generate", "actor.train")}
    job, profile = tmp_path / "job.yaml", tmp_path / "p.yaml"
    job.write_text(
        f"cluster:\n  component_placement:\n    rollout: 0\n    actor: 1\nflow:\n  step: {TWO}\n{ASYNCHRONOUS}"
    )
    profile.write_text(json.dumps({"version": 1, "calls": calls}))
    for form in ("svg", "html", "json", "text"):
        out = roost("search", str(job), "-c", "4x8", "-p", str(profile), "--interpolate", "--format", form)[1]
        assert "actor.train with 16 devices" in out, form


def test_a_job_without_a_flow_and_two_clusters_are_refused(roost, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("cluster: {component_placement: {actor: 0}}\n")
    code, _, err = roost("search", str(job), "-p", str(PROFILE), "-c", "1x8")
    assert (code, "the job has no section 'flow'" in err) == (2, True)
    code, _, err = roost("search", str(JOB), "-p", str(PROFILE), "-c", "1x8", "-i", "x.yaml")
    assert (code, "both describe the hardware" in err) == (2, True)
    assert "no such" in roost("search", str(JOB), "-p", str(tmp_path / "none.yaml"), "-c", "1x8")[2].lower()


def test_a_time_that_the_winner_uses_may_decide_by_being_quicker():
    roles = tuple(Role(name=name, counts=((4,),)) for name in "abc")
    seconds = {"a": 1000, "b": 100, "c": 1105}
    calls = tuple(Call(name=f"{name}.x", role=name, times=({4: seconds[name]},)) for name in "abc")
    problem = Problem(roles=roles, calls=calls, edges=(), weights=None, nodes=(8,), kinds=(0,))
    best = find_best(problem)[0]
    assert best.step_time == 1105
    assert ("c.x", True) in [(doubt.call, doubt.factor < 1) for doubt in deciding(problem, best)]
