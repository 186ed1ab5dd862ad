"""What other users of a cluster hold: actors that Roost did not start, and what they leave free."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost import Cluster
from roost.runtime.reserve.occupancy import find_holdings
from waiting import wait_until


@ray.remote(num_cpus=0)
class Foreign:
    """An actor of another user, which takes accelerators as Ray gives them."""

    def devices(self) -> list[int]:
        return [int(device) for device in ray.get_gpu_ids()]


def foreign(cluster: Cluster, node_rank: int, amount: float = 1, name: str | None = None) -> ray.actor.ActorHandle:
    strategy = NodeAffinitySchedulingStrategy(cluster.nodes[node_rank].ray_id, soft=False)
    return Foreign.options(num_gpus=amount, name=name, scheduling_strategy=strategy).remote()


def free_devices(cluster: Cluster, node_rank: int, count: int) -> set[int]:
    """The accelerators of a node that are free, found by taking all of them once Ray's head counts `count`."""
    wait_until(lambda: find_holdings(cluster.nodes).free[node_rank] == count, "Ray's head knows what is free")
    if not count:
        return set()
    actor = foreign(cluster, node_rank, count)
    found = set(ray.get(actor.devices.remote(), timeout=60))
    ray.kill(actor)
    return found


def all_is_free(cluster: Cluster) -> bool:
    holdings = find_holdings(cluster.nodes)
    return not holdings.by_piece and not holdings.somewhere
