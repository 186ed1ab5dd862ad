"""Random jobs and random faults: the invariants hold in every round.

`make soak` goes on for SOAK_MINUTES from a new seed, or from SOAK_SEED; each round has the next seed. SOAK_FAULTS names
the faults to choose from (names from `soak.schedule.FAULTS`), SOAK_ROUNDS how many rounds at most.
"""

from __future__ import annotations

import os
import random

import pytest

from soak.rounds import Summary, possible_faults, run_round
from soak.schedule import choose_faults

# The rounds of every `make test`: as many of the first seeds as the Makefile says.
SEEDS = range(1, 1 + int(os.environ.get("SOAK_TEST_ROUNDS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_of_random_faults_breaks_no_invariant(seed, tmp_path):
    faults, _ = possible_faults(choose_faults())
    run_round(seed, faults, tmp_path / "round", Summary())


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
