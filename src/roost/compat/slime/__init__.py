"""slime on Roost: its accelerators are reserved, and its training ranks and its rollout manager are workers of groups.

slime's own code decides how many accelerators it takes and what each of its actors is given; Roost makes them. Import
this module in the place of `slime.ray.placement_group`. slime's engines stay Ray actors that its rollout manager
starts, on the accelerators that Roost reserved.
"""

from __future__ import annotations

import functools
import importlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from ray.actor import ActorHandle

from roost.compat import load_theirs
from roost.compat.job import own_job
from roost.compat.limits import START_SECONDS
from roost.compat.slime import arguments as arguments
from roost.errors import ConfigError
from roost.placement.strategies import NodePlacementStrategy, PlacementStrategy
from roost.rl.manager import MANAGER
from roost.rl.placement_groups import slots_of, strategy_of
from roost.runtime.groups.group import WorkerGroup
from roost.runtime.options import RESERVE_SECONDS
from roost.runtime.reserve.reserver import Reserver
from roost.runtime.worker import group_of
from roost.text import join_words

REPLACES: dict[str, str] = {
    "slime.ray.placement_group": __name__,
    "slime.ray.actor_group": __name__,
    "slime.utils.arguments": f"{__name__}.arguments",
}
TRIED: tuple[str, ...] = ("0.3.1",)
"""The main branch of August 2026 at 624b824, which calls itself 0.3.1. No release was tried."""
_KNOWN_OPTIONS = frozenset({"num_cpus", "num_gpus", "runtime_env", "scheduling_strategy"})


def __getattr__(name: str) -> Any:
    """Return what slime's modules have under the name, made by Roost as far as it starts processes."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_actor_group() if name == "RayTrainGroup" else _placement_group(), name)


@functools.cache
def _placement_group() -> Any:
    """Return a copy of `slime.ray.placement_group` that reserves and launches through Roost."""
    module = load_theirs("slime.ray.placement_group", "_create_placement_group", "create_rollout_manager")
    create = module.create_rollout_manager

    def create_rollout_manager(args: Any, pg: Any) -> tuple[ActorHandle[Any], int | None]:
        """Start the rollout manager, and through it the engines; return it and how many rollouts an epoch has."""
        rollout: Any = importlib.import_module("slime.ray.rollout")
        # slime's function imports it from there.
        if not isinstance(rollout.RolloutManager, _Manager):
            rollout.RolloutManager = _Manager(rollout.RolloutManager)
        found: tuple[ActorHandle[Any], int | None] = create(args, pg)
        return found

    module._create_placement_group = _reserve
    module.RayTrainGroup = _actor_group().RayTrainGroup
    module.create_rollout_manager = create_rollout_manager
    return module


@functools.cache
def _actor_group() -> SimpleNamespace:
    """Return slime's `RayTrainGroup` as a class whose ranks are the workers of one group."""
    module = load_theirs("slime.ray.actor_group", "RayTrainGroup")
    theirs: Any = module.RayTrainGroup

    class RayTrainGroup(theirs):  # type: ignore[misc]
        """slime's group of training ranks, on the accelerators of `pg` in order."""

        group: WorkerGroup[Any]
        _actor_handlers: list[ActorHandle[Any]]

        def _allocate_gpus_for_actor(self, pg: Any, num_gpus_per_actor: float) -> None:
            module.ray = _Ray(self, pg)
            super()._allocate_gpus_for_actor(pg, num_gpus_per_actor)

        def release(self) -> None:
            """End the ranks; `create` starts them again."""
            if self._actor_handlers:
                self._actor_handlers = []
                self.group.close()

    return SimpleNamespace(RayTrainGroup=RayTrainGroup)


class _Ray:
    """`ray` as slime sees it where it makes its ranks: the first one launches them all, as one group."""

    def __init__(self, train: Any, pg: tuple[Any, Sequence[int], Sequence[str]]) -> None:
        self._train, (self._pg, self._indices, _) = train, pg

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def remote(self, **options: Any) -> Callable[[type], Any]:
        """Stand in for `ray.remote(**options)(cls).options(**more).remote(world_size, rank, address, port)`."""

        def make(cls: type) -> Any:
            def add(**more: Any) -> Any:
                return SimpleNamespace(remote=functools.partial(self._start, cls, {**options, **more}))

            return SimpleNamespace(options=add)

        return make

    def _start(self, cls: type, options: dict[str, Any], world_size: int, rank: int, *_: Any) -> ActorHandle[Any]:
        if rank == 0:
            cluster = own_job()
            slots = slots_of(cluster, (self._pg, list(self._indices)), world_size)
            strategy = strategy_of(cluster, [[slot] for slot in slots])
            role = getattr(self._train, "role", "actor")
            self._train.group = _launch(_rank_of(cls), (), role, strategy, options, share=options["num_gpus"])
        handle: ActorHandle[Any] = self._train.group.actor_handles[rank]
        return handle


def _rank_of(cls: Any) -> type:
    """Return a class of slime's whose constructor takes the rank and the rendezvous that Roost set in the process."""

    class Rank(cls):  # type: ignore[misc]
        def __init__(self) -> None:
            master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            super().__init__(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), *master)

    Rank.__module__, Rank.__name__, Rank.__qualname__ = cls.__module__, cls.__name__, cls.__qualname__
    return Rank


class _Manager:
    """slime's class `RolloutManager`, with the two methods that slime starts it with."""

    def __init__(self, theirs: Any, options: Mapping[str, Any] | None = None) -> None:
        self._theirs, self._options = theirs, options or {}

    def options(self, **options: Any) -> _Manager:
        return _Manager(self._theirs, options)

    def remote(self, *args: Any) -> ActorHandle[Any]:
        # Ray has no public way from an actor class to the class that it was made of.
        cls = self._theirs.__ray_metadata__.modified_class
        return _launch(cls, args, MANAGER, NodePlacementStrategy([0]), self._options).actor_handles[0]


def _launch(
    cls: type,
    args: Sequence[Any],
    name: str,
    strategy: PlacementStrategy,
    options: Mapping[str, Any],
    share: float | None = None,
) -> WorkerGroup[Any]:
    """Launch what slime would make a Ray actor of with these options; ConfigError for one that Roost has not."""
    runtime_env = dict(options.get("runtime_env") or {})
    variables = runtime_env.pop("env_vars", {})
    if unknown := [*sorted(options.keys() - _KNOWN_OPTIONS), *(f"runtime_env[{key!r}]" for key in runtime_env)]:
        what = f"slime starts {name!r} with {join_words(unknown)}, which Roost does not pass to Ray"
        raise ConfigError(what, hint="leave out the flag that asks for it, such as --rollout-data-transport nixl")
    # slime finds its device among all those of the node, and hands out memory of one that others open.
    return group_of(cls, *args).launch(
        own_job(),
        placement_strategy=strategy,
        name=name,
        isolate_accelerator=False,
        env_vars={key: str(value) for key, value in variables.items()},
        share=share,
        timeout=START_SECONDS,
    )


def _reserve(num_gpus: int) -> tuple[Any, list[int], list[str]]:
    """Reserve accelerators: their placement group, and in the order of nodes and accelerators the bundles and devices.

    The first ones of the cluster are taken, or whichever are free.
    """
    if num_gpus == 0:
        return None, [], []
    cluster = own_job()
    slots = Reserver(cluster.context, f"slime#{secrets.token_hex(4)}", RESERVE_SECONDS).reserve_any(num_gpus)
    return slots[0].group, [slot.bundle for slot in slots], [slot.device for slot in slots]
