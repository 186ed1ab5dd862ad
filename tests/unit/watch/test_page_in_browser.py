"""The page in a real browser: what it shows, with the keyboard, narrow and dark, for everyone, and of thousands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the page needs roost[watch]")

from browsing import needs_axe, needs_browser, open_browser, open_page, serious_findings, served, wait_for
from recordings import BEGAN, Recording
from roost.render.grid import PALETTE
from roost.runtime.events.format import header, line_of
from roost.watch.live import LiveRun
from roost.watch.views import Layout

pytestmark = [needs_browser, pytest.mark.heavy]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as made:
        yield made


@pytest.fixture
def recording(tmp_path) -> Recording:
    made = Recording(tmp_path)
    made.busy()
    made.traffic()
    made.write("driver.jsonl", line_of("stopped", "", t=60.0))
    return made


@pytest.fixture
def url(recording) -> Iterator[str]:
    with served(LiveRun(recording.folder)) as address:
        yield address


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Where pictures go: set ROOST_PICTURES to keep them and look at them."""
    folder = Path(os.environ.get("ROOST_PICTURES", tmp_path / "pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_picture_of_the_page_and_nothing_is_wider_than_the_window(browser, url, pictures, width, dark):
    with open_page(browser, url, width=width, dark=dark) as page:
        page.wait_for_selector("#charts figure")
        page.wait_for_selector(".lane .wait", state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        path = pictures / f"page-{width}-{'dark' if dark else 'light'}.png"
        page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 20_000


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(browser, url, dark):
    with open_page(browser, url, dark=dark) as page:
        page.wait_for_selector("#charts figure")
        page.wait_for_selector(".lane .wait", state="attached")
        page.click("[data-worker='actor:0']")
        page.wait_for_selector("#detail:not([hidden])")
        assert serious_findings(page) == []


def test_the_tables_and_curves_show_what_goes_between_the_workers(browser, url):
    with open_page(browser, url) as page:
        page.wait_for_selector("#charts figure")
        assert "samples" in page.inner_text("#channels")
        assert "1 behind" in page.inner_text("#engines")
        assert "actor -> rollout" in page.inner_text("#links")
        titles = page.eval_on_selector_all("#charts figcaption b", "all => all.map(one => one.textContent)")
        assert titles[:2] == ["Step time", "reward"]
        assert {"Items in channels", "Requests per second", "Latency of requests", "Updates of weights"} <= set(titles)


def test_the_map_shows_unused_devices_and_workers_of_the_cpu_outside_the_columns(browser, recording):
    first = header("env:0", run="abc", pid=7, host="head", wall=BEGAN, node=0)
    recording.write("env/0.jsonl", first, line_of("call", "play", t=1.0, d=1.0))
    run = LiveRun(recording.folder)
    run.layout = Layout(columns={0: 4, 1: 2, 2: 2, 3: 2, 4: 2}, components=("rollout", "actor"))
    colour = "getComputedStyle(document.querySelector(`[data-worker='actor:0']`)).getPropertyValue('--component')"
    with served(run) as address, open_page(browser, address) as page:
        page.wait_for_selector(".others [data-worker='env:0']")
        assert page.eval_on_selector_all(".node", "all => all.map(one => one.querySelectorAll('.unused').length)") == [
            *(2, 0, 0, 0, 2)
        ]
        assert page.evaluate(colour) == PALETTE[1]
        page.wait_for_selector(".lane .call", state="attached")
        fills = page.eval_on_selector_all(
            "[aria-label='lanes of actor'] .call", "all => all.map(one => one.getAttribute('fill'))"
        )
        assert {fill.upper() for fill in fills} == {PALETTE[1]}


def test_no_table_is_cut_on_a_narrow_screen(browser, url):
    with open_page(browser, url, width=390) as page:
        page.wait_for_selector("#channels tbody td")
        widths = page.eval_on_selector_all(".scroll", "all => all.map(one => [one.scrollWidth, one.clientWidth])")
        assert all(needed <= has for needed, has in widths), widths


def test_the_sentence_comes_first_and_a_click_shows_why(browser, url):
    with open_page(browser, url) as page:
        assert page.inner_text("#verdict summary") == "actor:3 died"
        page.click("#verdict summary")
        page.click("#verdict button:has-text('actor:3')")
        assert page.inner_text("#detail-title") == "actor:3"


def test_no_label_of_an_axis_is_cut(browser, url, recording):
    values = [line_of("metric", "loss", t=float(step), value=-123456.7 - 1e-5 * step, step=step) for step in range(9)]
    recording.metrics(0, *values)
    # Ink in the first or the last column of pixels would be that of a label that goes on outside.
    ink = """all => all.map(one => {
        const column = (x) => one.getContext('2d').getImageData(x, 0, 1, one.height).data;
        return [0, one.width - 1].map((x) => Math.max(...column(x).filter((_, at) => at % 4 === 3)));
    })"""
    with open_page(browser, url) as page:
        page.wait_for_selector("#charts figure:has-text('loss')")
        found = page.eval_on_selector_all("#charts canvas", ink)
        assert len(found) > 3
        assert found == [[0, 0]] * len(found)


def test_a_worker_is_opened_and_left_with_the_keyboard(browser, url, recording):
    log = recording.folder / "logs" / "actor" / "1.log"
    log.parent.mkdir(parents=True)
    log.write_text("hello from rank 1\n")
    with open_page(browser, url) as page:
        page.wait_for_selector("[data-worker='actor:1']")
        page.focus("[data-worker='actor:0']")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector("#detail:not([hidden])")
        assert page.inner_text("#detail-title") == "actor:1"
        wait_for(page, "document.getElementById('log').textContent.includes('hello from rank 1')")
        page.click("#ask-stack")
        wait_for(page, "document.getElementById('stack').textContent.includes('is not running')")
        page.keyboard.press("Escape")
        assert page.is_hidden("#detail")
        assert page.evaluate("document.activeElement.dataset.worker") == "actor:1"


def test_lanes_are_zoomed_and_moved_with_the_keyboard_and_an_event_leads_to_its_lane(browser, url):
    with open_page(browser, url) as page:
        page.wait_for_selector(".lane")
        page.keyboard.press("+")
        assert page.input_value("#window") == "10"
        page.keyboard.press("ArrowLeft")
        assert page.get_attribute("#live", "aria-pressed") == "false"
        page.keyboard.press("l")
        assert page.get_attribute("#live", "aria-pressed") == "true"
        before = page.inner_text("#range")
        page.click("#events li:has-text('actor:3 died') button")
        wait_for(page, f"document.getElementById('range').textContent !== {before!r}")
        assert page.evaluate("page.laneEnd") == BEGAN + 40 + 5


def test_names_with_markup_and_escapes_are_only_text(browser, tmp_path):
    bad = "<img src=x onerror=window.hacked=1>\"'`\x1b[2J<script>window.hacked=1</script>"
    recording = Recording(tmp_path)
    lines = [
        line_of("began", bad, t=1.0),
        line_of("waiting", bad, t=1.2),
        line_of("metric", bad, t=1.0, value=1, step=1),
        line_of("metric", bad, t=2.0, value=2, step=2),
        line_of("channel", bad, t=2.0, depth=1, puts=1, gets=0),
        line_of("weights", bad, t=2.0, version=1, d=0.1),
        line_of("engine", bad, t=2.0, url=bad, version=1),
    ]
    recording.write("bad/0.jsonl", header(f"{bad}:0", run="abc", pid=1, host=bad, wall=BEGAN, node=0), *lines)
    recording.write("driver.jsonl", line_of("died", bad, t=3.0, text=bad), line_of("stopped", "", t=4.0))
    with served(LiveRun(tmp_path)) as address, open_page(browser, address) as page:
        page.wait_for_selector("#charts figure")
        page.click(".tile")
        page.wait_for_selector("#detail:not([hidden])")
        assert page.evaluate("window.hacked") is None
        assert page.query_selector("img") is None
        assert "<script>" in page.inner_text("#events")


def test_a_change_is_shown_while_the_page_is_open(browser, tmp_path):
    recording = Recording(tmp_path)
    recording.worker(0, wall=time.time())
    with served(LiveRun(tmp_path)) as address, open_page(browser, address) as page:
        page.wait_for_selector("[data-worker='actor:0']")
        recording.write("driver.jsonl", line_of("died", "actor:0", t=3.0))
        page.wait_for_selector("[data-worker='actor:0'].dead")
        recording.write("driver.jsonl", line_of("restarted", "actor:0", t=4.0, text="ok"))
        wait_for(page, "document.querySelector('.tile b').textContent.includes('↻1')")
        recording.write("actor/0.jsonl", "this is no line of events")
        wait_for(page, "document.getElementById('notices').textContent.includes('1 broken')")


@pytest.mark.heavy
def test_of_4096_devices_the_page_shows_nodes_and_opens_one(browser, tmp_path):
    recording = Recording(tmp_path)
    base = tmp_path / "events" / "actor"
    base.mkdir()
    for rank in range(4096):
        first = header(f"actor:{rank}", run="abc", pid=rank, host="h", wall=BEGAN, node=rank // 8, devices=(rank % 8,))
        (base / f"{rank}.jsonl").write_text(f"{first}\n{line_of('call', 'train', t=1.0, d=1.0)}\n")
    first = header("env:0", run="abc", pid=5000, host="h", wall=BEGAN, node=77, devices=())
    recording.write("env/0.jsonl", first, line_of("call", "play", t=1.0, d=1.0))
    recording.write("driver.jsonl", line_of("stopped", "", t=60.0))
    with served(LiveRun(tmp_path)) as address, open_page(browser, address) as page:
        page.wait_for_selector(".node")
        assert page.locator(".node").count() == 512
        page.click("[aria-label^='open node 77:']")
        page.wait_for_selector("[data-worker='actor:616']")
        assert page.locator(".tile").count() == 9
        page.click("[aria-label^='open node 78:']")
        page.wait_for_selector("[data-worker='actor:624']")
        assert page.locator(".tile").count() == 8, "nothing of the node before is left"
        page.click("[aria-label^='open node 77:']")
        page.wait_for_selector("[data-worker='actor:616']")
        assert page.locator("[aria-label='node 77'] .heads span").count() == 8


def test_a_metric_may_be_called_as_a_curve_of_the_page(browser, recording):
    recording.metrics(0, *[line_of("metric", "Step time", t=float(i), value=i, step=i) for i in range(5)])
    with served(LiveRun(recording.folder)) as address, open_page(browser, address) as page:
        wait_for(
            page,
            "[...document.querySelectorAll('figcaption b')].filter((b) => b.textContent === 'Step time').length === 2",
        )
