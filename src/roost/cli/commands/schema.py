"""`roost schema`: the JSON Schema that an editor checks a job with."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from roost.cli.options import Out
from roost.cli.out import as_json, write_text
from roost.config.schema import cluster_schema, inventory_schema, job_schema


class SchemaOf(StrEnum):
    """The files that have a schema."""

    JOB = "job"
    CLUSTER = "cluster"
    INVENTORY = "inventory"


def schema(
    kind: Annotated[
        SchemaOf,
        typer.Option("--for", metavar="KIND", help="job, cluster (that section in its own file) or inventory."),
    ] = SchemaOf.JOB,
    out: Out = None,
) -> None:
    make = {SchemaOf.JOB: job_schema, SchemaOf.CLUSTER: cluster_schema, SchemaOf.INVENTORY: inventory_schema}
    write_text(as_json(make[kind]()), out)
