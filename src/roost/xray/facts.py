"""Facts about a Ray cluster: what was seen, before anything is concluded from it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from roost.config.hardware import accelerator_types
from roost.redact import hide, hide_in_text
from roost.text import printable_lines

Value = TypeVar("Value")
Amounts = Mapping[str, float]
"""How much of each of Ray's resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An accelerator as its own library sees it, not as Ray counts it."""

    index: int
    memory_used: int = 0
    memory: int = 0
    pids: tuple[int, ...] = ()
    """The processes that use it. In a container the library may show none, and then only the memory counts."""
    strangers: tuple[str, ...] = ()
    """Those of them that belong to no process of Ray, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that takes much memory."""

    pid: int
    memory: int
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    name: str = ""
    is_head: bool = False
    total: Amounts = field(default_factory=dict)
    free: Amounts = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    died: str = ""
    """Why it is dead, or nothing."""
    memory: tuple[int, int] | None = None
    """In use, and all; None if nothing on the node could be asked."""
    gpus: tuple[Gpu, ...] | None = None
    """None if no library could be asked, as where accelerators are simulated."""
    ids: tuple[int, ...] = ()
    """The names of the accelerators, if the node was started with only some of its machine's."""
    processes: tuple[Process, ...] = ()
    """The largest, the largest first."""

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name and self.name != self.address else self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """An actor, in any state."""

    id: str
    class_name: str
    job: str
    state: str
    name: str = ""
    rank: int | None = None
    """The RANK of its runtime environment."""
    node: str = ""
    """The id of the node that it is on, or is about to be on."""
    pid: int = 0
    worker: str = ""
    """Ray's id of its process, or nothing before it has one."""
    wants: Amounts = field(default_factory=dict)
    wants_of_group: Amounts = field(default_factory=dict)
    """The same within a placement group, as Ray calls it on the nodes of its bundles."""
    holds: Mapping[int, float] = field(default_factory=dict)
    """How much of which accelerators Ray has given to it, by the node's names for them."""
    told: tuple[int, ...] = ()
    """The accelerators that its runtime environment tells it to use, whatever Ray has given to it."""
    group: str = ""
    since: float = 0
    """Since when it waits, runs or is dead, by the clock of the cluster; 0 if that is not known."""
    restarts: int = 0
    reason: str = ""
    """Ray's word for the cause of its death."""
    cause: str = ""
    log: tuple[str, ...] = ()
    """The last lines of its log, for actors that are not well."""
    memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The resources that a placement group wants together on one node."""

    wants: Amounts
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A placement group."""

    id: str
    name: str
    job: str
    strategy: str
    state: str
    bundles: tuple[Bundle, ...]
    since: float = 0

    def __str__(self) -> str:
        return f"placement group {self.name!r}" if self.name else f"placement group {self.id[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Tasks alike that wait for a node."""

    name: str
    wants: Amounts
    count: int
    since: float = 0
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A driver that is connected, or was."""

    id: str
    pid: int
    address: str
    entrypoint: str

    def __str__(self) -> str:
        return f"job {self.id} (pid {self.pid} on {self.address}{f': {self.entrypoint}' if self.entrypoint else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a process stands."""

    id: str
    """The actor's, or the driver's."""
    place: str
    """In few words, such as `all_reduce`."""
    text: str
    """All threads, as py-spy writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was seen of a cluster at one moment."""

    address: str
    at: float
    nodes: tuple[Node, ...] = ()
    actors: tuple[Actor, ...] = ()
    groups: tuple[Group, ...] = ()
    tasks: tuple[Task, ...] = ()
    drivers: tuple[Driver, ...] = ()
    stacks: tuple[Stack, ...] | None = None
    """None if nobody asked for them."""
    unknown: tuple[str, ...] = ()
    """The parts that could not be seen, and why."""


def accelerators() -> set[str]:
    """Return Ray's names for accelerators."""
    return {entry.resource for entry in accelerator_types().values()}


def redacted(value: Value, name: str = "") -> Value:
    """Hide the secrets in every text within facts, and what would upset a terminal: names of actors are anyone's.

    >>> redacted(Actor(id="1", class_name="A", job="", state="DEAD", cause="no login: password=abc")).cause
    'no login: password=***'
    """
    found: Any = value
    if isinstance(found, str):
        found = printable_lines(hide_in_text(hide(name, found)))
    elif is_dataclass(found) and not isinstance(found, type):
        found = replace(found, **{item.name: redacted(getattr(found, item.name)) for item in fields(found)})
    elif isinstance(found, tuple):
        found = tuple(redacted(item) for item in found)
    elif isinstance(found, Mapping):
        found = {redacted(key): redacted(item, str(key)) for key, item in found.items()}
    return found  # type: ignore[no-any-return]
