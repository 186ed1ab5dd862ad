"""An X-ray as text, as a page, and as the files of a report. Pure."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.text import Text

from roost.config.ranks import format_ranks
from roost.text import plural, size_text
from roost.xray.facts import Actor, Facts, Node, accelerators
from roost.xray.judge import NOTE, PROBLEM, WARNING, Finding, find_owners
from roost.xray.names import fold_names, name_actors, role_of
from roost.xray.stacks import group_places

_STYLES = {PROBLEM: "bold red", WARNING: "yellow", NOTE: "cyan"}
_INDENT = 10
_MOST_KINDS = 8
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>X-ray of {title}</title>
<meta name="viewport" content="width=device-width"><style>
:root{{color-scheme:light dark;--paper:#fff;--text:#1f2328;--dim:#59636e;--red:#b3261e;--yellow:#7a5200;--cyan:#0b5c74}}
@media(prefers-color-scheme:dark){{:root{{--paper:#0d1117;--text:#f0f6fc;--dim:#9198a1;--red:#ff8a80;--yellow:#e3b341;
--cyan:#79c0ff}}}}
body{{margin:0;padding:1rem 1.5rem;background:var(--paper);color:var(--text)}}
pre{{font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}}
.bold{{font-weight:700}}.dim{{color:var(--dim)}}.red{{color:var(--red)}}.yellow{{color:var(--yellow)}}
.cyan{{color:var(--cyan)}}</style><body><pre>{text}</pre></body></html>
"""


def draw_xray(facts: Facts, findings: Sequence[Finding]) -> Text:
    """Return the findings, who is where, and what could not be seen, as styled text."""
    names = name_actors(facts.actors)
    alive = [node for node in facts.nodes if not node.died]
    gpus = sum(_gpus(node) for node in alive)
    actors = sum(item.state != "DEAD" for item in facts.actors)
    has = f"{plural(len(alive), 'node')}, {plural(gpus, 'GPU')}, {plural(actors, 'actor')}"
    text = Text.assemble((f"Ray at {facts.address}", "bold"), f"  {has}\n")
    for driver in facts.drivers:
        text.append(f"  {driver}\n", style="dim")
    if not facts.drivers:
        text.append("  no driver is connected\n", style="dim")
    for item in findings:
        text.append(f"{item.level:<{_INDENT}}", style=_STYLES[item.level])
        text.append(f"{item.text}\n", style="bold" if item.level == PROBLEM else "")
        for line in item.evidence:
            text.append(f"{'':<{_INDENT}}{line}\n")
        if item.do:
            text.append(f"{'':<{_INDENT}}do: {item.do}\n", style="dim")
    if not findings:
        text.append("nothing waits, and nothing is dead\n")
    for node in alive:
        text.append_text(_draw_node(facts, node, names))
    if facts.stacks is not None:
        text.append_text(_draw_stacks(facts, names))
    if facts.unknown:
        text.append("what could not be seen\n", style="bold")
        for line in facts.unknown:
            text.append(f"  {line}\n", style="dim")
    text.rstrip()
    return text


def _draw_node(facts: Facts, node: Node, names: Mapping[str, str]) -> Text:
    taken = [
        f"{node.total[name] - node.free.get(name, 0):g} of {node.total[name]:g} {name}"
        for name in ("CPU", *sorted(accelerators()))
        if node.total.get(name)
    ]
    memory = [f"memory {size_text(node.memory[0])} of {size_text(node.memory[1])}"] if node.memory else []
    text = Text.assemble((f"{node}{' head' if node.is_head else ''}", "bold"), f"  {', '.join(taken)} taken")
    text.append(f"{''.join(f', {item}' for item in memory)}\n")
    owners = find_owners(facts, node)

    def kinds(index: int) -> tuple[tuple[str, bool], ...]:
        given, told = owners.get(index, ([], []))
        return tuple(sorted((re.sub(r"\d+$", "", names[item.id]), item in told) for item in (*given, *told)))

    # Neighbours with the same kinds of owners are one line.
    for alike, group in groupby(node.ids or range(_gpus(node)), kinds):
        indexes = list(group)
        found = [item for index in indexes for side in owners.get(index, ([], [])) for item in side]
        style = "dim" if not alike else "yellow" if any(is_told for _, is_told in alike) else ""
        text.append(f"  GPU {format_ranks(indexes):<7}{_who(found, names) if found else 'nobody'}\n", style=style)
    own = {item.id for sides in owners.values() for side in sides for item in side}
    groups = {item.id: item for item in facts.groups}
    others: dict[str, list[Actor]] = {}
    for actor in facts.actors:
        if actor.node == node.id and actor.state == "ALIVE" and actor.id not in own:
            placed = groups.get(actor.group)
            has_gpu = placed and any(
                accelerators() & item.wants.keys() for item in placed.bundles if item.node == node.id
            )
            others.setdefault(f"in {placed}: " if has_gpu else "", []).append(actor)
    for where, actors in sorted(others.items(), key=lambda item: not item[0]):
        text.append(f"  {'a GPU' if where else 'no GPU':<11}{where}{_who(actors, names)}\n")
    return text


def _who(actors: Sequence[Actor], names: Mapping[str, str]) -> str:
    """Name actors, with the roles of known frameworks and the memory that they take."""
    roles = "/".join(dict.fromkeys(filter(None, map(role_of, actors))))
    memory = sum({item.pid: item.memory for item in actors}.values())
    more = ", ".join(filter(None, [roles, memory and size_text(memory)]))  # type: ignore[list-item]
    return fold_names(dict.fromkeys(names[item.id] for item in actors), _MOST_KINDS) + (f"  ({more})" if more else "")


def _draw_stacks(facts: Facts, names: Mapping[str, str]) -> Text:
    text = Text("where they stand\n", style="bold")
    called = {**names, **{driver.id: f"driver {driver.id}" for driver in facts.drivers}}
    kinds = {item.id: item.class_name for item in facts.actors} | {item.id: "driver" for item in facts.drivers}
    plain = Text()
    for kind, places in group_places(facts.stacks or (), kinds).items():
        total = sum(map(len, places.values()))
        for place, ids in places.items():
            plain.append(f"  {kind:<20} {len(ids)} of {total} in {place}: {fold_names(called[item] for item in ids)}\n")
    return Text.assemble(text, plain if plain else "  no stack could be read\n")


def draw_page(facts: Facts, text: Text) -> str:
    """Return the text as a page that needs nothing else, light or dark as its reader has it."""
    parts, end = [], 0
    for span in sorted(text.spans, key=lambda item: item.start):
        if span.start >= end:
            parts.append(html.escape(text.plain[end : span.start]))
            parts.append(f'<span class="{span.style}">{html.escape(text.plain[span.start : span.end])}</span>')
            end = span.end
    parts.append(html.escape(text.plain[end:]))
    return _PAGE.format(title=html.escape(facts.address), text="".join(parts))


def as_data(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings and facts in types that JSON has."""
    return {"findings": [item.to_dict() for item in findings], **asdict(facts)}


def report_files(facts: Facts, findings: Sequence[Finding]) -> dict[str, str]:
    """Return the files of a report by their names: a page, the same as text and as JSON, and all stacks."""
    names = name_actors(facts.actors)
    text = draw_xray(facts, findings)
    files = {
        "xray.html": draw_page(facts, text),
        "xray.txt": text.plain + "\n",
        "xray.json": json.dumps(as_data(facts, findings), indent=2) + "\n",
    }
    for stack in facts.stacks or ():
        name = re.sub(r"[^\w.-]+", "_", names.get(stack.id, f"driver-{stack.id}"))[:80]
        # Names of actors need not be unique.
        files[f"stacks/{name}{f'-{stack.id[:8]}' if f'stacks/{name}.txt' in files else ''}.txt"] = stack.text
    return files


def _gpus(node: Node) -> int:
    return int(sum(node.total.get(name, 0) for name in accelerators()))
