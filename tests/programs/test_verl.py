"""verl on Roost: its own tests of `single_controller` that need no GPU, a program of its pools, and what is refused."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from roost.testing import LocalNode, local_cluster

HERE = Path(__file__).parent
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
    # Their package may lie below this repository, whose settings are not theirs.
    settings = ["-c", os.devnull, "--rootdir", str(verl)]
    # Ray starts a process for each of the 100 CPUs that they give it, before one is needed.
    lazy = {"RAY_prestart_worker_first_driver": "0"}
    words = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *settings, file]
    done = program(*words, compat="verl", cwd=verl, env=lazy)
    assert " passed" in done.stdout
    assert not {"failed", "skipped"} & set(done.stdout.split())


def test_a_program_prints_what_it_prints_on_ray_alone_in_the_driver_and_in_an_actor(program):
    job = str(HERE / "verl_job.py")
    with local_cluster([LocalNode(accelerators=2, cpus=8)] * 2) as local:
        runs = [program(job, env=local.environment)]
        runs += [program(job, *words, compat="verl", env=local.environment) for words in ([], ["actor"])]
    assert "roost: stands in for verl.single_controller.ray.base of verl" in runs[1].stderr
    printed = [[line for line in done.stdout.splitlines() if line.startswith("verl: ")] for done in runs]
    assert len(printed[0]) == 15
    assert printed == [printed[0]] * 3


REFUSED = """
import ray
from roost import Cluster, ConfigError, PlacementError
from roost.compat.verl import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.base import Worker

def refused(what, call):
    try:
        call()
    except (ConfigError, PlacementError, ValueError) as error:
        print(what, "|", str(error).splitlines()[0])
    assert Cluster().node_manager.get_slots() == [], what

ray.init(log_to_driver=False)
init = RayClassWithInitArgs(ray.remote(Worker))
extra = RayClassWithInitArgs(ray.remote(Worker))
extra.update_options({"resources": {"disk": 1}})
cpus = RayResourcePool([2], use_gpu=False)
RayWorkerGroup(cpus, init)
refused("pool", lambda: RayResourcePool([2], detached=True).get_placement_groups())
refused("group", lambda: RayWorkerGroup(cpus, init, detached=True))
refused("names", lambda: RayWorkerGroup.from_detached(name_prefix="mine", worker_names=["a"], ray_cls_with_init=init))
refused("type", lambda: RayResourcePool([2], accelerator_type="H100").get_placement_groups())
refused("size", lambda: RayResourcePool([2, 3]).get_placement_groups())
refused("options", lambda: RayWorkerGroup(cpus, extra))
refused("env", lambda: RayWorkerGroup(cpus, init, worker_env={"RANK": "3"}))
refused("gpu", lambda: RayWorkerGroup(cpus, init, use_gpu=True))
with RayResourcePool([2], max_colocate_count=1).get_placement_groups().seats as seats:
    print(seats)
"""


def test_what_roost_cannot_do_is_refused_by_name(program, tmp_path):
    (tmp_path / "refused.py").write_text(REFUSED)
    with local_cluster("2x2") as local:
        done = program("refused.py", env=local.environment)
    printed = dict(line.split(" | ") for line in done.stdout.splitlines() if " | " in line)
    assert printed["pool"] == "verl asks for detached resource pools, and nothing of Roost outlives its job"
    assert (
        printed["group"] == printed["names"] == "verl asks for detached workers, and nothing of Roost outlives its job"
    )
    assert "accelerator_type='H100'" in printed["type"]
    assert "[2, 3] accelerators, each on one node, and the nodes have [2, 2]" in printed["size"]
    assert "resources, which Roost does not pass to Ray" in printed["options"]
    assert "RANK" in printed["env"]
    assert "use_gpu" in printed["gpu"]
    assert "of 2 seats>" in done.stdout
