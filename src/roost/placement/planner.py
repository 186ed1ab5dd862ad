"""From a config and a cluster to a plan: the one function that the command line and the launcher call."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from roost.errors import ConfigError, said
from roost.placement.components import ComponentPlacement, HybridComponentPlacement
from roost.placement.config import JobConfig, read_job_draft
from roost.placement.plan import Plan

PlacementKind = Literal["auto", "hybrid", "model-parallel"]

_MODEL_PARALLEL_JOB = ("actor", "rollout", "inference", "reward")


def make_plan(
    config: object, cluster: object, *, placement: PlacementKind = "auto", isolate_accelerator: bool = True
) -> Plan:
    """Plan a job: `config` is a path, a dict, a DictConfig or a JobConfig, `cluster` has the topology.

    With `placement="auto"` a job is model-parallel if it has actor and rollout, nothing beside inference and
    reward, and gives tensor-parallel sizes for both.
    """
    if placement not in get_args(PlacementKind):
        raise ConfigError(f"placement is {placement!r}", hint=f"it is {said(get_args(PlacementKind), last='or')}")
    draft = read_job_draft(config)
    if placement == "hybrid":
        return HybridComponentPlacement(draft, cluster, isolate_accelerator=isolate_accelerator).plan()
    obstacle = "" if placement == "model-parallel" else _obstacle(draft.job)
    if obstacle is None or obstacle:
        plan = HybridComponentPlacement(draft, cluster, isolate_accelerator=isolate_accelerator).plan()
        return replace(plan, sizes_ignored=obstacle)
    # Loaded when it is needed: a small job starts the quicker without it.
    from roost.placement.parallel import ModelParallelComponentPlacement

    kind: type[ComponentPlacement] = ModelParallelComponentPlacement
    return kind(draft, cluster, isolate_accelerator=isolate_accelerator).plan()


def _obstacle(job: JobConfig) -> str | None:
    """What keeps a job from being placed as model-parallel: nothing (""), or what; None if it does not look so."""
    names = [component.name for component in job.cluster.components]
    given = job.tensor_parallel_sizes()
    if not given or not {"actor", "rollout"} <= set(names):
        return None
    others = [name for name in names if name not in _MODEL_PARALLEL_JOB]
    if len(given) == 2 and not others:
        return ""
    if all(size.strip("'") == "1" for size in given.values()):
        return None
    if len(given) == 1:
        return f"only {next(iter(given))} is given"
    return f"there is {said([repr(name) for name in others])} beside actor, rollout, inference and reward"
