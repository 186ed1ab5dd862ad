"""What the tests of engines with servers of their own share."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np

from roost.rl.engine import EngineSpec
from roost.rl.engines import Prompt, Sample

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


def weights(value: float) -> dict[str, np.ndarray]:
    """The weights of the stand-ins, all elements of which are the same."""
    return {"embed": np.full((4, 3), value, np.float32), "scale": np.array(value, np.float32)}


def sample(engine: Any, **options: object) -> Sample:
    """What an engine answers to a prompt, without HTTP."""
    answer = engine.generate(Prompt(tokens=(5, 6), **{"max_tokens": 3, **options}).to_json())
    return Sample.from_json(answer["samples"][0])
