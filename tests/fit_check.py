"""Whether a job fits in memory, the slow way: worker by worker, every order of switches, interleavings replayed.

Written from docs/guides/will-it-fit.md, and sharing nothing with `roost.placement.ledger`.
"""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

KINDS = ("device", "host", "pinned")


def draw(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job and an inventory, small and tight enough that about half of them fit."""
    nodes = [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
    swaps = rng.random() < 0.5
    device, host = rng.randint(8, 20) if swaps else rng.randint(4, 16), rng.randint(8, 40)
    inventory: dict[str, Any] = {
        "nodes": [
            {"accelerators": {"count": size, "memory": f"{device + rng.randint(0, 2)}GiB"}, "memory": f"{host}GiB"}
            for size in nodes
        ]
    }
    total = sum(nodes)
    placement, memory = {}, {}
    for name in "abcd"[: rng.randint(2 if swaps else 1, 4)]:
        first = 0 if swaps else rng.randrange(total)
        last = rng.randint(total - 1 if swaps else first, total - 1)
        each = 1 if swaps else rng.choice([1, 1, 1, 2])
        placement[name] = f"{first}-{last}:0-{each * (last - first + 1) - 1}"
        role: dict[str, Any] = {}
        for state in ("s", "t", "u")[: rng.randint(1, 3)]:
            size = {kind: f"{rng.randint(0, 6)}GiB" for kind in KINDS if rng.random() < 0.7}
            role[state] = size if rng.random() < 0.6 else f"{rng.randint(0, 9)}GiB"
        if swaps:
            # What leaves the devices goes to the host, as engines do that sleep with their weights.
            big, small = rng.randint(3, 9), rng.randint(0, 2)
            role = {
                "s": {"device": f"{big}GiB", "host": f"{small}GiB"},
                "t": {"device": f"{small}GiB", "host": f"{big}GiB"},
            }
        for key in ("host", "pinned", "start_host"):
            if rng.random() < (0.1 if swaps else 0.3):
                role[key] = f"{rng.randint(0, 5)}GiB"
        if rng.random() < 0.3:
            role["start_at_once"] = rng.randint(1, 3)
        memory[name] = role
    states = {name: [key for key in role if len(key) == 1] for name, role in memory.items()}
    phases = {
        phase: {name: rng.choice(own) for name, own in states.items()} for phase in ("p", "q", "r")[: rng.randint(1, 3)]
    }
    if swaps and rng.random() < 0.8:
        phases["q"] = {name: "t" if state == "s" else "s" for name, state in phases["p"].items()}
    job = {"cluster": {"component_placement": placement}, "memory": memory, "phases": phases}
    return job, inventory


class Replay:
    """The workers of a job, one by one, and what each place has."""

    def __init__(self, job: dict[str, Any], plan: Any) -> None:
        self.job, self.memory, self.phases = job, job["memory"], job["phases"]
        self.names = list(self.phases)
        self.workers = [
            (item.name, placement.cluster_node_rank, placement.local_hardware_ranks)
            for item in plan.components
            for placement in item.placements
        ]
        self.room = {(rank, -1): node.memory >> 30 for rank, node in enumerate(plan.topology.nodes)}
        for rank, node in enumerate(plan.topology.nodes):
            self.room |= {(rank, local): item.memory >> 30 for local, item in enumerate(node.accelerators)}

    def amount(self, role: str, state: str) -> tuple[int, int, int]:
        own = self.memory[role]
        given = own[state] if isinstance(own[state], dict) else {"device": own[state]}
        found = (given.get(kind, own.get(kind, "0") if kind != "device" else "0") for kind in KINDS)
        device, host, pinned = (int(size.removesuffix("GiB")) for size in found)
        return device, host, pinned

    def over(self, holds: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
        """Return the places that overflow if each worker holds so much."""
        sums = dict.fromkeys(self.room, 0)
        for (_, node, locals_), (device, host, pinned) in zip(self.workers, holds, strict=True):
            sums[node, -1] += host + pinned
            for local in locals_:
                sums[node, local] += device
        return {place for place, total in sums.items() if total > self.room[place]}

    def in_phase(self, phase: int) -> list[tuple[int, int, int]]:
        return [self.amount(role, self.phases[self.names[phase]][role]) for role, _, _ in self.workers]

    def during(self, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int, int]:
        device, host, pinned = map(max, one, other)
        return device, host, pinned

    def change(self, before: int, order: tuple[str, ...], rng: random.Random | None) -> bool:
        """Replay a change: with a generator worker by worker in a random order, else each role all at once."""
        after = (before + 1) % len(self.names)
        holds, new = self.in_phase(before), self.in_phase(after)
        is_over = bool(self.over(holds))
        for role in order:
            own = [at for at, (name, _, _) in enumerate(self.workers) if name == role]
            steps = [(at, stage) for at in own for stage in ("during", "after")]
            if rng is not None:
                # Each worker's two steps stay in their order.
                turns = rng.sample(own * 2, len(own) * 2)
                seen: set[int] = set()
                steps = []
                for at in turns:
                    steps.append((at, "after" if at in seen else "during"))
                    seen.add(at)
            else:
                steps.sort(key=lambda step: step[1] == "after")
            for at, stage in steps:
                holds[at] = self.during(holds[at], new[at]) if stage == "during" else new[at]
                is_over |= bool(self.over(holds))
        return is_over or holds != new

    def switching(self, before: int) -> list[str]:
        one, other = (self.phases[self.names[at % len(self.names)]] for at in (before, before + 1))
        return [role for role in one if one[role] != other[role]]

    def no_order(self, before: int) -> bool:
        """Whether every order of switches overflows."""
        return all(self.change(before, order, None) for order in permutations(self.switching(before)))

    def moment(self, before: int, switched: tuple[str, ...], switching: str) -> set[tuple[int, int]]:
        """Return what overflows after these switches, while all of a role switch."""
        holds, new = self.in_phase(before), self.in_phase((before + 1) % len(self.names))
        for at, (role, _, _) in enumerate(self.workers):
            if role == switching:
                holds[at] = self.during(holds[at], new[at])
            elif role in switched:
                holds[at] = new[at]
        return self.over(holds)

    def start(self, rng: random.Random) -> set[tuple[int, int]]:
        """Start the workers as late as their roles allow, in a random order; return the places that ever overflow."""
        first = self.in_phase(0)
        holds = [(0, 0, 0)] * len(first)
        waiting, starting = rng.sample(range(len(first)), len(first)), []
        over: set[tuple[int, int]] = set()

        def may(at: int) -> bool:
            role, node, _ = self.workers[at]
            busy = sum(self.workers[one][:2] == (role, node) for one in starting)
            return busy < self.memory[role].get("start_at_once", len(first))

        while waiting or starting:
            ready = [at for at in waiting if may(at)]
            # The last ones all at the same time: what is ready starts before anything ends.
            if ready:
                at = ready[0]
                waiting.remove(at)
                starting.append(at)
                more = int(self.memory[self.workers[at][0]].get("start_host", "0").removesuffix("GiB"))
                device, host, pinned = first[at]
                holds[at] = (device, host + more, pinned)
            else:
                # One ends only if another of its role waits for it, as long as there is such a one.
                held_up = [
                    one for one in starting if any(self.workers[w][:2] == self.workers[one][:2] for w in waiting)
                ]
                at = rng.choice(held_up or starting)
                starting.remove(at)
                holds[at] = first[at]
            over |= self.over(holds)
        return over
