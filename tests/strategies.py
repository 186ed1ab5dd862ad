"""Hypothesis strategies that all property tests share: any topology, and any legal request on it."""

from __future__ import annotations

from hypothesis import strategies as st

from roost import PlacementError, Topology
from roost.config.topology import RankSpace

LABELS = ("a800", "4090", "机器人", "cpu-1")


@st.composite
def topologies(draw: st.DrawFn, max_nodes: int = 6) -> Topology:
    """Nodes with 0 to 9 accelerators, and groups over them: plain, bare, with declared hardware."""
    nodes = [
        {"accelerators": draw(st.integers(0, 9)), **({"name": f"n{rank}"} if draw(st.booleans()) else {})}
        for rank in range(draw(st.integers(1, max_nodes)))
    ]
    groups = []
    for label in draw(st.lists(st.sampled_from(LABELS), unique=True)):
        ranks = sorted(draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1)))
        group: dict[str, object] = {"label": label, "node_ranks": ranks}
        kind = draw(st.sampled_from(["plain", "bare", "robots", "env"]))
        if kind == "bare":
            group["ignore_hardware"] = True
        elif kind == "robots":
            on = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=5))
            group["hardware"] = {"type": f"Robot-{label}", "configs": [{"node_rank": rank, "ip": "::1"} for rank in on]}
        elif kind == "env":
            group["env_configs"] = [{"node_ranks": ranks, "env_vars": {"A": "1"}}]
        groups.append(group)
    return Topology.from_dict({"nodes": nodes, "groups": groups})


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Topology, RankSpace]:
    """A topology and one of its groups."""
    topology = draw(topologies())
    labels = ["cluster", "node", *(group.label for group in topology.groups)]
    return topology, topology.space(draw(st.sampled_from(labels)))


def label_choices(topology: Topology) -> list[str]:
    """Every group, and every pair of groups that can be used together, in either order."""
    single = ["cluster", "node", *(group.label for group in topology.groups)]
    pairs = []
    for one in single[2:]:
        for other in single[2:]:
            try:
                topology.space([one, other])
            except PlacementError:
                continue
            pairs.append(f"{one},{other}")
    return single + pairs


@st.composite
def placement_texts(draw: st.DrawFn, space: RankSpace) -> str:
    """A legal placement string for a rank space: over the edges of nodes and groups wherever that is legal."""
    if draw(st.booleans()) and draw(st.booleans()):
        return "all"
    segments = []
    rank = process = 0
    while rank < space.count and (not segments or draw(st.booleans())):
        first = draw(st.integers(rank, space.count - 1))
        how = draw(st.sampled_from(["one each", "shared", "several each", "implicit"]))
        last = draw(st.integers(first, space.count - 1))
        if how == "several each" and not space.is_bare:
            # Only the processes that have several pieces must keep to a node.
            stretch, start = space.stretch_of(first)
            last = min(last, start + stretch.size - 1)
        size = last - first + 1
        count = size
        if how == "shared":
            count = draw(st.integers(size, 3 * size)) if space.is_bare else size * draw(st.integers(1, 3))
        if how == "several each" and not space.is_bare:
            count = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
        text = str(first) if first == last else f"{first}-{last}"
        if how != "implicit":
            text += f":{process}" if count == 1 else f":{process}-{process + count - 1}"
        segments.append(text)
        rank, process = last + 1, process + count
    return draw(st.sampled_from([",", ", "])).join(segments)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[str, object], Topology]:
    """A legal config and the topology it is for."""
    topology = draw(topologies())
    labels = label_choices(topology)
    placement: dict[str, object] = {}
    for name in draw(st.lists(st.sampled_from(["actor", "rollout", "env", "奖励"]), min_size=1, unique=True)):
        label = draw(st.sampled_from(labels))
        text = draw(placement_texts(topology.space(label)))
        placement[name] = text if label == "cluster" else {"node_group": label, "placement": text}
    return {"cluster": {"num_nodes": topology.num_nodes, "component_placement": placement}}, topology


@st.composite
def model_parallel_jobs(draw: st.DrawFn) -> tuple[dict[str, object], Topology]:
    """A legal model-parallel config on nodes of one size: collocated and strided, or disaggregated."""
    size = draw(st.sampled_from([2, 4, 8]))
    nodes = draw(st.integers(1, 4))
    rollout_tp = draw(st.sampled_from([number for number in (1, 2, 4, 8) if number <= size]))
    actor_tp = draw(st.sampled_from([number for number in (1, 2, 4, 8) if number <= size]))
    total = nodes * size
    placement: dict[str, object]
    if draw(st.booleans()) and nodes > 1:
        split = draw(st.integers(1, nodes - 1)) * size
        placement = {"actor": f"0-{split - 1}", "rollout": f"{split}-{total - 1}"}
    else:
        placement = {"actor,rollout": f"0-{total - 1}"}
    if draw(st.booleans()):
        placement["reward"] = "0"
    config = {
        "cluster": {"num_nodes": nodes, "component_placement": placement},
        "actor": {"model": {"tensor_model_parallel_size": actor_tp}},
        "rollout": {"tensor_parallel_size": rollout_tp},
    }
    return config, Topology.from_shorthand(f"{nodes}x{size}")
