"""Random jobs and random faults: the invariants hold in every round.

Only `make soak` runs this: for SOAK_MINUTES from a new seed, or from SOAK_SEED; each round has the next seed.
SOAK_FAULTS names the faults to choose from (names from `soak.schedule.FAULTS`), SOAK_ROUNDS how many rounds at most.
The schedule and the invariants are plain code, with tests in `tests/unit/test_soak_parts.py`.
"""

from __future__ import annotations

import os
import random

import pytest

from soak.rounds import Summary, possible_faults, run_round
from soak.schedule import choose_faults


@pytest.mark.soak(weight=4)
def test_random_faults_for_minutes_break_no_invariant(rounds, tmp_path):
    faults, impossible = possible_faults(choose_faults(os.environ.get("SOAK_FAULTS", "")))
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"SOAK_SEED={seed} make soak repeats these rounds; faults: {', '.join(faults)}")
    for name, why in impossible.items():
        print(f"  not {name}: {why}")
    summary = Summary()
    try:
        for number in rounds():
            run_round(seed + number, faults, tmp_path / f"round-{number}", summary)
    finally:
        print(summary)
