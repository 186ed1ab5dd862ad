"""A job's text with another `component_placement`; everything else stays as it is written, comments included."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from roost.config.document import Value
from roost.config.yaml_file import parse_text
from roost.errors import ConfigError


def with_placement(text: str, name: str, placement: Mapping[str, str]) -> str:
    """Return the job's text with these placements; components that are not among them keep theirs."""
    section = parse_text(text, name=name).get("cluster", "component_placement")
    if section is None or section.kind != "mapping":
        raise ConfigError(f"{name} has no component_placement to write to")
    lines = text.splitlines()
    keys = [key for key, _ in section.items()]
    first = keys[0].where()
    start, indent = first.line - 1, first.offset
    if name.endswith(".json") or lines[start][:indent].strip() or any(key.where().offset != indent for key in keys):
        raise ConfigError(
            f"{name} has its component_placement on one line", hint="write one component per line, or paste the answer"
        )
    stop = start + 1
    while stop < len(lines) and (not lines[stop].strip() or _indent(lines[stop]) >= indent):
        stop += 1
    while not lines[stop - 1].strip():
        stop -= 1
    new = [f"{' ' * indent}{component}: {value}" for component, value in _entries(section, placement)]
    return "\n".join([*lines[:start], *new, *lines[stop:]]) + "\n"


def _entries(section: Value, placement: Mapping[str, str]) -> list[tuple[str, str]]:
    found = []
    for key, value in section.items():
        for component in (part.strip() for part in str(key.scalar).split(",")):
            kept = yaml.safe_dump(value.plain(), default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            found.append((component, placement.get(component, kept)))
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
