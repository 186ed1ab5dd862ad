"""Every line of the page on failures names the test that holds it, and that test exists; it lists every limit."""

from __future__ import annotations

import ast
import re
import runpy

import pytest

from docs.blocks import ROOT

PAGE = (ROOT / "docs" / "concepts" / "failures.md").read_text(encoding="utf-8")
HEADER = "| | what you see | noticed within | what survives | how to get it back | held by |"
PROMISES = (
    "| what is promised | while both processes live, whatever breaks between them "
    "| when the one that takes it or works on it dies | when the one that sent it or asked for it dies "
    "| who is told | held by |"
)
PARTS = PAGE[: PAGE.index("## Who waits how long")]
ROWS = [line for line in PARTS.splitlines() if line.startswith("| ") and line not in (HEADER, PROMISES)]
HELD = sorted({held for row in ROWS for held in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)})


def test_every_part_has_its_table():
    assert PARTS.count(HEADER) == len(re.findall("^## ", PARTS, re.M))
    assert PARTS.count(PROMISES) == 1
    assert all(row.count("|") == HEADER.count("|") for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_line_names_a_test(row):
    assert "`tests/" in row.split("|")[-2]


@pytest.mark.parametrize(("path", "name"), HELD)
def test_the_test_that_holds_a_line_exists(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_limit_is_there_with_its_seconds_and_who_waits():
    writer = runpy.run_path(str(ROOT / "docs" / "limits.py"))
    assert set(writer["TITLES"]) == {path.parent.name for path in (ROOT / "src" / "roost").glob("**/limits.py")}
    shown = PAGE.partition(writer["BEGIN"])[2].partition(writer["END"])[0]
    assert shown.strip() == writer["tables"](), "run: python docs/limits.py"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src" / "roost").glob("**/limits.py")), ids=lambda path: path.parent.name
)
def test_every_constant_of_limits_has_its_line(path):
    names = re.findall(r"^([A-Z]\w*) =", path.read_text(encoding="utf-8"), re.M)
    assert names
    table = PAGE.partition(f"`src/roost/{path.parent.name}/limits.py`:")[2].partition("###")[0]
    assert re.findall(r"^\| `(\w+)` \| [\d.,]+(?: to [\d.]+)? \| \S", table, re.M) == names
