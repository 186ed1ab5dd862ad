"""The docs as a site: every page is in its contents, every link leads somewhere, every public name is described.

All but the last tests need nothing but Python. The last builds the site, where mkdocs is installed.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from docs.blocks import PAGES, ROOT

DOCS = ROOT / "docs"
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 - strings only
_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_SPAN = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
_LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


def names_in(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from names_in(value) if isinstance(value, list) else [value]


def slugs_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; of two that are alike only the first has this one."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    text = _SPAN.sub("``", _FENCED.sub("", page.read_text(encoding="utf-8")))
    return [link for link in _LINK.findall(text) if not link.startswith(("https://", "http://"))]


def test_every_page_is_in_the_table_of_contents_once():
    assert Counter(names_in(CONFIG["nav"])) == Counter(
        {page.relative_to(DOCS).as_posix(): 1 for page in DOCS.rglob("*.md")}
    )


def test_the_table_of_contents_has_the_four_drawers():
    drawers = [name for entry in CONFIG["nav"] for name in entry]
    assert drawers == ["Home", "Getting started", "Guides", "Concepts", "Reference"]


def test_the_first_page_leads_to_every_other():
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links_of(DOCS / "index.md")}
    assert {page for page in DOCS.rglob("*.md") if page.name != "index.md"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        if DOCS in page.parents:
            assert DOCS in target.parents, f"{link}: it leads out of docs/, which the site does not have"
        if anchor:
            assert anchor in slugs_of(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("module", ["roost", "roost.rl", "roost.rl.engines", "roost.weights", "roost.testing"])
def test_every_public_name_is_described_once(module):
    described: Counter[str] = Counter()
    for page in (DOCS / "reference" / "api").glob("*.md"):
        described.update(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page.read_text(encoding="utf-8"), re.M))
    assert described == Counter(importlib.import_module(module).__all__)


@pytest.mark.skipif(
    not all(find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers")), reason="needs make docs"
)
@pytest.mark.heavy
@pytest.mark.shown
def test_the_site_is_built_without_a_warning_and_needs_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        loaded = _LOADED.findall(page.read_text(encoding="utf-8"))
        assert not loaded, f"{page.name} loads {loaded}"


def test_the_site_leaves_out_the_list_of_a_pages_own_headings():
    spec = spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = "# Title\n\nText.\n\n- [One](#one)\n- [Two](#two)\n\n## One\n\n- [Two](#two)\n\n## Two\n"
    assert hooks.on_page_markdown(page, page=None) == "# Title\n\nText.\n\n\n## One\n\n- [Two](#two)\n\n## Two\n"
    for path in DOCS.rglob("*.md"):
        top = hooks.on_page_markdown(path.read_text(encoding="utf-8")).partition("\n## ")[0]
        assert "\n- [" not in top or "](#" not in top, path.name
