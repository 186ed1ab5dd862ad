"""A walk through `Cluster`: make it, ask its managers, allocate workers, attach from elsewhere.

    python examples/cluster.py

It runs on a practice cluster of two nodes with four fake accelerators each, which it starts and stops itself. On a
real cluster leave out `local_cluster`, and run it where `ray start` was run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray

from roost import Cluster, CollectiveManager, NodeManager, WorkerManager
from roost.testing import local_cluster


class Trainer:
    """Any class: it needs to know nothing of Roost."""

    def __init__(self, lr: float) -> None:
        # Libraries read the environment when they are imported or made: it is in force by now.
        self.device = os.environ["CUDA_VISIBLE_DEVICES"]
        self.lr = lr

    def describe(self) -> str:
        return f"rank {os.environ['RANK']} sees accelerator {self.device}, lr {self.lr}"

    def attach(self) -> str:
        """Inside a worker, `Cluster()` is the job's own."""
        cluster = Cluster()
        return f"a worker attached to {cluster.namespace!r}: {cluster.num_accelerators} accelerators"


ATTACH = """
from roost import Cluster
with Cluster() as cluster:
    print(f"another process attached to {cluster.namespace!r}: {cluster.num_nodes} nodes")
"""


def main() -> None:
    """Six steps."""
    # 1. Connect to Ray, wait for two nodes, look around on both, start the three managers on node 0.
    with Cluster(num_nodes=2) as cluster:
        for node in cluster.nodes:
            print(f"node {node.rank}: {node.num_accelerators} accelerators, {node.cpus} CPUs, hardware ranks", end=" ")
            print(*cluster.accelerator_ranks[node.rank])

        # 2. The managers hold what everybody in the job may ask for.
        nodes = NodeManager.get_proxy()
        assert nodes.get_nodes() == cluster.nodes
        assert (nodes.get_master_ip(), nodes.get_master_port()) == (cluster.master_address, cluster.master_port)
        print("accelerators on each node:", nodes.get_num_gpus_per_node())

        # 3. One worker on each second accelerator: its node, its accelerator, its environment.
        places = [(node, gpu) for node in range(2) for gpu in (0, 2)]
        workers = [
            cluster.allocate(Trainer, f"trainer:{rank}", node, gpu, {"RANK": str(rank)}, cls_args=[0.1], cls_kwargs={})
            for rank, (node, gpu) in enumerate(places)
        ]
        print(*ray.get([worker.describe.remote() for worker in workers], timeout=60), sep="\n")
        print("workers:", *sorted(worker.address for worker in WorkerManager.get_proxy().get_workers()))

        # 4. A communication group: the address and a port that nobody else in the job has.
        group = CollectiveManager.get_proxy().create_group("train", ["trainer:0", "trainer:1"], node_rank=0)
        assert group.address == cluster.get_node_ip(0)
        assert group.port != cluster.master_port

        # 5. Attach: from a worker, and from another process.
        print(ray.get(workers[0].attach.remote(), timeout=60))
        subprocess.run([sys.executable, "-c", ATTACH], check=True)
    # 6. Here everything that the job started is gone.


if __name__ == "__main__":
    with local_cluster("2x4"):
        main()
