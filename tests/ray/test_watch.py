"""Events of a real job: what its processes write into the run folder while they run, and what readers make of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from roost import Channel, Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker, WorkerDied
from roost.watch.live import LiveRun
from roost.weights.link import WeightLink
from waiting import wait_until
from weight_workers import Server, Trainer


class Player(Worker):
    """A worker with something to see."""

    def play(self, step: int) -> int:
        self.log_metric("reward", step / 10, step=step)
        return os.getpid()

    def hang(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self) -> None:
        raise ValueError("no")


class Taker(Worker):
    """A worker that waits for an item."""

    def take(self, channel: Channel) -> object:
        return channel.get(timeout=120)


def text_of(folder: Path, name: str) -> str:
    path = folder / "events" / name
    return path.read_text() if path.is_file() else ""


def test_a_job_writes_what_its_workers_do_and_who_dies(small_cluster):
    folder = Path(small_cluster.run_dir)
    group = Player.create_group().launch(small_cluster, NodePlacementStrategy([0, 0]), name="player")
    pids = group.play(3).wait()
    with pytest.raises(ValueError, match="no"):
        group.on(0).fail().wait()
    wait_until(lambda: '"metric":"reward"' in text_of(folder, "player/1.metrics.jsonl"), "the metric of rank 1")
    small_cluster.log_metric("score", 1, step=2)
    wait_until(lambda: '"metric":"score"' in text_of(folder, "driver.metrics.jsonl"), "the metric of the driver")
    wait_until(lambda: '"call":"fail"' in text_of(folder, "player/0.jsonl"), "the failed call of rank 0")
    wait_until(lambda: '"launched":"player"' in text_of(folder, "driver.jsonl"), "the launch")
    wait_until(lambda: '"node":' in text_of(folder, "node-0.jsonl"), "a sample of node 0")
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: '"died":"player:1"' in text_of(folder, "driver.jsonl"), "the death of rank 1")
    group.restart(1)
    assert group.play(4).wait()[0] == pids[0]
    wait_until(lambda: '"restarted":"player:1"' in text_of(folder, "driver.jsonl"), "the restart of rank 1")
    wait_until(lambda: text_of(folder, "player/1.jsonl").count('"process"') == 2, "the new process of rank 1")
    group.close()
    wait_until(lambda: '"closed":"player"' in text_of(folder, "driver.jsonl"), "the end of the group")


@pytest.mark.usefixtures("small_local_cluster")
def test_a_job_that_ends_because_a_worker_was_killed_says_who_died():
    with pytest.raises(WorkerDied), Cluster(num_nodes=1, quiet=True) as cluster:  # noqa: PT012 - the job
        folder = Path(cluster.run_dir)
        group = Player.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="player")
        pids = group.play(1).wait()
        # Nothing looks in the meantime whether it is alive.
        cluster.context.watch.stop()
        hung = group.hang(600)
        os.kill(pids[1], signal.SIGKILL)
        hung.wait(60)
    events = [(event.who, event.what) for event in LiveRun(folder).refresh().events]
    assert ("player:1", "died") in events
    states = {worker.address: str(worker.state) for worker in LiveRun(folder).refresh().workers}
    assert states == {"player:0": "ended", "player:1": "dead", "player:2": "ended"}


def test_the_stack_of_a_worker_that_hangs_is_shown_and_top_shows_the_call(small_cluster, roost, monkeypatch):
    monkeypatch.setattr("roost.machine.py_spy.find_py_spy", lambda: None)
    group = Player.create_group().launch(small_cluster, NodePlacementStrategy([0]), name="player")
    hung = group.hang(600)
    folder = Path(small_cluster.run_dir)
    wait_until(lambda: '"began":"hang"' in text_of(folder, "player/0.jsonl"), "the call to begin")
    code, out, err = roost("stack", str(folder), "player:0", "--timeout", "60")
    assert code == 0, err
    assert "in hang" in out.split("\n\n")[0], "the main thread comes first"
    assert not list(folder.rglob("*.ask"))
    code, out, _ = roost("top", str(folder), "--once")
    assert code == 0
    assert "1 busy" in out
    code, _, err = roost("stack", str(folder), "nobody:0")
    assert (code, "it has player:0" in err) == (2, True)
    group.close()
    wait_until(lambda: '"closed":"player"' in text_of(folder, "driver.jsonl"), "the end is written")
    code, _, err = roost("stack", str(folder), "player:0")
    assert (code, "is not running: it is ended" in err) == (3, True)
    del hung


@pytest.mark.usefixtures("small_local_cluster")
def test_a_job_without_a_record_writes_no_events():
    with Cluster(num_nodes=1, record=False, quiet=True) as cluster:
        group = Player.create_group().launch(cluster, NodePlacementStrategy([0]), name="player")
        group.play(1).wait()
        assert not (Path(cluster.run_dir) / "events").exists()


def test_a_job_writes_what_goes_between_its_workers(small_cluster):
    folder = Path(small_cluster.run_dir)
    channel = Channel.create("samples", maxsize=4)
    takers = Taker.create_group().launch(small_cluster, NodePlacementStrategy([0]), name="taker")
    taken = takers.take(channel)
    wait_until(lambda: '"waiting":"channel \'samples\'"' in text_of(folder, "taker/0.jsonl"), "the wait to begin")
    channel.put("a sample")
    assert taken.wait(60) == ["a sample"]
    wait_until(lambda: '"wait":"channel \'samples\'"' in text_of(folder, "taker/0.jsonl"), "the wait to end")
    wait_until(lambda: '"puts":1,"gets":1' in text_of(folder, "samples/0.jsonl"), "what went through the channel")
    actor = Trainer.create_group("numpy").launch(small_cluster, NodePlacementStrategy([0]), name="actor")
    server = Server.create_group("numpy").launch(small_cluster, NodePlacementStrategy([0]), name="server")
    WeightLink.between(actor, server).update(1)
    wait_until(lambda: '"weights":"actor -> server"' in text_of(folder, "driver.jsonl"), "the update")
    player = Player.create_group().launch(small_cluster, PackedPlacementStrategy(0, 0), name="player")
    player.hang(0.2).wait(60)
    wait_until(lambda: '"wait":"player:0, hang"' in text_of(folder, "driver.jsonl"), "for whom the driver waited")
    wait_until(lambda: '"reserved":"player"' in text_of(folder, "driver.jsonl"), "the reservation")
    live = LiveRun(folder)
    view = live.refresh()
    assert [(one.name, one.depth) for one in view.channels] == [("samples", 0)]
    assert [(one.name, one.version) for one in view.links] == [("actor -> server", 1)]
    assert live.refresh().notices == ()
