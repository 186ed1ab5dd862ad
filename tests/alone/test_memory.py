"""A node that runs out of memory, while no other test starts clusters."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from roost import Cluster, NodePlacementStrategy, WorkerDied
from roost.testing import LocalNode, local_cluster
from workers import Performer


def test_a_worker_that_takes_too_much_memory_is_ended_by_ray_and_named(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    memory = psutil.virtual_memory()
    used = 1 - memory.available / memory.total
    watched = {"RAY_memory_usage_threshold": f"{used + 0.1:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    with local_cluster([LocalNode(), LocalNode(env=watched)]), Cluster(num_nodes=2) as cluster:
        group = Performer.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="eater")
        with pytest.raises(
            WorkerDied, match=r"eater:1 on node 1 .* died in 'eat': Ray ended it because .* out of memory"
        ):
            group.eat(1, int(0.2 * memory.total)).wait(120)
        assert group[0].rank_of().wait(60) == [0]
