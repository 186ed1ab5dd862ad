"""The order of nodes: a pure function, so that the same nodes have the same ranks in every run."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roost.errors import ConfigError, Problem
from roost.runtime.nodes.info import describe_node
from roost.text import join_words, plural

NODE_RANK_VARIABLE = "ROOST_NODE_RANK"

AddressKey = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundNode:
    """What the order of nodes depends on."""

    ray_id: str
    address: str
    name: str = ""
    port: int = 0
    is_head: bool = False
    wanted_rank: str | None = None
    """What the node's own `ROOST_NODE_RANK` says."""

    def __str__(self) -> str:
        return describe_node(self.address, self.name)


def order_nodes(
    nodes: Sequence[FoundNode], resolve: Callable[[str], str] = socket.gethostbyname
) -> tuple[FoundNode, ...]:
    """By `ROOST_NODE_RANK` where every node has it; else the head first, then by address, then by name.

    Nodes that share address and name are told apart by port and, last, by the id that Ray gave them.
    """
    if any(node.wanted_rank is not None for node in nodes):
        return _by_wanted_rank(nodes)

    def key(node: FoundNode) -> tuple[bool, AddressKey, str, int, str]:
        return (not node.is_head, address_key(node.address, resolve), node.name, node.port, node.ray_id)

    return tuple(sorted(nodes, key=key))


def address_key(address: str, resolve: Callable[[str], str] = socket.gethostbyname) -> AddressKey:
    """An address as a number: IPv4 before IPv6, names by what they resolve to, then by their characters.

    >>> address_key("10.0.0.2") < address_key("10.0.0.10") < address_key("fe80::1")
    True
    """
    number = _as_number(address)
    if number is None:
        try:
            number = _as_number(resolve(address))
        except (OSError, UnicodeError):
            number = None
    if number is None:
        return (9, 0, tuple(ord(character) for character in address))
    return (*number, ())


def _as_number(address: str) -> tuple[int, int] | None:
    try:
        read = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return (read.version, int(read))


def _by_wanted_rank(nodes: Sequence[FoundNode]) -> tuple[FoundNode, ...]:
    problems: list[Problem] = []
    without = [node for node in nodes if node.wanted_rank is None]
    if without:
        problems.append(
            Problem(
                message=f"{NODE_RANK_VARIABLE} is set on {plural(len(nodes) - len(without), 'node')} of {len(nodes)}, "
                f"and not on {join_words([str(node) for node in without])}",
                hint="set it for `ray start` on every node, or on none",
            )
        )
    taken: dict[int, FoundNode] = {}
    for node in nodes:
        if node.wanted_rank is None:
            continue
        text = node.wanted_rank.strip()
        if not (text.isascii() and text.isdigit()):
            problems.append(
                Problem(message=f"{NODE_RANK_VARIABLE} is {node.wanted_rank!r} on {node}, which is not a whole number")
            )
            continue
        rank = int(text)
        if rank >= len(nodes):
            problems.append(
                Problem(
                    message=f"{NODE_RANK_VARIABLE} is {rank} on {node}, but there are {plural(len(nodes), 'node')}",
                    hint=f"node ranks are 0 to {len(nodes) - 1}, each once",
                )
            )
        elif rank in taken:
            problems.append(Problem(message=f"{NODE_RANK_VARIABLE} is {rank} on both {taken[rank]} and {node}"))
        else:
            taken[rank] = node
    if problems:
        raise ConfigError(problems)
    return tuple(taken[rank] for rank in sorted(taken))
