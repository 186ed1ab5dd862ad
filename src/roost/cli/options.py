"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class TextFormat(StrEnum):
    """The formats of an answer in words."""

    TEXT = "text"
    JSON = "json"


class Kind(StrEnum):
    """The rules that place the components."""

    AUTO = "auto"
    HYBRID = "hybrid"
    MODEL_PARALLEL = "model-parallel"


Job = Annotated[
    Path, typer.Argument(metavar="JOB.yaml", help="The job's config, or a plan saved as JSON; - is standard input.")
]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", "-c", metavar="2x8", help="Nodes x accelerators [: model], as in 4x8:H100,2x4:4090,1x0."),
]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", "-i", metavar="FILE", help="A file that describes the hardware.")
]
TextForm = Annotated[TextFormat, typer.Option("--format", "-f", metavar="FORMAT", help="Output format: text or json.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to this file instead of standard output.")
]
Live = Annotated[bool, typer.Option("--live", help="Use the hardware of the running Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Where Ray is; default: RAY_ADDRESS, or this machine's Ray."),
]
Rules = Annotated[
    Kind,
    typer.Option(
        "--placement",
        metavar="RULES",
        help="hybrid places any component anywhere, model-parallel uses parallel sizes; auto decides by the job.",
    ),
]
Shared = Annotated[bool, typer.Option("--no-isolate", help="Let every worker see all accelerators of its node.")]
