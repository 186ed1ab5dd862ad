"""The queues of one channel as plain state: who put what, who waits, who has what.

No sockets, no clock, no threads, and nothing in here looks into an item. What happens is a method call, and what is to
be done about it is the list of events that it returns. So tests compare lists.

An item that is handed to a client stays here, leased, until the client acknowledges it. If the client dies or gives up
before that, the item goes back to its place at the front. An item that three clients died with is set aside: it may be
what ends them, and would end one after another.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_AHEAD_BYTES = 1 << 20
"""How much an iterator may have ahead of the loop that it feeds; always at least one item."""

_LIVES = 3
"""How many clients may die with an item before it is set aside."""
_MOST_IDLE = 256
"""Of how many keys that are empty the counts are kept."""

_PLACE = operator.attrgetter("place")

Client = str
Request = tuple[Client, int]


class Status(enum.IntEnum):
    """How a request ended."""

    DONE = 0
    EMPTY = 1
    FULL = 2
    CLOSED = 3
    TOO_HEAVY = 4
    CANCELLED = 5
    FAILED = 6


@dataclass(slots=True, eq=False)
class Item:
    """One item: its weight, size and version, and what it is, which only its consumer looks at."""

    content: Any
    weight: float = 0
    size: int = 0
    version: int = 0
    lives: float = _LIVES
    """How many clients may die with it before it is set aside; `math.inf` for one that never is."""
    place: int = 0
    """Its place in the order of all items; set when it is accepted."""


class Answer(NamedTuple):
    """A request ended."""

    client: Client
    number: int
    status: Status
    items: Sequence[Any] = ()
    """Each an `Item`, and where it has arrived its content."""
    accepted: int = 0
    """Of a put: how many of its items were accepted."""
    weight: float = 0
    """With TOO_HEAVY: that of the item."""
    problem: str = ""
    """With FAILED: why the home could not handle the request."""


class Recall(NamedTuple):
    """A client should return what it has ahead of need: others wait for it."""

    client: Client
    number: int


class SetAside(NamedTuple):
    """Clients died with items again and again: no other client gets these."""

    client: Client
    """The last that died."""
    key: Hashable
    how_many: int


Event = Answer | Recall | SetAside


class Want(NamedTuple):
    """The amount that a get asks for: a number of items, or a weight."""

    most: int = 1
    least: int = 1
    target: float | None = None
    """The weight of a batch; `most` and `least` do not count then."""
    waits: bool = True
    ahead: bool = False
    """Whether the client hands them out one by one, and acknowledges each."""
    min_version: int | None = None
    """Items of an older version are dropped, as soon as it is this request's turn."""


@dataclass(slots=True, eq=False)
class _Getter:
    want: Want
    seen: int = 0
    """How many items at the front are in the batch, as far as it was looked."""
    total: float = 0.0
    turn: int = -1
    """The version of the front that `seen` is about."""


@dataclass(slots=True, eq=False)
class _Putter:
    items: deque[Item]
    order: int
    is_whole: bool
    """Whether all of its items go in at once."""
    count: int = 0


@dataclass(slots=True, eq=False)
class _Lease:
    items: deque[Item]
    is_ahead: bool
    since: float
    is_recalled: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """The queue of one key."""

    key: Hashable
    items: deque[Item] = field(default_factory=deque)
    getters: OrderedDict[Request, _Getter] = field(default_factory=OrderedDict)
    putters: OrderedDict[Request, _Putter] = field(default_factory=OrderedDict)
    leases: dict[Request, _Lease] = field(default_factory=dict)
    ahead: int = 0
    """How many items iterators have that they did not hand out."""
    drafts: dict[Request, Sequence[Item]] = field(default_factory=dict)
    """Puts as a whole that have their room, and go in when the client acknowledges that it knows."""
    drafted: int = 0
    """How many items these are."""
    turn: int = 0
    """Changes when items go back to the front."""
    puts: int = 0
    gets: int = 0
    dropped: int = 0
    """How many items were dropped because a get wanted newer ones."""
    set_aside: int = 0

    @property
    def depth(self) -> int:
        return len(self.items) + self.ahead

    @property
    def is_unused(self) -> bool:
        return not (self.items or self.getters or self.putters or self.leases or self.drafts)


class Queues:
    """A first-in, first-out queue for each key, with limits on items and bytes; requests wait in line."""

    def __init__(self, maxsize: int = 0, max_bytes: int = 0, clock: Callable[[], float] = lambda: 0.0) -> None:
        """Take the most items for each key and the most bytes for all, where 0 is no limit.

        Only `stats` shows what the clock says, in seconds.
        """
        self._clock = clock
        self.maxsize = maxsize
        self.max_bytes = max_bytes
        self.is_closed = False
        self.bytes = 0
        """Of all items, leased ones included."""
        self.puts = 0
        self.gets = 0
        self._lines: dict[Hashable, _Line] = {}
        self._idle: OrderedDict[Hashable, _Line] = OrderedDict()
        """The lines that were used and are empty, kept for their counts; the one that was used last is at the end."""
        self._line_of: dict[Request, _Line] = {}
        """Where each request is that waits, or has items that are not acknowledged."""
        self._full: dict[Hashable, _Line] = {}
        """The lines where puts wait."""
        self._places = itertools.count(1)
        self._orders = itertools.count(1)

    def put(
        self,
        client: Client,
        number: int,
        key: Hashable,
        items: Sequence[Item],
        waits: bool = True,
        is_whole: bool = False,
    ) -> list[Event]:
        """Take items in, in order; answered when all are in, or at once if it does not wait.

        They go in one by one as there is room. With `is_whole` they go in together, when the client has acknowledged
        the answer: if it gives up or dies before that, none of them do.
        """
        out: list[Event] = []
        if self.is_closed:
            return [Answer(client, number, Status.CLOSED)]
        line = self._lines.get(key) or self._open_line(key)
        if not is_whole and not line.putters and self._fits(line, items):
            self._accept(line, items)
            out.append(Answer(client, number, Status.DONE, (), len(items)))
            if line.getters:
                self._work(line, out)
            return out
        if not waits and (line.putters or not (line.getters or self._has_room(line, 1, items[0].size))):
            self._tidy(line)
            return [*out, Answer(client, number, Status.FULL)]
        line.putters[client, number] = _Putter(deque(items), next(self._orders), is_whole)
        self._line_of[client, number] = line
        self._full[key] = line
        self._work(line, out)
        return out

    def get(self, client: Client, number: int, key: Hashable, want: Want) -> list[Event]:
        """Hand items out as soon as enough are there, after the requests that came before."""
        out: list[Event] = []
        line = self._lines.get(key)
        if line is None:
            if not want.waits and not self.is_closed:
                return [Answer(client, number, Status.EMPTY if want.least else Status.DONE)]
            line = self._open_line(key)
        line.getters[client, number] = _Getter(want)
        self._line_of[client, number] = line
        self._work(line, out)
        if (client, number) in line.getters:
            if not want.waits:
                self._stop_waiting(line, (client, number))
                out.append(Answer(client, number, Status.EMPTY if want.least else Status.DONE))
                self._tidy(line)
            elif line.ahead:
                out += self._recall(line)
        else:
            self._tidy(line)
        if want.min_version is not None:
            # What it dropped has made room, for puts under other keys too.
            self._settle(line, out)
        return out

    def acknowledge(self, client: Client, number: int, count: int = 0) -> list[Event]:
        """Note that a client has the first items that a request of its got; with no count, all of them."""
        out: list[Event] = []
        request = client, number
        line = self._line_of.get(request)
        lease = line.leases.get(request) if line is not None else None
        if line is None or lease is None:
            if line is not None and request in line.drafts:
                self._accept(line, self._end_draft(line, request))
                self._settle(line, out)
            return out
        if not count or count >= len(lease.items):
            taken: Sequence[Item] = lease.items
            self._end_lease(line, request)
        else:
            taken = [lease.items.popleft() for _ in range(count)]
        self.bytes -= sum([item.size for item in taken])
        line.gets += len(taken)
        self.gets += len(taken)
        line.ahead -= len(taken) if lease.is_ahead else 0
        self._settle(line, out)
        return out

    def cancel(self, client: Client, number: int) -> list[Event]:
        """End a request: one that waits is answered; what it got and did not acknowledge goes back to the front."""
        out: list[Event] = []
        request = client, number
        line = self._line_of.get(request)
        if line is None:
            return out
        if request in line.leases:
            self._give_back(line, [request])
        elif request in line.drafts:
            self._end_draft(line, request)
        else:
            putter = line.putters.get(request)
            self._stop_waiting(line, request)
            out.append(Answer(client, number, Status.CANCELLED, (), putter.count if putter is not None else 0))
        self._settle(line, out)
        return out

    def drop_client(self, client: Client) -> list[Event]:
        """Forget a client that died: what it waited for, and what it had and did not acknowledge."""
        out: list[Event] = []
        changed: dict[_Line, list[Request]] = {}
        for request, line in self._line_of.items():
            if request[0] == client:
                changed.setdefault(line, []).append(request)
        for line, requests in changed.items():
            for request in requests:
                if request in line.drafts:
                    self._end_draft(line, request)
                elif request not in line.leases:
                    self._stop_waiting(line, request)
            leased = [request for request in requests if request in line.leases]
            if leased and (count := self._give_back(line, leased, is_dead=True)):
                out.append(SetAside(client, line.key, count))
        for line in changed:
            self._settle(line, out)
        return out

    def close(self) -> list[Event]:
        """Refuse what is put from now on; gets take what is left."""
        out: list[Event] = []
        self.is_closed = True
        for line in list(self._lines.values()):
            for request, putter in list(line.putters.items()):
                self._stop_waiting(line, request)
                out.append(Answer(*request, Status.CLOSED, (), putter.count))
            self._settle(line, out)
        return out

    def depth(self, key: Hashable) -> int:
        """Return how many items are in the queue."""
        line = self._lines.get(key)
        return 0 if line is None else line.depth

    def front(self, key: Hashable, count: int) -> list[Any]:
        """Return what the first items of a queue are, which stay there."""
        line = self._lines.get(key)
        return [] if line is None else [item.content for item in itertools.islice(line.items, count)]

    def is_full(self, key: Hashable) -> bool:
        """Whether a put would have to wait."""
        line = self._lines.get(key)
        if line is None:
            line = _Line(key)
        return bool(line.putters) or not self._has_room(line, 1, 0)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it, and no client waits."""
        return not self._lines

    def totals(self) -> dict[str, int]:
        """Return counts over all keys: cheap enough for once a second."""
        lines = self._lines.values()
        return {
            "depth": sum(line.depth for line in lines),
            "puts": self.puts,
            "gets": self.gets,
            "getters": sum(len(line.getters) for line in lines),
            "putters": sum(len(line.putters) for line in lines),
        }

    def stats(self) -> dict[str, Any]:
        """Return depth, bytes and counts, and who waits or has what, with keys and clients as they are here."""
        return {
            "puts": self.puts,
            "gets": self.gets,
            "bytes": self.bytes,
            "is_closed": self.is_closed,
            "keys": {
                key: {
                    "depth": line.depth,
                    "leased": sum(len(lease.items) for lease in line.leases.values() if not lease.is_ahead),
                    "bytes": sum(item.size for item in line.items),
                    "puts": line.puts,
                    "gets": line.gets,
                    "dropped": line.dropped,
                    "set_aside": line.set_aside,
                    "versions": (
                        min((item.version for item in line.items), default=None),
                        max((item.version for item in line.items), default=None),
                    ),
                    "getters": dict(Counter(client for client, _ in line.getters)),
                    "putters": dict(Counter(client for client, _ in line.putters)),
                    "holders": {
                        client: self._clock() - lease.since
                        for (client, _), lease in line.leases.items()
                        if not lease.is_ahead
                    },
                }
                for key, line in itertools.chain(self._lines.items(), self._idle.items())
            },
        }

    def _fits(self, line: _Line, items: Sequence[Item]) -> bool:
        """Whether all items can be accepted at once."""
        if self.maxsize and line.depth + line.drafted + len(items) > self.maxsize:
            return False
        if not self.max_bytes:
            return True
        return not self._full and self.bytes + sum(item.size for item in items) <= self.max_bytes

    def _has_room(self, line: _Line, count: int, size: int, order: int = 0) -> bool:
        if self.maxsize and line.depth + line.drafted + count > self.maxsize:
            return False
        if not self.max_bytes or not self.bytes:
            return True
        if self.bytes + size > self.max_bytes or self.bytes >= self.max_bytes:
            return False
        # Small items do not overtake a large one that waits for bytes.
        return not any(
            # Unless that one has as many items as it may, however few bytes they are.
            (not order or first.order < order) and not (self.maxsize and other.depth >= self.maxsize)
            for other in self._full.values()
            if other is not line
            for first in itertools.islice(other.putters.values(), 1)
        )

    def _accept(self, line: _Line, items: Sequence[Item]) -> None:
        size = 0
        for item, place in zip(items, self._places, strict=False):
            item.place = place
            size += item.size
        line.items.extend(items)
        self.bytes += size
        line.puts += len(items)
        self.puts += len(items)

    def _work(self, line: _Line, out: list[Event]) -> None:
        """Answer the requests that wait at a line, as far as its items and its room go."""
        while True:
            while line.getters and self._serve(line, *next(iter(line.getters.items())), out):
                pass
            if not line.putters:
                return
            request, putter = next(iter(line.putters.items()))
            count = len(putter.items) if putter.is_whole else 1
            size = sum([item.size for item in itertools.islice(putter.items, count)])
            if not self._is_short(line) and not self._has_room(line, count, size, putter.order):
                return
            if putter.is_whole:
                self._stop_waiting(line, request)
                line.drafts[request], self._line_of[request] = putter.items, line
                line.drafted += count
                self.bytes += size
                out.append(Answer(*request, Status.DONE, (), count))
                continue
            self._accept(line, [putter.items.popleft() for _ in range(count)])
            putter.count += count
            if not putter.items:
                self._stop_waiting(line, request)
                out.append(Answer(*request, Status.DONE, (), putter.count))

    def _is_short(self, line: _Line) -> bool:
        """Whether a get waits: it may need more than the limits allow, and what it lacks is accepted."""
        if not line.getters or not line.drafted:
            return bool(line.getters)
        want = next(iter(line.getters.values())).want
        return want.target is None and len(line.items) + line.drafted < want.least

    def _serve(self, line: _Line, request: Request, getter: _Getter, out: list[Event]) -> bool:
        """Answer a get if what it wants is there, or if it never will be; returns whether it was answered."""
        want = getter.want
        if want.min_version is not None:
            old = [item for item in line.items if item.version < want.min_version]
            if old:
                line.items = deque(item for item in line.items if item.version >= want.min_version)
                line.turn += 1
                line.dropped += len(old)
                self.bytes -= sum(item.size for item in old)
        if want.target is not None:
            count, is_ready = self._count_batch(line, getter, want.target)
            if not count and is_ready:
                self._stop_waiting(line, request)
                out.append(Answer(*request, Status.TOO_HEAVY, (), 0, line.items[0].weight))
                return True
        else:
            count = min(want.most, len(line.items))
            is_ready = count >= want.least
            if want.ahead and count > 1:
                count = self._count_ahead(line, count)
        # Even if it is closed, what others have may come back.
        is_over = self.is_closed and not line.drafts and all(client == request[0] for client, _ in line.leases)
        if not is_ready and not is_over:
            return False
        self._stop_waiting(line, request)
        if count < len(line.items):
            items = deque([line.items.popleft() for _ in range(count)])
        else:
            items, line.items = line.items, deque()
        line.turn += 1
        if items:
            line.leases[request] = _Lease(items, want.ahead, self._clock())
            self._line_of[request] = line
            line.ahead += len(items) if want.ahead else 0
        status = Status.CLOSED if is_over and not items else Status.DONE
        out.append(Answer(*request, status, tuple(items)))
        return True

    def _count_batch(self, line: _Line, getter: _Getter, target: float) -> tuple[int, bool]:
        """Count the items at the front that fit into a batch; returns also whether it is complete."""
        if getter.turn != line.turn:
            getter.turn, getter.seen, getter.total = line.turn, 0, 0.0
        for item in itertools.islice(line.items, getter.seen, None):
            if getter.total >= target or getter.total + item.weight > target:
                return getter.seen, True
            getter.seen += 1
            getter.total += item.weight
        return getter.seen, getter.total >= target

    def _count_ahead(self, line: _Line, most: int) -> int:
        """Count what an iterator gets ahead of need: a fair part of what is there."""
        most = max(1, min(most, len(line.items) // len(line.getters)))
        size = 0
        for count, item in enumerate(itertools.islice(line.items, most)):
            size += item.size
            if count and size > _AHEAD_BYTES:
                return count
        return most

    def _settle(self, line: _Line, out: list[Event]) -> None:
        """Do what a change makes possible at its line, and at others if bytes are free."""
        self._work(line, out)
        if self._full and self.max_bytes:
            waiting = sorted(self._full.values(), key=lambda one: next(iter(one.putters.values())).order)
            for other in waiting:
                if other is not line:
                    self._work(other, out)
        if line.getters and line.ahead:
            out += self._recall(line)
        self._tidy(line)

    def _recall(self, line: _Line) -> list[Event]:
        recalled: list[Event] = []
        for request, lease in line.leases.items():
            if lease.is_ahead and not lease.is_recalled:
                lease.is_recalled = True
                recalled.append(Recall(*request))
        return recalled

    def _stop_waiting(self, line: _Line, request: Request) -> None:
        del self._line_of[request]
        if line.getters.pop(request, None) is None:
            del line.putters[request]
            if not line.putters:
                self._full.pop(line.key, None)

    def _end_lease(self, line: _Line, request: Request) -> _Lease:
        del self._line_of[request]
        return line.leases.pop(request)

    def _end_draft(self, line: _Line, request: Request) -> Sequence[Item]:
        del self._line_of[request]
        items = line.drafts.pop(request)
        line.drafted -= len(items)
        self.bytes -= sum(item.size for item in items)
        return items

    def _give_back(self, line: _Line, requests: Sequence[Request], *, is_dead: bool = False) -> int:
        """Put leased items back where they were: before all that were put after them.

        Returns how many were set aside, because a client died with them once too often. What an iterator had ahead does
        not count: it acknowledges an item before it opens it.
        """
        items: list[Item] = []
        set_aside = 0
        for request in requests:
            lease = self._end_lease(line, request)
            line.ahead -= len(lease.items) if lease.is_ahead else 0
            for item in lease.items:
                item.lives -= is_dead and not lease.is_ahead
                if item.lives > 0:
                    items.append(item)
                else:
                    self.bytes -= item.size
                    set_aside += 1
        line.set_aside += set_aside
        items.sort(key=_PLACE)
        if not line.items or not items or items[-1].place < line.items[0].place:
            line.items.extendleft(reversed(items))
        else:
            line.items = deque(sorted((*items, *line.items), key=_PLACE))
        line.turn += 1
        return set_aside

    def _open_line(self, key: Hashable) -> _Line:
        line = self._lines[key] = self._idle.pop(key) if key in self._idle else _Line(key)
        return line

    def _tidy(self, line: _Line) -> None:
        """Free a key that is empty and unused, but for its counts."""
        if line.is_unused and self._lines.pop(line.key, None) is not None and line.puts:
            self._idle[line.key] = line
            if len(self._idle) > _MOST_IDLE:
                self._idle.popitem(last=False)
