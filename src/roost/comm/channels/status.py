"""The channels of all jobs on a Ray cluster, seen from outside any job."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors

from roost.comm.limits import STATUS_SECONDS
from roost.deadline import Deadline
from roost.errors import RoostError
from roost.runtime.managers.ledgers.workers import GroupRecord
from roost.runtime.managers.worker_manager import WorkerManager
from roost.runtime.status import visit


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeStatus:
    """One home of a channel."""

    address: str
    node: str
    stats: dict[str, Any] | None
    """Its answer; None if it does not answer."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatus:
    """One channel of a job."""

    namespace: str
    name: str
    homes: tuple[HomeStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return asdict(self)


def get_channels(address: str | None = None, timeout: float = 60.0) -> tuple[ChannelStatus, ...]:
    """Return the channels of all jobs on a cluster."""
    with visit(address, timeout) as (_, deadline):
        found: list[tuple[str, GroupRecord]] = []
        named = list_named_actors(all_namespaces=True)
        for namespace in sorted({entry["namespace"] for entry in named if entry["name"] == WorkerManager.NAME}):
            with contextlib.suppress(RoostError):
                groups = WorkerManager.get_proxy(namespace).within(STATUS_SECONDS).get_groups()
                found += [(namespace, group) for group in groups if "channel_stats" in dict(group.methods)]
        calls = [
            (namespace, group, [_ask(namespace, identity.address) for identity in group.identities])
            for namespace, group in found
        ]
        soon = deadline.within(STATUS_SECONDS)
        return tuple(
            ChannelStatus(
                namespace=namespace,
                name=group.name,
                homes=tuple(
                    _home(identity.address, identity.node, call, soon)
                    for identity, call in zip(group.identities, asked, strict=True)
                ),
            )
            for namespace, group, asked in calls
        )


def _ask(namespace: str, address: str) -> Any:
    try:
        actor: Any = ray.get_actor(address, namespace=namespace)
    except ValueError:
        return None
    return actor.channel_stats.remote()


def _home(address: str, node: str, call: Any, deadline: Deadline) -> HomeStatus:
    problem = "it is dead"
    if call is not None:
        try:
            return HomeStatus(address=address, node=node, stats=ray.get(call, timeout=max(0.1, deadline.left)))
        except GetTimeoutError:
            problem = "it does not answer"
        except RayError:
            pass
    return HomeStatus(address=address, node=node, stats=None, problem=problem)
