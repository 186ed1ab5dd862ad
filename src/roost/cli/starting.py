"""Commands to start with: a project of your own, and the schema by which an editor helps with its file."""

from __future__ import annotations

import shlex
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.options import Out
from roost.cli.out import write_text


class SchemaOf(StrEnum):
    """Which file a schema is of."""

    JOB = "job"
    CLUSTER = "cluster"
    INVENTORY = "inventory"


def new(
    path: Annotated[Path, typer.Argument(metavar="NAME", help="The new folder: my-job, or some/where/my-job.")],
) -> None:
    """Make a folder with a small job that works, and its test."""
    from roost.cli.project import plan_project, write_project

    project = plan_project(path)
    write_project(project)
    made = {name: purpose for name, (_, purpose) in project.files().items()}
    width = max(map(len, made))
    lines = [f"made {path}", *(f"  {name:{width}}  {purpose}" for name, purpose in made.items()), "go on with"]
    lines += [] if project.folder == Path.cwd() else [f"  cd {shlex.quote(str(path))}"]
    # Roost does not need it: the pytest that the shell finds may be one that does not know Roost.
    lines += [] if find_spec("pytest") else ["  pip install pytest"]
    lines += [
        "  roost plan job.yaml --cluster 2x4",
        "  pytest",
        "  roost up 2x4",
        "  roost run job.yaml",
        "  roost logs learner",
        "  roost down",
    ]
    write_text("\n".join(lines) + "\n", None)


def schema(
    kind: Annotated[
        SchemaOf,
        typer.Option("--for", metavar="KIND", help="job, cluster (that section in a file of its own) or inventory."),
    ] = SchemaOf.JOB,
    out: Out = None,
) -> None:
    """Print the JSON Schema by which an editor checks a job."""
    from roost.cli.project import schema_text
    from roost.config.schema import cluster_schema, inventory_schema, job_schema

    make = {SchemaOf.JOB: job_schema, SchemaOf.CLUSTER: cluster_schema, SchemaOf.INVENTORY: inventory_schema}
    write_text(schema_text(make[kind]()), out)
