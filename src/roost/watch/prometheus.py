"""A run in Prometheus's text format. Pure."""

from __future__ import annotations

from roost.watch.measures import families_of
from roost.watch.views import RunView


def prometheus_text(view: RunView) -> str:
    """Return the run in Prometheus's text format."""
    lines: list[str] = []
    for family in families_of(view):
        lines.append(f"# HELP {family.name} {family.about}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            inner = ",".join(f'{key}="{_label(item)}"' for key, item in labels.items())
            lines.append(f"{family.name}{{{inner}}} {value:.10g}" if inner else f"{family.name} {value:.10g}")
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
