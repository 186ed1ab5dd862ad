"""What arrived and what is waited for, as plain state: the k-th receive from a peer gets its k-th message.

No sockets, no clock. Whoever holds the endpoint's lock may call it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from roost.errors import ConfigError

ANY: str = "*"
"""Any group, or any rank of a group, as the source of a message."""


@dataclass(slots=True, eq=False)
class Message:
    """A message that arrived, whole or in part."""

    source: str
    instance: str
    """Which of the processes that had the name sent it."""
    tag: Hashable
    content: Any
    size: int
    order: int = 0
    """When it arrived; 0 before."""
    loan: tuple[Any, int] | None = None
    """Who waits until its tensors are fetched from a device, and under which number."""


@dataclass(slots=True, eq=False)
class Receive:
    """A receive that waits for a message: from one worker, from a group (`rollout:*`) or from any (`*`)."""

    source: str
    tag: Hashable
    handle: Any
    """Whose it is."""
    target: Any = None
    """Where a tensor goes."""

    def takes(self, message: Message) -> bool:
        """Whether a message is one that it waits for."""
        return self.tag == message.tag and self.is_from(message.source)

    def is_from(self, source: str) -> bool:
        """Whether it waits for this worker, or for any of its group: not for those that its group has launched."""
        if not self.source.endswith(ANY):
            return self.source == source
        return self.source == ANY or self.source.rpartition(":")[0] == source.rpartition(":")[0]


class _Box:
    """What one source sent under one tag, and what waits for it: one of both is empty."""

    __slots__ = ("messages", "receives")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.receives: deque[Receive] = deque()


class Mailbox:
    """Messages and receives that have not met yet.

    >>> mailbox = Mailbox()
    >>> mailbox.post(Receive("actor:0", None, "first"))
    >>> mailbox.deliver(Message("actor:0", "", None, "hello", 5)).handle
    'first'
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[str, Hashable], _Box] = {}
        self._open: deque[Receive] = deque()
        """Receives from more than one source."""
        self._order = itertools.count(1)
        self._bytes: dict[tuple[str, str], int] = {}

    def deliver(self, message: Message) -> Receive | None:
        """Take a message in, or one back that was not received after all; returns the receive that gets it."""
        is_back = message.order > 0
        if not is_back:
            message.order = next(self._order)
        box = self._boxes.get((message.source, message.tag))
        if box is not None and box.receives:
            receive = box.receives.popleft()
            if not box.receives:
                del self._boxes[message.source, message.tag]
            return receive
        for receive in self._open:
            if receive.takes(message):
                self._open.remove(receive)
                return receive
        messages = self._boxes.setdefault((message.source, message.tag), _Box()).messages
        if is_back:
            messages.appendleft(message)
        else:
            messages.append(message)
        self._count(message, message.size)
        return None

    def post(self, receive: Receive) -> Message | None:
        """Take a receive in; returns the message that it gets, if one is here."""
        if not receive.source.endswith(ANY):
            key = receive.source, receive.tag
            box = self._boxes.get(key)
            if box is None:
                box = self._boxes[key] = _Box()
            if not box.messages:
                box.receives.append(receive)
                return None
            found = box.messages.popleft()
        else:
            firsts = [box.messages[0] for box in self._boxes.values() if box.messages]
            fitting = [message for message in firsts if receive.takes(message)]
            if not fitting:
                self._open.append(receive)
                return None
            found = min(fitting, key=lambda message: message.order)
            self._boxes[found.source, found.tag].messages.popleft()
        self._free(found.source, found.tag)
        self._count(found, -found.size)
        return found

    def remove(self, message: Message) -> None:
        """Forget a message that will never be complete."""
        box = self._boxes.get((message.source, message.tag))
        if box is not None and message in box.messages:
            box.messages.remove(message)
            self._count(message, -message.size)
            self._free(message.source, message.tag)

    def withdraw(self, receive: Receive) -> bool:
        """Take a receive back; False if it has got its message."""
        box = self._boxes.get((receive.source, receive.tag))
        for receives in (self._open, *([box.receives] if box else ())):
            if receive in receives:
                receives.remove(receive)
                self._free(receive.source, receive.tag)
                return True
        return False

    def withdraw_from(self, source: str) -> list[Receive]:
        """Take back all receives that wait for one source."""
        found = [receive for (name, _), box in self._boxes.items() if name == source for receive in box.receives]
        for receive in found:
            self.withdraw(receive)
        return found

    def is_waiting_for(self, source: str) -> bool:
        """Whether a receive waits for this source."""
        return any(box.receives for (name, _), box in self._boxes.items() if name == source) or any(
            receive.is_from(source) for receive in self._open
        )

    def size_from(self, source: str, instance: str) -> int:
        """How many bytes of one process wait to be received."""
        return self._bytes.get((source, instance), 0)

    def receives(self) -> Iterator[Receive]:
        """All receives that wait."""
        for box in self._boxes.values():
            yield from box.receives
        yield from self._open

    def _count(self, message: Message, size: int) -> None:
        key = message.source, message.instance
        self._bytes[key] = self._bytes.get(key, 0) + size
        if not self._bytes[key]:
            del self._bytes[key]

    def _free(self, source: str, tag: Hashable) -> None:
        """Forget a box that is empty."""
        box = self._boxes.get((source, tag))
        if box is not None and not box.messages and not box.receives:
            del self._boxes[source, tag]


def addresses_of(group: Any, ranks: Any) -> list[str]:
    """Return the addresses of one rank of a group, or of several; ConfigError if they are none."""
    if type(ranks) is int:
        return [_address(group, ranks)]
    several = ranks if isinstance(ranks, Iterable) and not isinstance(ranks, str) else [ranks]
    found = [_address(group, rank) for rank in several]
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"the ranks of {group!r} are {ranks!r}: name each once")
    return found


def source_of(group: Any, rank: Any) -> str:
    """Return the address of one rank of a group, or of any, or of any worker; ConfigError if it is none."""
    if type(group) is str and group == ANY and (rank is None or rank == ANY):
        return ANY
    return f"{_group(group)}:{ANY}" if type(rank) is str and rank == ANY else _address(group, rank)


def _address(group: Any, rank: Any) -> str:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"{rank!r} is not a rank of {group!r}", hint="a rank is 0 or more")
    return f"{_group(group)}:{rank}"


def _group(name: Any) -> str:
    if not isinstance(name, str) or not name or name == ANY:
        raise ConfigError(f"{name!r} is not the name of a group")
    return name
