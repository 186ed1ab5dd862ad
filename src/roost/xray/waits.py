"""Why something cannot be placed: what is short, on which node, and who has it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roost.text import size_text
from roost.xray.facts import Amounts, Bundle, Facts, Node
from roost.xray.names import fold_names

_LEAST = 1e-4
"""Ray counts ten thousandths."""
_SIZES = ("memory", "object_store_memory")
_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why bundles cannot be placed."""

    index: int | None
    """The first bundle for which there is no place; None where all must be on one node."""
    fit: int
    """How many of the bundles that are not placed yet there is room for."""
    wants: Amounts
    is_never: bool
    """Whether the cluster is too small even if all of it were free."""
    short: tuple[str, ...]
    """The resources of which no node has enough left; none where each is left somewhere, and nowhere all together."""
    lacks: tuple[str, ...]
    """The lack of each node, in words; nodes that lack the same are one."""


def find_shortage(bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Node]) -> Shortage | None:
    """Return why bundles cannot be placed now, or None if they can.

    Bundles are placed as Ray does, the largest first, which may miss a place that another order would find: ask only
    about bundles that Ray has not placed.
    """
    alive = [node for node in nodes if not node.died]
    wanted = {index: bundle for index, bundle in enumerate(bundles) if not bundle.node}
    together = strategy == "STRICT_PACK"
    if together:
        whole: defaultdict[str, float] = defaultdict(float)
        for bundle in wanted.values():
            for name, amount in bundle.wants.items():
                whole[name] += amount
        wanted = {0: Bundle(wants=dict(whole), labels=next((item.labels for item in wanted.values()), {}))}
    taken = {bundle.node for bundle in bundles if bundle.node}
    free = {node.id: dict(node.free) for node in alive}
    # Where it could not be placed even on a free cluster, what is in use does not matter.
    never = _place(wanted, strategy, alive, {node.id: dict(node.total) for node in alive}, taken)
    found = never or _place(wanted, strategy, alive, free, taken)
    if found is None:
        return None
    index, fit, left = found
    bundle = wanted[index]
    able = [node for node in alive if node.id in left and _has_labels(node, bundle)]
    short = tuple(
        name
        for name, amount in bundle.wants.items()
        if able and all(left[node.id].get(name, 0) + _LEAST < amount for node in able)
    )
    alike: dict[str, list[str]] = {}
    for node in alive:
        if node.id not in left:
            why = "has one of its bundles already"
        elif not _has_labels(node, bundle):
            why = f"has not the labels {', '.join(f'{key}={value}' for key, value in bundle.labels.items())}"
        else:
            why = " and ".join(
                f"{_amount(name, left[node.id].get(name, 0))} of {_amount(name, node.total[name])} {name} left"
                if node.total.get(name)
                else f"no {name}"
                for name, amount in bundle.wants.items()
                if left[node.id].get(name, 0) + _LEAST < amount
            )
        alike.setdefault(why, []).append(str(node))
    return Shortage(
        index=None if together and len(bundles) > 1 else index,
        fit=fit,
        wants=bundle.wants,
        is_never=never is not None,
        short=short,
        lacks=tuple(f"{fold_nodes(names)}: {why}" for why, names in list(alike.items())[:_MOST]),
    )


def _place(
    wanted: Mapping[int, Bundle],
    strategy: str,
    nodes: Sequence[Node],
    left: dict[str, dict[str, float]],
    taken: set[str],
) -> tuple[int, int, dict[str, dict[str, float]]] | None:
    """Return the first bundle that fits nowhere, how many fit, and what is left then on the nodes that it may use."""
    taken = set(taken)
    by_size = sorted(wanted.items(), key=lambda item: (-sum(item[1].wants.values()), item[0]))
    for fit, (index, bundle) in enumerate(by_size):
        able = {node.id: left[node.id] for node in nodes if strategy != "STRICT_SPREAD" or node.id not in taken}
        places = [
            node.id
            for node in nodes
            if node.id in able
            and _has_labels(node, bundle)
            and all(able[node.id].get(name, 0) + _LEAST >= amount for name, amount in bundle.wants.items())
        ]
        if not places:
            return index, fit, able
        # PACK prefers nodes that it uses already, the others those that it does not.
        place = min(places, key=lambda node: (node in taken) != (strategy == "PACK"))
        taken.add(place)
        for name, amount in bundle.wants.items():
            left[place][name] -= amount
    return None


def _has_labels(node: Node, bundle: Bundle) -> bool:
    """Whether a node has the labels that a bundle asks for; of operators such as `in(…)` nothing is known here."""
    return all("(" in value or node.labels.get(key) == value for key, value in bundle.labels.items())


def find_holders(facts: Facts, resource: str, names: Mapping[str, str]) -> list[str]:
    """Say who holds a resource, and on how many nodes, by what it belongs to; the largest first."""
    jobs = {job.id: str(job) for job in facts.drivers}
    alive = {node.id: node for node in facts.nodes if not node.died}
    held: defaultdict[tuple[str, str], float] = defaultdict(float)
    members: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    inside: defaultdict[str, list[str]] = defaultdict(list)
    for actor in facts.actors:
        if actor.node not in alive or actor.state == "DEAD" or not actor.worker:
            continue
        if actor.group:
            inside[actor.group].append(names[actor.id])
        elif actor.wants.get(resource):
            held["actors", actor.job] += actor.wants[resource]
            members["actors", actor.job].append(names[actor.id])
    for group in facts.groups:
        amount = sum(bundle.wants.get(resource, 0) for bundle in group.bundles if bundle.node in alive)
        if amount:
            users = inside[group.id]
            run = f"{fold_names(users)} {'runs' if len(users) == 1 else 'run'}" if users else "no actor runs"
            held[f"{group}, in which {run}", group.job] += amount
    used = sum(node.total.get(resource, 0) - node.free.get(resource, 0) for node in alive.values())
    rest = used - sum(held.values())
    lines = []
    for (what, job), amount in sorted(held.items(), key=lambda item: -item[1]):
        who = fold_names(members[what, job]) if what == "actors" else what
        lines.append(f"{_amount(resource, amount)} {resource}: {who}, of {jobs.get(job, f'job {job}')}")
    if rest > _LEAST:
        lines.append(f"{_amount(resource, rest)} {resource}: tasks, or actors that Ray does not list")
    return lines[:_MOST] + ([f"and {len(lines) - _MOST} more holders"] if len(lines) > _MOST else [])


def amounts_text(amounts: Amounts) -> str:
    """Return resources in words.

    >>> amounts_text({"CPU": 2.0, "GPU": 0.5, "memory": 2**30})
    '2 CPU, 0.5 GPU, 1.0 GiB memory'
    """
    return ", ".join(f"{_amount(name, amount)} {name}" for name, amount in sorted(amounts.items())) or "nothing"


def fold_nodes(names: Sequence[str]) -> str:
    """Join the names of nodes, cut after a few."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more nodes" if len(names) > 3 else "")


def _amount(name: str, amount: float) -> str:
    return size_text(amount) if name in _SIZES else f"{round(amount, 4):g}"
