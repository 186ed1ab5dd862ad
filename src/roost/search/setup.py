"""From a flow, a profile and a cluster to the problem that is searched; every mistake comes with its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple

from roost.config.flow import FlowConfig, role_of
from roost.config.memory import MemoryConfig
from roost.config.profile import CallProfile, Profile, Timing
from roost.config.reading import Notes, known_hint
from roost.config.topology import Topology
from roost.errors import PlacementError, Where
from roost.search.find import in_order
from roost.search.problem import Call, Problem, Role, WeightUpdate
from roost.text import join_words, plural, size_text

_PARTS = 4
"""Interpolation adds at most three counts between two that are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The problem, what is known of its times, and which of them were not measured."""

    problem: Problem
    kinds: tuple[str, ...]
    """The names of the kinds of device."""
    timings: Mapping[str, Sequence[Mapping[int, Timing]]]
    """For each call and kind: its times by device count."""
    interpolated: frozenset[tuple[str, int, int]]
    """Calls with kinds and device counts."""
    places: Mapping[str, Where]
    """Where the profile names each role first."""

    def measurement(self, call: str, kind: int, count: int) -> str:
        """Name one time of the profile: `actor.train with 8 devices`."""
        return f"{call} with {plural(count, 'device')}" + (f" of {self.kinds[kind]}" if len(self.kinds) > 1 else "")


class _Devices(NamedTuple):
    """The devices of a cluster: the number and the kind of each node, and what the kinds are."""

    nodes: tuple[int, ...]
    kinds: tuple[int, ...]
    names: tuple[str, ...]
    memory: tuple[int | None, ...]
    """The least memory of each kind's devices, where it is known."""

    def count(self, kind: int) -> int:
        return sum(size for size, of in zip(self.nodes, self.kinds, strict=True) if of == kind)

    def largest_node(self, kind: int) -> int:
        return max(size for size, of in zip(self.nodes, self.kinds, strict=True) if of == kind)


def make_setup(
    flow: FlowConfig,
    profile: Profile,
    topology: Topology,
    *,
    interpolate: bool = False,
    memory: MemoryConfig | None = None,
) -> Setup:
    """Put together what is searched; raise one error with all that does not fit together."""
    held = {} if memory is None else {
        role.name: tuple(role.states[phase.states[role.name]].device for phase in memory.phases)
        for role in memory.roles
    }  # fmt: skip
    notes = Notes()
    devices = _devices_of(topology, flow, notes)
    _check_names(flow, profile, notes)
    timings: dict[str, list[dict[int, Timing]]] = {}
    guessed: set[tuple[str, int, int]] = set()
    roles: list[Role] = []
    for name in flow.roles:
        calls = [profile.calls[call] for call in flow.calls if role_of(call) == name and call in profile.calls]
        unit = _worker_size(name, calls, notes)
        for call in calls:
            timings[call.name] = _times_of(call, devices, notes)
        if interpolate:
            for kind in range(len(devices.names)):
                measured = {call.name: dict(timings[call.name][kind]) for call in calls}
                for call in calls:
                    more = _between(call, measured, unit, devices.largest_node(kind), notes)
                    timings[call.name][kind] |= more
                    guessed |= {(call.name, kind, count) for count in more}
        counts = _common_counts(name, calls, timings, devices, notes)
        if any(counts) and counts[0] != (0,):
            switch = profile.switches.get(name)
            costs = {} if switch is None else {"wake": switch.wake, "sleep": switch.sleep}
            own = held.get(name, ())
            roles.append(Role(name=name, counts=counts, devices_per_worker=unit, memory=own, **costs))
    notes.raise_if_any()
    weights = None
    if flow.source:
        weights = WeightUpdate(source=flow.source, target=flow.target, time=profile.weights, staleness=flow.staleness)
    allowed = {role.name: role.counts for role in roles}
    calls_in_order = tuple(
        Call(
            name=call,
            role=role_of(call),
            times=tuple(
                {count: known[count].median for count in own}
                for own, known in zip(allowed.get(role_of(call), ((0,),)), timings[call], strict=False)
            ),
        )
        for call in flow.order
    )
    problem = Problem(
        roles=tuple(roles),
        calls=calls_in_order,
        edges=flow.edges,
        weights=weights,
        nodes=devices.nodes,
        kinds=devices.kinds,
        # Devices of unknown memory have room for everything.
        limits=tuple(
            sum(map(max, held.values())) if least is None else least for least in (devices.memory if held else ())
        ),
    )
    places = {role_of(name): profile.calls[name].key.where() for name in reversed(list(profile.calls))}
    return Setup(problem=problem, kinds=devices.names, timings=timings, interpolated=frozenset(guessed), places=places)


def _check_names(flow: FlowConfig, profile: Profile, notes: Notes) -> None:
    for call in flow.calls:
        if call not in profile.calls:
            where = flow.value.where()
            hint = known_hint(call, profile.calls) if profile.calls else "measure it"
            notes.config(profile.value, f"the profile has no times for {call}, which the flow at {where} names", hint)
    for call, measured in profile.calls.items():
        if call not in flow.calls:
            notes.config(measured.key, f"{call} is not in the flow", known_hint(call, flow.calls))
    for role, switch in profile.switches.items():
        if role not in flow.roles and switch.key is not None:
            notes.config(switch.key, f"switch: no call of {role!r} is in the flow", known_hint(role, flow.roles))


def _devices_of(topology: Topology, flow: FlowConfig, notes: Notes) -> _Devices:
    """Return what the cluster has to search; note a node with devices of several kinds."""
    found: list[tuple[int, str]] = []
    memory: dict[str, int | None] = {}
    for rank, node in enumerate(topology.nodes):
        kinds = sorted({item.model or str(item.type) for item in node.accelerators})
        if len(kinds) > 1:
            message = f"node {rank} has several kinds of accelerator: {join_words(kinds)}"
            notes.config(flow.value, message, hint="all devices of a node must be of one kind")
        for kind in kinds[:1]:
            found.append((len(node.accelerators), kind))
            known = [item.memory for item in node.accelerators if item.memory is not None]
            memory[kind] = min([*known, *([least] if (least := memory.get(kind)) else [])], default=None)
    if not found:
        notes.config(flow.value, "the cluster has no accelerators to search", hint="describe it: --cluster 8x8:H100")
    names = list(memory)
    return _Devices(
        nodes=tuple(size for size, _ in found),
        kinds=tuple(names.index(kind) for _, kind in found),
        names=tuple(names),
        memory=tuple(memory.values()),
    )


def _times_of(call: CallProfile, devices: _Devices, notes: Notes) -> list[dict[int, Timing]]:
    """Return the times of a call on each kind of device; none on a kind that lacks the memory it needs."""
    plain = call.timings.get("", {})
    names = devices.names
    if len(names) > 1 and plain and 0 not in plain:
        hint = f"say on which they were measured: kinds: {{{names[0]}: {{{min(plain)}: …}}}}"
        notes.config(call.key, f"the cluster has {join_words(names)}, and the times of {call.name} name no kind", hint)
    found = [dict(plain or call.timings.get(name, {})) for name in names]
    if names and not any(found):
        known = f"{call.name} is measured on {join_words(list(call.timings))}"
        hint = "a time of one kind says nothing about another: measure it there"
        notes.config(call.key, f"{known}, and the cluster has {join_words(names)}", hint)
    small = [kind for kind, least in enumerate(devices.memory) if call.memory and least and call.memory > least]
    if small and not any(times for kind, times in enumerate(found) if kind not in small):
        most = size_text(max(least for least in devices.memory if least))
        needs = f"{call.name} needs {size_text(call.memory or 0)} on each device"
        hint = "measure it on more devices"
        notes.config(call.key, f"{needs}, and those of the cluster have {most}", hint)
    return [{} if kind in small else times for kind, times in enumerate(found)]


def _worker_size(role: str, calls: Sequence[CallProfile], notes: Notes) -> int:
    given = {call.devices_per_worker: call for call in calls if call.devices_per_worker is not None}
    if len(given) > 1:
        sizes = join_words([f"{call.name} has {size}" for size, call in given.items()])
        one = list(given.values())[-1]
        notes.config(one.key, f"the workers of {role} have different numbers of devices: {sizes}")
    return next(iter(given), None) or 1


def _common_counts(
    role: str,
    calls: Sequence[CallProfile],
    timings: Mapping[str, Sequence[Mapping[int, Timing]]],
    devices: _Devices,
    notes: Notes,
) -> tuple[tuple[int, ...], ...]:
    """Return for each kind the device counts for which all calls of a role have times, and that the cluster has."""
    kinds = range(len(devices.names))
    if not calls or not all(any(timings[call.name]) for call in calls):
        return ()
    common = [set.intersection(*(set(timings[call.name][kind]) for call in calls)) for kind in kinds]
    fitting = tuple(tuple(sorted(n for n in common[kind] if n <= devices.count(kind))) for kind in kinds)
    if not any(common):
        known = join_words([f"{call.name} has {_counts_text(call)}" for call in calls])
        hint = "a role's calls share its devices: measure them with the same counts"
        notes.config(calls[-1].key, f"the calls of {role} have no device count in common: {known}", hint)
    elif not any(fitting):
        least = min(count for counts in common for count in counts)
        numbers = [plural(devices.count(kind), "device") for kind in kinds]
        if len(kinds) > 1:
            numbers = [f"{number} of {name}" for number, name in zip(numbers, devices.names, strict=True)]
        more = " or more" if sum(map(len, common)) > 1 else ""
        message = f"{role} is measured with {least} devices{more}, and the cluster has {join_words(numbers)}"
        notes.config(calls[0].places[min(calls[0].places)], message, hint="measure it with fewer devices")
    return fitting


def _counts_text(call: CallProfile) -> str:
    return join_words(
        [join_words(list(times)) + (f" of {kind}" if kind else "") for kind, times in call.timings.items()]
    )


def _between(
    call: CallProfile, measured: Mapping[str, Mapping[int, Timing]], unit: int, node: int, notes: Notes
) -> dict[int, Timing]:
    """Return times for counts between those measured on one kind of device, on straight lines in logarithms.

    They are evenly spaced: whole nodes, or whole workers below one node. Counts that other calls of the role have are
    among them.
    """
    found: dict[int, Timing] = {}
    times = measured[call.name]
    if len(times) == 1 and 0 not in times:
        hint = "measure it with a second number of devices, or leave out --interpolate"
        notes.config(call.key, f"{call.name} has times for one number of devices, and needs two", hint)
    wanted = [count for known in measured.values() for count in known]
    for (low, before), (high, after) in pairwise(times.items()):
        step = math.lcm(unit, node) if low >= node else unit
        step *= -(-(high - low) // (step * _PARTS))
        counts = {*range(-(-(low + 1) // step) * step, high, step), *(one for one in wanted if low < one < high)}
        for count in sorted(counts):
            share = math.log(count / low) / math.log(high / low)
            # A time of 0 has no logarithm; from there on the line is straight in seconds.
            if before.median and after.median:
                median = math.exp(math.log(before.median) * (1 - share) + math.log(after.median) * share)
            else:
                median = before.median * (1 - share) + after.median * share
            found[count] = Timing(median=round(median / 1000) * 1000)
    return found


def explain_clash(setup: Setup) -> PlacementError:
    """Return the error for a problem without a legal placement: the fewest roles that cannot all be placed."""
    problem = setup.problem
    subsets = (roles for size in range(1, len(problem.roles) + 1) for roles in combinations(problem.roles, size))
    clashing = next(roles for roles in subsets if not any(in_order(_only(problem, roles))))
    if problem.limits and any(in_order(replace(_only(problem, clashing), limits=()))):
        most = {role.name: max(role.memory, default=0) for role in clashing}
        return PlacementError(
            "no placement fits in the memory of the devices, of which one has "
            f"{join_words([size_text(limit) for limit in dict.fromkeys(problem.limits)], last='or')}: "
            + join_words([f"{name} holds up to {size_text(size)}" for name, size in most.items()]),
            hint="measure more device counts, so that the roles need not share, or let them hold less",
            where=setup.places[clashing[0].name],
        )
    sizes = join_words([plural(size, "device") for size in dict.fromkeys(problem.nodes)], last="or")
    return PlacementError(
        f"no placement is legal on {plural(len(problem.nodes), 'node')} of {sizes}: "
        + join_words([_wish(role, setup.kinds) for role in clashing]),
        hint="sets of devices are equal, nested or disjoint, and a worker's devices lie on one node: measure other "
        "device counts, or use other nodes",
        where=setup.places[clashing[0].name],
    )


def _only(problem: Problem, roles: Sequence[Role]) -> Problem:
    """Return a problem with the same devices and only these roles, whose calls take no time."""
    calls = tuple(
        Call(name=role.name, role=role.name, times=tuple(dict.fromkeys(counts, 0) for counts in role.counts))
        for role in roles
    )
    return replace(problem, roles=tuple(roles), calls=calls, edges=(), weights=None)


def _wish(role: Role, kinds: Sequence[str]) -> str:
    each = f" in workers of {role.devices_per_worker}" if role.devices_per_worker > 1 else ""
    counts = [
        f"{join_words(own, last='or')} devices" + (f" of {kind}" if len(kinds) > 1 else "")
        for kind, own in zip(kinds, role.counts, strict=True)
        if own
    ]
    return f"{role.name} with {join_words(counts, last='or')}{each}"
