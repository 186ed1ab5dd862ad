"""The order of nodes, without a cluster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost import ConfigError
from roost.runtime.nodes.order import FoundNode, address_key, order_nodes


def no_names(name: str) -> str:
    raise OSError(name)


def found(address: str, **more: object) -> FoundNode:
    return FoundNode(**{"ray_id": address, "address": address, **more})


def addresses(*nodes: FoundNode) -> list[str]:
    return [node.address for node in order_nodes(nodes, resolve=no_names)]


def test_the_head_is_first_and_the_others_follow_by_number():
    nodes = [
        found("10.0.0.10"),
        found("10.0.0.2"),
        found("fe80::2"),
        found("10.0.0.200", is_head=True),
        found("9.9.9.9"),
    ]
    assert addresses(*nodes) == ["10.0.0.200", "9.9.9.9", "10.0.0.2", "10.0.0.10", "fe80::2"]


def test_names_go_by_what_they_resolve_to_and_else_by_their_characters():
    known = {"b": "10.0.0.1", "a": "10.0.0.9"}
    nodes = [found("zeta"), found("a"), found("b"), found("alpha"), found("10.0.0.5")]

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError(name)
        return known[name]

    assert [node.address for node in order_nodes(nodes, resolve)] == ["b", "10.0.0.5", "a", "alpha", "zeta"]


def test_ipv6_is_read_as_a_number_whatever_its_spelling():
    assert address_key("::1") == address_key("0:0:0:0:0:0:0:1") == address_key("[::1]")
    assert address_key("fe80::1%eth0") == address_key("fe80::1")
    assert address_key("fe80::9") < address_key("fe80::10")


def test_nodes_of_one_address_are_told_apart_by_name_port_and_id():
    same = "10.0.0.1"
    nodes = [
        found(same, ray_id="c", name="b"),
        found(same, ray_id="b", name="a", port=2),
        found(same, ray_id="a", name="a", port=2),
        found(same, ray_id="z", name="a", port=1),
    ]
    assert [node.ray_id for node in order_nodes(nodes)] == ["z", "a", "b", "c"]


@given(
    st.lists(st.tuples(st.ip_addresses(), st.text(max_size=3), st.integers(0, 9)), unique=True, max_size=8),
    st.randoms(),
)
def test_the_order_does_not_depend_on_the_order_in_which_nodes_are_listed(data, rng: random.Random):
    nodes = [
        FoundNode(ray_id=str(index), address=str(address), name=name, port=port, is_head=index == 0)
        for index, (address, name, port) in enumerate(data)
    ]
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    assert order_nodes(nodes, no_names) == order_nodes(shuffled, no_names)
    assert sorted(node.ray_id for node in order_nodes(nodes, no_names)) == sorted(node.ray_id for node in nodes)


def test_the_users_ranks_decide_where_all_have_one():
    nodes = [found("a", wanted_rank="2", is_head=True), found("b", wanted_rank=" 0 "), found("c", wanted_rank="01")]
    assert addresses(*nodes) == ["b", "c", "a"]


def test_all_mistakes_in_the_users_ranks_are_told_at_once():
    nodes = [
        found("10.0.0.1", wanted_rank="0"),
        found("10.0.0.2", wanted_rank="0"),
        found("10.0.0.3", wanted_rank="-1"),
        found("10.0.0.4", wanted_rank="7"),
        found("10.0.0.5"),
    ]
    with pytest.raises(ConfigError) as caught:
        order_nodes(nodes)
    text = str(caught.value)
    assert "set on 4 nodes of 5, and not on 10.0.0.5" in text
    assert "0 on both 10.0.0.1 and 10.0.0.2" in text
    assert "'-1' on 10.0.0.3" in text
    assert "7 on 10.0.0.4, but there are 5 nodes" in text
