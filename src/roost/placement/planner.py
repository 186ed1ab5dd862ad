"""From a config and a cluster to a plan: the one function that the command line and the launcher call."""

from __future__ import annotations

from typing import Literal, get_args

from roost.errors import ConfigError, said
from roost.placement.components import ComponentPlacement, HybridComponentPlacement
from roost.placement.config import JobConfig, read_job_config
from roost.placement.parallel import ModelParallelComponentPlacement
from roost.placement.plan import Plan

PlacementKind = Literal["auto", "hybrid", "model-parallel"]

_MODEL_PARALLEL_JOB = frozenset({"actor", "rollout", "inference", "reward"})


def make_plan(
    config: object, cluster: object, *, placement: PlacementKind = "auto", isolate_accelerator: bool = True
) -> Plan:
    """Plan a job: `config` is a path, a dict, a DictConfig or a JobConfig, `cluster` has the topology.

    With `placement="auto"` a job is model-parallel if it has actor and rollout, nothing beside inference and
    reward, and gives tensor-parallel sizes for both.
    """
    if placement not in get_args(PlacementKind):
        raise ConfigError(f"placement is {placement!r}", hint=f"it is {said(get_args(PlacementKind), last='or')}")
    job, notes = read_job_config(config)
    kind: type[ComponentPlacement] = HybridComponentPlacement
    if placement == "model-parallel" or (placement == "auto" and is_model_parallel(job)):
        kind = ModelParallelComponentPlacement
    # With mistakes noted, the placement reads the config again, adds its own and raises them all.
    source = job.document if notes.problems else job
    return kind(source, cluster, isolate_accelerator=isolate_accelerator).plan()


def is_model_parallel(job: JobConfig) -> bool:
    """Whether a job looks like one that ModelParallelComponentPlacement is for."""
    names = {component.name for component in job.cluster.components}
    return {"actor", "rollout"} <= names <= _MODEL_PARALLEL_JOB and job.has_parallel_sizes()
