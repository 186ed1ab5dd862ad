"""Run a whole job from its file: place it, launch every component, call its entry point."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.job import JobDraft
from roost.config.run import WorkerConfig, read_run_config
from roost.errors import ConfigError
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import GroupDraft, WorkerGroup
from roost.runtime.options import RunOptions
from roost.runtime.runs.recorder import JobSource
from roost.text import did_you_mean, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A running job, as its entry point gets it."""

    config: Mapping[str, Any]
    """The whole file."""
    plan: Plan
    cluster: Cluster
    groups: Mapping[str, WorkerGroup]
    """The launched groups by component."""


def run_job(
    draft: JobDraft,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    *,
    source: JobSource | None = None,
    check_plan: Callable[[Plan], None] | None = None,
) -> Any:
    """Launch the workers of a job and call its entry point with a `Job`; return what that returns.

    Everything is read and imported before anything starts, and everything started is stopped afterwards. `source` goes
    into the run's record; `check_plan` gets the plan before the launch and may refuse it by raising.
    """
    run = read_run_config(draft)
    drafts = [(worker, _draft(worker)) for worker in run.workers]
    entry = load(run.entry)
    if not callable(entry):
        raise ConfigError(f"entry: {run.entry} cannot be called")
    config = draft.job.document.plain()
    with contextlib.ExitStack() as undo:
        cluster = undo.enter_context(
            Cluster(
                cluster_cfg=draft.job.cluster,
                address=options.address,
                run_dir=options.run_dir,
                quiet=options.quiet or None,
            )
        )
        if source is not None:
            cluster.recorder.note_job(source)
        isolate = options.isolate_accelerator
        plan = make_plan(draft, cluster, placement=options.placement, isolate_accelerator=isolate)
        cluster.recorder.note_plan(plan)
        if check_plan is not None:
            check_plan(plan)
        if options.reserve:
            # All that the job needs, before any of it starts.
            shares = {worker.component: worker.share for worker, _ in drafts if worker.share is not None}
            undo.enter_context(cluster.reserve(plan, shares=shares))
        groups = {
            worker.component: undo.enter_context(
                group.launch(
                    cluster,
                    placement_strategy=plan.get_strategy(worker.component),
                    name=worker.component,
                    env_vars=worker.env_vars,
                    max_concurrency=worker.max_concurrency,
                    restarts=worker.restarts,
                    reserve=options.reserve,
                    share=worker.share if options.reserve else None,
                )
            )
            for worker, group in drafts
        }
        return entry(Job(config=config, plan=plan, cluster=cluster, groups=groups))


def load(target: str) -> Any:
    """Import `module.Name`; ConfigError if the module or the name does not exist."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if this module is missing, and not one that it imports.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise ConfigError(
            f"{target}: there is no module {error.name!r}", hint="run from its folder, or set PYTHONPATH"
        ) from None
    if not hasattr(module, name):
        close = did_you_mean(name, dir(module))
        hint = f"did you mean {module_name}.{close}?" if close else ""
        raise ConfigError(f"{target}: module {module_name!r} has no {name!r}", hint=hint)
    return getattr(module, name)


def _draft(worker: WorkerConfig) -> GroupDraft:
    cls = load(worker.target)
    if not isinstance(cls, type) or not hasattr(cls, "create_group"):
        hint = "derive the class from roost.Worker"
        raise ConfigError(f"{worker.target} is not a worker: {shorten(repr(cls))}", hint=hint)
    try:
        draft: GroupDraft = cls.create_group(*worker.args, **worker.kwargs)
        return draft
    except TypeError as error:
        raise ConfigError(f"worker {worker.component!r}: {error}", hint="see its args and kwargs") from None
