"""The page on architecture names functions that exist, each once and in the order of the walk."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def walks() -> list[list[str]]:
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    sections = [re.findall(r"^\d+\. `(roost\.[\w.]+)`", part, re.MULTILINE) for part in text.split("\n## ")]
    return [found for found in sections if found]


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


def test_every_function_of_the_walks_exists_and_is_visited_once():
    assert [len(names) > 10 for names in walks()] == [True] * 3
    for names in walks():
        assert len(set(names)) == len(names)
        for name in names:
            found = find(name)
            assert callable(found) or isinstance(found, property), name
