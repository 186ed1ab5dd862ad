"""The two modes of the demo as jobs: which role goes where."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

HARDWARE = "2x4:H100,1x0"
"""Two nodes with four accelerators each and one without, all on this machine."""
GAMES = 8
"""The number of games that an Env plays in parallel."""
STEPS = 128
"""The number of steps that a round plays in each game."""


class Mode(StrEnum):
    """How actor and rollout use the accelerators."""

    COLOCATE = "colocate"
    DISAGG = "disagg"

    @property
    def said(self) -> str:
        """The mode in half a sentence."""
        if self is Mode.COLOCATE:
            return "actor and rollout share the accelerators and take turns"
        return "actor and rollout have their own accelerators and work at the same time"


def make_job(mode: Mode, workers: int = 4) -> dict[str, Any]:
    """Return the job's config, as a YAML file would hold it, with `workers` workers in each component.

    >>> make_job(Mode.DISAGG)["cluster"]["component_placement"]["rollout"]
    '4-7:0-3'
    """
    ranks = f"0-{workers - 1}"
    actor, rollout = ("0-7", "0-7") if mode is Mode.COLOCATE else ("0-3", "4-7")
    env = {"node_group": "node", "placement": f"2:{ranks}"}
    placement = {"actor": f"{actor}:{ranks}", "rollout": f"{rollout}:{ranks}", "env": env}
    return {"cluster": {"num_nodes": 3, "component_placement": placement}}
