"""The domains of a level, from the labels of nodes and accelerators: each level is a partition of its own."""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.topology import Topology

NODE = "node"
"""The level whose domains are the nodes themselves."""
_TOPOGRAPH, _OLDER = "fabric.topograph.run/tier-", "network.topology.nvidia.com/"
LABELS: Mapping[str, tuple[str, ...]] = {
    "nvlink": ("accelerator.topograph.run/domain", "nvidia.com/gpu.clique", f"{_OLDER}accelerator"),
    "rack": (f"{_TOPOGRAPH}0", f"{_OLDER}leaf"),
    "spine": (f"{_TOPOGRAPH}1", f"{_OLDER}spine"),
    "zone": ("topology.kubernetes.io/zone",),
}
"""The labels that tell the domains of a level where no label has its name; the first that is there counts."""
Place = tuple[int, int]
"""A node and an accelerator on it; -1 for the node itself."""


def label_of(topology: Topology, level: str) -> str | None:
    """Return the label that tells the domains of a level; None if no node and no accelerator has one."""
    there = {key for node in topology.nodes for key, _ in node.labels}
    there |= {key for own in {node.accelerators for node in topology.nodes} for item in own for key, _ in item.labels}
    return next((label for label in (level, *LABELS.get(level, ())) if label in there), None)


def domains_of(topology: Topology, level: str) -> dict[Place, str | None]:
    """Return the domain of each accelerator, and of each node; None for what lacks the label."""
    label = label_of(topology, level)
    found: dict[Place, str | None] = {}
    for rank, node in enumerate(topology.nodes):
        # Ray and Kubernetes have labels with empty values, which say nothing.
        own = str(rank) if level == NODE else dict(node.labels).get(label or "") or None
        found[rank, -1] = own
        for local, item in enumerate(node.accelerators):
            has_own = item.labels and level != NODE
            found[rank, local] = dict(item.labels).get(label or "", own) if has_own else own
    return found
