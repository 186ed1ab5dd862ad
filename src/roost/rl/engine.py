"""What a rollout engine is: a class of the user's with five methods, told once where it is and which ports are its own.

class MyEngine:
    def start(self, spec): ...              # bring the server up at spec.address, spec.port
    def health(self): ...                   # whether it can serve
    def generate(self, request): ...
    def update_weights(self, weights, version): ...
    def stop(self): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from roost.errors import ConfigError
from roost.text import join_words


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Where one process of an engine is, measured, and the ports that were leased for it on its own node."""

    engine_rank: int
    """Which engine."""
    num_engines: int
    node_rank: int
    """Which of the engine's own nodes: 0 is the one that serves."""
    num_nodes: int
    """How many nodes the engine has."""
    cluster_node_rank: int
    """The node's rank in the cluster."""
    address: str
    """The address of this node."""
    devices: tuple[str, ...]
    """The engine's accelerators on this node, as the visible-devices variable names them."""
    num_devices: int
    """How many accelerators the engine has on all of its nodes."""
    port: int
    """Where this process's server listens."""
    nccl_port: int
    dist_init_addr: str
    """`address:port` on the engine's node 0, the same for all of its nodes."""
    dp_attention_ports: tuple[int, ...]
    """Consecutive ports for data-parallel attention, one for each rank of it."""

    @property
    def url(self) -> str:
        """Where the server is: `http://10.0.0.7:20300`."""
        return f"http://{f'[{self.address}]' if ':' in self.address else self.address}:{self.port}"


@runtime_checkable
class RolloutEngine(Protocol):
    """The methods that an engine has. Its server answers `POST /generate` and `GET /health`.

    `offload` and `onload` are optional: an engine that has them gives its accelerators' memory up while others use
    it. Of an engine on several nodes every process is started; node 0's is the one that is asked.
    """

    def start(self, spec: EngineSpec) -> None:
        """Bring the server up; it may become healthy later."""

    def health(self) -> bool:
        """Whether it can serve."""

    def generate(self, request: Any) -> Any:
        """Answer a request, without the way through HTTP."""

    def update_weights(self, weights: Any, version: int) -> None:
        """Take new weights."""

    def stop(self) -> None:
        """End the server."""


_METHODS = ("start", "health", "generate", "update_weights", "stop")


def check_engine_class(cls: object) -> type:
    """The class, if objects of it are engines; ConfigError says which methods are missing."""
    if not isinstance(cls, type):
        raise ConfigError(f"an engine is made from a class, and {cls!r} is none")
    missing = [name for name in _METHODS if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(
            f"{cls.__name__} is no rollout engine: it has no {join_words(missing)}",
            hint=f"an engine has {join_words(_METHODS)}",
        )
    return cls
