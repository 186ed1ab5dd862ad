"""Finding the nodes of a Ray cluster: wait until they are there, probe each, put them in order."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.kinds import hardware_kind, make_piece
from roost.config.node_groups import DeclaredHardware, NodeGroup
from roost.config.topology import Accelerator, Node, Topology
from roost.errors import CheckFailed, ConfigError, NodesMissing, Problem
from roost.machine import probe as probes
from roost.runtime.nodes.accelerators import node_accelerators, variables_of_interest
from roost.runtime.nodes.info import NodeInfo, RayNode
from roost.runtime.nodes.order import NODE_RANK_VARIABLE, address_key, order_nodes
from roost.runtime.process.environment import SEARCH_PATHS
from roost.text import error_text, join_words, plural

Answer = TypeVar("Answer")

log: logging.Logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_SAY_EVERY_SECONDS = 10.0


def live_nodes() -> list[RayNode]:
    """Return the nodes that are alive now, sorted by address."""
    found = [
        RayNode(
            ray_id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            name=entry.get("NodeName", ""),
            port=entry.get("NodeManagerPort", 0),
            resources=entry.get("Resources", {}),
            labels=entry.get("Labels", {}),
        )
        for entry in ray.nodes()  # type: ignore[no-untyped-call]
        if entry["Alive"]
    ]
    return sorted(found, key=lambda node: (address_key(node.address), node.name, node.ray_id))


def wait_for_nodes(count: int, deadline: float) -> list[RayNode]:
    """Wait until `count` nodes are alive; NodesMissing at the deadline (of `time.monotonic`) names those that are."""
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
        if now >= deadline:
            raise NodesMissing(_missing(count, nodes, seen, now - began))
        if now >= say_at:
            log.warning("waiting for %s; here: %s", _lacking(count, nodes), join_words(nodes) or "none")
            say_at = now + _SAY_EVERY_SECONDS
        time.sleep(min(_POLL_SECONDS, deadline - now))


def discover(nodes: Sequence[RayNode], deadline: float, groups: Iterable[NodeGroup] = ()) -> tuple[NodeInfo, ...]:
    """Probe all nodes at the same time and put them in order; each has the hardware that `groups` declare on it."""
    variables = [*variables_of_interest(), *SEARCH_PATHS, NODE_RANK_VARIABLE]
    reports = on_nodes({node.ray_id: str(node) for node in nodes}, probes.probe, variables, deadline=deadline)
    ranks = {ray_id: report.environment.get(NODE_RANK_VARIABLE) for ray_id, report in reports.items()}
    order = order_nodes(nodes, {ray_id: rank for ray_id, rank in ranks.items() if rank is not None})
    declared = [item for group in groups for item in group.hardware]
    return tuple(_node_info(rank, node, reports[node.ray_id], declared) for rank, node in enumerate(order))


def first_nodes(nodes: tuple[NodeInfo, ...], count: int | None) -> tuple[tuple[NodeInfo, ...], str]:
    """Return as many nodes as a job asks for, and a notice about those that it leaves out."""
    used, surplus = nodes[:count], nodes[len(nodes[:count]) :]
    if not surplus:
        return used, ""
    left_out = f"{join_words(surplus)} {'is' if len(surplus) == 1 else 'are'}"
    return used, f"the cluster has {len(nodes)} nodes and num_nodes is {count}: {left_out} not used"


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


def check_groups(nodes: Sequence[NodeInfo], groups: Sequence[NodeGroup], deadline: float) -> None:
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
    nodes: Mapping[str, str], function: Callable[..., Answer], *arguments: Any, deadline: float
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
    nodes: Mapping[str, str], function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], deadline: float
) -> dict[str, Any]:
    """Run a function on each node that has arguments (Ray id -> arguments)."""
    calls = {}
    for ray_id, values in arguments.items():
        # Hard affinity: for a node that is gone the call fails immediately.
        strategy = NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
        calls[ray_id] = remote_function(function).options(scheduling_strategy=strategy).remote(*values)
    answers: dict[str, Any] = {}
    problems: list[Problem] = []
    for ray_id, call in calls.items():
        try:
            answers[ray_id] = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            hint = "its worker processes may be slow to start: check the load there, or raise timeout"
            problems.append(Problem(message=f"{nodes[ray_id]} did not answer in time", hint=hint))
        except RayError as error:
            problems.append(_failure(nodes[ray_id], function, error))
    if problems:
        raise CheckFailed(problems)
    return answers


def _failure(node: str, function: Callable[..., Any], error: RayError) -> Problem:
    if isinstance(error, RayTaskError):
        why = str(error) if error.cause is None else error_text(error.cause)
        hint = ""
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
        name=report.hostname if node.name in ("", node.address) else node.name,
        hostname=report.hostname,
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
