"""The flow of a step as lines of text, and the same for a page."""

from __future__ import annotations

from collections.abc import Iterator

from roost.config.flow import FlowConfig
from roost.render.svg import escape
from roost.text import plural


def flow_lines(flow: FlowConfig) -> list[str]:
    """Return the flow as chains of calls, each arrow once, and the weights' way back.

    >>> from roost.config.document import PlainValue
    >>> edges = (("a.x", "c.z"), ("b.y", "c.z"))
    >>> flow_lines(FlowConfig(calls=("a.x", "b.y", "c.z"), edges=edges, source="c", target="a", value=PlainValue({})))
    ['a.x → c.z', 'b.y → c.z', 'weights: c → a, in every step']
    """
    left = list(flow.edges)
    lines = [call for call in flow.order if not any(call in edge for edge in flow.edges)]
    for call in flow.order:
        for edge in [edge for edge in left if edge[0] == call]:
            chain = list(edge)
            left.remove(edge)
            while (more := next((one for one in left if one[0] == chain[-1]), None)) is not None:
                left.remove(more)
                chain.append(more[1])
            lines.append(" → ".join(chain))
    if flow.source:
        lag = f"at most {plural(flow.staleness, 'step')} behind" if flow.staleness else "in every step"
        lines.append(f"weights: {flow.source} → {flow.target}, {lag}")
    return lines


def flow_html(flow: FlowConfig) -> Iterator[str]:
    """Yield the flow as a part of a page."""
    yield "<h2>Flow</h2>"
    yield from (f"<p>{escape(line)}</p>" for line in flow_lines(flow))
