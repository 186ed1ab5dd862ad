"""Weights from a trainer of four FSDP ranks into two engines of two tensor-parallel ranks each, after every step.

    pip install torch
    python examples/weights.py

The plan says which bytes go where before anything moves; then each update is one call.
"""

from __future__ import annotations

from typing import Any

from roost import Cluster, NodePlacementStrategy
from roost.testing import local_cluster
from roost.weights import (
    Fuse,
    TensorSpec,
    WeightLink,
    WeightWorker,
    ask_layout,
    columns,
    describe,
    make_layout,
    make_sync_plan,
    places_in,
    rows,
)

WIDTH, INNER, TP = 64, 256, 2


class Trainer(WeightWorker):
    """One rank of FSDP: torch itself splits the weights."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        address = f"tcp://{self.master_address}:{self.master_port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.world_size)
        torch.manual_seed(0)
        names = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name, size in names.items()})
        for layer in self.model.values():
            fully_shard(layer, mesh=init_device_mesh("cpu", (self.world_size,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def offer(self) -> Any:
        return self.model

    def step(self) -> float:
        """Train a step."""
        import torch

        outputs = self.forward()
        loss = ((outputs - 1) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        torch.distributed.barrier()
        return float(loss.detach())

    def forward(self) -> Any:
        import torch

        inputs = torch.linspace(-1, 1, WIDTH)
        gate, up, down = (self.model[name] for name in ("gate", "up", "down"))
        return down(torch.relu(gate(inputs)) * up(inputs))

    def outputs(self) -> Any:
        """What the model answers."""
        return self.forward().detach()


class Engine(WeightWorker):
    """One rank of an engine: it has gate and up in one tensor, some of their rows, and some columns of down."""

    def __init__(self) -> None:
        import torch

        part = INNER // TP
        self.weights = {
            "gate_up.weight": torch.zeros(2 * part, WIDTH, dtype=torch.bfloat16),
            "down.weight": torch.zeros(WIDTH, part, dtype=torch.bfloat16),
        }

    def accept(self) -> Any:
        return self.weights

    def outputs(self) -> Any:
        """This rank's share of the answer: the sum of all ranks is the whole."""
        import torch

        inputs = torch.linspace(-1, 1, WIDTH)
        gate, up = (self.weights["gate_up.weight"].float() @ inputs).chunk(2)
        return self.weights["down.weight"].float() @ (torch.relu(gate) * up)


def main() -> None:
    """Train three steps, and update the engines after each."""
    with Cluster(num_nodes=2) as cluster:
        actor = Trainer.create_group().launch(cluster, NodePlacementStrategy([0] * 4), name="actor")
        rollout = Engine.create_group().launch(cluster, NodePlacementStrategy([0, 0, 1, 1]), name="rollout")
        source = ask_layout(actor, "offer")
        # What the engines hold follows from rules; they store it with less precision.
        specs = {name: TensorSpec(held.spec.shape, "bfloat16") for name, held in source.tensors.items()}
        rules = [
            columns("tp", "gate.weight", "up.weight"),
            rows("tp", "down.weight"),
            Fuse("gate_up.{}", ("gate.{}", "up.{}")),
        ]
        target = make_layout(specs, "rollout", {"engine": 2, "tp": TP}, rules)
        plan = make_sync_plan(source, target, places_in(actor, rollout))
        print(describe(plan))
        with WeightLink(plan, actor, rollout) as link:
            for version in range(1, 4):
                loss = actor.step().wait()[0]
                report = link.update(version)
                trained, served = actor.outputs().wait()[0], rollout.outputs().wait()
                error = max(float((served[first] + served[first + 1] - trained).abs().max()) for first in (0, 2))
                moved = f"{report.nbytes / 1e3:.0f} kB"
                print(f"version {version}: loss {loss:.3f}, {moved} moved, engines differ by at most {error:.1e}")
            print("versions:", link.versions())


if __name__ == "__main__":
    with local_cluster("2x4"):
        main()
