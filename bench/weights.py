"""Planning the movement of weights: how long it takes for small and for huge models, and how much memory."""

from __future__ import annotations

import resource
import time

from roost.weights.layout import TensorSpec
from roost.weights.plan import Place, make_sync_plan
from roost.weights.rules import At, Fuse, Numbered, columns, fully_sharded, make_layout, rows


def dense(layers: int, width: int, inner: int, vocabulary: int) -> dict[str, TensorSpec]:
    """A transformer as 7 B models are."""
    shapes = {"embed.weight": (vocabulary, width), "head.weight": (vocabulary, width), "norm.weight": (width,)}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{layer}.{name}.weight"] = (width, width)
        shapes |= {f"layers.{layer}.{name}.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"layers.{layer}.down.weight"] = (width, inner)
        shapes |= {f"layers.{layer}.norm{number}.weight": (width,) for number in (1, 2)}
    return {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}


def mixture(layers: int, experts: int, width: int, inner: int) -> dict[str, TensorSpec]:
    """A mixture of experts."""
    shapes = {"embed.weight": (160_000, width), "head.weight": (160_000, width)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}.weight": (width, width) for name in ("q", "k", "v", "o")}
        for expert in range(experts):
            shapes |= {f"layers.{layer}.experts.{expert}.{name}.weight": (inner, width) for name in ("gate", "up")}
            shapes[f"layers.{layer}.experts.{expert}.down.weight"] = (width, inner)
    return {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}


TP = [
    columns("tp", "*.q.weight", "*.k.weight", "*.v.weight", "*.gate.weight", "*.up.weight", "embed*", "head*"),
    rows("tp", "*.o.weight", "*.down.weight"),
    Fuse("{}.qkv.weight", ("{}.q.weight", "{}.k.weight", "{}.v.weight")),
    Fuse("{}.gate_up.weight", ("{}.gate.weight", "{}.up.weight")),
]


def measure(title: str, specs: dict[str, TensorSpec], source: tuple, target: tuple) -> None:
    began = time.perf_counter()
    held, wanted = make_layout(specs, "actor", *source), make_layout(specs, "rollout", *target)
    laid_out = time.perf_counter()
    places = {worker: Place(place // 8, (place % 8,)) for place, worker in enumerate([*held.workers, *wanted.workers])}
    plan = make_sync_plan(held, wanted, places)
    planned = time.perf_counter()
    total = sum(plan.traffic.values())
    digest = plan.digest
    done = time.perf_counter()
    parameters = sum(a * b for a, b in ((*spec.shape, 1)[:2] for spec in specs.values()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{title}: {parameters / 1e9:,.1f} B parameters, {len(specs):,} tensors, {len(held.workers)} to "
        f"{len(wanted.workers)} workers, {total / 1e9:,.0f} GB, {len(plan.patterns)} patterns: layouts "
        f"{1e3 * (laid_out - began):,.0f} ms, plan {1e3 * (planned - laid_out):,.0f} ms, digest and sums "
        f"{1e3 * (done - planned):,.0f} ms, peak {peak:.2f} GiB, {digest[:8]}"
    )


def main() -> None:
    """Print the table."""
    measure("7B", dense(32, 4096, 11008, 32000), ({"dp": 8}, [fully_sharded()]), ({"engine": 2, "tp": 4}, TP))
    experts = Numbered("ep", "*.experts.{}.*", 384)
    huge = mixture(60, 384, 7168, 2048)
    huge_source = {"pp": 4, "dp": 64}, [Numbered("pp", "layers.{}.*", 60), At("pp", 0, ("embed*",)), fully_sharded()]
    measure("1T, 4 stages of FSDP 64 to EP 128", huge, huge_source, ({"ep": 128}, [experts]))
    measure(
        "1T, FSDP 256 to EP 16 x TP 8", huge, ({"dp": 256}, [fully_sharded()]), ({"ep": 16, "tp": 8}, [experts, *TP])
    )


if __name__ == "__main__":
    main()
