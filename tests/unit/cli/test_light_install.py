"""What works, and what is said, where Ray and numpy are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('ray', 'numpy', 'packaging', 'pynvml')))\n"
MAIN = "sys.argv = ['roost', *sys.argv[1:]]; from roost.cli.main import main; main()"
JOB = "cluster: {num_nodes: 1, hardware: 1x4, component_placement: {actor: 0-3}}\n"


def python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code as if Ray were not installed."""
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_the_light_install_needs_neither_ray_nor_numpy_and_the_extras_that_launch_bring_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {item.partition(">")[0] for item in project["dependencies"]}
    assert not names & {"ray", "numpy", "protobuf", "pydantic", "packaging"}
    assert not any("<" in item or "==" in item for item in project["dependencies"])
    extras = project["optional-dependencies"]
    assert any(item.startswith("ray>=") for item in extras["ray"])
    assert "roost[ray]" in extras["rl"]
    assert "roost[ray]" in extras["demo"]
    assert not any("ray" in item or "numpy" in item for item in extras["watch"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "job.yaml"),
        ("plan", "job.yaml", "--format", "html"),
        ("plan", "job.yaml", "--format", "json"),
        ("check", "job.yaml"),
        ("diff", "job.yaml", "job.yaml"),
        ("where", "job.yaml", "actor:1"),
        ("schema",),
        ("runs",),
        ("search", "--help"),
        ("watch", "--help"),
        ("top", "--help"),
    ],
    ids=" ".join,
)
def test_planning_and_reading_work_without_ray(arguments, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    ran = python(MAIN, *arguments, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "arguments", [("nodes",), ("status",), ("up", "1x2"), ("run", "job.yaml"), ("demo",)], ids=" ".join
)
def test_a_command_that_needs_ray_says_in_one_line_what_to_install(arguments, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB + "workers: {actor: mine.Actor}\nentry: mine.main\n")
    ran = python(MAIN, *arguments, folder=tmp_path)
    assert ran.returncode == 2
    said = f"roost {arguments[0]} needs Ray, which is not installed\n  hint: pip install 'roost[ray]'\n"
    assert ran.stderr == said


def test_what_asks_the_cluster_or_a_package_beside_ray_says_ray(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    ran = python(MAIN, "plan", "job.yaml", "--live", folder=tmp_path)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (2, "--live needs Ray, which is not installed")
    code = "from roost.extras import missing_extra\n"
    code += "try: import packaging\nexcept ModuleNotFoundError as error: print(missing_extra(error)[0])"
    assert python(code, folder=tmp_path).stdout == "needs Ray, which is not installed\n"


def test_the_code_of_a_job_is_left_alone_without_ray(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB + "workers: {actor: mine.Actor}\nentry: mine.main\n")
    ran = python(MAIN, "check", "job.yaml", folder=tmp_path)
    assert ran.returncode == 0
    assert "the code of the job is not checked without Ray" in ran.stdout


def test_a_public_name_that_needs_ray_says_so_too(tmp_path):
    ran = python("import roost; print(roost.make_plan.__name__); roost.Cluster", folder=tmp_path)
    assert ran.stdout == "make_plan\n"
    assert ran.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: roost.Cluster needs Ray, which is not installed: pip install 'roost[ray]'"
    )
