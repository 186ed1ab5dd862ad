"""Finding the nodes of a Ray cluster: wait until they are there, look around on each, put them in order."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.config.kinds import hardware_kind, make_piece
from roost.config.node_groups import DeclaredHardware, NodeGroup
from roost.config.topology import Topology
from roost.errors import CheckFailed, ConfigError, NodesMissing, Problem
from roost.machine import probe as probes
from roost.runtime.nodes.accelerators import node_accelerators, variables_of_interest
from roost.runtime.nodes.info import NodeInfo, describe_node, topology_node
from roost.runtime.nodes.order import NODE_RANK_VARIABLE, FoundNode, address_key, order_nodes
from roost.runtime.process.environment import SEARCH_PATHS
from roost.text import join_words, plural

Answer = TypeVar("Answer")

log: logging.Logger = logging.getLogger(__name__)

_HEAD_RESOURCE = "node:__internal_head__"
_POLL_SECONDS = 0.1
_SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node as Ray lists it."""

    ray_id: str
    address: str
    name: str
    port: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @property
    def is_head(self) -> bool:
        """Whether Ray's own services run here."""
        return _HEAD_RESOURCE in self.resources

    def __str__(self) -> str:
        return describe_node(self.address, self.name)


def live_nodes() -> list[RayNode]:
    """The nodes that are alive now, by address."""
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
    """Wait until `count` nodes are alive; NodesMissing at the deadline (of `time.monotonic`) names who came."""
    began = time.monotonic()
    say_at = began + 2
    seen: dict[str, RayNode] = {}
    while True:
        nodes = live_nodes()
        seen |= {node.ray_id: node for node in nodes}
        # Before the head has registered, the answer is not complete.
        if len(nodes) >= count and any(node.is_head for node in nodes):
            return nodes
        now = time.monotonic()
        if now >= deadline:
            raise NodesMissing(_missing(count, nodes, seen, now - began))
        if now >= say_at:
            log.warning("%s", _waiting(count, nodes))
            say_at = now + _SAY_EVERY_SECONDS
        time.sleep(min(_POLL_SECONDS, deadline - now))


def discover(nodes: Sequence[RayNode], deadline: float) -> tuple[NodeInfo, ...]:
    """Look around on every node at once, and put them in order."""
    variables = [*variables_of_interest(), *SEARCH_PATHS, NODE_RANK_VARIABLE]
    reports = on_nodes({node.ray_id: str(node) for node in nodes}, probes.probe, variables, deadline=deadline)
    by_id = {node.ray_id: node for node in nodes}
    order = order_nodes(
        [
            FoundNode(
                ray_id=node.ray_id,
                address=node.address,
                name=node.name,
                port=node.port,
                is_head=node.is_head,
                wanted_rank=dict(reports[node.ray_id].environment).get(NODE_RANK_VARIABLE),
            )
            for node in nodes
        ]
    )
    return tuple(_node_info(rank, by_id[found.ray_id], reports[found.ray_id]) for rank, found in enumerate(order))


def first_nodes(nodes: tuple[NodeInfo, ...], count: int | None) -> tuple[tuple[NodeInfo, ...], str]:
    """As many nodes as a job asks for, and what to say of those that it leaves out."""
    used, surplus = nodes[:count], nodes[len(nodes[:count]) :]
    if not surplus:
        return used, ""
    left_out = f"{join_words([str(node) for node in surplus])} {'is' if len(surplus) == 1 else 'are'}"
    return used, f"the cluster has {len(nodes)} nodes and num_nodes is {count}: {left_out} not used"


def make_topology(nodes: Sequence[NodeInfo], groups: Iterable[NodeGroup] = ()) -> Topology:
    """The planner's view of the nodes, with the job's node groups over them."""
    names = [node.name for node in nodes]
    unique = {name for name in names if name and names.count(name) == 1}
    return Topology(
        nodes=tuple(topology_node(node, name_is_unique=node.name in unique) for node in nodes), groups=tuple(groups)
    )


def with_hardware(nodes: Sequence[NodeInfo], groups: Iterable[NodeGroup]) -> tuple[NodeInfo, ...]:
    """The nodes with what the groups declare on them."""
    declared: dict[int, list[DeclaredHardware]] = {}
    for item in (item for group in groups for item in group.hardware):
        declared.setdefault(item.node_rank, []).append(item)
    return tuple(replace(node, hardware=tuple(declared.get(node.rank, ()))) for node in nodes)


def check_groups(nodes: Sequence[NodeInfo], groups: Sequence[NodeGroup], deadline: float) -> None:
    """Check on the nodes themselves what the groups say of them: interpreters and hardware. All mistakes at once."""
    problems = [*_check_interpreters(nodes, groups, deadline), *_check_hardware(nodes, groups, deadline)]
    if problems:
        raise CheckFailed(problems)


def on_nodes(
    nodes: Mapping[str, str], function: Callable[..., Answer], *arguments: Any, deadline: float
) -> dict[str, Answer]:
    """Run a function on several nodes at once (Ray id and how to name it); CheckFailed names those that failed."""
    calls = {ray_id: _call_on(ray_id, function, *arguments) for ray_id in nodes}
    return _answers(calls, nodes, function, deadline)


def _call_on(ray_id: str, function: Callable[..., Any], *arguments: Any) -> ray.ObjectRef[Any]:
    # Hard affinity: a node that is gone is an error at once.
    strategy = NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
    ref: ray.ObjectRef[Any] = remote_function(function).options(scheduling_strategy=strategy).remote(*arguments)
    return ref


@functools.cache
def remote_function(function: Callable[..., Any]) -> Any:
    """The function for Ray, made once: Ray sends what is made anew to the cluster anew.

    It takes no CPU, so that a busy cluster answers too, and is not tried again: that is for the caller to say.
    """
    return ray.remote(num_cpus=0, max_retries=0)(function)


def _answers(
    calls: Mapping[str, ray.ObjectRef[Any]], names: Mapping[str, str], function: Callable[..., Any], deadline: float
) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    problems: list[Problem] = []
    for ray_id, call in calls.items():
        try:
            answers[ray_id] = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            problems.append(
                Problem(
                    message=f"{names[ray_id]} did not answer in time",
                    hint="its worker processes may be slow to start: look at the load there, or raise timeout",
                )
            )
        except RayError as error:
            problems.append(_failure(names[ray_id], function, error))
    if problems:
        raise CheckFailed(problems)
    return answers


def _failure(node: str, function: Callable[..., Any], error: RayError) -> Problem:
    if isinstance(error, RayTaskError):
        cause = error.cause
        said_so = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
        hint = ""
        if "No module named" in str(error):
            hint = "install Roost and the job's own packages in the environment that the node was started from"
        return Problem(message=f"{node}: {function.__name__} failed there: {said_so}", hint=hint)
    return Problem(
        message=f"{node} is gone, or its worker process ended: {str(error).strip().splitlines()[0]}",
        hint="look at the node; `roost nodes` shows who is there",
    )


def _node_info(rank: int, node: RayNode, report: probes.NodeReport) -> NodeInfo:
    return NodeInfo(
        rank=rank,
        ray_id=node.ray_id,
        address=node.address,
        name=report.hostname if node.name in ("", node.address) else node.name,
        hostname=report.hostname,
        is_head=node.is_head,
        cpus=int(node.resources.get("CPU", 0)),
        memory=report.memory,
        interpreter=report.interpreter,
        python=report.python,
        ray=report.ray,
        network=report.network,
        ephemeral_ports=report.ephemeral_ports,
        accelerators=node_accelerators(node.resources, report, str(node)),
        labels=tuple(sorted((key, value) for key, value in node.labels.items() if not key.startswith("ray.io/"))),
        search_paths=tuple((name, value) for name, value in report.environment if name in SEARCH_PATHS),
    )


def _check_interpreters(nodes: Sequence[NodeInfo], groups: Sequence[NodeGroup], deadline: float) -> list[Problem]:
    wanted: dict[int, dict[str, str]] = {}
    for group in groups:
        for config in group.env_configs:
            for rank in config.node_ranks if config.python_interpreter_path else ():
                wanted.setdefault(rank, {})[str(config.python_interpreter_path)] = group.label
    calls = {
        nodes[rank].ray_id: _call_on(nodes[rank].ray_id, probes.find_interpreters, list(wanted[rank]))
        for rank in wanted
    }
    names = {node.ray_id: str(node) for node in nodes}
    answers = _answers(calls, names, probes.find_interpreters, deadline)
    return [
        Problem(
            message=f"node group {paths[path]!r} wants {path} on {nodes[rank]}: {problem}",
            hint="python_interpreter_path is a path on the node itself, of a Python that has Ray",
        )
        for rank, paths in wanted.items()
        for path, problem in answers[nodes[rank].ray_id].items()
    ]


def _check_hardware(nodes: Sequence[NodeInfo], groups: Sequence[NodeGroup], deadline: float) -> list[Problem]:
    """Make each declared piece as its registered class, and run its `check()` on its node."""
    problems: list[Problem] = []
    pieces: dict[int, list[tuple[DeclaredHardware, Any]]] = {}
    for item in (item for group in groups for item in group.hardware):
        if hardware_kind(item.type) is None:
            continue
        try:
            piece = make_piece(item.type, item.node_rank, item.settings)
        except ConfigError as error:
            problems += error.problems
            continue
        if callable(getattr(piece, "check", None)):
            pieces.setdefault(item.node_rank, []).append((item, piece))
    calls = {
        nodes[rank].ray_id: _call_on(nodes[rank].ray_id, probes.run_checks, [piece for _, piece in found])
        for rank, found in pieces.items()
    }
    answers = _answers(calls, {node.ray_id: str(node) for node in nodes}, probes.run_checks, deadline)
    for rank, found in pieces.items():
        for place, why in answers[nodes[rank].ray_id]:
            item = found[place][0]
            config = ", ".join(f"{key}={value!r}" for key, value in item.settings.items())
            problems.append(
                Problem(
                    message=f"hardware {item.type!r} on {nodes[rank]} failed its check: {why}",
                    hint=f"its config is {config or 'empty'}",
                )
            )
    return problems


def _waiting(count: int, nodes: Sequence[RayNode]) -> str:
    here = join_words([str(node) for node in nodes]) or "nobody"
    missing = f"{count - len(nodes)} of {plural(count, 'node')}" if len(nodes) < count else "the head"
    return f"waiting for {missing}; here: {here}"


def _missing(count: int, nodes: Sequence[RayNode], seen: Mapping[str, RayNode], waited: float) -> Problem:
    alive = {node.ray_id for node in nodes}
    gone = [str(node) for ray_id, node in seen.items() if ray_id not in alive]
    came = f"there {'is' if len(nodes) == 1 else 'are'} {len(nodes)}" + (
        f": {join_words([str(node) for node in nodes])}" if nodes else ""
    )
    left = f"; {join_words(gone)} came and went" if gone else ""
    address = ray.get_runtime_context().gcs_address
    missing = f"{count - len(nodes)} of {plural(count, 'node')}" if len(nodes) < count else "the head"
    return Problem(
        message=f"{missing} did not come in {waited:.0f} s; {came}{left}",
        hint=f"on each that is missing run `ray start --address={address}`, or ask for num_nodes={max(1, len(nodes))}",
    )
