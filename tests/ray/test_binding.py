"""Workers on the cores near their accelerators. The machine is pretended, with one core at each of two NUMA nodes."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest

from roost import PackedPlacementStrategy, WorkerDied, WrongPlace, group_of
from roost.runtime.groups import group as groups
from roost.runtime.launch.plan import plan_launch
from waiting import wait_until

CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores of Linux")
MODULE = """
import contextlib
import os
import subprocess
import threading

AT_IMPORT = sorted(os.sched_getaffinity(0))


def here():
    return sorted(os.sched_getaffinity(0))


class Sees:
    def cores(self):
        found = []
        thread = threading.Thread(target=lambda: found.extend(here()))
        thread.start()
        thread.join()
        tasks = set()
        for task in os.listdir("/proc/self/task"):
            # Some thread of Ray's may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                tasks |= os.sched_getaffinity(int(task))
        child = subprocess.run(["nproc"], capture_output=True, text=True).stdout.strip()
        return AT_IMPORT, here(), found, sorted(tasks), child

    def pid(self):
        return os.getpid()
"""


@pytest.fixture
def two_nodes(monkeypatch):
    """Tell launches that accelerator 0 is at NUMA node 0, which has the first core, and so on."""

    def pretended(name, topology, nodes, job, **options):
        numa = tuple(enumerate((core,) for core in CORES[:2]))
        told = [
            replace(
                node,
                numa=numa,
                accelerators=tuple(replace(one, numa=local % 2) for local, one in enumerate(node.accelerators)),
            )
            for node in nodes
        ]
        return plan_launch(name, topology, told, job, **options)

    monkeypatch.setattr(groups, "plan_launch", pretended)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's that looks at its cores while it is imported."""
    (tmp_path / "looks_at_cores.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import looks_at_cores  # type: ignore[import-not-found]

    yield looks_at_cores, {"PYTHONPATH": str(tmp_path)}
    del sys.modules["looks_at_cores"]


@pytest.mark.usefixtures("two_nodes")
def test_a_worker_is_on_the_cores_of_its_accelerator_before_its_module_is_imported(shared_cluster, module):
    seen, variables = module
    strategy = PackedPlacementStrategy(0, 1)
    with group_of(seen.Sees).launch(shared_cluster, strategy, name="near", env_vars=variables, restarts=1) as group:
        expected = [([core], [core], [core], [core], "1") for core in CORES[:2]]
        assert group.cores().wait(60) == expected
        # A worker that is restarted is where the first was.
        os.kill(group.pid().wait(60)[1], signal.SIGKILL)
        wait_until(lambda: answers(group) == expected, 60)


@pytest.mark.usefixtures("two_nodes")
def test_a_component_may_say_that_it_is_not_bound(shared_cluster, module):
    seen, variables = module
    strategy = PackedPlacementStrategy(0, 0)
    launched = group_of(seen.Sees).launch(shared_cluster, strategy, name="free", env_vars=variables, bind="none")
    with launched as group:
        at_import, own, thread, tasks, _ = group.cores().wait(60)[0]
        assert [at_import, own, thread, tasks] == [CORES] * 4


@pytest.mark.usefixtures("two_nodes")
def test_a_core_that_is_not_there_is_named_and_nothing_is_left(shared_cluster, module, monkeypatch):
    seen, variables = module
    monkeypatch.setattr(sys.modules[__name__], "CORES", [4000, 4001])
    with pytest.raises(WrongPlace, match=r"it runs on cores .*, and planned are 4000"):
        group_of(seen.Sees).launch(shared_cluster, PackedPlacementStrategy(0, 0), name="off", env_vars=variables)


def test_a_machine_that_says_nothing_binds_nothing(shared_cluster, module):
    seen, variables = module
    with group_of(seen.Sees).launch(
        shared_cluster, PackedPlacementStrategy(0, 0), name="b", env_vars=variables
    ) as group:
        assert group.cores().wait(60)[0][1] == CORES


def answers(group):
    try:
        return group.cores().wait(60)
    except WorkerDied:
        return None
