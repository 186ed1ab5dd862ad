"""Custom hardware: two robots on one node, two processes for each, and a check before anything starts.

python examples/robots.py
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from roost import Cluster, ComponentPlacement, Worker, register_hardware
from roost.testing import local_cluster


@register_hardware("Arm")
@dataclass(frozen=True)
class Arm:
    """The settings of one robot arm."""

    address: str
    port: int

    def check(self) -> None:
        """Check that the arm is reachable; this runs on the arm's node before anything starts."""
        socket.create_connection((self.address, self.port), timeout=5).close()


class Env(Worker):
    """A process that moves one arm."""

    def __init__(self) -> None:
        super().__init__()
        (arm,) = self.hardware
        self.arm = arm.settings

    def move(self) -> str:
        with socket.create_connection((self.arm["address"], self.arm["port"]), timeout=5):
            return f"env {self.rank} on node {self.node_rank} moves the arm at {self.arm['address']}"


def config(port: int) -> dict[str, object]:
    """Return the job: node 1 has two arms, and two processes share each."""
    arms = [{"node_rank": 1, "address": f"127.0.0.{number}", "port": port} for number in (1, 2)]
    group = {"label": "robots", "node_ranks": 1, "hardware": {"type": "Arm", "configs": arms}}
    placement = {"env": {"node_group": "robots", "placement": "0-1:0-3"}}
    return {"cluster": {"num_nodes": 2, "node_groups": [group], "component_placement": placement}}


def main(port: int) -> None:
    """Launch the four processes on the node with the arms."""
    job = config(port)
    with Cluster(cluster_cfg=job["cluster"]) as cluster:
        strategy = ComponentPlacement(job, cluster).get_strategy("env")
        env = Env.create_group().launch(cluster, placement_strategy=strategy, name="env")
        print(*env.move().wait(), sep="\n")


if __name__ == "__main__":
    # A stand-in for the arms: a socket that listens.
    with socket.create_server(("", 0)) as server, local_cluster("1x2,1x0"):
        main(server.getsockname()[1])
