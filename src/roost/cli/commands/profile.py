"""`roost profile`: a profile for `roost search`, from the times that runs recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from roost.cli.completion import complete_run
from roost.cli.options import Out
from roost.cli.out import tell, write_text
from roost.cli.plans import find_folder, saved_plan
from roost.config.hardware import ACCELERATOR
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.placement.plan import Plan, pieces_of
from roost.runtime.runs.record import JOB_FILES
from roost.search.measured import CallTime, Placed, RunTimes, make_profile
from roost.text import join_words
from roost.watch.live import read_whole
from roost.watch.roles import own_seconds

_MOST_MERGED = 10_000
"""Of so many calls that share a line, the rest says nothing new."""


def profile(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Ids or folders of runs, or latest.", autocompletion=complete_run),
    ],
    out: Out = None,
) -> None:
    measured = []
    for folder in [find_folder(Path(run)) for run in runs]:
        path = next((folder / name for name in JOB_FILES if (folder / name).is_file()), None)
        job = read_job_text(load_text(path, limit=JOB_FILE_LIMIT), name=str(path)) if path else None
        flow, model = job.flow.calls if job and job.flow else (), read_whole(folder)
        # Without a flow nobody knows which calls make a step; the metrics of the job may.
        steps = [] if flow else [seconds for _, seconds in model.view().steps][1:]
        times = []
        for address in model.addresses:
            for span, busy in own_seconds(model.spans(address)):
                call, count = f"{address.rpartition(':')[0]}.{span.name}", max(span.calls, 1)
                # Calls that share a line took alike.
                taken, each = busy / count, (span.end - span.start) / count
                for place in range(min(count, _MOST_MERGED)):
                    start = span.start + place * each
                    times.append(CallTime(call, address, start, taken, not span.failed, start + each))
        measured.append(RunTimes(_placed(saved_plan(folder)), times, flow, steps))
    write_text(yaml.safe_dump(make_profile(measured), sort_keys=False, default_flow_style=None, width=120), out)


def _placed(plan: Plan) -> dict[str, Placed]:
    """Return how many accelerators each component has in a plan; one on bare nodes has none."""
    found = {}
    space = plan.topology.space()
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
        # Counted over all accelerators, whatever node groups the components are in.
        own = {piece for item in component.placements for piece in pieces_of(item)}
        ranks = tuple(sorted(space.rank_of(piece.node_rank, piece.local_rank) for piece in own))
        found[component.name] = Placed(len(ranks), per_worker, kinds.pop(), ranks)
    return found
