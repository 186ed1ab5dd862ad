"""What happened in a round, and the invariants that every history must keep. Plain code: no Ray, no clock, no files.

An event is a dict, as the processes of a round write it, with `t`, the time, and `e`, its kind:

- `begin`: an operation `op` of driver `who` begins; `what` it is, and the seconds that it may take, `limit`
- `end`: it returned, `ok` or with `error` (`type`, `bases`, `text`)
- `wrong`: an operation returned another value than it had to
- `clash`: two jobs had the same accelerator, or two callers were inside the lock
- `put`, `get`: samples that were put in (with the operation) and taken out
- `update`, `served`: a version of the weights that was set, and one that answered a request
- `proved`: after its work a driver could launch and call a new group, or not (`ok`)
- `leak`: a thief at the address of an engine heard something (`what`) that is not for strangers
- `raised`: a worker is about to raise an exception with a `name`; `hidden`: a driver that has not asked for it waits
  for something else, in the operation
- `feeding`, `fed`, `taken`: items that were to go into a pipeline, that were acknowledged, and that came out;
  `dying`: a worker between its channels ends; `emptied`: nothing is in it any more
- `page`: for a while a reader with another clock saw a run differently (`text`)
- `resources`: what a driver had open at a moment, `when` it had just begun and when it had closed everything
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
LOG_SECONDS = 2.0
"""A worker that is killed sooner after it raised an exception need not have written it down."""
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
    | \bchannel\ '[\w-]+'
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
    kept: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Where the name of an exception is in the run folders: in a `log`, in `events`."""

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


def check_strangers(history: History) -> Iterator[str]:
    """Who takes the port of an engine that died is not believed, and hears no secret and no request."""
    for event in history.of("leak"):
        yield f"a thief at {event['where']} heard of {event['what']}"


def check_exceptions(history: History) -> Iterator[str]:
    """What a worker raises is in its log and in the events of its run, and a driver that then fails is told of it."""
    faults, ends = history.faults, history.ends()
    raised = {event["name"]: event for event in history.of("raised")}
    has_full_disk = any(fault.name == "fill-disk" for fault in faults)

    def may_end_workers(fault: InjectedFault, when: float) -> bool:
        """Whether a fault may have ended workers of others at a time, or just after it."""
        is_wide = FAULTS[fault.name].target in ("driver", "raylet", "head raylet", "gcs", "node", "head")
        return is_wide and fault.began - LOG_SECONDS < when < fault.ended + RECOVER_SECONDS

    for name, event in raised.items():
        when = event["t"]
        own = any(fault.pid == event["pid"] and 0 <= fault.began - when < LOG_SECONDS for fault in faults)
        if not (has_full_disk or own or any(may_end_workers(fault, when) for fault in faults)):
            for where in sorted({"log", "events"} - set(history.kept.get(name, ()))):
                yield f"{event['address']} raised {name}, which is not in the {where}"
    for event in history.of("hidden"):
        end, first = ends.get(event["op"]), raised.get(event["name"])
        if end is None or end.get("error") is None or first is None:
            continue
        began, ended = first["t"], end["t"]
        # What ends the wait in another way, or disturbs the way from the worker to the driver.
        disturbed = any(fault.began < ended and fault.ended > began - CLOSE_TO_SECONDS for fault in faults)
        disturbed = disturbed or any(may_end_workers(fault, began) for fault in faults)
        if not disturbed and event["name"] not in end["error"]["text"]:
            yield f"{event['op']} failed and did not say that {first['address']} had raised {event['name']}"


def check_pipelines(history: History) -> Iterator[str]:
    """What was put into a pipeline comes out; twice only what a worker had that died."""
    taken = Counter((event["pipeline"], item) for event in history.of("taken") for item in event["ids"])
    begun = {(event["pipeline"], item) for event in history.of("feeding") for item in event["ids"]}
    emptied = {event["pipeline"] for event in history.of("emptied")}
    deaths = Counter(event["pipeline"] for event in history.of("dying"))
    # Any of these workers may be killed, and a node that is cut off may lose them.
    killed = sum(fault.name in ("kill-worker", "kill-raylet", "stop-raylet", "cut-node") for fault in history.faults)
    for pipeline, item in taken.keys() - begun:
        yield f"{item} came out of {pipeline} and never went in"
    again = Counter({pipeline: 0 for pipeline, _ in taken})
    for (pipeline, _), count in taken.items():
        again[pipeline] += count - 1
    for pipeline, count in again.items():
        if count > deaths[pipeline] + killed:
            yield f"{count} items came out of {pipeline} again, and {deaths[pipeline]} workers had died with one"
    for event in history.of("fed"):
        for item in event["ids"]:
            if event["pipeline"] in emptied and (event["pipeline"], item) not in taken:
                yield f"{item} was acknowledged by {event['pipeline']} and never came out"


def check_pages(history: History) -> Iterator[str]:
    """Whatever the clock of its reader, the page shows the same."""
    for event in history.of("page"):
        yield event["text"]


INVARIANTS: Mapping[str, Callable[[History], Iterator[str]]] = {
    "no accelerator and no lock twice": check_exclusive,
    "right values": check_values,
    "no sample lost or doubled": check_samples,
    "no item of a pipeline lost or doubled": check_pipelines,
    "weights never go back": check_versions,
    "every wait in time": check_deadlines,
    "every error names who": check_errors,
    "no exception vanishes": check_exceptions,
    "no stranger gets in": check_strangers,
    "every page is right": check_pages,
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
