"""`roost compat` on a cluster that runs already: Ray's workers get Roost's modules, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import ray

def look(number):
    import slime.ray.placement_group as them
    return number, them.__name__, os.environ["WORD"], os.environ.get("HOOKED"), "/further" in sys.path

ray.init(namespace="compat", log_to_driver=False, runtime_env={"env_vars": {"WORD": "mine", "PYTHONPATH": "/further"}})
task, actor = ray.remote(look), ray.remote(type("Actor", (), {"look": staticmethod(look)}))
print(ray.get(task.remote(1)))
print(ray.get(actor.remote().look.remote(2)))
"""
OWN_HOOK = """
def add(runtime_env):
    return {**runtime_env, "env_vars": {**runtime_env["env_vars"], "HOOKED": "yes"}}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a package that has the names of slime's, as a checkout on the path has."""
    package = tmp_path / "slime" / "ray"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").write_text("")
    (package / "placement_group.py").write_text("mine = 'theirs'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "own_hook.py").write_text(OWN_HOOK)
    return tmp_path


@pytest.mark.parametrize(("own", "hooked"), [({}, None), ({"RAY_RUNTIME_ENV_HOOK": "own_hook.add"}, "yes")])
def test_workers_of_a_running_cluster_take_roosts_modules(checkout, roost_local_cluster, own, hooked):
    done = subprocess.run(
        [sys.executable, "-m", "roost", "compat", "slime", "--", sys.executable, "program.py"],
        cwd=checkout,
        env={**os.environ, **roost_local_cluster.environment, "PYTHONPATH": str(checkout), **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    found = [(number, "roost.compat.slime", "mine", hooked, True) for number in (1, 2)]
    assert done.stdout.splitlines() == [str(line) for line in found], done.stderr
