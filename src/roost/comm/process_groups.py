"""Process groups of torch: how one is made."""

from __future__ import annotations

import datetime
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from roost.comm.options import CollectiveGroupOptions


def new_group(
    backend: str,
    store: Any,
    rank: int,
    size: int,
    label: str,
    options: CollectiveGroupOptions | None,
    limit: datetime.timedelta | None = None,
) -> Any:
    """Make a process group that torch's own functions take.

    torch's public functions make one world for each process, and groups in it. Workers are in several that have nothing
    to do with each other, for which torch has only the function behind the public ones; it is used by others as well.
    """
    inner: Any = importlib.import_module("torch.distributed.distributed_c10d")
    make: Callable[..., Any] = inner._new_process_group_helper
    known = inspect.signature(make).parameters
    given: dict[str, Any] = {"group_name": label, "timeout": limit or inner.default_pg_timeout}
    if backend == "nccl":
        key = "backend_options" if "backend_options" in known else "pg_options"
        given[key] = _nccl_options(options)
    made, _ = make(size, rank, [], inner.Backend(backend), inner.PrefixStore(label, store), **given)
    inner._world.pg_group_ranks[made] = dict(zip(range(size), itertools.count(), strict=False))
    return made


def _nccl_options(options: CollectiveGroupOptions | None) -> Any:
    chosen = options or CollectiveGroupOptions()
    distributed = importlib.import_module("torch.distributed")
    made = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=chosen.is_high_priority_stream)
    for ours, theirs in (("max_ctas", chosen.accel_max_ctas), ("min_ctas", chosen.accel_min_ctas)):
        if theirs is not None:
            setattr(made.config, ours, theirs)
    if chosen.accel_cluster_size is not None:
        made.config.cga_cluster_size = chosen.accel_cluster_size
    return made
