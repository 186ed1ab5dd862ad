"""From the times that runs recorded to a profile.

A run's times are a list of `CallTime`. A call of a step lasts as long as its slowest rank, and counts if no rank
failed. The first call of a run is left out where there are more: it warms up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from roost.config.profile import PROFILE_VERSION
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
    """How many devices a role had in a run, and each of its workers, and their kind where it is known."""

    devices: int
    per_worker: int
    kind: str = ""


def make_profile(
    runs: Iterable[tuple[Mapping[str, Placed], Iterable[CallTime]]],
    measured: Iterable[tuple[Mapping[str, str], Sequence[float]]] = (),
) -> dict[str, Any]:
    """Return the profile of some runs, as its file has it: for each, the devices of its roles, and its times.

    Kinds are named only where the runs had several. `measured` has the placement and the step times of each run.
    """
    samples: dict[str, dict[str, dict[int, list[float]]]] = {}
    units: dict[str, int] = {}
    for placed, times in runs:
        for call, found in _lasted(times).items():
            role = call.rpartition(".")[0]
            if role in placed:
                devices, unit, kind = placed[role]
                samples.setdefault(call, {}).setdefault(kind, {}).setdefault(devices, []).extend(found)
                if units.setdefault(call, unit) != unit:
                    message = f"the workers of {role} had {units[call]} devices in one run, and {unit} in another"
                    raise ConfigError(message, hint="make a profile of runs in which a worker has as many")
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
    steps = [{"placement": dict(placement), "step": _written(list(took))} for placement, took in measured if took]
    return {"version": PROFILE_VERSION, "calls": calls, **({"runs": steps} if steps else {})}


def step_times(times: Iterable[CallTime]) -> list[float]:
    """Return how long the steps of a run took: the time between the ends of the call that a step makes least often.

    The first step warms up, as do the first calls.
    """
    by_call = _rounds(times).values()
    ends = [max(one.end for one in round_) for round_ in min(by_call, key=len, default=[])]
    return [after - before for before, after in pairwise(ends)][1:]


def _lasted(times: Iterable[CallTime]) -> dict[str, list[float]]:
    """Return for each call how long its slowest rank took, time after time."""
    found = {}
    for call, rounds in _rounds(times).items():
        counted = [round_ for round_ in (rounds[1:] or rounds) if all(one.is_ok for one in round_)]
        if counted:
            found[call] = [max(one.seconds for one in round_) for round_ in counted]
    return found


def _rounds(times: Iterable[CallTime]) -> dict[str, list[tuple[CallTime, ...]]]:
    """Return the times of each call, all its ranks together, time after time."""
    ranks: dict[str, dict[str, list[CallTime]]] = {}
    for time in times:
        ranks.setdefault(time.call, {}).setdefault(time.rank, []).append(time)
    found = {}
    for call, by_rank in ranks.items():
        series = [sorted(own, key=lambda one: one.start) for own in by_rank.values()]
        found[call] = list(zip(*series, strict=False))
    return found


def _written(samples: list[float]) -> float | list[float]:
    rounded = [round(sample, _DIGITS) for sample in samples]
    if len(rounded) > _MOST_SAMPLES:
        # Spread evenly over all of them, these have the same distribution.
        ordered, each = sorted(rounded), len(rounded) / _MOST_SAMPLES
        rounded = [ordered[int((place + 0.5) * each)] for place in range(_MOST_SAMPLES)]
    return rounded[0] if len(rounded) == 1 else rounded
