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
from roost.machine.ports import refuses
from roost.machine.processes import list_processes
from roost.runtime.connect.calls import get, on_node
from roost.runtime.connect.find_head import takes_token
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
        )
        for entry in _node_table()
        if entry["Alive"]
    ]
    return sorted(found, key=lambda node: (address_key(node.address), node.name, node.ray_id))


def _node_table() -> list[dict[str, Any]]:
    return within(ASK_SECONDS, ray.nodes, "list its nodes")


def has_ended(ray_id: str) -> bool:
    """Return whether a node that Ray has given up has ended, and its workers with it, as far as can be known.

    Ray also gives up a node that hangs, or that cannot be reached; what runs there then goes on.
    """
    for entry in _node_table():
        if entry["NodeID"] == ray_id:
            return refuses(f"{entry['NodeManagerAddress']}:{entry.get('NodeManagerPort', 0)}", KNOCK_SECONDS)
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
        now = time.monotonic()
        if deadline.is_over:
            raise NodesMissing(_missing(count, nodes, seen, now - began))
        if now >= say_at:
            log.warning("waiting for %s; here: %s", _lacking(count, nodes), join_words(nodes) or "none")
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
    probing.start([node for rank, node in ranked.items() if rank < count])
    probing.collect(deadline)
    if probing.wanted_ranks:
        probing.start([node for rank, node in ranked.items() if rank >= count])
        # A sick node that is not needed must not take all the time.
        probing.collect(deadline.within(SPARE_NODES_SECONDS))
        ranked = rank_nodes(nodes, probing.wanted_ranks, unknown=probing.sick)
        if not all(rank in ranked for rank in range(count)):
            probing.collect(deadline)
            ranked = rank_nodes(nodes, probing.wanted_ranks, unknown=probing.sick)
    reports, sick = probing.reports, probing.sick
    needed = {rank: ranked[rank] for rank in range(count) if rank in ranked}
    # Which of the nodes that do not tell their ranks are needed is not known.
    suspects = [node.ray_id for node in needed.values()] if len(needed) == count else list(sick)
    if problems := [sick[ray_id] for ray_id in suspects if ray_id in sick]:
        raise CheckFailed([_without(problem) for problem in problems] if len(nodes) > count else problems)
    declared = [item for group in groups for item in group.hardware]
    infos = tuple(_node_info(rank, node, reports[node.ray_id], declared) for rank, node in needed.items())
    return infos, _notice(nodes, ranked, count)


def survey(deadline: Deadline) -> tuple[tuple[NodeInfo, ...], tuple[SickNode, ...]]:
    """Probe all nodes that are there; return the nodes that answer and the sick ones, both in order."""
    nodes = wait_for_nodes(1, deadline)
    probing = _Probing()
    probing.start(nodes)
    probing.collect(deadline)
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
    names = {node.ray_id: str(node) for node in nodes}

    def on_ranks(function: Callable[..., Any], argument: Mapping[int, Any]) -> dict[int, dict[Any, str]]:
        arguments = {nodes[rank].ray_id: (value,) for rank, value in argument.items()}
        answers = _on_each(names, function, arguments, deadline)
        return {rank: answers[nodes[rank].ray_id] for rank in argument}

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
    for rank, failed in on_ranks(probes.check_interpreters, wanted).items():
        for path, why in failed.items():
            message = f"node group {wanted[rank][path]!r} wants {path} on {nodes[rank]}: {why}"
            hint = "python_interpreter_path is a path on the node itself, of a Python that has Ray"
            problems.append(Problem(message=message, hint=hint))
    checked = {rank: [piece for _, piece in found] for rank, found in pieces.items()}
    for rank, failed in on_ranks(probes.check_hardware, checked).items():
        for index, why in failed.items():
            item = pieces[rank][index][0]
            settings = ", ".join(f"{key}={value!r}" for key, value in item.settings.items())
            message = f"hardware {item.type!r} on {nodes[rank]} failed its check: {why}"
            problems.append(Problem(message=message, hint=f"its config is {settings or 'empty'}"))
    if problems:
        raise CheckFailed(problems)


def on_nodes(
    nodes: Mapping[str, str], function: Callable[..., Answer], *arguments: Any, deadline: Deadline
) -> dict[str, Answer]:
    """Run a function on several nodes (Ray id -> name in messages); CheckFailed names the nodes where it failed."""
    return _on_each(nodes, function, dict.fromkeys(nodes, arguments), deadline)


@functools.cache
def remote_function(function: Callable[..., Any]) -> Any:
    """Make the function a Ray task, once: Ray exports every new remote function to the whole cluster.

    The task claims no CPU, so that a busy cluster runs it too, and Ray does not retry it: the caller decides that.
    """
    return ray.remote(num_cpus=0, max_retries=0)(function)


def _on_each(
    nodes: Mapping[str, str], function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], deadline: Deadline
) -> dict[str, Any]:
    """Run a function on each node that has arguments (Ray id -> arguments); CheckFailed names those where it failed."""
    answers, problems, late = _collect(nodes, function, _call(function, arguments), deadline)
    problems |= {ray_id: _late(nodes[ray_id]) for ray_id in late}
    if problems:
        raise CheckFailed(problems[ray_id] for ray_id in arguments if ray_id in problems)
    return answers


def _call(function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Start a function on each node that has arguments, and return the calls."""
    calls = {}
    for ray_id, values in arguments.items():
        # Hard affinity: for a node that is gone the call fails immediately.
        strategy = on_node(ray_id)
        calls[ray_id] = remote_function(function).options(scheduling_strategy=strategy).remote(*values)
    return calls


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
        except RayError as error:
            problems[ray_id] = _failure(nodes[ray_id], function, error)
    return answers, problems, late


class _Probing:
    """Probes of nodes, all at the same time, and only one for the nodes that share it."""

    def __init__(self) -> None:
        self.reports: dict[str, probes.NodeReport] = {}
        self._names: dict[str, str] = {}
        self._calls: dict[str, Any] = {}
        self._sharing: dict[str, list[RayNode]] = {}
        self._problems: dict[str, Problem] = {}

    @property
    def sick(self) -> dict[str, Problem]:
        """The problem of each node that has not reported."""
        return self._problems | {ray_id: _late(self._names[ray_id]) for ray_id in self._calls}

    @property
    def wanted_ranks(self) -> dict[str, str]:
        """The ranks that nodes were given by their users."""
        ranks = {ray_id: report.environment.get(NODE_RANK_VARIABLE) for ray_id, report in self.reports.items()}
        return {ray_id: rank for ray_id, rank in ranks.items() if rank is not None}

    def start(self, nodes: Sequence[RayNode]) -> None:
        """Start to probe nodes."""
        self._names |= {node.ray_id: str(node) for node in nodes}
        groups = group_for_probe(nodes)
        self._sharing |= {first.ray_id: others for first, *others in groups if others}
        self._call([group[0] for group in groups])

    def collect(self, deadline: Deadline) -> None:
        """Wait for the reports until the deadline."""
        shared = [ray_id for ray_id in self._calls if ray_id in self._sharing]
        self._receive(shared, deadline.within(deadline.left / 2))
        for ray_id, others in self._sharing.items():
            if ray_id in self.reports:
                self.reports |= {node.ray_id: self.reports[ray_id] for node in others}
            else:
                # It may be sick in a way of its own.
                self._call(others)
        self._sharing.clear()
        self._receive(list(self._calls), deadline)

    def _call(self, nodes: Sequence[RayNode]) -> None:
        variables = [*variables_of_interest(), *SEARCH_PATHS, NODE_RANK_VARIABLE]
        self._calls |= _call(probes.probe, {node.ray_id: [variables] for node in nodes})

    def _receive(self, ray_ids: Sequence[str], deadline: Deadline) -> None:
        calls = {ray_id: self._calls[ray_id] for ray_id in ray_ids}
        reports, problems, late = _collect(self._names, probes.probe, calls, deadline)
        self.reports |= reports
        self._problems |= problems
        self._calls = {ray_id: call for ray_id, call in self._calls.items() if ray_id not in calls or ray_id in late}


def _without(problem: Problem) -> Problem:
    hint = "to do without it, end Ray there with `ray stop`: the next node then takes its rank"
    return replace(problem, hint=f"{problem.hint}; {hint}" if problem.hint else hint)


def _notice(nodes: Sequence[RayNode], ranked: Mapping[int, RayNode], count: int) -> str:
    """Return a notice about the nodes that a job leaves out, or nothing."""
    ranks = {node.ray_id: rank for rank, node in ranked.items()}
    unused = [node for node in nodes if ranks.get(node.ray_id, count) >= count]
    if not unused:
        return ""
    unused.sort(key=lambda node: ranks.get(node.ray_id, len(nodes)))
    names = join_words([name_node(ranks.get(node.ray_id), node.address, node.name) for node in unused], most=8)
    verb = "is" if len(unused) == 1 else "are"
    return f"the cluster has {len(nodes)} nodes and num_nodes is {count}: {names} {verb} not used"


def _late(node: str) -> Problem:
    hint = "its worker processes may be slow to start: check the load there, or raise timeout"
    return Problem(message=f"{node} did not answer in time", hint=hint)


def _failure(node: str, function: Callable[..., Any], error: RayError) -> Problem:
    if isinstance(error, RayTaskError):
        why = str(error) if error.cause is None else error_text(error.cause)
        hint = ""
        if "Traceback" in why:
            # Ray quotes all of it where the function cannot be imported.
            why = why.strip().splitlines()[-1]
        if "No module named" in str(error):
            hint = "install Roost and the job's own packages in the environment that the node was started from"
        return Problem(message=f"{node}: {function.__name__} failed there: {why}", hint=hint)
    return Problem(
        message=f"{node} is gone, or its worker process ended: {str(error).strip().splitlines()[0]}",
        hint="check the node; `roost nodes` lists those that are there",
    )


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
        hardware=tuple(item for item in declared if item.node_rank == rank),
        labels=tuple(sorted((key, value) for key, value in node.labels.items() if not key.startswith("ray.io/"))),
        search_paths=tuple((name, value) for name, value in report.environment.items() if name in SEARCH_PATHS),
    )


def _missing(count: int, nodes: Sequence[RayNode], seen: Mapping[str, RayNode], waited: float) -> Problem:
    gone = [node for ray_id, node in seen.items() if ray_id not in {node.ray_id for node in nodes}]
    there = f"there {'is' if len(nodes) == 1 else 'are'} {len(nodes)}" + (f": {join_words(nodes)}" if nodes else "")
    left = f"; {join_words(gone)} came and went" if gone else ""
    address = ray.get_runtime_context().gcs_address
    return Problem(
        message=f"{_lacking(count, nodes)} did not come in {waited:.0f} s; {there}{left}",
        hint=f"on each that is missing run `ray start --address={address}`, or ask for num_nodes={max(1, len(nodes))}",
    )


def _lacking(count: int, nodes: Sequence[RayNode]) -> str:
    return f"{count - len(nodes)} of {plural(count, 'node')}" if len(nodes) < count else "the head"


def group_for_probe(nodes: Iterable[RayNode]) -> list[list[RayNode]]:
    """Group the nodes that share a probe; a node whose raylet is not seen here, or does not answer, is alone."""
    raylets = {item.flag("node_id"): item for item in list_processes() if item.name == "raylet"}
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
