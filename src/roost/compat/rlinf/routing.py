"""How RLinf splits a batch over the ranks of another group."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from roost.errors import ConfigError
from roost.runtime.groups.group import WorkerGroup

Parts = list[tuple[int, int]]
"""Ranks of the other group, each with how many rows it exchanges."""


def build_channel_message(send_rank: int, batch_idx: int, mode: str, tag: str) -> str:
    """Name a batch by where it comes from.

    >>> split_channel_message(build_channel_message(1, 2, "train", "obs_1"))
    (1, 2, 'train', 'obs_1')
    """
    return f"{send_rank}_{batch_idx}_{mode}_{tag}"


def split_channel_message(channel_message: str) -> tuple[int, int, str, str]:
    """Return the parts of such a name."""
    rank, index, mode, tag = channel_message.split("_", 3)
    return int(rank), int(index), mode, tag


class CommMapper:
    """Which ranks of two groups exchange which part of a batch."""

    @staticmethod
    def build_channel_key(src_rank: int, dst_rank: int, extra: str) -> str:
        """Name the way from one rank to another."""
        return f"{src_rank}_{dst_rank}_{extra}"

    @staticmethod
    def get_dst_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int
    ) -> list[tuple[int, int]]:
        """Return the ranks that get something from a source, and how much.

        >>> CommMapper.get_dst_ranks(12, 2, 3, 0)
        [(0, 4), (1, 2)]
        """
        return _overlaps(batch_size, src_world_size, dst_world_size, src_rank)

    @staticmethod
    def get_src_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int
    ) -> list[tuple[int, int]]:
        """Return the ranks from which a destination gets something, and how much."""
        return _overlaps(batch_size, dst_world_size, src_world_size, dst_rank)


def _overlaps(size: int, own_ranks: int, other_ranks: int, rank: int) -> Parts:
    for ranks in (own_ranks, other_ranks):
        if size % ranks:
            raise ConfigError(f"a batch of {size} cannot be divided evenly among {ranks} ranks")
    if not 0 <= rank < own_ranks:
        raise ConfigError(f"there is no rank {rank}: the group has {own_ranks}")
    own, other = size // own_ranks, size // other_ranks
    first, end = rank * own, (rank + 1) * own
    return [
        (peer, min(end, (peer + 1) * other) - max(first, peer * other))
        for peer in range(first // other, (end - 1) // other + 1)
    ]


def build_route_channel_key(
    src_group_name: str, dst_group_name: str, src_rank: int, dst_rank: int, tag: str | None, route_key: Any = None
) -> tuple[Any, ...]:
    """Return the key under which a part of a batch is in a channel."""
    name = "" if route_key is None else route_key if isinstance(route_key, str) else repr(route_key)
    return ("scheduler_route", src_group_name, dst_group_name, tag or "default", name, src_rank, dst_rank)


build_send_key = build_route_channel_key


def get_group_world_size(manager_proxy: Any, group_name: str) -> int:
    """Return how many workers a group has."""
    del manager_proxy
    return WorkerGroup.attach(group_name).world_size


def infer_batch_size(data: Any) -> int:
    """Return how many rows a batch has.

    >>> infer_batch_size({"mask": None, "rows": [1, 2, 3]})
    3
    """
    if isinstance(data, dict):
        return infer_batch_size(next((value for value in data.values() if value is not None), None))
    if not isinstance(data, list) and not getattr(data, "shape", ()):
        raise ConfigError(f"a batch is a list, an array, a tensor or a dict of them, not {type(data).__name__}")
    return len(data)


def get_batch_size(data: Any, infer_batch_size_fn: Callable[[Any], int] | None = None) -> int:
    """Return how many rows a batch has, as a function says or as it looks."""
    return (infer_batch_size_fn or infer_batch_size)(data)


def split_batch(data: Any, split_sizes: Sequence[int]) -> list[Any]:
    """Split a batch into parts of these sizes.

    >>> split_batch({"rows": [1, 2, 3], "step": 7}, [1, 2])
    [{'rows': [1], 'step': 7}, {'rows': [2, 3], 'step': 7}]
    """
    if data is None or isinstance(data, bool | int | float | str):
        return [data for _ in split_sizes]
    if isinstance(data, dict):
        columns = {key: split_batch(value, split_sizes) for key, value in data.items()}
        return [{key: parts[index] for key, parts in columns.items()} for index in range(len(split_sizes))]
    infer_batch_size(data)
    ends = [sum(split_sizes[: index + 1]) for index in range(len(split_sizes))]
    return [data[end - size : end] for end, size in zip(ends, split_sizes, strict=True)]


def merge_batches(batches: Sequence[Any]) -> Any:
    """Join parts into one batch.

    >>> merge_batches([{"rows": [1], "step": 7}, {"rows": [2, 3], "step": 7}])
    {'rows': [1, 2, 3], 'step': 7}
    """
    if not batches:
        raise ConfigError("there are no parts to join")
    first = batches[0]
    if len(batches) == 1 or all(part is None for part in batches):
        return first
    if isinstance(first, dict):
        return {key: merge_batches([part[key] for part in batches]) for key in first}
    if isinstance(first, list):
        return [row for part in batches for row in part]
    if getattr(first, "shape", ()):
        # numpy, or torch.
        return importlib.import_module(type(first).__module__.partition(".")[0]).concatenate(list(batches))
    if all(part == first for part in batches):
        return first
    raise ConfigError(f"parts of {type(first).__name__} differ, and cannot be joined")
