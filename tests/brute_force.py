"""The best placement the slow way: every legal assignment of device sets, every device, every simple cycle.

Written from the description of the model in docs/concepts/search.md, and sharing nothing with `roost.search` but the
values that say what is searched. Small problems only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product

from roost.search.problem import Problem

Sets = tuple[frozenset[int], ...]


def all_placements(problem: Problem) -> Iterator[Sets]:
    """Yield every legal choice of sets; devices that no earlier role tells apart are taken in their order."""
    node_of = tuple(node for node, size in enumerate(problem.nodes) for _ in range(size))
    return _extended(problem, node_of, ())


def _extended(problem: Problem, node_of: tuple[int, ...], sets: Sets) -> Iterator[Sets]:
    if len(sets) == len(problem.roles):
        yield sets
        return
    role = problem.roles[len(sets)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for device, node in enumerate(node_of):
        alike.setdefault((node, *(at for at, own in enumerate(sets) if device in own)), []).append(device)
    for taken in product(*(range(len(devices) + 1) for devices in alike.values())):
        kinds = {problem.kinds[place[0]] for place, number in zip(alike, taken, strict=True) if number}
        if len(kinds) != 1 or sum(taken) not in role.counts[kinds.pop()]:
            continue
        own = frozenset(one for devices, number in zip(alike.values(), taken, strict=True) for one in devices[:number])
        per_node = Counter(node_of[device] for device in own)
        if any(number % role.devices_per_worker for number in per_node.values()):
            continue
        if not fits_in_memory(problem, (*sets, own)):
            continue
        if all(not own & other or own <= other or other <= own for other in sets):
            yield from _extended(problem, node_of, (*sets, own))


def fits_in_memory(problem: Problem, sets: Sets) -> bool:
    """Tell whether every device has memory for all its roles in every phase."""
    kind_of = [kind for size, kind in zip(problem.nodes, problem.kinds, strict=True) for _ in range(size)]
    for device, kind in enumerate(kind_of if problem.limits else ()):
        held = [role.memory for role, own in zip(problem.roles, sets, strict=False) if device in own and role.memory]
        if any(sum(sizes) > problem.limits[kind] for sizes in zip(*held, strict=True)):
            return False
    return True


def shape_of(problem: Problem, sets: Sets) -> tuple[object, ...]:
    """Return what makes two choices of sets alike: which kinds roles have, and how many devices in common."""
    return tuple(device_kind(problem, own) for own in sets), *in_common(sets)


def device_kind(problem: Problem, own: frozenset[int]) -> int:
    """Return the kind of a set's devices."""
    kinds = [kind for size, kind in zip(problem.nodes, problem.kinds, strict=True) for _ in range(size)]
    return kinds[min(own)]


def in_common(sets: Sets) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return which roles have how many devices in common."""
    devices: dict[int, list[int]] = {}
    for role, own in enumerate(sets):
        for device in own:
            devices.setdefault(device, []).append(role)
    found: dict[tuple[int, ...], int] = {}
    for roles in devices.values():
        found[tuple(roles)] = found.get(tuple(roles), 0) + 1
    return tuple(sorted(found.items()))


def step_time(problem: Problem, sets: Sets) -> Fraction:
    """Return the largest ratio of nanoseconds to steps over all simple cycles."""
    index = {role.name: at for at, role in enumerate(problem.roles)}
    weights = problem.weights
    order: list[str] = []
    last = [call.name for call in problem.calls if weights and call.role == weights.source][-1:]
    for call in problem.calls:
        order.append(call.name)
        if [call.name] == last:
            order.append("weights")
    took = {c.name: c.times[0][0] for c in problem.calls if c.role not in index}
    for call in problem.calls:
        if call.role in index:
            own = sets[index[call.role]]
            took[call.name] = call.times[device_kind(problem, own)][len(own)]
    edges: dict[tuple[str, str, int], int] = {}

    def add(one: str, other: str, steps: int, extra: int = 0) -> None:
        edges[one, other, steps] = max(extra, edges.get((one, other, steps), 0))

    for one, other in problem.edges:
        add(one, other, 0)
    for name in order:
        add(name, name, 1)
    if weights:
        took["weights"] = weights.time
        reached = {(one, other) for one, other in problem.edges}
        while True:
            more = {(a, d) for a, b in reached for c, d in reached if b == c} - reached
            if not more:
                break
            reached |= more
        target = [call.name for call in problem.calls if call.role == weights.target]
        for call in problem.calls:
            if call.role == weights.source:
                add(call.name, "weights", 0)
        for name in target:
            if not any((other, name) in reached for other in target):
                add("weights", name, 1 + weights.staleness)
    role_of = {call.name: call.role for call in problem.calls}
    for device in range(sum(problem.nodes)):
        held = {role.name for role, own in zip(problem.roles, sets, strict=True) if device in own}
        both = {weights.source, weights.target} & held if weights else set()
        own_roles = {name: {role_of[name]} if name != "weights" else both for name in order}
        turns = [name for name in order if own_roles[name] & held]
        gaps = []
        for at, name in enumerate(turns):
            after = turns[(at + 1) % len(turns)]
            gap = 0
            if not own_roles[name] & own_roles[after]:
                gap += max(problem.roles[index[role]].sleep for role in own_roles[name])
                gap += max(problem.roles[index[role]].wake for role in own_roles[after])
            gaps.append((name, after, int(at + 1 == len(turns)), gap))
        skips = weights and weights.staleness and "weights" in turns and weights.source not in held
        if skips:
            at = turns.index("weights")
            before, after = gaps[at - 1], gaps[at]
            gaps = [gap for gap in gaps if "weights" not in gap[:2]]
            time = before[3] + took["weights"] + after[3]
            gaps.append((before[0], after[1], before[2] + after[2], time))
        for one, other, steps, gap in gaps:
            add(one, other, steps, gap)

    best = Fraction(0)

    def walk(start: int, at: str, seen: frozenset[str], time: int, steps: int) -> None:
        nonlocal best
        for (one, other, span), extra in edges.items():
            if one != at:
                continue
            if other == order[start] and steps + span:
                best = max(best, Fraction(time + took[one] + extra, steps + span))
            elif other not in seen and order.index(other) > start:
                walk(start, other, seen | {other}, time + took[one] + extra, steps + span)

    for start, name in enumerate(order):
        walk(start, name, frozenset((name,)), 0, 0)
    return best


def ranked(problem: Problem) -> list[tuple[tuple[object, ...], Sets]]:
    """Return every kind of placement with what it is ranked by, the best first."""
    found = {}
    for sets in all_placements(problem):
        shape = shape_of(problem, sets)
        if shape not in found:
            kinds, *common = shape
            used = sum(count for _, count in common)
            shared = sum(count for roles, count in common if len(roles) > 1)
            apart = tuple(int(not one & other) for one, other in combinations(sets, 2))
            key = (step_time(problem, sets), used, shared, tuple(map(len, sets)), kinds, apart)
            found[shape] = (key, sets)
    return sorted(found.values(), key=lambda item: item[0])
