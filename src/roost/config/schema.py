"""JSON Schemas of the files that people write, for editors, made from the tables that the readers read by.

A schema knows shapes and never the hardware: what it refuses, the readers refuse as well, and they refuse more. The
readers also take components without `component_placement`, of which editors should still say that the level is missing.
Draft 7 is what the YAML support of editors understands best.
"""

from __future__ import annotations

from roost.config.inventory import INVENTORY_FIELDS
from roost.config.job import CLUSTER_FIELDS, PARALLEL_SIZES, RECOMPUTE_LOGPROBS
from roost.config.profile import PROFILE_FIELDS
from roost.config.run import RUN_FIELDS
from roost.config.values import Schema
from roost.config.weight_sync import WEIGHT_SYNC_FIELDS

_DRAFT = "http://json-schema.org/draft-07/schema#"


def job_schema() -> Schema:
    """Return the schema of a job: the sections that Roost reads, and any others."""
    sections = {name: field.schema() for name, field in RUN_FIELDS.fields.items()}
    return {
        "$schema": _DRAFT,
        "title": "A job of Roost",
        "description": "Which component goes on which hardware, and what runs there. Other keys are yours.",
        "type": "object",
        "properties": {
            "cluster": CLUSTER_FIELDS.schema(),
            **sections,
            "weight_sync": WEIGHT_SYNC_FIELDS.schema(),
            **_sizes(),
        },
        "required": ["cluster"],
    }


def cluster_schema() -> Schema:
    """Return the schema of the section `cluster` in its own file, as Hydra composes it; components may be left out."""
    title = "The section 'cluster' of a job of Roost"
    return {"$schema": _DRAFT, "title": title, **CLUSTER_FIELDS.optional().schema()}


def inventory_schema() -> Schema:
    """Return the schema of an inventory: the hardware, described in a file."""
    return {"$schema": _DRAFT, "title": "An inventory of Roost", **INVENTORY_FIELDS.schema()}


def profile_schema() -> Schema:
    """Return the schema of a profile: how long the calls of a step take."""
    return {"$schema": _DRAFT, "title": "A profile of Roost", **PROFILE_FIELDS.schema()}


def _sizes() -> Schema:
    """Describe the sizes of a model-parallel job without refusing any value: other jobs have these names too."""
    found: Schema = {}
    for field in (*PARALLEL_SIZES.values(), RECOMPUTE_LOGPROBS):
        *path, last = field.name.split(".")
        inner = found
        for key in path:
            inner = inner.setdefault(key, {"properties": {}})["properties"]
        inner[last] = {"description": field.about}
    return found
