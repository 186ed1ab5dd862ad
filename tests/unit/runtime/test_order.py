"""The order of nodes, without a cluster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost import ConfigError
from roost.runtime.nodes.info import RayNode
from roost.runtime.nodes.order import address_key, rank_nodes

HEAD = {"node:__internal_head__": 1.0}


def no_names(name: str) -> str:
    raise OSError(name)


def found(address: str, **more: object) -> RayNode:
    return RayNode(
        **{"ray_id": address, "address": address, "name": "", "port": 0, "resources": {}, "labels": {}, **more}
    )


def test_the_head_is_first_and_the_others_follow_by_number():
    others = [found(address) for address in ("10.0.0.10", "10.0.0.2", "fe80::2", "9.9.9.9")]
    ordered = rank_nodes([*others, found("10.0.0.200", resources=HEAD)], {}, no_names)
    assert [node.address for node in ordered.values()] == ["10.0.0.200", "9.9.9.9", "10.0.0.2", "10.0.0.10", "fe80::2"]


def test_names_sort_by_what_they_resolve_to_or_else_by_their_characters():
    known = {"b": "10.0.0.1", "a": "10.0.0.9"}
    nodes = [found("zeta"), found("a"), found("b"), found("alpha"), found("10.0.0.5")]

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError(name)
        return known[name]

    assert [node.address for node in rank_nodes(nodes, {}, resolve).values()] == ["b", "10.0.0.5", "a", "alpha", "zeta"]


def test_ipv6_is_read_as_a_number_whatever_its_spelling():
    assert address_key("::1") == address_key("0:0:0:0:0:0:0:1") == address_key("[::1]")
    assert address_key("fe80::1%eth0") == address_key("fe80::1")
    assert address_key("fe80::9") < address_key("fe80::10")


def test_nodes_with_the_same_address_are_sorted_by_name_port_and_id():
    same = "10.0.0.1"
    nodes = [
        found(same, ray_id="c", name="b"),
        found(same, ray_id="b", name="a", port=2),
        found(same, ray_id="a", name="a", port=2),
        found(same, ray_id="z", name="a", port=1),
    ]
    assert [node.ray_id for node in rank_nodes(nodes, {}).values()] == ["z", "a", "b", "c"]


@given(
    st.lists(st.tuples(st.ip_addresses(), st.text(max_size=3), st.integers(0, 9)), unique=True, max_size=8),
    st.randoms(),
)
def test_the_order_does_not_depend_on_the_order_in_which_nodes_are_listed(data, rng: random.Random):
    nodes = [
        found(str(address), ray_id=str(index), name=name, port=port, resources={} if index else HEAD)
        for index, (address, name, port) in enumerate(data)
    ]
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    ordered = rank_nodes(nodes, {}, no_names)
    assert ordered == rank_nodes(shuffled, {}, no_names)
    assert sorted(node.ray_id for node in ordered.values()) == sorted(node.ray_id for node in nodes)


def test_the_users_ranks_decide_where_all_have_one():
    nodes = [found("a", resources=HEAD), found("b"), found("c")]
    ordered = rank_nodes(nodes, {"a": "2", "b": " 0 ", "c": "01"})
    assert [node.address for node in ordered.values()] == ["b", "c", "a"]


def test_all_mistakes_in_the_users_ranks_are_reported_together():
    nodes = [found(f"10.0.0.{number}") for number in range(1, 6)]
    wanted = {"10.0.0.1": "0", "10.0.0.2": "0", "10.0.0.3": "-1", "10.0.0.4": "7"}
    with pytest.raises(ConfigError) as caught:
        rank_nodes(nodes, wanted)
    text = str(caught.value)
    assert "set on 4 nodes of 5, and not on 10.0.0.5" in text
    assert "on every node, or on none" in text
    assert "0 on both 10.0.0.1 and 10.0.0.2" in text
    assert "'-1' on 10.0.0.3, which is not a whole number" in text
    assert "7 on 10.0.0.4, but there are 5 nodes" in text


def test_a_node_that_does_not_tell_its_rank_is_left_out_where_others_have_one():
    nodes = [found("10.0.0.1", resources=HEAD), found("10.0.0.2"), found("10.0.0.3")]
    ranked = rank_nodes(nodes, {"10.0.0.1": "2", "10.0.0.3": "0"}, unknown={"10.0.0.2"})
    assert {rank: node.address for rank, node in ranked.items()} == {0: "10.0.0.3", 2: "10.0.0.1"}
    assert len(rank_nodes(nodes, {}, unknown={"10.0.0.2"})) == 3, "without, the order is known anyway"
    with pytest.raises(ConfigError, match=r"set on 1 node of 3, and not on 10\.0\.0\.3"):
        rank_nodes(nodes, {"10.0.0.1": "0"}, unknown={"10.0.0.2"})
