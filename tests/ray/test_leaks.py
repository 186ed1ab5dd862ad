"""Ten launches and closes leave nothing behind: no actor, process, port, file descriptor, thread."""

from __future__ import annotations

import threading

import psutil
from ray.util import list_named_actors

from roost import NodeManager, PackedPlacementStrategy
from roost.testing import LocalCluster
from waiting import is_gone, wait_until
from workers import Blind


def test_ten_launches_and_closes_leave_nothing_behind(shared_cluster, roost_local_cluster):
    manager = NodeManager.get_proxy()

    def launch(number: int) -> list[int]:
        strategy = PackedPlacementStrategy(3, 4)
        with Blind.create_group().launch(shared_cluster, strategy, name=f"blind{number % 2}", restarts=1) as group:
            group.view().wait(60)
            return [record.pid for record in shared_cluster.worker_manager.get_workers() if record.group == group.name]

    # What is opened once for the whole job is open after the first.
    launch(0)
    names, ports = set(list_named_actors()), manager.count_leased_ports()
    files, threads = psutil.Process().num_fds(), threading.active_count()
    before = _workers(roost_local_cluster)
    pids = [pid for number in range(10) for pid in launch(number)]
    assert set(list_named_actors()) == names
    assert manager.count_leased_ports() == ports
    wait_until(lambda: all(is_gone(pid) for pid in pids), "the workers' processes are gone")
    wait_until(lambda: not _workers(roost_local_cluster) - before, "no other process is there than before")
    wait_until(lambda: threading.active_count() <= threads, "no thread is left")
    # Ray keeps sockets to the nodes that it talks to; a leak would be one for each launch at least.
    wait_until(lambda: psutil.Process().num_fds() < files + 10, "no descriptor is left")


def _workers(local: LocalCluster) -> set[int]:
    """The worker processes of all nodes that serve an actor."""
    found = set()
    for process in psutil.Process(local.keeper_pid).children(recursive=True):
        try:
            if (
                process.cmdline()[:1]
                and process.cmdline()[0].startswith("ray::")
                and "IDLE" not in process.cmdline()[0]
            ):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found
