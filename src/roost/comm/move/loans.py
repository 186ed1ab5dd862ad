"""Tensors on a device, which their receiver fetches itself.

A message says where such a tensor is, and its owner keeps it. The receiver copies it: from the device's memory if that
device is visible to it too, otherwise by NCCL into a device of its own, or through the host. Then it returns the loan.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roost.comm.limits import FETCH_SECONDS
from roost.comm.move.arrays import bytes_of
from roost.comm.move.cuda import NO_HANDLE, CudaError, DeviceMemory, Mappings, export, uuid_of, visible_devices
from roost.comm.move.nccl import Pairs
from roost.comm.move.route import End, Route, choose_route
from roost.comm.wire.connection import Frame, Kind, PeerInfo, view
from roost.comm.wire.endpoint import Endpoint
from roost.comm.wire.loop import Handle
from roost.comm.wire.peer import Peer
from roost.errors import ClusterError, WorkerDied

_SENT, _NOT_SENT = b"sent", b"not sent"
"""The answers of a tensor's owner to a process that wants it in a process group."""

log: logging.Logger = logging.getLogger(__name__)


Fetched = dict[tuple[PeerInfo, int], list[Any]]
"""By owner and number of a message: the copies on the device of its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """A tensor on a device of another process, as a message describes it."""

    owner: PeerInfo
    number: int
    """The number of the message."""
    place: int
    """Which of its tensors this is."""
    memory: DeviceMemory
    dtype: str
    shape: tuple[int, ...]


class Lending:
    """The tensors of one message, or of one item of a channel: lent until its receiver has fetched them all."""

    def __init__(self, loans: Loans, to: str) -> None:
        """Take who is to fetch them; with nobody named, as for a channel, they are copied and may be changed."""
        self.to = to
        self.tensors: list[Any] = []
        self.number = 0
        self._loans = loans
        self.on_back: Callable[[Exception | None], object] = lambda _error: None
        """Called when they are back, or with an error if they never will be."""

    def lend(self, tensor: Any) -> Loan:
        """Keep a tensor until it is fetched."""
        plain = tensor.detach().contiguous()
        if not self.to and plain.data_ptr() == tensor.data_ptr():
            plain = plain.clone()
        self.number = self.number or self._loans.add(self)
        self.tensors.append(plain)
        return Loan(
            owner=self._loans.own,
            number=self.number,
            place=len(self.tensors) - 1,
            memory=export(plain),
            dtype=str(plain.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
        )

    def cancel(self) -> None:
        """Take all of them back: the message will not be sent."""
        self.on_back = lambda _error: None
        self._loans.take_back(self.number)
        self.tensors, self.number = [], 0


class Loans:
    """The tensors that this process has lent, and its way to those that others lend."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.own: PeerInfo = endpoint.own
        self._endpoint = endpoint
        self._lent: dict[int, Lending] = {}
        self._mappings = Mappings()
        self.pairs = Pairs(endpoint.own, endpoint.host)
        endpoint.on_loan = self._take
        endpoint.on_end.append(self._forget)
        endpoint.on_close.append(self._close)
        _here[endpoint.own] = self

    @property
    def can_lend(self) -> bool:
        """Whether others can reach this process, and it uses a device; torch is loaded."""
        can_be_reached = self._endpoint.host is not None and not self._endpoint.is_closed
        return can_be_reached and bool(sys.modules["torch"].cuda.is_initialized())

    def add(self, lending: Lending) -> int:
        """Keep the tensors of a message, under a number."""
        number = next(self._endpoint.numbers)
        self._lent[number] = lending
        return number

    def take_back(self, number: int, error: Exception | None = None) -> None:
        """Let go of the tensors of a message."""
        lending = self._lent.pop(number, None)
        if lending is not None:
            lending.on_back(error)

    def tensor(self, number: int, place: int) -> Any:
        """Return a tensor that is lent; None if it is not any more."""
        lending = self._lent.get(number)
        return lending.tensors[place] if lending is not None else None

    def fetch(self, loan: Loan, target: Any) -> Any:
        """Copy the bytes of what was lent into a tensor of bytes; returns the event of a copy on the device.

        WorkerDied if its owner has ended.
        """
        owner = _here.get(loan.owner)
        there = End(
            process=loan.owner.instance if owner is None else self.own.instance,
            node=loan.owner.node_rank,
            memory=loan.memory.device,
            closed="" if loan.memory.handle else NO_HANDLE,
            can_group=self.pairs.can_reach(loan.owner),
        )
        here = End(
            process=self.own.instance,
            node=self.own.node_rank,
            devices=visible_devices() if target.is_cuda else (),
            memory=uuid_of(target.device) if target.is_cuda else "",
            can_group=True,
        )
        route = choose_route(there, here)
        log.debug("a tensor of %d bytes comes from %s through %s", loan.memory.nbytes, loan.owner, route.mover)
        if owner is not None:
            tensor = owner.tensor(loan.number, loan.place)
            if tensor is None:
                raise _lost(loan)
            target.copy_(bytes_of(tensor))
        elif route is Route.DEVICE:
            try:
                return self._mappings.copy(loan.memory, target)
            except CudaError:
                raise _lost(loan) from None
        elif route is not Route.GROUP or not self.pairs.receive(
            loan.owner, target, lambda place: self._ask(loan, place).envelope == _SENT
        ):
            torch = sys.modules["torch"]
            (buffer,) = self._ask(loan, b"").buffers
            target.copy_(torch.frombuffer(view(buffer), dtype=torch.uint8))
        return None

    def give_back(self, owner: PeerInfo, number: int, copies: Sequence[Any]) -> None:
        """Tell the owner of the tensors of a message, once they are copied, that they are not needed any more."""
        here = _here.get(owner)
        if here is not None:
            here.take_back(number)
            return

        def send() -> None:
            for copy in copies:
                copy.synchronize()
            self._endpoint.peer(owner.address).send(Kind.RETURN, number, owner.instance.encode())

        # Return before the copies end: the device copies while the caller goes on.
        self._endpoint.loop.call(send)

    def _ask(self, loan: Loan, place: bytes) -> Frame:
        """Ask the owner of a tensor for its content, or to send it in a process group."""
        answer: Handle[Any] = Handle(self._endpoint.loop, late=lambda: f"{loan.owner} has not sent a tensor")
        wanted = f"{loan.owner.instance} {loan.number} {loan.place}".encode()
        self._endpoint.request(loan.owner.address, wanted, place, (), answer, Kind.FETCH)
        frame: Frame = answer.wait(FETCH_SECONDS)
        if not frame.buffers and not frame.envelope:
            raise _lost(loan)
        return frame

    def _take(self, peer: Peer, frame: Frame) -> None:
        """Answer those who fetch, and take back what is returned; in the thread that reads."""
        instance, *wanted = frame.envelope.decode().split()
        # What a process had lent that was restarted is lost, and its numbers are used again.
        is_own = instance == self.own.instance
        if frame.kind == Kind.RETURN:
            if is_own:
                self.take_back(frame.number)
            return
        tensor = self.tensor(*map(int, wanted)) if is_own else None
        if tensor is None:
            peer.send(Kind.REPLY, frame.number)
            return
        raw, receiver = bytes_of(tensor), peer.info
        if frame.data and receiver is not None:
            will_send = self.pairs.can_reach(receiver)
            peer.send(Kind.REPLY, frame.number, _SENT if will_send else _NOT_SENT)
            if will_send:
                self.pairs.send(receiver, bytes(frame.data), raw)
            return
        host = sys.modules["torch"].empty(raw.shape, dtype=raw.dtype, pin_memory=raw.is_cuda)
        host.copy_(raw)
        content = memoryview(host.numpy())
        peer.send(Kind.REPLY, frame.number, b"", b"", [content])

    def _forget(self, peer: Peer, error: Exception) -> None:
        """Take back what a process that has ended would have fetched."""
        if peer.info is not None:
            self.pairs.forget(peer.info)
            for number in [number for number, lending in list(self._lent.items()) if lending.to == peer.address]:
                self.take_back(number, error)

    def _close(self) -> None:
        _here.pop(self.own, None)
        self.pairs.close()
        self._mappings.close()
        for number in list(self._lent):
            self.take_back(number, ClusterError("the communication of this process has ended"))


_here: dict[PeerInfo, Loans] = {}
"""The loans of this process."""
_fetching = threading.local()


def lending(endpoint: Endpoint, to: str = "") -> Lending | None:
    """Return what keeps the tensors of a message; None where they have to be copied to the host."""
    if "torch" not in sys.modules:
        return None
    loans = _here.get(endpoint.own)
    return Lending(loans, to) if loans is not None and loans.can_lend else None


def can_group(endpoint: Endpoint) -> bool:
    """Whether this process has a device and can be in process groups of two."""
    loans = _here.get(endpoint.own) if "torch" in sys.modules else None
    return loans is not None and loans.can_lend and loans.pairs.is_possible


def why_refused(endpoint: Endpoint, address: str) -> str:
    """Say why tensors of a worker do not come through a process group any more; empty if that was never refused."""
    loans = _here.get(endpoint.own)
    refused = loans.pairs.refused.items() if loans is not None else ()
    return next(
        (f"{peer.address} cannot be reached by NCCL: {why}" for peer, why in refused if peer.address == address), ""
    )


def fetch_tensor(loan: Loan) -> Any:
    """Make a tensor with the content of one that was lent: on the same device, else on the current one or the host."""
    import torch

    number = visible_devices().get(loan.memory.device) if torch.cuda.is_available() else None
    device = "cpu" if not torch.cuda.is_available() else "cuda" if number is None else f"cuda:{number}"
    made = torch.empty(loan.shape, dtype=getattr(torch, loan.dtype), device=device)
    fetch_into(loan, bytes_of(made))
    return made


def fetch_into(loan: Loan, target: Any) -> None:
    """Copy the bytes of what was lent into a tensor of bytes; `settle` returns the loan."""
    copy = _loans().fetch(loan, target) if target.numel() else None
    copies = _fetching.__dict__.setdefault("loans", {}).setdefault((loan.owner, loan.number), [])
    if copy is not None:
        copies.append(copy)


def fetched() -> Fetched:
    """Return what this thread has fetched since the last call."""
    found: Fetched = _fetching.__dict__.pop("loans", {})
    return found


def settle(loans: Fetched) -> None:
    """Return loans to their owners."""
    for (owner, number), copies in loans.items():
        _loans().give_back(owner, number, copies)


def _loans() -> Loans:
    # A process has one, except in tests without Ray, where any will do.
    return next(iter(_here.values()))


def _lost(loan: Loan) -> WorkerDied:
    return WorkerDied(f"{loan.owner} has ended, and with it the tensor {loan.shape} {loan.dtype} that it had sent")
