"""From the times that runs recorded to a profile.

A run's times are a list of `CallTime`. A call of a step lasts as long as its slowest rank works, and counts if no rank
failed. The first call of a run is left out where there are more: it warms up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from roost.config.flow import role_of
from roost.config.profile import PROFILE_VERSION
from roost.config.ranks import format_ranks
from roost.errors import ConfigError

_DIGITS = 6
_MOST_SAMPLES = 100


class CallTime(NamedTuple):
    """How long one rank took for one call."""

    call: str
    rank: str
    start: float
    seconds: float
    """Without what it waited for others."""
    is_ok: bool = True
    end: float = 0.0


class Placed(NamedTuple):
    """How many devices a role had in a run, and each of its workers, their kind where it is known, and which."""

    devices: int
    per_worker: int
    kind: str = ""
    ranks: tuple[int, ...] = ()


class RunTimes(NamedTuple):
    """The record of a run: where its roles were, its calls, and which of them are in its flow, if it has one."""

    placed: Mapping[str, Placed]
    times: Iterable[CallTime]
    flow: Sequence[str] = ()
    steps: Sequence[float] = ()
    """How long its steps took, if its metrics say so; else its calls do."""


def make_profile(runs: Iterable[RunTimes]) -> dict[str, Any]:
    """Return the profile of some runs, as its file has it: for each, the devices of its roles, and its times.

    Kinds are named only where the runs had several.
    """
    samples: dict[str, dict[str, dict[int, list[float]]]] = {}
    units: dict[str, int] = {}
    steps = []
    for placed, times, flow, took in runs:
        rounds = _rounds(times)
        in_step = _calls_in_step(rounds, flow)
        for call, own in rounds.items():
            role = role_of(call)
            if role not in placed or (flow and call not in flow):
                continue
            devices, unit, kind, _ = placed[role]
            found = _lasted(own, in_step.get(call, 1) if flow else 1)
            if found:
                samples.setdefault(call, {}).setdefault(kind, {}).setdefault(devices, []).extend(found)
            if found and units.setdefault(call, unit) != unit:
                message = f"the workers of {role} had {units[call]} devices in one run, and {unit} in another"
                raise ConfigError(message, hint="make a profile of runs in which a worker has as many")
        steps += _steps(placed, rounds, in_step, took)
    if not samples:
        raise ConfigError("no call of a component was recorded", hint="write the profile by hand")
    has_kinds = len({kind for by_kind in samples.values() for kind, by_count in by_kind.items() if any(by_count)}) > 1
    calls: dict[str, Any] = {}
    for call, by_kind in sorted(samples.items()):
        written = {
            kind: {count: _written(found) for count, found in sorted(by_count.items())}
            for kind, by_count in sorted(by_kind.items())
        }
        first = next(iter(written.values()))
        calls[call] = {"kinds": written} if has_kinds and any(first) else {"seconds": first}
        calls[call] |= {"devices_per_worker": units[call]} if units[call] > 1 else {}
    for step in steps if not has_kinds else ():
        del step["kinds"]
    return {"version": PROFILE_VERSION, "calls": calls} | ({"runs": steps} if steps else {})


def _rounds(times: Iterable[CallTime]) -> dict[str, list[tuple[CallTime, ...]]]:
    """Return for each call what all its ranks took, time after time."""
    ranks: dict[str, dict[str, list[CallTime]]] = {}
    for time in times:
        ranks.setdefault(time.call, {}).setdefault(time.rank, []).append(time)
    return {
        call: list(zip(*(sorted(own, key=lambda one: one.start) for own in by_rank.values()), strict=False))
        for call, by_rank in ranks.items()
    }


def _lasted(rounds: Sequence[tuple[CallTime, ...]], in_step: int) -> list[float]:
    """Return how long the slowest rank worked in each step, in which there are so many of these calls."""
    steps = [rounds[at : at + in_step] for at in range(0, len(rounds), in_step)]
    counted = [step for step in (steps[1:] or steps) if all(one.is_ok for round_ in step for one in round_)]
    return [sum(max(one.seconds for one in round_) for round_ in step) for step in counted]


def _calls_in_step(rounds: Mapping[str, Sequence[tuple[CallTime, ...]]], flow: Sequence[str]) -> dict[str, int]:
    """Return how often each call comes in a step; calls that come less often than steps are left out.

    The call of the flow that comes least often comes once in a step; without a flow, the one that took longest does.
    """
    known = [call for call in flow if call in rounds]
    took = {call: sum(max(one.seconds for one in round_) for round_ in own) for call, own in rounds.items()}
    if not took:
        return {}
    first = min(known, key=lambda call: len(rounds[call])) if known else max(took, key=lambda call: took[call])
    steps = len(rounds[first])
    # A run may end in the middle of a step.
    return {call: max(1, round(len(own) / steps)) for call, own in rounds.items() if len(own) >= steps - 1}


def _steps(
    placed: Mapping[str, Placed],
    rounds: Mapping[str, Sequence[tuple[CallTime, ...]]],
    in_step: Mapping[str, int],
    took: Sequence[float],
) -> list[dict[str, Any]]:
    """Return how long the steps of a run took, and when its calls begin and end; nothing where there were too few."""
    begins, ends = {}, {}
    for call, count in in_step.items():
        own = rounds[call]
        groups = [own[at : at + count] for at in range(count, len(own), count)]
        begins[call] = [min(one.start for one in group[0]) for group in groups]
        ends[call] = [max(one.end for one in group[-1]) for group in groups]
    if not begins or min(map(len, begins.values())) < 2:
        return []
    _, reference = min((len(own), call) for call, own in begins.items())
    first = begins[reference]
    spans = {
        call: [median(at - zero for at, zero in zip(own, first, strict=False)) for own in (begins[call], ends[call])]
        for call in sorted(begins, key=lambda call: begins[call])
    }
    zero = min(begin for begin, _ in spans.values())
    devices = {role: where for role, where in placed.items() if where.ranks}
    return [
        {
            "placement": {role: format_ranks(where.ranks) for role, where in devices.items()},
            "kinds": {role: where.kind for role, where in devices.items()},
            "step": _written(list(took) or [after - before for before, after in pairwise(ends[reference])]),
            "calls": {
                call: {"begins": round(begin - zero, _DIGITS), "ends": round(end - zero, _DIGITS)}
                for call, (begin, end) in spans.items()
            },
        }
    ]


def _written(samples: list[float]) -> float | list[float]:
    rounded = [round(sample, _DIGITS) for sample in samples]
    if len(rounded) > _MOST_SAMPLES:
        # Spread evenly over all of them, these have the same distribution.
        ordered, each = sorted(rounded), len(rounded) / _MOST_SAMPLES
        rounded = [ordered[int((place + 0.5) * each)] for place in range(_MOST_SAMPLES)]
    return rounded[0] if len(rounded) == 1 else rounded
