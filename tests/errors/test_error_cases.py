"""Broken configs, each with the exact message that the user gets, in a file next to it.

A case is `cases/<name>.yaml` (or `.json`) with `<name>.txt`. It is planned on 2x8, or on what `<name>.cluster` says:
a shorthand, or the path of an inventory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from roost import ConfigError, PlacementError, Topology, make_plan

CASES = Path(__file__).parent / "cases"
NAMES = sorted(path.name for path in CASES.iterdir() if path.suffix in (".yaml", ".json"))


def test_there_are_at_least_60_cases():
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_config_is_explained(name, golden, monkeypatch):
    monkeypatch.chdir(CASES)
    path = Path(name)
    with pytest.raises((ConfigError, PlacementError)) as caught:
        make_plan(path, topology(path))
    golden(CASES / f"{path.stem}.txt", f"{caught.value}\n")


def topology(path: Path) -> Topology:
    file = path.with_suffix(".cluster")
    said = file.read_text().strip() if file.exists() else "2x8"
    return Topology.from_file(said) if said.endswith((".yml", ".yaml", ".json")) else Topology.from_shorthand(said)
