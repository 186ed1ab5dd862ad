"""`local_cluster`: real nodes that start quickly, stay apart from other clusters, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
import ray

from roost import Cluster, ClusterError, ConfigError, NodePlacementStrategy, WorkerDied
from roost.machine.folders import socket_folder
from roost.testing import LocalCluster, LocalNode, local, local_cluster
from waiting import is_gone, wait_until
from workers import Performer


@pytest.fixture(autouse=True)
def _own_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keepers of these clusters are no forks."""
    monkeypatch.setattr(local, "subprocess", subprocess)


def processes_of(local: LocalCluster) -> list[psutil.Process]:
    """The cluster's keeper and all its descendants."""
    keeper = psutil.Process(local.keeper_pid)
    return [keeper, *keeper.children(recursive=True)]


def test_a_cluster_is_what_it_was_described_as_and_an_exception_in_the_block_leaves_nothing(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:1")
    # Ray sets this one when a process first connects, and leaves it.
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
    before = dict(os.environ)
    size = 80 * 2**20
    local = local_cluster("2x2:H100,1x0", cpus=3, object_store_memory=size)
    started: list[psutil.Process] = []

    def use() -> None:
        with local:
            assert local.folder.is_dir()
            assert os.environ["RAY_ADDRESS"] == local.address
            with Cluster(num_nodes=3) as cluster:
                assert len({node.address for node in cluster.nodes}) == 3
                assert all(node.address.startswith("127.") for node in cluster.nodes)
                assert [node.num_accelerators for node in cluster.nodes] == [2, 2, 0]
                assert [node.cpus for node in cluster.nodes] == [3, 3, 3]
                assert cluster.nodes[0].accelerators[0].model == "H100"
            ray.init(log_to_driver=False)
            assert {node["Resources"]["object_store_memory"] for node in ray.nodes()} == {size}
            assert local.add_node(LocalNode(accelerators=2, name="late")) == 3
            wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 4, "the fourth node is there")
            local.kill_node(3)
            wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, "Ray noticed that it is gone")
            with pytest.raises(ConfigError, match="no node 3"):
                local.kill_node(3)
            started.extend(processes_of(local))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert len(started) >= 5
    assert all(is_gone(process.pid) for process in started)
    assert not local.folder.exists()
    assert not ray.is_initialized()
    assert dict(os.environ) == before


def test_when_the_owner_is_killed_the_cluster_goes_too():
    code = (
        "import sys, time\nfrom roost.testing import local_cluster\nimport psutil\n"
        "local = local_cluster('2x1')\nlocal.start()\n"
        "keeper = psutil.Process(local.keeper_pid)\n"
        "print(*[p.pid for p in [keeper, *keeper.children(recursive=True)]], local.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with owner:
        *pids, folder = owner.stdout.readline().split()
        owner.kill()
    assert len(pids) >= 4
    wait_until(lambda: all(is_gone(int(pid)) for pid in pids), "the cluster of a killed owner is gone")
    wait_until(lambda: not os.path.exists(folder), "its folder too")


def test_when_the_keeper_is_killed_the_nodes_go_too():
    with local_cluster("1x1") as local:
        started = processes_of(local)
        os.kill(local.keeper_pid, signal.SIGKILL)
        wait_until(lambda: all(is_gone(process.pid) for process in started), "the nodes of a killed keeper are gone")
        with pytest.raises(ClusterError, match="keeps the local cluster is gone"):
            local.add_node(LocalNode())
    assert not local.folder.exists()


def test_the_plain_way_gives_the_same_cluster_and_two_at_the_same_time_stay_apart(small_local_cluster):
    # `ray start` starts a worker for every CPU.
    nodes = [LocalNode(accelerators=2, model="A100", cpus=1), LocalNode(labels={"zone": "b"}, cpus=1)]
    with local_cluster(nodes, fast=False) as local:
        assert local.note == ""
        assert local.address != small_local_cluster.address
        assert local.folder.parent == small_local_cluster.folder.parent == socket_folder()
        with Cluster(num_nodes=2) as cluster:
            assert cluster.address == local.address
            assert [node.num_accelerators for node in cluster.nodes] == [2, 0]
            assert cluster.nodes[1].labels == (("zone", "b"),)
            assert cluster.nodes[1].name == "local-1"
            started = processes_of(local)
        local.kill_node(1)
        with Cluster(num_nodes=1, address=small_local_cluster.address) as cluster:
            assert cluster.num_accelerators == 1
    assert all(is_gone(process.pid) for process in started)


@pytest.mark.usefixtures("small_cluster")
def test_a_runtime_env_works_on_a_local_cluster():
    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"ROOST_TEST": "yes"}})
    def look() -> str | None:
        return os.environ.get("ROOST_TEST")

    assert ray.get(look.remote(), timeout=60) == "yes"


def test_the_workers_of_a_job_on_a_node_are_forks_of_one_process_that_ends_with_them(small_cluster):
    parents = set()
    for name in ("first", "second"):
        with Performer.create_group().launch(small_cluster, NodePlacementStrategy([0, 0]), name=name) as group:
            pids = group.pid().wait(60)
            assert len({os.getpgid(pid) for pid in pids}) == 2, "Ray kills a worker's whole process group with it"
            parents |= {psutil.Process(pid).ppid() for pid in pids}
            with pytest.raises(WorkerDied):
                group.end(1, "kill").wait(60)
            assert group[0].rank_of().wait(60) == [0], "the other one lives on"
    (server,) = parents
    assert "--serve" in psutil.Process(server).cmdline()
    small_cluster.close()
    wait_until(lambda: is_gone(server), "it ends after its last worker")


def test_workers_share_the_import_of_what_is_preloaded_and_the_log_says_what_is_left_out(small_local_cluster):
    small_local_cluster.preload("sqlite3", "no_such_module", "workers")
    with Cluster(num_nodes=1) as cluster:
        with Performer.create_group().launch(cluster, NodePlacementStrategy([0]), name="warm") as group:
            assert group.has_loaded("sqlite3", "no_such_module").wait(60) == [["sqlite3"]]
            assert "--serve" in psutil.Process(psutil.Process(group.pid().wait(60)[0]).ppid()).cmdline()
        small_local_cluster.preload()
        with Performer.create_group().launch(cluster, NodePlacementStrategy([0]), name="plain") as group:
            assert group.has_loaded("sqlite3").wait(60) == [[]]
    (log,) = small_local_cluster.folder.glob("session_2*/logs/raylet.err")
    said = log.read_text(encoding="utf-8")
    assert "roost: no_such_module is not preloaded: ModuleNotFoundError" in said
    assert "roost: workers is not preloaded: it is not an installed package" in said


@pytest.mark.wants("torch")
def test_workers_that_share_an_import_draw_other_random_numbers(small_cluster):
    pytest.importorskip("torch")
    with Performer.create_group().launch(small_cluster, NodePlacementStrategy([0, 0]), name="pair") as group:
        assert len({*group.torch_seed().wait(60)}) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_start_although_what_forks_them_was_ended(small_cluster, number):
    with Performer.create_group().launch(small_cluster, NodePlacementStrategy([0]), name="first") as group:
        server = psutil.Process(psutil.Process(group.pid().wait(60)[0]).ppid())
        for process in (server, server.parent()):
            assert "--serve" in process.cmdline()
            process.send_signal(number)
        wait_until(lambda: is_gone(server.pid), "it is ended")
        with Performer.create_group().launch(small_cluster, NodePlacementStrategy([0, 0]), name="second") as later:
            assert later.rank_of().wait(60) == [0, 1]


def test_a_cluster_that_starts_its_workers_from_scratch_forks_none():
    with local_cluster("1x0", warm=False, preload=["sqlite3"]) as local, Cluster(num_nodes=1) as cluster:
        with Performer.create_group().launch(cluster, NodePlacementStrategy([0]), name="cold") as group:
            assert "--serve" not in psutil.Process(psutil.Process(group.pid().wait(60)[0]).ppid()).cmdline()
            assert group.has_loaded("sqlite3").wait(60) == [[]]
        local.preload("json")


def test_a_driver_that_outlives_its_cluster_ends_with_its_own_exit_code(driver, small_local_cluster):
    code = (
        "import ctypes, sys\n"
        "from roost import Cluster\n"
        "from roost.testing import local_cluster\n"
        "# As the destructors of C++ now and then, while a thread of Ray's looks for the head that is gone.\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)\n"
        "with local_cluster('1x0'), Cluster(num_nodes=1, quiet=True, record=False):\n"
        "    pass\n"
        "sys.exit(3)\n"
    )
    mine = driver(code, small_local_cluster)
    mine.finish()
    assert mine.process.returncode == 3


@pytest.mark.parametrize("wrong", ["torch", ["to rch"], [1], ["a..b"], ["../x"]])
def test_wrong_names_of_modules_are_refused(wrong):
    with pytest.raises(ConfigError, match="preload is"):
        local_cluster("1x0", preload=wrong)


def test_ray_does_not_remark_on_the_number_of_processes_of_a_node(driver, small_local_cluster):
    code = (
        "from roost import Cluster, NodePlacementStrategy\n"
        "from workers import Performer\n"
        "with Cluster(num_nodes=1, quiet=True, record=False) as cluster:\n"
        "    group = Performer.create_group().launch(cluster, NodePlacementStrategy([0] * 8), name='many')\n"
        "    print(len(group.pid().wait(60)))\n"
    )
    out, errors = driver(code, small_local_cluster).finish()
    assert out.splitlines() == ["8"], errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [("0x8", "has no node"), ("2by8", "not nodes x accelerators"), ("251x1", "1 to 250"), ([], "1 to 250")],
)
def test_a_wrong_description_starts_nothing(spec, message):
    with pytest.raises(ConfigError, match=message):
        local_cluster(spec)


def test_an_object_store_that_is_too_small_for_ray_starts_nothing():
    with pytest.raises(ConfigError, match=r"object_store_memory=1000\n.*at least 78,643,200"):
        local_cluster("2x0", object_store_memory=1000)


def test_a_node_that_cannot_start_is_reported_and_nothing_is_left():
    local = local_cluster([LocalNode(resources={"GPU": 1})])
    with pytest.raises(ClusterError, match="node 0"):
        local.start()
    assert not local.folder.exists()


def test_the_fixtures_serve_another_project(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nroost_cluster = 2x3\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["roost.testing.plugin"]\n')
    (tmp_path / "test_it.py").write_text(
        "def test_nodes(roost_cluster):\n    assert roost_cluster.num_accelerators == 6\n"
        "def test_own_namespace(roost_cluster, roost_local_cluster):\n"
        "    assert roost_cluster.address == roost_local_cluster.address\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
