"""The figures of a run that other tools collect: families of samples with labels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.watch.views import RunView

_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_Sample = tuple[Mapping[str, object], float | None]


@dataclass(frozen=True, slots=True)
class Family:
    """A figure with its samples, each with its labels."""

    name: str
    kind: str
    """`gauge` or `counter`."""
    about: str
    samples: tuple[tuple[Mapping[str, str], float], ...]


def families_of(view: RunView) -> list[Family]:
    """Return all families, the same ones for every run; those without a sample are empty."""
    out: list[Family] = []

    def family(name: str, about: str, samples: Iterable[tuple[Mapping[str, object], float | None]]) -> None:
        known = ((labels, value) for labels, value in samples if value is not None)
        found = tuple(({key: str(item) for key, item in labels.items()}, float(value)) for labels, value in known)
        out.append(Family(f"roost_{name}", "counter" if name.endswith("_total") else "gauge", about, found))

    def of(items: Iterable[tuple[Mapping[str, object], Any]], name: str, unit: float = 1) -> list[_Sample]:
        """Return an attribute of each item, in its unit."""
        found = [(labels, getattr(item, name)) for labels, item in items]
        return [(labels, None if value is None else value * unit) for labels, value in found]

    workers = [({"worker": worker.address, "node": worker.node}, worker) for worker in view.workers]
    nodes = [({"node": node.rank}, node) for node in view.nodes]
    devices = [({"node": node.rank, "device": i}, item) for node in view.nodes for i, item in enumerate(node.devices)]
    channels = [({"channel": item.name}, item) for item in view.channels]
    gets, puts = ([({**labels, "side": side}, item) for labels, item in channels] for side in ("get", "put"))
    links = [({"link": item.name}, item) for item in view.links]
    engines = [({"worker": item.worker}, item) for item in view.engines]
    counts = [({"state": state}, count) for state, count in view.counts.items()]
    curves = [({"worker": curve.worker, "name": curve.name}, curve.points[-1][1]) for curve in view.curves]
    family("run_over", "Whether the run is over.", [({}, view.is_over)])
    family("workers", "Workers by what they do now.", counts)
    family("calls_total", "Calls that ended.", of(workers, "calls"))
    family("calls_failed_total", "Calls that raised an exception.", of(workers, "failed"))
    family("restarts_total", "Restarts.", of(workers, "restarts"))
    family("idle_share", "Idle share of the last seconds.", of(workers, "idle_share"))
    family("worker_memory_bytes", "Resident memory.", of(workers, "memory", 2.0**20))
    family("node_cpu", "CPU use, from 0 to 1.", of(nodes, "cpu"))
    family("node_memory_bytes", "Memory in use.", of(nodes, "memory", 2.0**20))
    family("device_load", "Device use, from 0 to 1.", [(labels, load) for labels, (load, _, _) in devices])
    held = [(labels, None if used is None else used * 2.0**20) for labels, (_, used, _) in devices]
    family("device_memory_bytes", "Device memory in use.", held)
    family("channel_depth", "Items in a channel.", of(channels, "depth"))
    family("channel_waiting", "Gets and puts that wait.", of(gets, "getters") + of(puts, "putters"))
    rates = of(gets, "gets_per_second") + of(puts, "puts_per_second")
    family("channel_items_per_second", "Items through a channel.", rates)
    family("weights_version", "Version of a link.", of(links, "version"))
    family("weights_update_seconds", "How long the last update took.", of(links, "seconds"))
    family("engine_version", "Version of the weights that an engine has.", of(engines, "version"))
    family("engine_versions_behind", "Versions that an engine is behind its link.", of(engines, "behind"))
    family("engine_requests_total", "Requests that an engine answered.", of(engines, "served"))
    family("engine_requests_failed_total", "Requests that an engine did not answer.", of(engines, "failed"))
    family("engine_busy", "Requests under way.", of(engines, "busy"))
    family("engine_latency_seconds", "Mean of the last requests.", of(engines, "latency"))
    family("step_seconds", "How long the last step took.", [({}, step) for _, step in view.steps[-1:]])
    family("metric", "The last value of each metric of the job.", curves)
    return out


def prometheus_text(view: RunView) -> str:
    """Return the run in Prometheus's text format."""
    lines: list[str] = []
    for family in families_of(view):
        lines.append(f"# HELP {family.name} {family.about}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            inner = ",".join(f'{key}="{item.translate(_ESCAPED)}"' for key, item in labels.items())
            lines.append(f"{family.name}{{{inner}}} {value:.10g}" if inner else f"{family.name} {value:.10g}")
    return "\n".join(lines) + "\n"
