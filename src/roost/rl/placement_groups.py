"""`create_placement_groups`: one placement group for training and rollout, with its bundles in a stable order.

`InfoActor` and `sort_key` are what the documents make that order of: which accelerator a bundle is, and its place.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from roost.errors import ConfigError
from roost.placement.strategies import FlexiblePlacementStrategy
from roost.rl.flags import CRITIC, ROLLOUT, TRAIN, read_flags
from roost.runtime.cluster import Cluster
from roost.runtime.managers.ledgers.reservations import Slot
from roost.runtime.options import RESERVE_SECONDS
from roost.runtime.reserve.reservation import Reservation, check_timeout
from roost.runtime.reserve.reserver import Reserver
from roost.text import plural, shorten

BundleGroup = tuple[PlacementGroup | None, list[int]]


class PlacementGroups(dict[str, BundleGroup], AbstractContextManager["PlacementGroups"]):
    """`actor` and `rollout`, with `use_critic` also `critic`: each a placement group and its bundle indices in order.

    `close()` releases them. Where nothing is reserved, as for a router alone, there is no placement group.
    """

    def __init__(self, reservation: Reservation, groups: dict[str, BundleGroup]) -> None:
        super().__init__(groups)
        self.reservation = reservation

    def close(self) -> None:
        """Release the accelerators, unless a group still uses them."""
        self.reservation.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def create_placement_groups(
    args: object, cluster: Cluster | None = None, *, timeout: float = RESERVE_SECONDS
) -> PlacementGroups:
    """Reserve what the flags ask for: bundles of one accelerator and one CPU, ordered by node and accelerator.

    It takes the first accelerators of the cluster, as a plan does, or whichever are free if another job has some of
    them. The indices of `rollout` begin where those of the training end, or are the same where both share; those of
    `critic` are those of `actor`.
    """
    flags = read_flags(args)
    check_timeout(timeout)
    cluster = cluster or Cluster()
    if flags.num_gpus > cluster.num_accelerators:
        asked = f"{plural(flags.num_gpus, 'accelerator')} ({flags.mode})"
        hint = "lower actor_num_nodes, actor_num_gpus_per_node or rollout_num_gpus, or colocate"
        raise ConfigError(f"the flags ask for {asked}, and the cluster has {cluster.num_accelerators}", hint=hint)
    user = f"{flags.mode}#{secrets.token_hex(4)}"
    slots = Reserver(cluster.context, user, timeout).reserve_any(flags.num_gpus) if flags.num_gpus else []
    group, indices = slots[0].group if slots else None, [slot.bundle for slot in slots]
    groups = {TRAIN: (group, indices), ROLLOUT: (group, indices[flags.rollout_offset :])}
    if flags.use_critic:
        groups[CRITIC] = groups[TRAIN]
    return PlacementGroups(Reservation(cluster.context, user, slots), groups)


def slots_of(cluster: Cluster, bundles: BundleGroup, count: int) -> list[Slot]:
    """Return the first slots of a bundle group, as measured; ConfigError if this job has not reserved them."""
    if not (isinstance(bundles, tuple) and len(bundles) == 2 and isinstance(bundles[0], PlacementGroup | None)):
        hint = 'it is what create_placement_groups(args)["actor"] or ["rollout"] is'
        raise ConfigError(f"pg is {shorten(repr(bundles))}", hint=hint)
    group, indices = bundles
    if not count:
        hint = "debug_train_only has no engines, debug_rollout_only no training"
        raise ConfigError("the flags ask for no accelerators on this side", hint=hint)
    if count > len(indices):
        asked, hint = plural(count, "accelerator"), "make it from the same flags: create_placement_groups(args)"
        raise ConfigError(f"the flags ask for {asked}, and the bundle group has {len(indices)}", hint=hint)
    known: dict[Any, Slot] = {
        (held.slot.group, held.slot.bundle): held.slot for held in cluster.node_manager.get_slots()
    }
    try:
        return [known[group, index] for index in indices[:count]]
    except KeyError:
        hint = "make it with create_placement_groups(args)"
        raise ConfigError("this job has not reserved the placement group", hint=hint) from None


def strategy_of(cluster: Cluster, processes: Sequence[Sequence[Slot]]) -> FlexiblePlacementStrategy:
    """Place one process on each list of slots, in order."""
    space = cluster.topology.space()
    return FlexiblePlacementStrategy(
        [[space.rank_of(slot.piece.node_rank, slot.piece.local_rank) for slot in slots] for slots in processes]
    )


@ray.remote(num_gpus=1, num_cpus=0)
class InfoActor:
    """The documents' probe, one process per bundle; `create_placement_groups` needs only one per node."""

    def get_ip_and_gpu_id(self) -> tuple[str, int | str]:
        """Return the node's address, as Ray knows it, and the id of the bundle's accelerator, as Ray gives it."""
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address, ray.get_gpu_ids()[0]


def sort_key(x: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key to sort `(index, node, gpu_id)` by, as the documents have it: the address as numbers, and the id.

    A host name sorts by the address that it resolves to, or else by its characters. A fourth entry, such as Ray's id
    for the node, separates nodes that share an address.

    >>> sort_key((0, "10.0.0.9", 3))
    ([10, 0, 0, 9], 3)
    >>> found = [(0, "10.0.0.10", 0), (1, "10.0.0.9", 10), (2, "10.0.0.9", 9)]
    >>> [index for index, _, _ in sorted(found, key=sort_key)]
    [2, 1, 0]
    """
    _, node, gpu_id, *which = x
    for find in (str, socket.gethostbyname):
        with contextlib.suppress(OSError, ValueError):
            return ([int(part) for part in find(node).split(".")], *which, gpu_id)
    return ([ord(character) for character in str(node)], *which, gpu_id)
