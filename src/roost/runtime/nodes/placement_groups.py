"""A thin wrapper over Ray's placement groups: make them on given nodes, wait for them, probe them, remove them."""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roost.deadline import NEVER, Deadline
from roost.errors import ClusterError
from roost.runtime.connect.calls import get
from roost.runtime.connect.head import within
from roost.runtime.limits import ASK_SECONDS, LOST_LOOK_SECONDS, PROBE_SECONDS, SETTLE_POLL_SECONDS, SETTLE_SECONDS
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.info import NodeInfo

GROUP_PREFIX = "roost:"
"""How the names of placement groups of Roost begin."""

_NODE_LABEL = "ray.io/node-id"
_REFUSED = ("NO_RESOURCES", "INFEASIBLE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A placement group to make: bundles of one accelerator each, on these nodes."""

    resource: str
    node_ranks: tuple[int, ...]
    """The node of each bundle."""
    cpus: int
    """In each bundle, for the tasks that a worker starts."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """As Ray takes them."""
        return [{self.resource: 1, **({"CPU": self.cpus} if self.cpus else {})} for _ in self.node_ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One bundle of a placement group that is placed."""

    group: PlacementGroup
    index: int
    ray_id: str
    """The node that it is on."""


def make_group(ask: Ask, namespace: str, nodes: Sequence[NodeInfo]) -> PlacementGroup:
    """Ask Ray for a placement group without waiting. `nodes` are all of the cluster, by rank."""
    made: PlacementGroup = placement_group(
        ask.bundles,
        # Names are unique in a namespace, and are what other jobs see.
        name=f"{GROUP_PREFIX}{namespace}:{secrets.token_hex(8)}",
        bundle_label_selector=[{_NODE_LABEL: nodes[rank].ray_id} for rank in ask.node_ranks],
    )
    return made


def read_group(group: PlacementGroup) -> dict[str, Any]:
    """Return what Ray's table says about a placement group."""
    return within(ASK_SECONDS, lambda: placement_group_table(group), "read its placement groups")


def settle(groups: Iterable[PlacementGroup], until: Deadline = NEVER) -> dict[PlacementGroup, list[Bundle]]:
    """Wait until Ray has placed or refused each group, or to a deadline; return the bundles of those it placed."""
    placed: dict[PlacementGroup, list[Bundle]] = {}
    waiting = list(groups)
    deadline = until.within(SETTLE_SECONDS)
    pause = SETTLE_POLL_SECONDS[0]
    while waiting and not deadline.is_over:
        still = []
        for group in waiting:
            entry = read_group(group)
            if entry.get("state") == "CREATED":
                nodes = entry["bundles_to_node_id"]
                placed[group] = [Bundle(group=group, index=index, ray_id=nodes[index]) for index in sorted(nodes)]
            elif entry.get("state") != "REMOVED" and entry.get("stats", {}).get("scheduling_state") not in _REFUSED:
                still.append(group)
        waiting = still
        if waiting:
            time.sleep(pause)
            pause = min(SETTLE_POLL_SECONDS[1], 2 * pause)
    return placed


def remove_groups(groups: Iterable[PlacementGroup]) -> None:
    """Remove placement groups; one that is gone already does not matter."""
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def probe(
    bundles: Mapping[Bundle, str], nodes: Sequence[NodeInfo], until: Deadline = NEVER
) -> dict[Bundle, str | None]:
    """Return the device of each bundle's accelerator (bundle -> resource); None if Ray has no ids for that resource.

    Errors name the nodes of the cluster, `nodes`; ClusterError for one that does not answer by the deadline.

    The tasks of one node run one after another, so that one process runs them all: a process takes half a second to
    start, a task a millisecond.
    """
    deadline = until.within(PROBE_SECONDS)
    seconds = deadline.left
    names = {node.ray_id: str(node) for node in nodes}
    calls: dict[Bundle, Any] = {}
    last: dict[str, Any] = {}
    for bundle, resource in bundles.items():
        # A task waits for its argument, which is the result of the one before it on its node.
        task = _probe_task(resource).options(scheduling_strategy=schedule_in(bundle.group, bundle.index))
        calls[bundle] = last[bundle.ray_id] = task.remote(resource, last.get(bundle.ray_id))
    found: dict[Bundle, str | None] = {}
    for bundle, call in calls.items():
        name = names.get(bundle.ray_id, bundle.ray_id)
        while True:
            try:
                ray_id, device = get(call, min(LOST_LOOK_SECONDS, deadline.left))
                break
            except GetTimeoutError:
                # If its node dies, Ray would wait for another to take the bundle.
                if all(node.ray_id != bundle.ray_id for node in live_nodes()):
                    raise ClusterError(f"{name} died while its accelerators were reserved") from None
                if deadline.is_over:
                    raise ClusterError(f"an accelerator of {name} was not probed in {seconds:.0f} s") from None
            except RayError as error:
                why = " ".join(str(error).split())[:300]
                raise ClusterError(f"the probe of an accelerator of {name} failed: {why}") from None
        if ray_id != bundle.ray_id:
            raise ClusterError(f"Ray put a bundle on {name}, but its probe ran on {names.get(ray_id, ray_id)}")
        found[bundle] = device
    return found


def schedule_in(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Schedule a process into a bundle, with the tasks that it starts."""
    return PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
    )


def take_share(resource: str, amount: float) -> dict[str, Any]:
    """Return the options by which an actor or task takes part of an accelerator."""
    return {"num_gpus": amount} if resource == "GPU" else {"num_gpus": 0, "resources": {resource: amount}}


def _read_device(resource: str, _before: object) -> tuple[str, str | None]:
    """Return the node of this task, and its accelerator."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(resource)
    return context.get_node_id(), devices[0] if devices else None


@functools.cache
def _probe_task(resource: str) -> Any:
    # Without max_calls=0 Ray ends the process after every task that was given a GPU.
    return ray.remote(num_cpus=0, max_calls=0, max_retries=0, **take_share(resource, 1))(_read_device)
