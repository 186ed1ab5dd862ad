"""From the times that runs recorded to a profile.

A run's times are a list of `CallTime`, whatever they were read from; `trace_times` reads a trace. A call of a step
lasts as long as its slowest rank. The first call of a run is left out where there are more: it warms up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from roost.config.profile import PROFILE_VERSION
from roost.errors import ConfigError

_DIGITS = 6


class CallTime(NamedTuple):
    """How long one rank took for one call."""

    call: str
    rank: str
    start: float
    seconds: float


class Placed(NamedTuple):
    """How many devices a role had in a run, and each of its workers."""

    devices: int
    per_worker: int


def trace_times(trace: Mapping[str, Any]) -> list[CallTime]:
    """Read the calls in a Chrome trace whose spans have the component as category; a span may be of several calls."""
    try:
        spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        return [
            CallTime(
                call=f"{span['cat']}.{span['name']}",
                rank=f"{span['pid']}/{span['tid']}",
                start=span["ts"] / 1e6,
                seconds=span["dur"] / 1e6 * span.get("args", {}).get("busy", 1) / span.get("args", {}).get("calls", 1),
            )
            for span in spans
        ]
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"this is not a trace of a run: {type(error).__name__}: {error}") from None


def make_profile(runs: Iterable[tuple[Mapping[str, Placed], Iterable[CallTime]]]) -> dict[str, Any]:
    """Return the profile of some runs, as its file has it: for each, the devices of its roles, and its times."""
    samples: dict[str, dict[int, list[float]]] = {}
    units: dict[str, int] = {}
    for placed, times in runs:
        for call, found in _lasted(times).items():
            role = call.rpartition(".")[0]
            if role in placed:
                samples.setdefault(call, {}).setdefault(placed[role].devices, []).extend(found)
                units[call] = placed[role].per_worker
    if not samples:
        raise ConfigError("no call of a component was recorded", hint="write the profile by hand")
    calls: dict[str, Any] = {}
    for call, by_count in sorted(samples.items()):
        seconds = {count: _written(found) for count, found in sorted(by_count.items())}
        calls[call] = {"seconds": seconds} | ({"devices_per_worker": units[call]} if units[call] > 1 else {})
    return {"version": PROFILE_VERSION, "calls": calls}


def _lasted(times: Iterable[CallTime]) -> dict[str, list[float]]:
    """Return for each call how long its slowest rank took, time after time."""
    ranks: dict[str, dict[str, list[CallTime]]] = {}
    for time in times:
        ranks.setdefault(time.call, {}).setdefault(time.rank, []).append(time)
    found = {}
    for call, by_rank in ranks.items():
        series = [[one.seconds for one in sorted(own, key=lambda one: one.start)] for own in by_rank.values()]
        rounds = [max(round_) for round_ in zip(*series, strict=False)]
        found[call] = rounds[1:] if len(rounds) > 1 else rounds
    return found


def _written(samples: list[float]) -> float | list[float]:
    rounded = [round(sample, _DIGITS) for sample in samples]
    return rounded[0] if len(rounded) == 1 else rounded
