"""Workers that fetch tensors from each other in process groups, on a machine without devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roost import Worker
from roost.comm.move import loans
from roost.comm.move.arrays import bytes_of
from roost.comm.move.cuda import DeviceMemory
from roost.comm.move.loans import Lending, Loan, Loans
from roost.comm.move.nccl import Pairs
from roost.comm.move.route import Route
from roost.comm.process import process_messages
from waiting import wait_until


class Lender(Worker):
    """Lends tensors in host memory as if they were on a device, by gloo in place of NCCL."""

    def __init__(self, can_pair: bool = True) -> None:
        # Which route is chosen is tested as a function, and cannot be NCCL here.
        loans.choose_route = lambda source, _: Route.GROUP if source.can_group else Route.NETWORK
        endpoint = process_messages().endpoint
        self.loans: Loans = loans._here[endpoint.own]
        self.loans.pairs = Pairs(endpoint.own, endpoint.host if can_pair else None, "gloo")

    def lend(self, group: str, sizes: list[int]) -> list[int]:
        """Lend tensors of these sizes, each a message of its own, and wait until all are back."""
        import torch

        back: list[Any] = []
        for size in sizes:
            lending = Lending(self.loans, f"{group}:0")
            lending.number, lending.on_back = self.loans.add(lending), back.append
            lending.tensors = [torch.full((size,), float(size))]
            memory = DeviceMemory(device="GPU-1", handle=b"", offset=0, nbytes=4 * size)
            loan = Loan(
                owner=self.loans.own, number=lending.number, place=0, memory=memory, dtype="float32", shape=(size,)
            )
            self.send(loan, group, 0, timeout=60)
        wait_until(lambda: len(back) == len(sizes), "all are back")
        return back

    def fetch(self, group: str, count: int, threads: int) -> list[tuple[int, float]]:
        """Fetch as many tensors, several at once; returns the size of each and what all its elements are."""
        import torch

        def fetch(loan: Loan) -> tuple[int, float]:
            target = torch.zeros(loan.shape)
            self.loans.fetch(loan, bytes_of(target))
            return len(target), float(target.mean())

        taken = [self.recv(group, 0, timeout=60) for _ in range(count)]
        with ThreadPoolExecutor(threads) as pool:
            got = list(pool.map(fetch, taken))
        for loan in taken:
            self.loans.give_back(loan.owner, loan.number, [])
        return got

    def refused(self) -> bool:
        """Whether it fetches through the host from someone."""
        return bool(self.loans.pairs.refused)
