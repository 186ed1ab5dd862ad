"""Finding the nodes of a Ray cluster: wait until they are there, probe as many as are needed, put them in order."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from roost.config.kinds import hardware_kind, make_piece
from roost.config.node_groups import DeclaredHardware, NodeGroup
from roost.config.topology import Accelerator, Node, Topology
from roost.deadline import Deadline
from roost.errors import CheckFailed, ClusterError, ConfigError, NodesMissing, Problem
from roost.machine import probe as probes
from roost.machine.forks import FOLDER, set_wanted
from roost.machine.ports import answers
from roost.runtime.connect.calls import get, on_node
from roost.runtime.connect.find_head import list_raylets, takes_token
from roost.runtime.connect.head import within
from roost.runtime.limits import (
    ASK_SECONDS,
    KNOCK_SECONDS,
    POLL_SECONDS,
    RAYLET_ANSWER_SECONDS,
    SAY_EVERY_SECONDS,
    SPARE_NODES_SECONDS,
)
from roost.runtime.nodes.accelerators import node_accelerators, variables_of_interest
from roost.runtime.nodes.info import NodeInfo, RayNode, SickNode, name_node
from roost.runtime.nodes.order import NODE_RANK_VARIABLE, address_key, rank_nodes
from roost.runtime.process.environment import SEARCH_PATHS
from roost.text import error_text, join_words, plural, printable

Answer = TypeVar("Answer")

log: logging.Logger = logging.getLogger(__name__)
_NAMESPACES = ("mnt", "net", "pid", "user")
_AT_ONCE = 16


def live_nodes() -> list[RayNode]:
    """Return the nodes that are alive now, sorted by address."""
    found = [
        RayNode(
            ray_id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            name=printable(entry.get("NodeName", "")),
            port=entry.get("NodeManagerPort", 0),
            resources=entry.get("Resources", {}),
            labels=entry.get("Labels", {}),
            folder=os.path.dirname(entry.get("RayletSocketName", "")),
        )
        for entry in _node_table()
        if entry["Alive"]
    ]
    return sorted(found, key=lambda node: (address_key(node.address), node.name, node.ray_id))


def _node_table() -> list[dict[str, Any]]:
    return within(ASK_SECONDS, ray.nodes, "list its nodes")


def preload(nodes: Sequence[RayNode], modules: Sequence[str]) -> None:
    """Let the job's workers share one import of these modules, on nodes of this machine that Roost has started."""
    warm = {folder for node in nodes if (folder := Path(node.folder, FOLDER)).is_dir()}
    for folder in warm:
        set_wanted(folder, modules, ray.get_runtime_context().get_job_id())
    if not warm:
        log.info("preload: Roost has not started these nodes: each worker imports %s itself", join_words(modules))


def has_ended(ray_id: str) -> bool:
    """Return whether a node that Ray has given up has ended, and its workers with it, as far as can be known.

    Ray also gives up a node that hangs, or that cannot be reached; what runs there then goes on.
    """
    for entry in _node_table():
        if entry["NodeID"] == ray_id:
            address = f"{entry['NodeManagerAddress']}:{entry.get('NodeManagerPort', 0)}"
            return answers(address, KNOCK_SECONDS) is False
    return True


def wait_for_nodes(count: int, deadline: Deadline) -> list[RayNode]:
    """Wait until `count` nodes are alive; NodesMissing at the deadline names the nodes that are."""
    began = time.monotonic()
    say_at = began + 2
    seen: dict[str, RayNode] = {}
    while True:
        nodes = live_nodes()
        seen |= {node.ray_id: node for node in nodes}
        # Until the head has registered, the list is incomplete.
        if len(nodes) >= count and any(node.is_head for node in nodes):
            return nodes
        now, here = time.monotonic(), len(nodes)
        lacking = f"{count - here} of {plural(count, 'node')}" if here < count else "the head"
        if deadline.is_over:
            there = f"there {'is' if here == 1 else 'are'} {here}" + (f": {join_words(nodes)}" if nodes else "")
            gone = [node for ray_id, node in seen.items() if ray_id not in {node.ray_id for node in nodes}]
            left = f"; {join_words(gone)} came and went" if gone else ""
            start = f"`ray start --address={ray.get_runtime_context().gcs_address}`"
            raise NodesMissing(
                f"{lacking} did not come in {now - began:.0f} s; {there}{left}",
                hint=f"on each that is missing run {start}, or ask for num_nodes={max(1, here)}",
            )
        if now >= say_at:
            log.warning("waiting for %s; here: %s", lacking, join_words(nodes) or "none")
            say_at = now + SAY_EVERY_SECONDS
        time.sleep(min(POLL_SECONDS, deadline.left))


def discover(
    nodes: Sequence[RayNode], deadline: Deadline, groups: Iterable[NodeGroup] = (), count: int | None = None
) -> tuple[tuple[NodeInfo, ...], str]:
    """Probe the first `count` nodes, by default all, at the same time; return them, and a notice about the others.

    Each has the hardware that `groups` declare on it. CheckFailed names the nodes that are needed and cannot be probed.
    Without `ROOST_NODE_RANK` the order is known before any probe; where a node has it, all nodes have to be probed.
    """
    count = len(nodes) if count is None else count
    ranked = rank_nodes(nodes, {})
    probing = _Probing()
    probing.probe([node for rank, node in ranked.items() if rank < count], deadline)
    if probing.wanted_ranks:
        # A sick node that is not needed must not take all the time.
        spares = [node for rank, node in ranked.items() if rank >= count]
        probing.probe(spares, deadline.within(SPARE_NODES_SECONDS))
        ranked = rank_nodes(nodes, probing.wanted_ranks, unknown=probing.sick)
        if not all(rank in ranked for rank in range(count)):
            probing.probe([], deadline)
            ranked = rank_nodes(nodes, probing.wanted_ranks, unknown=probing.sick)
    reports, sick = probing.reports, probing.sick
    needed = {rank: ranked[rank] for rank in range(count) if rank in ranked}
    # Which of the nodes that do not tell their ranks are needed is not known.
    suspects = [node.ray_id for node in needed.values()] if len(needed) == count else list(sick)
    if problems := [sick[ray_id] for ray_id in suspects if ray_id in sick]:
        without = "to do without it, end Ray there with `ray stop`: the next node then takes its rank"
        if len(nodes) > count:
            problems = [replace(item, hint="; ".join(filter(None, (item.hint, without)))) for item in problems]
        raise CheckFailed(problems)
    declared = [item for group in groups for item in group.hardware]
    infos = tuple(_node_info(rank, node, reports[node.ray_id], declared) for rank, node in needed.items())
    ranks = {node.ray_id: rank for rank, node in ranked.items()}
    unused = [node for node in nodes if ranks.get(node.ray_id, count) >= count]
    if not unused:
        return infos, ""
    unused.sort(key=lambda node: ranks.get(node.ray_id, len(nodes)))
    left_out = join_words([name_node(ranks.get(node.ray_id), node.address, node.name) for node in unused], most=8)
    verb = "is" if len(unused) == 1 else "are"
    return infos, f"the cluster has {len(nodes)} nodes and num_nodes is {count}: {left_out} {verb} not used"


def survey(deadline: Deadline) -> tuple[tuple[NodeInfo, ...], tuple[SickNode, ...]]:
    """Probe all nodes that are there; return the nodes that answer and the sick ones, both in order."""
    nodes = wait_for_nodes(1, deadline)
    probing = _Probing()
    probing.probe(nodes, deadline)
    reports, problems = probing.reports, probing.sick
    ranked = rank_nodes(nodes, probing.wanted_ranks, unknown=problems)
    ranks = {node.ray_id: rank for rank, node in ranked.items()}
    infos: list[NodeInfo] = []
    sick: list[SickNode] = []
    for node in sorted(nodes, key=lambda node: ranks.get(node.ray_id, len(nodes))):
        rank, problem = ranks.get(node.ray_id), problems.get(node.ray_id)
        if rank is not None and problem is None:
            try:
                infos.append(_node_info(rank, node, reports[node.ray_id], ()))
            except CheckFailed as error:
                problem = error.problems[0]
        if problem is not None:
            sick.append(
                SickNode(
                    rank=rank,
                    ray_id=node.ray_id,
                    address=node.address,
                    name=node.name,
                    is_head=node.is_head,
                    problem=problem.message,
                    hint=problem.hint,
                )
            )
    return tuple(infos), tuple(sick)


def make_topology(nodes: Sequence[NodeInfo], groups: Iterable[NodeGroup] = ()) -> Topology:
    """Return the nodes as the planner knows them, with the job's node groups."""
    names = [node.name for node in nodes]
    known = [
        Node(
            accelerators=tuple(
                Accelerator(
                    type=item.type,
                    model=item.model,
                    memory=item.memory,
                    device=None if item.device == str(index) else item.device,
                )
                for index, item in enumerate(node.accelerators)
            ),
            name=node.name if node.name and names.count(node.name) == 1 else None,
            address=node.address,
            labels=node.labels,
            cpus=node.cpus,
            memory=node.memory,
        )
        for node in nodes
    ]
    return Topology(nodes=tuple(known), groups=tuple(groups))


def check_groups(nodes: Sequence[NodeInfo], groups: Sequence[NodeGroup], deadline: Deadline) -> None:
    """Check interpreters and hardware of the groups on their nodes; CheckFailed lists all mistakes."""
    problems: list[Problem] = []
    wanted: dict[int, dict[str, str]] = {}
    pieces: dict[int, list[tuple[DeclaredHardware, Any]]] = {}
    for group in groups:
        for config in group.env_configs:
            for rank in config.node_ranks if config.python_interpreter_path else ():
                wanted.setdefault(rank, {})[str(config.python_interpreter_path)] = group.label
        for item in group.hardware:
            try:
                piece = make_piece(item.type, item.node_rank, item.settings) if hardware_kind(item.type) else None
            except ConfigError as error:
                problems += error.problems
                continue
            if callable(getattr(piece, "check", None)):
                pieces.setdefault(item.node_rank, []).append((item, piece))
    asked = {
        nodes[rank].ray_id: (list(wanted.get(rank, ())), [piece for _, piece in pieces.get(rank, ())])
        for rank in {**wanted, **pieces}
    }
    found = on_nodes({node.ray_id: str(node) for node in nodes}, probes.check, deadline=deadline, own=asked)
    for rank in {**wanted, **pieces}:
        bad_paths, bad_pieces = found[nodes[rank].ray_id]
        for path, why in bad_paths.items():
            message = f"node group {wanted[rank][path]!r} wants {path} on {nodes[rank]}: {why}"
            hint = "python_interpreter_path is a path on the node itself, of a Python that has Ray"
            problems.append(Problem(message=message, hint=hint))
        for index, why in bad_pieces.items():
            item = pieces[rank][index][0]
            settings = ", ".join(f"{key}={value!r}" for key, value in item.settings.items())
            message = f"hardware {item.type!r} on {nodes[rank]} failed its check: {why}"
            problems.append(Problem(message=message, hint=f"its config is {settings or 'empty'}"))
    if problems:
        raise CheckFailed(problems)


def on_nodes(
    nodes: Mapping[str, str],
    function: Callable[..., Answer],
    *arguments: Any,
    deadline: Deadline,
    own: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Answer]:
    """Run a function on several nodes (Ray id -> name in messages); CheckFailed names the nodes where it failed.

    With `own`, only on the nodes that have arguments of their own there.
    """
    asked = dict.fromkeys(nodes, arguments) if own is None else own
    answers, problems, late = _collect(nodes, function, _call(function, asked), deadline)
    problems |= {ray_id: _late(nodes[ray_id]) for ray_id in late}
    if problems:
        raise CheckFailed(problems[ray_id] for ray_id in asked if ray_id in problems)
    return answers


@functools.cache
def remote_function(function: Callable[..., Any]) -> Any:
    """Make the function a Ray task, once: Ray exports every new remote function to the whole cluster.

    The task claims no CPU, so that a busy cluster runs it too, and Ray does not retry it: the caller decides that.
    """
    return ray.remote(num_cpus=0, max_retries=0)(function)


def _call(function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Start a function on each node that has arguments, and return the calls."""
    task = remote_function(function)
    return {
        ray_id: task.options(scheduling_strategy=on_node(ray_id)).remote(*values)
        for ray_id, values in arguments.items()
    }


def _collect(
    nodes: Mapping[str, str], function: Callable[..., Any], calls: Mapping[str, Any], deadline: Deadline
) -> tuple[dict[str, Any], dict[str, Problem], set[str]]:
    """Wait for calls until the deadline; return the answers, the failures, and the nodes that have not answered."""
    answers: dict[str, Any] = {}
    problems: dict[str, Problem] = {}
    late: set[str] = set()
    for ray_id, call in calls.items():
        try:
            answers[ray_id] = get(call, deadline.left)
        except GetTimeoutError:
            late.add(ray_id)
        except RayTaskError as error:
            why = str(error) if error.cause is None else error_text(error.cause)
            if "Traceback" in why:
                # Ray quotes all of it where the function cannot be imported.
                why = why.strip().splitlines()[-1]
            hint = "install Roost and the job's own packages in the environment that the node was started from"
            message = f"{nodes[ray_id]}: {function.__name__} failed there: {why}"
            problems[ray_id] = Problem(message=message, hint=hint if "No module named" in str(error) else "")
        except RayError as error:
            why = str(error).strip().splitlines()[0]
            message = f"{nodes[ray_id]} is gone, or its worker process ended: {why}"
            problems[ray_id] = Problem(message=message, hint="check the node; `roost nodes` lists those that are there")
    return answers, problems, late


class _Probing:
    """Probes of nodes, all at the same time, and only one for the nodes that share it."""

    def __init__(self) -> None:
        self.reports: dict[str, probes.NodeReport] = {}
        self.sick: dict[str, Problem] = {}
        """The problem of each node that has not reported."""
        self.wanted_ranks: dict[str, str] = {}
        """The ranks that nodes were given by their users."""
        self._names: dict[str, str] = {}
        self._calls: dict[str, Any] = {}

    def probe(self, nodes: Sequence[RayNode], deadline: Deadline) -> None:
        """Start to probe these nodes as well, and wait for all reports until the deadline."""
        self._names |= {node.ray_id: str(node) for node in nodes}
        groups = group_for_probe(nodes) if nodes else []
        self._call([first for first, *_ in groups])
        self._receive([first.ray_id for first, *others in groups if others], deadline.within(deadline.left / 2))
        for first, *others in groups:
            if first.ray_id in self.reports:
                self.reports |= {node.ray_id: self.reports[first.ray_id] for node in others}
            else:
                # It may be sick in a way of its own.
                self._call(others)
        self._receive(list(self._calls), deadline)
        self.sick |= {ray_id: _late(self._names[ray_id]) for ray_id in self._calls}
        ranks = {ray_id: report.environment.get(NODE_RANK_VARIABLE) for ray_id, report in self.reports.items()}
        self.wanted_ranks = {ray_id: rank for ray_id, rank in ranks.items() if rank is not None}

    def _call(self, nodes: Sequence[RayNode]) -> None:
        variables = [*variables_of_interest(), *SEARCH_PATHS, NODE_RANK_VARIABLE]
        self._calls |= _call(probes.probe, {node.ray_id: [variables] for node in nodes})

    def _receive(self, ray_ids: Sequence[str], deadline: Deadline) -> None:
        calls = {ray_id: self._calls[ray_id] for ray_id in ray_ids}
        reports, problems, late = _collect(self._names, probes.probe, calls, deadline)
        self.reports |= reports
        self.sick = {ray_id: why for ray_id, why in self.sick.items() if ray_id not in reports} | problems
        self._calls = {ray_id: call for ray_id, call in self._calls.items() if ray_id not in calls or ray_id in late}


def _late(node: str) -> Problem:
    hint = "its worker processes may be slow to start: check the load there, or raise timeout"
    return Problem(message=f"{node} did not answer in time", hint=hint)


def _node_info(rank: int, node: RayNode, report: probes.NodeReport, declared: Iterable[DeclaredHardware]) -> NodeInfo:
    return NodeInfo(
        rank=rank,
        ray_id=node.ray_id,
        address=node.address,
        name=printable(report.hostname) if node.name in ("", node.address) else node.name,
        hostname=printable(report.hostname),
        is_head=node.is_head,
        cpus=int(node.resources.get("CPU", 0)),
        memory=report.memory,
        interpreter=report.software.interpreter,
        python=report.software.python,
        ray=report.software.packages.get("ray", "unknown"),
        network=report.network,
        ephemeral_ports=report.ephemeral_ports,
        accelerators=node_accelerators(node.resources, report.environment, report.nvidia, str(node)),
        hardware=tuple(item.complete() for item in declared if item.node_rank == rank),
        labels=tuple(sorted((key, value) for key, value in node.labels.items() if not key.startswith("ray.io/"))),
        search_paths=tuple((name, value) for name, value in report.environment.items() if name in SEARCH_PATHS),
        numa=tuple(report.numa.items()),
    )


def group_for_probe(nodes: Iterable[RayNode]) -> list[list[RayNode]]:
    """Group the nodes that share a probe; a node whose raylet is not seen here, or does not answer, is alone."""
    raylets = {item.flag("node_id"): item for item in list_raylets()}
    groups: dict[Hashable, list[RayNode]] = {}
    for node in nodes:
        key: Hashable = node.ray_id
        raylet = raylets.get(node.ray_id)
        if raylet is not None:
            # The raylet may belong to another user, or have just ended.
            with contextlib.suppress(psutil.Error, OSError):
                inodes = [os.stat(f"/proc/{raylet.pid}/ns/{name}").st_ino for name in _NAMESPACES]
                python = raylet.flag("python_worker_command").split()[:1]
                key = (*inodes, *python, frozenset(psutil.Process(raylet.pid).environ().items()))
        groups.setdefault(key, []).append(node)
    found = list(groups.values())
    several = [node for group in found if len(group) > 1 for node in group]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        awake = {node.ray_id for node, answers in zip(several, pool.map(_answers, several), strict=True) if answers}
    out = []
    for group in found:
        sharing = [node for node in group if node.ray_id in awake]
        out += [sharing] if sharing else []
        out += [[node] for node in group if node.ray_id not in awake]
    return out


def _answers(node: RayNode) -> bool:
    """Whether the raylet of a node answers; which answer it is does not matter."""
    try:
        takes_token(f"{node.address}:{node.port}", "", RAYLET_ANSWER_SECONDS)
    except ClusterError:
        return False
    return True
