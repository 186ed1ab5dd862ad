"""verl on Roost: its own tests of `single_controller` that need no GPU, and a program of its pools."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from roost.testing import LocalNode, local_cluster

JOB = Path(__file__).parent / "verl_job.py"
# Those that pass on Ray alone where there is no GPU.
FILES = (
    *("auto_padding_on_cpu", "decorator_on_cpu", "fused_workers_on_cpu", "get_set_dispatch_collect_cpu"),
    *("ray_local_envs_on_cpu", "ray_utils_on_cpu"),
)
pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl: make test-programs")


@pytest.fixture(scope="module")
def verl() -> Path:
    """A folder with verl's tests: that of the checkout which VERL names, or the one that its package has."""
    found = find_spec("verl")
    folder = Path(os.environ.get("VERL") or Path(found.origin).parents[1]).absolute()
    if not (folder / "tests" / "single_controller").is_dir():
        pytest.skip("this verl has no tests in its package: VERL=path of a checkout make test-programs")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_their_own_tests_pass(program, verl, name):
    file = f"tests/single_controller/test_{name}.py"
    done = program("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", file, compat="verl", cwd=verl)
    assert " passed" in done.stdout
    assert not {"failed", "skipped"} & set(done.stdout.split())


def test_a_program_prints_what_it_prints_on_ray_alone(program):
    with local_cluster([LocalNode(accelerators=2, cpus=8)] * 2) as local:
        alone, ours = (program(str(JOB), compat=compat, env=local.environment) for compat in (None, "verl"))
    assert "roost: stands in for verl.single_controller.ray.base of verl" in ours.stderr
    printed = alone.stdout.splitlines()
    assert len(printed) == 15
    assert ours.stdout.splitlines() == printed
