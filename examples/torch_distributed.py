"""torch.distributed over two nodes: `init_process_group` finds its settings in the environment.

    pip install torch
    python examples/torch_distributed.py

A local cluster with fake accelerators needs the gloo backend; on real ones use nccl.
"""

from __future__ import annotations

from roost import Cluster, Worker
from roost.testing import local_cluster


class Trainer(Worker):
    """One rank of a data-parallel job."""

    def __init__(self) -> None:
        super().__init__()
        import torch.distributed as dist

        # MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are set, so no argument is needed.
        dist.init_process_group("gloo")

    def average(self, value: float) -> float:
        """Return the mean over all ranks."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value + self.rank)
        dist.all_reduce(tensor)
        return float(tensor) / self.world_size

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def main() -> None:
    """Launch four ranks, two on each node."""
    with Cluster(num_nodes=2) as cluster:
        trainers = Trainer.create_group().launch(cluster, name="trainer")
        print("nodes:", [placement.cluster_node_rank for placement in trainers.placements])
        print("average:", trainers.average(10.0).wait())
        trainers.leave().wait()


if __name__ == "__main__":
    with local_cluster("2x2"):
        main()
