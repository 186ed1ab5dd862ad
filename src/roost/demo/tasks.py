"""The tasks of the demo: which job trains, on which hardware, and how the demo shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from roost import ConfigError
from roost.demo.jobs import HARDWARE, Mode, make_job
from roost.demo.rounds import Goal


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

    def check(self) -> None:
        """Raise ConfigError if a package is missing."""
        for package, hint in self.needs.items():
            if find_spec(package) is None:
                raise ConfigError(f"the demo of {self.title} needs {package}, which is not installed", hint=hint)


def _make_llm_job(mode: Mode) -> dict[str, Any]:
    rollout = "0-1" if mode is Mode.COLOCATE else "2-3"
    return {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-1", "rollout": rollout}}}


CARTPOLE = Task(
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
)
LANGUAGE_MODEL = Task(
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
)
TASKS: Mapping[str, Task] = {"cartpole": CARTPOLE, "llm": LANGUAGE_MODEL}
