"""Rules about domains against a solver that tries every seat of every rank; `make soak-search` draws more."""

from __future__ import annotations

import os
import random
import re

import pytest

import near_check
from roost import PlacementError, Topology, make_plan

pytestmark = pytest.mark.heavy

FABRICS = int(os.environ.get("NEAR_FABRICS", "1000"))
SEED = int(os.environ.get("NEAR_SEED", "0"))


@pytest.mark.parametrize("part", range(4))
def test_a_plan_is_found_exactly_if_there_is_one_and_every_clash_is_minimal(part):
    seen = {"found": 0, "clash": 0, "small": 0, "preferred": 0, "missed": 0}
    for number in range(SEED + part, SEED + FABRICS, 4):
        job, inventory = near_check.draw(random.Random(number))  # noqa: S311 - drawn again from its number
        topology = Topology.from_dict(inventory)
        fabric = near_check.Fabric(job, topology)
        texts = [*job["keep"], *job["spread"]]
        labels = {key for domains in fabric.domains for key in domains}
        known = [text for text in texts if re.search(r"(?:within|across) (\w+)", text)[1] in labels]
        musts = fabric.split(texts, preferred=False)
        try:
            plan = make_plan(job, topology)
        except PlacementError as error:
            message = error.problems[0].message
            if "has a label for" in message:
                assert set(musts) - set(known), number
                continue
            if "by count, and" in message:
                assert not fabric.possible([]), number
                seen["small"] += 1
                continue
            clash = re.findall(r"'([^']+)'", message.partition("cannot hold")[0])
            assert clash, (number, message)
            assert set(clash) <= set(musts), (number, message)
            assert not fabric.possible(clash), (number, message)
            for rule in clash:
                assert fabric.possible([other for other in clash if other != rule]), (number, rule, message)
            seen["clash"] += 1
            continue
        seats = {
            (name, item.rank): fabric.places.index((item.cluster_node_rank, *item.local_hardware_ranks))
            for name in fabric.names
            for item in plan.component(name).placements
        }
        assert len(set(seats.values())) == len(seats), number
        assert set(seats.values()) <= set(fabric.free), number
        assert all(fabric.holds(text, seats, whole=True) for text in musts), number
        kept = list(musts)
        for text in fabric.split(texts, preferred=True):
            if text in known and fabric.possible([*kept, text]):
                kept.append(text)
                assert fabric.holds(text, seats, whole=True), (number, text)
                seen["preferred"] += 1
            else:
                seen["missed"] += 1
        seen["found"] += 1
    assert all(count > 5 for count in seen.values()), seen


def rack_job(**sections):
    nodes = [
        {"accelerators": 4, "labels": {"nvlink": f"rack-{at // 18}", "rack": f"row-{at // 72}"}} for at in range(1152)
    ]
    return sections, Topology.from_dict({"nodes": nodes})


@pytest.mark.parametrize(
    ("actor", "keep"),
    [
        ({"pp": 64, "dp": 9, "tp": 8}, ["actor.tp.dp within nvlink", "prefer actor.pp within rack"]),
        ({"dp": 576, "tp": 8}, ["actor.tp within nvlink", "prefer actor within rack"]),
        ({"dp": 9, "tp": 8}, ["actor within nvlink", "actor.tp within rack"]),
    ],
)
def test_64_racks_of_72_are_planned_without_giving_up(actor, keep):
    count = 1
    for size in actor.values():
        count *= size
    job, topology = rack_job(
        cluster={"component_placement": {"actor": {"count": count}}},
        mesh={"actor": actor},
        keep=keep,
        spread=["prefer actor across nvlink, at least 3"],
    )
    # Within MOST_STEPS, or it would say that it gave up.
    plan = make_plan(job, topology)
    assert plan.component("actor").world_size == count
