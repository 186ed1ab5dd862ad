"""`roost profile`: a profile for `roost search`, from the times that runs recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from roost.cli.options import Out
from roost.cli.out import write_text
from roost.cli.plans import read_saved_plan
from roost.cli.runs import complete_run, find_folder, plan_file
from roost.config.hardware import ACCELERATOR
from roost.config.yaml_file import PLAN_FILE_LIMIT, load_text
from roost.errors import ConfigError
from roost.placement.plan import Plan
from roost.search.measured import CallTime, Placed, make_profile, trace_times

_TRACE_FILE = "trace.json"


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
        on_devices = first.hardware_type == ACCELERATOR and bool(first.local_hardware_ranks)
        devices = len(component.hardware_ranks) if on_devices else 0
        found[component.name] = Placed(devices, len(first.local_hardware_ranks) if on_devices else 1)
    return found


def _times(folder: Path) -> list[CallTime]:
    path = folder / _TRACE_FILE
    if not path.is_file():
        hint = f"roost demo writes {_TRACE_FILE} to the run's folder; a profile can also be written by hand"
        raise ConfigError(f"{folder} has no {_TRACE_FILE}: the run recorded no times", hint=hint)
    try:
        return trace_times(json.loads(load_text(path, limit=PLAN_FILE_LIMIT)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON: {error}") from None
