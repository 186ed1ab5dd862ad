"""From the command line to a plan: a job planned on the hardware of the flags, a saved plan, or the plan of a run."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.cli.options import TIMEOUT_SECONDS, Cluster, Inventory, Live, LiveTimeout, Rules, Shared
from roost.cli.out import tell
from roost.config.flow import FlowConfig
from roost.config.run import read_job_text
from roost.config.topology import Topology
from roost.config.yaml_file import JOB_FILE_LIMIT, PLAN_FILE_LIMIT, check_size, load_text
from roost.errors import ConfigError, RoostError
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.text import join_words

if TYPE_CHECKING:
    from roost.runtime.status import LiveHardware

_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """How to plan a job: on which hardware, by which rules."""

    cluster: Cluster = None
    inventory: Inventory = None
    live: Live = False
    timeout: LiveTimeout = None
    placement: Rules = "auto"
    no_isolate: Shared = False

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.live:
            raise ConfigError("--timeout is for --live", hint="without it, no cluster is asked")

    @property
    def hardware(self) -> list[str]:
        """The names of the flags given that describe the hardware."""
        given = {"--cluster": self.cluster is not None, "--inventory": self.inventory is not None, "--live": self.live}
        return [name for name in given if given[name]]

    def refuse(self, message: str) -> None:
        """Raise if any flag is given: a saved plan leaves nothing to decide."""
        rules = {"--placement": self.placement != "auto", "--no-isolate": self.no_isolate}
        given = [*self.hardware, *(name for name in rules if rules[name])]
        if given:
            raise ConfigError(message, hint=f"leave out {', '.join(given)}")


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command each field of `Flags` as an option in place of its parameter `flags`."""
    options = list(inspect.signature(Flags, eval_str=True).parameters.values())
    own = [
        item.replace(kind=item.KEYWORD_ONLY) for item in inspect.signature(command, eval_str=True).parameters.values()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        flags = Flags(**{option.name: given.pop(option.name) for option in options})
        command(**given, flags=flags)

    parameters = [item for mine in own for item in (options if mine.name == "flags" else [mine])]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def load_plan(path: Path, flags: Flags) -> tuple[Plan, LiveHardware | None]:
    """Plan a job, or read a saved plan; with --live also return the cluster that the job is planned on."""
    return load_job(path, flags)[:2]


def load_job(path: Path, flags: Flags) -> tuple[Plan, LiveHardware | None, FlowConfig | None]:
    """Load a plan as `load_plan` does, and the flow of the job if it has one."""
    path, text, saved = _read(path)
    if saved is None:
        return _plan_job(path, text, flags, None)
    flags.refuse(f"{path} is a saved plan, which includes its hardware")
    return saved, None, None


def load_plans(before: Path, after: Path, flags: Flags) -> tuple[Plan, Plan]:
    """Load two plans to compare. Unless flags say otherwise, a job is planned on the hardware of the saved plan."""
    read = [_read(before), _read(after)]
    saved = [plan for _, _, plan in read if plan is not None]
    if len(saved) == 2:
        flags.refuse("both are saved plans, which include their hardware")
    hardware = saved[0].topology if saved else None
    one, other = (plan or _plan_job(path, text, flags, hardware)[0] for path, text, plan in read)
    return one, other


def is_run(path: Path) -> bool:
    """Tell whether a run is meant, by its id or its folder, and not a file."""
    return not (str(path) == "-" or path.suffix in _SUFFIXES or (os.path.exists(path) and not os.path.isdir(path)))


def read_saved_plan(path: Path) -> Plan:
    """Read a plan that was saved as JSON."""
    return _parse_plan(path, load_text(path, limit=PLAN_FILE_LIMIT))


def _read(path: Path) -> tuple[Path, str, Plan | None]:
    """Read standard input for `-`, the plan of a run for its id or folder, or a file: where, its text, its saved plan.

    A job, which has no version and no hash, is not a saved plan.
    """
    if str(path) == "-":
        path = Path("/dev/stdin")
    elif is_run(path):
        from roost.cli.runs import find_folder, plan_file  # loads psutil, which planning a job does without

        path = plan_file(find_folder(path))
    text = load_text(path, limit=PLAN_FILE_LIMIT)
    if not text.lstrip().startswith("{"):
        return path, text, None
    try:
        data = json.loads(text)
        is_plan = isinstance(data, dict) and {"version", "hash", "components"} <= set(data) and "cluster" not in data
    except (ValueError, RecursionError):
        # A truncated plan is reported as a plan.
        is_plan = '"version"' in text[:400] and '"hash"' in text[:400]
    return path, text, _parse_plan(path, text) if is_plan else None


def _parse_plan(path: Path, text: str) -> Plan:
    try:
        return Plan.from_json(text)
    except RoostError as error:
        problems = [replace(problem, message=f"{path}: {problem}", hint="", where=None) for problem in error.problems]
        raise ConfigError(problems) from None


def _plan_job(
    path: Path, text: str, flags: Flags, hardware: Topology | None
) -> tuple[Plan, LiveHardware | None, FlowConfig | None]:
    check_size(str(path), len(text), JOB_FILE_LIMIT)
    draft = read_job_text(text, name=str(path))
    num_nodes = draft.job.cluster.num_nodes
    if len(flags.hardware) > 1:
        many = "both" if len(flags.hardware) == 2 else "all"
        raise ConfigError(f"{join_words(flags.hardware)} {many} describe the hardware", hint="give one of them")
    live = None
    if flags.live:
        from roost.cli.visit import visit_hardware  # loads psutil, which planning a job does without

        live = visit_hardware(num_nodes, None, flags.timeout or TIMEOUT_SECONDS)
        hardware = live.topology
        if live.note:
            tell(live.note)
    elif flags.cluster is not None:
        hardware = Topology.from_shorthand(flags.cluster)
    elif flags.inventory is not None:
        hardware = Topology.from_file(flags.inventory)
    elif hardware is None:
        assumed = f"{num_nodes or 1}x8"
        tell(f"note: no --cluster, --inventory or --live given: assuming {assumed}")
        hardware = Topology.from_shorthand(assumed)
    plan = make_plan(draft, hardware, placement=flags.placement, isolate_accelerator=not flags.no_isolate)
    return plan, live, draft.flow
