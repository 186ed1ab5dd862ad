"""`choose_route`: how bytes get from one place to another. Pure, and the only place where that is decided.

A plan asks it with the places of workers, before there is a process. Messages, channels, links of weights and engines
ask it again with what they then know of the memory at both ends, and `explain` says why the two answers differ.

To add a mover: a member of `Route`, where it is chosen below, and the file that carries it out next to this one.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


class Route(enum.IntEnum):
    """How bytes get from one worker to another: those of a plan, nearest first, and two that a process may find."""

    MEMORY = 0
    DEVICE = 1
    NODE = 2
    NETWORK = 3
    RELAY = 4
    GROUP = 5

    @property
    def words(self) -> str:
        """How it is shown."""
        return ("same process", "same device", "same node", "network", "same node, sent", "process group")[self]

    @property
    def mover(self) -> str:
        """The means that carries the bytes."""
        return ("own memory", "CUDA IPC", "host memory", "messages", "messages", "NCCL")[self]

    @property
    def is_sent(self) -> bool:
        """Whether the source has to send; otherwise the target copies without its help."""
        return self >= Route.NETWORK


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a route: a process, and its memory as far as that is known."""

    process: str
    node: int | None = None
    """None if it is not known, which is far from everywhere."""
    devices: Collection[Any] = ()
    """The devices that the process uses, by numbers on their node in a plan, otherwise by UUID."""
    memory: str | None = None
    """The device that has the bytes; empty for the host, None while that is not known, as in a plan."""
    closed: str = ""
    """Why other processes cannot map or read this memory; empty if they can."""
    can_group: bool = False
    """Whether the process can be in a process group of two with the other end."""


def choose_route(source: End, target: End) -> Route:
    """Decide how bytes go from one end to another.

    >>> trainer = End(process="actor:0", node=0, devices=(0,))
    >>> choose_route(trainer, End(process="rollout:1", node=0, devices=(0, 1)))
    <Route.DEVICE: 1>
    >>> tensor = End(process="actor:0", node=0, memory="GPU-1", can_group=True)
    >>> choose_route(tensor, End(process="rollout:1", node=0, devices=("GPU-0",), memory="GPU-0", can_group=True))
    <Route.GROUP: 5>
    """
    if source.process == target.process:
        return Route.MEMORY
    is_near = source.node is not None and source.node == target.node
    if is_near and not source.closed:
        if source.memory is None:
            return Route.DEVICE if set(source.devices) & set(target.devices) else Route.NODE
        if not source.memory:
            return Route.NODE
        if source.memory in target.devices:
            return Route.DEVICE
    # NCCL takes no two processes on one device.
    are_apart = bool(source.memory and target.memory) and source.memory != target.memory
    if are_apart and source.can_group and target.can_group:
        return Route.GROUP
    return Route.RELAY if is_near else Route.NETWORK


def explain(planned: Route, taken: Route, source: End, target: End) -> str:
    """Say why bytes did not go as planned; empty if they did, or if NCCL carried them between two devices.

    >>> here, there = End(process="actor:0", node=0, memory=""), End(process="rollout:1", node=0)
    >>> explain(Route.DEVICE, choose_route(here, there), here, there)
    'the weights of actor:0 are in host memory'
    """
    if taken in (planned, Route.GROUP):
        return ""
    if source.closed:
        return source.closed
    if taken is Route.NETWORK:
        return f"{source.process} and {target.process} are not on the same node"
    if taken is Route.RELAY:
        return f"{target.process} does not see the device of {source.process}"
    if taken is Route.NODE and planned is Route.DEVICE:
        return f"the weights of {source.process} are in host memory"
    return f"{source.process} and {target.process} are nearer than in the plan"
