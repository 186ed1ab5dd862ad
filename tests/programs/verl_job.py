"""What a program of verl sees of its pools and worker groups: lines that must be the same on Ray alone and on Roost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from verl.single_controller.ray.base import merge_resource_pool, split_resource_pool


class Role(Worker):
    """A worker that keeps a number and knows its place."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.number = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[object, ...]:
        node = ray.util.get_node_ip_address().rpartition(".")[2]
        return self.rank, self.world_size, node, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("WORD")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["x"] += self.number + self.rank
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, value: int) -> int:
        return self.number + value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise KeyError(f"rank {self.rank}")

    def _hidden(self) -> int:
        return self.rank


class Actor(Role):
    """The role of the same name."""


class Critic(Role):
    """The role of the same name."""


def group_of(pool: RayResourcePool, cls: type = Actor, start: int = 0, **options: object) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), start), device_name="cuda", **options)


def run() -> Iterator[tuple[object, ...]]:
    pool = RayResourcePool([2, 2], max_colocate_count=2)
    actor, critic = group_of(pool), group_of(pool, Critic, 10, worker_env={"WORD": "hello"})
    for group in (actor, critic):
        yield "where", group.where()
        data = DataProto.from_dict({"x": torch.zeros(8, dtype=torch.int64)})
        yield "sum", group.add(data).batch["x"].tolist()
        yield "later", ray.get(group.later(7))
        yield "hidden", group.execute_all_sync("_hidden")
    try:
        actor.fail()
    except KeyError as error:
        yield "failed", isinstance(error, KeyError), "rank" in str(error)
    for placement_group in pool.get_placement_groups():
        ray.util.remove_placement_group(placement_group)

    whole = RayResourcePool([2, 2], max_colocate_count=1)
    roles = {"actor": RayClassWithInitArgs(ray.remote(Actor), 1), "critic": RayClassWithInitArgs(ray.remote(Critic), 2)}
    kinds = (create_colocated_worker_cls, create_colocated_worker_cls_fused)
    for part, make in zip(split_resource_pool(whole, [3, 1]), kinds, strict=True):
        both = RayWorkerGroup(part, make(roles), device_name="cuda").spawn(prefix_set=roles.keys())
        for role in roles:
            yield role, both[role].where(), ray.get(both[role].later(1))
    for placement_group in whole.get_placement_groups():
        ray.util.remove_placement_group(placement_group)

    halves = [RayResourcePool([1], max_colocate_count=3, name_prefix=name) for name in ("left", "right")]
    yield "merged", [place[:2] for place in group_of(merge_resource_pool(*halves)).where()]
    cpus = group_of(RayResourcePool([1], use_gpu=False, max_colocate_count=1), start=5)
    yield "cpus", [place[:2] for place in cpus.where()], ray.get(cpus.later(1))


class Runner:
    """verl's trainer runs in an actor, too."""

    def run(self) -> list[tuple[object, ...]]:
        return list(run())


def main() -> None:
    ray.init(log_to_driver=False)
    lines = ray.get(ray.remote(num_cpus=1)(Runner).remote().run.remote()) if "actor" in sys.argv else run()
    for line in lines:
        # Ray prints remarks of its own on a busy machine.
        print("verl:", *line)
    ray.shutdown()


if __name__ == "__main__":
    main()
