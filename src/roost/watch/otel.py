"""Sends the figures of a run to a collector of OpenTelemetry, every few seconds: what `roost watch --otlp` does."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import partial

from roost.deadline import Deadline
from roost.errors import ConfigError
from roost.watch.limits import EXPORT_SECONDS, FRESH_SECONDS
from roost.watch.live import WatchedRun
from roost.watch.measures import Family, families_of

try:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
except ImportError as _error:
    raise ConfigError("--otlp needs OpenTelemetry", hint="pip install 'roost[otel]'") from _error


def otlp_reader(endpoint: str) -> MetricReader:
    """Return what sends to an OTLP collector over HTTP, such as http://localhost:4318, and never raises."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    except ImportError as error:
        raise ConfigError("--otlp needs the OTLP exporter", hint="pip install 'roost[otel]'") from error
    exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")
    return PeriodicExportingMetricReader(exporter, export_interval_millis=1e3 * EXPORT_SECONDS)


class OtelExport(AbstractContextManager["OtelExport"]):
    """Offers each family of a run as an instrument; the reader asks for them all together."""

    def __init__(self, run: WatchedRun, reader: MetricReader) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._fresh = Deadline.after(0)
        self._families: dict[str, Family] = {}
        resource = Resource.create({"service.name": "roost", "roost.run": run.title})
        self._provider = MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("roost")
        for family in self._current().values():
            name = family.name.removesuffix("_total")
            make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
            make(name, callbacks=[partial(self._observe, family.name)], description=family.about)

    def __exit__(self, *_: object) -> None:
        self._provider.shutdown()

    def _current(self) -> dict[str, Family]:
        with self._lock:
            if self._fresh.is_over:
                self._families = {family.name: family for family in families_of(self._run.refresh())}
                self._fresh = Deadline.after(FRESH_SECONDS)
            return self._families

    def _observe(self, name: str, _: CallbackOptions) -> list[Observation]:
        return [Observation(value, dict(labels)) for labels, value in self._current()[name].samples]
