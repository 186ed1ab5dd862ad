"""The job of Roost in a program that knows nothing of one."""

from __future__ import annotations

import ray

from roost.errors import ClusterError
from roost.runtime.cluster import Cluster
from roost.runtime.nodes.discover import live_nodes


def own_job() -> Cluster:
    """Return the job of this process, or make one on all nodes of its Ray, which the frameworks take too."""
    if not ray.is_initialized():
        ray.init()
    try:
        return Cluster()
    except ClusterError:
        return Cluster(num_nodes=len(live_nodes()))
