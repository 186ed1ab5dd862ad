"""From facts about a cluster to findings: what waits and for what, what is dead and why, what is used twice. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from roost.text import plural, shorten, size_text
from roost.xray.facts import Actor, Bundle, Facts, Gpu, Node, accelerators
from roost.xray.names import fold_names, name_actors
from roost.xray.stacks import group_places, is_collective
from roost.xray.waits import amounts_text, find_holders, find_shortage

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
_WANTED_DEATHS = {"RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED"}
"""Ends that code asked for, or that follow from another end."""
_FULL = 0.9
"""Ray kills workers where 95 % of the memory is in use."""
_UNUSED_BYTES = 2**30
"""A device with a context of CUDA on it has less than this in use."""
_SAYS_MEMORY = re.compile("out of memory|OutOfMemory|low on memory|memory pressure|OOM killer")
_OF_DEVICE = re.compile("CUDA|HIP|torch|GPU")
"""Names in an exception that speak of the memory of a device."""
_GUESSES = re.compile("Some common causes|There are some potential root causes")
"""How Ray 2.60 and 2.47 begin a list of all that may end a process, which names memory among others."""
_MOST_TEXT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, or that explains why nothing moves."""

    level: str
    about: str
    """A word for the kind of finding, for programs."""
    text: str
    evidence: tuple[str, ...] = ()
    do: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return asdict(self)


Findings = Iterator[Finding]


def judge(facts: Facts) -> list[Finding]:
    """Return all findings, the worst first."""
    names = name_actors(facts.actors)
    rules: tuple[Callable[[Facts, Mapping[str, str]], Findings], ...] = (
        judge_deaths,
        judge_stacks,
        judge_groups,
        judge_actors,
        judge_tasks,
        judge_gpus,
        judge_empty_groups,
        judge_memory,
        judge_nodes,
    )
    found = [finding for rule in rules for finding in rule(facts, names)]
    return sorted(found, key=lambda item: (PROBLEM, WARNING, NOTE).index(item.level))


def judge_groups(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Placement groups that wait, the bundle that fits nowhere, what is short and who has it."""
    for group in facts.groups:
        if group.state not in ("PENDING", "RESCHEDULING"):
            continue
        yield _waits(facts, names, "group", str(group), group.bundles, group.strategy, group.since)


def judge_actors(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Actors that wait for a place, for their group, or for their constructor, and actors that restart."""
    groups = {group.id: group for group in facts.groups}
    nodes = {node.id: node for node in facts.nodes}
    places: defaultdict[tuple[str, str, frozenset[tuple[str, float]]], list[Actor]] = defaultdict(list)
    for actor in facts.actors:
        name = f"actor {names[actor.id]}"
        if actor.state == "RESTARTING":
            seen = f"{name} died and is being restarted, for the {_th(actor.restarts)} time"
            yield Finding(level=WARNING, about="restarting", text=seen, evidence=actor.log)
        elif actor.state == "DEPENDENCIES_UNREADY":
            seen = f"{name} waits{_for(facts, actor.since)} for the results that its constructor gets as arguments"
            yield Finding(level=WARNING, about="pending", text=seen)
        elif actor.state == "PENDING_CREATION" and actor.worker and actor.node in nodes:
            where = f"{f'pid {actor.pid} ' if actor.pid else ''}on {nodes[actor.node]}"
            seen = f"{name} runs its constructor{_for(facts, actor.since)}, {where}"
            yield Finding(level=NOTE, about="constructor", text=seen, evidence=actor.log)
        elif actor.state == "PENDING_CREATION":
            wants = actor.wants_of_group or actor.wants
            places[actor.class_name, actor.group, frozenset(wants.items())].append(actor)
    for (_, group_id, amounts), actors in places.items():
        wants = actors[0].wants
        who = _actors(actors, names)
        since = min((item.since for item in actors if item.since), default=0)
        group = groups.get(group_id)
        if group is not None:
            has_room = any(all(node.free.get(name, 0) >= amount for name, amount in amounts) for node in facts.nodes)
            is_full = group.state == "CREATED" and not has_room
            state = f"has no bundle with {amounts_text(wants)} left" if is_full else "has no place yet"
            state = "has room: a process starts" if group.state == "CREATED" and has_room else state
            seen = f"{who} {_wait(actors)}{_for(facts, since)} for {group}, which {state}"
            inside = [names[item.id] for item in facts.actors if item.group == group.id and item.state == "ALIVE"]
            evidence = (f"in it: {fold_names(inside)}",) if inside else ()
            yield Finding(level=PROBLEM if is_full else NOTE, about="pending", text=seen, evidence=evidence)
        else:
            # An actor without a wish of its own wants a CPU to start with.
            yield _waits(facts, names, "pending", who, [Bundle(wants=wants or {"CPU": 1})], "PACK", since)


def judge_tasks(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Tasks that no node can hold, and tasks that wait for what others have."""
    for task in facts.tasks:
        who = f"{'task' if task.count == 1 else plural(task.count, 'task')} {task.name}"
        found = _waits(facts, names, "task", who, [Bundle(wants=task.wants)], "PACK", task.since)
        # That tasks queue is usual, unless nothing can ever run them.
        level = found.level if "too small" in found.text else NOTE
        yield Finding(level=level, about="task", text=found.text, evidence=found.evidence, do=found.do)


def _waits(
    facts: Facts, names: Mapping[str, str], about: str, who: str, bundles: Iterable[Bundle], strategy: str, since: float
) -> Finding:
    bundles = tuple(bundles)
    shortage = find_shortage(bundles, strategy, facts.nodes)
    verb = "wait" if re.match(r"\d+ \w+s ", who) else "waits"
    waits = f"{who} {verb}{_for(facts, since)}"
    if shortage is None:
        wants_gpu = any(accelerators() & bundle.wants.keys() for bundle in bundles)
        # Ray's sums do not say that 1 GPU is left as two halves.
        is_shared = wants_gpu and any(share % 1 for item in facts.actors for share in item.holds.values())
        soon = "Ray places it soon, or starts its process"
        then = "in sum, and perhaps on no single GPU: some are shared" if is_shared else soon
        seen = f"{waits}, although there is room for it now: {then}"
        return Finding(level=NOTE, about=about, text=seen)
    wanted = amounts_text(shortage.wants)
    fit: tuple[str, ...] = ()
    if about != "group":
        what = wanted
    elif shortage.index is None:
        what = f"{wanted} on one node (STRICT_PACK: all {len(bundles)} bundles together)"
    else:
        what = f"bundle {shortage.index} of {len(bundles)} ({wanted}; {strategy})"
        fit = (f"there is room for {shortage.fit} of the {len(bundles)} bundles; then",) if shortage.fit else ()
    short = " and ".join(shortage.short)
    if shortage.is_never:
        why = "and the cluster is too small for it even when it is free"
        do = "ask for less, add nodes, or give them the resource: ray start --num-gpus, --num-cpus, --resources"
    elif short:
        why = f"and no node has enough {short} left"
        do = f"end or shrink what holds {short}, or add nodes"
    else:
        why = "and no node has all of it left"
        do = "end or shrink what holds it, or add nodes"
    evidence = [*fit, *shortage.lacks]
    for resource in () if shortage.is_never else shortage.short or tuple(shortage.wants):
        evidence += [f"held: {line}" for line in find_holders(facts, resource, names)]
    return Finding(level=PROBLEM, about=about, text=f"{waits} for {what}, {why}", evidence=tuple(evidence), do=do)


def judge_deaths(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Actors that died and were not meant to, those that died alike as one finding."""
    nodes = {node.id: node for node in facts.nodes}
    alike: defaultdict[tuple[str, str, str], list[Actor]] = defaultdict(list)
    for actor in facts.actors:
        if actor.state == "DEAD" and actor.reason not in _WANTED_DEATHS:
            reason, cause = "OOM" if is_out_of_memory(actor) else actor.reason, _cause(actor)
            alike[actor.class_name, reason, "" if reason == "OOM" else cause[:60]].append(actor)
    for (_, reason, _), actors in alike.items():
        first, cause = actors[0], _cause(actors[0])
        node = nodes.get(first.node)
        where = f", pid {first.pid} on {node}" if first.pid and node else ""
        verb = "is" if len(actors) == 1 else "are"
        who = f"{_actors(actors, names)} {verb} dead"
        evidence = [f"Ray says{where}: {cause}"] if cause else [f"it was{where}"] if where else []
        evidence += [f"log: {line}" for line in first.log]
        if reason == "OOM":
            seen, do = f"{who}: killed for memory", "give the node more memory, or put fewer or smaller actors on it"
        elif reason == "NODE_DIED":
            seen, do = f"{who}: the node died", "check the machine, and raylet.out in its session's logs"
        elif reason == "CREATION":
            seen, do = f"{who}: the constructor raised an exception", ""
        elif reason == "RUNTIME_ENV":
            seen, do = f"{who}: the runtime environment could not be made", ""
        else:
            seen, do = f"{who}: the process ended", ""
        about = "memory" if reason == "OOM" else "dead"
        yield Finding(level=PROBLEM, about=about, text=seen, evidence=tuple(evidence), do=do)


def _cause(actor: Actor) -> str:
    """Return what Ray says of a death: where it does not know, it lists what may be, and a traceback comes first."""
    said = _GUESSES.split(actor.cause)[0].partition("Object store memory usage")[0]
    if actor.reason == "CREATION":
        said = said.rstrip().rpartition("\n ")[2].partition("\n")[2] or said
    return shorten(" ".join(said.split()), _MOST_TEXT)


def is_out_of_memory(actor: Actor) -> bool:
    """Whether what Ray, or the log, says about a death means that the node's memory ran out."""
    said = (actor.cause if not _GUESSES.search(actor.cause) else "", *actor.log)
    return actor.reason == "OOM" or (
        actor.reason not in ("CREATION", "RUNTIME_ENV")
        and any(_SAYS_MEMORY.search(text) and not _OF_DEVICE.search(text) for text in said)
    )


def judge_gpus(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Accelerators that several actors use, or that are taken and unused, or used by processes that are not Ray's."""
    for node in facts.nodes:
        owners, measured = find_owners(facts, node), {gpu.index: gpu for gpu in node.gpus or ()}
        pids = {item.pid: item for item in facts.actors if item.node == node.id and item.state != "DEAD" and item.pid}
        for index, (given, told) in owners.items():
            if len(given) + len(told) > 1 and told:
                who = fold_names(names[item.id] for item in (*given, *told))
                seen = f"GPU {index} of {node} has {len(given) + len(told)} owners: {who}"
                how = f"{fold_names(names[item.id] for item in told)}: CUDA_VISIBLE_DEVICES, with num_gpus=0"
                evidence = [f"{fold_names(names[item.id] for item in given)}: given by Ray"] if given else []
                do = "give each its own, with num_gpus=1, or share it on purpose, with num_gpus=0.5"
                yield Finding(level=WARNING, about="two owners", text=seen, evidence=(*evidence, how), do=do)
        for index, gpu in measured.items():
            given, told = owners.get(index, ([], []))
            # Whoever is in a placement group may use what its bundles hold.
            uninvited = [item for pid in gpu.pids if (item := pids.get(pid)) and item not in (*given, *told)]
            if uninvited := [item for item in uninvited if not item.group]:
                who = fold_names(names[item.id] for item in uninvited)
                has = fold_names(names[item.id] for item in given) or "nobody"
                seen = f"GPU {index} of {node} is used by {who}, and Ray has given it to {has}"
                yield Finding(level=WARNING, about="two owners" if given else "uninvited", text=seen)
            if gpu.strangers:
                seen = f"GPU {index} of {node} is used by {'; '.join(gpu.strangers)}, which is not Ray's"
                yield Finding(level=WARNING, about="strangers", text=seen)
        idle = [index for index, (given, _) in owners.items() if given and is_unused(measured.get(index))]
        if idle:
            who = fold_names(dict.fromkeys(names[item.id] for index in idle for item in owners[index][0]))
            seen = f"{plural(len(idle), 'GPU')} of {node} ({', '.join(map(str, idle))}) taken and unused: {who}"
            do = "end these actors, or start them later, if others wait for the GPUs"
            yield Finding(level=WARNING, about="unused", text=seen, do=do)


def judge_empty_groups(facts: Facts, _: Mapping[str, str]) -> Findings:
    """Placement groups that hold accelerators, and in which nothing runs."""
    busy = {item.group for item in facts.actors if item.state != "DEAD"}
    drivers = {item.id: str(item) for item in facts.drivers}
    for group in facts.groups:
        held = sum(item.wants.get(name, 0) for item in group.bundles if item.node for name in accelerators())
        if held and group.id not in busy and group.state == "CREATED":
            whose = drivers.get(group.job, f"job {group.job}, which has ended")
            seen = f"{group} of {whose} holds {held:g} GPU{_for(facts, group.since)}, and no actor is in it"
            do = "if no task runs in it either: ray.util.remove_placement_group, or end its job"
            yield Finding(level=WARNING, about="unused", text=seen, do=do)


def find_owners(facts: Facts, node: Node) -> dict[int, tuple[list[Actor], list[Actor]]]:
    """Return by accelerator of a node the actors that Ray gave it to, and those that are only told to use it."""
    owners: defaultdict[int, tuple[list[Actor], list[Actor]]] = defaultdict(lambda: ([], []))
    for actor in facts.actors:
        if actor.node == node.id and actor.state == "ALIVE":
            for index in actor.holds:
                owners[index][0].append(actor)
            for index in () if actor.holds else actor.told:
                owners[index][1].append(actor)
    return dict(sorted(owners.items()))


def is_unused(gpu: Gpu | None) -> bool:
    """Whether a device that was asked is used by no process."""
    return gpu is not None and not gpu.pids and gpu.memory_used < _UNUSED_BYTES


def judge_memory(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Nodes whose memory runs out, and the processes that have it."""
    pids = {(item.node, item.pid): names[item.id] for item in facts.actors if item.pid}
    for node in facts.nodes:
        used, total = node.memory or (0, 0)
        if total and used > _FULL * total:
            seen = f"the memory of {node} is {used / total:.0%} full: {size_text(used)} of {size_text(total)}"
            evidence = [
                f"{size_text(item.memory)}: {pids.get((node.id, item.pid), item.command)}, pid {item.pid}"
                for item in node.processes[:3]
            ]
            do = "end what uses it: over 95 % Ray kills workers"
            yield Finding(level=WARNING, about="memory", text=seen, evidence=tuple(evidence), do=do)


def judge_nodes(facts: Facts, _: Mapping[str, str]) -> Findings:
    """Nodes that died."""
    dead = [node for node in facts.nodes if node.died]
    if dead:
        evidence = tuple(f"{node}: {node.died}" for node in dead[-3:])
        yield Finding(
            level=NOTE, about="nodes", text=f"{plural(len(dead), 'node')} left the cluster", evidence=evidence
        )


def judge_stacks(facts: Facts, names: Mapping[str, str]) -> Findings:
    """Collectives in which most processes of a kind wait for a few that are elsewhere."""
    # Actors of two jobs do not wait for each other.
    kinds = {item.id: f"{item.job} {item.class_name}" for item in facts.actors}
    all_of = Counter(kinds[item.id] for item in facts.actors if item.state != "DEAD")
    for key, places in group_places(facts.stacks or (), kinds).items():
        kind, total, read = key.partition(" ")[2], all_of[key], sum(map(len, places.values()))
        waiting = {place: ids for place, ids in places.items() if is_collective(place)}
        others = {place: ids for place, ids in places.items() if place not in waiting}
        if not waiting:
            continue
        seen = [f"{len(ids)} of {total} {kind} in {place}" for place, ids in waiting.items()]
        late = [f"{fold_names(names[item] for item in ids)} in {place}" for place, ids in others.items()]
        if not late and len(waiting) == 1:
            # The usual moment of a step, or a hang in the network.
            who = (
                f"all {total} {kind} are" if read == total else f"{read} of {total} {kind}, all that could be seen, are"
            )
            text = f"{who} in {next(iter(waiting))}: if that lasts, look at the network"
            yield Finding(level=NOTE, about="collective", text=text)
        else:
            text = ", ".join([*seen, *late])
            why = "the others wait for these" if late else "not all are in the same call"
            do = "look twice: if it is so again, this is the hang; --bundle has all stacks"
            # A few that are there first are usual.
            level = NOTE if 2 * sum(map(len, others.values())) > read else PROBLEM
            yield Finding(level=level, about="straggler", text=text, evidence=(why,), do=do)


def _for(facts: Facts, since: float) -> str:
    """Return ` for 12 s`, or nothing where the beginning is not known."""
    if not since:
        return ""
    seconds = max(0, int(facts.at - since))
    hours, minutes = seconds // 3600, seconds // 60
    return f" for {seconds} s" if minutes < 2 else f" for {minutes} min" if hours < 2 else f" for {hours} h"


def _actors(actors: list[Actor], names: Mapping[str, str]) -> str:
    number = "actor" if len(actors) == 1 else plural(len(actors), "actor")
    return f"{number} {fold_names(names[item.id] for item in actors)}"


def _wait(items: list[Actor]) -> str:
    return "waits" if len(items) == 1 else "wait"


def _th(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
