"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

TextFormat = Literal["text", "json"]
Job = Annotated[
    Path, typer.Argument(metavar="JOB.yaml", help="The job's config, or a plan saved as JSON; - is standard input.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of those in the file; +KEY=VALUE adds one."),
]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", "-c", metavar="2x8", help="Nodes x accelerators [: model], as in 4x8:H100,2x4:4090,1x0."),
]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", "-i", metavar="FILE", help="A file that describes the hardware.")
]
TextForm = Annotated[TextFormat, typer.Option("--format", metavar="FORMAT", help="Output format: text or json.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to this file instead of standard output.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Where Ray is; default: RAY_ADDRESS, or this machine's Ray."),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="How long nodes may take to answer.")
]
