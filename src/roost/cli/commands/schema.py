"""`roost schema`: the JSON Schema that an editor checks a job with."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from roost.cli.options import Out
from roost.cli.out import as_json, write_text
from roost.config.schema import cluster_schema, inventory_schema, job_schema, profile_schema


def schema(
    kind: Annotated[
        Literal["job", "cluster", "inventory", "profile"],
        typer.Option(
            "--for", metavar="KIND", help="job, cluster (that section in its own file), inventory or profile."
        ),
    ] = "job",
    out: Out = None,
) -> None:
    make = {"job": job_schema, "cluster": cluster_schema, "inventory": inventory_schema, "profile": profile_schema}
    write_text(as_json(make[kind]()), out)
