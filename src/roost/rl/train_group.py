"""`RayTrainGroup`: one training actor for each rank, in a stable order, called together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ray.actor import ActorHandle

from roost.comm.worker import Worker
from roost.rl.flags import TRAIN, read_flags
from roost.rl.placement_groups import BundleGroup, slots_of, strategy_of
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import LAUNCH_SECONDS, WorkerGroup
from roost.runtime.groups.result import CallResult


class RayTrainGroup(AbstractContextManager["RayTrainGroup"]):
    """The training side: rank r is on the r-th bundle, and every rank has rank 0's MASTER_ADDR and MASTER_PORT.

    - `args`: the flags, of which `num_gpus_per_actor` is the part of an accelerator that each rank takes.
    - `actor_cls`: a `Worker` with those of init, train, eval, save, update, offload and onload that you call.
    - `pg`: `create_placement_groups(args)["actor"]`.

    Its methods call all ranks together and return a `CallResult`; `group` is the `WorkerGroup` behind it.
    """

    def __init__(
        self,
        args: object,
        actor_cls: type[Worker],
        pg: BundleGroup,
        *,
        num_gpus_per_actor: float | None = None,
        cluster: Cluster | None = None,
        name: str = TRAIN,
        actor_args: Sequence[Any] = (),
        actor_kwargs: Mapping[str, Any] | None = None,
        env_vars: Mapping[str, str] | None = None,
        max_concurrency: int | None = None,
        restarts: int = 0,
        timeout: float = LAUNCH_SECONDS,
    ) -> None:
        flags = read_flags(args)
        cluster = cluster or Cluster()
        slots = slots_of(cluster, pg, flags.train_num_gpus)
        self.group: WorkerGroup[Any] = actor_cls.create_group(*actor_args, **(actor_kwargs or {})).launch(
            cluster,
            placement_strategy=strategy_of(cluster, [[slot] for slot in slots]),
            name=name,
            share=flags.num_gpus_per_actor if num_gpus_per_actor is None else num_gpus_per_actor,
            env_vars=env_vars,
            max_concurrency=max_concurrency,
            restarts=restarts,
            timeout=timeout,
        )

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.group.world_size

    @property
    def _actor_handlers(self) -> list[ActorHandle[Any]]:
        """The Ray actors by rank, under the name that the documents use."""
        return self.group.actor_handles

    def init(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `init` on every rank."""
        return self.group.call("init", *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `train` on every rank."""
        return self.group.call("train", *args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `eval` on every rank."""
        return self.group.call("eval", *args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `save` on every rank."""
        return self.group.call("save", *args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `update` on every rank."""
        return self.group.call("update", *args, **kwargs)

    def offload(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `offload` on every rank: free the accelerators' memory for a while."""
        return self.group.call("offload", *args, **kwargs)

    def onload(self, *args: Any, **kwargs: Any) -> CallResult[Any]:
        """Call `onload` on every rank: take the memory back."""
        return self.group.call("onload", *args, **kwargs)

    def close(self) -> None:
        """End every rank."""
        self.group.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.world_size
