"""`roost profile`: a profile for `roost search`, from the times that runs recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from roost.cli.options import Out
from roost.cli.out import tell, write_text
from roost.cli.runs import complete_run, find_folder, saved_plan
from roost.config.hardware import ACCELERATOR
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.placement.plan import Plan
from roost.runtime.runs.record import JOB_FILES
from roost.search.measured import CallTime, Placed, make_profile
from roost.text import join_words
from roost.watch.live import read_whole

_MOST_MERGED = 10_000
"""Of so many calls that share a line, the rest says nothing new."""


def profile(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Ids or folders of runs, or latest.", autocompletion=complete_run),
    ],
    out: Out = None,
) -> None:
    folders = [find_folder(Path(run)) for run in runs]
    found = make_profile((_placed(saved_plan(folder)), _times(folder)) for folder in folders)
    write_text(yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=120), out)


def _placed(plan: Plan) -> dict[str, Placed]:
    """Return how many accelerators each component has in a plan; one on bare nodes has none."""
    found = {}
    for component in plan.components:
        first = component.placements[0]
        if first.hardware_type != ACCELERATOR or not first.local_hardware_ranks:
            found[component.name] = Placed(0, 1)
            continue
        nodes = {placement.cluster_node_rank for placement in component.placements}
        kinds = {item.model or str(item.type) for rank in nodes for item in plan.topology.nodes[rank].accelerators}
        if len(kinds) > 1:
            mixed = join_words(sorted(kinds))
            tell(f"note: {component.name} ran on {mixed}, so its times are those of no kind; they are left out")
            continue
        per_worker = len(first.local_hardware_ranks)
        found[component.name] = Placed(len(component.hardware_ranks), per_worker, kinds.pop())
    return found


def _times(folder: Path) -> list[CallTime]:
    """Return the calls of a run; where its job has a flow, those of the flow. Calls that share a line took alike."""
    model, flow = read_whole(folder), _flow_calls(folder)
    found = []
    for address in model.addresses:
        role = address.rpartition(":")[0]
        for span in model.spans(address):
            if not span.is_wait and (not flow or f"{role}.{span.name}" in flow):
                seconds = span.busy / max(span.calls, 1)
                time = CallTime(f"{role}.{span.name}", address, span.start, seconds, not span.failed)
                found += [time] * min(span.calls, _MOST_MERGED)
    return found


def _flow_calls(folder: Path) -> tuple[str, ...]:
    """Return the calls in the flow of the job that ran, if it was a job and has one."""
    path = next((folder / name for name in JOB_FILES if (folder / name).is_file()), None)
    flow = read_job_text(load_text(path, limit=JOB_FILE_LIMIT), name=str(path)).flow if path else None
    return flow.calls if flow else ()
