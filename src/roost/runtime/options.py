"""The options of `Cluster(…)` and of `roost run`, checked before anything starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.job import ClusterConfig, read_cluster_section
from roost.config.node_groups import MAX_NODES, NodeGroup
from roost.errors import ConfigError
from roost.machine.ports import check_port_range
from roost.placement.planner import PlacementKind
from roost.runtime.limits import RESERVE_SECONDS as RESERVE_SECONDS
from roost.runtime.limits import TIMEOUT_SECONDS
from roost.text import shorten

_FLAGS = {
    "placement": "--placement",
    "isolate_accelerator": "--no-isolate",
    "reserve": "--no-reserve",
    "quiet": "--quiet",
    "address": "--address",
    "run_dir": "--run-dir",
    "local": "--local",
    "name": "--name",
    "note": "--note",
    "wait": "--wait",
}
"""The flag of `roost run` for each of the options; a flag without a value says the opposite of the default."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
    working_dir: str | None = None
    """The folder that Ray copies to every node, in full."""
    preload: tuple[str, ...] = ()

    @classmethod
    def check(
        cls,
        num_nodes: int | None = None,
        cluster_cfg: Mapping[str, Any] | ClusterConfig | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        port_range: tuple[int, int] | None = None,
        record: bool | None = None,
        working_dir: str | os.PathLike[str] | None = None,
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
        folder = working_dir or (config.working_dir if config else None)
        if folder is not None and not os.path.isdir(folder):
            raise ConfigError(f"working_dir is {os.fspath(folder)!r}, which is not a folder here")
        return cls(
            num_nodes=num_nodes,
            groups=config.node_groups if config else (),
            preload=config.preload if config else (),
            attaches=num_nodes is None and config is None,
            timeout=float(timeout),
            port_range=check_port_range(port_range),
            record=record,
            working_dir=None if folder is None else os.path.abspath(folder),
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
    local: str | None = None
    """The local cluster to start for the run, in shorthand."""
    name: str | None = None
    """The name of the run's folder."""
    note: str | None = None
    """The user's note about the run."""
    wait: float = RESERVE_SECONDS
    """How many seconds to wait for accelerators that other jobs hold."""
    overrides: tuple[str, ...] = ()
    """Settings that replace settings of the file, as typed: `cluster.num_nodes=2`."""

    def to_flags(self) -> tuple[tuple[str, str | bool], ...]:
        """Return the arguments of `roost run` that ask for this, as the run's record keeps them, without defaults.

        >>> RunOptions(placement="hybrid", reserve=False).to_flags()
        (('--placement', 'hybrid'), ('--no-reserve', True))
        """
        flags: dict[str, str | bool] = dict.fromkeys(self.overrides, True)
        for name, flag in _FLAGS.items():
            value, default = getattr(self, name), getattr(RunOptions(), name)
            if value != default and value != "":
                flags[flag] = True if isinstance(default, bool) else f"{value:g}s" if name == "wait" else value
        return tuple(flags.items())

    @classmethod
    def from_flags(cls, flags: Iterable[tuple[str, str | bool]]) -> RunOptions:
        """Read the arguments of a run's record."""
        given = dict(flags)
        found: dict[str, Any] = {"overrides": tuple(name for name in given if not name.startswith("--"))}
        for name, flag in _FLAGS.items():
            value, default = given.get(flag), getattr(RunOptions(), name)
            if isinstance(default, bool) and flag in given:
                found[name] = not default
            elif isinstance(value, str):
                found[name] = read_seconds(value) if name == "wait" else value
        return cls(**found)


def read_seconds(text: str) -> float:
    """Read a time such as `90`, `30m`, `2h` or `1.5d`, in seconds.

    >>> read_seconds("2h"), read_seconds("90")
    (7200.0, 90.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"{shorten(repr(text))} is not a time", hint="write seconds, or 45s, 30m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]
