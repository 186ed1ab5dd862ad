"""The arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from roost.cli.load import Flags


class Format(StrEnum):
    """How a plan is shown."""

    MAP = "map"
    TABLE = "table"
    JSON = "json"
    SVG = "svg"
    HTML = "html"


class NodesFormat(StrEnum):
    """How nodes are shown."""

    TABLE = "table"
    MAP = "map"
    JSON = "json"
    INVENTORY = "inventory"


class TextFormat(StrEnum):
    """How a plain answer is shown."""

    TEXT = "text"
    JSON = "json"


class Kind(StrEnum):
    """Which rules place the components."""

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
TextForm = Annotated[TextFormat, typer.Option("--format", "-f", metavar="FORMAT", help="How to show it: text or json.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to this file and not to the terminal.")
]
Live = Annotated[bool, typer.Option("--live", help="Take the hardware of the Ray cluster that is running.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Where Ray is; else RAY_ADDRESS, or the one of this machine."),
]
Rules = Annotated[
    Kind,
    typer.Option(
        "--placement",
        metavar="RULES",
        help="hybrid places any component anywhere, model-parallel goes by parallel sizes; auto looks at the job.",
    ),
]
Shared = Annotated[bool, typer.Option("--no-isolate", help="Let every worker see all accelerators of its node.")]


def make_flags(cluster: str | None, inventory: Path | None, live: bool, placement: Kind, no_isolate: bool) -> Flags:
    """The flags of a command that plans, as one value."""
    from roost.cli.load import Flags

    return Flags(cluster=cluster, inventory=inventory, live=live, placement=placement.value, no_isolate=no_isolate)
