"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roost import Plan
from roost.cli.main import _COMMANDS, load_command

ROOT = Path(__file__).resolve().parents[3]
JOB = "examples/job.yaml"
HARDWARE = ["--cluster", "2x8:H100,1x0"]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_plan_draws_a_map(roost):
    code, out, err = roost("plan", JOB, *HARDWARE)
    assert code == 0
    assert "[rollout 3" in out
    assert "no accelerators  [env 0-7" in out
    assert err == ""


def test_plan_without_hardware_assumes_and_says_so(roost):
    code, _, err = roost("plan", JOB)
    assert code == 0
    assert "assuming 3x8" in err
    assert "warning: 8 of 24 accelerators idle" in err


@pytest.mark.parametrize("form", ["map", "svg", "html"])
def test_a_picture_of_assumed_hardware_says_so_itself(roost, form):
    mark = "! assumed hardware: 3x8; the job may get other nodes"
    assert mark in roost("plan", JOB, "--format", form)[1]
    assert mark not in roost("plan", JOB, *HARDWARE, "--format", form)[1]


@pytest.fixture
def hardware_job(tmp_path):
    """A job that says which hardware its project has."""
    path = tmp_path / "job.yaml"
    text = "cluster:\n  num_nodes: 2\n  hardware: 4x2:H100,3x0\n  component_placement:\n    actor: all\n"
    path.write_text(text)
    return path


def test_a_job_is_planned_on_the_first_nodes_of_its_own_hardware(roost, hardware_job, monkeypatch):
    monkeypatch.setenv("ROOST_CLUSTER", "9x9")
    code, out, err = roost("plan", str(hardware_job))
    assert (code, err) == (0, "")
    assert "2 nodes · 4 accelerators" in out
    assert "2 x H100" in out
    assert "assumed" not in out


def test_a_flag_wins_over_the_hardware_of_the_job(roost, hardware_job):
    assert "4090" in roost("plan", str(hardware_job), "--cluster", "2x1:4090")[1]


def test_a_job_without_num_nodes_has_all_of_its_hardware(roost, hardware_job):
    hardware_job.write_text(hardware_job.read_text().replace("  num_nodes: 2\n", ""))
    assert "7 nodes · 8 accelerators" in roost("plan", str(hardware_job))[1]


@pytest.mark.parametrize("written", ["4x2:H100", "inventory.yaml"])
def test_the_variable_describes_the_cluster_of_jobs_that_do_not(roost, hardware_job, monkeypatch, tmp_path, written):
    (tmp_path / "inventory.yaml").write_text(
        "nodes: [" + ", ".join(["{accelerators: {count: 2, model: H100}}"] * 4) + "]"
    )
    hardware_job.write_text(hardware_job.read_text().replace("  hardware: 4x2:H100,3x0\n", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROOST_CLUSTER", written)
    code, out, err = roost("plan", "job.yaml")
    assert code == 0
    assert "2 nodes · 4 accelerators" in out
    assert err == f"note: planning on {written}, from ROOST_CLUSTER\n"


def test_a_mistake_in_the_variable_names_the_variable(roost, monkeypatch):
    monkeypatch.setenv("ROOST_CLUSTER", "two")
    code, _, err = roost("plan", JOB)
    assert code == 2
    assert "ROOST_CLUSTER: cluster 'two': 'two' is not nodes x accelerators" in err


def test_plan_as_json_is_pure_json(roost):
    code, out, _ = roost("plan", JOB, *HARDWARE, "--format", "json")
    assert code == 0
    data = json.loads(out)
    assert set(data) == {
        "version",
        "hash",
        "mode",
        "num_nodes",
        "sizes_ignored",
        "topology",
        "component_order",
        "components",
    }
    assert list(data["components"]["rollout"]) == [
        "world_size",
        "node_groups",
        "hardware_ranks",
        "stride",
        "tensor_parallel_size",
        "model_parallel_size",
        "placements",
    ]
    assert data["components"]["rollout"]["placements"][1] == {
        "rank": 1,
        "cluster_node_rank": 1,
        "placement_node_rank": 0,
        "local_accelerator_rank": 2,
        "accelerator_type": "nvidia",
        "local_rank": 1,
        "local_world_size": 4,
        "visible_accelerators": ["2", "3"],
        "isolate_accelerator": True,
        "local_hardware_ranks": [2, 3],
        "node_group_label": "cluster",
        "hardware_type": "accelerator",
    }
    assert Plan.from_json(out).hash == data["hash"]


def test_plan_as_a_table_has_a_line_for_each_worker(roost):
    _, out, _ = roost("plan", JOB, *HARDWARE, "--format", "table", "--component", "reward", "--component", "env")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["WORKER", "NODE", "HARDWARE", "VISIBLE", "LOCAL", "GROUP"]
    assert lines[2] == ["reward:1", "0", "accelerator:1", "1", "1/2", "cluster"]
    assert lines[3] == ["env:0", "2", "-", "-", "0/8", "node"]
    assert len(lines) == 1 + 2 + 8


@pytest.mark.parametrize(("form", "start"), [("svg", "<svg "), ("html", "<!doctype html>"), ("map", "job.yaml")])
def test_plan_writes_files(roost, tmp_path, form, start):
    out = tmp_path / "picture"
    code, printed, err = roost("plan", JOB, *HARDWARE, "--format", form, "--out", str(out))
    assert (code, printed) == (0, "")
    assert f"wrote {out}" in err
    assert out.read_text().startswith(start)


def test_a_file_that_cannot_be_written_is_an_error(roost, tmp_path):
    code, _, err = roost("plan", JOB, *HARDWARE, "--format", "svg", "--out", str(tmp_path / "no" / "such"))
    assert code == 2
    assert "No such file or directory" in err


def test_a_saved_plan_can_be_given_for_its_job(roost, tmp_path):
    saved = tmp_path / "saved.json"
    roost("plan", JOB, *HARDWARE, "--format", "json", "--out", str(saved))
    assert roost("diff", str(saved), str(saved)) == (0, "the plans are alike\n", "")
    code, out, _ = roost("where", str(saved), "env:1")
    assert code == 0
    assert "the node itself" in out
    for flags in (["--cluster", "2x8"], ["--no-isolate"], ["--placement", "hybrid"]):
        code, _, err = roost("plan", str(saved), *flags)
        assert code == 2
        assert f"leave out {flags[0]}" in err
        assert roost("diff", str(saved), str(saved), *flags)[0] == 2


def test_a_job_compared_with_a_saved_plan_is_planned_on_its_hardware(roost, tmp_path):
    saved = tmp_path / "saved.json"
    roost("plan", JOB, *HARDWARE, "--format", "json", "--out", str(saved))
    assert roost("diff", str(saved), JOB) == (0, "the plans are alike\n", "")
    assert roost("diff", JOB, str(saved), *HARDWARE)[0] == 0
    code, out, _ = roost("diff", str(saved), JOB, "--cluster", "3x8")
    assert code == 1
    assert "~ cluster: 3 nodes, 16 accelerators -> 3 nodes, 24 accelerators" in out


def test_a_saved_plan_that_was_edited_is_refused(roost, tmp_path):
    saved = tmp_path / "saved.json"
    roost("plan", JOB, *HARDWARE, "--format", "json", "--out", str(saved))
    saved.write_text(saved.read_text().replace('"rank": 1,', '"rank": 2,', 1))
    code, _, err = roost("plan", str(saved))
    assert (code, err.startswith(f"{saved}: this plan's hash does not fit")) == (2, True)


def test_a_saved_plan_is_recognised_in_any_order_of_its_keys(roost, tmp_path):
    saved = tmp_path / "saved.json"
    _, out, _ = roost("plan", JOB, *HARDWARE, "--format", "json")
    saved.write_text(json.dumps(json.loads(out), sort_keys=True))
    assert roost("diff", str(saved), JOB)[0] == 0


def test_a_part_of_a_plan_says_so_and_is_not_read_as_a_plan(roost, tmp_path):
    part = tmp_path / "part.json"
    _, out, _ = roost("plan", JOB, *HARDWARE, "--format", "json", "--component", "env")
    part.write_text(out)
    data = json.loads(out)
    assert (data["partial"], list(data["components"])) == (True, ["env"])
    assert data["hash"] == json.loads(roost("plan", JOB, *HARDWARE, "--format", "json")[1])["hash"]
    code, _, err = roost("check", str(part))
    assert (code, "a part of a plan" in err) == (2, True)


def test_diff_shows_what_differs_in_the_hardware(roost, tmp_path):
    saved = tmp_path / "saved.json"
    roost("plan", JOB, *HARDWARE, "--format", "json", "--out", str(saved))
    code, out, _ = roost("diff", str(saved), JOB, "--cluster", "1x8:H100,1x8:A100,1x0")
    assert (code, out) == (1, "~ node 1: 8 x H100 -> 8 x A100\n")
    grouped = tmp_path / "grouped.yaml"
    grouped.write_text(
        Path(JOB).read_text().replace("cluster:", "cluster:\n  node_groups: [{label: a, node_ranks: 0}]")
    )
    _, out, _ = roost("diff", str(saved), str(grouped))
    assert out == '~ node group \'a\': none -> {"label": "a", "node_ranks": [0]}\n'


def test_diff_exits_with_1_if_plans_differ(roost):
    code, out, _ = roost("diff", "examples/collocated.yaml", "examples/disaggregated.yaml", "--cluster", "2x8")
    assert code == 1
    assert "~ mode: collocated -> disaggregated" in out
    assert "appeared (4)\n  + inference:0-3" in out
    assert "went (14)\n" in out
    assert "  ~ node 1 accelerator 7: actor, rollout -> inference" in out


def test_diff_as_json(roost):
    code, out, _ = roost(
        "diff", "examples/collocated.yaml", "examples/disaggregated.yaml", "--cluster", "2x8", "--format", "json"
    )
    assert code == 1
    mode = {"what": "mode", "of": None, "before": "collocated", "after": "disaggregated"}
    assert mode in json.loads(out)["facts"]


def test_where_shows_the_seat_and_the_environment(roost):
    code, out, _ = roost("where", JOB, "rollout:2", *HARDWARE)
    assert code == 0
    assert "accelerator 4,5" in out
    assert "CUDA_VISIBLE_DEVICES=4,5" in out
    _, out, _ = roost("where", JOB, "rollout:2", *HARDWARE, "--format", "json")
    answer = json.loads(out)
    assert answer["environment"]["RANK"] == "2"
    assert (answer["node_rank"], answer["local_hardware_ranks"]) == (1, [4, 5])
    inventory = ["--inventory", "examples/heterogeneous-inventory.yaml"]
    _, out, _ = roost("where", "examples/heterogeneous.yaml", "actor:0", *inventory)
    assert "0 (train-0, 10.0.0.2)" in out


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("rollout", "is not a worker"),
        ("rollout:x", "is not a worker"),
        ("rollout:-1", "is not a worker"),
        ("rollout:4", "has no rank 4: it has ranks 0-3"),
        ("rolout:1", "no component 'rolout'"),
    ],
)
def test_where_explains_a_worker_that_does_not_exist(roost, worker, said):
    code, out, err = roost("where", JOB, worker, *HARDWARE)
    assert (code, out) == (2, "")
    assert said in err


def test_where_shows_who_sits_on_hardware(roost):
    assert roost("where", JOB, "0:1", *HARDWARE)[1].splitlines()[-1] == "accelerator 1  actor:1, reward:1"
    assert roost("where", JOB, "2", *HARDWARE)[1].splitlines()[-1] == "the node itself  env:0-7"
    assert roost("where", JOB, "3", "--cluster", "4x8")[1].splitlines()[-1] == "accelerator 7  none"
    assert roost("where", JOB, "3", "--cluster", "2x8,2x0")[1].splitlines()[-1] == "workers  none"
    _, out, _ = roost("where", JOB, "2", *HARDWARE, "--format", "json")
    piece = {"hardware_type": "node", "local_rank": None, "workers": [f"env:{rank}" for rank in range(8)]}
    assert json.loads(out) == {"node_rank": 2, "hardware": [piece]}
    inventory = ["--inventory", "examples/heterogeneous-inventory.yaml"]
    _, out, _ = roost("where", "examples/heterogeneous.yaml", "3:Franka:1", *inventory, "--format", "json")
    assert json.loads(out)["hardware"][0]["workers"] == ["env:6", "env:7"]


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ("7:0", "there is no node 7"),
        ("0:8", "node 0 has no accelerator 8"),
        ("0:Franka:0", "no hardware of kind 'Franka'"),
        ("a:b", "is not a worker"),
        ("0:b", "is not a piece of hardware"),
        ("0:1:2:3", "is not a piece of hardware"),
        ("", "is not a worker"),
    ],
)
def test_where_explains_hardware_that_does_not_exist(roost, hardware, said):
    code, out, err = roost("where", JOB, hardware, *HARDWARE)
    assert (code, out) == (2, "")
    assert said in err


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """A job for two nodes with a rollout on the third."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(
        "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 0-15\n    rollout: 8-17\n"
    )
    return "job.yaml"


@pytest.mark.parametrize("command", [["plan"], ["check"], ["run", "--dry-run"]])
def test_a_node_beyond_num_nodes_is_an_error_as_it_would_be_at_run(roost, two_nodes, command):
    code, out, err = roost(command[0], two_nodes, *command[1:], "--cluster", "4x8")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "job.yaml:5:16: component 'rollout' asks for hardware rank 16, which is on node 2, but num_nodes is 2, "
        "so node ranks are 0-1",
        "    rollout: 8-17",
        "               ^^",
        "  hint: a job runs on the first num_nodes nodes: write num_nodes: 3, or choose other ranks",
    ]


def test_a_component_on_all_is_planned_on_more_nodes_than_num_nodes(roost, two_nodes):
    Path(two_nodes).write_text(Path(two_nodes).read_text().replace("8-17", "all").replace("0-15", "all"))
    code, _, err = roost("plan", two_nodes, "--cluster", "4x8")
    assert code == 0
    assert err == "warning: cluster.num_nodes is 2, but the plan is for 4 nodes [num-nodes]\n"


def test_check_reports_findings_and_can_be_strict(roost):
    code, out, _ = roost("check", JOB, "--cluster", "4x8")
    assert code == 0
    assert out.startswith(f"{JOB} can be placed: 4 components, 22 workers, plan ")
    assert "warning: cluster.num_nodes is 3" in out
    assert roost("check", JOB, "--cluster", "4x8", "--strict")[0] == 1
    assert roost("check", JOB, *HARDWARE, "--strict")[0] == 0
    _, out, _ = roost("check", JOB, *HARDWARE, "--format", "json")
    answer = json.loads(out)
    assert (answer["entry"], answer["findings"][0]["code"]) == (None, "shared")


def test_check_takes_a_saved_plan_and_no_hardware_with_it(roost, tmp_path):
    saved = tmp_path / "plan.json"
    assert roost("plan", JOB, *HARDWARE, "--format", "json", "--out", str(saved))[0] == 0
    assert roost("check", str(saved))[1].startswith(f"{saved} can be placed: ")
    assert "leave out --cluster" in roost("check", str(saved), *HARDWARE)[2]


def test_mistakes_exit_with_2_and_are_all_reported(roost):
    code, out, err = roost("plan", "examples/broken.yaml", "--cluster", "2x8")
    assert (code, out) == (2, "")
    assert err.count("hint:") == 3
    assert err.startswith("examples/broken.yaml:6:16: component 'rollout' asks for hardware rank 16")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "nothing.yaml"],
        ["plan", JOB, "--cluster", "2by8"],
        ["plan", JOB, "--cluster", "2x8", "--inventory", "examples/heterogeneous-inventory.yaml"],
        ["plan", JOB, "--inventory", "nothing.yaml"],
        ["plan", JOB, "--format", "png"],
        ["plan", JOB, *HARDWARE, "--timeout", "5"],
        ["plan", JOB, *HARDWARE, "--component", "nobody"],
        ["nonsense"],
    ],
)
def test_wrong_arguments_exit_with_2(roost, arguments):
    code, _, err = roost(*arguments)
    assert code == 2
    assert err
    assert "Traceback" not in err


def test_version_is_printed(roost):
    assert roost("--version")[:2] == (0, "0.1.0\n")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    command = [sys.executable, "-c", "from roost.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, cwd=ROOT, env={**kept, **environment}, timeout=60)


def test_a_pipe_gets_no_colour_unless_it_is_forced():
    assert b"\x1b[" not in run("plan", JOB, *HARDWARE).stdout
    assert b"\x1b[" in run("plan", JOB, *HARDWARE, FORCE_COLOR="1").stdout


def test_no_color_wins_over_a_terminal():
    terminal = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    assert b"48;2;" in run("plan", JOB, *HARDWARE, **terminal).stdout
    plain = run("plan", JOB, *HARDWARE, **terminal, NO_COLOR="1").stdout
    assert b"38;" not in plain
    assert b"48;" not in plain


def test_each_component_has_its_own_colour_on_a_terminal_with_16():
    text = run("plan", JOB, *HARDWARE, FORCE_COLOR="1", TERM="xterm", COLORTERM="").stdout
    for background in (b"44m", b"43m", b"42m", b"45m"):
        assert background in text
    assert b"48;" not in text


def test_the_map_keeps_to_the_width_of_the_terminal():
    for columns in ("40", "60", "80", "120"):
        text = run("plan", JOB, *HARDWARE, COLUMNS=columns).stdout.decode()
        assert max(map(len, text.splitlines())) <= int(columns)


def test_a_terminal_without_unicode_gets_ascii():
    done = run("plan", "examples/collocated.yaml", "--cluster", "2x8", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"[rol~ 0]" in done.stdout
    done.stdout.decode("ascii")


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    command = f"{sys.executable} -c 'from roost.cli.main import main; main()' plan {JOB} -c 3x8 --format json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=ROOT, timeout=60)
    assert done.stdout == b"{\n"
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


def test_standard_output_may_be_closed():
    command = f"{sys.executable} -m roost check examples/job.yaml --cluster 2x8:H100,1x0 >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_job_can_come_through_a_pipe():
    command = f"{sys.executable} -c 'from roost.cli.main import main; main()' plan /dev/stdin -c 1x8 --format table"
    job = b"cluster: {component_placement: {actor: 0-3}}"
    done = subprocess.run(["bash", "-c", command], input=job, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"actor:") == 4


def test_a_job_that_is_too_large_is_refused(roost, tmp_path):
    large = tmp_path / "large.yaml"
    large.write_text("# filler\n" * 1_200_000)
    code, _, err = roost("plan", str(large))
    assert (code, "at most 4 MiB are read" in err) == (2, True)


def test_an_answer_that_cannot_be_written_is_an_error():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("wb") as full:
        command = [
            sys.executable,
            "-c",
            "from roost.cli.main import main; main()",
            "plan",
            JOB,
            "-c",
            "9x8",
            "--format",
            "json",
        ]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr == b"the answer could not be written: No space left on device\n"


def test_a_dash_is_standard_input():
    command = [
        sys.executable,
        "-c",
        "from roost.cli.main import main; main()",
        "plan",
        "-",
        "-c",
        "1x8",
        "--format",
        "table",
    ]
    job = b"cluster: {component_placement: {actor: 0-3}}"
    done = subprocess.run(command, input=job, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.count(b"actor:")) == (0, 4)


def test_an_error_is_json_for_a_program_and_text_for_people(roost, two_nodes):
    code, out, err = roost("plan", two_nodes, "--cluster", "4x8", "--format", "json")
    assert code == 2
    (problem,) = json.loads(out)["problems"]
    assert problem["message"].startswith("component 'rollout' asks for hardware rank 16")
    assert problem["hint"].endswith("choose other ranks")
    key = "cluster.component_placement.rollout"
    assert problem["where"] == {"key": key, "file": "job.yaml", "line": 5, "column": 16}
    assert err.startswith("job.yaml:5:16: component 'rollout'")


def test_a_mistake_on_the_command_line_is_json_too(roost):
    code, out, _ = roost("check", "--format", "json")
    assert code == 2
    assert json.loads(out)["error"] == "ConfigError"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", JOB, "--format", "xml"], "'xml' is not one of 'map', 'table', 'json', 'svg', 'html'"),
        (["plan", JOB, "--live", "--timeout", "0"], "it must be at least 1"),
        (["plan", JOB, "--live", "--timeout", "9999"], "it must be at most 3600"),
        (["runs", "--number", "many"], "it must be a whole number"),
        (["plan", JOB, "--live", "--timeout", "soon"], "it must be a number"),
    ],
)
def test_the_value_of_an_option_is_refused_in_plain_words(roost, words, said):
    code, _, err = roost(*words)
    assert code == 2
    assert said in err
    assert "Input should" not in err
    assert "Value error" not in err
    assert f"see roost {words[0]} --help" in err


def test_help_and_version_are_commands_too(roost):
    assert roost("help", "plan") == roost("plan", "--help")
    assert roost("help") == roost("--help")
    assert roost("version") == roost("--version")
    code, _, err = roost("help", "plam")
    assert (code, "Did you mean 'plan'" in err) == (2, True)


@pytest.mark.usefixtures("two_nodes")
def test_a_folder_is_not_a_job(roost):
    code, _, err = roost("plan", ".")
    hint = "  hint: give the file of the job, such as job.yaml\n"
    assert (code, err) == (2, f". is a folder, and not that of a run\n{hint}")
    code, _, err = roost("run", ".")
    assert (code, err) == (2, ".: Is a directory\n  hint: give the file, not its folder\n")


def test_short_options_mean_the_same_in_all_commands():
    meanings: dict[str, set[str]] = {}
    for name in (name for panel in _COMMANDS.values() for name in panel):
        for option in load_command(name).params:
            for short in (word for word in option.opts if len(word) == 2):
                meanings.setdefault(short, set()).add(max(option.opts, key=len))
    assert meanings["-f"] == {"--follow"}
    assert meanings["-o"] == {"--out"}


def test_errors_on_a_terminal_are_coloured_counted_and_set_apart(roost, tmp_path, monkeypatch):
    job = tmp_path / "job.yaml"
    job.write_text("cluster:\n  num_nodes: two\n  component_placement:\n    actor: 0..3\n")
    monkeypatch.chdir(tmp_path)
    _, _, plain = roost("plan", "job.yaml", "--cluster", "1x8")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR")
    _, _, coloured = roost("plan", "job.yaml", "--cluster", "1x8")
    assert "\x1b[1;31mnum_nodes must be a whole number" in coloured
    shown = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert shown.split("\n\n")[-1] == "2 problems\n"
    assert [line for line in shown.splitlines() if line and "problems" not in line] == plain.splitlines()


def test_the_names_of_logs_bring_no_escape_to_the_terminal(roost, tmp_path):
    for name in ("ok", "\x1b]0;owned\x07"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "0.log").write_text("a line\n")
    for arguments in (["logs"], ["logs", "ok"], ["logs", "\x1b]0;owned\x07"]):
        code, out, err = roost(*arguments, "--run", str(tmp_path))
        assert code == 0, err
        assert "\x1b" not in out + err


def test_of_several_jobs_each_takes_the_variables_that_it_knows(roost, tmp_path):
    one, other = tmp_path / "run.sh", tmp_path / "slime.sh"
    one.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm trainer.nnodes=1\n")
    other.write_text("python train.py --actor-num-nodes $N --actor-num-gpus-per-node 8 --colocate\n")
    code, out, err = roost("check", str(one), str(other), "N=1")
    assert (code, out.count("can be placed"), err.count("error:")) == (0, 2, 0)
    code, _, err = roost("check", str(one), str(other), "N=1", "M=1")
    assert code == 2
    assert err.count("has no variable M") == 2
    assert "no variable N" not in err
