"""The blocks of the docs that need a live cluster, run on a local one, page by page, in the order of the page.

- `<!-- ray: 2x4,1x0 -->` before a block: it runs with the environment of such a cluster, which pages with the same
  spec share. `<!-- ray: own -->`: it brings its own cluster, and has a folder for `roost up`.
- A block whose first line is `# file: NAME` is written to that file. Any other Python block is a program of its own.
- `needs: hydra` in the same comment: it is left out where that package is not installed.
- A text block right after is what it prints, where `…` stands for anything and columns may be wider or narrower.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import warm
from docs.blocks import PAGES, ROOT, Block, blocks_of, specs_of
from roost.testing import LocalCluster, local_cluster

# Pages that need the same cluster come one after the other.
LIVE_PAGES = sorted((page for page in PAGES if specs_of(page)), key=specs_of)
pytestmark = pytest.mark.shown
NOT_OURS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What every block sees: this `roost` first on the path, no cluster, and a folder for the page's `roost up`."""
    # pytest's own folder is too long for the sockets below it.
    own = tempfile.mkdtemp(prefix="roost-docs-")
    found = {name: value for name, value in warm.environment().items() if name not in NOT_OURS}
    found |= {"TMPDIR": own, "XDG_STATE_HOME": own, "COLUMNS": "80", "NO_COLOR": "1"}
    yield found
    # A block that failed may have left its local cluster up.
    if any(Path(own).iterdir()):
        command = [sys.executable, "-m", "roost", "down"]
        subprocess.run(command, env=found, check=False, capture_output=True, timeout=120)
    shutil.rmtree(own, ignore_errors=True)


class Clusters:
    """The local cluster that the pages use now; it is replaced when a page wants another one."""

    def __init__(self) -> None:
        self._spec = ""
        self._running: LocalCluster | None = None

    def get(self, spec: str, preload: tuple[str, ...]) -> LocalCluster:
        if spec != self._spec or self._running is None:
            self.stop()
            self._spec, self._running = spec, local_cluster(spec)
            self._running.start()
        self._running.preload(*preload)
        return self._running

    def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    shared = Clusters()
    yield shared
    shared.stop()


@pytest.mark.parametrize("page", LIVE_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_live_block_of_a_page_works(page, tmp_path, environment, clusters):
    wants_torch = "import torch" in page.read_text(encoding="utf-8") and find_spec("torch") is not None
    preload = ("torch",) if wants_torch else ()
    printed: str | None = None
    for block in blocks_of(page):
        where = f"{page.name}, block in line {block.line}"
        if block.language == "text" and block.follows and printed is not None:
            assert is_alike(block.text, printed), f"{where}: this is not what is printed:\n{printed}"
        printed = None
        spec = block.notes.get("ray")
        if "needs" in block.notes and find_spec(block.notes["needs"]) is None:
            continue
        if block.file is not None and (spec or block.language == "yaml"):
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif spec:
            joined = clusters.get(spec, preload).environment if spec != "own" else {}
            printed = run_block(block, tmp_path, environment | joined, where)


def run_block(block: Block, folder: Path, environment: dict[str, str], where: str) -> str:
    """Run a block and give what it prints; of a Python program, what it says on standard output."""
    if block.language == "python":
        script = folder / f"block{block.line}.py"
        script.write_text(block.text, encoding="utf-8")
        command = ["warm-python", str(script)]
    else:
        assert block.language == "sh", f"{where}: only shell and Python blocks run on a cluster"
        command = ["bash", "-eu", "-c", block.text]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if block.language == "python" else subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    expected = int(block.notes.get("exit", "0"))
    said = f"{done.stdout}{done.stderr or ''}"
    assert done.returncode == expected, f"{where}: exit {done.returncode}, not {expected}:\n{said}"
    # On a busy machine Ray itself remarks that many processes start.
    return "".join(line for line in done.stdout.splitlines(keepends=True) if "(raylet)" not in line)


def is_alike(expected: str, printed: str) -> bool:
    """Whether the text fits, with `…` for anything, in columns of any width."""
    expected, printed = (re.sub(r"(?<=\S) +", " ", text.rstrip()) for text in (expected, printed))
    parts = [re.escape(part) for part in expected.split("…")]
    return re.fullmatch(".*?".join(parts), printed, re.S) is not None


def test_an_ellipsis_matches_anything():
    assert is_alike("node 0  127.…  8 x H100\n…end\n", "node 0    127.0.0.1  8 x H100\nmore\nthe end\n")
    assert not is_alike("node 0  127.…  8 x H100\n", "node 0  127.0.0.1  4 x H100\n")
