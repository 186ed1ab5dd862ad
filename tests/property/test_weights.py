"""Plans for weights, carried out on arrays: every byte of every target once, and equal to the source."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost import ConfigError
from roost.weights.boxes import Box, count, shape_of
from roost.weights.layout import Layout, TensorSpec, replicated
from roost.weights.plan import Piece, Place, Route, SyncPlan, make_sync_plan
from roost.weights.rules import At, Fuse, Numbered, Split, Tie, make_layout

HEADS = ("q", "k", "v")


@st.composite
def specs(draw) -> dict[str, TensorSpec]:
    """A model with layers, of which some have experts, an embedding, a scalar and an empty tensor."""
    width, layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    found = {"embed": (draw(st.integers(1, 9)), width), "scale": (), "nothing": (0, width), "head": ()}
    found["head"] = found["embed"]
    for layer in range(layers):
        for name in HEADS:
            found[f"layers.{layer}.{name}"] = (draw(st.integers(1, 8)), width)
        found[f"layers.{layer}.out"] = (width, draw(st.integers(1, 8)))
        for expert in range(experts):
            found[f"layers.{layer}.experts.{expert}.up"] = (3, width)
    return {name: TensorSpec(shape, "float32") for name, shape in found.items()}


@st.composite
def layouts(draw, model: dict[str, TensorSpec], group: str) -> Layout:
    """A way to hold a model: sharded, tensor-parallel, pipelined, with experts, fused, tied; also in combination."""
    axes = {name: draw(st.integers(1, 3)) for name in ("pp", "ep", "tp", "dp")}
    layers = 1 + max(int(name.split(".")[1]) for name in model if name.startswith("layers."))
    rules: list = []
    if draw(st.booleans()):
        rules += [Numbered("pp", "layers.{}.*", layers), At("pp", 0, ("embed",)), At("pp", -1, ("head", "scale"))]
    if draw(st.booleans()):
        rules += [Numbered("ep", "*.experts.{}.*", 4)]
    if draw(st.booleans()):
        rules += [Split("tp", 0, ("*.q", "*.k", "*.v", "embed")), Split("tp", 1, ("*.out",))]
    if draw(st.booleans()):
        rules += [Split("dp", 0, ("*",))]
    if draw(st.booleans()):
        rules += [Fuse("layers.{}.qkv", tuple(f"layers.{{}}.{name}" for name in HEADS))]
    rules += [Tie("head", "embed")]
    return make_layout(model, group, axes, rules)


def memory(layout: Layout, values: dict[str, np.ndarray] | None) -> dict[tuple[str, str], np.ndarray]:
    """What each worker has in each storage: with these values, or unlike anything."""
    shapes: dict[tuple[str, str], list[int]] = {}
    for worker in layout.workers:
        for held in layout.held_by(worker):
            ends = [at + size for at, size in zip(held.at, shape_of(held.box), strict=True)]
            known = shapes.setdefault((worker, held.storage), ends)
            shapes[worker, held.storage] = [max(one, other) for one, other in zip(known, ends, strict=True)]
    found = {key: np.full(shape, -1.0, np.float32) for key, shape in shapes.items()}
    for worker in layout.workers if values is not None else ():
        for held in layout.held_by(worker):
            found[worker, held.storage][cut(held.box, held.at)] = values[held.name][cut(held.box)]
    return found


def cut(box: Box, at: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    starts = at if at is not None else [start for start, _ in box]
    return tuple(slice(start, start + size) for start, size in zip(starts, shape_of(box), strict=True))


def carry_out(pieces: list[Piece], source: dict, target: dict) -> dict[tuple[str, str], np.ndarray]:
    """Copy each piece; returns how often each element of a target was written."""
    written = {key: np.zeros(array.shape, int) for key, array in target.items()}
    for piece in pieces:
        place = cut(piece.box, piece.target_at)
        taken = source[piece.source, piece.source_storage][cut(piece.box, piece.source_at)]
        target[piece.target, piece.target_storage][place] = taken
        written[piece.target, piece.target_storage][place] += 1
        assert piece.nbytes == 4 * count(piece.box)
    return written


@pytest.mark.heavy
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_every_element_of_every_target_comes_once_and_is_the_sources(data):
    model = data.draw(specs())
    source, target = data.draw(layouts(model, "actor")), data.draw(layouts(model, "rollout"))
    workers = [*source.workers, *target.workers]
    places = {worker: Place(data.draw(st.integers(0, 2)), (data.draw(st.integers(0, 1)),)) for worker in workers}
    plan = make_sync_plan(source, target, places, bucket_bytes=data.draw(st.sampled_from([8, 40, 1 << 20])))
    choose = np.random.default_rng(0)
    values = {name: choose.random(spec.shape, np.float32) for name, spec in model.items()}
    values["head"] = values["embed"]
    have, get, want = memory(source, values), memory(target, None), memory(target, values)
    buckets = [bucket for one in source.workers for other in target.workers for bucket in plan.buckets(one, other)]
    assert all(sum(piece.nbytes for piece in bucket) <= plan.bucket_bytes for bucket in buckets)
    written = carry_out([piece for bucket in buckets for piece in bucket], have, get)
    assert all((count == 1).all() for count in written.values())
    assert all((get[key] == want[key]).all() for key in want)
    # As it says: the same plan, the bytes, and the nearest source.
    assert make_sync_plan(source, target, places, bucket_bytes=plan.bucket_bytes).digest == plan.digest
    assert SyncPlan.from_json(plan.to_json()) == plan
    pieces = list(plan.pieces())
    assert sum(piece.nbytes for piece in pieces) == sum(plan.bytes_by_route().values())
    assert sum(received for _, received in plan.bytes_by_worker().values()) == sum(target.bytes_by_worker().values())


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_plan_without_some_workers_fills_the_others(data):
    model = data.draw(specs())
    source = make_layout(model, "actor", {"dp": 3}, [Tie("head", "embed")])
    target = data.draw(layouts(model, "rollout"))
    dead = {"actor:1", data.draw(st.sampled_from(target.workers))}
    if len(target.workers) < 2:
        return
    plan = make_sync_plan(source, target, {}).without(dead)
    assert {piece.source for piece in plan.pieces()} <= {"actor:0", "actor:2"}
    assert sum(plan.traffic.values()) == sum(target.without(dead & set(target.workers)).bytes_by_worker().values())
    (one, *_) = plan.target.workers
    assert {piece.target for piece in plan.restricted([one]).pieces()} <= {one}


def test_equal_sources_send_equally_much_and_the_nearest_is_chosen():
    model = {f"t{number}": TensorSpec((100, 100), "bfloat16") for number in range(12)}
    source = replicated(model, [f"actor:{rank}" for rank in range(4)])
    plan = make_sync_plan(source, replicated(model, ["rollout:0"]), {})
    assert {sent for worker, (sent, _) in plan.bytes_by_worker().items() if worker != "rollout:0"} == {3 * 20_000}
    near = make_sync_plan(
        source,
        replicated(model, ["rollout:0", "actor:3"]),
        {"actor:2": Place(1), "rollout:0": Place(1), "actor:3": Place(0)},
    )
    assert near.traffic == {("actor:2", "rollout:0"): 240_000, ("actor:3", "actor:3"): 240_000}
    assert near.bytes_by_route()[Route.MEMORY] == near.bytes_by_route()[Route.NODE] == 240_000


def test_everything_that_does_not_match_is_listed():
    left = {"a": ((2, 2), "float32"), "b": ((3,), "float32"), "c": ((1,), "int8"), "only": ((1,), "int8")}
    right = {"a": ((2, 3), "float32"), "b": ((3,), "bfloat16"), "c": ((1,), "float32"), "mine": ((1,), "int8")}
    one, other = ({name: TensorSpec(*spec) for name, spec in side.items()} for side in (left, right))
    with pytest.raises(ConfigError) as caught:
        make_sync_plan(replicated(one, ["a:0"]), replicated(other, ["r:0"]), {})
    assert str(caught.value).splitlines() == [
        "only: only the source has it",
        "mine: only the targets have it",
        "a has shape [2, 2] in the source, [2, 3] in the targets",
        "c: int8 cannot be stored as float32",
    ]
    half = make_layout({"a": TensorSpec((4, 2), "float32")}, "actor", {"dp": 2}, [Split("dp", 0, ("*",))])
    with pytest.raises(ConfigError, match=r"no source holds a\[2:4, 0:2\]"):
        make_sync_plan(half.only(["actor:0"]), replicated({"a": TensorSpec((4, 2), "float32")}, ["r:0"]), {})
    text = make_sync_plan(half, half, {}).to_json()
    with pytest.raises(ConfigError, match="the plan was changed"):
        SyncPlan.from_json(json.dumps({**json.loads(text), "bucket_bytes": 8}))
