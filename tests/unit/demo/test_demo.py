"""The parts of the demo that need no cluster: learning, pictures, and the options it refuses."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from roost import (
    CallTimedOut,
    ConfigError,
    Outcome,
    OutcomeKind,
    Topology,
    WorkerDied,
    lint,
    make_plan,
)
from roost.cli.main import app
from roost.cli.terminal import speak_ascii
from roost.demo import learning
from roost.demo.learning import Batch, Learner, first_weights, probabilities
from roost.demo.rounds import Round, Run
from roost.demo.show import (
    DemoConsole,
    Display,
    WithoutRemarks,
    _new_folders,
    _say_files,
    _summary,
    advise,
    goal_of,
)
from roost.demo.tasks import HARDWARE, TASKS, Mode, make_job
from roost.demo.training import _Run
from roost.render.bars import Bar, draw_bars
from roost.render.grid import make_grid
from roost.render.terminal import terminal_colours
from roost.watch.live import PlayedRun


def make_batch(seed: int, *, steps: int = 16, games: int = 3) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        observations=rng.normal(size=(steps, games, 4)),
        actions=rng.integers(2, size=(steps, games)),
        logprobs=np.log(rng.uniform(0.3, 0.7, size=(steps, games))),
        rewards=np.ones((steps, games)),
        ends=rng.random((steps, games)) < 0.1,
        last=rng.normal(size=(games, 4)),
    )


def test_the_gradient_matches_finite_differences_of_the_objective():
    rng = np.random.default_rng(1)
    weights = {name: value + rng.normal(scale=0.3, size=value.shape) for name, value in first_weights(0).items()}
    seen, actions = rng.normal(size=(40, 4)), rng.integers(2, size=40)
    logprobs, advantages = np.log(rng.uniform(0.2, 0.8, size=40)), rng.normal(size=40)

    def objective(changed):
        likely = probabilities(changed, seen)
        ratio = np.exp(np.log(likely[np.arange(40), actions]) - logprobs)
        clipped = np.clip(ratio, 1 - learning._CLIP, 1 + learning._CLIP)
        entropy = -(likely * np.log(likely)).sum(axis=1)
        return (np.minimum(ratio * advantages, clipped * advantages) + learning._ENTROPY * entropy).mean()

    gradient = learning._gradient(weights, seen, actions, logprobs, advantages)
    for name, value in weights.items():
        for place in np.ndindex(value.shape):
            nudge = np.zeros_like(value)
            nudge[place] = 1e-6
            rise = objective(weights | {name: value + nudge}) - objective(weights | {name: value - nudge})
            assert gradient[name][place] == pytest.approx(rise / 2e-6, abs=1e-6), (name, place)


def test_ranks_with_different_batches_take_the_same_steps():
    barrier, given = threading.Barrier(3), {}

    def average(rank):
        def mean(own):
            given[rank] = own
            barrier.wait(30)
            out = sum(given[index] for index in range(3)) / 3
            barrier.wait(30)
            return out

        return mean

    ranks = [Learner(5, average(rank)) for rank in range(3)]
    threads = [threading.Thread(target=rank.learn, args=(make_batch(index),)) for index, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, value in ranks[0].weights.items():
        assert not np.array_equal(value, first_weights(5)[name]), f"{name} has changed"
        assert all(np.array_equal(value, other.weights[name]) for other in ranks[1:])


def test_a_rewarded_action_becomes_more_likely():
    learner = Learner(0, lambda own: own)
    seen = np.tile([0.0, 0.0, 0.1, 0.0], (64, 1, 1))
    actions = (np.arange(64) % 2)[:, None]
    batch = Batch(
        observations=seen,
        actions=actions,
        logprobs=np.full((64, 1), np.log(0.5)),
        rewards=actions.astype(float),
        ends=np.ones((64, 1), bool),
        last=seen[0],
    )
    learner.learn(batch)
    assert probabilities(learner.weights, seen[0])[0, 1] > 0.55


@pytest.mark.parametrize("mode", Mode)
def test_the_jobs_of_both_modes_plan_without_warnings_and_share_or_split(mode):
    plan = make_plan(make_job(mode), Topology.from_shorthand(HARDWARE))
    assert [finding.code for finding in lint(plan) if finding.level == "warning"] == []
    seats = {component.name: {(p.cluster_node_rank, i) for p in component.placements for i in p.local_hardware_ranks}
             for component in plan.components if component.name != "env"}  # fmt: skip
    if mode is Mode.COLOCATE:
        assert seats["actor"] == seats["rollout"]
    else:
        assert not seats["actor"] & seats["rollout"]
    assert len(seats["actor"] | seats["rollout"]) == 8
    assert {place.cluster_node_rank for place in plan.component("env").placements} == {2}


def make_display(*, is_terminal: bool, columns: int = 80) -> tuple[Display, Console]:
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=columns,
        height=30,
        color_system=None,
        legacy_windows=False,
    )
    return Display(console, TASKS["cartpole"], 300, {"actor": "blue", "env": "green"}, PlayedRun.shipped()), console


def tell(display: Display) -> None:
    display.launched("actor", 4, 1.25)
    for number, mean in enumerate([20.0, 90.0, 150.0], start=1):
        seconds = {"play": 0.5, "learn": 0.02}
        done = Round(number=number, mean_return=mean, episodes=9, made_in=0.5, seconds=seconds, behind=0)
        display.round_ended(done)


def test_a_terminal_shows_the_return_and_what_every_worker_does_in_one_picture(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    display, console = make_display(is_terminal=True)
    with display.showing():
        tell(display)
    shown = console.file.getvalue().replace("\r", "\n")
    assert "actor    4 workers ready in 1.2 s" in shown
    last = shown[shown.rindex("round 3") :]
    assert "mean return 150, the goal is 300" in last
    assert "a recorded run of roost demo" in last
    assert re.search(r"node 0 .* actor \S{4}", last), "the map of `roost top`"
    assert max(map(len, last.splitlines())) <= 80


def test_a_pipe_gets_plain_lines_that_report_a_restart():
    display, console = make_display(is_terminal=False)
    with display.showing():
        tell(display)
        display.killing("rollout:2", 77)
        where = "node 1, accelerator 0,1, now pid 88"
        display.restarted("rollout:2", where, 1.04, "rollout:2 on node 1 died in 'load'")
    assert console.file.getvalue().splitlines() == [
        "  actor    4 workers ready in 1.2 s",
        "  round  1  mean return   20  play 0.50 s, learn 0.02 s",
        "  killing rollout:2 (pid 77) on purpose",
        "    rollout:2 on node 1 died in 'load'",
        "    rollout:2 is back in place after 1.0 s: node 1, accelerator 0,1, now pid 88",
    ]


def test_a_terminal_that_cannot_move_its_cursor_gets_the_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    display, console = make_display(is_terminal=True)
    with display.showing():
        tell(display)
    assert "  round  1  mean return   20  play 0.50 s, learn 0.02 s\n" in console.file.getvalue()


@pytest.mark.parametrize("columns", [0, 1, 12, 40])
def test_the_picture_can_be_drawn_on_a_narrow_terminal(columns, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    display, console = make_display(is_terminal=True, columns=columns)
    tell(display)
    console.print(display._picture())
    assert "node 0" in console.file.getvalue() or columns < 6


def test_a_closed_pipe_raises_and_does_not_end_the_process():
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", encoding="utf-8")
    filtered = WithoutRemarks(stream)
    assert filtered.fileno() == write
    with contextlib.redirect_stdout(filtered), pytest.raises(BrokenPipeError):
        DemoConsole(file=stream).print("round 1")
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_an_ascii_terminal_gets_pictures_in_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    speak_ascii()
    print(draw_bars([Bar("actor", "blue", (0.5, 0.0, 0.5))], width=40).plain)
    sys.stdout.flush()
    assert re.fullmatch(rb"actor  #+\.+  50 % busy, 50 % idle\n", raw.getvalue()), raw.getvalue()


def test_folders_that_stay_empty_are_removed(tmp_path):
    paths = [tmp_path / "runs" / name for name in ("first", "second", "third")]
    with _new_folders(paths) as (first, _, _):
        (first / "plan.json").write_text("{}")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]
    with pytest.raises(ConfigError, match="first already exists"), _new_folders(paths[::-1]):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]


def test_brackets_in_the_name_of_a_folder_are_printed(tmp_path):
    folder = tmp_path / "my [red]runs[" / "x]"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "trace.json").write_text("")
    console = Console(file=io.StringIO(), width=20)
    _say_files([folder], console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[:3] == [f"{folder}/", "  plan.json", "  trace.json"]


def make_run(mode: Mode, *rounds: Round) -> Run:
    return Run(mode=mode, cluster=None, watcher=make_display(is_terminal=False)[0], rounds=[*rounds])


@pytest.mark.parametrize("columns", [45, 80, 200])
def test_the_summary_fits_on_the_terminal(columns):
    done = Round(number=1, mean_return=20.0, episodes=9, made_in=0.5, seconds={"play": 2.0}, behind=0)
    bars = [Bar("actor", "blue", (0.25, 0.0, 0.75)), Bar("env", "green", (0.5, 0.0, 0.5))]
    lines = _summary(TASKS["cartpole"], make_run(Mode.DISAGG, done), bars, columns).plain.splitlines()
    drawn = [line for line in lines if line.endswith(" % idle")]
    assert len(drawn) == 2
    assert max(map(len, drawn)) <= min(columns, 80)


def test_a_terminal_with_16_colours_gives_each_component_a_different_one():
    grid = make_grid(make_plan(make_job(Mode.COLOCATE), Topology.from_shorthand(HARDWARE)))
    colours = terminal_colours(grid, basic_colours=True)
    assert list(colours) == ["actor", "rollout", "env"]
    assert len(set(colours.values())) == 3
    assert not any(colour.startswith("#") for colour in colours.values())


class Waited:
    """The result of a call that returns or raises on the second `wait`."""

    def __init__(self, end) -> None:
        self.end, self.waits = end, 0

    def done(self):
        return self.waits > 1

    def wait(self, _):
        self.waits += 1
        if self.waits == 1:
            raise CallTimedOut("'play' of 'env' has not answered in 0.25 s")
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.mark.parametrize("end", [["played"], CallTimedOut("rollout:2 has no weights"), WorkerDied("env:1 is dead")])
def test_a_round_returns_or_raises_what_its_environments_do(end, monkeypatch):
    run, restarts = object.__new__(_Run), []
    monkeypatch.setattr(_Run, "_restart_dead", lambda _: restarts.append(1))
    playing = Waited(end)
    if isinstance(end, Exception):
        with pytest.raises(type(end), match=str(end)):
            run.wait(playing)
    else:
        assert run.wait(playing) == end
    assert len(restarts) == 1
    assert playing.waits <= 3, "it does not poll forever"


class Served:
    """A group of which a worker's call has ended in some way."""

    def __init__(self, end: Outcome) -> None:
        self.end = end

    def __getitem__(self, _):
        return self

    def done(self):
        return True

    def outcomes(self):
        return (self.end,)

    def restart(self, _):
        raise InterruptedError("it is restarted")


@pytest.mark.parametrize(
    ("kind", "error", "raised"),
    [
        (OutcomeKind.EXCEPTION, ValueError("the weights have no b2"), ValueError),
        (OutcomeKind.DEATH, WorkerDied("rollout:0 is dead"), InterruptedError),
    ],
)
def test_a_rollout_worker_that_fails_ends_the_demo_and_one_that_dies_does_not(kind, error, raised):
    run = object.__new__(_Run)
    run.seconds = {}
    run._rollout = group = Served(Outcome(rank=0, kind=kind, error=error))
    run._serving = [group]
    with pytest.raises(raised):
        run._restart_dead()


def test_remarks_of_the_raylet_are_dropped_with_their_newline():
    stream = io.StringIO()
    filtered = WithoutRemarks(stream)
    print("before", file=filtered)
    print("\x1b[33m(raylet)\x1b[0m A worker died", file=filtered)
    print("after", file=filtered)
    assert stream.getvalue() == "before\nafter\n"


def test_minutes_are_split_among_the_modes_and_replace_the_goal():
    goal = goal_of(TASKS["cartpole"], tuple(Mode), 3)
    assert goal.seconds == 90
    assert goal.mean_return > 500
    assert goal_of(TASKS["cartpole"], (Mode.DISAGG,), 3).seconds == 180


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "--minutes is 0: it is a number above 0"),
        (["--minutes", "nan"], "--minutes is nan: it is a number above 0"),
        (["--runs-dir", "/dev/null/here"], "cannot make /dev/null/here/"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(arguments, said):
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert said in str(result.exception)


def test_a_missing_gymnasium_is_reported_with_the_command_to_install_it(tmp_path):
    code = "import sys; sys.modules['gymnasium'] = None\nfrom roost.cli.main import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 2
    assert "hint: pip install 'roost[demo]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_demo_says_which_placement_its_times_would_make_the_best():
    def trained(mode: Mode, made: float, learn: float, slow: float = 0.0) -> Run:
        # At the same time, a round only waits for what learning did not outlast.
        waits = made if mode is Mode.COLOCATE else max(0.0, made - learn - 0.1)
        seconds = {"play": waits + slow, "learn": learn, "weights": 0.1}
        rounds = tuple(
            Round(number=number, mean_return=1.0, episodes=9, seconds=seconds, made_in=made, behind=0)
            for number in (1, 2, 3)
        )
        return make_run(mode, *rounds)

    # Twice the accelerators gain nothing here, so that both at the same time is best.
    same = advise(TASKS["cartpole"], [trained(Mode.COLOCATE, 1.0, 1.0), trained(Mode.DISAGG, 1.0, 1.0)])
    assert same == "by these times the best placement is rollout on 0-3, actor on 4-7: 1.10 s a step"
    # Here they are four times as quick.
    quick = advise(TASKS["cartpole"], [trained(Mode.COLOCATE, 1.0, 1.0), trained(Mode.DISAGG, 4.0, 4.0)])
    assert quick == "by these times the best placement is rollout on 0-7, actor on 0-7: 2.10 s a step"
    # A step at the same time takes longer than its calls: they slow each other down, or wait for each other.
    slow = advise(TASKS["cartpole"], [trained(Mode.COLOCATE, 1.0, 1.0), trained(Mode.DISAGG, 1.0, 1.0, 0.5)])
    assert slow == (
        "no other placement can be told from these times: with rollout on 4-7 and actor on 0-3 a step took 1.6 s, and "
        "by these times it takes 1.1 s: rollout.play begins 0.5 s later than the flow lets it"
    )
