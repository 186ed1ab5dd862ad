"""Tools for testing code that uses Roost: a real multi-node Ray cluster on one machine, with fake accelerators.

from roost.testing import local_cluster

with local_cluster("2x8,1x0"):
    cluster = Cluster(num_nodes=3)
"""

from __future__ import annotations

from roost.testing.alone import as_worker
from roost.testing.local import LocalCluster, LocalNode, local_cluster

__all__ = ["LocalCluster", "LocalNode", "as_worker", "local_cluster"]
