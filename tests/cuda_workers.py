"""Workers that send each other tensors on a device, for tests."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from roost import Channel, Worker


class Holder(Worker):
    """Has tensors on the device that it shares with others."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.ways.append(record.getMessage().rpartition(" through ")[2])  # type: ignore[method-assign]
        log = logging.getLogger("roost.comm.move.loans")
        log.setLevel(logging.DEBUG)
        log.addHandler(handler)

    def pid(self) -> int:
        return os.getpid()

    def say(self, group: str, rank: int) -> None:
        """Send tensors in a structure, and change them afterwards."""
        import torch

        first = torch.arange(1000, device="cuda", dtype=torch.float32)
        half = torch.ones((3, 4), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        things = {"a": [first, first[::2]], "b": (half, torch.empty((0, 2), device="cuda"), torch.arange(3)), "c": "x"}
        self.send(things, group, rank, timeout=60)
        first.zero_()

    def hear(self, group: str, rank: int) -> list[Any]:
        """Receive them; returns what they are."""
        got = self.recv(group, rank, timeout=60)
        return [
            (str(one.dtype), one.device.type, tuple(one.shape), one.requires_grad, float(one.float().sum()))
            for one in (*got["a"], *got["b"])
        ]

    def say_tensor(self, value: float, device: str, group: str, rank: int, timeout: float = 60) -> None:
        """Send the content of a tensor."""
        import torch

        tensor = torch.full((1000,), value, device=device)
        self.send_tensor(tensor, group, rank, timeout=timeout)
        tensor.zero_()

    def hear_tensor(self, device: str, group: str, rank: int) -> float:
        """Receive it into one that exists."""
        import torch

        tensor = torch.empty(1000, device=device)
        self.recv_tensor(tensor, group, rank, timeout=60)
        return float(tensor.sum())

    def share(self, groups: list[Any]) -> float:
        """Take part in a broadcast, the first from `groups` being its source."""
        import torch

        is_source = self.address == f"{groups[0][0]}:{groups[0][1]}"
        got = self.broadcast(torch.ones(10, device="cuda") if is_source else None, groups, timeout=60)
        assert got.is_cuda
        return float(got.sum())

    def put(self, channel: Channel, count: int) -> None:
        """Put tensors, each changed after it is in the queue."""
        import torch

        for number in range(count):
            tensor = torch.full((1 << 18,), float(number), device="cuda")
            channel.put({"tensor": tensor}, timeout=60)
            tensor.fill_(-1)

    def take(self, channel: Channel, count: int) -> list[tuple[float, bool]]:
        """Get them."""
        got = [channel.get(timeout=60)["tensor"] for _ in range(count)]
        return [(float(one.mean()), one.is_cuda) for one in got]

    def lend_and_wait(self, group: str, rank: int) -> str:
        """Send a tensor that nobody fetches."""
        import torch

        try:
            self.send(torch.ones(10, device="cuda"), group, rank, timeout=60)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "fetched"

    def lent(self) -> int:
        """How many tensors are lent."""
        from roost.comm.move.loans import _here

        return sum(len(loans._lent) for loans in _here.values())

    def fetched_by(self) -> list[str]:
        """How tensors arrived since the last call."""
        found, self.ways = self.ways, []
        return [way for way in found if way]

    def send_often(self, nbytes: int, count: int, ahead: int, group: str, rank: int) -> float:
        """Send a tensor again and again, so many at a time; returns the seconds that each took."""
        import torch

        tensor = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            self.send_tensor(tensor, group, rank, timeout=60)
        start = time.perf_counter()
        handles: list[Any] = []
        for _ in range(count):
            if len(handles) == ahead:
                handles.pop(0).wait(60)
            handles.append(self.send_tensor(tensor, group, rank, async_op=True))
        for handle in handles:
            handle.wait(60)
        return (time.perf_counter() - start) / count

    def hear_often(self, nbytes: int, count: int, group: str, rank: int) -> None:
        """Receive a tensor again and again."""
        import torch

        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        for _ in range(2 + count):
            self.recv_tensor(tensor, group, rank, timeout=60)

    def copy_often(self, nbytes: int, count: int) -> float:
        """Copy a tensor on the device; returns the seconds that each copy took."""
        import torch

        source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count
