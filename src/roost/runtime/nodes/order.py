"""The order of nodes: a pure function, so that the same nodes have the same ranks in every run."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

from roost.errors import ConfigError, Problem
from roost.runtime.nodes.info import RayNode
from roost.text import join_words, plural

NODE_RANK_VARIABLE = "ROOST_NODE_RANK"

AddressKey = tuple[int, int, tuple[int, ...]]


def rank_nodes(
    nodes: Sequence[RayNode],
    wanted_ranks: Mapping[str, str],
    resolve: Callable[[str], str] = socket.gethostbyname,
    *,
    unknown: Collection[str] = (),
) -> dict[int, RayNode]:
    """Rank by `wanted_ranks` where every node has one; else the head comes first, then by address, then by name.

    `wanted_ranks` are the values of `ROOST_NODE_RANK` by Ray id. Nodes that share address and name are sorted by port,
    then by the id that Ray gave them. Nodes that may or may not have a wanted rank, by the ids in `unknown`, are left
    out if others have one.
    """
    if not wanted_ranks:

        def key(node: RayNode) -> tuple[bool, AddressKey, str, int, str]:
            return (not node.is_head, address_key(node.address, resolve), node.name, node.port, node.ray_id)

        return dict(enumerate(sorted(nodes, key=key)))
    problems: list[Problem] = []
    without = [str(node) for node in nodes if node.ray_id not in wanted_ranks and node.ray_id not in unknown]
    if without:
        number = plural(len(wanted_ranks), "node")
        message = f"{NODE_RANK_VARIABLE} is set on {number} of {len(nodes)}, and not on {join_words(without)}"
        problems.append(Problem(message=message, hint="set it for `ray start` on every node, or on none"))
    taken: dict[int, RayNode] = {}
    for node in (node for node in nodes if node.ray_id in wanted_ranks):
        value = wanted_ranks[node.ray_id]
        if not (value.strip().isascii() and value.strip().isdigit()):
            message = f"{NODE_RANK_VARIABLE} is {value!r} on {node}, which is not a whole number"
            problems.append(Problem(message=message))
            continue
        rank = int(value)
        says = f"{NODE_RANK_VARIABLE} is {rank} on"
        if rank >= len(nodes):
            message = f"{says} {node}, but there are {plural(len(nodes), 'node')}"
            problems.append(Problem(message=message, hint=f"node ranks are 0 to {len(nodes) - 1}, each once"))
        elif rank in taken:
            problems.append(Problem(message=f"{says} both {taken[rank]} and {node}"))
        else:
            taken[rank] = node
    if problems:
        raise ConfigError(problems)
    return dict(sorted(taken.items()))


def address_key(address: str, resolve: Callable[[str], str] = socket.gethostbyname) -> AddressKey:
    """Return a key that sorts addresses as numbers: IPv4, IPv6, and last the names that do not resolve.

    >>> address_key("10.0.0.2") < address_key("10.0.0.10") < address_key("fe80::1")
    True
    """
    for find in (str, resolve):
        with contextlib.suppress(OSError, ValueError):
            read = ipaddress.ip_address(find(address).strip("[]").partition("%")[0])
            return (read.version, int(read), ())
    return (9, 0, tuple(ord(character) for character in address))
