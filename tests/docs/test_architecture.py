"""The page on architecture names functions that exist, each once and in the order of the walk."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def walk() -> list[str]:
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\d+\. `(roost\.[\w.]+)`", text, re.MULTILINE)


def find(name: str) -> object:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_every_function_of_the_walk_exists_and_is_visited_once():
    names = walk()
    assert len(names) > 20
    assert len(set(names)) == len(names)
    for name in names:
        assert callable(find(name)), name
