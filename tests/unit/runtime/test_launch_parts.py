"""The decisions of a launch, without Ray: specs, environments, phases, names, folders, what is shown."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from roost import (
    AcceleratorInfo,
    AcceleratorType,
    ConfigError,
    DeclaredHardware,
    FlexiblePlacementStrategy,
    NodeInfo,
    OutcomeKind,
    PackedPlacementStrategy,
    PlacementError,
    Plan,
    Topology,
    WorkerDied,
    WorkerFailed,
    make_plan,
)
from roost.cli.commands.plan import _grid
from roost.cli.plans import Loaded
from roost.config.run import read_run_config
from roost.placement.plan import Piece
from roost.render.terminal import draw_terminal
from roost.runtime.failures.failure import Failure, FailureKind, asked_at, carry, make_error
from roost.runtime.groups.result import CallResult
from roost.runtime.launch.plan import LaunchPlan, differences, plan_launch
from roost.runtime.launch.progress import LaunchBoard, Phase
from roost.runtime.managers.job_info import JobInfo
from roost.runtime.process.environment import build_environment
from roost.runtime.process.identity import alone
from roost.runtime.process.output import LogPlace, choose_place, read_stack, read_tail
from roost.runtime.process.spec import Report, WorkerSpec
from roost.runtime.reserve.occupancy import Holdings
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import RunDir, check_group_name, log_file, make_run_dir, own_run_dir, put_aside
from roost.runtime.runs.index import find_run
from roost.runtime.status import LiveHardware
from roost.text import printable

JOB = {"cluster": {"num_nodes": 2, "component_placement": {"actor": "0-3"}}}


OUR_JOB = JobInfo(
    cluster="10.0.0.1:6379",
    namespace="roost",
    host="n0",
    pid=4711,
    user="ana",
    command="train.py",
    since=1797000000.0,
    run_dir=RunDir(path="/run", token="t", id="run"),  # noqa: S106 - the name of a marker
)


def gpu(index: int) -> AcceleratorInfo:
    return AcceleratorInfo(type=AcceleratorType.NVIDIA, device=str(index))


def node(rank: int, **changes: object) -> NodeInfo:
    values: dict[str, object] = {
        "rank": rank,
        "ray_id": f"ray-{rank}",
        "address": f"10.0.0.{rank + 1}",
        "name": f"n{rank}",
        "hostname": f"n{rank}",
        "is_head": rank == 0,
        "cpus": 8,
        "memory": 1,
        "interpreter": "/usr/bin/python",
        "python": "3.11",
        "ray": "2.47.0",
        "network": "net",
        "ephemeral_ports": (32768, 60999),
    }
    return NodeInfo(**(values | changes))


def report(**changes: object) -> Report:
    values: dict[str, object] = {
        "ray_id": "ray-0",
        "host": "n0",
        "pid": 1,
        "instance": "a1",
        "interpreter": "/usr/bin/python",
        "visible": "0",
        "log": LogPlace(path="/run/0.log", base="/run", is_shared=True),
    }
    return Report(**(values | changes))


NODES = [node(rank, accelerators=(gpu(0), gpu(1))) for rank in range(2)]


def plan(topology: Topology, nodes: list[NodeInfo], name: str = "actor", **options: object) -> LaunchPlan:
    return plan_launch(name, topology, nodes, OUR_JOB, **options)


def specs(**env_vars: str) -> list[WorkerSpec]:
    return list(plan(Topology.from_shorthand("2x2"), NODES, env_vars=env_vars).specs)


def test_a_workers_environment_is_the_plans_plus_what_the_caller_adds():
    planned = make_plan(JOB, Topology.from_shorthand("2x2"))
    for rank, spec in enumerate(specs(MINE="1")):
        own = {"MINE": "1", "ROOST_JOB": f"{OUR_JOB.id}/actor"}
        assert spec.variables == planned.environment("actor", rank) | own


def test_the_caller_can_set_another_address_for_rank_0():
    assert specs(MASTER_ADDR="ib0")[1].variables["MASTER_ADDR"] == "ib0"


def numa_node(rank: int, *at: int | None) -> NodeInfo:
    """A node with the cores 0-3 and 4-7 at NUMA nodes 0 and 1, and accelerators at these."""
    accelerators = tuple(replace(gpu(index), numa=number) for index, number in enumerate(at))
    return node(rank, accelerators=accelerators, numa=((0, (0, 1, 2, 3)), (1, (4, 5, 6, 7))))


@pytest.mark.parametrize(
    ("at", "ranks", "cores", "numa"),
    [
        ((0, 1), [[0], [1]], [(0, 1, 2, 3), (4, 5, 6, 7)], [0, 1]),
        ((1, 1), [[0, 1]], [(4, 5, 6, 7)], [1]),
        ((0, 1), [[0, 1]], [(0, 1, 2, 3, 4, 5, 6, 7)], [None]),
        ((1, None), [[0], [1]], [(4, 5, 6, 7), ()], [1, None]),
        ((0, 5), [[0], [1]], [(0, 1, 2, 3), ()], [0, None]),
    ],
)
def test_a_worker_is_planned_on_the_cores_of_its_accelerators(at, ranks, cores, numa):
    topology, nodes = Topology.from_shorthand("1x2"), [numa_node(0, *at)]
    made = plan(topology, nodes, strategy=FlexiblePlacementStrategy(ranks)).specs
    assert ([spec.cores for spec in made], [spec.numa for spec in made]) == (cores, numa)
    free = plan(topology, nodes, strategy=FlexiblePlacementStrategy(ranks), bind="none").specs
    assert {(spec.cores, spec.numa) for spec in free} == {((), None)}


def test_where_the_machine_says_nothing_nothing_is_bound():
    assert {spec.cores for spec in specs()} == {()}
    assert {spec.cores for spec in plan(Topology.from_shorthand("1x0"), [numa_node(0)]).specs} == {()}


@pytest.mark.parametrize("bind", [None, "", 1, b"numa", "core", ["numa"], {}, object()])
def test_only_known_ways_to_bind_are_taken(bind):
    with pytest.raises(ConfigError, match=r"bind is .*: it is 'numa' or 'none'"):
        plan(Topology.from_shorthand("2x2"), NODES, bind=bind)


def test_a_component_of_a_job_may_say_that_it_is_not_bound():
    job = JOB | {"workers": {"actor": {"class": "my_job.Actor", "bind": "none"}, "rollout": "my_job.Rollout"}}
    job |= {"cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "0-3"}}, "entry": "my_job.main"}
    assert [worker.bind for worker in read_run_config(job).workers] == ["none", "numa"]


def test_a_worker_on_other_cores_than_planned_is_named():
    (spec, _) = plan(Topology.from_shorthand("1x2"), [numa_node(0, 0, 1)]).specs
    said = [differences(spec, report(visible="0", cores=cores), NODES) for cores in ((0, 1, 2, 3), (0, 5), ())]
    assert said == [[], ["it runs on cores 0,5, and planned are 0-3"], []]


def test_the_map_of_a_live_cluster_has_the_cores_near_the_accelerators():
    topology = Topology.from_shorthand("1x4")
    made = make_plan({"cluster": {"component_placement": {"actor": "0-3"}}}, topology)

    def numa_lines(own: NodeInfo) -> list[str]:
        live = LiveHardware(topology=topology, nodes=(own,), holdings=Holdings())
        grid = _grid(Loaded(plan=made, live=live), Path("job.yaml"), None, fold=False)
        return [line for line in draw_terminal(grid, width=100).plain.splitlines() if line.startswith("numa")]

    told = numa_node(0, 0, 0, 1, None)
    (line,) = numa_lines(told)
    texts = [part.strip("│┄ ") for part in line.removeprefix("numa").split("││")]
    assert texts == ["cores 0-3", "cores 4-7", "any core"]
    assert numa_lines(replace(told, numa=())) == []
    assert told.to_dict()["numa"] == {0: "0-3", 1: "4-7"}


def test_without_accelerators_there_is_a_worker_on_each_node():
    made = plan(Topology.from_shorthand("3x0"), [node(0), node(1), node(2)])
    assert [(spec.identity.rank, spec.node_rank) for spec in made.specs] == [(0, 0), (1, 1), (2, 2)]
    assert made.shares == {}


def test_search_paths_are_joined_and_early_variables_are_kept_apart():
    layers = [{"PYTHONPATH": "/group", "A": "1"}, {"PYTHONPATH": "/mine:/group", "A": "2"}]
    found = build_environment(layers, {"PYTHONPATH": "/node", "OTHER": "x"})
    assert found == ({"A": "2"}, {"PYTHONPATH": "/mine:/group:/node"})
    assert build_environment([{"MODEL_PATH": "/new"}], {"MODEL_PATH": "/old"}) == ({"MODEL_PATH": "/new"}, {})
    late, early = build_environment([*layers, {"LD_PRELOAD": "x.so", "MALLOC_ARENA_MAX": "1", "RANK": "0"}], {})
    assert sorted(early) == ["LD_PRELOAD", "MALLOC_ARENA_MAX", "PYTHONPATH"]
    assert sorted(late) == ["A", "RANK"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"ray_id": "ray-1"}, "it is on node 1 (10.0.0.2, n1), and planned on node 0 (10.0.0.1, n0)"),
        ({"ray_id": "zzz", "host": "far"}, "it is on a node outside this job (far), and planned on node 0"),
        ({"visible": "1"}, "it sees CUDA_VISIBLE_DEVICES='1', and planned is '0'"),
        ({"visible": None}, "it sees CUDA_VISIBLE_DEVICES=None, and planned is '0'"),
        ({"interpreter": "/other"}, None),
    ],
)
def test_what_a_worker_reports_is_compared_with_the_plan(changes, message):
    found = differences(specs()[0], report(**changes), [node(0), node(1)])
    assert len(found) == (0 if message is None else 1)
    assert message is None or message in found[0]


def test_a_worker_gets_the_declared_hardware_of_its_placement():
    arms = [{"node_rank": 1, "address": f"10.1.0.{number}"} for number in range(2)]
    groups = [{"label": "arms", "node_ranks": 1, "hardware": {"type": "Arm", "configs": arms}}]
    job = {
        "cluster": {
            "num_nodes": 2,
            "node_groups": groups,
            "component_placement": {"env": {"node_group": "arms", "placement": "0-1:0-3"}},
        }
    }
    planned = make_plan(job, Topology.from_shorthand("2x0"))
    pieces = tuple(DeclaredHardware.make("Arm", 1, {"address": arm["address"]}) for arm in arms)
    nodes = [node(0), node(1, hardware=(DeclaredHardware.make("Camera", 1), *pieces))]
    made = plan(planned.topology, nodes, "env", strategy=planned.get_strategy("env"))
    assert [spec.identity.hardware[0].settings["address"] for spec in made.specs] == [
        "10.1.0.0",
        "10.1.0.0",
        "10.1.0.1",
        "10.1.0.1",
    ]


def test_a_launch_reserves_each_accelerator_once_with_what_its_workers_use_of_it():
    topology = Topology.from_shorthand("2x2")
    both = plan(topology, NODES, strategy=PackedPlacementStrategy(1, 2))
    assert [(spec.ray_id, spec.accelerators, spec.resource) for spec in both.specs] == [
        ("ray-0", (1,), "GPU"),
        ("ray-1", (0,), "GPU"),
    ]
    assert both.shares == {Piece(0, "accelerator", 1): None, Piece(1, "accelerator", 0): None}
    # Two workers on each accelerator.
    job = {"cluster": {"num_nodes": 2, "component_placement": {"actor": "0-1:0-3"}}}
    shared = make_plan(job, topology).get_strategy("actor")
    crowd = plan(topology, NODES, strategy=shared, share=0.25)
    assert [(spec.node_rank, spec.accelerators, spec.share) for spec in crowd.specs] == [
        (0, (0,), 0.25),
        (0, (0,), 0.25),
        (0, (1,), 0.25),
        (0, (1,), 0.25),
    ]
    assert crowd.shares == {Piece(0, "accelerator", 0): 0.5, Piece(0, "accelerator", 1): 0.5}
    assert plan(topology, NODES, strategy=shared, reserve=False).shares == {}
    assert pickle.loads(pickle.dumps(crowd.specs)) == crowd.specs  # noqa: S301 - a process gets its spec whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"max_concurrency": 2**31 - 1}, "from 1 to 10,000"),
        ({"timeout": 0}, "timeout is 0"),
        ({"restarts": -1}, "restarts is -1"),
        ({"reserve": 1}, "reserve is 1"),
        ({"share": 0.5, "reserve": False}, "reserve is False"),
        ({"share": 2.0}, "share is 2.0"),
        ({"strategy": "packed"}, "placement_strategy is 'packed'"),
        ({"env_vars": {"RANK": "1"}}, "RANK"),
        ({"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_ray_is_asked(options, message):
    with pytest.raises(ConfigError, match=message):
        plan(Topology.from_shorthand("2x2"), NODES, **options)


def test_a_plan_reproduces_its_placements_on_the_hardware_it_was_made_for():
    planned = make_plan(JOB, Topology.from_shorthand("2x2"))
    strategy = Plan.from_json(planned.to_json()).get_strategy("actor")
    assert strategy.get_placement(Topology.from_shorthand("2x2")) == list(planned.component("actor").placements)
    with pytest.raises(
        PlacementError, match=r"planned on node 0 with the accelerators 0 and 1, and that node offers 0"
    ):
        strategy.get_placement(Topology.from_shorthand("2x1"))
    with pytest.raises(PlacementError, match=r"node 1 .* does not exist"):
        strategy.get_placement(Topology.from_shorthand("1x2"))
    with pytest.raises(PlacementError, match="no component 'rollout'"):
        planned.get_strategy("rollout")
    with pytest.raises(PlacementError, match="was planned with isolated accelerators"):
        strategy.get_placement(Topology.from_shorthand("2x2"), isolate_accelerator=False)
    group = {"label": "g", "node_ranks": "0-1"}
    job = {"cluster": {"node_groups": [group], "component_placement": {"actor": {"node_group": "g", "placement": "0"}}}}
    grouped = make_plan(job, Topology.from_shorthand("2x2")).get_strategy("actor")
    with pytest.raises(PlacementError, match="node group 'g', which does not exist"):
        grouped.get_placement(Topology.from_shorthand("2x2"))


def test_the_board_knows_which_workers_are_late():
    board = LaunchBoard(Console(), "a", ["a:0", "a:1"], now=1.0)
    board.advance("a:0", Phase.CONSTRUCTING, now=2.0)
    assert (board.entered["a:0"], board.late) == ((Phase.CONSTRUCTING, 2.0), ["a:0", "a:1"])
    assert board.summary == "1 requested, 1 constructing"
    for address in ("a:0", "a:1"):
        board.advance(address, Phase.READY, now=3.0)
    assert board.late == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_launch_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for stream, is_bar in ((Terminal(), True), (io.StringIO(), False)):
        console = Console(quiet=False, stream=stream)
        board = LaunchBoard(console, "a", ["a:0"], now=0.0)
        with board.shown(1):
            board.update()
            console.line("from a worker", of="a:0")
            board.advance("a:0", Phase.READY, now=1.0)
            board.update()
        text = stream.getvalue()
        assert "a: 1 worker ready on 1 node in" in text
        assert "from a worker" in text
        assert ("━" in text) is is_bar
        assert ("\x1b[" in text) is is_bar


def test_a_quiet_console_prints_nothing(monkeypatch):
    for quiet, variable in ((True, ""), (None, "1")):
        monkeypatch.setenv("ROOST_QUIET", variable)
        stream = io.StringIO()
        console = Console(quiet=quiet, stream=stream)
        with LaunchBoard(console, "a", [], now=0.0).shown(0):
            console.line("x")
        assert stream.getvalue() == ""


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "..", ".x", "12", "a\nb", None, 3, "x" * 101])
def test_a_name_that_cannot_be_a_groups_is_refused(name):
    with pytest.raises(ConfigError):
        check_group_name(name)


def test_a_group_can_have_almost_any_name():
    for name in ("actor", "Actor_2", "critic-1", "ünïcode", "a b", "v1.2"):
        assert check_group_name(name) == name


def test_the_folder_of_a_run_and_its_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = make_run_dir(tmp_path / "run")
    assert made.marker.exists()
    assert log_file(made.logs, "actor:0:1") == tmp_path / "run" / "logs" / "actor" / "0" / "1.log"
    monkeypatch.setenv("ROOST_RUNS_DIR", str(tmp_path / "other"))
    assert make_run_dir(None).path.startswith(f"{tmp_path}/other/20")
    monkeypatch.delenv("ROOST_RUNS_DIR")
    with own_run_dir(tmp_path / "run") as again:
        assert again.marker.exists()
        assert not made.marker.exists(), "the marker of an earlier run is removed"
        assert find_run("latest") == tmp_path / "run", "a run without a record is found too"
        with pytest.raises(ConfigError, match="another job is using"), own_run_dir(tmp_path / "run"):
            pass
    with own_run_dir(tmp_path / "run"):
        pass
    group = made.logs / "actor"
    for number in range(1, 4):
        (group / "0" / "tool").mkdir(parents=True, exist_ok=True)
        (group / "0" / "tool" / "0.log").write_text("of a group that its worker launched")
        (group / "0.log").write_text(str(number))
        put_aside(group)
        assert [path.name for path in group.rglob("*.log")] == ["0.log"]
        assert not (group / "0.log").exists()
        assert (made.logs / f"actor.{number}" / "0.log").read_text() == str(number)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"run folder .* cannot be created"):
        make_run_dir(tmp_path / "file" / "run")


def test_the_end_of_a_log_has_all_that_python_says_of_a_crash(tmp_path):
    path = tmp_path / "0.log"
    path.write_text("before\n" + "Fatal Python error: Segmentation fault\n" + "  File\n" * 60)
    assert read_tail(path, lines=5).splitlines() == ["Fatal Python error: Segmentation fault", *["  File"] * 60]


def test_the_end_of_a_log_is_read_without_the_rest(tmp_path):
    path = tmp_path / "0.log"
    path.write_bytes(b"x" * 1_000_000 + b"\nlast but one\n\xff\x1b[31mlast\n")
    tail = read_tail(path, lines=2)
    assert tail == "last but one\n\ufffd\\x1b[31mlast"
    assert read_tail(tmp_path / "nowhere") == ""
    assert printable("a\tb") == "a\tb"


STACK = """before
Timeout (0:00:03)!
Thread 0x00007f86358b96c0 (most recent call first):
  File "/lib/python3.11/threading.py", line 327 in wait
  File "/site-packages/ray/_private/gc_collect_manager.py", line 29 in run

Thread 0x00007f867da4ab80 (most recent call first):
  File "/home/me/job.py", line 50 in hang_here
  File "/src/roost/runtime/shell.py", line 120 in _roost_construct
  File "/site-packages/ray/_private/worker.py", line 1069 in main_loop
printed by other code afterwards
  File "not a frame of it"
"""


def test_a_stack_in_a_log_is_found_and_shows_the_users_frames(tmp_path):
    path = tmp_path / "0.log"
    path.write_text('Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n  File "old.py", line 1 in f\n' + STACK)
    assert read_stack(path) == 'most recent call first:\nFile "/home/me/job.py", line 50 in hang_here'
    path.write_text("nothing")
    assert read_stack(path) == ""


def failure(rank: int, kind: FailureKind = FailureKind.EXCEPTION, when: float = 0.0, **changes: object) -> Failure:
    return Failure(kind=kind, address=f"a:{rank}", rank=rank, node="node 0", what="what", when=when, **changes)


def test_deaths_come_before_exceptions_and_earlier_ones_before_later():
    died = failure(2, FailureKind.DEATH, when=9.0)
    error = make_error([failure(0, when=3.0), failure(1, when=2.0), died], "in 'f'")
    assert [item.rank for item in error.worker_failures] == [2, 1, 0]
    error = make_error([failure(0, when=3.0), died], "in 'f'", unfinished=[3, 4])
    assert isinstance(error, WorkerDied)
    assert str(error).startswith("a:2 on node 0 died in 'f': what")
    assert "also failed (1):\n    a:0 on node 0: what" in str(error)
    assert "not finished yet: 2 ranks, 3-4" in str(error)


class NoText(Exception):  # noqa: N818 - it is what it says
    def __str__(self) -> str:
        raise ValueError("no text")


class Huge(Exception):  # noqa: N818 - it is what it says
    """One that is too large to be sent."""


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_exception_travels_pickled_or_at_least_described():
    sent = pickle.loads(pickle.dumps(carry(raised(KeyError("k")), "the tail")))  # noqa: S301 - our own bytes
    assert sent.failure.what == "KeyError: 'k'"
    assert "test_launch_parts.py" in sent.failure.traceback
    assert isinstance(make_error([failure(0, pickled=sent.failure.pickled)], "in 'f'"), KeyError)
    assert carry(raised(NoText()), "").failure.what.endswith("NoText: (its str() raises ValueError)")
    huge = carry(raised(Huge("x" * 5_000_000)), "")
    assert huge.failure.pickled is None
    assert len(huge.failure.what) + len(huge.failure.traceback) < 100_000
    assert isinstance(make_error([failure(0, pickled=b"broken")], "in 'f'"), WorkerFailed)


def test_a_result_has_a_text_before_its_call_is_sent():
    members = SimpleNamespace(name="a", identity=lambda rank: alone("a", rank, 2))
    result = CallResult(members, "f", [0, 1], [Future(), Future()], [(), ()])
    assert repr(result) == "<CallResult of 'f' on 2 workers of 'a'>"
    assert repr(result[1]) == "<RankResult of 'f' in a:1>"


def test_the_outcome_of_a_call_that_could_not_be_sent_is_the_death_of_its_worker():
    context = SimpleNamespace(check_open=lambda: None, stop=contextlib.nullcontext())
    members = SimpleNamespace(name="a", identity=lambda rank: alone("a", rank, 2), context=context)
    dead, late = Future(), Future()
    result = CallResult(members, "f", [0, 1], [dead, late], [(), ()])
    assert not result.done()
    dead.set_exception(WorkerDied("a:0 on node 0 is dead"))
    first, second = result.outcomes(0)
    assert (first.kind, str(first.error)) == (OutcomeKind.DEATH, "a:0 on node 0 is dead")
    assert (second.kind, second.rank) == (OutcomeKind.TIMEOUT, 1)
    late.set_exception(ValueError("no"))
    assert result.done()
    with pytest.raises(WorkerDied, match="a:0 on node 0 is dead"):
        result.wait()


def test_a_worker_that_cannot_read_the_run_folder_writes_its_log_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("ROOST_LOG_DIR", raising=False)
    made = make_run_dir(tmp_path / "run")
    path = str(log_file(made.logs, "actor:0"))
    assert choose_place(made, "actor:0") == LogPlace(path=path, base=made.path, is_shared=True)
    assert made.marker.stat().st_mode & 0o777 == 0o600, "another user cannot read it"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not choose_place(made, "actor:0").is_shared


def test_old_runs_are_removed_and_young_ones_kept(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder_of_runs = tmp_path / "roost" / "runs"
    for number in range(30):
        folder = folder_of_runs / f"20200101-0000{number:02d}-abcdef"
        folder.mkdir(parents=True)
        when = time.time() - (48 * 3600 if number % 2 else 0)
        os.utime(folder, (when, when))
    with own_run_dir(None) as made:
        assert find_run("latest") == folder_of_runs / made.id
    left = {path.name for path in folder_of_runs.iterdir()}
    # The newest 20 stay, and of the older ones those that are younger than a day.
    assert len(left) == 20 + 6


@pytest.mark.parametrize(("caller", "is_named"), [("train", True), ("typer.main", False), ("click.core", False)])
def test_the_line_that_asked_is_the_users_and_not_one_of_roosts_own_command_line(caller, is_named):
    outer = {"__name__": caller}
    inner = {"__name__": "roost.demo.run", "asked_at": asked_at}
    exec(compile("def call():\n    return asked_at()", "run.py", "exec"), inner)  # noqa: S102 - to choose the module
    exec(compile("def ask(call):\n    return call()", "train.py", "exec"), outer)  # noqa: S102 - likewise

    assert outer["ask"](inner["call"]) == ("asked for at train.py:2" if is_named else "")


def test_a_process_that_can_open_nothing_says_so_when_it_loads_the_class_of_its_worker(tmp_path):
    (tmp_path / "own.py").write_text("class Own: pass\n", encoding="utf-8")
    code = (
        "import os, resource, sys\n"
        "import own\n"
        "from roost import ClusterError\n"
        "from roost.runtime.process.packing import make_object, pack\n"
        "packed = pack(((own.Own,), {}), [])\n"
        "assert type(make_object(packed)).__name__ == 'Own'\n"
        "del sys.modules['own']\n"
        "free = os.dup(0)\n"
        "os.close(free)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))\n"
        "try:\n"
        "    make_object(packed)\n"
        "except ClusterError as error:\n"
        "    print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.startswith("the worker's class cannot be loaded: [Errno 24] Too many open files"), ran.stderr
