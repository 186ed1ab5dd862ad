"""Every claim that compares Roost with other systems names a test that proves it, and that test exists."""

from __future__ import annotations

import ast
import re

import pytest

from docs.blocks import ROOT

PAGE = (ROOT / "docs" / "concepts" / "beside-others.md").read_text(encoding="utf-8")
HELD = PAGE.partition("## What holds our column")[2]
CLAIMS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", HELD)


def test_every_line_of_our_column_is_held_by_something():
    rows = [line.split("|")[2].strip() for line in HELD.splitlines() if line.startswith("| ")]
    assert len(rows) >= 10
    assert all("`tests/" in held or "benchmarks.md" in held for held in rows[1:])


@pytest.mark.parametrize(("path", "name"), CLAIMS)
def test_what_holds_a_claim_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert tests
    assert not name or name in tests


def test_the_readme_has_the_same_rows_as_the_long_form():
    def rows(text):
        table = text[text.index("| | Roost |") :].partition("\n\n")[0]
        return [line.split("|")[1].strip() for line in table.splitlines()[2:]]

    assert rows((ROOT / "README.md").read_text(encoding="utf-8")) == rows(PAGE)
