"""What Roost writes into a run folder: nothing of the user's is changed there, and nothing is shown to others."""

from __future__ import annotations

import io
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from roost import ConfigError
from roost.machine.folders import make_folders, open_regular
from roost.runtime.nodes import log_forwarder
from roost.runtime.nodes.log_forwarder import LogForwarder, LogReader
from roost.runtime.process.output import LogPlace, choose_place, read_tail, run_folder_name
from roost.runtime.runs.console import Console
from roost.runtime.runs.folder import RunDir, log_file, make_run_dir, own_run_dir, put_aside
from roost.runtime.runs.index import is_free
from roost.runtime.runs.record import files_of_others
from waiting import wait_until


@pytest.fixture(autouse=True)
def _own_state(monkeypatch, tmp_path_factory) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.delenv("ROOST_RUNS_DIR", raising=False)
    monkeypatch.delenv("ROOST_LOG_DIR", raising=False)


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o777


def test_the_users_files_in_the_folder_of_a_run_stay_as_they_are(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(precious)
    mine = {".roost-notes": "mine", ".roost-settings.yaml": "a: 1", f".roost-{'0' * 16}": "not its own name"}
    for name, text in mine.items():
        (folder / name).write_text(text)
    (folder / ".roost-cache").mkdir()
    (folder / f".roost-{'a' * 16}").mkdir()
    (folder / f".roost-{'b' * 16}").symlink_to(precious)
    earlier = make_run_dir(folder)
    with own_run_dir(folder) as made:
        assert not is_free(folder)
        assert made.marker.read_text() == made.token
        with pytest.raises(ConfigError, match="another job is using"), own_run_dir(folder):
            pass
    assert is_free(folder)
    assert precious.read_text() == "precious"
    assert {name: (folder / name).read_text() for name in mine} == mine
    assert not earlier.marker.exists(), "the marker of an earlier run is removed"
    kept = {".lock", ".roost-cache", f".roost-{'a' * 16}", f".roost-{'b' * 16}", ".roost-lock", made.marker.name}
    assert {path.name for path in folder.iterdir()} == {*mine, *kept}


@pytest.mark.parametrize("name", [".roost-lock", "logs"])
@pytest.mark.parametrize("kind", ["a symbolic link", "a pipe", "a folder", "a file that Roost did not write"])
def test_what_is_in_the_way_of_a_run_is_named_and_left_alone(tmp_path, name, kind):
    if (name, kind) == ("logs", "a folder"):
        pytest.skip("that is what it should be")
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "run" / name
    path.parent.mkdir()
    if kind == "a symbolic link":
        path.symlink_to(precious)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.write_text("mine")
    said = kind if name == ".roost-lock" else kind.removesuffix(" that Roost did not write")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {said} is in the way")), own_run_dir(path.parent):
        pass
    assert precious.read_text() == "precious"
    assert [item.name for item in path.parent.iterdir()] == [name], "nothing is left there either"


def test_what_others_could_read_is_closed_to_them(tmp_path):
    before = os.umask(0)
    try:
        with own_run_dir(tmp_path / "run") as made:
            place = choose_place(made, "actor:0")
            run_in_worker(place, "print('a line')")
            put_aside(made.logs / "actor")
            run_in_worker(place, "print('another line')")
    finally:
        os.umask(before)
    folders = [made.logs, made.logs / "actor", made.logs / "actor.1"]
    assert {mode(path) for path in [tmp_path / "run", *folders]} == {0o700}
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {".roost-lock", made.marker.name, "0.log"}
    assert {mode(path) for path in files} == {0o600}
    assert (made.logs / "actor.1" / "0.log").read_text() == "a line\n"


def run_in_worker(
    place: LogPlace, code: str, *, is_restart: bool = False, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose output goes to a worker's log."""
    start = "from roost.runtime.process.output import LogPlace, redirect_output\n"
    start += f"redirect_output({place!r}, is_restart={is_restart})\n"
    command = [sys.executable, "-c", start + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=before)


def test_a_log_is_never_written_through_a_link_or_into_a_pipe(tmp_path):
    made = make_run_dir(tmp_path / "run")
    precious = tmp_path / "precious" / "0.log"
    precious.parent.mkdir()
    precious.write_text("precious")
    make_folders(tmp_path, made.logs / "actor")
    for number, (name, make) in enumerate(
        {
            "a symbolic link": lambda path: path.symlink_to(precious),
            "a pipe": os.mkfifo,
            "a folder": os.mkdir,
        }.items()
    ):
        make(made.logs / "actor" / f"{number}.log")
        done = run_in_worker(choose_place(made, f"actor:{number}"), "print('mine')")
        assert done.returncode == 1
        assert f"{number}.log: {name} is in the way" in done.stderr
        assert read_tail(made.logs / "actor" / f"{number}.log") == ""
    (made.logs / "linked").symlink_to(precious.parent)
    put_aside(made.logs / "linked")
    assert (
        f"{made.logs}/linked: a symbolic link is in the way" in run_in_worker(choose_place(made, "linked:0"), "").stderr
    )
    assert precious.read_text() == "precious"


def test_a_record_is_never_written_in_place_of_a_link(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"version": 1, "outcome": {}, "plan": "x"}')
    (tmp_path / "run.json").symlink_to(other)
    (tmp_path / "plan.json").symlink_to(other)
    assert files_of_others(tmp_path) == {"run.json", "plan.json"}
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").write_text(other.read_text())
    assert files_of_others(tmp_path) == {"plan.json"}


def test_old_runs_are_removed_and_no_folder_of_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = tmp_path / "roost" / "runs"
    for name in ["0-thesis", *(f"20200101-0000{number:02d}-abcdef" for number in range(22))]:
        (runs / name).mkdir(parents=True)
        os.utime(runs / name, (1, 1))
    make_run_dir(None)
    assert (runs / "0-thesis").is_dir()
    assert not (runs / "20200101-000000-abcdef").exists()


def test_the_folder_of_the_logs_of_a_node_stays_when_they_are_removed(tmp_path):
    made = RunDir(path=str(tmp_path / "run"), token="0" * 16, id="run")
    scratch = tmp_path / "scratch" / "me"
    scratch.mkdir(parents=True)
    path = log_file(scratch / run_folder_name(made), "actor:0")
    make_folders(scratch, path.parent)
    path.write_text("fetched")
    LogReader.remove(_reader(made), [str(path)])
    assert not list(scratch.iterdir())
    assert scratch.is_dir()


def _reader(made: RunDir) -> LogReader:
    # Its constructor would tie the test's process to its parent.
    reader = LogReader.__new__(LogReader)
    reader._folder_name = run_folder_name(made)
    return reader


FULL = """
    import resource, sys
    def room(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    print("before")
    room(len("before\\n") + 4)
    print("lost", "x" * 1000)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"lost too")
    sys.stdout.flush()
    print("lost as well", file=sys.stderr, flush=True)
    import logging
    logging.getLogger("roost.worker.actor:0").info("and this")
    room(resource.RLIM_INFINITY)
    print("after")
    print("the end", file=sys.stderr)
"""


def test_a_log_that_cannot_grow_loses_lines_and_says_so_but_nothing_fails(tmp_path):
    made = make_run_dir(tmp_path / "run")
    place = choose_place(made, "actor:0")
    done = run_in_worker(place, FULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = Path(place.path).read_text()
    assert text.startswith("before\nlost\n---"), text
    assert "bytes of output are missing here: File too large ---\nafter\n" in text
    assert text.endswith("bytes of output are missing here: File too large ---\nthe end\n")
    assert text.count("lost") == 1


def test_a_worker_starts_again_where_its_log_cannot_grow(tmp_path):
    made = make_run_dir(tmp_path / "run")
    place = choose_place(made, "actor:0")
    run_in_worker(place, "print('before')")
    size = Path(place.path).stat().st_size

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    done = run_in_worker(place, "print('lost')", is_restart=True, before=no_room)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(place.path).read_text() == "before\n"


class Screen(io.StringIO):
    """A screen that knows what it shows."""

    def shows(self, text: str) -> bool:
        return text in self.getvalue()


@pytest.mark.heavy
def test_showing_logs_looks_at_all_of_them_rarely_and_at_active_ones_often(tmp_path, monkeypatch):
    # At the default share, only very many logs show the difference.
    monkeypatch.setattr(log_forwarder, "_ALL_SHARE", 0.0001, raising=False)
    logs = tmp_path / "logs" / "actor"
    screen = Screen()
    made = RunDir(path=str(tmp_path), token="0" * 16, id="run")
    forwarder = LogForwarder(made, Console(quiet=False, stream=screen), list)
    logs.mkdir(parents=True)
    for rank in range(500):
        (logs / f"{rank}.log").write_text(f"start of {rank}\n")
    looked: list[object] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or scan(path))
    forwarder.start()
    try:
        wait_until(lambda: screen.shows("start of 499"), "all are shown")
        looked.clear()
        for number in range(20):
            with (logs / "7.log").open("a") as file:
                file.write(f"step {number}\n")
            wait_until(lambda number=number: screen.shows(f"actor:7 | step {number}\n"), "a line of an active worker")
        assert len([path for path in looked if "actor" in str(path)]) < 10
        with (logs / "8.log").open("a") as file:
            file.write("awake\n")
        wait_until(lambda: screen.shows("actor:8 | awake"), "a line of a worker that was quiet")
    finally:
        forwarder.stop()


def test_what_is_not_a_log_is_not_shown_and_holds_nothing_up(tmp_path):
    logs = tmp_path / "logs" / "actor"
    logs.mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.write_text("private\n")
    screen = Screen()
    forwarder = LogForwarder(
        RunDir(path=str(tmp_path), token="0" * 16, id="run"), Console(quiet=False, stream=screen), list
    )
    (logs / "0.log").symlink_to(precious)
    os.mkfifo(logs / "1.log")
    (logs / "2.log").write_text("a line\n")
    forwarder.show()
    assert screen.getvalue() == "actor:2 | a line\n"


def test_a_file_is_opened_as_such_or_what_it_is_is_said(tmp_path):
    with pytest.raises(FileExistsError, match="a folder is in the way"):
        open_regular(tmp_path, os.O_WRONLY)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing", os.O_RDONLY)
