"""Whether components can be placed by count so that rules hold, the slow way: every rank on every accelerator.

Written from docs/guides/keep-it-near.md, and sharing nothing with `roost.placement.near` and `roost.placement.rules`.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any


def draw(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job and an inventory with holes: accelerators that are taken, and labels that are missing."""
    nodes: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 4)):
        size = rng.randint(1, 3)
        labels = {level: rng.choice("abc") for level in ("x", "y") if rng.random() < 0.85}
        listed = [
            {"labels": {"x": rng.choice("ab")}} if rng.random() < 0.2 else {"type": "nvidia"} for _ in range(size)
        ]
        nodes.append({"accelerators": listed if rng.random() < 0.4 else size, "labels": labels})
    total = sum(
        len(one["accelerators"]) if isinstance(one["accelerators"], list) else one["accelerators"] for one in nodes
    )
    placement: dict[str, Any] = {}
    if rng.random() < 0.4:
        placement["fixed"] = str(rng.randrange(total))
    mesh, rules, spread = {}, [], []
    for name in "ab"[: rng.choice([1, 1, 2])]:
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        if math.prod(sizes) > 6:
            sizes = [2, 2]
        placement[name] = {"count": math.prod(sizes)}
        mesh[name] = dict(zip("pqr", sizes, strict=False))
        for _ in range(rng.randint(0, 3)):
            who = rng.choice([name, *(f"{name}.{axis}" for axis in mesh[name]), ".".join([name, *mesh[name]][:3])])
            rule = f"{rng.choice(['', '', 'prefer '])}{who} within {rng.choice(['x', 'y', 'node'])}"
            rules += [] if rule in rules else [rule]
        if rng.random() < 0.4:
            spread.append(
                f"{rng.choice(['', '', 'prefer '])}{name} across {rng.choice(['x', 'y', 'node'])}, "
                f"at least {rng.choice([2, 2, 3])}"
            )
    return {"cluster": {"component_placement": placement}, "mesh": mesh, "keep": rules, "spread": spread}, {
        "nodes": nodes
    }


class Fabric:
    """The accelerators that are free, and the domain of each."""

    def __init__(self, job: dict[str, Any], topology: Any) -> None:
        self.job, self.mesh = job, job["mesh"]
        self.places = [(n, at) for n, node in enumerate(topology.nodes) for at in range(len(node.accelerators))]
        self.domains = []
        for n, at in self.places:
            node = topology.nodes[n]
            self.domains.append({**dict(node.labels), **dict(node.accelerators[at].labels), "node": str(n)})
        fixed = job["cluster"]["component_placement"].get("fixed")
        self.free = [at for at in range(len(self.places)) if str(at) != fixed]
        self.names = list(self.mesh)
        self.ranks = [
            (name, rank) for name in self.names for rank in range(job["cluster"]["component_placement"][name]["count"])
        ]

    def split(self, texts: list[str], preferred: bool) -> list[str]:
        return [text for text in texts if text.startswith("prefer ") == preferred]

    def holds(self, text: str, seats: dict[tuple[str, int], int], *, whole: bool) -> bool:
        """Tell whether a rule holds for the ranks that have a seat; with `whole`, for all."""
        who, word, level = re.match(r"(?:prefer )?(\S+) (within|across) (\w+)", text).groups()
        name, *axes = who.split(".")
        own = {rank: self.domains[at].get(level) for (one, rank), at in seats.items() if one == name}
        if word == "across":
            return not whole or len(set(own.values()) - {None}) >= int(text.rpartition(" ")[2])
        # With p and q, rank = p * size of q + q; along p the rest q is the same.
        points = list(itertools.product(*(range(size) for size in self.mesh[name].values())))
        groups: dict[tuple[int, ...], set[str | None]] = {}
        for rank, domain in own.items():
            place = dict(zip(self.mesh[name], points[rank], strict=True))
            key = tuple(at for axis, at in place.items() if axes and axis not in axes)
            groups.setdefault(key, set()).add(domain)
        return all(len(found) == 1 and None not in found for found in groups.values())

    def possible(self, texts: list[str]) -> bool:
        """Try every seat of every rank."""

        def go(at: int, seats: dict[tuple[str, int], int]) -> bool:
            if at == len(self.ranks):
                return all(self.holds(text, seats, whole=True) for text in texts)
            for device in self.free:
                if device not in seats.values():
                    seats[self.ranks[at]] = device
                    if all(self.holds(text, seats, whole=False) for text in texts) and go(at + 1, seats):
                        return True
                    del seats[self.ranks[at]]
            return False

        return len(self.ranks) <= len(self.free) and go(0, {})
