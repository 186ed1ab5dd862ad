"""How `--help` looks: a flag takes no value and shows none, and the usage names arguments as one types them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

_EXAMPLES = {
    "demo": "roost demo --mode colocate",
    "new": "roost new my-job",
    "schema": "roost schema --out job.schema.json",
    "plan": "roost plan job.yaml --cluster 2x8",
    "diff": "roost diff job.yaml other.yaml --cluster 2x8",
    "where": "roost where job.yaml actor:3 --cluster 2x8",
    "who": "roost who job.yaml 1:4 --cluster 2x8",
    "lint": "roost lint job.yaml --cluster 2x8 --strict",
    "run": "roost run job.yaml",
    "logs": "roost logs actor:3 --follow",
    "show": "roost show 20261115-2242",
    "rerun": "roost rerun 20261115-2242 --dry-run",
    "doctor": "roost doctor --run-dir /shared/runs",
    "nodes": "roost nodes --format inventory --out live.yaml",
    "up": "roost up 2x4",
}


def epilog(command: str) -> str | None:
    """What the help of a command ends with."""
    return f"For example: {_EXAMPLES[command]}" if command in _EXAMPLES else None


class Command(TyperCommand):
    """A command whose help is ours."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.removeprefix("{").removesuffix("}") for piece in super().collect_usage_pieces(ctx)]


class Group(TyperGroup):
    """The command line as a whole."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))


def _plain_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
