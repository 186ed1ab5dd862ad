"""The page of a real job, in a real browser: a worker that dies, a worker that waits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the page needs roost[watch]")

from browsing import needs_browser, open_browser, open_page, served, wait_for
from roost import Channel, NodePlacementStrategy, Worker
from roost.watch.live import LiveRun

pytestmark = needs_browser


class Player(Worker):
    """A worker with something to see."""

    def pid(self) -> int:
        return os.getpid()

    def take(self, channel: Channel) -> object:
        return channel.get(timeout=120)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as made:
        yield made


def test_a_worker_is_killed_and_the_page_shows_it(small_cluster, browser, record_property):
    group = Player.create_group().launch(small_cluster, NodePlacementStrategy([0, 0]), name="player")
    pids = group.pid().wait()
    with served(LiveRun(Path(small_cluster.run_dir))) as url, open_page(browser, url) as page:
        page.wait_for_selector("[data-worker='player:1']")
        began = time.perf_counter()
        os.kill(pids[1], signal.SIGKILL)
        page.wait_for_selector("[data-worker='player:1'].dead", state="attached")
        seconds = time.perf_counter() - began
        # No limit here, because other tests run beside this one.
        record_property("seconds", seconds)
        print(f"\nthe page shows a killed worker after {seconds:.2f} s")
        page.wait_for_selector("#events li:has-text('player:1 died')")
        group.restart(1)
        wait_for(page, "document.querySelector('[data-worker=\"player:1\"]').textContent.includes('↻1')")
        page.wait_for_selector("[data-worker='player:1']:not(.dead)")


def test_a_lane_shows_for_whom_a_worker_waits(small_cluster, browser):
    channel = Channel.create("samples", maxsize=4)
    group = Player.create_group().launch(small_cluster, NodePlacementStrategy([0]), name="player")
    taken = group.take(channel)
    with served(LiveRun(Path(small_cluster.run_dir))) as url, open_page(browser, url) as page:
        page.wait_for_selector("[data-worker='player:0'].waiting")
        page.wait_for_selector("[aria-label='lanes of player'] .wait", state="attached")
        label = page.get_attribute("[aria-label='lanes of player'] svg", "aria-label")
        assert "waits for channel 'samples'" in label
        page.click("[data-worker='player:0']")
        page.click("#ask-stack")
        wait_for(page, "/in take|take \\(/.test(document.getElementById('stack').textContent)")
        channel.put("a sample")
        assert taken.wait(60) == ["a sample"]
        page.wait_for_selector("[data-worker='player:0']:not(.waiting)")
        page.wait_for_selector("#channels tbody th:has-text('samples')")
