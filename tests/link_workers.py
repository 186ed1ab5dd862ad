"""Workers with bad days in a link of weights."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from roost.comm.move import host, mover
from roost.weights.worker import WeightWorker
from soak.inject import reset
from weight_workers import Server, Trainer


class _Resets:
    """A worker that breaks its connections to other workers, again and again, while it does other things."""

    def reset_until_told(self, seconds: float) -> None:
        """Begin to break them, each time after a random part of so many seconds."""
        self.is_over, self.count, self.choose = threading.Event(), 0, random.Random(self.rank)  # noqa: S311

        def run() -> None:
            while not self.is_over.wait(self.choose.uniform(0, seconds)):
                for peer in [*self._roost_messages.endpoint.peers.values()]:
                    connection = peer.connection
                    if connection is not None:
                        # It may close in the meantime.
                        with contextlib.suppress(OSError):
                            reset(connection._sock)
                            self.count += 1

        threading.Thread(target=run, daemon=True).start()

    def stop_resets(self) -> int:
        """Leave them alone from here on; returns how many were broken."""
        self.is_over.set()
        return self.count


class ResetTrainer(_Resets, Trainer):
    """A trainer whose connections break."""


class ResetServer(_Resets, Server):
    """A server whose connections break."""


class Watched(Server):
    """A server that shows what an update leaves behind, and can be held up in one."""

    def __init__(self, kind: str = "torch", dtype: str = "float32") -> None:
        super().__init__(kind, dtype)
        self.may_change = threading.Event()
        self.may_change.set()

    def fail_at_accept(self) -> None:
        """Raise when it is asked where the weights go for the second time: it is prepared, and begins to move."""

        def fail() -> None:
            self.hook: Callable[[], None] | None = None
            raise RuntimeError("not now")

        def begin() -> None:
            self.hook = fail

        self.hook = begin

    def hold(self) -> None:
        """Let the next change of the weights wait until `go_on`."""
        self.may_change.clear()

    def go_on(self) -> None:
        self.may_change.set()

    @contextmanager
    def weights_changing(self, version: int) -> Iterator[None]:
        changes = vars(self).setdefault("changes", [])
        changes.append((f"to {version}", set()))
        may_change, self.may_change = self.may_change, threading.Event()
        self.may_change.set()
        if not may_change.is_set():
            self.held = may_change
            may_change.wait(60)
        try:
            yield
        except BaseException as error:
            changes.append((f"broken: {error}", set()))
            raise
        changes.append((f"done {version}", set()))

    def let_held_go_on(self) -> None:
        self.held.set()

    def import_torch(self) -> None:
        __import__("torch")

    def waiting_messages(self) -> int:
        """How many messages of others wait to be received."""
        return sum(len(messages) for messages in self._roost_messages.mailbox._messages.values())

    def kept(self) -> list[bool]:
        """By link: whether it has memory of this worker, or for it."""
        links = vars(self)["_roost_weights"].links.values()
        return [bool(one.staged) or any(plan.seen for plan in one.transfers.values()) for one in links]


class Hidden(Trainer):
    """A trainer whose number is that of another process for those who would read its memory, as in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        address, content = host.own_cookie()
        mover.own_cookie = lambda: (address, bytes(len(content)))


class Bulky(WeightWorker):
    """Has a large tensor on a GPU, which it can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.renew(0)

    def renew(self, value: float) -> None:
        """Have another tensor, and give the memory of the old one back."""
        import torch

        self.tensor: Any = None
        torch.cuda.empty_cache()
        self.tensor = torch.full((1 << 26,), float(value), device="cuda")

    def offer(self) -> dict[str, Any]:
        return {"w": self.tensor}

    accept = offer

    def first(self) -> float:
        return float(self.tensor[0])

    def free_bytes(self) -> int:
        """How much of the GPU is free."""
        import torch

        return int(torch.cuda.mem_get_info()[0])
