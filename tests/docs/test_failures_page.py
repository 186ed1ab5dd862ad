"""Every line of the page on failures names the test that holds it, and that test exists."""

from __future__ import annotations

import ast
import re

import pytest

from docs.blocks import ROOT

PAGE = (ROOT / "docs" / "concepts" / "failures.md").read_text(encoding="utf-8")
HEADER = "| | what you see | noticed within | what survives | how to get it back | held by |"
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and line != HEADER]
HELD = sorted({held for row in ROWS for held in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)})


def test_every_part_has_its_table():
    assert PAGE.count(HEADER) == len(re.findall("^## ", PAGE, re.M)) - 1
    assert all(row.count("|") == HEADER.count("|") for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_line_names_a_test(row):
    assert "`tests/" in row.split("|")[-2]


@pytest.mark.parametrize(("path", "name"), HELD)
def test_the_test_that_holds_a_line_exists(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
