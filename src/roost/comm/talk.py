"""What a worker says to others, as its methods take it: checks the arguments, and waits unless told not to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from roost.comm.mailbox import ANY
from roost.comm.messages import Messages
from roost.comm.options import CollectiveGroupOptions, check_options
from roost.comm.wire.loop import Handle, all_of
from roost.errors import ConfigError

_MOST_KNOWN = 1024

Peers = tuple[Any, Any]
"""The name of a group, and one rank or several."""


class Talk:
    """The conversations of one worker."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self._known: dict[Peers, str] = {}
        """The addresses of single ranks that were asked for before."""

    @property
    def is_closed(self) -> bool:
        """Whether it ended with its Cluster."""
        return self.messages.endpoint.is_closed

    def send(
        self,
        thing: Any,
        peers: Peers,
        async_op: bool,
        options: CollectiveGroupOptions | None,
        tag: Hashable,
        timeout: float | None,
        payload: Any,
    ) -> Handle[None] | None:
        """Send an object."""
        if options is not None:
            check_options(options)
        single = self._single(peers)
        if single is not None and not async_op:
            handle = self.messages.begin_send(thing, single, tag, payload)
            return handle if handle is None else handle.wait(timeout)
        begun = [self.messages.begin_send(thing, to, tag, payload) for to in addresses_of(*peers)]
        return self._ended([handle for handle in begun if handle is not None], async_op, timeout)

    def send_tensor(
        self,
        tensor: Any,
        peers: Peers,
        async_op: bool,
        options: CollectiveGroupOptions | None,
        tag: Hashable,
        timeout: float | None,
    ) -> Handle[None] | None:
        """Send the content of a tensor."""
        check_options(options)
        handles = [self.messages.send_tensor(tensor, to, tag) for to in addresses_of(*peers)]
        return self._ended(handles, async_op, timeout)

    def recv(
        self,
        into: Any,
        peers: Peers,
        async_op: bool,
        options: CollectiveGroupOptions | None,
        tag: Hashable,
        timeout: float | None,
    ) -> Any:
        """Receive an object, or the content of a tensor."""
        if options is not None:
            check_options(options)
        source = self._single(peers) or _source(*peers)
        if async_op:
            return self.messages.receive(source, tag, into)
        return self.messages.wait_for_next(source, tag, into, timeout)

    def _single(self, peers: Peers) -> str | None:
        """Return the address of one rank, remembered; None if it is not one rank of one group."""
        group, rank = peers
        if type(rank) is not int or type(group) is not str:
            return None
        address = self._known.get(peers)
        if address is None:
            address = _address(group, rank)
            if len(self._known) < _MOST_KNOWN:
                self._known[peers] = address
        return address

    def _ended(self, handles: Sequence[Handle[None]], async_op: bool, timeout: float | None) -> Handle[None] | None:
        if not async_op:
            for handle in handles:
                handle.wait(timeout)
            return None
        return self.all_of(handles, None)

    def all_of(self, handles: Sequence[Handle[None]], value: Any) -> Handle[Any]:
        """Return a handle that has this value when all are done."""
        return all_of(self.messages.endpoint.loop, handles, value, "not every rank has taken a message")


def addresses_of(group: Any, ranks: Any) -> list[str]:
    """Return the addresses of one rank of a group, or of several; ConfigError if they are none."""
    if type(ranks) is int:
        return [_address(group, ranks)]
    several = ranks if isinstance(ranks, Iterable) and not isinstance(ranks, str) else [ranks]
    found = [_address(group, rank) for rank in several]
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"the ranks of {group!r} are {ranks!r}: name each once")
    return found


def _source(group: Any, rank: Any) -> str:
    if group == ANY and rank in (None, ANY):
        return ANY
    return f"{_group(group)}:{ANY}" if rank == ANY else _address(group, rank)


def _address(group: Any, rank: Any) -> str:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"{rank!r} is not a rank of {group!r}", hint="a rank is 0 or more")
    return f"{_group(group)}:{rank}"


def _group(name: Any) -> str:
    if not isinstance(name, str) or not name or name == ANY:
        raise ConfigError(f"{name!r} is not the name of a group")
    return name
