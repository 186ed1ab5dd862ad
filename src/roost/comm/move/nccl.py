"""Tensors from one device to another: a process group of two for each worker that a worker fetches from.

Both sides of NCCL must begin. The one that fetches asks for a tensor and says where they meet; the owner answers that
it will send it, and does so in a thread of its own, since that waits for the other side.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from roost.comm.limits import COPY_POLL_SECONDS, FETCH_SECONDS, MEET_SECONDS
from roost.comm.options import CollectiveGroupOptions
from roost.comm.wire.connection import PeerInfo
from roost.deadline import Deadline

_LIMIT = datetime.timedelta(seconds=MEET_SECONDS)

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
                    meeting = self._from[owner] = _Meeting(_store(self._host, 0, is_host=True))
            # Tensors come in the order in which they were asked for.
            with meeting.lock:
                if not ask(f"{self._host} {meeting.store.port}".encode()):
                    raise RuntimeError("it does not send")
                if meeting.group is None:
                    label = f"{owner.instance} to {self._own.instance}"
                    meeting.group = new_group(self._backend, meeting.store, 1, 2, label, None, _LIMIT)
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

        def send() -> None:
            try:
                group = self._to.get((receiver, place))
                if group is None:
                    host, port = place.decode().split()
                    store = _store(host, int(port), is_host=False)
                    label = f"{self._own.instance} to {receiver.instance}"
                    group = self._to[receiver, place] = new_group(self._backend, store, 0, 2, label, None, _LIMIT)
                group.send([tensor], 1, 0).wait()
            except Exception as error:
                self.refuse(receiver, error)

        with self._lock:
            if self._sender is None:
                self._sender = ThreadPoolExecutor(1, thread_name_prefix="roost-pairs")
        self._sender.submit(send)

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


@dataclass(slots=True)
class _Meeting:
    """Where a process meets the owner of tensors that it fetches, and the group that both are in."""

    store: Any
    group: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _store(host: str | None, port: int, *, is_host: bool) -> Any:
    distributed = importlib.import_module("torch.distributed")
    return distributed.TCPStore(host, port, 2, is_host, _LIMIT, wait_for_workers=False)


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
        chosen = options or CollectiveGroupOptions()
        distributed = importlib.import_module("torch.distributed")
        made = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=chosen.is_high_priority_stream)
        for theirs, ours in (("max_ctas", "max_ctas"), ("min_ctas", "min_ctas"), ("cga_cluster_size", "cluster_size")):
            value = getattr(chosen, f"accel_{ours}")
            if value is not None:
                setattr(made.config, theirs, value)
        given["backend_options" if "backend_options" in known else "pg_options"] = made
    group, _ = make(size, rank, [], inner.Backend(backend), inner.PrefixStore(label, store), **given)
    inner._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
