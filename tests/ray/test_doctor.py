"""roost doctor on real clusters: a healthy one, one with a leftover, a node that dies while it is looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import ray
from ray.util import list_named_actors

from roost import Cluster
from roost.testing import LocalCluster, local_cluster
from waiting import wait_until


class Simulator:
    """Starts a process that detaches itself."""

    def start(self) -> int:
        command = "setsid sleep 300 >/dev/null 2>&1 & echo $!"
        return int(subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout)  # noqa: S602


def doctor(local: LocalCluster, *words: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "roost", "doctor", "--format", "json", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | local.environment,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == (1 if answer["problems"] else 0), done.stderr
    assert answer["address"] == local.address, answer["cluster"]
    return answer, done


def test_a_healthy_cluster_has_no_problem_and_what_a_job_left_is_found(roost_local_cluster, tmp_path):
    with Cluster(num_nodes=4) as cluster:
        simulator = cluster.allocate(Simulator, "simulator", node_id=2, gpu_id=None)
        pid = ray.get(simulator.start.remote(), timeout=60)
        try:
            actors = list_named_actors(all_namespaces=True)
            answer, _ = doctor(roost_local_cluster, "--run-dir", str(tmp_path))
            found = {item["check"]: item for item in answer["cluster"]}
            assert {item["level"] for item in answer["cluster"]} <= {"ok", "note"}, answer["cluster"]
            assert found["nodes"]["seen"] == "4 nodes, 12 GPU; all answer"
            assert found["clock"]["seen"].endswith("on 4 nodes")
            assert found["run folder"]["seen"] == f"{tmp_path}: all nodes are on this machine"
            assert found["jobs"]["seen"] == f"{cluster.namespace!r}"
            assert found["leftovers"]["level"] == "ok", "its job is alive"
            assert list_named_actors(all_namespaces=True) == actors, "nothing was added, nothing ended"
            assert list(tmp_path.iterdir()) == []
            cluster.close()
            answer, _ = doctor(roost_local_cluster)
        finally:
            os.kill(pid, signal.SIGKILL)
    left = [item for item in answer["cluster"] if item["check"] == "leftovers"]
    assert [item["level"] for item in left] == ["warning"]
    assert f"pid {pid}, sleep 300" in left[0]["seen"]
    assert left[0]["do"] == f"kill {pid}, there"


def test_a_node_that_dies_while_it_is_looked_at_is_named():
    with local_cluster("2x1") as local:
        # It is still registered and will never answer: that is how a dying machine looks.
        os.kill(local.pids[1][0], signal.SIGSTOP)
        answers: list[dict[str, Any]] = []
        looking = threading.Thread(target=lambda: answers.append(doctor(local, "--timeout", "60")[0]))
        looking.start()
        # The head has a worker once it is asked.
        wait_until(lambda: _has_worker(local), "the nodes are being looked at")
        local.kill_node(1)
        looking.join()
    found = [item for item in answers[0]["cluster"] if item["level"] == "problem"]
    assert len(found) == 1, answers[0]["cluster"]
    assert found[0]["check"] == "nodes"
    assert "(local-1)" in found[0]["nodes"][0]
    assert "is gone" in found[0]["seen"]
    assert {item["check"] for item in answers[0]["cluster"]} > {"clock", "versions"}, "the other node is looked at"


def _has_worker(local: LocalCluster) -> bool:
    import psutil

    names = [child.name() for child in psutil.Process(local.pids[0][-1]).children()]
    return any(name.startswith("ray::") for name in names)
