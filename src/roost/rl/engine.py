"""The interface of a rollout engine: a user's class with five methods, started with its address, devices and ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

from roost.errors import ConfigError
from roost.rl.engines.inside import roost_proof
from roost.text import join_words

PauseMode = Literal["keep", "wait", "abort"]
"""How requests that run go on when weights change."""


def check_pause_mode(mode: str, modes: Sequence[str] = get_args(PauseMode)) -> PauseMode:
    """Return a pause mode, if an engine can do it; ConfigError otherwise."""
    if mode not in modes:
        raise ConfigError(f"pause_mode is {mode!r}: it is {join_words(modes, last='or')}")
    return cast(PauseMode, mode)


def url_of(host: str, port: int) -> str:
    """Build `http://10.0.0.7:20300`, with an IPv6 address in brackets.

    >>> url_of("::1", 20300)
    'http://[::1]:20300'
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Where one process of an engine runs, as measured, and the ports that it has leased on its node."""

    engine_rank: int
    """Which engine."""
    num_engines: int
    node_rank: int
    """Which of the engine's nodes this is: node 0 serves."""
    num_nodes: int
    """How many nodes the engine spans."""
    cluster_node_rank: int
    """The node's rank in the cluster."""
    address: str
    """The address of this node."""
    devices: tuple[str, ...]
    """The engine's accelerators on this node, as the visible-devices variable names them."""
    num_devices: int
    """How many accelerators the engine has on all its nodes."""
    port: int
    """Where this process's server listens."""
    nccl_port: int
    dist_init_addr: str
    """`address:port` on the engine's node 0, the same for all its nodes."""
    dp_attention_ports: tuple[int, ...]
    """Consecutive ports for data-parallel attention, one per rank."""
    secret: str = field(repr=False)
    """The engine's own, new at each start, which its server proves to know and requests show; see `prove`."""

    @property
    def url(self) -> str:
        """Where the server is: `http://10.0.0.7:20300`."""
        return url_of(self.address, self.port)

    def prove(self, nonce: str) -> dict[str, str]:
        """Return what the server answers, as JSON, to `GET /roost/proof` with this `X-Roost-Nonce`, for everybody.

        After that, the same connection brings requests that show the secret, as `Authorization: Bearer ...`. ValueError
        if it is no nonce.
        """
        return roost_proof.prove(self.secret, nonce)


@runtime_checkable
class RolloutEngine(Protocol):
    """The methods of an engine. Its server answers `POST /generate`, `GET /health` and, with `spec.prove`, who it is.

    `offload` and `onload` are optional: an engine that has them frees its accelerators' memory while others use it. On
    several nodes every process of the engine starts, and the one on node 0 gets the requests.
    """

    def start(self, spec: EngineSpec) -> None:
        """Start the server; it may become healthy later."""

    def health(self) -> bool:
        """Return whether it can serve."""

    def generate(self, request: Any) -> Any:
        """Answer a request that does not come through HTTP."""

    def update_weights(self, weights: Any, version: int) -> None:
        """Replace the weights."""

    def stop(self) -> None:
        """Stop the server."""


_METHODS = ("start", "health", "generate", "update_weights", "stop")


def check_engine_class(cls: object) -> type:
    """Return the class if its objects are engines; ConfigError names the methods that it lacks."""
    if not isinstance(cls, type):
        raise ConfigError(f"an engine is a class, and {cls!r} is not")
    missing = [name for name in _METHODS if not callable(getattr(cls, name, None))]
    if missing:
        hint = f"an engine has {join_words(_METHODS)}"
        raise ConfigError(f"{cls.__name__} is not a rollout engine: it has no {join_words(missing)}", hint=hint)
    return cls
