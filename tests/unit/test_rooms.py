"""Every test has a room, so that `make test ROOM=…` leaves none out without a word."""

from __future__ import annotations

import doctest
from pathlib import Path

import rooms
from unit.test_house_rules import LAYERS, ROOT


def test_every_file_of_tests_has_a_room_that_is_there():
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert {rooms.room_of(file) for file in files} <= set(LAYERS)
    assert all((ROOT / place).exists() for place in rooms.ELSEWHERE), "the table names what is there"
    assert all(Path(file).parts[1] in ("unit", "property") or rooms.room_of(file) for file in files)
    assert not doctest.testmod(rooms).failed


def test_what_stands_on_a_room_is_all_that_imports_it():
    found = {room for room in LAYERS if rooms.stands_on(room, "comm", LAYERS)}
    assert found >= {"comm", "weights", "rl", "testing", "demo", "cli"}
    assert not found & {"runtime", "placement", "watch", "doctor", "search"}
