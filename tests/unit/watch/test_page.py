"""The page of a run: who may read it, what it gets, and that nothing in a run's names is ever markup."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue

import pytest

pytest.importorskip("starlette", reason="the page needs roost[watch]")

from browsing import served
from recordings import BEGAN, Recording
from roost import Topology, make_plan
from roost.render.grid import PALETTE
from roost.runtime.events.format import header, line_of
from roost.watch.facts import lane_facts, metric_facts, page_facts
from roost.watch.live import LiveRun, _read_layout
from roost.watch.measures import families_of, prometheus_text
from roost.watch.model import RunModel
from roost.watch.page import PageServer
from roost.watch.reading import EventReader
from roost.watch.views import Layout
from waiting import wait_until

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def recording(tmp_path) -> Recording:
    made = Recording(tmp_path)
    made.busy()
    return made


@pytest.fixture
def server(recording) -> Iterator[PageServer]:
    made = PageServer(LiveRun(recording.folder))
    thread = threading.Thread(target=made.serve, name="page")
    thread.start()
    wait_until(lambda: made._server.started, "the server to listen")
    yield made
    made.stop()
    thread.join(30)
    assert not thread.is_alive()


def ask(server, path, method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return found


def of(server, name=""):
    return f"/{server.token}/{name}"


def messages(server, kind="run") -> Iterator[dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", of(server, "events"))
    answer = connection.getresponse()
    event = ""
    try:
        while line := answer.readline().decode():
            if line.startswith("event: "):
                event = line[7:].strip()
            elif line.startswith("data: ") and event == kind:
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_the_page_loads_its_own_files_and_nothing_from_elsewhere(server):
    status, text, headers = ask(server, of(server))
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers
    for name in ("page.js", "parts.js", "map.js", "lanes.js", "charts.js", "page.css"):
        assert f'"{name}"' in text
        status, content, _ = ask(server, of(server, name))
        assert status == 200
        # The names of XML are no address that is loaded.
        assert "http" not in content.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in content


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/events", "/wrong/metrics", "//", "/../etc/passwd", "/%00/"])
def test_a_wrong_or_missing_token_gets_403_and_nothing_else(server, path):
    status, text, headers = ask(server, path)
    assert (status, text) == (403, "")
    assert "server" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1"])
def test_another_host_gets_403(server, host):
    assert ask(server, of(server), host=host)[:2] == (403, "")


def test_localhost_is_this_server_too(server):
    assert ask(server, of(server), host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}]
)
def test_a_page_of_another_origin_gets_403(server, headers):
    assert ask(server, of(server, "metrics"), **headers)[:2] == (403, "")


def test_its_own_page_may_ask(server):
    assert ask(server, of(server, "metrics"), Origin=f"http://127.0.0.1:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, of(server), method=method)[0] == 405


def test_it_listens_on_loopback_only(server):
    assert server._socket.getsockname()[0] == "127.0.0.1"


def test_a_change_reaches_every_open_page(server, recording):
    first, second = messages(server), messages(server)
    assert len(next(first)["workers"]) == len(next(second)["workers"]) == 9
    recording.write("driver.jsonl", line_of("died", "actor:5", t=70.0))
    for stream in (first, second):
        assert any(item["events"][0]["who"] == "actor:5" for item in stream)
        stream.close()


def test_metrics_are_sent_as_curves(server):
    stream = messages(server, "charts")
    charts = {chart["title"]: chart for chart in next(stream)}
    stream.close()
    (line,) = charts["reward"]["series"]
    assert line["points"][-1] == [8, pytest.approx(0.36)]
    assert {len(charts["Step time"]["series"][0]["points"]), charts["Step time"]["bound"]} == {8, None}


def test_a_reader_that_reads_nothing_holds_up_no_other(server, recording):
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(f"GET {of(server, 'events')} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        for number in range(20):
            recording.write("driver.jsonl", line_of("died", f"actor:{number}", t=70.0 + number, text="x" * 200))
            assert ask(server, of(server, "metrics"))[0] == 200
        assert len(next(messages(server))["workers"]) == 9


def test_lanes_have_the_calls_of_a_window(server):
    status, text, _ = ask(server, of(server, f"lanes?seconds=10&end={BEGAN + 61}&worker=actor:0&worker=nobody:0"))
    assert status == 200
    (lane,) = json.loads(text)["lanes"]
    assert lane["address"] == "actor:0"
    assert [span[2] for span in lane["spans"]] == ["train"] * 10


@pytest.mark.parametrize("query", ["seconds=nan", "seconds=-1", "end=inf", "seconds=x&end=1e99", "worker=%00"])
def test_odd_questions_get_an_answer(server, query):
    assert ask(server, of(server, f"lanes?{query}"))[0] == 200


def test_a_log_is_shown_for_workers_of_the_run_only(server, recording):
    log = recording.folder / "logs" / "actor"
    log.mkdir(parents=True)
    (log / "0.log").write_text("hello\x1b[2J\n")
    (recording.folder / "secret.log").write_text("secret")
    status, text, headers = ask(server, of(server, "log?worker=actor:0"))
    assert (status, text) == (200, "hello\\x1b[2J")
    assert headers["content-type"].startswith("text/plain")
    for bad in ("..:secret", "nobody:0", "../secret", ""):
        assert ask(server, of(server, f"log?worker={bad}"))[0] == 404


def test_prometheus_gets_escaped_labels(recording):
    name = 'a"b\\c\n<script>'
    recording.write("x/0.jsonl", header(f"{name}:0", run="abc", pid=1, host="h", wall=BEGAN, node=0))
    text = prometheus_text(recording.view(BEGAN + 61))
    assert 'roost_calls_total{worker="actor:0",node="0"} 57' in text
    assert 'roost_calls_total{worker="a\\"b\\\\c\\n<script>:0",node="0"} 0' in text
    assert 'roost_metric{worker="actor:0",name="reward"} 0.64' in text
    assert 'roost_device_load{node="0",device="1"} 0.1' in text
    assert text.endswith("\n")


def test_of_thousands_of_workers_the_page_gets_nodes_and_the_workers_of_one(tmp_path):
    recording = Recording(tmp_path)
    for rank in range(600):
        recording.worker(rank)
    facts = page_facts(recording.view(BEGAN + 2), title="t", status="running", node=7)
    assert facts["large"]
    assert [worker["address"] for worker in facts["workers"]] == ["actor:14", "actor:15"]
    assert len(facts["nodes"]) == 300


def test_many_points_of_a_metric_are_thinned_and_the_newest_stays(tmp_path):
    recording = Recording(tmp_path)
    recording.worker(0, *[line_of("metric", "loss", t=float(i), value=i, step=i) for i in range(1999)])
    (curve,) = metric_facts(recording.view().curves)
    (line,) = curve["series"]
    assert len(line["points"]) <= 300
    assert line["points"][-1] == [1998, 1998]


def test_short_calls_are_merged_in_a_lane(tmp_path):
    recording = Recording(tmp_path)
    recording.worker(0, *[line_of("call", "step", t=i / 100, d=0.005) for i in range(3000)])
    reader, model = EventReader(recording.folder), RunModel()
    model.take(reader.read())
    (lane,) = lane_facts(model, model.view(), BEGAN, BEGAN + 60, ["actor:0"])
    assert len(lane["spans"]) == 1
    assert lane["spans"][0][3] == 3000
    assert lane["spans"][0][4] == pytest.approx(0.5, abs=0.01)


def test_a_server_that_is_stopped_ends_open_pages_without_an_error(server):
    said = QueueHandler(Queue())
    logging.getLogger("uvicorn.error").addHandler(said)
    try:
        stream = messages(server)
        next(stream)
        server.stop()
        # It ends, and what comes until then can be read.
        for _ in stream:
            pass
        wait_until(lambda: "page" not in [thread.name for thread in threading.enumerate()], "the server ends")
    finally:
        logging.getLogger("uvicorn.error").removeHandler(said)
    assert said.queue.empty()


def test_a_port_that_is_taken_is_said(server, recording):
    from roost import ClusterError

    with pytest.raises(ClusterError, match="cannot be used"):
        PageServer(LiveRun(recording.folder), server.port)


def test_the_grafana_dashboard_asks_only_for_figures_that_there_are(recording):
    recording.traffic()
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text(encoding="utf-8"))
    known = {family.name for family in families_of(recording.view())}
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"roost_\w+", target["expr"])
    }
    assert len(asked) > 12
    assert asked <= known


def test_two_watchers_see_the_same_and_leave_nothing_behind(recording):
    before = sorted(recording.folder.rglob("*"))
    with served(LiveRun(recording.folder)) as one, served(LiveRun(recording.folder)) as other:
        first, second = (urllib.request.urlopen(f"{url}metrics", timeout=60).read() for url in (one, other))  # noqa: S310
    assert first == second
    assert b"roost_workers" in first
    assert sorted(recording.folder.rglob("*")) == before


def test_a_stack_is_asked_for_workers_of_the_run_only_and_a_refusal_is_text(server):
    status, text, _ = ask(server, of(server, "stack?worker=nobody:0"))
    assert (status, "has no worker" in text) == (409, True)
    assert ask(server, of(server, "stack?worker=../../etc"))[0] == 404


def test_ten_thousand_connections_that_say_nothing_or_nonsense_hold_up_nobody(recording):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 200
    code = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({few}, {few}))
sys.argv[1:] = ["watch", {f"{recording.folder}/"!r}]
runpy.run_module("roost", run_name="__main__")
"""
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        strangers = []
        try:
            url = process.stdout.readline().strip()
            address = "127.0.0.1", int(url.split(":")[2].partition("/")[0])
            for number in range(min(10_000, hard - 1000)):
                made = socket.create_connection(address, timeout=60)
                strangers.append(made)
                if number % 3 == 0:
                    with contextlib.suppress(OSError):
                        made.send(b"GET / HT" if number % 2 else b"\x16\x03\x01 nonsense\r\n\r\n")
                if number % 500 == 0:
                    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own
                        assert answer.status == 200
            with urllib.request.urlopen(f"{url}metrics", timeout=60) as answer:  # noqa: S310 - our own
                assert b"roost_workers" in answer.read()
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            for made in strangers:
                made.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert said == "the page changes nothing in the run; end it with Ctrl-C\n"


def test_the_map_has_the_columns_and_colours_of_the_plan(tmp_path):
    recording = Recording(tmp_path)
    recording.worker(0, line_of("call", "train", t=1.0, d=1.0))
    recording.worker(0, line_of("call", "play", t=1.0, d=1.0), group="env")
    job = {"cluster": {"num_nodes": 2, "component_placement": {"rollout": "4-7", "actor": "0-1"}}}
    plan = make_plan(job, Topology.from_shorthand("2x4"))
    (tmp_path / "plan.json").write_text(plan.to_json())
    layout = _read_layout(tmp_path / "plan.json")
    found = page_facts(recording.view(), title="", status="", layout=layout)
    assert [(node["rank"], node["columns"]) for node in found["nodes"]] == [(0, 4), (1, 4)]
    assert list(found["colours"]) == ["rollout", "actor", "env"]
    parts = (files("roost.watch") / "static" / "parts.js").read_text(encoding="utf-8")
    assert f"const COLOURS = {json.dumps(PALETTE)};" in parts
    (tmp_path / "plan.json").write_text("no plan")
    assert _read_layout(tmp_path / "plan.json") == Layout()


def test_one_server_shows_one_run_after_the_other(server, tmp_path_factory):
    other = Recording(tmp_path_factory.mktemp("other"))
    other.worker(0, line_of("call", "play", t=1.0, d=1.0), group="env")
    found = messages(server)
    assert "actor:0" in {worker["address"] for worker in next(found)["workers"]}
    server.show(LiveRun(other.folder))
    wait_until(lambda: [worker["address"] for worker in next(found)["workers"]] == ["env:0"], "the other run")
