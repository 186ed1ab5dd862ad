"""What a caller of `Cluster(…)` asks for: read and checked before anything is done."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from roost.config.job import ClusterConfig, read_cluster_section
from roost.config.node_groups import MAX_NODES, NodeGroup
from roost.errors import ConfigError
from roost.machine.ports import check_port_range

TIMEOUT_SECONDS = 180.0


class Wish:
    """What a caller of `Cluster(…)` asks for, checked."""

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | None = None,
        *,
        address: str | None = None,
        namespace: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        port_range: tuple[int, int] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        quiet: bool | None = None,
        record: bool = True,
    ) -> None:
        self.run_dir = run_dir
        self.quiet = quiet
        if not isinstance(record, bool):
            raise ConfigError(f"record is {record!r}: it is True or False")
        self.record = record
        self.config: ClusterConfig | None = None if cluster_cfg is None else read_cluster_section(cluster_cfg)
        self.num_nodes: int | None = _check_num_nodes(num_nodes, self.config)
        self.groups: tuple[NodeGroup, ...] = self.config.node_groups if self.config else ()
        self.address = address
        self.namespace = namespace
        if not isinstance(timeout, int | float) or not (timeout > 0 and math.isfinite(timeout)):
            raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds above 0")
        self.timeout: float = float(timeout)
        self.port_range: tuple[int, int] | None = check_port_range(port_range)

    @property
    def attaches(self) -> bool:
        """Whether the caller wants a job that is there, and not one of its own."""
        return self.num_nodes is None and self.config is None


def _check_num_nodes(num_nodes: int | None, config: ClusterConfig | None) -> int | None:
    if num_nodes is not None and (type(num_nodes) is not int or not 1 <= num_nodes <= MAX_NODES):
        raise ConfigError(f"num_nodes is {num_nodes!r}: it is a whole number, at least 1")
    configured = config.num_nodes if config else None
    if num_nodes is not None and configured is not None and num_nodes != configured:
        raise ConfigError(f"num_nodes is {num_nodes}, and cluster_cfg says {configured}", hint="give it in one place")
    return num_nodes if num_nodes is not None else configured
