"""Ten lines: a worker on every accelerator reports where it runs. Run `python examples/hello.py`."""

from roost import Cluster, Worker
from roost.testing import local_cluster


class Hello(Worker):
    """One process for each accelerator."""

    def hello(self) -> str:
        return f"rank {self.rank} of {self.world_size} sits on node {self.node_rank} and sees {self.devices}"


if __name__ == "__main__":
    with local_cluster("2x2"), Cluster(num_nodes=2) as cluster:
        group = Hello.create_group().launch(cluster, name="hello")
        print(*group.hello().wait(), sep="\n")
