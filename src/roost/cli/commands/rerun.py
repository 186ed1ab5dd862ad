"""`roost rerun`: run a job or a script of an earlier run again, after saying what has changed since."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from roost.cli.commands.diff import diff_text
from roost.cli.commands.run import start_job
from roost.cli.completion import Run
from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.live_cluster import STATUS, ask
from roost.cli.options import Address, TextForm
from roost.cli.out import as_json, tell, write_text
from roost.cli.plans import saved_plan
from roost.config.run import read_job_text
from roost.config.yaml_file import JOB_FILE_LIMIT, load_text
from roost.errors import ClusterError, ConfigError
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.redact import HIDDEN, hide_in_words
from roost.runtime.options import RunOptions
from roost.runtime.runs.diff import diff_environments
from roost.runtime.runs.index import find_run, read_run
from roost.runtime.runs.record import RunJob, RunRecord, text_hash, what_of
from roost.runtime.runs.snapshot import environment_of
from roost.text import at_most, printable, shorten

_MOST_VARIABLES = 12


class PlanDiffers(ConfigError):  # noqa: N818 - what happened
    """The plan is not that of the earlier run, and --same was given."""


def rerun(
    run: Run,
    same: Annotated[
        bool, typer.Option("--same", help="Refuse, and exit with 1, unless every worker would sit and see as before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    address: Address = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="The folder of the new run; default: a new one.")
    ] = None,
    form: TextForm = "text",
) -> None:
    if form == "json" and not dry_run:
        raise ConfigError("--format json is for --dry-run", hint="what a job prints is its own")
    folder = find_run(run)
    record = read_run(folder)
    if not os.path.isdir(record.cwd):
        raise ConfigError(f"run {record.id} was started in {printable(record.cwd)}, which no longer exists")
    # A new folder, on the cluster of today: the earlier run's record stays as it is.
    new_folder = str(run_dir.absolute()) if run_dir is not None else None
    if not dry_run:
        try:
            os.chdir(record.cwd)
        except OSError as error:
            raise ConfigError(f"{printable(record.cwd)}: {error.strerror or error}") from None
    if record.job is not None:
        options = replace(RunOptions.from_flags(record.job.flags), address=address, run_dir=new_folder)
        if address is not None:
            options = replace(options, local=None)
        try:
            _rerun_job(folder, record, record.job, options, same, dry_run, form == "json")
        except PlanDiffers as error:
            tell(str(error))
            raise typer.Exit(1) from None
        return
    if same or address or run_dir:
        raise ConfigError(
            f"run {record.id} was a script, which makes its own Cluster",
            hint="leave out --same, --address and --run-dir; RAY_ADDRESS says where Ray is",
        )
    words = [sys.executable, *record.command[1:]]
    if what_of(record.command) in ("python", "standard input"):
        raise ConfigError(f"run {record.id} was typed into Python, and what was typed is not kept")
    if any(HIDDEN in word for word in words):
        command = shlex.join(record.command[1:])
        raise ConfigError(
            f"the command of run {record.id} had a secret, which is not kept: {command}",
            hint=f"run it by hand in {record.cwd}, with the secret in place of {HIDDEN}",
        )
    answer = _begin(record, words, "", is_told=form == "text")
    if form == "json":
        write_text(as_json(answer))
    elif not dry_run:
        sys.stdout.flush()
        sys.stderr.flush()
        # No shell: exactly these words. Signals and the exit code are those of the script.
        os.execv(words[0], words)  # noqa: S606


def _begin(record: RunRecord, words: list[str], how: str, *, is_told: bool) -> dict[str, Any]:
    """Return what JSON has of any rerun: the command, its folder, and the variables that changed, which are not set."""
    changes = diff_environments(record.environment, environment_of(os.environ))
    if is_told:
        tell(printable(shlex.join(words)))
        tell(printable(f"  in {record.cwd}{how}"))
        if changes:
            tell("the environment has changed:")
        lines = [f"~ {name}: {shorten(before, 200)} -> {shorten(after, 200)}" for name, before, after in changes]
        for line in at_most(lines, _MOST_VARIABLES):
            tell(printable(f"  {line}"))
    variables = {name: {"before": before, "after": after} for name, before, after in changes}
    return {"command": words, "folder": record.cwd, "environment": variables}


def _rerun_job(
    folder: Path, record: RunRecord, job: RunJob, options: RunOptions, same: bool, dry_run: bool, as_data: bool
) -> None:
    """Run a job again, or say what that would do; in JSON the plan is null if no cluster says how it would be."""
    path = folder / job.stored
    text = load_text(path, limit=JOB_FILE_LIMIT)
    again = replace(job, hash=text_hash(text), flags=options.to_flags(), rerun_of=record.id)
    has_changed = again.hash != job.hash
    how = "with a file that has changed since" if has_changed else "with the file as it was"
    words = ["roost", "run", job.file, *hide_in_words(again.arguments)]
    answer = _begin(record, words, f", {how}: {path}", is_told=not as_data)
    before = None
    if record.plan is not None:
        try:
            before = saved_plan(folder)
        except ConfigError as error:
            # Removed, or from another version of Roost: the job can run without it.
            tell(str(error))

    differs = PlanDiffers(f"the plan is not that of run {record.id}, and --same was given")

    def check(plan: Plan) -> None:
        """Say how the plan compares with the earlier one; with --same, refuse one whose workers sit elsewhere."""
        is_alike = before is not None and _without_node_names(plan) == _without_node_names(before)
        if before is None:
            tell(f"run {record.id} has no plan to compare with")
        elif plan.hash == before.hash:
            tell(f"the plan is the same: {plan.hash[:8]}")
        else:
            tell("every worker sits as before, but on other nodes:" if is_alike else "the plan differs:")
            tell("\n".join(f"  {line}" for line in diff_text(before.diff(plan)).plain.splitlines()))
        if same and not is_alike:
            raise differs

    if not dry_run:
        start_job(text, str(path), again, options, check)
        return
    plan, why_unknown = None, ""
    try:
        draft = read_job_text(text, name=str(path), overrides=options.overrides)
        num_nodes, isolate = draft.job.cluster.num_nodes, options.isolate_accelerator
        live = ask(f"{STATUS}.get_hardware", TIMEOUT_SECONDS, num_nodes=num_nodes, address=options.address)
        plan = make_plan(draft, live.topology, placement=options.placement, isolate_accelerator=isolate)
    except ClusterError as error:
        why_unknown = str(error)
    if as_data:
        compared = None
        if plan is not None and before is not None:
            is_alike = _without_node_names(plan) == _without_node_names(before)
            compared = {"hash": plan.hash, "same": is_alike, "difference": before.diff(plan).to_dict()}
        write_text(as_json({**answer, "file": str(path), "file_changed": has_changed, "plan": compared}))
        if same and not (compared and compared["same"]):
            raise differs
    elif plan is None:
        tell(f"where its workers would sit is not known now: {why_unknown}")
    else:
        check(plan)


def _without_node_names(plan: Plan) -> Plan:
    """Remove what differs between clusters: names, addresses and memory of the nodes."""
    nodes = tuple(
        replace(node, name=None, address=None, labels=(), cpus=None, memory=None) for node in plan.topology.nodes
    )
    return replace(plan, topology=replace(plan.topology, nodes=nodes))
