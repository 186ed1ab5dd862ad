"""verl on Roost: its resource pools are pools of reserved seats, and its worker groups are groups of Roost's workers.

verl's own code decides what its workers are and how calls are spread over them; Roost places, starts and watches them.
Import this module in the place of `verl.single_controller.ray`. Detached workers are refused: nothing outlives the job.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from roost.compat import load_theirs, tell
from roost.compat.job import own_job
from roost.errors import ConfigError
from roost.placement.strategies import NodePlacementStrategy
from roost.runtime.groups.group import GroupDraft, WorkerGroup
from roost.runtime.reserve.occupancy import find_holdings
from roost.runtime.reserve.pool import Pool
from roost.text import join_words

_REPLACED = "verl.single_controller.ray.base"
REPLACES: dict[str, str] = {_REPLACED: __name__}
TRIED: tuple[str, ...] = ("0.9.1",)
_NEEDED = ("RayResourcePool", "SubRayResourcePool", "RayWorkerGroup", "RayClassWithInitArgs", "_unwrap_ray_remote")
_KNOWN_OPTIONS = frozenset({"name", "runtime_env", "max_concurrency", "num_cpus", "num_gpus"})


def __getattr__(name: str) -> Any:
    """Return what `verl.single_controller.ray.base` has under the name, on Roost as far as it places and starts."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_base(), name)


class _PlacementGroups(list[PlacementGroup]):
    """A pool as verl passes it around: Ray's placement groups, and the seats of Roost behind them."""

    def __init__(self, seats: Pool) -> None:
        super().__init__(seats.placement_groups)
        self.seats = seats

    def __add__(self, other: Any) -> Any:
        return _PlacementGroups(self.seats + other.seats)


@functools.cache
def _base() -> Any:
    """Return a copy of verl's module whose pools and worker groups are Roost's."""
    module: Any = load_theirs(_REPLACED, *_NEEDED)
    tell("verl", _REPLACED, TRIED)

    class RayResourcePool(module.RayResourcePool):  # type: ignore[misc]
        """verl's pool of processes on nodes, reserved when its placement groups are first asked for."""

        pgs: _PlacementGroups | None

        def get_placement_groups(self, *_: Any, **__: Any) -> list[PlacementGroup]:
            if self.pgs is None:
                self.pgs = _PlacementGroups(_reserve(self))
            return self.pgs

    class SubRayResourcePool(module.SubRayResourcePool, RayResourcePool):  # type: ignore[misc]
        """A part of a pool, as `split_resource_pool` makes it."""

    class RayWorkerGroup(module.RayWorkerGroup):  # type: ignore[misc]
        """verl's worker group over the workers of one group of Roost, which is `group`."""

        group: WorkerGroup[Any]
        _master_addr: str | None
        _master_port: str | None

        def _init_with_resource_pool(self, resource_pool: Any, *args: Any, **kwargs: Any) -> None:
            self.resource_pool = resource_pool
            self._init_with_subresource_pool(resource_pool, *args, **kwargs)

        def _init_with_subresource_pool(
            self,
            resource_pool: Any,
            ray_cls_with_init: Any,
            bin_pack: bool = True,  # noqa: ARG002 - seats are always packed
            detached: bool = False,
            worker_env: Mapping[str, str] | None = None,
        ) -> None:
            if detached:
                raise _is_detached("workers")
            if self.use_gpu and not resource_pool.use_gpu:
                raise ValueError("use_gpu is True but resource_pool.use_gpu is False")
            self.group = _launch(self, resource_pool, ray_cls_with_init, worker_env or {})
            self._world_size = self.group.world_size
            self._workers = list(self.group.actor_handles)
            self._worker_names = [f"{self.group.name}:{rank}" for rank in self.group.ranks]
            self._master_addr, self._master_port = ray.get(self._workers[0].get_master_addr_port.remote())

        def _init_with_detached_workers(self, worker_names: Any, worker_handles: Any) -> None:
            if not worker_handles:
                raise _is_detached("workers")
            super()._init_with_detached_workers(worker_names=worker_names, worker_handles=worker_handles)

        def __deepcopy__(self, memo: Any) -> Any:
            """Copy what a group that verl spawns from this one has of its own; the workers are the same."""
            made = copy.copy(self)
            made._dispatch_info, made._collect_info = dict(self._dispatch_info), dict(self._collect_info)
            return made

    for cls in (RayResourcePool, SubRayResourcePool, RayWorkerGroup):
        # So that they are pickled by name: code of the main program takes them along into an actor.
        cls.__qualname__ = cls.__name__
    # verl's own functions find these there.
    module.RayResourcePool, module.SubRayResourcePool = RayResourcePool, SubRayResourcePool
    module.RayWorkerGroup = RayWorkerGroup
    return module


def _reserve(pool: Any) -> Pool:
    """Reserve the seats of verl's pool, each entry of which is a number of processes that share a node."""
    if pool.detached:
        raise _is_detached("resource pools")
    if pool.accelerator_type is not None:
        hint = "leave out accelerator_type, or let the Ray cluster have only those nodes"
        raise ConfigError(
            f"the pool asks for accelerator_type={pool.accelerator_type!r}, which Roost cannot", hint=hint
        )
    cluster, store = own_job(), list(pool.store)
    # The sum is what the error says.
    has = [node.num_accelerators for node in cluster.nodes]
    if not pool.use_gpu:
        nodes = [rank % len(has) for rank, count in enumerate(store) for _ in range(count)]
        return cluster.reserve_seats(NodePlacementStrategy(nodes), name=pool.name_prefix)
    free = [piece.node_rank for piece in find_holdings(cluster.nodes).free_pieces(cluster.nodes)]
    counts = _fit(store, [free.count(rank) for rank in range(len(has))]) or _fit(store, has)
    if counts is None:
        raise ConfigError(
            f"the pool asks for {store} accelerators, each on one node, and the nodes have {has}",
            hint="lower n_gpus_per_node or nnodes",
        )
    return cluster.reserve_seats(counts, name=pool.name_prefix)


def _fit(store: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """Put each number on the first node that has room for it; return how many each node gets, or None.

    >>> _fit([2, 2, 4], [4, 4]), _fit([3, 3], [4, 4]), _fit([5], [4, 4])
    ([4, 4], [3, 3], None)
    """
    counts = [0] * len(room)
    for wanted in store:
        node = next((rank for rank, have in enumerate(room) if counts[rank] + wanted <= have), None)
        if node is None:
            return None
        counts[node] += wanted
    return counts


def _launch(wanted: Any, pool: Any, init: Any, worker_env: Mapping[str, str]) -> WorkerGroup[Any]:
    """Launch the workers that verl would make Ray actors of; ConfigError for what Roost does not pass to Ray."""
    seats = pool.get_placement_groups().seats
    if hasattr(pool, "start_bundle_index"):
        seats = seats[pool.start_bundle_index : pool.start_bundle_index + pool.world_size]
    options, runtime_env = dict(init._options), dict(init._options.get("runtime_env", {}))
    variables = {"WG_PREFIX": wanted.name_prefix, "WG_BACKEND": "ray", "RAY_LOCAL_WORLD_SIZE": str(pool.store[0])}
    if wanted._master_addr is not None:
        variables |= {"MASTER_ADDR": wanted._master_addr, "MASTER_PORT": str(wanted._master_port)}
    given = {**runtime_env.pop("env_vars", {}), **worker_env}
    unknown = sorted({*options.keys() - _KNOWN_OPTIONS, *runtime_env, *init._additional_resource})
    if wanted.profile_steps and wanted.device_name == "cuda":
        unknown.append("nsight")
    if unknown:
        raise ConfigError(f"verl starts workers with {join_words(unknown)}, which Roost does not pass to Ray")
    if both := sorted({"RANK", "WORLD_SIZE", *variables} & given.keys()):
        raise ValueError(f"Cannot override protected system env: {set(both)}")
    cls = _base()._unwrap_ray_remote(init.cls)
    # verl calls some methods that begin with an underscore.
    members = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("__")}
    methods = {name: member for name, member in members.items() if inspect.isroutine(member)}
    cluster, name = own_job(), f"{wanted.name_prefix}{cls.__name__}"
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return GroupDraft(cls, methods, init.args, init.kwargs, is_top=True).launch(
        cluster,
        seats.strategy(share=1 / pool.max_colocate_count if wanted.use_gpu else None),
        name=next(free for free in itertools.chain([name], numbered) if free not in cluster.context.open_groups),
        env_vars=variables | {key: str(value) for key, value in given.items()},
        max_concurrency=options.get("max_concurrency"),
    )


def _is_detached(what: str) -> ConfigError:
    return ConfigError(
        f"verl asks for detached {what}, and nothing of Roost outlives its job",
        hint="leave out detached=True; another process of the job finds a group with WorkerGroup.attach(name)",
    )
