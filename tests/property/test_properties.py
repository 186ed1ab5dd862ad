"""What must hold on any cluster for any legal request."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import Phase, assume, find, given, settings
from hypothesis import strategies as st

from roost import (
    ConfigError,
    FlexiblePlacementStrategy,
    JobConfig,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementError,
    PlacementMode,
    Plan,
    Topology,
    lint,
    make_plan,
)
from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.ranks import format_placement, format_ranks, parse_placement, parse_ranks
from roost.placement.plan import pieces_of
from roost.render.grid import make_grid
from roost.render.html import draw_html
from roost.render.svg import draw_svg
from roost.render.terminal import draw_terminal
from strategies import jobs, model_parallel_jobs, placement_texts, spaces, topologies

pytestmark = pytest.mark.heavy


def check_placements(placements, topology: Topology) -> None:
    """Check what holds for every list of placements, whatever the strategy."""
    assert [item.rank for item in placements] == list(range(len(placements)))
    per_node: dict[int, list] = {}
    for item in placements:
        per_node.setdefault(item.cluster_node_rank, []).append(item)
        count = len(topology.nodes[item.cluster_node_rank].accelerators)
        assert all(0 <= int(device) < count for device in item.visible_accelerators)
        has = count if item.hardware_type == ACCELERATOR else topology.declared_on(item.cluster_node_rank)
        has = has if isinstance(has, int) else has.get(item.hardware_type, 0)
        assert bool(item.local_hardware_ranks) == (item.hardware_type != BARE_NODE)
        assert all(0 <= rank < has for rank in item.local_hardware_ranks)
        assert list(item.local_hardware_ranks) == sorted(set(item.local_hardware_ranks))
        assert item.local_accelerator_rank == (int(item.visible_accelerators[0]) if item.visible_accelerators else -1)
    for node, items in per_node.items():
        assert [item.local_rank for item in items] == list(range(len(items))), node
        assert {item.local_world_size for item in items} == {len(items)}
    assert [items[0].placement_node_rank for items in per_node.values()] == list(range(len(per_node)))


@given(jobs() | model_parallel_jobs(), st.booleans())
def test_a_legal_job_makes_a_consistent_plan(job, isolate):
    config, topology = job
    before = copy.deepcopy(config)
    plan = make_plan(config, topology, isolate_accelerator=isolate)
    assert config == before
    for component in plan.components:
        check_placements(component.placements, topology)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).hash == plan.hash
    assert not plan.diff(plan)
    lint(plan)


@given(jobs() | model_parallel_jobs())
def test_every_worker_has_its_environment(job):
    plan = make_plan(*job)
    for component in plan.components:
        for item in component.placements:
            variables = plan.environment(component.name, item.rank)
            assert variables["RANK"] == str(item.rank)
            assert variables["WORLD_SIZE"] == str(len(component.placements))
            assert variables.get("CUDA_VISIBLE_DEVICES", "") == ",".join(item.visible_accelerators)
            assert int(variables["LOCAL_RANK"]) < item.local_world_size
            assert all(isinstance(value, str) for value in variables.values())


@given(jobs() | model_parallel_jobs(), st.integers(40, 200))
def test_every_plan_can_be_drawn(job, width):
    plan = make_plan(*job)
    text = draw_terminal(make_grid(plan), width=width).plain
    assert all(component.name in text for component in plan.components)
    draw_svg(plan, make_grid(plan))
    draw_html(plan, make_grid(plan))


@given(jobs(), jobs())
def test_the_diff_of_swapped_plans_is_the_reverse(one, other):
    before, after = make_plan(*one), make_plan(*other)
    there, back = before.diff(after), after.diff(before)
    assert set(there.appeared) == set(back.went)
    assert {item.worker for item in there.moved} == {item.worker for item in back.moved}
    assert {item.piece for item in there.changed_hands} == {item.piece for item in back.changed_hands}
    assert bool(there) == bool(back) == (before != after)


@given(model_parallel_jobs())
def test_a_model_parallel_job_uses_each_accelerator_once_and_its_sources_meet(job):
    config, topology = job
    plan = make_plan(config, topology)
    assert plan.mode in (PlacementMode.COLLOCATED, PlacementMode.DISAGGREGATED)
    size = len(topology.nodes[0].accelerators)
    for name in ("actor", "rollout"):
        component = plan.component(name)
        ranks = [p.cluster_node_rank * size + rank for p in component.placements for rank in p.local_hardware_ranks]
        assert sorted(ranks) == list(component.hardware_ranks)
    if plan.mode is PlacementMode.COLLOCATED:
        tensor = plan.component("actor").tensor_parallel_size
        sources = {pieces_of(item)[0] for item in plan.component("actor").placements[::tensor]}
        engines = {pieces_of(item)[0] for item in plan.component("rollout").placements}
        smaller, larger = (sources, engines) if len(sources) <= len(engines) else (engines, sources)
        assert smaller <= larger


def test_generated_jobs_span_nodes_and_groups():
    """The other properties test only generated jobs, so some of those must span nodes and name several groups."""
    # Any example will do: making it small would take most of the time.
    first = settings(phases=[Phase.generate])
    assert find(
        jobs(), lambda job: any(len(item.node_groups) > 1 for item in make_plan(*job).components), settings=first
    )
    assert find(
        jobs(),
        lambda job: any(crosses_a_node(text, job[1]) for text in job[0]["cluster"]["component_placement"].values()),
        settings=first,
    )


def crosses_a_node(placement, topology: Topology) -> bool:
    """Return whether a placement of the cluster is one range over several nodes."""
    if not isinstance(placement, str) or placement == "all" or topology.space().is_bare:
        return False
    (first, *more) = parse_placement(placement)
    spots = [topology.space().locate(rank) for rank in (first.resources.first, first.resources.last)]
    return not more and spots[0].node_rank != spots[1].node_rank


@given(topologies())
def test_a_topology_survives_the_inventory_format(topology):
    assert Topology.from_dict(topology.to_dict()) == topology
    assert Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology


@given(spaces())
def test_ranks_convert_both_ways(made):
    _, space = made
    for rank in range(space.count):
        spot = space.locate(rank)
        assert space.rank_of(spot.node_rank, spot.local_rank, spot.kind) == rank
    with pytest.raises(PlacementError):
        space.locate(space.count)
    with pytest.raises(PlacementError):
        space.locate(-1)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data())
def test_packed_covers_each_rank_exactly_once_and_in_its_node(nodes, accelerators, per_process, stride, data):
    topology = Topology.from_shorthand(f"{nodes}x{accelerators}")
    block = per_process * stride
    total = nodes * accelerators
    assume(block <= total)
    blocks = data.draw(st.integers(1, total // block))
    start = data.draw(st.integers(0, total - blocks * block))
    strategy = PackedPlacementStrategy(start, start + blocks * block - 1, per_process, stride)
    fits = all(
        (start + index * block + first) // accelerators
        == (start + index * block + first + (per_process - 1) * stride) // accelerators
        for index in range(blocks)
        for first in range(stride)
    )
    if not fits:
        with pytest.raises(PlacementError):
            strategy.get_placement(topology)
        return
    placements = strategy.get_placement(topology)
    check_placements(placements, topology)
    ranks = [item.cluster_node_rank * accelerators + rank for item in placements for rank in item.local_hardware_ranks]
    assert sorted(ranks) == list(range(start, start + blocks * block))
    for item in placements:
        gaps = {b - a for a, b in zip(item.local_hardware_ranks, item.local_hardware_ranks[1:], strict=False)}
        assert gaps <= {stride}


@given(spaces(), st.data())
def test_flexible_leaves_its_input_alone_and_sorts(made, data):
    topology, space = made
    assume(not space.is_bare)
    lists = []
    for _ in range(data.draw(st.integers(1, 5))):
        stretch, start = space.stretch_of(data.draw(st.integers(0, space.count - 1)))
        lists.append(list(data.draw(st.permutations(range(start, start + stretch.size)))))
    before = copy.deepcopy(lists)
    placements = FlexiblePlacementStrategy(lists, space.labels[0]).get_placement(topology)
    assert lists == before
    check_placements(placements, topology)
    firsts = [space.rank_of(p.cluster_node_rank, p.local_hardware_ranks[0], p.hardware_type) for p in placements]
    assert firsts == sorted(firsts)


@given(topologies(), st.data())
def test_nodes_take_their_processes_in_order(topology, data):
    ranks = data.draw(st.lists(st.integers(0, topology.num_nodes - 1), min_size=1))
    before = list(ranks)
    placements = NodePlacementStrategy(ranks).get_placement(topology)
    assert ranks == before
    check_placements(placements, topology)
    assert [item.cluster_node_rank for item in placements] == sorted(ranks)


@given(spaces(), st.data())
def test_format_of_parse_is_stable(made, data):
    text = data.draw(placement_texts(made[1]))
    once = format_placement(parse_placement(text))
    assert parse_placement(once) == parse_placement(text)
    assert format_placement(parse_placement(once)) == once


@given(st.sets(st.integers(0, 500), min_size=1))
def test_ranks_survive_being_written(ranks):
    ordered = sorted(ranks)
    assert [rank for part in parse_ranks(format_ranks(ordered)) for rank in part.as_range()] == ordered


@given(st.text() | st.text(alphabet="0123456789-:, al") | st.from_regex(r"[0-9]{1,20}(-[0-9]{1,20})?", fullmatch=True))
def test_any_text_is_read_or_refused_as_a_placement(text):
    try:
        parse_placement(text)
    except PlacementError as error:
        assert str(error)  # noqa: PT017 - either way is fine, another error is not
    try:
        make_plan({"cluster": {"component_placement": {"actor": text}}}, Topology.from_shorthand("2x4"))
    except (PlacementError, ConfigError) as error:
        assert str(error)  # noqa: PT017


@given(st.text() | st.text(alphabet="cluster:component_placement\n 0-1[]{}&*!|>'\"%@`,?#<"))
def test_any_text_is_read_or_refused_as_a_file(text):
    try:
        JobConfig.from_text(text)
    except (PlacementError, ConfigError) as error:
        assert str(error)  # noqa: PT017


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
)
SHAPED = st.fixed_dictionaries(
    {},
    optional={
        "num_nodes": ANYTHING,
        "component_placement": ANYTHING | st.dictionaries(st.text(max_size=6), ANYTHING, max_size=3),
        "node_groups": ANYTHING
        | st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "label": ANYTHING,
                    "node_ranks": ANYTHING,
                    "hardware": ANYTHING | st.fixed_dictionaries({"type": ANYTHING, "configs": ANYTHING}),
                    "ignore_hardware": ANYTHING,
                    "env_configs": ANYTHING
                    | st.lists(st.fixed_dictionaries({"node_ranks": ANYTHING, "env_vars": ANYTHING}), max_size=2),
                },
            ),
            max_size=2,
        ),
    },
)


@given(SHAPED | ANYTHING)
def test_any_dict_is_read_or_refused(cluster):
    try:
        make_plan({"cluster": cluster}, Topology.from_shorthand("2x2"))
    except (PlacementError, ConfigError) as error:
        assert str(error)  # noqa: PT017


@given(
    st.fixed_dictionaries({"nodes": ANYTHING | st.lists(st.fixed_dictionaries({"accelerators": ANYTHING}))}) | ANYTHING
)
def test_any_inventory_is_read_or_refused(data):
    assume(isinstance(data, dict))
    try:
        Topology.from_dict(data)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
