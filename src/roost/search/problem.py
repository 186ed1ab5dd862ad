"""The problem of a search: roles, the calls of a step with their times, and nodes of devices.

Times are whole nanoseconds, so that sums and ratios are exact and two ways to the same number agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

SECOND = 10**9
WEIGHTS = "weights"
"""The name of the weight update among the calls of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role that takes devices: the counts that it may have of each kind, and the nanoseconds of its switches."""

    name: str
    counts: tuple[tuple[int, ...], ...]
    devices_per_worker: int = 1
    wake: int = 0
    sleep: int = 0
    memory: tuple[int, ...] = ()
    """The bytes that it holds on each of its devices, in each phase; none if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the step: for each kind of device, its nanoseconds by device count.

    A call of a role that takes no devices has one kind, and the count 0.
    """

    name: str
    role: str
    times: tuple[Mapping[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The update of a role's weights from another's: target calls lag behind it by at most `staleness` steps."""

    source: str
    target: str
    time: int = 0
    staleness: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A step and the devices it may run on.

    `roles` are in the order of the file and take devices; `calls` are in flow order; `edges` are pairs of their names.
    """

    roles: tuple[Role, ...]
    calls: tuple[Call, ...]
    edges: tuple[tuple[str, str], ...]
    weights: WeightUpdate | None
    nodes: tuple[int, ...]
    """The number of devices of each node."""
    kinds: tuple[int, ...]
    """The kind of each node's devices. All devices of a role are of one kind."""
    limits: tuple[int, ...] = ()
    """The bytes that a device of each kind has; none if no role says what it holds."""

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The number of devices of each kind."""
        found = [0] * (max(self.kinds) + 1)
        for size, kind in zip(self.nodes, self.kinds, strict=True):
            found[kind] += size
        return tuple(found)

    @cached_property
    def role_index(self) -> Mapping[str, int]:
        """The place of each role among `roles`."""
        return {role.name: index for index, role in enumerate(self.roles)}

    def to_dict(self) -> dict[str, Any]:
        """Return the problem as JSON has it."""
        weights = self.weights
        return {
            "roles": [
                {
                    "name": role.name,
                    "counts": [list(counts) for counts in role.counts],
                    "devices_per_worker": role.devices_per_worker,
                    "wake": role.wake,
                    "sleep": role.sleep,
                    **({"memory": list(role.memory)} if self.limits else {}),
                }
                for role in self.roles
            ],
            "calls": [
                {
                    "name": call.name,
                    "role": call.role,
                    "times": [{str(count): time for count, time in times.items()} for times in call.times],
                }
                for call in self.calls
            ],
            "edges": [list(edge) for edge in self.edges],
            "weights": None
            if weights is None
            else {
                "source": weights.source,
                "target": weights.target,
                "time": weights.time,
                "staleness": weights.staleness,
            },
            "nodes": list(self.nodes),
            "kinds": list(self.kinds),
            **({"limits": list(self.limits)} if self.limits else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """Read what `to_dict` wrote; ValueError for a number that is not whole or is negative."""
        _check_numbers(data)
        return cls(
            roles=tuple(
                Role(**{**role, "counts": tuple(map(tuple, role["counts"])), "memory": tuple(role.get("memory", ()))})
                for role in data["roles"]
            ),
            calls=tuple(
                Call(
                    name=call["name"],
                    role=call["role"],
                    times=tuple({int(count): time for count, time in times.items()} for times in call["times"]),
                )
                for call in data["calls"]
            ),
            edges=tuple((before, after) for before, after in data["edges"]),
            weights=None if data["weights"] is None else WeightUpdate(**data["weights"]),
            nodes=tuple(data["nodes"]),
            kinds=tuple(data["kinds"]),
            limits=tuple(data.get("limits", ())),
        )


class Group(NamedTuple):
    """Roles that have the same devices, and the group whose devices include these, by its place in the family."""

    roles: tuple[int, ...]
    devices: int
    parent: int | None = None
    kind: int = 0


Family = tuple[Group, ...]
"""A placement without ranks: each group comes after the one that it is nested in. Others are disjoint."""


def ancestors(family: Sequence[Group], index: int) -> list[int]:
    """Return the group and those that it is nested in, innermost first."""
    found = [index]
    while (parent := family[found[-1]].parent) is not None:
        found.append(parent)
    return found


def free_devices(family: Sequence[Group]) -> list[int]:
    """Return for each group how many of its devices no nested group has."""
    free = [group.devices for group in family]
    for group in family:
        if group.parent is not None:
            free[group.parent] -= group.devices
    return free


def device_sets(family: Sequence[Group]) -> list[tuple[frozenset[int], int]]:
    """Return each set of roles that some devices have in common, with the number of those devices."""
    found = [
        (frozenset(role for at in ancestors(family, index) for role in family[at].roles), free)
        for index, free in enumerate(free_devices(family))
    ]
    return [(roles, free) for roles, free in found if free]


_NUMBERS = ("time", "wake", "sleep", "devices_per_worker", "staleness")
_LISTS = {"counts": "nodes"} | dict.fromkeys(("nodes", "kinds", "limits", "memory"), "time")
"""Keys of lists, each with a key that has what the items of the list are."""


def _check_numbers(value: object, key: str = "") -> None:
    """Check that a problem has whole numbers wherever it has no names."""
    if key in _NUMBERS or key.isdigit():
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is not a whole number")
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, _LISTS.get(key, ""))
    elif key in _LISTS:
        raise ValueError(f"{key}: {value!r} is not a list")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _check_numbers(item, name)


def digest(content: Mapping[str, Any]) -> str:
    """Return a fingerprint of JSON content, apart from its own key `digest`."""
    told = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def seconds(time: Fraction | float) -> float:
    """Return nanoseconds as seconds."""
    return float(time / SECOND)
