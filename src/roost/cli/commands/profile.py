"""`roost profile`: a profile for `roost search`, from the times that runs recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from roost.cli.options import Out
from roost.cli.out import tell, write_text
from roost.cli.plans import read_saved_plan
from roost.cli.runs import complete_run, find_folder, plan_file
from roost.config.hardware import ACCELERATOR
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, PLAN_FILE_LIMIT, load_text
from roost.errors import ConfigError
from roost.placement.plan import Plan
from roost.runtime.runs.record import JOB_FILES
from roost.search.measured import CallTime, Placed, make_profile, trace_times
from roost.text import join_words
from roost.watch.model import RunModel
from roost.watch.reading import EventReader

_TRACE_FILE = "trace.json"
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
    found = make_profile((_placed(read_saved_plan(plan_file(folder))), _times(folder)) for folder in folders)
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
    """Return the calls of a run; where its job has a flow, those of the flow."""
    path, reader = folder / _TRACE_FILE, EventReader(folder, whole=True)
    if path.is_file():
        found = _trace_times(path)
    elif reader.exists:
        found = _event_times(reader)
    else:
        hint = "the run used Cluster(record=False) or ROOST_EVENTS=off, or is older; a profile can be written by hand"
        raise ConfigError(f"{folder} has no events: the run recorded no times", hint=hint)
    flow = _flow_calls(folder)
    return [time for time in found if time.call in flow] if flow else found


def _event_times(reader: EventReader) -> list[CallTime]:
    """Read the calls from events. Of calls that share a line, each took as long as the others."""
    model = RunModel(keeps_all=True)
    model.take(reader.read())
    found = []
    for address in model.addresses:
        role = address.rpartition(":")[0]
        for span in model.spans(address):
            if span.is_wait:
                continue
            seconds = span.busy / max(span.calls, 1)
            time = CallTime(f"{role}.{span.name}", address, span.start, seconds, not span.failed)
            found += [time] * min(span.calls, _MOST_MERGED)
    return found


def _trace_times(path: Path) -> list[CallTime]:
    try:
        return trace_times(json.loads(load_text(path, limit=PLAN_FILE_LIMIT)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON: {error}") from None


def _flow_calls(folder: Path) -> tuple[str, ...]:
    """Return the calls in the flow of the job that ran, if it was a job and has one."""
    path = next((folder / name for name in JOB_FILES if (folder / name).is_file()), None)
    flow = read_job_text(load_text(path, limit=JOB_FILE_LIMIT), name=str(path)).flow if path else None
    return flow.calls if flow else ()
