"""Every YAML, shell and Python block in the README and in docs/ is run, page by page, in the order of the page.

- A YAML block whose first line is `# file: NAME` is written to that file of the page's folder. Any YAML block with
  a `cluster:` section must plan, on the cluster of `<!-- cluster: 2x8 -->` before it (2x8 if there is none), unless
  `<!-- wrong -->` comes before it: then it must be refused. One with `nodes:` must be an inventory.
- A shell block runs in that folder; `<!-- exit: 2 -->` before it says how it ends. `make` is only asked what it
  would do. A text block right after a shell block is what it prints, to the letter; `make golden` rewrites it.
- A Python block runs with the names of the page's blocks before it.
- A block after `<!-- ray: 2x4 -->` needs a live cluster: `tests/ray/test_docs_live.py` runs it. The text above it must
  tell the reader to `roost up 2x4`. One after
  `<!-- shown -->` is for another program: it must be well formed, and is not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import warm
from docs.blocks import PAGES, ROOT, Block, blocks_of
from roost import RoostError, Topology, make_plan


def test_pages_use_only_known_languages():
    used = {(page.name, block.language) for page in PAGES for block in blocks_of(page)}
    assert {language for _, language in used} <= {"yaml", "sh", "python", "text", "json", "toml"}, used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_with_live_blocks_says_which_cluster_they_need(page):
    """For a block on a cluster of 2x4, the text above it must say `roost up 2x4`; for one that starts its own, so."""
    for block in blocks_of(page):
        cluster = block.notes.get("ray")
        if cluster is not None:
            above = "".join(page.read_text(encoding="utf-8").splitlines(keepends=True)[: block.line - 1])
            words = "`local_cluster" if cluster == "own" else f"`roost up {cluster}`"
            seen = re.sub(r"<!--.*?-->|^```.*?^```$", "", above, flags=re.M | re.S).replace("[`", "`")
            where = f"{page.name}, block in line {block.line}"
            assert words in seen or (cluster == "own" and ".local_cluster`" in seen), f"{where}: say {words} above it"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What the shell blocks see: a `roost` that is ready to run comes first on the path."""
    return warm.environment() | {"COLUMNS": "80", "NO_COLOR": "1"}


@pytest.mark.heavy
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_works(page, tmp_path, environment, request):
    refresh = request.config.getoption("--refresh-golden")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    printed: str | None = None
    for block in blocks_of(page):
        where = f"{page.name}, block in line {block.line}"
        if block.language == "text" and block.follows and printed is not None:
            if refresh and block.text != printed:
                content = page.read_text(encoding="utf-8")
                page.write_text(
                    content.replace(f"```text\n{block.text}```", f"```text\n{printed}```"), encoding="utf-8"
                )
            else:
                assert block.text == printed, f"{where}: this is not what the block before it prints"
        printed = None
        if "ray" in block.notes:
            continue
        if "shown" in block.notes:
            check_shown(block, where)
        elif block.language == "yaml":
            check_yaml(block, tmp_path, where)
        elif block.language == "sh":
            printed = run_shell(block, tmp_path, environment, where)
        elif block.language == "python":
            run_python(block, tmp_path, names, where)


def check_shown(block: Block, where: str) -> None:
    if block.language == "yaml":
        assert any(yaml.safe_load_all(block.text)), f"{where}: there is nothing in it"
    elif block.language == "sh":
        done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
        assert done.returncode == 0, f"{where}: {done.stderr}"


def check_yaml(block: Block, folder: Path, where: str) -> None:
    path = folder / (block.file or "block.yaml")
    path.write_text(block.text, encoding="utf-8")
    content = yaml.load(block.text, Loader=yaml.BaseLoader)  # noqa: S506 - BaseLoader makes strings only
    if "nodes" in content:
        Topology.from_file(path)
    elif "cluster" in content and "component_placement" in content["cluster"]:
        cluster = block.notes.get("cluster", "2x8")
        if cluster.endswith(".yaml"):
            topology = Topology.from_file(folder / cluster)
        else:
            topology = Topology.from_shorthand(cluster)
        if "wrong" in block.notes:
            with pytest.raises(RoostError):
                make_plan(path, topology)
        else:
            make_plan(path, topology)
    else:
        assert "part" in block.notes, f"{where}: neither a job nor an inventory; mark it <!-- part -->"


def run_shell(block: Block, folder: Path, environment: dict[str, str], where: str) -> str:
    script = re.sub(r"^make (\S+)", r"make --dry-run \1 >/dev/null", block.text, flags=re.M)
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    expected = int(block.notes.get("exit", "0"))
    assert done.returncode == expected, f"{where}: exit {done.returncode}, not {expected}:\n{done.stdout}"
    return done.stdout


def run_python(block: Block, folder: Path, names: dict[str, object], where: str) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(block.text, where, "exec"), names)  # noqa: S102 - running the docs is the test
    finally:
        os.chdir(before)
