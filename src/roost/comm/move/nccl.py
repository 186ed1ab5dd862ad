"""Tensors from one device to another: a process group of two for each worker that a worker fetches from.

Both sides of NCCL must begin. The one that fetches asks for a tensor and says where they meet; the owner answers that
it will send it, and does so in a thread of its own, since that waits for the other side.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roost.comm.limits import COPY_POLL_SECONDS, FETCH_SECONDS, MEET_SECONDS
from roost.comm.process_groups import new_group
from roost.comm.wire.connection import PeerInfo
from roost.deadline import Deadline

log: logging.Logger = logging.getLogger(__name__)


class Pairs:
    """The process groups in which this process fetches tensors, and those in which it sends them."""

    def __init__(self, own: PeerInfo, host: str | None, backend: str = "nccl") -> None:
        self._own = own
        self._host = host
        self._backend = backend
        self._from: dict[PeerInfo, _Meeting] = {}
        self._to: dict[tuple[PeerInfo, bytes], Any] = {}
        self.refused: dict[PeerInfo, str] = {}
        """Processes that nothing is exchanged with in this way any more, and why."""
        self._sender: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def can_reach(self, owner: PeerInfo) -> bool:
        """Whether tensors can be fetched from that process in this way, or it was not tried yet."""
        return owner not in self.refused and self.is_possible

    @property
    def is_possible(self) -> bool:
        """Whether this process can be in such groups at all."""
        if self._host is None:
            return False
        distributed = importlib.import_module("torch.distributed")
        return bool(getattr(distributed, f"is_{self._backend}_available")())

    def receive(self, owner: PeerInfo, target: Any, ask: Callable[[bytes], bool]) -> bool:
        """Receive a tensor into a contiguous one; `ask` tells the owner where to meet, and says whether it will send.

        Returns False if it does not come, now or in future.
        """
        try:
            with self._lock:
                meeting = self._from.get(owner)
                if meeting is None:
                    meeting = self._from[owner] = _Meeting(self._host)
            # Tensors come in the order in which they were asked for.
            with meeting.lock:
                if not ask(meeting.place):
                    raise RuntimeError("it does not send")
                meeting.join(f"{owner.instance} to {self._own.instance}", self._backend)
                work = meeting.group.recv([target], 0, 0)
                work.wait()
                # With NCCL that only waits in the device's stream; a group that is ended lets go of it.
                deadline = Deadline.after(FETCH_SECONDS)
                while not work.is_completed() and not deadline.is_over:
                    time.sleep(COPY_POLL_SECONDS)
                if not work.is_completed() or self._from.get(owner) is not meeting:
                    raise RuntimeError("a tensor did not come")
        except RuntimeError as error:
            self.refuse(owner, error)
            return False
        return True

    def send(self, receiver: PeerInfo, place: bytes, tensor: Any) -> None:
        """Send a tensor to a process that waits for it there, from a thread of its own."""
        with self._lock:
            if self._sender is None:
                self._sender = ThreadPoolExecutor(1, thread_name_prefix="roost-pairs")
        self._sender.submit(self._send, receiver, place, tensor)

    def _send(self, receiver: PeerInfo, place: bytes, tensor: Any) -> None:
        try:
            group = self._to.get((receiver, place))
            if group is None:
                label = f"{self._own.instance} to {receiver.instance}"
                group = self._to[receiver, place] = _make_group(_connect(place), 0, label, self._backend)
            group.send([tensor], 1, 0).wait()
        except Exception as error:
            self.refuse(receiver, error)

    def refuse(self, peer: PeerInfo, error: BaseException) -> None:
        """Exchange nothing with a process in this way any more."""
        log.warning("tensors between %s and %s go through host memory: %s", self._own, peer, error)
        self.refused[peer] = str(error)
        self.forget(peer)

    def forget(self, peer: PeerInfo) -> None:
        """End the groups with a process, and whatever waits in them."""
        with self._lock:
            meeting = self._from.pop(peer, None)
            groups = [self._to.pop(key) for key in [*self._to] if key[0] == peer]
        for group in [*groups, meeting.group if meeting is not None else None]:
            if group is not None and self._backend == "nccl":
                group.abort()

    def close(self) -> None:
        """End all groups."""
        for peer in {*self._from, *(peer for peer, _ in self._to)}:
            self.forget(peer)
        if self._sender is not None:
            self._sender.shutdown(wait=False, cancel_futures=True)


class _Meeting:
    """Where a process meets the owner of tensors that it fetches, and the group that both are in."""

    def __init__(self, host: str | None) -> None:
        distributed = importlib.import_module("torch.distributed")
        limit = datetime.timedelta(seconds=MEET_SECONDS)
        self.lock = threading.Lock()
        self.group: Any = None
        self._store = distributed.TCPStore(host, 0, 2, True, limit, wait_for_workers=False)
        self.place = f"{host} {self._store.port}".encode()

    def join(self, label: str, backend: str) -> None:
        """Make the group, if it is not there yet."""
        if self.group is None:
            self.group = _make_group(self._store, 1, label, backend)


def _connect(place: bytes) -> Any:
    host, port = place.decode().split()
    distributed = importlib.import_module("torch.distributed")
    limit = datetime.timedelta(seconds=MEET_SECONDS)
    return distributed.TCPStore(host, int(port), 2, False, limit, wait_for_workers=False)


def _make_group(store: Any, rank: int, label: str, backend: str) -> Any:
    return new_group(backend, store, rank, 2, label, None, datetime.timedelta(seconds=MEET_SECONDS))
