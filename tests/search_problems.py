"""Random small problems for the tests of the search, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import replace

from roost.search.problem import Call, Problem, Role, WeightUpdate

NODES = [(8,), (4, 4), (6,), (3, 3), (2, 2, 2), (4,), (5,), (4, 2), (7,), (1, 3)]
KINDS = [(0, 0, 0), (0, 0, 0), (0, 1, 0), (0, 1, 2), (0, 0, 1)]


def random_problem(seed: int) -> Problem:
    """Make a step of up to 4 roles on up to 8 devices of up to 3 kinds; times are small, so that ties are common."""
    dice = random.Random(seed)  # noqa: S311 - luck, not secrets
    nodes = dice.choice(NODES)
    kinds = dice.choice(KINDS)[: len(nodes)]
    devices = [sum(size for size, of in zip(nodes, kinds, strict=True) if of == kind) for kind in sorted(set(kinds))]
    roles, calls = [], []
    number = dice.choice([1, 2, 2, 3, 3, 3, 4] if sum(devices) > 6 else [1, 2, 3, 3, 4, 4])
    without = dice.random() < 0.3
    for at in range(number):
        unit = dice.choice([1, 1, 1, 2, 2, 3, 4])
        counts: tuple[tuple[int, ...], ...] = ()
        if not (without and at == number - 1 and number > 1):
            counts = tuple(random_counts(dice, unit, most) for most in devices)
        if any(counts):
            switch = {"wake": dice.choice([0, 0, 1, 5]), "sleep": dice.choice([0, 0, 1, 4])}
            roles.append(Role(name=f"role{at}", counts=counts, devices_per_worker=unit, **switch))
        for name in "ab"[: 1 if dice.random() < 0.75 else 2]:
            work = dice.randint(1, 40)
            times = tuple(
                {count: dice.choice([work // max(count, 1) + 1, dice.randint(0, 12)]) for count in own}
                for own in (counts if any(counts) else ((0,),))
            )
            calls.append(Call(name=f"role{at}.{name}", role=f"role{at}", times=times))
    dice.shuffle(calls)
    edges = [
        (one.name, other.name) for at, one in enumerate(calls) for other in calls[at + 1 :] if dice.random() < 0.45
    ]
    weights = None
    if number > 1 and dice.random() < 0.75:
        source, target = dice.sample(range(number), 2)
        lag = dice.choice([0, 1, 2])
        weights = WeightUpdate(source=f"role{source}", target=f"role{target}", time=dice.randint(0, 4), staleness=lag)
    limits: tuple[int, ...] = ()
    if dice.random() < 0.3:
        phases = dice.randint(1, 3)
        sizes = [tuple(dice.randint(0, 6) for _ in range(phases)) if dice.random() < 0.9 else () for _ in roles]
        roles = [replace(role, memory=own) for role, own in zip(roles, sizes, strict=True)]
        limits = tuple(dice.randint(6, 14) for _ in devices)
    return Problem(
        roles=tuple(roles),
        calls=tuple(calls),
        edges=tuple(edges),
        weights=weights,
        nodes=nodes,
        kinds=kinds,
        limits=limits,
    )


def random_counts(dice: random.Random, unit: int, most: int) -> tuple[int, ...]:
    """Choose up to 3 counts of one kind of device; none if the kind has too few, and now and then."""
    possible = [count for count in range(1, most + 1) if count % unit == 0]
    if dice.random() < 0.1:
        return ()
    return tuple(sorted(dice.sample(possible, min(len(possible), dice.randint(1, 3)))))
