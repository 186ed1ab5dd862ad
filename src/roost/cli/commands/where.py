"""`roost where`: where a worker sits, and its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from roost.cli.completion import complete_worker
from roost.cli.options import Job, TextForm
from roost.cli.plans import Flags, load_plan, with_flags
from roost.cli.terminal import print_answer
from roost.cli.text.layout import facts, titled
from roost.config.topology import Node
from roost.errors import ConfigError
from roost.placement.environment import worker_interpreter
from roost.redact import hide


@with_flags
def where(
    job: Job,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="Component and rank, as in actor:3.", autocompletion=complete_worker)
    ],
    flags: Flags,
    form: TextForm = "text",
) -> None:
    plan = load_plan(job, flags)
    component, colon, number = worker.rpartition(":")
    if not colon or not (number.isascii() and number.isdigit() and len(number) < 10):
        raise ConfigError(f"{worker!r} is not a worker", hint="write component:rank, as in actor:3")
    rank = int(number)
    found = plan.placement(component, rank)
    answer = {
        "worker": f"{component}:{rank}",
        "world_size": plan.component(component).world_size,
        "node_rank": found.cluster_node_rank,
        "hardware_type": found.hardware_type,
        "local_hardware_ranks": list(found.local_hardware_ranks),
        "node_group": found.node_group_label,
        "python_interpreter_path": worker_interpreter(plan.topology, found),
        "environment": {name: hide(name, value) for name, value in plan.environment(component, rank).items()},
    }
    print_answer(form, answer, lambda: _answer_text(answer, plan.topology.nodes[found.cluster_node_rank]))


def _answer_text(answer: Mapping[str, Any], node: Node) -> Text:
    named = ", ".join(part for part in (node.name, node.address) if part)
    ranks = ",".join(map(str, answer["local_hardware_ranks"]))
    interpreter = answer["python_interpreter_path"]
    lines = [
        ("worker", f"{answer['worker']} of {answer['world_size']}"),
        ("node", f"{answer['node_rank']}{f' ({named})' if named else ''}"),
        ("hardware", f"{answer['hardware_type']} {ranks}" if ranks else "the node itself"),
        ("node group", answer["node_group"]),
        *([("interpreter", interpreter)] if interpreter else []),
        *titled("environment", [f"{name}={value}" for name, value in answer["environment"].items()]),
    ]
    return facts(lines)
