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


_ACCELERATORS = {
    Mode.COLOCATE: {"actor": "0-7", "rollout": "0-7"},
    Mode.DISAGG: {"actor": "0-3", "rollout": "4-7"},
}


def make_job(mode: Mode, workers: int = 4) -> dict[str, Any]:
    """The job's config, as it would stand in a YAML file, with so many workers in each component.

    >>> make_job(Mode.DISAGG)["cluster"]["component_placement"]["rollout"]
    '4-7:0-3'
    """
    ranks = f"0-{workers - 1}"
    placement: dict[str, Any] = {name: f"{where}:{ranks}" for name, where in _ACCELERATORS[mode].items()}
    placement["env"] = {"node_group": "node", "placement": f"2:{ranks}"}
    return {"cluster": {"num_nodes": 3, "component_placement": placement}}
