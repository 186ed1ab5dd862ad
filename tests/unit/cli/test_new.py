"""`roost new` and `roost schema`: what they create, and what they refuse."""

from __future__ import annotations

import ast
import json
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from roost import Topology, make_plan
from roost.config.job import read_job_draft
from roost.config.run import read_run_config
from roost.config.schema import cluster_schema, inventory_schema, job_schema


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_new_project_can_be_planned_and_run(roost, tmp_path):
    code, out, err = roost("new", "my-job")
    assert (code, err) == (0, "")
    folder = tmp_path / "my-job"
    made = [
        ".gitignore",
        ".roost/job.schema.json",
        "README.md",
        "job.yaml",
        "my_job.py",
        "pyproject.toml",
        "test_my_job.py",
    ]
    assert names(folder) == made
    for name in [*made, "cd my-job", "roost plan job.yaml --cluster 2x4", "roost up 2x4", "roost run job.yaml"]:
        assert name in out
    for name in made:
        assert not re.search("@[A-Z]+@", (folder / name).read_text(encoding="utf-8")), f"{name} has a gap in it"
    plan = make_plan(folder / "job.yaml", Topology.from_shorthand("2x4"))
    assert {part.name: part.world_size for part in plan.components} == {"learner": 1, "rollout": 2}
    run = read_run_config(read_job_draft(folder / "job.yaml"))
    defined = {node.name for node in ast.parse((folder / "my_job.py").read_text()).body if hasattr(node, "name")}
    for target in [run.entry, *(worker.target for worker in run.workers)]:
        module, _, name = target.rpartition(".")
        assert (module, name in defined) == ("my_job", True)
    assert json.loads((folder / ".roost" / "job.schema.json").read_text()) == job_schema()
    assert (folder / "job.yaml").read_text().startswith("# yaml-language-server: $schema=.roost/job.schema.json\n")
    assert "pytest" in tomllib.loads((folder / "pyproject.toml").read_text())["tool"]


def test_the_files_of_a_project_are_tidy(roost, tmp_path):
    roost("new", "my-job")
    for path in (tmp_path / "my-job").glob("[!.]*"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) <= 120, path.name
        assert all(line == line.rstrip() for line in lines), path.name


def test_a_project_can_be_created_elsewhere_and_in_an_empty_folder(roost, tmp_path):
    assert roost("new", "some/where/my.job")[0] == 0
    assert "my_job.py" in names(tmp_path / "some" / "where" / "my.job")
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    assert roost("new", "link")[0] == 0
    assert "here.py" in names(tmp_path / "here")


def test_a_project_in_this_folder_needs_no_cd(roost, tmp_path, monkeypatch):
    (tmp_path / "own-job").mkdir()
    monkeypatch.chdir(tmp_path / "own-job")
    code, out, _ = roost("new", ".")
    assert (code, "cd " in out) == (0, False)
    assert "own_job.py" in names(tmp_path / "own-job")


def test_a_missing_pytest_is_to_be_installed(roost, monkeypatch):
    assert "pip install pytest" not in roost("new", "with-it")[1]
    monkeypatch.setattr("roost.cli.commands.new.find_spec", lambda _: None)
    assert "  cd without-it\n  pip install pytest\n" in roost("new", "without-it")[1]


def test_a_current_folder_with_an_unusable_name_is_named(roost, tmp_path, monkeypatch):
    (tmp_path / "2 jobs").mkdir()
    monkeypatch.chdir(tmp_path / "2 jobs")
    code, out, err = roost("new", ".")
    assert (code, out) == (2, "")
    assert err.startswith("'2 jobs' cannot name a project")


def test_a_project_below_a_folder_whose_name_is_not_valid_text(tmp_path):
    command = [sys.executable, "-m", "roost", "new", b"caf\xe9/my-job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"created caf\xe9/my-job\n")
    assert "my_job.py" in names(tmp_path / "caf\udce9" / "my-job")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full", "full is not empty"),
        ("file", "file is a file"),
        ("file/my-job", "Not a directory"),
        ("/proc/my-job", "/proc/my-job: "),
        ("1job", "'1job' cannot name a project"),
        ("my job", "'my job' cannot name a project"),
        ("-job", "No such option"),
        ("/", "'/' cannot name a project"),
        ("jöb", "cannot name a project"),
        ("a" * 65, "64 at most"),
        ("x\ny", "cannot name a project"),
        ("class", "'class' is a keyword of Python"),
        ("json", "'json' is an installed module"),
        ("ray", "hint: try my-ray"),
        ("roost", "'roost' is an installed module"),
    ],
)
def test_a_project_that_cannot_be_created_is_reported_and_nothing_is_written(roost, tmp_path, name, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    code, out, err = roost("new", name)
    assert (code, out) == (2, "")
    assert said in err
    assert names(tmp_path) == ["file", "full/precious"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_links_in_a_circle_are_an_error(roost, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    code, out, err = roost("new", "loop/my-job")
    assert (code, out) == (2, "")
    assert "loop/my-job: " in err


def test_a_project_that_cannot_be_completed_is_removed(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "some/where/my-job"):
        done = subprocess.run(
            [sys.executable, "-m", "roost", "new", name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            # As on a full disk: small files can be written, and the schema cannot.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)),
        )
        assert done.returncode == 2, done.stderr
        assert "File too large" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_the_schema_is_printed_or_written(roost, tmp_path):
    assert json.loads(roost("schema")[1]) == job_schema()
    assert json.loads(roost("schema", "--for", "cluster")[1]) == cluster_schema()
    assert roost("schema", "--for", "inventory", "--out", "inventory.json") == (0, "", "wrote inventory.json\n")
    assert json.loads((tmp_path / "inventory.json").read_text()) == inventory_schema()
    code, _, err = roost("schema", "--out", "no/such/folder.json")
    assert (code, "No such file or directory" in err) == (2, True)
    assert roost("schema", "--for", "plan")[0] == 2
