"""Times updates of weights between two groups: against a copy of the same bytes, and against gather and broadcast.

python bench/links.py           # in host memory, on one node
python bench/links.py cuda      # on one GPU
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from roost import Cluster, FlexiblePlacementStrategy, NodePlacementStrategy, PlacementStrategy, WorkerGroup
from roost.testing import local_cluster
from roost.weights.layout import Held, TensorSpec
from roost.weights.link import WeightLink
from roost.weights.worker import WeightWorker

ROUNDS = 7


class Part(WeightWorker):
    """Holds some rows or columns of equal tensors."""

    def __init__(self, count: int, shape: tuple[int, int], dim: int, device: str = "cpu") -> None:
        import torch

        # As many threads as there are cores would only compete.
        torch.set_num_threads(1)
        self.count, self.shape, self.dim = count, shape, dim
        step = shape[dim] // self.world_size
        self.box = tuple(
            (self.rank * step, (self.rank + 1) * step) if place == dim else (0, size)
            for place, size in enumerate(shape)
        )
        own = [stop - start for start, stop in self.box]
        self.parts = {
            f"t{number}": torch.full(own, number % 7, dtype=torch.bfloat16, device=device) for number in range(count)
        }

    def offer(self) -> Part:
        return self

    def accept(self) -> Part:
        return self

    def tensors(self) -> dict[str, Any]:
        return self.parts

    def held(self) -> list[Held]:
        return [Held(name=name, spec=TensorSpec(self.shape, "bfloat16"), box=self.box) for name in self.parts]

    def nothing(self) -> None:
        """What a bare call costs."""

    def copy_all(self, rounds: int) -> float:
        """Seconds to copy all that this worker holds into memory that it has."""
        import torch

        others = {name: torch.empty_like(part) for name, part in self.parts.items()}
        best = 1e9
        for _ in range(rounds):
            began = time.perf_counter()
            for name, part in self.parts.items():
                others[name].copy_(part)
            if part.is_cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    def gather_and_broadcast(self, rank: int, size: int, senders: int, port: int, rounds: int) -> float:
        """Seconds for the usual way: senders gather each tensor whole, and one of them broadcasts it to all targets."""
        import datetime

        import torch
        import torch.distributed as dist

        limit = datetime.timedelta(seconds=120)
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0, limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        trainers = dist.new_group(list(range(senders)))
        best = 1e9
        for _ in range(rounds):
            dist.barrier()
            began = time.perf_counter()
            for part in self.parts.values():
                whole = torch.empty(self.shape, dtype=torch.bfloat16)
                if rank < senders:
                    dist.all_gather(list(whole.chunk(senders)), part, group=trainers)
                dist.broadcast(whole, src=0)
                if rank >= senders:
                    (low, high) = self.box[self.dim]
                    part.copy_(whole.narrow(self.dim, low, high - low))
            dist.barrier()
            best = min(best, time.perf_counter() - began)
        dist.destroy_process_group()
        return best


def launch(cluster: Cluster, name: str, place: PlacementStrategy, share: float | None, *arguments: Any) -> WorkerGroup:
    return Part.create_group(*arguments).launch(cluster, place, name=name, share=share, timeout=300)


def measure(link: WeightLink) -> list[float]:
    """Seconds of each update; the first opens everything."""
    reports = [link.update(link.version + 1, timeout=120) for _ in range(1 + ROUNDS)]
    best = min(reports, key=lambda report: report.seconds)
    parts = best.prepare_seconds, best.move_seconds, best.pause_seconds
    print(f"    ms to prepare, to move, paused: {', '.join(f'{1e3 * part:.2f}' for part in parts)}")
    return [report.seconds for report in reports]


def on_host() -> None:
    """Print the figures of one node without a GPU."""
    count, shape = 64, (2048, 4096)
    total = count * shape[0] * shape[1] * 2
    with local_cluster("1x16"), Cluster(num_nodes=1, quiet=True) as cluster:
        actor = launch(cluster, "actor", NodePlacementStrategy([0] * 4), None, count, shape, 0)
        rollout = launch(cluster, "rollout", NodePlacementStrategy([0] * 2), None, count, shape, 1)
        alone = rollout[0].copy_all(ROUNDS).wait(120)[0]
        copied = max(rollout.copy_all(ROUNDS).wait(120))
        print(
            f"{total / 1e9:.2f} GB, FSDP 4 to TP 2, one node; a target copies its half in {1e3 * alone:.0f} ms, "
            f"both at once in {1e3 * copied:.0f} ms"
        )
        for in_place in (False, True):
            link = WeightLink.between(actor, rollout, in_place=in_place)
            first, *rest = measure(link)
            update = min(rest)
            words = "in place" if in_place else "beside"
            print(
                f"  update, {words}: first {first:.2f} s, then {1e3 * update:.0f} ms, "
                f"{copied / update:.2f} of a copy's speed for each target ({alone / update:.2f} of one alone)"
            )
        port = 29555
        both = [(actor, rank, rank) for rank in range(4)] + [(rollout, rank, 4 + rank) for rank in range(2)]
        calls = [group[rank].gather_and_broadcast(place, 6, 4, port, 3) for group, rank, place in both]
        gathered = max(call.wait(300)[0] for call in calls)
        print(f"  gather and broadcast with gloo: {1e3 * gathered:.0f} ms, {gathered / update:.1f} times as long")
        actor.close()
        rollout.close()
        small = 8, (64, 64)
        left = launch(cluster, "left", NodePlacementStrategy([0] * 8), None, *small, 0)
        right = launch(cluster, "right", NodePlacementStrategy([0] * 8), None, *small, 1)
        link = WeightLink.between(left, right)
        seconds = statistics.median(measure(link)[1:])
        bare = []
        for _ in range(3 * ROUNDS):
            began = time.perf_counter()
            one, other = left.nothing(), right.nothing()
            one.wait(60)
            other.wait(60)
            bare.append(time.perf_counter() - began)
        empty = statistics.median(bare)
        print(f"  8 and 8 workers with next to nothing: {1e3 * seconds:.1f} ms, bare calls {1e3 * empty:.1f} ms")


def on_device() -> None:
    """Print the figures of one GPU."""
    count, shape = 300, (5000, 5000)
    total = count * shape[0] * shape[1] * 2
    one = FlexiblePlacementStrategy([[0]])
    with local_cluster("1x1"), Cluster(num_nodes=1, quiet=True) as cluster:
        rollout = launch(cluster, "rollout", one, 0.3, count, shape, 1, "cuda")
        copied = rollout.copy_all(ROUNDS).wait(120)[0]
        print(f"{total / 1e9:.1f} GB of bf16 in {count} tensors; a copy on the device takes {1e3 * copied:.2f} ms")
        for sources in (1, 2):
            place = FlexiblePlacementStrategy([[0]] * sources)
            actor = launch(cluster, f"actor{sources}", place, 0.3, count, shape, 0, "cuda")
            for in_place in (True, False):
                link = WeightLink.between(actor, rollout, in_place=in_place)
                first, *rest = measure(link)
                update = min(rest)
                words = "in place" if in_place else "beside"
                print(
                    f"  from {sources} sources, {words}: first {first:.2f} s, then {1e3 * update:.2f} ms "
                    f"(median {1e3 * statistics.median(rest):.2f}), {update / copied:.2f} of a copy"
                )
            actor.close()


if __name__ == "__main__":
    on_device() if sys.argv[1:] == ["cuda"] else on_host()
