"""`roost where`: where a worker sits, and its environment; or who sits on a piece of hardware."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from roost.cli.completion import complete_worker
from roost.cli.options import Job, TextForm
from roost.cli.plans import Flags, load_plan, with_flags
from roost.cli.terminal import facts, print_answer, titled, worker_names
from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.errors import ConfigError
from roost.placement.environment import worker_interpreter
from roost.placement.plan import Piece, Plan
from roost.redact import hide
from roost.text import join_words, plural


@with_flags
def where(
    job: Job,
    place: Annotated[
        str,
        typer.Argument(
            metavar="WORKER|HARDWARE",
            help="A worker (actor:3), an accelerator (1:4), other hardware (1:Franka:0) or a node (1).",
            autocompletion=complete_worker,
        ),
    ],
    flags: Flags,
    form: TextForm = "text",
) -> None:
    plan = load_plan(job, flags)
    component, _, _ = place.rpartition(":")
    is_hardware = _is_number(place.partition(":")[0]) and component not in plan.names
    answer, text = _on_hardware(plan, place) if is_hardware else _of_worker(plan, place)
    print_answer(form, answer, lambda: text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _of_worker(plan: Plan, worker: str) -> tuple[dict[str, Any], Text]:
    component, _, number = worker.rpartition(":")
    if not component or not _is_number(number):
        hint = "write component:rank as in actor:3, or hardware: 1:4, 1:Franka:0, or 1 for a node"
        raise ConfigError(f"{worker!r} is not a worker", hint=hint)
    rank = int(number)
    found = plan.placement(component, rank)
    answer: dict[str, Any] = {
        "worker": f"{component}:{rank}",
        "world_size": plan.component(component).world_size,
        "node_rank": found.cluster_node_rank,
        "hardware_type": found.hardware_type,
        "local_hardware_ranks": list(found.local_hardware_ranks),
        "node_group": found.node_group_label,
        "python_interpreter_path": worker_interpreter(plan.topology, found),
        "environment": {name: hide(name, value) for name, value in plan.environment(component, rank).items()},
    }
    node = plan.topology.nodes[found.cluster_node_rank]
    named = ", ".join(part for part in (node.name, node.address) if part)
    ranks = ",".join(map(str, found.local_hardware_ranks))
    interpreter = answer["python_interpreter_path"]
    lines = [
        ("worker", f"{answer['worker']} of {answer['world_size']}"),
        ("node", f"{answer['node_rank']}{f' ({named})' if named else ''}"),
        ("hardware", f"{answer['hardware_type']} {ranks}" if ranks else "the node itself"),
        ("node group", found.node_group_label),
        *([("interpreter", interpreter)] if interpreter else []),
        *titled("environment", [f"{name}={value}" for name, value in answer["environment"].items()]),
    ]
    return answer, facts(lines)


def _on_hardware(plan: Plan, text: str) -> tuple[dict[str, Any], Text]:
    """Show who sits on `1:4`, `1:Franka:0`, or on all that node `1` has."""
    parts = text.split(":")
    if len(parts) > 3 or not _is_number(parts[-1]):
        hint = "write node:accelerator as in 1:4, 1:Franka:0, or 1 for a node"
        raise ConfigError(f"{text!r} is not a piece of hardware", hint=hint)
    node_rank = int(parts[0])
    if node_rank >= plan.topology.num_nodes:
        last = plan.topology.num_nodes - 1
        hint = f"node ranks are 0-{last}" if last else "there is only 0"
        raise ConfigError(f"there is no node {node_rank}", hint=hint)
    counts = {ACCELERATOR: len(plan.topology.nodes[node_rank].accelerators), **plan.topology.declared_on(node_rank)}
    occupants = plan.occupants()
    if len(parts) == 1:
        # In the order of the map; the node itself only if a worker sits there.
        pieces = [Piece(node_rank, kind, local) for kind, count in counts.items() for local in range(count)]
        pieces += [piece for piece in [Piece(node_rank, BARE_NODE, -1)] if piece in occupants]
    else:
        kind, local_rank = parts[1] if len(parts) == 3 else ACCELERATOR, int(parts[-1])
        if kind not in counts:
            hint = f"it has {join_words(list(counts))}"
            raise ConfigError(f"node {node_rank} has no hardware of kind {kind!r}", hint=hint)
        if local_rank >= counts[kind]:
            hint = f"it has {plural(counts[kind], kind)}" + (f", 0-{counts[kind] - 1}" if counts[kind] > 1 else "")
            raise ConfigError(f"node {node_rank} has no {kind} {local_rank}", hint=hint)
        pieces = [Piece(node_rank, kind, local_rank)]
    hardware, lines = [], []
    for piece in pieces:
        workers, local = occupants.get(piece, []), None if piece.kind == BARE_NODE else piece.local_rank
        hardware.append({"hardware_type": piece.kind, "local_rank": local, "workers": [str(one) for one in workers]})
        name = "the node itself" if local is None else f"{piece.kind} {local}"
        lines.append((name, ", ".join(worker_names(workers)) or "none"))
    answer = {"node_rank": node_rank, "hardware": hardware}
    return answer, facts([("node", str(node_rank)), *(lines or [("workers", "none")])])
