"""RLinf's own tests of its scheduler, with Roost in the scheduler's place and no change in their files."""

from __future__ import annotations

import ast
import importlib
import os

import pytest

from roost.compat.rlinf import REPLACES
from roost.testing import local_cluster

# What tests parts of RLinf's scheduler that are inside of it, and that Roost refuses by name.
INSIDE = [
    "test_comm.py::TestMultiChannelProcessGroupFailures",
    "test_worker.py::TestManagerNamespace",
]


@pytest.fixture
def rlinf(checkout):
    pytest.importorskip("torch", reason="needs torch: make test-programs")
    return checkout("RLINF", "RLinf (github.com/RLinf/RLinf)", "tests/unit_tests/test_comm.py")


def test_every_name_that_rlinf_s_programs_import_is_there_or_refused(rlinf):
    wanted = set()
    for path in [*rlinf.glob("rlinf/**/*.py"), *rlinf.glob("examples/**/*.py")]:
        if rlinf / "rlinf" / "scheduler" in path.parents or path == rlinf / "rlinf" / "utils" / "placement.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(
                ("rlinf.scheduler.", "rlinf.utils.plac")
            ):
                wanted |= {(node.module, item.name) for item in node.names}
    assert len(wanted) > 40
    for module, name in sorted(wanted):
        assert hasattr(importlib.import_module(REPLACES[module]), name), f"from {module} import {name}"


@pytest.mark.parametrize(
    ("name", "count"),
    [("test_placement.py", 38), ("test_channel.py", 73), ("test_comm.py", 56), ("test_worker.py", 10)],
)
def test_rlinf_s_own_tests_of_its_scheduler_pass(rlinf, program, monkeypatch, name, count):
    tests = rlinf / "tests" / "unit_tests"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(rlinf), str(tests)]))
    left_out = [word for inside in INSIDE for word in ("--deselect", inside)]
    with local_cluster("1x0") as cluster:
        # With `-s`, since Roost says on standard error that it is there.
        words = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *left_out, name]
        done = program(*words, compat="rlinf", cwd=tests, env={**cluster.environment, "ROOST_QUIET": "1"})
    # None failed, and the others of their tests are skipped, for want of a GPU.
    assert f" {count} passed" in done.stdout
    assert "roost: stands in for rlinf" in done.stderr
