"""Batches that go from the ranks of one group to those of another, in one process without Ray."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from roost import CallTimedOut, ConfigError, Worker, plan_routes
from roost.comm.rows import join_rows
from roost.testing import as_worker

_numbers = itertools.count()
_made: list[Worker] = []


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    """End what the workers of a test have begun."""
    yield
    while _made:
        _made.pop()._roost_messages.endpoint.close()


def make(size: int) -> list[Worker]:
    """The workers of a new group."""
    name = f"rows{next(_numbers)}"
    made = []
    for rank in range(size):
        with as_worker(rank=rank, world_size=size, group_name=name):
            made.append(Worker())
    _made.extend(made)
    return made


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def carry(senders: Sequence[Worker], receivers: Sequence[Worker], parts: Sequence[Any]) -> list[Any]:
    """Send a part from each sender, and return what each receiver gets."""
    to, source = receivers[0].group_name, senders[0].group_name
    sizes = {"world_size": len(receivers), "timeout": 60}, {"world_size": len(senders), "timeout": 60}
    sends = [
        lambda worker=worker, part=part: worker.send_to(part, to, **sizes[0])
        for worker, part in zip(senders, parts, strict=True)
    ]
    takes = [lambda worker=worker: worker.recv_from(source, **sizes[1]) for worker in receivers]
    return together(*sends, *takes)[len(senders) :]


@pytest.mark.parametrize("counts", [[4, 4], [5, 2], [0, 7], [0, 0], [1, 0], [3]], ids=str)
@pytest.mark.parametrize("n_receivers", [1, 2, 3])
def test_rows_arrive_evenly_and_in_order_however_many_each_sender_has(counts, n_receivers):
    numbers = iter(range(100))
    parts = [[next(numbers) for _ in range(count)] for count in counts]
    got = carry(make(len(counts)), make(n_receivers), parts)
    total = sum(counts)
    assert [len(rows) for rows in got] == [total // n_receivers + (n < total % n_receivers) for n in range(n_receivers)]
    assert list(itertools.chain(*got)) == list(range(total))


def test_every_kind_of_rows():
    import torch

    senders, receivers = make(2), make(3)
    array = np.arange(14, dtype=np.int16).reshape(7, 2)
    kinds: dict[str, Any] = {
        "list": [None, 1, "text", b"x" * 20_000, {}, [], 1.5],
        "tuple": tuple(range(7)),
        "array": array,
        "large": np.arange(7 * 10_000).reshape(7, -1),
        "tensor": torch.arange(7, dtype=torch.float64),
        "dict": {"ids": array, "text": list("abcdefg"), "more": {"mask": torch.ones(7, 2)}},
    }
    for kind, rows in kinds.items():
        parts = [
            {key: take(value, part) for key, value in rows.items()} if kind == "dict" else rows[part]
            for part in (slice(0, 5), slice(5, 7))
        ]
        whole = join_rows(carry(senders, receivers, parts))
        if kind == "dict":
            assert (whole["ids"] == array).all()
            assert whole["text"] == rows["text"]
            assert whole["more"]["mask"].shape == (7, 2)
        elif kind in ("list", "tuple"):
            assert whole == rows
        else:
            assert type(whole) is type(rows)
            assert whole.dtype == rows.dtype
            assert (whole == rows).all()


def take(value: Any, part: slice) -> Any:
    return {key: each[part] for key, each in value.items()} if isinstance(value, dict) else value[part]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "rows of type NoneType cannot be counted"),
        (3, "rows of type int cannot be counted"),
        ("text", "rows of type str cannot be counted"),
        (b"x", "rows of type bytes cannot be counted"),
        ({1, 2}, "rows of type set cannot be counted"),
        ({}, "an empty dict has no rows"),
        ({"a": [1], "b": [1, 2]}, "different numbers of rows: {'a': 1, 'b': 2}"),
        ({"a": 1}, "rows of type int cannot be counted"),
        (np.float64(3), "without dimensions"),
        (np.array(3), "without dimensions"),
    ],
)
def test_what_has_no_rows_is_refused(rows, words):
    with pytest.raises(ConfigError, match=words):
        make(1)[0].send_to(rows, "other", world_size=1)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", True])
def test_the_size_of_the_other_group_is_checked(world_size):
    (worker,) = make(1)
    with pytest.raises(ConfigError, match="world_size is"):
        worker.send_to([1], "other", world_size=world_size)
    with pytest.raises(ConfigError, match="world_size is"):
        worker.recv_from("other", world_size=world_size)
    with pytest.raises(ConfigError, match="not known in a process without Ray"):
        worker.recv_from("other")


def test_the_order_of_a_dict_does_not_matter_and_its_keys_need_none():
    assert join_rows([{"a": [1], "b": [2]}, {"b": [4], "a": [3]}]) == {"a": [1, 3], "b": [2, 4]}
    with pytest.raises(ConfigError, match="different kinds of rows"):
        join_rows([{1: [1]}, {"b": [2]}])


def test_rows_of_different_kinds_and_shapes_are_refused():
    with pytest.raises(ConfigError, match="different kinds of rows"):
        carry(make(2), make(1), [[1], (2,)])
    with pytest.raises(ConfigError, match="different shapes"):
        carry(make(2), make(1), [np.ones((1, 2)), np.ones((1, 3))])
    with pytest.raises(ConfigError, match="different kinds"):
        carry(make(2), make(1), [{"a": [1]}, {"b": [1]}])


def test_a_receive_that_is_too_late_leaves_all_rows_for_the_next():
    (first, second), (receiver,) = make(2), make(1)
    to, source = receiver.group_name, first.group_name
    # One of two has sent: the other is in its group, and not there yet.
    waiting = threading.Thread(target=lambda: first.send_to([1, 2], to, world_size=1, timeout=60))
    waiting.start()
    with pytest.raises(CallTimedOut, match=rf"has got no rows from {source}:0 and {source}:1 in time"):
        receiver.recv_from(source, world_size=2, timeout=0.2)
    second.send_to([3], to, world_size=1, timeout=60)
    waiting.join(60)
    together(
        lambda: first.send_to([4], to, world_size=1, timeout=60),
        lambda: second.send_to([5, 6], to, world_size=1, timeout=60),
    )
    assert receiver.recv_from(source, world_size=2, timeout=60) == [1, 2, 3]
    assert receiver.recv_from(source, world_size=2, timeout=60) == [4, 5, 6]


def test_a_receive_that_has_some_of_its_rows_and_is_too_late_leaves_them():
    (first, second), (receiver,) = make(2), make(1)
    source = first.group_name
    label = "roost rows", source, None
    first.send([1], receiver.group_name, 0, tag=label)
    with pytest.raises(CallTimedOut, match=rf"no rows from {source}:1 in time"):
        receiver.recv_from(source, world_size=2, timeout=0.2)
    second.send([2], receiver.group_name, 0, tag=label)
    assert receiver.recv_from(source, world_size=2, timeout=60) == [1, 2]


def test_a_send_that_is_too_early_can_be_made_again():
    (first, second), (receiver,) = make(2), make(1)
    to, source = receiver.group_name, first.group_name
    with pytest.raises(CallTimedOut, match=rf"{source}:0 has got no counts from {source}:1 in time"):
        first.send_to([1], to, world_size=1, timeout=0.1)
    with pytest.raises(ConfigError, match="has told the others of 1 rows, in a call that timed out, and now has 2"):
        first.send_to([1, 1], to, world_size=1, timeout=0.1)
    for rows in ([1], [3]):
        together(
            lambda rows=rows: first.send_to(rows, to, world_size=1, timeout=60),
            lambda rows=rows: second.send_to([rows[0] + 1], to, world_size=1, timeout=60),
        )
    assert [receiver.recv_from(source, world_size=2, timeout=60) for _ in range(2)] == [[1, 2], [3, 4]]


def test_tags_keep_batches_apart():
    (sender,), (receiver,) = make(1), make(1)
    for tag in ("a", ("b", 1), None):
        sender.send_to([tag], receiver.group_name, world_size=1, tag=tag)
    for tag in (None, ("b", 1), "a"):
        assert receiver.recv_from(sender.group_name, world_size=1, tag=tag, timeout=60) == [tag]


def test_routes_of_unequal_rows():
    assert plan_routes(2, 2, [5, 1]) == [(0, 0, slice(0, 3)), (0, 1, slice(3, 5)), (1, 1, slice(5, 6))]
    assert plan_routes(2, 2, [3, 3]) == plan_routes(2, 2, 6)
    for wrong in ([1], [1, -1], [1, True], [1, "2"]):
        with pytest.raises(ConfigError):
            plan_routes(2, 2, wrong)
