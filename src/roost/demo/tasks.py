"""The tasks of the demo: which job trains, in two modes, and how the demo shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When a run ends: at a mean return, but not before some rounds, and after some seconds in any case."""

    mean_return: float
    seconds: float
    least_rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of the demo."""

    title: str
    noun: str
    """The name of the value that rises."""
    top: float
    """The highest value that it can have."""
    digits: int
    """How many digits of it after the point are shown."""
    hardware: str
    call: str
    """The call of the rollout in a step."""
    goal: Goal
    killed_in: Mode
    """The mode in which a worker is killed."""
    needs: Mapping[str, str]
    """Packages besides Roost's own, and how to install them."""
    make_job: Callable[[Mode], dict[str, Any]]
    trainer: str
    """The module whose `train` needs these packages."""

    def text(self, value: float) -> str:
        """Return a value as it is shown."""
        return f"{value:.{self.digits}f}"


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


def _make_llm_job(mode: Mode) -> dict[str, Any]:
    rollout = "0-1" if mode is Mode.COLOCATE else "2-3"
    return {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-1", "rollout": rollout}}}


TASKS: Mapping[str, Task] = {
    "cartpole": Task(
        title="CartPole",
        noun="mean return",
        top=500.0,
        digits=0,
        hardware=HARDWARE,
        call="rollout.play",
        goal=Goal(mean_return=300.0, seconds=60.0, least_rounds=16),
        killed_in=Mode.COLOCATE,
        needs={"gymnasium": "pip install 'roost[demo]'"},
        make_job=make_job,
        trainer="roost.demo.training",
    ),
    "llm": Task(
        title="a language model",
        noun="mean reward",
        top=1.0,
        digits=2,
        hardware="1x4:H100",
        call="rollout.generate",
        goal=Goal(mean_return=0.9, seconds=90.0, least_rounds=12),
        killed_in=Mode.DISAGG,
        needs={
            "torch": "pip install torch",
            "transformers": "pip install 'transformers>=5'",
            "aiohttp": "pip install 'roost[rl]'",
            "vllm": "pip install vllm, or in a clone of Roost: make demo-llm",
        },
        make_job=_make_llm_job,
        trainer="roost.demo.llm.training",
    ),
}
