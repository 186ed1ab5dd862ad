"""What happened in a round, and the invariants that every history must keep. Plain code: no Ray, no clock, no files.

An event is a dict, as the processes of a round write it, with `t`, the time, and `e`, its kind:

- `begin`: an operation `op` of driver `who` begins; `what` it is, and the seconds that it may take, `limit`
- `end`: it returned, `ok` or with `error` (`type`, `bases`, `text`)
- `wrong`: an operation returned another value than it had to
- `clash`: two jobs had the same accelerator, or two callers were inside the lock
- `put`, `get`: samples that were put in (with the operation) and taken out
- `update`, `served`: a version of the weights that was set, and one that answered a request
- `proved`: after its work a driver could launch and call a new group, or not (`ok`)
- `resources`: what a driver had open at a moment, `when` it had just begun and when it had closed everything
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak.schedule import FAULTS

Event = Mapping[str, Any]

GRACE_SECONDS = 5.0
"""How late a wait may return: a second, and what a busy machine adds."""
CLOSE_TO_SECONDS = 2.0
"""How long after the death of a consumer a sample may still be on its way to it."""
RECOVER_SECONDS = 15.0
"""How long after the end of a fault a job may need until all works again."""
MOST_DESCRIPTORS = 40
"""How many more descriptors a driver may have open at its end: Ray keeps sockets to the nodes that it talks to."""

_WHO = re.compile(
    r"""\w+:\d+            # a worker, or the address of a router, an engine or a head
    | \bnodes?\ \d+       # a node
    | \b\d+\ of\ \d+\ nodes?
    | \b(?:Node|Worker|Collective)Manager\b
    | \bengine\ \d+
    | local-\d+           # a node by its name
    | \bgroup\ '\w+'
    | \bjob\ '[\w-]+'
    | \block\b
    | \brun\ folder\ /
    | \bhead\b
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault that was carried out."""

    name: str
    target: str
    began: float
    ended: float
    """When a target that was stopped went on; the same as `began` for one that was killed."""
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.target} (pid {self.pid}), {self.began:.1f} to {self.ended:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEnd:
    """How a driver ended."""

    who: str
    code: int | None
    """Its exit code; None if it did not end in time."""
    ended: float
    was_killed: bool
    was_ended_by_ray: bool = False
    """Whether Ray ended it, after the death of its raylet and before Roost had disconnected; it says nothing then."""
    is_stopped: bool = False
    """Whether it was stopped when the round was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A round as it happened."""

    events: Sequence[Event]
    faults: Sequence[InjectedFault] = ()
    drivers: Sequence[DriverEnd] = ()
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What was there some seconds after the end: by kind."""

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event["e"] in kinds]

    def ends(self) -> dict[str, Event]:
        """Return the end of each operation that has one."""
        return {event["op"]: event for event in self.of("end")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """An invariant that a history broke."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


def check_exclusive(history: History) -> Iterator[str]:
    """No accelerator is held by two jobs at once, and no two callers are inside the lock."""
    for event in history.of("clash"):
        yield f"{event['what']} was held by {event['mine']} and by {event['theirs']}"


def check_values(history: History) -> Iterator[str]:
    """Every value that a call returns is the right one."""
    for event in history.of("wrong"):
        yield f"{event['op']} returned {event['got']!r}, not {event['want']!r}"


def check_samples(history: History) -> Iterator[str]:
    """Every sample that was acknowledged comes out exactly once, and none comes out twice."""
    ends = history.ends()
    taken = Counter(sample for event in history.of("get") for sample in event["ids"])
    for sample, count in taken.items():
        if count > 1:
            yield f"sample {sample} was delivered {count} times"
    begun = {event["op"]: event for event in history.of("begin")}
    puts = [event for event in history.of("put") if ends.get(event["op"], {}).get("ok")]
    known = {sample for event in history.of("put") for sample in event["ids"]}
    for sample in set(taken) - known:
        yield f"sample {sample} was delivered and never put in"
    # What a manager had is gone when it is killed or restarted, and a driver that was killed may have taken any.
    drains = [event["t"] for event in history.of("resources") if event.get("drained")]
    if not drains:
        return
    if any(fault.name in ("kill-rollout-manager", "kill-raylet") for fault in history.faults):
        return
    if any(event["what"] == "restart manager" for event in history.of("begin")):
        return
    excuses = [
        (death, get["count"])
        for op, get in begun.items()
        if get["what"] == "get" and op not in ends and (death := _death_of(history, get)) is not None
    ]
    # What a process that hangs has leased is not in the buffer when that is drained.
    excuses += [
        (fault.ended, get["count"])
        for op, get in begun.items()
        for fault in _stops_of(history, get)
        for drained in drains
        if get["what"] == "get" and get["t"] < fault.ended and fault.began < drained < fault.ended
        if op not in ends or ends[op]["t"] > drained
    ]
    room = sum(count for _, count in excuses)
    for event in puts:
        for sample in set(event["ids"]) - set(taken):
            # A consumer died or hung with it in its hands, or a moment before it came.
            if room and any(event["t"] <= gone + CLOSE_TO_SECONDS for gone, _ in excuses):
                room -= 1
            else:
                yield f"sample {sample} was acknowledged by {event['op']} and never delivered"


def check_versions(history: History) -> Iterator[str]:
    """Weights never go back: a request that begins after an update was acknowledged sees it, or a later one."""
    ends = history.ends()
    acknowledged = [
        (ends[event["op"]]["t"], event["version"])
        for event in history.of("update")
        if ends.get(event["op"], {}).get("ok")
    ]
    begun = {event["op"]: event["t"] for event in history.of("begin")}
    for event in history.of("served"):
        least = max((version for t, version in acknowledged if t < begun[event["op"]]), default=0)
        if event["version"] < least:
            yield f"{event['op']} was answered by version {event['version']} after version {least} was set"


def check_deadlines(history: History) -> Iterator[str]:
    """Every wait returns within its deadline."""
    ends = history.ends()
    drivers = {driver.who: driver for driver in history.drivers}
    for event in history.of("begin"):
        driver = drivers.get(event["who"])
        end = ends.get(event["op"])
        if end is None and (event.get("in_worker") or driver is None or driver.was_killed or driver.is_stopped):
            continue
        until = end["t"] if end is not None else driver.ended
        took = until - event["t"] - _stopped(history, event, until)
        late = took > event["limit"] + GRACE_SECONDS
        if end is None and late:
            yield f"{event['op']} ({event['what']}, {event['limit']:g} s) had not returned after {took:.1f} s"
        elif late:
            yield f"{event['op']} ({event['what']}, {event['limit']:g} s) took {took:.1f} s"


def check_errors(history: History) -> Iterator[str]:
    """Every error is a RoostError that names who, or the user's own."""
    for event in history.of("end"):
        error = event.get("error")
        if error is None or "Oops" in error["bases"]:
            continue
        if "RoostError" not in error["bases"]:
            yield f"{event['op']} raised {error['type']}, which is no RoostError: {error['text'][:300]}"
        elif not _WHO.search(error["text"]):
            yield f"{event['op']} raised {error['type']}, which names nothing: {error['text'][:300]}"


def check_drivers(history: History) -> Iterator[str]:
    """A driver ends with its own exit code, and only when it wants to."""
    for driver in history.drivers:
        if driver.was_killed or driver.was_ended_by_ray:
            continue
        if driver.code is None:
            yield f"{driver.who} did not end"
        elif driver.code != 0:
            yield f"{driver.who} ended with {driver.code}"


def check_recovery(history: History) -> Iterator[str]:
    """A fault that does not end the cluster does not end a job: some seconds later it can launch again."""
    if any(FAULTS[fault.name].ends_cluster for fault in history.faults):
        return
    for event in history.of("proved"):
        since = event["t"] - max((fault.ended for fault in history.faults), default=0.0)
        if not event["ok"] and since > RECOVER_SECONDS:
            yield f"{event['who']} could not launch a group {since:.0f} s after the last fault"


def check_leftovers(history: History) -> Iterator[str]:
    """Nothing is left behind: neither outside, nor open in a driver that closed everything."""
    for kind, names in history.left.items():
        for name in names:
            yield f"{kind}: {name}"
    by_driver: dict[str, dict[str, Event]] = {}
    for event in history.of("resources"):
        by_driver.setdefault(event["who"], {})[event["when"]] = event
    for who, events in by_driver.items():
        if "opened" not in events or "closed" not in events:
            continue
        opened, closed = events["opened"], events["closed"]
        if closed["descriptors"] > opened["descriptors"] + MOST_DESCRIPTORS:
            yield f"{who} had {opened['descriptors']} descriptors open, and {closed['descriptors']} at its end"
        # A call of Ray's that needs a head which was killed never returns.
        has_head = not any(fault.name == "kill-gcs" for fault in history.faults)
        for thread in closed["threads"] if has_head else ():
            yield f"{who} still had the thread {thread} at its end"
        ports = opened.get("ports"), events.get("groups closed", {}).get("ports")
        if None not in ports and ports[1] > ports[0]:
            yield f"{who} had leased {ports[0]} ports, and {ports[1]} after it closed its groups"


INVARIANTS: Mapping[str, Callable[[History], Iterator[str]]] = {
    "no accelerator and no lock twice": check_exclusive,
    "right values": check_values,
    "no sample lost or doubled": check_samples,
    "weights never go back": check_versions,
    "every wait in time": check_deadlines,
    "every error names who": check_errors,
    "drivers live": check_drivers,
    "jobs recover": check_recovery,
    "nothing left": check_leftovers,
}


def check(history: History) -> list[Violation]:
    """Return every invariant that a history broke."""
    return [Violation(invariant=name, what=what) for name, find in INVARIANTS.items() for what in find(history)]


def _stops_of(history: History, event: Event) -> list[InjectedFault]:
    """The faults that stopped the process of an event itself."""
    return [fault for fault in history.faults if fault.name.startswith("stop") and fault.pid == event["pid"]]


def _stopped(history: History, begin: Event, ended: float) -> float:
    """How long the process of an operation was stopped itself while that lasted."""
    spans = [(max(begin["t"], fault.began), min(ended, fault.ended)) for fault in _stops_of(history, begin)]
    return sum(max(0.0, last - first) for first, last in spans)


def _death_of(history: History, get: Event) -> float | None:
    """When the process that waited in a get was killed; None if it lives."""
    deaths = [fault.began for fault in history.faults if fault.pid == get.get("pid") and fault.name.startswith("kill")]
    ends = [driver.ended for driver in history.drivers if driver.who == get["who"] and driver.was_killed]
    return min([*deaths, *ends], default=None)
