"""From a flow, a profile and a cluster to the problem that is searched; every mistake comes with its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from roost.config.flow import FlowConfig, role_of
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
    timings: Mapping[str, Mapping[int, Timing]]
    interpolated: frozenset[tuple[str, int]]
    """Calls with device counts."""
    places: Mapping[str, Where]
    """Where the profile names each role first."""


def make_setup(flow: FlowConfig, profile: Profile, topology: Topology, *, interpolate: bool = False) -> Setup:
    """Put together what is searched; raise one error with all that does not fit together."""
    notes = Notes()
    nodes = tuple(len(node.accelerators) for node in topology.nodes if node.accelerators)
    _check_names(flow, profile, notes)
    _check_devices(flow, profile, topology, notes)
    timings: dict[str, dict[int, Timing]] = {}
    guessed: set[tuple[str, int]] = set()
    roles: list[Role] = []
    for name in flow.roles:
        calls = [profile.calls[call] for call in flow.calls if role_of(call) == name and call in profile.calls]
        unit = _worker_size(name, calls, notes)
        for call in calls:
            timings[call.name] = dict(call.timings)
            if interpolate and 0 not in call.timings:
                if len(call.timings) == 1:
                    hint = "measure it with a second number of devices, or leave out --interpolate"
                    notes.config(call.key, f"{call.name} has times for one number of devices, and needs two", hint)
                wanted = [count for other in calls for count in other.timings]
                more = _between(call, unit, max(nodes, default=1), wanted)
                timings[call.name] |= more
                guessed |= {(call.name, count) for count in more}
        counts = _common_counts(name, calls, timings, sum(nodes), notes)
        if counts and 0 not in counts:
            switch = profile.switches.get(name)
            costs = {} if switch is None else {"wake": switch.wake, "sleep": switch.sleep}
            roles.append(Role(name=name, counts=counts, devices_per_worker=unit, **costs))
    notes.raise_if_any()
    weights = None
    if flow.source:
        weights = WeightUpdate(source=flow.source, target=flow.target, time=profile.weights, staleness=flow.staleness)
    allowed = {role.name: role.counts for role in roles}
    calls_in_order = tuple(
        Call(
            name=call,
            role=role_of(call),
            times={count: timings[call][count].median for count in allowed.get(role_of(call), (0,))},
        )
        for call in flow.order
    )
    problem = Problem(roles=tuple(roles), calls=calls_in_order, edges=flow.edges, weights=weights, nodes=nodes)
    places = {role_of(name): profile.calls[name].key.where() for name in reversed(list(profile.calls))}
    return Setup(problem=problem, timings=timings, interpolated=frozenset(guessed), places=places)


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


def _check_devices(flow: FlowConfig, profile: Profile, topology: Topology, notes: Notes) -> None:
    """Note what no device of the cluster can do; devices must be alike."""
    models = sorted({item.model or item.type for node in topology.nodes for item in node.accelerators})
    if not models:
        notes.config(flow.value, "the cluster has no accelerators to search", hint="describe it: --cluster 8x8:H100")
    if len(models) > 1:
        hint = "times of one kind say nothing about another: search each kind alone, as in --cluster 4x8:H100"
        notes.config(flow.value, f"the cluster has several kinds of accelerator: {join_words(models)}", hint)
    sizes = [item.memory for node in topology.nodes for item in node.accelerators if item.memory is not None]
    for call in profile.calls.values():
        if call.memory is not None and sizes and call.memory > min(sizes):
            most = size_text(max(sizes)) if min(sizes) == max(sizes) else f"{size_text(min(sizes))} or more"
            needs = f"{call.name} needs {size_text(call.memory)} on each device"
            notes.config(call.key, f"{needs}, and those of the cluster have {most}", hint="measure it on more devices")


def _worker_size(role: str, calls: Sequence[CallProfile], notes: Notes) -> int:
    given = {call.devices_per_worker: call for call in calls if call.devices_per_worker is not None}
    if len(given) > 1:
        sizes = join_words([f"{call.name} has {size}" for size, call in given.items()])
        one = list(given.values())[-1]
        notes.config(one.key, f"the workers of {role} have different numbers of devices: {sizes}")
    return next(iter(given), None) or 1


def _common_counts(
    role: str, calls: Sequence[CallProfile], timings: Mapping[str, Mapping[int, Timing]], devices: int, notes: Notes
) -> tuple[int, ...]:
    """Return the device counts for which all calls of a role have times, and that the cluster has."""
    if not calls:
        return ()
    common = set.intersection(*(set(timings[call.name]) for call in calls))
    if not common:
        known = join_words([f"{call.name} has {join_words(list(call.timings))}" for call in calls])
        hint = "a role's calls share its devices: measure them with the same counts"
        notes.config(calls[-1].key, f"the calls of {role} have no device count in common: {known}", hint)
    fitting = tuple(sorted(count for count in common if count <= devices))
    if common and not fitting:
        has = f"the cluster has {plural(devices, 'device')}"
        least = f"{role} is measured with {min(common)} devices" + (" or more" if len(common) > 1 else "")
        notes.config(calls[0].counts[min(calls[0].counts)], f"{least}, and {has}", hint="measure it with fewer devices")
    return fitting


def _between(call: CallProfile, unit: int, node: int, wanted: Sequence[int]) -> dict[int, Timing]:
    """Return times for counts between measured ones, on straight lines in logarithms.

    They are evenly spaced: whole nodes, or whole workers below one node. Counts that other calls of the role have are
    among them.
    """
    found: dict[int, Timing] = {}
    for (low, before), (high, after) in pairwise(call.timings.items()):
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
    sizes = join_words([plural(size, "device") for size in dict.fromkeys(problem.nodes)], last="or")
    return PlacementError(
        f"no placement is legal on {plural(len(problem.nodes), 'node')} of {sizes}: "
        + join_words([_wish(role) for role in clashing]),
        hint="sets of devices are equal, nested or disjoint, and a worker's devices lie on one node: measure other "
        "device counts, or use other nodes",
        where=setup.places[clashing[0].name],
    )


def _only(problem: Problem, roles: Sequence[Role]) -> Problem:
    """Return a problem with the same devices and only these roles, whose calls take no time."""
    calls = tuple(Call(name=role.name, role=role.name, times=dict.fromkeys(role.counts, 0)) for role in roles)
    return Problem(roles=tuple(roles), calls=calls, edges=(), weights=None, nodes=problem.nodes)


def _wish(role: Role) -> str:
    each = f" in workers of {role.devices_per_worker}" if role.devices_per_worker > 1 else ""
    return f"{role.name} with {join_words(role.counts, last='or')} devices{each}"
