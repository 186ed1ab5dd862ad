"""roost doctor on real clusters: a healthy one, one with a leftover, one with a node that dies during the check."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import psutil
from ray.util import list_named_actors

import warm
from roost.runtime.managers.job_info import JOB_VARIABLE
from roost.testing import LocalCluster, local_cluster
from waiting import stop, wait_until


@contextlib.contextmanager
def marked(job: str) -> Iterator[int]:
    """Start a process as a worker of that job would."""
    with subprocess.Popen(["sleep", "300"], env=os.environ | {JOB_VARIABLE: job}) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def doctor(local: LocalCluster, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        ["roost", "doctor", "--format", "json", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=warm.environment() | local.environment,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if answer["problems"] else 0), done.stderr
    assert answer["address"] == local.address, answer["cluster"]
    return answer


def test_a_healthy_cluster_has_no_problem_and_leftovers_of_an_earlier_job_are_found(
    roost_cluster, roost_local_cluster, tmp_path
):
    address = roost_local_cluster.address
    # The marks that workers put on the processes they start: one of the living job, one of a job that has ended.
    mine, ended = (f"{job}/env:0" for job in (roost_cluster.job.id, f"{address}|roost:{socket.gethostname()}:1:1"))
    with marked(mine) as own, marked(ended) as left:
        actors = list_named_actors(all_namespaces=True)
        answer = doctor(roost_local_cluster, "--run-dir", str(tmp_path))
        assert list_named_actors(all_namespaces=True) == actors, "the doctor neither adds nor ends an actor"
    found = {item["check"]: item for item in answer["cluster"]}
    leftovers = found.pop("leftovers")
    assert {item["level"] for item in found.values()} <= {"ok", "note"}, answer["cluster"]
    assert found["nodes"]["seen"] == "4 nodes, 12 GPU; all answer"
    assert found["clock"]["seen"].endswith("on 4 nodes")
    assert found["run folder"]["seen"] == f"{tmp_path}: all nodes are on this machine"
    assert found["jobs"]["seen"] == f"{roost_cluster.namespace!r}"
    assert leftovers["level"] == "warning"
    assert f"pid {left}, sleep 300" in leftovers["seen"]
    assert leftovers["do"] == f"kill {left}, there", f"{own} belongs to a living job"
    assert list(tmp_path.iterdir()) == []


def check_while_a_node_dies() -> list[dict[str, Any]]:
    """What the doctor says of a cluster of two nodes, one of which dies while it looks."""
    with local_cluster("2x1") as local:
        # It is still registered and will never answer, like a dying machine.
        stop(local.pids[1][0])
        answers: list[dict[str, Any]] = []
        checking = threading.Thread(target=lambda: answers.append(doctor(local, "--timeout", "60")))
        checking.start()
        # The head starts a worker for the task.
        wait_until(lambda: _has_worker(local), "the tasks run on the nodes")
        local.kill_node(1)
        checking.join()
    return answers[0]["cluster"]


def test_a_node_that_dies_during_the_check_is_named():
    answer = check_while_a_node_dies()
    if answer[0]["seen"].startswith("1 node"):
        # On a busy machine Ray gives the node up before the doctor has looked at all.
        answer = check_while_a_node_dies()
    found = [item for item in answer if item["level"] == "problem"]
    assert len(found) == 1, answer
    assert found[0]["check"] == "nodes"
    assert "(local-1)" in found[0]["nodes"][0]
    assert "is gone" in found[0]["seen"]
    assert {item["check"] for item in answer} > {"clock", "versions"}, "the other node is checked"


def _has_worker(local: LocalCluster) -> bool:
    names = [child.name() for child in psutil.Process(local.pids[0][-1]).children(recursive=True)]
    return any(name.startswith("ray::") for name in names)
