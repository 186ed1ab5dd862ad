"""For tests of code that uses Roost: a multi-node Ray cluster on one machine with fake accelerators, and a toy engine.

from roost.testing import local_cluster

with local_cluster("2x8,1x0"):
    cluster = Cluster(num_nodes=3)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roost.testing.alone import as_worker
from roost.testing.local import LocalCluster, LocalNode, local_cluster

if TYPE_CHECKING:
    from roost.testing.numpy_engine import NumpyEngine, TinyPolicy

__all__ = ["LocalCluster", "LocalNode", "NumpyEngine", "TinyPolicy", "as_worker", "local_cluster"]


def __getattr__(name: str) -> Any:
    # Only on first use: they need numpy and aiohttp.
    if name in ("NumpyEngine", "TinyPolicy"):
        return getattr(import_module("roost.testing.numpy_engine"), name)
    raise AttributeError(f"module 'roost.testing' has no attribute {name!r}")
