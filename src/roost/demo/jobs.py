"""The two modes of the demo as jobs: which role sits where."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

HARDWARE = "2x4:H100,1x0"
"""Two nodes with four accelerators each and one without, all of them on this machine."""

GAMES = 8
"""How many games an Env plays side by side."""

STEPS = 128
"""How many steps of each game are in a round."""


class Mode(StrEnum):
    """How learner and rollout share the accelerators."""

    COLOCATE = "colocate"
    DISAGG = "disagg"

    @property
    def said(self) -> str:
        """What is special about it."""
        if self is Mode.COLOCATE:
            return "actor and rollout share all 8 accelerators and take turns"
        return "actor and rollout have 4 accelerators each and work at the same time"


_PLACEMENT = {
    Mode.COLOCATE: {"actor": "0-7:0-3", "rollout": "0-7:0-3"},
    Mode.DISAGG: {"actor": "0-3", "rollout": "4-7"},
}


def make_job(mode: Mode) -> dict[str, Any]:
    """The job's config, as it would stand in a YAML file."""
    env = {"node_group": "node", "placement": "2:0-3"}
    return {"cluster": {"num_nodes": 3, "component_placement": {**_PLACEMENT[mode], "env": env}}}
