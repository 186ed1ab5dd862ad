"""torch.distributed over two nodes: `collective` returns a process group, ready to use.

    pip install torch
    python examples/torch_distributed.py

Without GPUs that torch can see the backend is gloo, and with them nccl.
"""

from __future__ import annotations

from roost import Cluster, Worker
from roost.testing import local_cluster


class Trainer(Worker):
    """One rank of a data-parallel job."""

    def average(self, value: float) -> float:
        """Return the mean over all ranks."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value + self.rank)
        dist.all_reduce(tensor, group=self.collective("trainer"))
        return float(tensor) / self.world_size


def main() -> None:
    """Launch four ranks, two on each node."""
    with Cluster(num_nodes=2) as cluster:
        trainers = Trainer.create_group().launch(cluster, name="trainer")
        print("nodes:", [placement.cluster_node_rank for placement in trainers.placements])
        print("average:", trainers.average(10.0).wait())


if __name__ == "__main__":
    with local_cluster("2x2"):
        main()
