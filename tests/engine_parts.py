"""What the tests of engines with servers of their own share."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from roost.rl.engine import EngineSpec
from roost.rl.engines import Prompt, Sample, VersionSpan
from sockets import free_port

STAND_IN = Path(__file__).parent / "stand_in"
SPEC = EngineSpec(
    engine_rank=0,
    num_engines=1,
    node_rank=0,
    num_nodes=1,
    cluster_node_rank=0,
    address="127.0.0.1",
    devices=("0",),
    num_devices=1,
    port=20300,
    nccl_port=20301,
    dist_init_addr="127.0.0.1:20302",
    dp_attention_ports=(),
    # Others run these tests at the same time.
    secret=secrets.token_hex(8),
)


def spec_here(secret: str, **changes: Any) -> EngineSpec:
    """The spec of an engine without accelerators, on a port that is free."""
    here = {"devices": (), "num_devices": 0, "port": free_port(), "nccl_port": 0, "secret": secret}
    return replace(SPEC, **{**here, **changes})


def weights(value: float) -> dict[str, np.ndarray]:
    """The weights of the stand-ins, all elements of which are the same."""
    return {"embed": np.full((4, 3), value, np.float32), "scale": np.array(value, np.float32)}


def sample(engine: Any, **options: object) -> Sample:
    """What an engine answers to a prompt, without HTTP."""
    answer = engine.generate(Prompt(tokens=(5, 6), **{"max_tokens": 3, **options}).to_json())
    return Sample.from_json(answer["samples"][0])


def take_two_versions(engine: Any) -> Any:
    """Give an engine of a stand-in two versions, the second by memory that is committed; returns that memory."""
    assert sample(engine) == Sample(
        prompt=(5, 6), tokens=(1, 1, 1), logprobs=(-0.5,) * 3, spans=(VersionSpan(0, 0, 3),), finish="length"
    )
    engine.update_weights(weights(4), 1)
    assert sample(engine).tokens == (4, 4, 4)
    staged = engine.accept()
    for one in staged.tensors().values():
        one[...] = 9
    assert sample(engine).tokens == (4, 4, 4), "not before the commit"
    staged.commit(2)
    assert (sample(engine).tokens, sample(engine).versions) == ((9, 9, 9), (2, 2, 2))
    return staged
