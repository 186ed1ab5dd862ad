"""From the command line to a plan: a job planned on the hardware of the flags, a saved plan, or the plan of a run."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.options import Cluster, Inventory
from roost.cli.out import tell
from roost.config.flow import FlowConfig
from roost.config.job import ClusterConfig
from roost.config.run import RunDraft, read_job_text
from roost.config.topology import Topology
from roost.config.yaml_file import JOB_FILE_LIMIT, PLAN_FILE_LIMIT, check_size, load_text
from roost.errors import ConfigError, RoostError
from roost.extras import need_ray
from roost.placement.lint import Finding, lint
from roost.placement.plan import Plan
from roost.placement.planner import PlacementKind, check_num_nodes, make_plan
from roost.placement.strategies import collector_paused
from roost.text import join_words

if TYPE_CHECKING:
    from roost.config.readers.framework import Level
    from roost.config.readers.reading import ForeignJob
    from roost.config.rules import RulesConfig
    from roost.placement.ledger import Ledger
    from roost.runtime.status import LiveHardware

_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".toml", ".bash", ".slurm", ".sbatch")
_VARIABLE = "ROOST_CLUSTER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """How to plan a job: on which hardware, by which rules."""

    cluster: Cluster = None
    inventory: Inventory = None
    live: Annotated[bool, typer.Option("--live", help="Use the hardware of the running Ray cluster.")] = False
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", metavar="SECONDS", min=1, max=3600, help="With --live: how long nodes may take to answer."
        ),
    ] = None
    placement: Annotated[
        PlacementKind,
        typer.Option(
            "--placement",
            metavar="RULES",
            help="hybrid places any component anywhere, model-parallel uses parallel sizes; auto decides by the job.",
        ),
    ] = "auto"
    no_isolate: Annotated[
        bool, typer.Option("--no-isolate", help="Let every worker see all accelerators of its node.")
    ] = False
    framework: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FRAMEWORK", help="Whose job it is: verl, slime, …; by default it is found out."
        ),
    ] = None
    assume: Annotated[
        bool,
        typer.Option("--assume", help="Take the framework's defaults for what a script takes from its environment."),
    ] = False

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
        rules |= {"--from": self.framework is not None, "--assume": self.assume}
        if given := [*self.hardware, *(name for name in rules if rules[name])]:
            raise ConfigError(message, hint=f"leave out {', '.join(given)}")


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command each field of `Flags` as an option in place of its parameter `flags`."""
    options = list(inspect.signature(Flags, eval_str=True).parameters.values())
    own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**given: Any) -> None:
        flags = Flags(**{option.name: given.pop(option.name) for option in options})
        command(**given, flags=flags)

    parameters = [item for mine in own for item in (options if mine.name == "flags" else [mine])]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [item.replace(kind=item.KEYWORD_ONLY) for item in parameters]
    )
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A plan, and what is known about it beyond the plan itself."""

    plan: Plan
    live: LiveHardware | None = None
    """With --live: the cluster that the job is planned on."""
    flow: FlowConfig | None = None
    assumed: str = ""
    """The hardware in shorthand, if nothing says which there is."""
    foreign: ForeignJob | None = None
    """The job of another framework that it is the plan of."""
    ledger: Ledger | None = None
    """The memory of the workers, if the job says it."""
    rules: RulesConfig | None = None
    """The rules about domains, if the job has any."""
    made_up: bool = False
    """Whether nobody says which nodes there are: idle accelerators of theirs say nothing about the job."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The remarks on the plan, first what the framework refuses."""
        found = tuple(item for item in lint(self.plan) if not (self.made_up and item.code == "idle"))
        if self.ledger is not None:
            over = [
                Finding(code="memory", level="error", message=item.message, hint=item.hint, where=item.where)
                for item in self.ledger.problems
            ]
            lines = [f"memory: not known: {line}" for line in self.ledger.unknown]
            found = (*over, *found, *(Finding(code="memory-unknown", level="info", message=line) for line in lines))
        if self.rules is not None:
            from roost.placement.rules import broken  # few jobs need it

            # The plan of a job of ours obeys the others.
            levels: dict[str, Level] = {"preferred": "warning", **({"segments": "error"} if self.foreign else {})}
            missed = (
                Finding(code=code, level=level, message=f"{rule.text!r} does not hold: {said}")
                for code, level in levels.items()
                for rule, said in broken(self.rules, self.plan, preferred=code == "preferred")
            )
            found = (*found, *missed)
        if self.foreign is None:
            return found
        own = [
            Finding(code=item.code, level=item.level, message=item.message, hint=item.hint, where=item.where)
            for item in self.foreign.remarks
        ]
        order = ("error", "warning", "info")
        return tuple(sorted((*own, *found), key=lambda item: order.index(item.level)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The JOB that the user names: a job, a saved plan, or a job of another framework."""

    path: Path
    found: RunDraft | Plan | ForeignJob


def load_plan(path: Path, flags: Flags) -> Plan:
    """Plan a job, or read a saved plan."""
    return plan_job(read_job(path, (), flags), flags).plan


def find_hardware(
    config: ClusterConfig, cluster: str | None, inventory: Path | None, flags: str
) -> tuple[Topology, str]:
    """Return the hardware of the flags, of the job, of `ROOST_CLUSTER`, or else an assumed one with its shorthand.

    A job gets the first `num_nodes` nodes of a cluster; hardware that flags describe is taken whole. `flags` names
    those of the command in a remark.
    """
    if cluster is not None:
        return Topology.from_shorthand(cluster), ""
    if inventory is not None:
        return Topology.from_file(inventory), ""
    hardware, named = config.hardware, os.environ.get(_VARIABLE)
    if hardware is None and named:
        tell(f"note: planning on {named}, from {_VARIABLE}")
        try:
            is_file = named.endswith(_SUFFIXES)
            hardware = Topology.from_file(named) if is_file else Topology.from_shorthand(named)
        except ConfigError as error:
            problems = [replace(item, message=f"{_VARIABLE}: {item.message}") for item in error.problems]
            raise ConfigError(problems) from None
    if hardware is None:
        assumed = f"{config.num_nodes or 1}x8"
        tell(f"note: no {flags} given: assuming {assumed}")
        return Topology.from_shorthand(assumed), assumed
    if config.num_nodes is None or config.num_nodes >= hardware.num_nodes or hardware.groups:
        return hardware, ""
    return replace(hardware, nodes=hardware.nodes[: config.num_nodes]), ""


def is_run(path: Path) -> bool:
    """Tell whether a run is meant, by its id or its folder, and not a file."""
    return not (str(path) == "-" or path.suffix in _SUFFIXES or (os.path.exists(path) and not os.path.isdir(path)))


@collector_paused()
def read_job(path: Path, overrides: Sequence[str], flags: Flags) -> Given:
    """Read a job or a saved plan: from standard input for `-`, the plan of a run for its id or folder, or a file.

    A job, which has no version and no hash, is not a saved plan.
    """
    if str(path) == "-":
        path = Path("/dev/stdin")
    elif is_run(path):
        path = plan_file(find_folder(path))
    text = load_text(path, limit=PLAN_FILE_LIMIT)
    is_plan = False
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
            is_plan = isinstance(data, dict) and {"version", "hash", "components"} <= {*data} and "cluster" not in data
        except (ValueError, RecursionError):
            # A truncated plan is reported as a plan.
            is_plan = '"version"' in text[:400] and '"hash"' in text[:400]
    if is_plan and overrides:
        hint = f"leave out {' '.join(overrides)}"
        raise ConfigError(f"{path} is a saved plan, whose settings are fixed", hint=hint)
    if is_plan:
        return Given(path=path, found=parse_plan(path, text))
    check_size(str(path), len(text), JOB_FILE_LIMIT)
    is_ours = path.suffix in (".yaml", ".yml", ".json") and "component_placement" in text
    if flags.framework is not None or not is_ours:
        from roost.config.readers.reading import (
            read_foreign,  # a job of ours, which names its placement, needs no other
        )

        foreign = read_foreign(str(path), text, overrides, chosen=flags.framework, assume=flags.assume)
        if foreign is not None:
            return Given(path=path, found=foreign)
    return Given(path=path, found=read_job_text(text, name=str(path), overrides=overrides))


def find_folder(path: Path) -> Path:
    """Return the folder of a run by its id or its path."""
    from roost.runtime.runs.index import find_run  # loads psutil, which planning a job does without
    from roost.runtime.runs.record import PLAN_FILE, RECORD_FILE

    try:
        folder = find_run(str(path))
    except ConfigError as error:
        hint = error.problems[0].hint
        raise ConfigError(f"there is no file {str(path)!r}, and no run with that name", hint=hint) from None
    if folder == path.absolute() and not any((folder / name).exists() for name in (RECORD_FILE, PLAN_FILE)):
        jobs = sorted(str(file) for suffix in ("yaml", "yml") for file in path.glob(f"*.{suffix}"))
        hint = f"give the file of the job, such as {jobs[0]}" if jobs else "give the file of a job, or a run"
        raise ConfigError(f"{path} is a folder, and not that of a run", hint=hint)
    return folder


def saved_plan(folder: Path) -> Plan:
    """Return the plan of a run."""
    path = plan_file(folder)
    return parse_plan(path, load_text(path, limit=PLAN_FILE_LIMIT))


def plan_file(folder: Path) -> Path:
    """Return the file with the plan of a run."""
    from roost.runtime.runs.record import PLAN_FILE, read_record

    path = folder / PLAN_FILE
    if not os.path.isfile(path):
        record = read_record(folder)
        raise ConfigError(f"run {record.id} has no plan: it launched nothing, or its {PLAN_FILE} was removed")
    return path


def parse_plan(path: Path, text: str) -> Plan:
    """Read a plan that was saved as JSON."""
    try:
        return Plan.from_json(text)
    except RoostError as error:
        problems = [replace(problem, message=f"{path}: {problem}", hint="", where=None) for problem in error.problems]
        raise ConfigError(problems) from None


@collector_paused()
def plan_job(given: Given, flags: Flags, hardware: Topology | None = None) -> Loaded:
    """Plan a job on the hardware of the flags, or else on this one; a saved plan is taken as it is."""
    draft = given.found
    if isinstance(draft, Plan):
        flags.refuse(f"{given.path} is a saved plan, which includes its hardware")
        return Loaded(plan=draft)
    if not isinstance(draft, RunDraft):
        from roost.placement.from_roles import lay_out, plan_roles  # only a job of another framework needs it

        if len(flags.hardware) > 1 or flags.live:
            many = join_words(flags.hardware)
            raise ConfigError(f"{many} cannot describe the hardware here", hint="give --cluster or --inventory")
        nodes, gpus = draft.size
        # Where neither a flag nor the variable says otherwise, on what it asks for.
        named = bool(os.environ.get(_VARIABLE))
        asked = None if named else Topology.from_shorthand(f"{nodes}x{gpus}")
        config = ClusterConfig(num_nodes=nodes, components=(), hardware=asked)
        hardware, _ = find_hardware(config, flags.cluster, flags.inventory, "")
        roles, rules = lay_out(draft, hardware)
        made_up = not (flags.hardware or named or draft.framework.says_cluster)
        return Loaded(plan=plan_roles(roles, hardware, nodes), foreign=draft, rules=rules, made_up=made_up)
    config = draft.job.cluster
    if len(flags.hardware) > 1:
        many = "both" if len(flags.hardware) == 2 else "all"
        raise ConfigError(f"{join_words(flags.hardware)} {many} describe the hardware", hint="give one of them")
    live, assumed = None, ""
    if flags.live:
        need_ray("--live")
        from roost.cli.live_cluster import STATUS, ask  # loads psutil, which planning a job does without

        live = ask(f"{STATUS}.get_hardware", flags.timeout or TIMEOUT_SECONDS, num_nodes=config.num_nodes, address=None)
        hardware = live.topology
        if live.note:
            tell(live.note)
    elif hardware is None or flags.hardware:
        hardware, assumed = find_hardware(config, flags.cluster, flags.inventory, "--cluster, --inventory or --live")
    isolate = not flags.no_isolate
    plan = make_plan(draft, hardware, placement=flags.placement, isolate_accelerator=isolate, allow_overflow=True)
    check_num_nodes(draft.job, plan)
    ledger = None
    if draft.memory is not None:
        from roost.placement.ledger import make_ledger  # few jobs need it

        ledger = make_ledger(plan, draft.memory)
    return Loaded(plan=plan, live=live, flow=draft.flow, ledger=ledger, rules=draft.rules, assumed=assumed)


def split_jobs(job: Path, overrides: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split what follows a job into more jobs, which are files, and the settings for all of them."""
    jobs, rest = [job], list(overrides)
    while rest and "=" not in rest[0] and not rest[0].startswith("-") and os.path.isfile(rest[0]):
        jobs.append(Path(rest.pop(0)))
    return jobs, rest
