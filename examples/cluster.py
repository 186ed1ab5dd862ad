"""A tour of `Cluster`: create it, query its managers, allocate workers, attach from other processes.

    python examples/cluster.py

It starts and stops a local cluster of two nodes with four fake accelerators each. On a real cluster, remove
`local_cluster` and run the script on a node where `ray start` has been run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray

from roost import Cluster, CollectiveManager, NodeManager, WorkerManager
from roost.testing import local_cluster


class Trainer:
    """Any class; it does not need to know Roost."""

    def __init__(self, lr: float) -> None:
        # Libraries read the environment on import or construction; it is set by now.
        self.device = os.environ["CUDA_VISIBLE_DEVICES"]
        self.lr = lr

    def describe(self) -> str:
        return f"rank {os.environ['RANK']} sees accelerator {self.device}, lr {self.lr}"

    def attach(self) -> str:
        """Inside a worker, `Cluster()` returns the job's cluster."""
        cluster = Cluster()
        return f"a worker attached to {cluster.namespace!r}: {cluster.num_accelerators} accelerators"


ATTACH = """
from roost import Cluster
with Cluster() as cluster:
    print(f"another process attached to {cluster.namespace!r}: {cluster.num_nodes} nodes")
"""


def main() -> None:
    """Run the six steps."""
    # 1. Connect to Ray, wait for two nodes, discover their hardware, start the three managers on node 0.
    with Cluster(num_nodes=2) as cluster:
        for node in cluster.nodes:
            print(f"node {node.rank}: {node.num_accelerators} accelerators, {node.cpus} CPUs, hardware ranks", end=" ")
            print(*cluster.accelerator_ranks[node.rank])

        # 2. Any process of the job can query the managers.
        nodes = NodeManager.get_proxy()
        assert nodes.get_nodes() == cluster.nodes
        assert (nodes.get_master_ip(), nodes.get_master_port()) == (cluster.master_address, cluster.master_port)
        print("accelerators on each node:", nodes.get_num_gpus_per_node())

        # 3. Allocate a worker on every second accelerator: its node, its accelerator, its environment.
        places = [(node, gpu) for node in range(2) for gpu in (0, 2)]
        workers = [
            cluster.allocate(Trainer, f"trainer:{rank}", node, gpu, {"RANK": str(rank)}, cls_args=[0.1], cls_kwargs={})
            for rank, (node, gpu) in enumerate(places)
        ]
        print(*ray.get([worker.describe.remote() for worker in workers], timeout=60), sep="\n")
        print("workers:", *sorted(worker.address for worker in WorkerManager.get_proxy().get_workers()))

        # 4. Create a communication group: an address, and a port that no other part of the job uses.
        group = CollectiveManager.get_proxy().create_group("train", ["trainer:0", "trainer:1"], node_rank=0)
        assert group.address == cluster.get_node_ip(0)
        assert group.port != cluster.master_port

        # 5. Attach from a worker, and from another process.
        print(ray.get(workers[0].attach.remote(), timeout=60))
        subprocess.run([sys.executable, "-c", ATTACH], check=True)
    # 6. Closing the cluster has stopped everything that the job started.


if __name__ == "__main__":
    with local_cluster("2x4"):
        main()
