"""Bars for the memory that workers hold, and brackets for domains, below the nodes of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from roost.config.topology import Topology
from roost.placement.domains import NODE, domains_of
from roost.placement.ledger import Ledger, Seats
from roost.render.grid import Line, Run
from roost.render.svg import escape
from roost.text import size_text


def memory_lines(ledger: Ledger) -> dict[int, list[Line]]:
    """Return for each node a bar for each phase over its accelerators, and one for the most that its memory holds."""
    at = {place: seats for seats in ledger.seats for place in seats.places}
    found: dict[int, list[Line]] = {}
    for node in sorted({node for node, _ in at}):
        devices = [(local, at[node, local]) for node_, local in sorted(at) if node_ == node and local >= 0]
        lines = [
            (phase.name, tuple(_bars([(local, seats, ledger.held(seats, index)) for local, seats in devices])))
            for index, phase in enumerate(ledger.config.phases)
        ]
        between = [(local, seats, ledger.peaks[seats][0]) for local, seats in devices]
        if any(held > max(ledger.held(seats, index) for index in range(len(lines))) for _, seats, held in between):
            lines.append(("between", tuple(_bars(between))))
        host = at[node, -1]
        if (held := ledger.peaks[host][0]) or not devices:
            last = max((local for local, _ in devices), default=0)
            lines.append(("node", (_bar(0, last, held, host.limit),)))
        found[node] = [line for line in lines if line[1]]
    return found


def domain_lines(topology: Topology, levels: Iterable[str]) -> dict[int, list[Line]]:
    """Return for each node a bracket over the accelerators of each domain of each level."""
    found: dict[int, list[Line]] = {}
    for level in dict.fromkeys(level for level in levels if level != NODE):
        domains = domains_of(topology, level)
        for rank, node in enumerate(topology.nodes):
            own = [domains[rank, local] for local in range(len(node.accelerators))] or [domains[rank, -1]]
            found.setdefault(rank, []).append((level, brackets([one or "no label" for one in own])))
    return found


def brackets(texts: Sequence[str]) -> tuple[Run, ...]:
    """Return a bracket over each run of accelerators with the same text."""
    runs = [list(run) for _, run in groupby(enumerate(texts), key=lambda item: item[1])]
    return tuple(Run(run[0][0], run[-1][0], run[0][1]) for run in runs)


def _bars(held: Sequence[tuple[int, Seats, int]]) -> Iterator[Run]:
    """Yield one bar for each run of neighbours that hold as much."""
    for (_, amount, limit), run in groupby(
        enumerate(held), key=lambda item: (item[1][0] - item[0], item[1][2], item[1][1].limit)
    ):
        locals_ = [local for _, (local, _, _) in run]
        yield _bar(locals_[0], locals_[-1], amount, limit)


def _bar(first: int, last: int, held: int, limit: int | None) -> Run:
    if limit is None:
        return Run(first, last, f"{size_text(held)} of ?", 0.0)
    over = " !" if held > limit else ""
    return Run(
        first, last, f"{size_text(held)} of {size_text(limit)}{over}", held / limit if limit else 2.0 * bool(held)
    )


def memory_html(ledger: Ledger) -> Iterator[str]:
    """Yield what the ledger says as a part of a page."""
    yield "<h2>Memory</h2>"
    for item in ledger.problems:
        hint = f" hint: {escape(item.hint)}" if item.hint else ""
        yield f"<p><strong>{escape(item.message)}</strong>{hint}</p>"
    yield from (f"<p>{escape(line)}</p>" for line in ledger.lines())
