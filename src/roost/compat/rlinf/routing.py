"""How RLinf splits a batch over the ranks of another group, and sends it through a channel or directly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from roost.deadline import Deadline
from roost.errors import ConfigError
from roost.runtime.groups.group import WorkerGroup

Parts = list[tuple[int, int]]
"""Ranks of the other group, each with how many rows it exchanges."""


class Routed:
    """The handle of a batch on its way: all of its parts."""

    def __init__(self, handles: Sequence[Any], merge: Callable[[list[Any]], Any]) -> None:
        self._handles, self._merge = handles, merge

    def done(self) -> bool:
        """Whether all parts are there."""
        return all(handle.done() for handle in self._handles)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for all parts, and return the batch."""
        deadline = Deadline.after(timeout)
        return self._merge([handle.wait(deadline.timeout) for handle in self._handles])

    async def async_wait(self) -> Any:
        """Do the same in a coroutine."""
        return self._merge([await handle.async_wait() for handle in self._handles])


class RoutingWorker:
    """What a worker exchanges with all ranks of another group that have a part of its batch."""

    _roost_is_base = True

    def send_to(
        self: Any,
        group_name: str,
        channel: Any,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        options: Any = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> Routed | None:
        """Send this rank's rows; `batch_size` is how many all ranks of the group have together."""
        _check_mode(decoupled_mode, send_queue_size, channel, enable_p2p)
        size = infer_batch_size(data) * self.world_size if batch_size is None else batch_size
        others = get_group_world_size(None, group_name)
        ways = CommMapper.get_dst_ranks(size, self.world_size, others, self.rank)
        tag = tag if mode is None else f"{mode}_{tag}"
        works = []
        for (rank, _), part in zip(ways, (split_fn or split_batch)(data, [rows for _, rows in ways]), strict=True):
            if enable_p2p:
                works.append(self.send(part, group_name, rank, async_op, options))
            else:
                key = build_send_key(self.group_name, group_name, self.rank, rank, tag, route_key)
                works.append(channel.put(part, key=key, async_op=async_op))
        return Routed(works, lambda _: None) if async_op else None

    def recv_from(
        self: Any,
        group_name: str,
        channel: Any,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: Any = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any:
        """Receive this rank's rows of a batch that has `batch_size` rows in all."""
        _check_mode(decoupled_mode, recv_queue_size, channel, enable_p2p)
        others = get_group_world_size(None, group_name)
        ways = CommMapper.get_src_ranks(batch_size, others, self.world_size, self.rank)
        works = []
        for rank, _ in ways:
            if enable_p2p:
                works.append(self.recv(group_name, rank, True, options))
            else:
                key = build_send_key(group_name, self.group_name, rank, self.rank, tag, route_key)
                works.append(channel.get(key=key, async_op=True))

        def merge(parts: list[Any]) -> Any:
            for part, (rank, rows) in zip(parts, ways, strict=True):
                if (found := get_batch_size(part, infer_batch_size_fn)) != rows:
                    raise ConfigError(f"{group_name}:{rank} sent {found} rows, and {rows} were expected")
            return (merge_fn or merge_batches)(parts)

        routed = Routed(works, merge)
        return routed if async_op else routed.wait()


def _check_mode(decoupled_mode: bool, queue_size: int, channel: Any, enable_p2p: bool) -> None:
    if decoupled_mode or queue_size:
        hint = "leave out runner.enable_decoupled_mode, so that each rank knows whom its rows go to"
        raise ConfigError("Roost has no decoupled mode of send_to and recv_from", hint=hint)
    if channel is None and not enable_p2p:
        raise ConfigError("there is no channel", hint="give one, or enable_p2p=True")


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
