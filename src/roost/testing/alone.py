"""Workers in a plain process, as any rank of a group, without Ray or a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from roost.errors import ConfigError
from roost.runtime.process import identity
from roost.runtime.process.identity import WorkerIdentity


@contextlib.contextmanager
def as_worker(rank: int = 0, world_size: int = 1, group_name: str = "worker") -> Iterator[WorkerIdentity]:
    """Inside the block, a `Worker` that you construct is this rank of a group of that size.

    >>> from roost import Worker
    >>> with as_worker(rank=2, world_size=4, group_name="actor"):
    ...     Worker().address
    'actor:2'
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a group of {world_size}")
    before = identity.current_identity()
    mine = identity.alone(group_name, rank, world_size)
    identity.assume(mine)
    try:
        yield mine
    finally:
        identity.assume(before)
