"""What all tests share: golden files, the command line in this process, and Ctrl-C however the run was started."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from docs.blocks import specs_of
from rooms import room_of, stands_on
from roost.cli.main import main
from roost.config import hardware, kinds

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = ["roost.testing.plugin"]

# What is loaded and collected stays until the end: looking through it for garbage takes as long as loading it.
gc.disable()

# A shell without job control starts background jobs with SIGINT ignored, and what they start inherits that. Tests
# interrupt themselves and the drivers that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machines that run this are noisy: no time limit on an example, and the same examples in every run.
settings.register_profile("roost", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("roost")

Golden = Callable[[Path, str], None]
Roost = Callable[..., tuple[int, str, str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="rewrite the golden files, then look at the diff")
    parser.addoption("--room", help="run the tests of a room of src/roost, and of what stands on it: comm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the room that is asked for; those about the whole house are always kept."""
    room = config.getoption("--room")
    if not room:
        return
    from unit.test_house_rules import LAYERS

    if room not in LAYERS:
        raise pytest.UsageError(f"there is no room {room}: there are {', '.join(filter(None, LAYERS))}")
    kept = [item for item in items if not (own := room_of(item.nodeid)) or stands_on(own, room, LAYERS)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_finish() -> None:
    """Collect garbage again, and only what the tests leave."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let pytest-xdist, with `--dist loadgroup`, give the tests of a group to one process.

    Its own groups, by a marker, are lost without a word with pytest 9.2.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


# Its tests start clusters of their own.
APART = "tests/ray/test_examples.py"
# Its tests share what they have read of every module.
TOGETHER = "tests/unit/test_house_rules.py"


def group_of(nodeid: str) -> str:
    """The group of a test: those of a file on Ray share a Cluster, and pages that do not start their own a cluster."""
    file, _, rest = nodeid.partition("::")
    if file.startswith("tests/alone/"):
        return "alone"
    if file == "tests/ray/test_docs_live.py" and rest.endswith(".md]"):
        specs = specs_of(ROOT / rest.partition("[")[2].removesuffix("]"))
        return nodeid if specs == ["own"] else f"{file} {specs}"
    return file if (file.startswith("tests/ray/") and file != APART) or file == TOGETHER else nodeid


@pytest.fixture(autouse=True, scope="session")
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the runs of the tests, and of the processes that they start, out of the developer's state folder.

    Nor do they plan on the developer's cluster.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ROOST_CLUSTER", raising=False)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_accelerator_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after a test what it registered."""
    monkeypatch.setattr(hardware, "_VISIBLE_DEVICES", dict(hardware._VISIBLE_DEVICES))
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with a golden file, or write it with --refresh-golden."""
    refresh = request.config.getoption("--refresh-golden")

    def compare(path: Path, text: str) -> None:
        if refresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing: run make golden and look at it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs: run make golden and look at the change"

    return compare


@pytest.fixture
def roost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Roost:
    """Run the command line in this process: `code, out, err = roost("plan", …)`."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["roost", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run
