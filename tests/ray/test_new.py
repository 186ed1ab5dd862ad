"""`roost new` as a new user continues: every line of the README that it writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.shown


@pytest.fixture
def environment():
    """The environment of a new user: no cluster, no running tests, and a folder for local clusters."""
    # pytest's own folder is too long for the sockets below it.
    own = tempfile.mkdtemp(prefix="roost-new-")
    not_theirs = ("RAY_", "PYTEST_", "PYTHONPATH", "ROOST_")
    found = {name: value for name, value in os.environ.items() if not name.startswith(not_theirs)}
    found |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "TMPDIR": own, "COLUMNS": "80"}
    found["XDG_STATE_HOME"] = own
    yield found
    subprocess.run([sys.executable, "-m", "roost", "down"], env=found, check=False, capture_output=True, timeout=120)
    shutil.rmtree(own, ignore_errors=True)


def test_every_line_of_the_readme_works(tmp_path, environment):
    def run(line: str, folder: Path) -> str:
        command = ["bash", "-eu", "-c", line]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
        return done.stdout

    run("roost new my-job", tmp_path)
    folder = tmp_path / "my-job"
    blocks = re.findall(r"^```sh\n(.*?)^```$", (folder / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).splitlines()
    # The tests from another folder, which is more than the README says.
    said = {line: run("pytest my-job", tmp_path) if line == "pytest" else run(line, folder) for line in lines}
    assert lines == [
        "roost plan job.yaml --cluster 2x4",
        "pytest",
        "roost up 2x4",
        "roost run job.yaml",
        "roost logs learner",
        "roost down",
    ]
    assert "[learner 0 ═" in said["roost plan job.yaml --cluster 2x4"]
    assert "3 passed" in said["pytest"]
    rewards = [float(found) for found in re.findall(r"mean reward ([0-9.]+)", said["roost run job.yaml"])]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.2
    assert said["roost logs learner"].count("the policy was") == 10
