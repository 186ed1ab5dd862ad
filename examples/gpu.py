"""On a machine with NVIDIA GPUs, checks that every launched worker sees only the device that was planned for it.

    python examples/gpu.py

It needs torch with CUDA. docs/guides/workers.md shows the output on one machine.
"""

from __future__ import annotations

import os

from roost import Cluster, Worker


class Probe(Worker):
    """Asks torch which devices it sees."""

    def see(self) -> tuple[int, str, str]:
        import torch

        found = torch.cuda.get_device_properties(0)
        total = float(torch.ones(1000, device="cuda").sum())
        assert total == 1000
        return torch.cuda.device_count(), found.name, f"GPU-{str(found.uuid).removeprefix('GPU-')}"

    def variable(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


def main() -> None:
    """Launch one worker for each GPU of the first node."""
    with Cluster(num_nodes=1) as cluster:
        planned = cluster.nodes[0].accelerators
        probes = Probe.create_group().launch(cluster, name="probe")
        for rank, ((count, name, uuid), variable) in enumerate(
            zip(probes.see().wait(), probes.variable().wait(), strict=True)
        ):
            print(f"probe:{rank} planned on {planned[rank].model} {planned[rank].uuid}")
            print(f"probe:{rank} sees {count} device with CUDA_VISIBLE_DEVICES={variable}: {name} {uuid}")
            assert count == 1
            assert planned[rank].uuid == uuid
        print("every worker sees its own device, and only that")


if __name__ == "__main__":
    main()
