"""What the callers of `Cluster(…)` and of `roost run` ask for, checked before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from roost.config.job import ClusterConfig, read_cluster_section
from roost.config.node_groups import MAX_NODES, NodeGroup
from roost.errors import ConfigError
from roost.machine.ports import check_port_range
from roost.placement.planner import PlacementKind

TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The arguments of `Cluster(…)`, checked."""

    num_nodes: int | None
    groups: tuple[NodeGroup, ...]
    attaches: bool
    """Whether the caller joins a job that is running instead of starting one."""
    timeout: float
    port_range: tuple[int, int] | None
    record: bool | None
    """Whether to keep a record; None if the caller does not say, which means yes for a new job."""
    address: str | None = None
    namespace: str | None = None
    run_dir: str | os.PathLike[str] | None = None
    quiet: bool | None = None

    @classmethod
    def check(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | ClusterConfig | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        port_range: tuple[int, int] | None = None,
        record: bool | None = None,
        **others: Any,
    ) -> ClusterOptions:
        """Check the arguments of `Cluster(…)`; ConfigError if one is wrong."""
        if not isinstance(record, bool | None):
            raise ConfigError(f"record is {record!r}: it is True or False")
        if cluster_cfg is None or isinstance(cluster_cfg, ClusterConfig):
            config = cluster_cfg
        else:
            config = read_cluster_section(cluster_cfg)
        if num_nodes is not None and (type(num_nodes) is not int or not 1 <= num_nodes <= MAX_NODES):
            raise ConfigError(f"num_nodes is {num_nodes!r}: it is a whole number, at least 1")
        if config is not None and config.num_nodes is not None:
            if num_nodes not in (None, config.num_nodes):
                message = f"num_nodes is {num_nodes}, and cluster_cfg says {config.num_nodes}"
                raise ConfigError(message, hint="give it in one place")
            num_nodes = config.num_nodes
        if not isinstance(timeout, int | float) or not (timeout > 0 and math.isfinite(timeout)):
            raise ConfigError(f"timeout is {timeout!r}: it is a number of seconds above 0")
        return cls(
            num_nodes=num_nodes,
            groups=config.node_groups if config else (),
            attaches=num_nodes is None and config is None,
            timeout=float(timeout),
            port_range=check_port_range(port_range),
            record=record,
            **others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How `roost run` runs a job: all that its flags say."""

    placement: PlacementKind = "auto"
    isolate_accelerator: bool = True
    reserve: bool = True
    quiet: bool = False
    address: str | None = None
    run_dir: str | None = None

    def to_flags(self) -> tuple[tuple[str, str | bool], ...]:
        """Return the flags of `roost run` that ask for this, as the run's record keeps them, without defaults.

        >>> RunOptions(placement="hybrid", reserve=False).to_flags()
        (('--placement', 'hybrid'), ('--no-reserve', True))
        """
        flags: dict[str, str | bool | None] = {
            "--placement": self.placement if self.placement != "auto" else None,
            "--no-isolate": not self.isolate_accelerator,
            "--no-reserve": not self.reserve,
            "--quiet": self.quiet,
            "--address": self.address,
            "--run-dir": self.run_dir,
        }
        return tuple((name, value) for name, value in flags.items() if value)

    @classmethod
    def from_flags(cls, flags: Iterable[tuple[str, str | bool]]) -> RunOptions:
        """Read the flags of a run's record."""
        given = dict(flags)
        texts = {name: value for name, value in given.items() if isinstance(value, str)}
        return cls(
            placement=cast(PlacementKind, texts.get("--placement", "auto")),  # make_plan checks it
            isolate_accelerator="--no-isolate" not in given,
            reserve="--no-reserve" not in given,
            quiet="--quiet" in given,
            address=texts.get("--address"),
            run_dir=texts.get("--run-dir"),
        )
