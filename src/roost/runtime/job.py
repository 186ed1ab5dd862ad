"""Run a whole job from its file: import what it names, place it, launch every component, call its entry point."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from roost.config.flow import FlowConfig
from roost.config.job import JobDraft
from roost.config.reading import Notes
from roost.config.run import RunConfig, RunDraft, WorkerConfig, read_run_config
from roost.deadline import Deadline
from roost.errors import ConfigError, RoostError, Where
from roost.placement.ledger import start_at_once_problems
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.runtime.cluster import Cluster
from roost.runtime.groups.group import GroupDraft, WorkerGroup
from roost.runtime.limits import GROUP_CLOSE_SECONDS, POLL_SECONDS
from roost.runtime.managers.control import JobControl
from roost.runtime.options import RunOptions
from roost.runtime.runs.folder import RunDir
from roost.runtime.runs.recorder import JobSource
from roost.text import did_you_mean, shorten

log: logging.Logger = logging.getLogger(__name__)

Drafts = list[tuple[WorkerConfig, GroupDraft[Any]]]
"""Each component with its class and the arguments of its constructor."""
Group = TypeVar("Group")


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
    run = read_run_config(draft)
    if isinstance(draft, RunDraft) and draft.memory and (problems := start_at_once_problems(draft.memory)):
        raise ConfigError(problems)
    drafts, entry = load_code(run)
    config, section = draft.job.document.plain(), draft.job.cluster
    # A process is forked before it is known which worker it becomes.
    preload = dict.fromkeys([*section.preload, *(name for worker in run.workers for name in worker.preload)])
    with contextlib.ExitStack() as undo:
        cluster = undo.enter_context(
            Cluster(
                cluster_cfg=replace(section, preload=tuple(preload)),
                address=options.address,
                run_dir=options.run_dir,
                quiet=options.quiet or None,
            )
        )
        made, control = cluster.job.run_dir, cluster.context
        if source is not None:
            cluster.recorder.note_job(source)
        quoted = shlex.quote(made.id)
        control.console.line(f"run {made.id} in {made.path}\n  roost top {quoted}\n  roost watch {quoted}")
        isolate = options.isolate_accelerator
        plan = make_plan(draft, cluster, placement=options.placement, isolate_accelerator=isolate)
        cluster.recorder.note_plan(plan)
        if check_plan is not None:
            check_plan(plan)
        undo.enter_context(_naming(made))
        if options.reserve:
            # All that the job needs, before any of it starts.
            shares = {worker.component: worker.share for worker, _ in drafts if worker.share is not None}
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
                bind=worker.bind,
            )
            for worker, group in drafts
        }
        groups = launch_together(control, launches)
        for group in groups.values():
            undo.enter_context(group)
        return entry(Job(config=config, plan=plan, cluster=cluster, groups=groups))


@contextlib.contextmanager
def _naming(run: RunDir) -> Iterator[None]:
    """Name the run in what ends it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"run {run.id} has failed; its folder: {run.path}")
        raise


def launch_together(context: JobControl, launches: Mapping[str, Callable[[], Group]]) -> dict[str, Group]:
    """Make all launches at the same time; raise the exception of the first that fails, after all of them have ended.

    So does Ctrl-C. The job must have no other open groups: all are closed then.
    """
    if not launches:
        return {}
    pool = ThreadPoolExecutor(len(launches), thread_name_prefix="roost-launch")
    started = {name: pool.submit(launch) for name, launch in launches.items()}
    try:
        wait(started.values(), return_when=FIRST_EXCEPTION)
        failed = {name: future for name, future in started.items() if future.done() and future.exception()}
        first = next(iter(failed), None)
        for name, future in failed.items():
            if name != first:
                log.error("%s failed as well: %s", name, future.exception())
        return {name: future.result() for name, future in started.items() if first in (None, name)}
    except BaseException:
        deadline = Deadline.after(GROUP_CLOSE_SECONDS)
        while not deadline.is_over:
            is_over = all(launch.done() for launch in started.values())
            # Closing a group that is still being launched ends its launch.
            for close in reversed(list(context.open_groups.values())):
                # A group that cannot be ended now ends with the Cluster.
                with contextlib.suppress(RoostError):
                    close(max(POLL_SECONDS, deadline.left))
            if is_over:
                break
            wait(started.values(), timeout=POLL_SECONDS)
        raise
    finally:
        pool.shutdown(wait=False)


def load_code(run: RunConfig) -> tuple[Drafts, Callable[..., Any]]:
    """Import the class of each component and the entry point; one ConfigError has all that is missing or does not fit.

    What a module raises while it is imported is raised as it is.
    """
    notes = Notes()
    drafts: Drafts = []
    entry: Any = None
    missing: set[str] = set()
    """Modules that are not there: one message for each."""
    for worker in run.workers:
        module = worker.target.rpartition(".")[0]
        if module in missing:
            continue
        with notes.catching():
            cls = load(worker.target, worker.where())
            if not isinstance(cls, type) or not hasattr(cls, "create_group"):
                message = f"{worker.target} is not a worker: {shorten(repr(cls))}"
                raise ConfigError(message, hint="derive the class from roost.Worker", where=worker.where())
            try:
                drafts.append((worker, cls.create_group(*worker.args, **worker.kwargs)))
            except TypeError as error:
                where = worker.where("kwargs" if worker.kwargs or not worker.args else "args")
                message = f"worker {worker.component!r}: {error}"
                raise ConfigError(message, hint="see its args and kwargs", where=where) from None
        missing.update({module} - sys.modules.keys())
    if run.entry.rpartition(".")[0] not in missing:
        with notes.catching():
            entry = load(run.entry, run.entry_where)
            if not callable(entry):
                raise ConfigError(f"entry: {run.entry} cannot be called", where=run.entry_where)
    notes.raise_if_any()
    return drafts, entry


def check_flow(flow: FlowConfig, drafts: Drafts) -> None:
    """Raise one ConfigError with every call of a flow that the class of its component does not have."""
    notes = Notes()
    by_role = {worker.component: (worker, draft) for worker, draft in drafts}
    for call in flow.calls:
        role, _, method = call.rpartition(".")
        if role in by_role and method not in by_role[role][1].methods:
            worker, draft = by_role[role]
            close = did_you_mean(method, draft.methods)
            hint = f"did you mean {role}.{close}?" if close else ""
            message = f"flow: {shorten(call)}: {worker.target} has no method {shorten(method)!r}"
            notes.take(ConfigError(message, hint=hint, where=flow.places.get(call)))
    notes.raise_if_any()


def load(target: str, where: Where | None = None) -> Any:
    """Import `module.Name`; ConfigError if the module or the name does not exist."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if this module is missing, and not one that it imports.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        message, hint = f"{target}: there is no module {error.name!r}", "run from its folder, or set PYTHONPATH"
        raise ConfigError(message, hint=hint, where=where) from None
    if not hasattr(module, name):
        close = did_you_mean(name, dir(module))
        hint = f"did you mean {module_name}.{close}?" if close else ""
        raise ConfigError(f"{target}: module {module_name!r} has no {name!r}", hint=hint, where=where)
    return getattr(module, name)
