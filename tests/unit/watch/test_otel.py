"""The figures of a run as OpenTelemetry gets them."""

from __future__ import annotations

import http.server
import threading

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the exporter needs roost[otel]")

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from recordings import Recording
from roost.runtime.events.format import line_of
from roost.watch.live import LiveRun
from roost.watch.otel import OtelExport, otlp_reader


def points(reader):
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        assert resource.resource.attributes["service.name"] == "roost"
        for metric in resource.scope_metrics[0].metrics:
            found[metric.name] = {tuple(sorted(one.attributes.items())): one.value for one in metric.data.data_points}
    return found


def test_every_figure_is_an_instrument_and_follows_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("roost.watch.otel.FRESH_SECONDS", 0.0)
    recording = Recording(tmp_path)
    recording.busy()
    recording.traffic()
    reader = InMemoryMetricReader()
    with OtelExport(LiveRun(tmp_path), reader):
        found = points(reader)
        assert found["roost_calls"][("node", "0"), ("worker", "actor:0")] == 57
        assert found["roost_channel_depth"][(("channel", "samples"),)] == 22
        assert found["roost_engine_versions_behind"][(("worker", "rollout:1"),)] == 1
        recording.write("actor/0.jsonl", line_of("call", "train", t=60.0, d=0.1))
        assert points(reader)["roost_calls"][("node", "0"), ("worker", "actor:0")] == 58


def test_a_collector_gets_them_over_http(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the exporter needs roost[otel]")
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, len(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    Recording(tmp_path).busy()
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with OtelExport(LiveRun(tmp_path), otlp_reader(f"http://127.0.0.1:{server.server_address[1]}/")):
            pass
        server.shutdown()
        thread.join(30)
    assert [path for path, _ in got] == ["/v1/metrics"]
    assert got[0][1] > 1000
