"""Fixtures for pytest: `pytest_plugins = ["roost.testing.plugin"]` in the top conftest.py.

- `roost_local_cluster`: one local cluster for the whole run, as the ini option `roost_cluster` describes it.
- `roost_cluster`: a `Cluster` on it for one test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roost.testing.local import LocalCluster, local_cluster, local_nodes

if TYPE_CHECKING:
    from roost.runtime.cluster import Cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one setting of these fixtures."""
    parser.addini("roost_cluster", "the nodes of the local cluster, such as 2x4,1x0", default="2x4")


@pytest.fixture(scope="session")
def roost_local_cluster(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """A local Ray cluster for the whole run; `RAY_ADDRESS` leads to it."""
    # Workers must import what the tests import through pytest's `pythonpath`, wherever pytest was started.
    paths = [*map(str, pytestconfig.getini("pythonpath")), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}
    nodes = [replace(node, env=env) for node in local_nodes(pytestconfig.getini("roost_cluster"))]
    with local_cluster(nodes) as local:
        yield local


@pytest.fixture
def roost_cluster(roost_local_cluster: LocalCluster) -> Iterator[Cluster]:
    """A `Cluster` over all nodes of the local cluster, closed after the test."""
    from roost.runtime.cluster import Cluster

    with Cluster(num_nodes=len(roost_local_cluster.nodes)) as cluster:
        yield cluster
