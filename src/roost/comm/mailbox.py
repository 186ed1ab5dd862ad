"""Messages that arrived and receives that wait, as plain state: the k-th receive from a peer gets its k-th message.

No sockets, no clock. Whoever holds the endpoint's lock may call it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
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


class Mailbox:
    """Messages and receives that have not met yet.

    >>> mailbox = Mailbox()
    >>> mailbox.post(Receive("actor:0", None, "first"))
    >>> mailbox.deliver(Message("actor:0", "", None, "hello", 5)).handle
    'first'
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[str, Hashable], deque[Message]] = {}
        """By source and tag: messages that no receive waited for."""
        self._receives: dict[tuple[str, Hashable], deque[Receive]] = {}
        """Likewise: receives that wait for one source."""
        self._open: deque[Receive] = deque()
        """Receives from more than one source."""
        self._order = itertools.count(1)
        self._bytes: Counter[tuple[str, str]] = Counter()

    def deliver(self, message: Message) -> Receive | None:
        """Take a message in, or one back that was not received after all; returns the receive that gets it."""
        is_back = message.order > 0
        if not is_back:
            message.order = next(self._order)
        key = message.source, message.tag
        if key in self._receives:
            receive = self._receives[key].popleft()
            if not self._receives[key]:
                del self._receives[key]
            return receive
        for receive in self._open:
            if receive.takes(message):
                self._open.remove(receive)
                return receive
        messages = self._messages.setdefault(key, deque())
        if is_back:
            messages.appendleft(message)
        else:
            messages.append(message)
        self._bytes[message.source, message.instance] += message.size
        return None

    def post(self, receive: Receive) -> Message | None:
        """Take a receive in; returns the message that it gets, if one is here."""
        key = receive.source, receive.tag
        if receive.source.endswith(ANY):
            fitting = [messages[0] for messages in self._messages.values() if receive.takes(messages[0])]
            found = min(fitting, key=lambda message: message.order, default=None)
            if found is None:
                self._open.append(receive)
                return None
        elif key in self._messages:
            found = self._messages[key][0]
        else:
            self._receives.setdefault(key, deque()).append(receive)
            return None
        self.remove(found)
        return found

    def remove(self, message: Message) -> None:
        """Take a message out, if it is here."""
        key, sender = (message.source, message.tag), (message.source, message.instance)
        messages = self._messages.get(key)
        if messages is not None and message in messages:
            messages.remove(message)
            if not messages:
                del self._messages[key]
            self._bytes[sender] -= message.size
            if not self._bytes[sender]:
                del self._bytes[sender]

    def withdraw(self, receive: Receive) -> bool:
        """Take a receive back; False if it has got its message."""
        key = receive.source, receive.tag
        receives = self._open if receive.source.endswith(ANY) else self._receives.get(key)
        if receives is None or receive not in receives:
            return False
        receives.remove(receive)
        if not receives:
            self._receives.pop(key, None)
        return True

    def withdraw_from(self, source: str) -> list[Receive]:
        """Take back all receives that wait for one source."""
        keys = [key for key in self._receives if key[0] == source]
        return [receive for key in keys for receive in self._receives.pop(key)]

    def is_waiting_for(self, source: str) -> bool:
        """Whether a receive waits for this source."""
        return any(name == source for name, _ in self._receives) or any(
            receive.is_from(source) for receive in self._open
        )

    def size_from(self, source: str, instance: str) -> int:
        """How many bytes of one process wait to be received."""
        return self._bytes.get((source, instance), 0)

    def receives(self) -> Iterator[Receive]:
        """All receives that wait."""
        return itertools.chain(*self._receives.values(), self._open)


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
    return _address(group, rank, is_any=type(rank) is str and rank == ANY)


def _address(group: Any, rank: Any, *, is_any: bool = False) -> str:
    if not is_any and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise ConfigError(f"{rank!r} is not a rank of {group!r}", hint="a rank is 0 or more")
    if not isinstance(group, str) or not group or group == ANY:
        raise ConfigError(f"{group!r} is not the name of a group")
    return f"{group}:{rank}"
