"""The ledger against a checker that replays workers one by one; `make soak-search` draws a million jobs."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace

import pytest

import fit_check
from roost import Topology, make_plan
from roost.config.document import PlainValue
from roost.config.memory import read_memory
from roost.config.reading import Notes
from roost.placement.ledger import make_ledger

pytestmark = pytest.mark.heavy

JOBS = int(os.environ.get("FIT_JOBS", "2000"))
SEED = int(os.environ.get("FIT_SEED", "0"))


def with_hint(config, hint):
    """Return the config with what a hint says, if it is about one size or about how many start at once."""
    if found := re.fullmatch(r"start (\d+) of (\w) at a time on a node \(start_at_once: \1, .*\)", hint):
        changes = {found[2]: {"start_at_once": int(found[1])}}
    elif found := re.fullmatch(r"(\w) start_host at most ([\d.]+)GiB", hint):
        changes = {found[1]: {"start_host": int(float(found[2]) * 2**30)}}
    elif found := re.fullmatch(r"(\w) (\w)( host| pinned)? at most ([\d.]+)GiB", hint):
        states = next(dict(role.states) for role in config.roles if role.name == found[1])
        size = {(found[3] or "device").strip(): int(float(found[4]) * 2**30)}
        changes = {found[1]: {"states": {**states, found[2]: states[found[2]]._replace(**size)}}}
    else:
        assert not hint or hint.startswith("no single size") or "MiB" in hint
        return None
    return replace(config, roles=tuple(replace(role, **changes.get(role.name, {})) for role in config.roles))


@pytest.mark.parametrize("part", range(4))
def test_a_plan_that_is_accepted_never_overflows_and_one_that_is_refused_does(part):
    seen = {"fits": 0, "start": 0, "phase": 0, "change": 0, "hints": 0}
    for number in range(SEED + part, SEED + JOBS, 4):
        rng = random.Random(number)  # noqa: S311 - drawn again from its number
        job, inventory = fit_check.draw(rng)
        plan = make_plan(job, Topology.from_dict(inventory))
        notes = Notes()
        config = read_memory(PlainValue(job["memory"]), PlainValue(job["phases"]), plan.names, notes)
        notes.raise_if_any()
        ledger = make_ledger(plan, config)
        replay = fit_check.Replay(job, plan)
        count = len(replay.names)
        phases = [bool(replay.over(replay.in_phase(at))) for at in range(count)]
        start = bool(replay.start(rng) - replay.over(replay.in_phase(0)))
        between = [at for at in range(count if count > 1 else 0) if not phases[at] and not phases[(at + 1) % count]]
        changes = {at for at in between if replay.no_order(at)}

        found = {"start": 0, "phase": 0, "change": 0}
        for over in ledger.overflows:
            moment = over.moment
            places = set(over.seats.places)
            if moment.is_start:
                found["start"] += 1
                assert places <= replay.start(rng), number
            elif moment.switching:
                found["change"] += 1
                assert moment.phase in changes, number
                assert places <= replay.moment(moment.phase, moment.switched, moment.switching), number
                assert all(not replay.moment(moment.phase, moment.switched[:at], role)
                           for at, role in enumerate(moment.switched)), number  # fmt: skip
            else:
                found["phase"] += 1
                assert places <= replay.over(replay.in_phase(moment.phase)), number
        assert found == {"start": start, "phase": sum(phases), "change": len(changes)}, number
        for change in ledger.changes:
            at = replay.names.index(change.before.name)
            assert not replay.change(at, change.order, None), number
            for _ in range(3):
                assert not replay.change(at, change.order, rng), number
        assert len(ledger.changes) == len(between) - len(changes), number
        for kind, times in found.items():
            seen[kind] += bool(times)
        seen["fits"] += not ledger.overflows
        for problem, over in zip(ledger.problems, ledger.overflows, strict=True):
            hinted = with_hint(config, problem.hint)
            again = make_ledger(plan, hinted).overflows if hinted else ()
            assert over.moment.words not in [one.moment.words for one in again], (number, problem.hint)
            seen["hints"] += hinted is not None
    assert all(count > 3 for count in seen.values()), seen
