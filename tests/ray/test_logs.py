"""What workers print: one file each, shown by the driver, fetched from other machines, read by a command."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm
from roost import Cluster, NodePlacementStrategy, PackedPlacementStrategy, WorkerDied, WorkerGroup
from roost.runtime.runs.index import read_run
from roost.testing import LocalNode, local_cluster
from waiting import is_gone, wait_until
from workers import Performer

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def actor(shared_cluster: Cluster, keep) -> WorkerGroup:
    """Two workers on two nodes that the tests share."""
    strategy = PackedPlacementStrategy(3, 4)
    return keep("actor", lambda: Performer.create_group().launch(shared_cluster, strategy, name="actor"))


def log_of(cluster: Cluster, rank: int, group: str = "actor") -> Path:
    return Path(cluster.run_dir) / "logs" / group / f"{rank}.log"


def test_each_worker_has_a_log_of_its_own_with_all_that_it_prints(shared_cluster, actor):
    actor.map("say", [f"this is rank {rank}" for rank in range(2)]).wait(60)
    actor.log_levels().wait(60)
    for rank in range(2):
        text = log_of(shared_cluster, rank).read_text()
        assert f"this is rank {rank}" in text
        assert f"this is rank {1 - rank}" not in text
        for level, words in (("INFO", "some news"), ("WARNING", "a warning"), ("ERROR", "an error")):
            assert f"{level} {words}" in text
        assert "a detail" not in text, "details are for those who ask for them"


def test_binary_output_is_kept_as_it_is_and_escaped_on_the_terminal(shared_cluster, actor, roost):
    actor[0].say_binary().wait(60)
    data = log_of(shared_cluster, 0).read_bytes()
    assert b"\xff\x00\x1b[2Jbinary\n" in data
    assert b"straight to the descriptor \xfe\n" in data
    code, out, err = roost("logs", "actor:0", "--run", shared_cluster.run_dir)
    assert code == 0, err
    assert "\x1b" not in out
    assert "\\x00\\x1b[2Jbinary" in out
    with pytest.raises(ValueError, match="bad reward") as caught:
        actor[0].fail([0]).wait(60)
    assert "\\x1b[2Jbinary" in "".join(caught.value.__notes__)


def test_the_command_shows_one_worker_a_group_the_last_lines_or_a_list(shared_cluster, actor, roost):
    actor.map("say", ["first\nsecond\nthird", "only this"]).wait(60)
    run = ("--run", shared_cluster.run_dir)
    assert roost("logs", "actor:0", "-n", "2", *run)[1] == "second\nthird\n"
    assert roost("logs", "actor:0", "-n", "0", *run)[1] == ""
    assert roost("logs", "actor", "-n", "1", *run)[1] == "actor:0 | third\nactor:1 | only this\n"
    _, listed, _ = roost("logs", *run)
    assert "actor:0" in listed
    assert str(log_of(shared_cluster, 1)) in listed
    code, _, err = roost("logs", "actr:0", *run)
    assert code == 2
    assert "no log of 'actr:0'" in err
    assert "actor:0 and actor:1" in err
    assert roost("logs", "../actor:0", *run)[0] == 2
    assert "there is no folder /nowhere" in roost("logs", "actor", "--run", "/nowhere")[2]
    assert "there are no logs in /" in roost("logs", "actor", "--run", "/")[2]


def test_the_command_follows_a_log(shared_cluster, actor, tmp_path):
    command = ["roost", "logs", "actor:1", "-f", "-n", "0", "--run", shared_cluster.run_dir]
    shown = tmp_path / "shown"
    with shown.open("w") as out, subprocess.Popen(command, stdout=out, env=warm.environment()) as process:
        try:
            # It begins to read at some time, and shows what comes from then on.
            wait_until(lambda: actor[1].say("and on").wait(60) and shown.stat().st_size, "it shows what comes")
        finally:
            process.terminate()
    assert set(shown.read_text().splitlines()) == {"and on"}


def test_the_driver_shows_what_workers_print_with_their_names_unless_quiet(driver):
    code = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from roost import Cluster, PackedPlacementStrategy
        from workers import Performer
        with Cluster(num_nodes=4, quiet={{quiet}}) as cluster:
            group = Performer.create_group().launch(cluster, PackedPlacementStrategy(3, 4), name="loud")
            group.say("hear, hear").wait(60)
            group[0].say_binary().wait(60)
            group[1].bar().wait(60)
            print("ok", flush=True)
    """
    said, complained = driver(textwrap.dedent(code).format(quiet=False)).finish()
    assert said == "ok\n"
    assert "loud: 2 workers ready on 2 nodes in" in complained
    assert "loud:0 | hear, hear" in complained
    assert "loud:1 | hear, hear" in complained
    assert "\\x1b[2Jbinary" in complained
    assert "\x1b[2J" not in complained
    assert "loud:1 | 90%" in complained, "a line that is written over, and has no end, is shown as it is at last"
    said, complained = driver(textwrap.dedent(code).format(quiet=True)).finish()
    assert (said, complained) == ("ok\n", "")


def test_a_hundred_megabytes_of_log_do_not_hold_up_the_driver(small_cluster):
    screen = io.StringIO()
    small_cluster.context.console.stream = screen
    with Performer.create_group().launch(small_cluster, NodePlacementStrategy([0]), name="much") as group:
        group.say_much(100).wait(300)
        path = log_of(small_cluster, 0, "much")
        assert path.stat().st_size > 100 * 2**20
        with pytest.raises(ValueError, match="bad reward") as caught:
            group.fail([0]).wait(60)
        assert "the last line" in "".join(caught.value.__notes__)
        assert len("".join(caught.value.__notes__)) < 100_000
    path.unlink()
    small_cluster.close()
    shown = screen.getvalue()
    assert "much:0 | the last line" in shown
    assert "MiB not shown, see" in shown
    assert len(shown) < 50 * 2**20


def test_logs_of_a_node_that_keeps_its_own_are_fetched(tmp_path, monkeypatch):
    own = tmp_path / "own disk"
    keeps = {"ROOST_LOG_DIR": str(own)}
    nodes = [LocalNode(accelerators=1), LocalNode(accelerators=1, env=keeps), LocalNode(env=keeps)]
    with local_cluster(nodes) as local, Cluster(num_nodes=3, run_dir=tmp_path / "run", quiet=True) as cluster:
        lost = Performer.create_group().launch(cluster, NodePlacementStrategy([2]), name="lost")
        lost.say("from a node that will be lost").wait(60)
        wait_until(lambda: "will be lost" in _text(log_of(cluster, 0, "lost")), "the log is fetched")
        local.kill_node(2)
        wait_until(lambda: cluster.dead_nodes == (2,), "the node is lost, and the logs of the others come nevertheless")
        group = Performer.create_group().launch(cluster, name="actor")
        group.map("say", ["from here", "from there"]).wait(60)
        there = list(own.rglob("1.log"))
        assert len(there) == 1
        assert not list(own.rglob("actor/0.log"))
        assert "from there" in there[0].read_text()
        wait_until(lambda: "from there" in _text(log_of(cluster, 1)), "the log is fetched")
        events = Path(cluster.run_dir) / "events"
        wait_until(lambda: '"call":"say"' in _text(events / "actor" / "1.jsonl"), "its events are fetched")
        metrics = events / "actor" / "1.metrics.jsonl"
        wait_until(lambda: '"metric":"said"' in _text(metrics), "its metrics are fetched")
        wait_until(lambda: '{"node":' in _text(events / "node-1.jsonl"), "the samples of its node are fetched")
        assert "from here" in log_of(cluster, 0).read_text()
        monkeypatch.setattr("roost.runtime.nodes.log_forwarder.LOGS_READER_SECONDS", 0.0)
        below = psutil.Process(local.keeper_pid).children(recursive=True)
        (reader,) = [process for process in below if "LogReader" in " ".join(process.cmdline())]
        reader.kill()
        group[1].say("to the next reader").wait(60)
        wait_until(lambda: "to the next reader" in _text(log_of(cluster, 1)), "another reader goes on where it was")
        with pytest.raises(WorkerDied, match="actor:1") as caught:
            group.end(1, "kill").wait(60)
        assert "ending by kill" in str(caught.value), "the end of a fetched log is in the error"
        group.restart(1)
        group[1].say("and again").wait(60)
        assert group[1].launch_children(1).wait(60) == [["actor:1:0"]]
        WorkerGroup.attach("actor:1").say("from a child").wait(60)
        child = Path(cluster.run_dir) / "logs" / "actor" / "1" / "0.log"
        wait_until(lambda: "from a child" in _text(child), "groups that workers launch are fetched, too")
        group.close()
        with Performer.create_group().launch(cluster, name="actor") as second:
            second.map("say", ["second here", "second there"]).wait(60)
        assert log_of(cluster, 1).read_text() == "second there\n"
        assert "from there" in log_of(cluster, 1, "actor.1").read_text()
    text = (tmp_path / "run" / "logs" / "actor.1" / "1.log").read_text()
    assert text.index("from there") < text.index("started again") < text.index("and again")
    assert text.count("from there") == 1
    left = [
        path for path in own.rglob("*") if path.is_file() and "lost" not in path.parts and "node-2" not in path.name
    ]
    assert not left, "what was fetched is not left there"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_launch_is_shown_in_plain_lines_where_there_is_no_terminal(shared_cluster, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(shared_cluster.context.console, "quiet", False)
    monkeypatch.setattr(shared_cluster.context.console, "stream", stream)
    with Performer.create_group().launch(shared_cluster, PackedPlacementStrategy(3, 4), name="shown"):
        pass
    assert "shown: 2 workers ready on 2 nodes in" in stream.getvalue()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system with little room, if this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", "size=256k", "roost", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run([shutil.which("umount") or "umount", "--lazy", str(folder)], check=True)


@pytest.mark.usefixtures("small_local_cluster")
def test_a_full_disk_fails_no_call_and_makes_no_death_final(small_disk, caplog):
    with Cluster(num_nodes=1, run_dir=small_disk / "run", quiet=True) as cluster:
        strategy = NodePlacementStrategy([0])
        with Performer.create_group().launch(cluster, strategy, name="actor", restarts=1) as group:
            filler = small_disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
            assert group.say("nobody reads this" * 1000).wait(60) == [None]
            pid = group.pid().wait(60)[0]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: is_gone(pid), "it is gone")
            wait_until(lambda: group.pid().outcomes(60)[0].is_ok, "it is there again, its log is full nevertheless")
            wait_until(lambda: "record is not complete" in caplog.text, "the restart cannot be recorded")
            filler.unlink()
            group.say("there is room again").wait(60)
            text = log_of(cluster, 0).read_text()
        assert "of output are missing here: No space left on device ---\nthere is room again\n" in text
    record = read_run(small_disk / "run")
    assert [item.worker for item in record.restarts] == ["actor:0"]
    assert record.outcome.status == "finished"
