"""How RLinf splits a batch over the ranks of another group, and sends it through a channel or directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from roost.comm.collectives import plan_routes
from roost.comm.rows import join_rows
from roost.deadline import Deadline
from roost.errors import ConfigError
from roost.runtime.groups.group import WorkerGroup

Parts = list[tuple[int, int]]
"""Ranks of the other group, each with how many rows it exchanges."""


class CommMapper:
    """Which ranks of two groups exchange which part of a batch."""

    @staticmethod
    def build_channel_key(src_rank: int, dst_rank: int, extra: str) -> str:
        return f"{src_rank}_{dst_rank}_{extra}"

    @staticmethod
    def get_dst_ranks(batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int) -> Parts:
        """Return who gets rows of a source, and how many.

        >>> CommMapper.get_dst_ranks(12, 2, 3, 0)
        [(0, 4), (1, 2)]
        """
        for ranks in (src_world_size, dst_world_size):
            if batch_size % ranks:
                raise ConfigError(f"a batch of {batch_size} cannot be divided evenly among {ranks} ranks")
        if not 0 <= src_rank < src_world_size:
            raise ConfigError(f"there is no rank {src_rank}: the group has {src_world_size}")
        routes = plan_routes(src_world_size, dst_world_size, batch_size)
        return [(receiver, part.stop - part.start) for sender, receiver, part in routes if sender == src_rank]

    @staticmethod
    def get_src_ranks(batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int) -> Parts:
        """Return whose rows a destination gets, and how many: the same the other way round."""
        return CommMapper.get_dst_ranks(batch_size, dst_world_size, src_world_size, dst_rank)


def build_route_channel_key(
    src_group_name: str, dst_group_name: str, src_rank: int, dst_rank: int, tag: str | None, route_key: Any = None
) -> tuple[Any, ...]:
    """Return the key under which a part of a batch is in a channel."""
    name = "" if route_key is None else route_key if isinstance(route_key, str) else repr(route_key)
    return ("scheduler_route", src_group_name, dst_group_name, tag or "default", name, src_rank, dst_rank)


build_send_key = build_route_channel_key


def get_group_world_size(_manager_proxy: Any, group_name: str) -> int:
    """Return how many workers a group has."""
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
    """Split a batch into parts of these sizes; what has no rows is in each of them.

    >>> split_batch({"rows": [1, 2, 3], "step": 7}, [1, 2])
    [{'rows': [1], 'step': 7}, {'rows': [2, 3], 'step': 7}]
    """
    if data is None or isinstance(data, bool | int | float | str):
        return [data for _ in split_sizes]
    if isinstance(data, dict):
        columns = {key: split_batch(value, split_sizes) for key, value in data.items()}
        return [{key: parts[index] for key, parts in columns.items()} for index in range(len(split_sizes))]
    infer_batch_size(data)
    return [data[end - size : end] for end, size in zip(accumulate(split_sizes), split_sizes, strict=True)]


def merge_batches(batches: Sequence[Any]) -> Any:
    """Join parts into one batch.

    >>> merge_batches([{"rows": [1], "step": 7}, {"rows": [2, 3], "step": 7}])
    {'rows': [1, 2, 3], 'step': 7}
    """
    if not batches:
        raise ConfigError("there are no parts to join")
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, dict):
        return {key: merge_batches([part[key] for part in batches]) for key in first}
    if isinstance(first, list) or getattr(first, "shape", None):
        return join_rows(batches)
    if all(part == first for part in batches):
        return first
    raise ConfigError(f"parts of {type(first).__name__} differ, and cannot be joined")


class Routed:
    """The handle of a batch on its way: of all its parts."""

    def __init__(self, handles: Sequence[Any], merge: Callable[[list[Any]], Any]) -> None:
        self._handles, self._merge = handles, merge

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def wait(self, timeout: float | None = None) -> Any:
        deadline = Deadline.after(timeout)
        return self._merge([handle.wait(deadline.timeout) for handle in self._handles])

    async def async_wait(self) -> Any:
        return self._merge([await handle.async_wait() for handle in self._handles])


class RoutingWorker:
    """A worker's exchange with all ranks of another group that have a part of its batch."""

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
        **decoupled: Any,
    ) -> Routed | None:
        """Send this rank's rows; `batch_size` is how many all ranks of its group have together."""
        _check(channel, enable_p2p, decoupled)
        size = infer_batch_size(data) * self.world_size if batch_size is None else batch_size
        ways = CommMapper.get_dst_ranks(size, self.world_size, get_group_world_size(None, group_name), self.rank)
        tag = tag if mode is None else f"{mode}_{tag}"
        sent = []
        for (rank, _), part in zip(ways, (split_fn or split_batch)(data, [rows for _, rows in ways]), strict=True):
            if enable_p2p:
                sent.append(self.send(part, group_name, rank, async_op, options))
            else:
                key = build_send_key(self.group_name, group_name, self.rank, rank, tag, route_key)
                sent.append(channel.put(part, key=key, async_op=async_op))
        return Routed(sent, lambda _: None) if async_op else None

    def recv_from(
        self: Any,
        group_name: str,
        channel: Any,
        *,
        batch_size: int,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: Callable[[Any], int] | None = None,
        enable_p2p: bool = False,
        options: Any = None,
        **decoupled: Any,
    ) -> Any:
        """Receive this rank's rows of a batch that has `batch_size` rows in all."""
        _check(channel, enable_p2p, decoupled)
        others = get_group_world_size(None, group_name)
        ways = CommMapper.get_src_ranks(batch_size, others, self.world_size, self.rank)
        handles = []
        for rank, _ in ways:
            if enable_p2p:
                handles.append(self.recv(group_name, rank, True, options))
            else:
                key = build_send_key(group_name, self.group_name, rank, self.rank, tag, route_key)
                handles.append(channel.get(key=key, async_op=True))

        def merge(parts: list[Any]) -> Any:
            for part, (rank, rows) in zip(parts, ways, strict=True):
                if (found := get_batch_size(part, infer_batch_size_fn)) != rows:
                    raise ConfigError(f"{group_name}:{rank} sent {found} rows, and {rows} were expected")
            return (merge_fn or merge_batches)(parts)

        routed = Routed(handles, merge)
        return routed if async_op else routed.wait()


def _check(channel: Any, enable_p2p: bool, decoupled: dict[str, Any]) -> None:
    if wrong := sorted(name for name, value in decoupled.items() if value or not name.endswith(("_mode", "_size"))):
        hint = "leave out runner.enable_decoupled_mode, so that each rank knows whom its rows go to"
        raise ConfigError(f"send_to and recv_from have no {wrong[0]!r} on Roost", hint=hint)
    if channel is None and not enable_p2p:
        raise ConfigError("there is no channel", hint="give one, or enable_p2p=True")
