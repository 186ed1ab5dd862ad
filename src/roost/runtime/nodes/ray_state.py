"""Ray's own tables: which actor and which placement group has which part of which accelerator, and who is alive.

Ray's public state API needs the dashboard and does not say which accelerator an actor has. The tables of its head do,
but have no public interface, so this one module uses a private one. Only explanations depend on it, where a holder that
it cannot name is shown as unknown. Names and commands belong to other users: this module makes them safe to show.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util import placement_group_table

from roost.redact import hide_in_text
from roost.runtime.connect.calls import USER_KEY, list_actors
from roost.runtime.connect.head import within
from roost.runtime.limits import ASK_SECONDS
from roost.text import printable

log: logging.Logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_ALIVE = "ALIVE"
"""Ray's name for the state of an actor that is alive."""
_RESTARTING, _DEAD = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A driver that is or was connected to Ray."""

    id: str
    pid: int
    address: str
    entrypoint: str
    namespace: str = ""
    user: str = ""
    """The account that ran it, if it is a driver of Roost."""
    has_ended: bool = False

    def __str__(self) -> str:
        what = f": {self.entrypoint}" if self.entrypoint else ""
        return f"Ray job {self.id} (pid {self.pid} on {self.address}{what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorEntry:
    """An actor that holds accelerators, or parts of some."""

    name: str
    class_name: str
    pid: int
    ray_job: str
    ray_id: str
    """Its node."""
    amounts: Mapping[str, Mapping[int, float]]
    """By resource: how much of which accelerator, by its index on the node."""
    group_id: str
    """Its placement group, or an empty text."""

    def __str__(self) -> str:
        who = f"actor {self.name!r} ({self.class_name}" if self.name else f"an actor ({self.class_name}"
        return f"{who}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """A placement group: what it holds, on which nodes."""

    id: str
    name: str
    bundles: tuple[tuple[str, Mapping[str, float]], ...]
    """The node and the resources of each bundle."""

    @property
    def ray_job(self) -> str:
        """The Ray job that made it, which is the end of its id."""
        return self.id[-8:]

    def __str__(self) -> str:
        return f"placement group {self.name!r}" if self.name else f"placement group {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayState:
    """Ray's tables at one moment."""

    actors: tuple[ActorEntry, ...] = ()
    groups: tuple[GroupEntry, ...] = ()
    jobs: Mapping[str, RayJob] = field(default_factory=dict)
    free: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The free resources of each node, as far as the head knows."""


def read_ray_state() -> RayState:
    """Read the tables; what this version of Ray does not show is left empty."""
    return RayState(
        actors=_tried("its actors", _read_actors, ()),
        groups=_tried("its placement groups", _read_groups, ()),
        jobs=read_jobs(),
        free=_tried("what is free", lambda: _state().available_resources_per_node(), {}),
    )


def read_jobs() -> Mapping[str, RayJob]:
    """Read which drivers are or were connected, by Ray's ids; none if this version of Ray does not show them."""
    return _tried("its jobs", _read_jobs, {})


def name_of_job(ray_job: str) -> str:
    """Return the name under which a driver holds ports and accelerators."""
    return f"Ray job {ray_job}"


def living(names: Collection[str]) -> set[str]:
    """Return which of these names are alive: named actors of this namespace, and drivers.

    A driver counts as alive if Ray does not say.
    """
    drivers = {name for name in names if name.startswith(name_of_job(""))}
    ended = {name_of_job(job.id) for job in (read_jobs() if drivers else {}).values() if job.has_ended}
    return (drivers - ended) | (set(list_actors()) & set(names) if names else set())


def is_known_dead(handle: ActorHandle[Any]) -> bool:
    """Whether Ray has told this process that an actor is dead; only actors that it has called can be known."""
    return _local_state(handle) == _DEAD


def is_restarting(handle: ActorHandle[Any]) -> bool:
    """Whether Ray has told this process that an actor that it has called died and is being restarted."""
    return _local_state(handle) == _RESTARTING


def _local_state(handle: ActorHandle[Any]) -> int | None:
    # There is no public way to ask without a call to Ray's head.
    try:
        return int(handle._get_local_state())  # type: ignore[no-untyped-call]
    except Exception:
        return None


def find_instance(name: str) -> str | None:
    """Return Ray's id of the living actor of this name: another one if it was started again. None if there is none."""
    if not living({name}):
        return None
    try:
        # There is no public way to tell two actors of one name apart.
        return str(within(ASK_SECONDS, lambda: ray.get_actor(name), "find an actor")._actor_id.hex())
    except ValueError:
        return None


def _tried(what: str, read: Callable[[], Answer], nothing: Answer) -> Answer:
    try:
        return within(ASK_SECONDS, read, f"show {what}")
    except Exception as error:
        # A private interface: if another version changes it, messages say less and nothing breaks.
        log.debug("Ray %s does not show %s: %s: %s", ray.__version__, what, type(error).__name__, error)
        return nothing


def _state() -> Any:
    return importlib.import_module("ray._private.state").state


def _tables() -> Any:
    return importlib.import_module("ray.core.generated.gcs_pb2")


def _read_actors() -> tuple[ActorEntry, ...]:
    # Without the dead ones, of which a cluster that has run for long has very many.
    rows = _state()._connect_and_get_accessor().get_actor_table(None, _ALIVE)
    found = []
    for entry in map(_tables().ActorTableData.FromString, rows):
        amounts: dict[str, dict[int, float]] = {}
        for resource in entry.resource_mapping:
            # In a placement group GPU is called GPU_group_<id>, and GPU_group_<bundle>_<id> once more.
            name, _, rest = resource.name.partition("_group_")
            if not rest.count("_"):
                amounts[name] = {int(item.index): float(item.quantity) for item in resource.resource_ids}
        found.append(
            ActorEntry(
                name=printable(entry.name),
                class_name=printable(entry.class_name),
                pid=int(entry.pid),
                ray_job=entry.job_id.hex(),
                ray_id=entry.address.node_id.hex(),
                amounts=amounts,
                group_id=entry.placement_group_id.hex(),
            )
        )
    return tuple(found)


def _read_groups() -> tuple[GroupEntry, ...]:
    found = []
    for group_id, entry in placement_group_table().items():
        if entry["state"] != "REMOVED":
            nodes = entry["bundles_to_node_id"]
            bundles = tuple((nodes.get(index, ""), resources) for index, resources in entry["bundles"].items())
            found.append(GroupEntry(id=group_id, name=printable(entry["name"]), bundles=bundles))
    return tuple(found)


def _read_jobs() -> dict[str, RayJob]:
    accessor = _state()._connect_and_get_accessor()
    rows = accessor.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    return {
        entry.job_id.hex(): RayJob(
            id=entry.job_id.hex(),
            pid=int(entry.driver_pid),
            address=printable(entry.driver_address.ip_address),
            entrypoint=printable(hide_in_text(entry.entrypoint)),
            namespace=entry.config.ray_namespace,
            user=entry.config.metadata.get(USER_KEY, ""),
            has_ended=entry.is_dead,
        )
        for entry in map(_tables().JobTableData.FromString, rows)
    }
