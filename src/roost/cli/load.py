"""From what was typed to a plan: a job planned on the hardware of the flags, or a plan that was saved."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roost.config.run import read_job_text
from roost.config.topology import Topology
from roost.config.yaml_file import JOB_FILE_LIMIT, PLAN_FILE_LIMIT, check_size, load_text
from roost.errors import ConfigError, RoostError
from roost.placement.plan import Plan
from roost.placement.planner import PlacementKind, make_plan
from roost.text import join_words

if TYPE_CHECKING:
    from roost.cli.live import LiveHardware
    from roost.runtime.runs.diff import Fact

_DEFAULT_ACCELERATORS = 8
_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """How a job is to be planned: on which hardware, by which rules."""

    cluster: str | None
    inventory: Path | None
    live: bool
    placement: PlacementKind
    no_isolate: bool

    def given(self) -> list[str]:
        """The flags that were given, by name."""
        values = {
            "--cluster": self.cluster is not None,
            "--inventory": self.inventory is not None,
            "--live": self.live,
            "--placement": self.placement != "auto",
            "--no-isolate": self.no_isolate,
        }
        return [name for name, given in values.items() if given]


def load_plan(path: Path, flags: Flags) -> Plan:
    """The plan of a job, or a saved plan; for that one the flags have nothing to say."""
    return load_live_plan(path, flags)[0]


def load_live_plan(path: Path, flags: Flags) -> tuple[Plan, LiveHardware | None]:
    """The same, and the live cluster that it was planned on, where it was."""
    path = _plan_file(path)
    text = load_text(path, limit=PLAN_FILE_LIMIT)
    if not _is_saved_plan(text):
        return _plan_job(path, text, flags, None)
    if flags.given():
        raise ConfigError(
            f"{path} is a plan that was saved, with its hardware in it", hint=f"leave out {', '.join(flags.given())}"
        )
    return _saved_plan(path, text), None


def load_plans(before: Path, after: Path, flags: Flags) -> tuple[Plan, Plan]:
    """Two plans to compare. A job beside a saved plan is planned on that plan's hardware unless flags say other."""
    before, after = _plan_file(before), _plan_file(after)
    texts = [load_text(path, limit=PLAN_FILE_LIMIT) for path in (before, after)]
    saved = [
        _saved_plan(path, t) if _is_saved_plan(t) else None for path, t in zip((before, after), texts, strict=True)
    ]
    if all(saved) and flags.given():
        raise ConfigError(
            "both plans were saved, with their hardware in them", hint=f"leave out {', '.join(flags.given())}"
        )
    hardware = next((plan.topology for plan in saved if plan is not None), None)
    one, other = (
        plan or _plan_job(path, text, flags, hardware)[0]
        for plan, path, text in zip(saved, (before, after), texts, strict=True)
    )
    return one, other


def run_folder(path: Path) -> Path | None:
    """The folder of the run that is meant, by its id or its path; None where a file is meant."""
    is_file = str(path) == "-" or path.suffix in _FILES or (os.path.exists(path) and not os.path.isdir(path))
    if is_file:
        return None
    from roost.runtime.runs.index import find_run

    try:
        return find_run(str(path))
    except ConfigError as error:
        hint = error.problems[0].hint
        raise ConfigError(f"there is no file {str(path)!r}, and no run of that name", hint=hint) from None


def diff_runs(before: Path, after: Path) -> list[Fact] | None:
    """What differs between two runs beside their plans; None where one of them is no run."""
    folders = [run_folder(path) for path in (before, after)]
    if folders[0] is None or folders[1] is None:
        return None
    from roost.runtime.runs.diff import diff_records
    from roost.runtime.runs.index import read_run

    return diff_records(read_run(folders[0]), read_run(folders[1]))


def plan_of_run(folder: Path) -> Plan:
    """The plan that a run kept."""
    path = _plan_in(folder)
    return _saved_plan(path, load_text(path, limit=PLAN_FILE_LIMIT))


def _plan_file(path: Path) -> Path:
    """`-` is standard input, and a run stands for its plan."""
    if str(path) == "-":
        return Path("/dev/stdin")
    folder = run_folder(path)
    return path if folder is None else _plan_in(folder)


def _plan_in(folder: Path) -> Path:
    from roost.runtime.runs.record import PLAN_FILE, read_record

    path = folder / PLAN_FILE
    if not os.path.isfile(path):
        record = read_record(folder)
        raise ConfigError(f"run {record.id} has no plan: it launched nothing, or its {PLAN_FILE} was removed")
    return path


def tell(text: str) -> None:
    """Say something beside the answer."""
    print(text, file=sys.stderr)


def _is_saved_plan(text: str) -> bool:
    """Whether this was saved with --format json; a job in JSON has no version and no hash."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        # A plan that was cut off is still told as one.
        return '"version"' in text[:400] and '"hash"' in text[:400]
    return isinstance(data, dict) and {"version", "hash", "components"} <= set(data) and "cluster" not in data


def _saved_plan(path: Path, text: str) -> Plan:
    try:
        return Plan.from_json(text)
    except RoostError as error:
        problems = [replace(problem, message=f"{path}: {problem}", hint="", where=None) for problem in error.problems]
        raise ConfigError(problems) from None


def _plan_job(path: Path, text: str, flags: Flags, hardware: Topology | None) -> tuple[Plan, LiveHardware | None]:
    check_size(str(path), len(text), JOB_FILE_LIMIT)
    draft = read_job_text(text, name=str(path))
    topology, live = _topology(flags, draft.job.cluster.num_nodes, hardware)
    plan = make_plan(draft, topology, placement=flags.placement, isolate_accelerator=not flags.no_isolate)
    return plan, live


def _topology(flags: Flags, num_nodes: int | None, hardware: Topology | None) -> tuple[Topology, LiveHardware | None]:
    hardware_flags = [name for name in flags.given() if name in ("--cluster", "--inventory", "--live")]
    if len(hardware_flags) > 1:
        raise ConfigError(
            f"{join_words(hardware_flags)} describe the hardware, each in its way", hint="give one of them"
        )
    if flags.live:
        from roost.cli.live import live_hardware

        live = live_hardware(num_nodes, address=None)
        if live.note:
            tell(live.note)
        return live.topology, live
    if flags.cluster is not None:
        return Topology.from_shorthand(flags.cluster), None
    if flags.inventory is not None:
        return Topology.from_file(flags.inventory), None
    if hardware is not None:
        return hardware, None
    assumed = f"{num_nodes or 1}x{_DEFAULT_ACCELERATORS}"
    tell(f"note: no --cluster, --inventory or --live given: assuming {assumed}")
    return Topology.from_shorthand(assumed), None
