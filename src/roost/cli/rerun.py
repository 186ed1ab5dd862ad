"""`roost rerun`: what a run ran, once more, after saying what is not as it was."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roost.cli import show
from roost.cli.load import plan_of_run, tell
from roost.cli.running import run_text
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.errors import ClusterError, ConfigError
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.runtime.runs.diff import diff_environments
from roost.runtime.runs.record import RunJob, RunRecord, text_hash, what_of
from roost.runtime.runs.snapshot import environment_of
from roost.text import printable, shorten

_MOST_VARIABLES = 12


class PlanDiffers(ConfigError):  # noqa: N818 - what happened
    """The plan is not the one of then, and the user wants no other."""


def run_again(
    folder: Path, record: RunRecord, *, same: bool, dry_run: bool, address: str | None, run_dir: Path | None
) -> None:
    """Run the job or the script of a run once more; with `dry_run` only say what that would be."""
    if not os.path.isdir(record.cwd):
        raise ConfigError(f"run {record.id} was started in {printable(record.cwd)}, which is not there any more")
    if record.job is not None:
        # In a folder of its own, on the cluster that is there now: the record of then stays as it is.
        directory = str(run_dir.absolute()) if run_dir is not None else None
        _run_job(folder, record, record.job, same, dry_run, address, directory)
    elif same or address or run_dir:
        raise ConfigError(
            f"run {record.id} was a script, which makes its own Cluster",
            hint="leave out --same, --address and --run-dir; RAY_ADDRESS says where Ray is",
        )
    else:
        _run_script(record, dry_run)


def _run_script(record: RunRecord, dry_run: bool) -> None:
    words = [sys.executable, *record.command[1:]]
    if what_of(record.command) in ("python", "standard input"):
        raise ConfigError(f"run {record.id} was typed into Python, and what was typed is not kept")
    tell(printable(shlex.join(words)))
    tell(f"  in {printable(record.cwd)}")
    _tell_environment(record)
    if not dry_run:
        sys.stdout.flush()
        sys.stderr.flush()
        _enter(record)
        # No shell: exactly these words. Signals and exit code are those of the script.
        os.execv(words[0], words)  # noqa: S606


def _run_job(
    folder: Path,
    record: RunRecord,
    job: RunJob,
    same: bool,
    dry_run: bool,
    address: str | None,
    run_dir: str | None,
) -> None:
    path = folder / job.stored
    text = load_text(path, limit=JOB_FILE_LIMIT)
    kept = {name: value for name, value in job.flags if name not in ("--address", "--run-dir")}
    given = {"--address": address, "--run-dir": run_dir}
    flags = kept | {name: value for name, value in given.items() if value is not None}
    again = replace(job, hash=text_hash(text), flags=tuple(flags.items()), rerun_of=record.id)
    tell(printable(shlex.join(["roost", "run", job.file, *again.arguments])))
    is_as_it_was = again.hash == job.hash
    how = "with the file as it was" if is_as_it_was else "with a file that was changed since"
    tell(printable(f"  in {record.cwd}, {how}: {path}"))
    _tell_environment(record)
    check = _make_check(record, _plan_before(folder, record), same)
    if not dry_run:
        _enter(record)
        run_text(text, str(path), again, check)
        return
    draft = read_job_text(text, name=str(path))
    from roost.cli.live import live_hardware

    try:
        live = live_hardware(draft.job.cluster.num_nodes, address)
    except ClusterError as error:
        tell(f"where its workers would sit is not known now: {error}")
        return
    isolate = "--no-isolate" not in flags
    check(make_plan(draft, live.topology, placement=again.placement, isolate_accelerator=isolate))


def _plan_before(folder: Path, record: RunRecord) -> Plan | None:
    if record.plan is None:
        return None
    try:
        return plan_of_run(folder)
    except ConfigError as error:
        # Removed, or of another Roost: a job can run without.
        tell(str(error))
        return None


def _enter(record: RunRecord) -> None:
    try:
        os.chdir(record.cwd)
    except OSError as error:
        raise ConfigError(f"{printable(record.cwd)}: {error.strerror or error}") from None


def _make_check(record: RunRecord, before: Plan | None, same: bool) -> Callable[[Plan], None]:
    def check(plan: Plan) -> None:
        """Say how a plan compares with the one of then."""
        if before is None:
            tell(f"there is no plan of run {record.id} to compare with")
        elif plan.hash == before.hash:
            tell(f"the plan is the same: {plan.hash[:8]}")
            return
        else:
            is_alike = _places(plan) == _places(before)
            tell("every worker sits as it did, and the nodes are not the same:" if is_alike else "the plan differs:")
            tell("\n".join(f"  {line}" for line in show.diff(before.diff(plan)).plain.splitlines()))
            if is_alike:
                return
        if same:
            raise PlanDiffers(f"the plan is not that of run {record.id}, and --same was given")

    return check


def _places(plan: Plan) -> Plan:
    """A plan without what differs from one cluster to the next: names, addresses and memory of the nodes."""
    nodes = tuple(
        replace(node, name=None, address=None, labels=(), cpus=None, memory=None) for node in plan.topology.nodes
    )
    return replace(plan, topology=replace(plan.topology, nodes=nodes))


def _tell_environment(record: RunRecord) -> None:
    """Say which variables are not as they were: they are not set again."""
    found = diff_environments(record.environment, environment_of(os.environ))
    if found:
        tell("the environment is not as it was:")
    for name, before, after in found[:_MOST_VARIABLES]:
        tell(printable(f"  ~ {name}: {shorten(before, 200)} -> {shorten(after, 200)}"))
    if len(found) > _MOST_VARIABLES:
        tell(f"  and {len(found) - _MOST_VARIABLES} more")
