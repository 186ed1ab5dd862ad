"""Run a whole job from its file: place it, launch every component, call its entry point."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.job import JobDraft
from roost.config.run import read_run_config
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import WorkerGroup
from roost.runtime.groups.together import launch_together
from roost.runtime.options import RunOptions
from roost.runtime.runs.recorder import JobSource
from roost.runtime.targets import load_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A running job, as its entry point gets it."""

    config: Mapping[str, Any]
    """The whole file."""
    plan: Plan
    cluster: Cluster
    groups: Mapping[str, WorkerGroup[Any]]
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
    targets = load_targets(read_run_config(draft))
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
            shares = {worker.component: worker.share for worker, _ in targets.drafts if worker.share is not None}
            undo.enter_context(cluster.reserve(plan, shares=shares, timeout=options.wait))
        launches = {
            worker.component: functools.partial(
                group.launch,
                cluster,
                placement_strategy=plan.get_strategy(worker.component),
                name=worker.component,
                env_vars=worker.env_vars,
                max_concurrency=worker.max_concurrency,
                restarts=worker.restarts,
                reserve=options.reserve,
                share=worker.share if options.reserve else None,
            )
            for worker, group in targets.drafts
        }
        groups = launch_together(cluster.context, launches)
        for group in groups.values():
            undo.enter_context(group)
        return targets.entry(Job(config=config, plan=plan, cluster=cluster, groups=groups))
