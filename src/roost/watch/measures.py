"""The figures of a run that other tools collect: families of samples with labels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roost.watch.views import RunView, State

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

    def family(name: str, kind: str, about: str, samples: Iterable[_Sample]) -> None:
        known = (
            ({key: str(item) for key, item in labels.items()}, value) for labels, value in samples if value is not None
        )
        out.append(Family(f"roost_{name}", kind, about, tuple(known)))

    family("run_over", "gauge", "Whether the run is over.", [({}, float(view.is_over))])
    counts = [({"state": state}, float(sum(worker.state is state for worker in view.workers))) for state in State]
    family("workers", "gauge", "Workers by what they do now.", counts)
    each = [({"worker": worker.address, "node": worker.node}, worker) for worker in view.workers]
    family("calls_total", "counter", "Calls that ended.", [(labels, float(item.calls)) for labels, item in each])
    failed = [(labels, float(item.failed)) for labels, item in each]
    family("calls_failed_total", "counter", "Calls that raised an exception.", failed)
    family("restarts_total", "counter", "Restarts.", [(labels, float(item.restarts)) for labels, item in each])
    family(
        "idle_share", "gauge", "Idle share of the last seconds.", [(labels, item.idle_share) for labels, item in each]
    )
    memory = [(labels, None if item.memory is None else item.memory * 2.0**20) for labels, item in each]
    family("worker_memory_bytes", "gauge", "Resident memory.", memory)
    family("node_cpu", "gauge", "CPU use, from 0 to 1.", [({"node": node.rank}, node.cpu) for node in view.nodes])
    used = [({"node": node.rank}, node.memory * 2.0**20) for node in view.nodes]
    family("node_memory_bytes", "gauge", "Memory in use.", used)
    devices = [({"node": n.rank, "device": i}, item) for n in view.nodes for i, item in enumerate(n.devices)]
    family("device_load", "gauge", "Device use, from 0 to 1.", [(labels, item[0]) for labels, item in devices])
    held = [(labels, None if item[1] is None else item[1] * 2.0**20) for labels, item in devices]
    family("device_memory_bytes", "gauge", "Device memory in use.", held)
    channels = [({"channel": item.name}, item) for item in view.channels]
    family("channel_depth", "gauge", "Items in a channel.", [(labels, float(item.depth)) for labels, item in channels])
    waiting = [({**labels, "side": "get"}, float(item.getters)) for labels, item in channels]
    waiting += [({**labels, "side": "put"}, float(item.putters)) for labels, item in channels]
    family("channel_waiting", "gauge", "Gets and puts that wait.", waiting)
    rates = [({**labels, "side": "get"}, item.gets_per_second) for labels, item in channels]
    rates += [({**labels, "side": "put"}, item.puts_per_second) for labels, item in channels]
    family("channel_items_per_second", "gauge", "Items through a channel.", rates)
    links = [({"link": item.name}, item) for item in view.links]
    family("weights_version", "gauge", "Version of a link.", [(labels, float(item.version)) for labels, item in links])
    took = [(labels, item.seconds) for labels, item in links]
    family("weights_update_seconds", "gauge", "How long the last update took.", took)
    engines = [({"worker": item.worker}, item) for item in view.engines]
    versions = [(labels, None if item.version is None else float(item.version)) for labels, item in engines]
    family("engine_version", "gauge", "Version of the weights that an engine has.", versions)
    behind = [(labels, None if item.behind is None else float(item.behind)) for labels, item in engines]
    family("engine_versions_behind", "gauge", "Versions that an engine is behind its link.", behind)
    served = [(labels, float(item.served)) for labels, item in engines]
    family("engine_requests_total", "counter", "Requests that an engine answered.", served)
    errors = [(labels, float(item.failed)) for labels, item in engines]
    family("engine_requests_failed_total", "counter", "Requests that an engine did not answer.", errors)
    family("engine_busy", "gauge", "Requests under way.", [(labels, float(item.busy)) for labels, item in engines])
    late = [(labels, item.latency) for labels, item in engines]
    family("engine_latency_seconds", "gauge", "Mean of the last requests.", late)
    family("step_seconds", "gauge", "How long the last step took.", [({}, step) for _, step in view.steps[-1:]])
    last = [({"worker": curve.worker, "name": curve.name}, curve.points[-1][1]) for curve in view.curves]
    family("metric", "gauge", "The last value of each metric of the job.", last)
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
