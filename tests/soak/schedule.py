"""What happens in a round of the soak: which nodes, which drivers, which faults and when; all of it from one seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One way to disturb a part of a job or of its cluster."""

    target: str
    act: str
    """`kill` and `stop` are signals; a target that was stopped goes on after a while.

    A target that is robbed is killed, and a thief answers in its place; one that starves can open no more files.
    """
    at_head: bool = False
    """Whether it concerns the whole cluster; such a fault has a round of its own."""
    ends_cluster: bool = False
    """Whether the cluster cannot be used afterwards."""


FAULTS: Mapping[str, FaultKind] = {
    "kill-worker": FaultKind(target="worker", act="kill"),
    "stop-worker": FaultKind(target="worker", act="stop"),
    "kill-channel": FaultKind(target="channel", act="kill"),
    "stop-channel": FaultKind(target="channel", act="stop"),
    "kill-engine": FaultKind(target="engine", act="kill"),
    "stop-engine": FaultKind(target="engine", act="stop"),
    "rob-engine": FaultKind(target="engine", act="rob"),
    "kill-rollout-manager": FaultKind(target="rollout manager", act="kill"),
    "stop-rollout-manager": FaultKind(target="rollout manager", act="stop"),
    "kill-node-manager": FaultKind(target="node manager", act="kill"),
    "stop-node-manager": FaultKind(target="node manager", act="stop"),
    "kill-worker-manager": FaultKind(target="worker manager", act="kill"),
    "stop-worker-manager": FaultKind(target="worker manager", act="stop"),
    "kill-collective-manager": FaultKind(target="collective manager", act="kill"),
    "kill-raylet": FaultKind(target="raylet", act="kill"),
    "stop-raylet": FaultKind(target="raylet", act="stop"),
    "kill-driver": FaultKind(target="driver", act="kill"),
    "stop-driver": FaultKind(target="driver", act="stop"),
    "reset": FaultKind(target="peer", act="reset"),
    "starve": FaultKind(target="peer", act="starve"),
    "cut-node": FaultKind(target="node", act="cut"),
    "blip-node": FaultKind(target="node", act="blip"),
    "fill-disk": FaultKind(target="disk", act="fill"),
    "step-clock": FaultKind(target="clock", act="step"),
    "kill-gcs": FaultKind(target="gcs", act="kill", at_head=True, ends_cluster=True),
    "stop-gcs": FaultKind(target="gcs", act="stop", at_head=True),
    "kill-head-raylet": FaultKind(target="head raylet", act="kill", at_head=True, ends_cluster=True),
    "stop-head-raylet": FaultKind(target="head raylet", act="stop", at_head=True, ends_cluster=True),
    "cut-head": FaultKind(target="head", act="cut", at_head=True),
    "blip-head": FaultKind(target="head", act="blip", at_head=True),
}
"""Every fault by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """A fault of a round."""

    at: float
    """Seconds after the first driver began."""
    name: str
    pick: float
    """Which of the possible targets: 0 is the first, just below 1 the last."""
    seconds: float
    """How long a target is stopped, cut off, full, robbed or starves, or its connections are reset again and again."""

    def __str__(self) -> str:
        lasts = "" if FAULTS[self.name].act == "kill" else f" for {self.seconds:g} s"
        return f"{self.name} at {self.at:g} s{lasts}, pick {self.pick:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDriver:
    """A driver of a round: what it does follows from its seed."""

    seed: int
    num_nodes: int
    has_rollout: bool
    """Whether it runs engines and a rollout manager under load, in place of groups that come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round, complete."""

    seed: int
    accelerators: tuple[int, ...]
    """Of each node."""
    drivers: tuple[PlannedDriver, ...]
    faults: tuple[PlannedFault, ...]
    seconds: float
    """How long each driver works, from the moment when it has a Cluster, before it closes."""

    @property
    def ends_cluster(self) -> bool:
        """Whether nothing can be asked of the cluster at the end."""
        return any(FAULTS[fault.name].ends_cluster for fault in self.faults)

    def __str__(self) -> str:
        nodes = ",".join(f"1x{count}" for count in self.accelerators)
        kinds = ", ".join("rollout" if driver.has_rollout else "groups" for driver in self.drivers)
        faults = "; ".join(map(str, self.faults)) or "none"
        return f"seed {self.seed}: nodes {nodes}; drivers {kinds}; faults {faults}"


def choose_faults(wanted: str = "") -> list[str]:
    """Return the faults to choose from: all of them, or those that a list names.

    >>> choose_faults("kill-worker,stop-gcs")
    ['kill-worker', 'stop-gcs']
    """
    names = [name.strip() for name in wanted.split(",")] if wanted else list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        raise ValueError(f"there is no fault {', '.join(unknown)}: there are {', '.join(FAULTS)}")
    return names


def make_round(seed: int, faults: Collection[str]) -> Round:
    """Make the round of a seed from the faults that are allowed."""
    choose = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    # The head has accelerators too, so that its node is used.
    accelerators = (choose.randint(1, 2), *(choose.randint(1, 3) for _ in range(choose.randint(2, 4))))
    has_rollout = choose.random() < 0.5
    drivers = [
        PlannedDriver(
            seed=choose.randrange(2**32),
            num_nodes=choose.randint(2, len(accelerators)),
            has_rollout=has_rollout and number == 0,
        )
        for number in range(choose.choice([1, 1, 2] if has_rollout else [1, 1, 2, 2, 3]))
    ]
    seconds = float(choose.randint(12, 18) + 8 * has_rollout)
    at_head = [name for name in faults if FAULTS[name].at_head]
    elsewhere = [
        name
        for name in faults
        if not FAULTS[name].at_head and (has_rollout or FAULTS[name].target not in ("engine", "rollout manager"))
    ]
    chosen = [choose.choice(elsewhere) for _ in range(choose.randint(1, 4))] if elsewhere else []
    # All choices are made in any case, so that a switched fault changes as little as possible.
    head_round, head_fault = choose.random() < 0.2, choose.random()
    if at_head and (head_round or not elsewhere):
        chosen = [*chosen[:1], at_head[int(head_fault * len(at_head))]]
    planned = [
        PlannedFault(
            at=round(choose.uniform(2.0, 5.0 + seconds), 1),
            name=name,
            pick=round(choose.random(), 3),
            # Some last longer than any deadline.
            seconds=round(choose.uniform(1.0, 8.0) if choose.random() < 0.75 else choose.uniform(15.0, 20.0), 1),
        )
        for name in chosen
    ]
    return Round(
        seed=seed,
        accelerators=accelerators,
        drivers=tuple(drivers),
        faults=tuple(sorted(planned, key=lambda fault: fault.at)),
        seconds=seconds,
    )
