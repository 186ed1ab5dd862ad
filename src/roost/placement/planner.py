"""Turn a config and a cluster into a plan: the function that the command line and the launcher call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from roost.config.job import JobConfig, read_job_draft
from roost.config.run import RunDraft, read_run_draft
from roost.errors import ConfigError, PlacementError, Problem
from roost.placement.components import ComponentPlacement, HybridComponentPlacement
from roost.placement.plan import Plan
from roost.text import join_words

PlacementKind = Literal["auto", "hybrid", "model-parallel"]

_MODEL_PARALLEL_JOB = ("actor", "rollout", "inference", "reward")


def make_plan(
    config: object,
    cluster: object,
    *,
    placement: PlacementKind = "auto",
    isolate_accelerator: bool = True,
    allow_overflow: bool = False,
) -> Plan:
    """Plan a job: `config` is a path, a dict, a DictConfig or a JobConfig, `cluster` has the topology.

    With `placement="auto"` a job is model-parallel if it has actor and rollout, nothing else but inference and
    reward, and tensor-parallel sizes for both. A job that says what its workers hold must fit in memory, except with
    `allow_overflow`.
    """
    if placement not in get_args(PlacementKind):
        raise ConfigError(f"placement is {placement!r}", hint=f"it is {join_words(get_args(PlacementKind), last='or')}")
    # A file is a job, so all its sections are checked; in a dict the other sections may belong to the user.
    draft = read_run_draft(config) if isinstance(config, str | Path) else read_job_draft(config)
    parallel, ignored = placement == "model-parallel", None
    if placement == "auto":
        parallel, ignored = _is_model_parallel(draft.job)
    by_count = next((one for one in draft.job.cluster.components if one.count is not None), None)
    if by_count is not None and parallel:
        message = f"component {by_count.name!r} is placed by count, and a model-parallel job names its ranks"
        raise PlacementError(message, hint="leave out the parallel sizes: a mesh says them", where=by_count.where())
    kind: type[ComponentPlacement] = HybridComponentPlacement
    if parallel:
        # Loaded when needed: a small job starts faster without it.
        from roost.placement.model_parallel import ModelParallelComponentPlacement

        kind = ModelParallelComponentPlacement
    plan = kind(draft, cluster, isolate_accelerator=isolate_accelerator).plan()
    if isinstance(draft, RunDraft) and draft.memory is not None and not allow_overflow:
        from roost.placement.ledger import make_ledger  # few jobs need it

        if problems := make_ledger(plan, draft.memory).problems:
            raise PlacementError(problems)
    return replace(plan, sizes_ignored=ignored)


def check_num_nodes(job: JobConfig, plan: Plan) -> None:
    """Raise PlacementError if the job names hardware of a node that it would not get: it runs on the first num_nodes.

    A component on `all` takes what there is, and runs on fewer nodes as well.
    """
    count = job.cluster.num_nodes
    if count is None or count >= plan.topology.num_nodes:
        return
    problems = []
    for component in job.cluster.components:
        space = plan.topology.space(component.node_groups or None)
        for segment in component.segments:
            ranks = segment.resources.as_range() if segment.resources else ()
            beyond = next((rank for rank in ranks if space.locate(rank).node_rank >= count), None)
            if beyond is not None:
                node = space.locate(beyond).node_rank
                there = "node rank is 0" if count == 1 else f"node ranks are 0-{count - 1}"
                problems.append(
                    Problem(
                        message=f"component {component.name!r} asks for {space.unit} {beyond}, which is on "
                        f"node {node}, but num_nodes is {count}, so {there}",
                        hint=f"a job runs on the first num_nodes nodes: write num_nodes: {_last_node(plan) + 1}, "
                        "or choose other ranks",
                        where=component.where(segment, last=True),
                        ranks=(beyond,),
                    )
                )
                break
    if problems:
        raise PlacementError(problems)


def _last_node(plan: Plan) -> int:
    return max(placement.cluster_node_rank for item in plan.components for placement in item.placements)


def _is_model_parallel(job: JobConfig) -> tuple[bool, str | None]:
    """Return whether the parallel sizes place a job; if it has some and they do not, also why."""
    names = [component.name for component in job.cluster.components]
    given = job.tensor_parallel_sizes()
    if not given or not {"actor", "rollout"} <= set(names):
        return False, None
    others = [repr(name) for name in names if name not in _MODEL_PARALLEL_JOB]
    if len(given) == 2 and not others:
        return True, None
    if all(size == "1" for size in given.values()):
        return False, None
    if len(given) == 1:
        return False, f"only {next(iter(given))} is given"
    return False, f"there is {join_words(others)} besides actor, rollout, inference and reward"
