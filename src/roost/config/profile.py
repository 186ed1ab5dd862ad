"""A profile: how long the calls of a step take with how many devices, for `roost search`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path

from roost.config.document import Value
from roost.config.fields import Field, Table
from roost.config.flow import role_of
from roost.config.reading import Notes, describe, read_fields, read_list
from roost.config.values import MEMORY, NODE_RANKS, TEXTS, Kind, Schema, by_name, items, typed, whole
from roost.config.yaml_file import as_document
from roost.text import join_words, shorten

PROFILE_VERSION = 1
NANOSECONDS = 10**9
_MOST_SECONDS = 10**7
_NO_TIMES = "write seconds by device count: {8: 120.0}"
_P90 = 1.2815515655446004
"""How many standard deviations the 90th percentile of a normal distribution is above its median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a call takes: its median in nanoseconds, and what is known of its distribution."""

    median: int
    samples: tuple[int, ...] = ()
    p90: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProfile:
    """The measurements of one call: its times by device count, for each kind of device."""

    name: str
    timings: Mapping[str, Mapping[int, Timing]]
    """The kind is empty if the profile does not name it."""
    devices_per_worker: int | None = None
    memory: int | None = None
    """The bytes that it needs on each device."""
    key: Value = field(repr=False, compare=False)
    places: Mapping[int, Value] = field(default_factory=dict, repr=False, compare=False)
    """Where each count is written first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchProfile:
    """How many nanoseconds a role takes to give its devices to another role, and to take them back."""

    wake: int = 0
    sleep: int = 0
    key: Value | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run whose calls are in the profile: where its roles sat, and how long its steps took."""

    placement: Mapping[str, tuple[int, ...]]
    """The hardware ranks of each role, counted over all accelerators."""
    step: Timing
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each role's devices, where the profile has several."""
    calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """When each call begins and ends, from the first one of its step on; also of calls that are not in the flow."""
    value: Value = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A whole profile."""

    calls: Mapping[str, CallProfile]
    switches: Mapping[str, SwitchProfile]
    weights: int
    """The nanoseconds of one weight update."""
    runs: tuple[MeasuredRun, ...] = ()
    value: Value = field(repr=False, compare=False)


def _read_seconds(value: Value, notes: Notes, what: str) -> int | None:
    """Read seconds as whole nanoseconds, so that sums of them are exact."""
    if value.broken is not None:
        notes.take(value.broken)
        return None
    text = str(value.scalar).strip() if value.kind == "scalar" and not isinstance(value.scalar, bool) else ""
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        notes.config(value, f"{what} must be a number of seconds, not {describe(value)}")
        return None
    if not 0 <= number <= _MOST_SECONDS:
        hint = "a measured time is 0 or more" if number < 0 else f"it may be at most {_MOST_SECONDS}"
        notes.config(value, f"{what} is {shorten(text, 24)} seconds", hint=hint)
        return None
    return int((number * NANOSECONDS).to_integral_value())


def _read_timing(value: Value, notes: Notes, what: str) -> Timing | None:
    if value.kind == "list":
        samples = [_read_seconds(item, notes, what) for item in read_list(value, notes, what)]
        known = tuple(sample for sample in samples if sample is not None)
        if not samples:
            notes.config(value, f"{what} is an empty list", hint="write measured seconds")
        return Timing(median=round(statistics.median(known)), samples=known) if known else None
    if value.kind == "mapping":
        section = SPREAD_FIELDS.read(value, notes, what)
        median, p90 = section.read("p50"), section.read("p90")
        if median is None or p90 is None:
            return None
        if not 0 < median <= p90:
            notes.config(section.value("p90"), f"{what}: p90 is at least p50, which is more than 0")
            return None
        return Timing(median=median, p90=p90)
    median = _read_seconds(value, notes, what)
    return None if median is None else Timing(median=median)


def _timing_schema() -> Schema:
    number = SECONDS.schema()
    fields = SPREAD_FIELDS.schema()
    return {
        **number,
        **{key: fields[key] for key in ("properties", "additionalProperties", "required")},
        "type": ["number", "string", "array", "object"],
        "items": number,
        "minItems": 1,
    }


SECONDS = Kind(_read_seconds, lambda: typed("number", "string", minimum=0, maximum=_MOST_SECONDS))
SPREAD_FIELDS = Table(
    "The distribution of a time.",
    Field("p50", SECONDS, "The median, which the search uses.", required=True),
    Field("p90", SECONDS, "What nine of ten stay below.", required=True),
)
TIMING = Kind(_read_timing, _timing_schema)
BY_COUNT = Kind(read_fields, lambda: typed("object", "string", additionalProperties=TIMING.schema(), minProperties=1))
BY_KIND = Kind(read_fields, lambda: typed("object", "string", additionalProperties=BY_COUNT.schema(), minProperties=1))
CALL_FIELDS = Table(
    "What is measured of one call.",
    Field(
        "seconds",
        BY_COUNT,
        "Seconds by device count: a number, a list of samples, or p50 and p90. The count 0 takes no devices.",
        examples=({"8": 120.0, "16": 61.0},),
    ),
    Field(
        "kinds",
        BY_KIND,
        "In place of `seconds`, where the cluster has several kinds of device: for each kind, seconds by device count.",
        examples=({"H100": {"8": 120.0}, "4090": {"8": 290.0}},),
    ),
    Field("devices_per_worker", whole(1), "How many devices a worker has, all on one node.", examples=(4,)),
    Field("memory", MEMORY, "The memory that it needs on each device."),
)
SWITCH_FIELDS = Table(
    "What it costs a role to share its devices with others.",
    Field("wake", SECONDS, "Seconds until it can use its devices again."),
    Field("sleep", SECONDS, "Seconds until others can use its devices."),
)
UPDATE_FIELDS = Table("The weight update.", Field("seconds", SECONDS, "How long one takes.", required=True))
SPAN_FIELDS = Table(
    "When a call begins and ends, in seconds from the first call of its step on.",
    Field("begins", SECONDS, "When the first of its ranks begins.", required=True),
    Field("ends", SECONDS, "When the last of its ranks ends.", required=True),
)
RUN_FIELDS = Table(
    "A run whose calls were measured.",
    Field(
        "placement",
        Kind(read_fields, lambda: typed("object", "string", additionalProperties=NODE_RANKS.schema())),
        "The hardware ranks of its roles, counted over all accelerators.",
        required=True,
        examples=({"actor": "0-3", "rollout": "4-7"},),
    ),
    Field("step", TIMING, "How long its steps took: a number, a list of samples, or p50 and p90.", required=True),
    Field("kinds", TEXTS, "The kind of each role's devices, where the profile has several."),
    Field(
        "calls",
        Kind(read_fields, lambda: typed("object", "string", additionalProperties=SPAN_FIELDS.schema())),
        "When each call begins and ends in a step.",
    ),
)
PROFILE_FIELDS = Table(
    "How long the calls of a step take.",
    Field("version", whole(PROFILE_VERSION, PROFILE_VERSION), "The version of this format.", required=True),
    Field("calls", by_name(CALL_FIELDS, least=1), "The calls, as component.method.", required=True),
    Field("switch", by_name(SWITCH_FIELDS), "What it costs each role to share its devices."),
    Field("weights", UPDATE_FIELDS, "The weight update."),
    Field("runs", items(RUN_FIELDS), "The runs that the times are of, to compare the search with."),
    naming="{name}",
)


def spread_of(timing: Timing) -> float:
    """Return the standard deviation of the logarithm of a time that is given by its median and p90."""
    return math.log(timing.p90 / timing.median) / _P90 if timing.p90 else 0.0


def read_profile(config: object) -> Profile:
    """Read a profile from a file, a dict or a document; raise one error with all mistakes."""
    value = as_document(Path(config) if isinstance(config, str) else config)
    notes = Notes()
    section = PROFILE_FIELDS.read(value, notes, "a profile")
    section.read("version")
    calls = {}
    for name, pair in section.read("calls", {}).items():
        call = _read_call(name, pair.key, pair.value, notes)
        if call is not None:
            calls[name] = call
    if "calls" in section and section.value("calls").kind == "mapping" and not section.value("calls").keys():
        notes.config(section.value("calls"), "the profile names no call")
    switches = {}
    for name, pair in section.read("switch", {}).items():
        costs = SWITCH_FIELDS.read(pair.value, notes, f"switch: {name}")
        switches[name] = SwitchProfile(wake=costs.read("wake", 0), sleep=costs.read("sleep", 0), key=pair.key)
    update = (
        UPDATE_FIELDS.read(section.value("weights"), notes, "weights").read("seconds", 0) if "weights" in section else 0
    )
    runs = []
    for place, item in enumerate(section.read("runs", ())):
        run = RUN_FIELDS.read(item, notes, f"runs: {place}")
        given, step, spans = run.read("placement"), run.read("step"), {}
        for name, pair in run.read("calls", {}).items():
            span = SPAN_FIELDS.read(pair.value, notes, f"runs: {place}: {name}")
            spans[name] = span.read("begins", 0), span.read("ends", 0)
        if given is not None and step is not None:
            placement = {
                role: NODE_RANKS.read(pair.value, notes, f"runs: {place}: {role}") or () for role, pair in given.items()
            }
            kinds = run.read("kinds", {})
            runs.append(MeasuredRun(placement=placement, step=step, kinds=kinds, calls=spans, value=item))
    notes.raise_if_any()
    return Profile(calls=calls, switches=switches, weights=update, runs=tuple(runs), value=value)


def _read_call(name: str, key: Value, value: Value, notes: Notes) -> CallProfile | None:
    noted = len(notes.problems)
    if not role_of(name):
        notes.config(key, f"{shorten(name)!r} is not a call", hint="write component.method: rollout.generate")
    section = CALL_FIELDS.read(value, notes, name)
    unit = section.read("devices_per_worker")
    places: dict[int, Value] = {}
    timings: dict[str, dict[int, Timing]] = {}
    if "seconds" in section:
        timings[""] = _read_counts(name, section.value("seconds"), unit, places, notes)
    for kind, pair in section.read("kinds", {}).items():
        what = f"{name} on {shorten(kind)}"
        timings[kind] = _read_counts(what, pair.value, unit, places, notes)
        if 0 in timings[kind]:
            hint = "a call that takes no devices has no kind: write seconds: {0: 3.0}"
            notes.config(places[0], f"{what} has times for 0 devices", hint=hint)
    if "seconds" in section and "kinds" in section:
        notes.config(key, f"{name} has both seconds and kinds", hint="if its times are of several kinds, write kinds")
    elif not timings and len(notes.problems) == noted:
        notes.config(value, f"{name} has no times", hint=_NO_TIMES)
    if len(notes.problems) > noted:
        return None
    return CallProfile(
        name=name, timings=timings, devices_per_worker=unit, memory=section.read("memory"), key=key, places=places
    )


def _read_counts(
    what: str, value: Value, unit: int | None, places: dict[int, Value], notes: Notes
) -> dict[int, Timing]:
    """Read seconds by device count, the smallest first, and note in `places` where each count is written."""
    noted = len(notes.problems)
    timings: dict[int, Timing] = {}
    for text, pair in read_fields(value, notes, f"{what}: seconds").items():
        count = whole().read(pair.key, notes, f"{what}: a device count")
        timing = _read_timing(pair.value, notes, f"{what} with {text} devices")
        if count is not None and unit and count % unit:
            hint = f"a worker has {unit} devices, so write a multiple of {unit}"
            notes.config(pair.key, f"{what}: {count} devices do not make whole workers", hint=hint)
        if count in timings:
            notes.config(pair.key, f"{what}: {count} devices are there twice")
        elif count is not None and timing is not None:
            timings[count] = timing
            places.setdefault(count, pair.key)
    if 0 in timings and len(timings) > 1:
        others = join_words([str(count) for count in timings if count])
        notes.config(places[0], f"{what} has times for 0 devices and for {others}", hint="0 says that it takes none")
    if not timings and len(notes.problems) == noted:
        notes.config(value, f"{what} has no times", hint=_NO_TIMES)
    return dict(sorted(timings.items()))
