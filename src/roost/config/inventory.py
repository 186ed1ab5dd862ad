"""Read topologies from a shorthand, a dict or an inventory file, and write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roost.config.document import PlainValue, Value
from roost.config.fields import Field, Section, Table
from roost.config.hardware import AcceleratorType, accelerator_types
from roost.config.node_groups import GROUP_FIELDS, MAX_NODES, read_node_groups
from roost.config.reading import Notes, read_list, read_text
from roost.config.topology import Accelerator, Node, Topology
from roost.config.values import (
    DEVICE,
    FILLED_TEXT,
    MEMORY,
    TEXT,
    TEXTS,
    UNITS,
    Kind,
    Schema,
    choice,
    items,
    typed,
    whole,
)
from roost.config.yaml_file import INVENTORY_FILE_LIMIT, read_file
from roost.errors import ConfigError
from roost.text import plural, shorten

MAX_ACCELERATORS_PER_NODE = 1024

_COUNT = whole(0, MAX_ACCELERATORS_PER_NODE)
_SAME_FIELDS = (
    Field(
        "type",
        choice(accelerator_types, "accelerator type"),
        "The vendor; nvidia where it is left out.",
        examples=tuple(accelerator_types()),
    ),
    Field("model", TEXT, "The model.", examples=("H100",)),
    Field("memory", MEMORY, "The memory of each. Bytes, or a number with a unit."),
    Field("labels", TEXTS, "Labels of its own, such as its NVLink domain; others are those of its node."),
)
ACCELERATOR_FIELDS = Table(
    "One accelerator.",
    *_SAME_FIELDS,
    Field("device", DEVICE, "What the visible-devices variable calls it: an index or a UUID."),
    naming="the {name} of an accelerator",
)


def _count_or_list() -> Schema:
    listed = {"items": ACCELERATOR_FIELDS.schema(), "maxItems": MAX_ACCELERATORS_PER_NODE}
    return _COUNT.schema() | {"type": ["integer", "string", "array"], **listed}


# Devices differ, so a mapping that describes several accelerators has none.
ACCELERATORS_FIELDS = Table(
    "How many accelerators it has; or `{count: 8, model: H100}`; or a list with a mapping for each.",
    *_SAME_FIELDS,
    Field("count", _COUNT, "How many of them.", required=True),
    short=Kind(_COUNT.read, _count_or_list),
    naming="the {name} of the accelerators",
)
NODE_FIELDS = Table(
    "One node.",
    Field("accelerators", ACCELERATORS_FIELDS, required=True, examples=(8,)),
    Field("name", FILLED_TEXT, "Its name."),
    Field("address", FILLED_TEXT, "Its address."),
    Field("labels", TEXTS, "Labels of your own."),
    Field("cpus", whole(), "How many CPUs it has."),
    Field("memory", MEMORY, "Its memory. Bytes, or a number with a unit."),
    naming="the {name} of a node",
)
INVENTORY_FIELDS = Table(
    "The hardware of a cluster, to plan on.",
    Field("nodes", items(NODE_FIELDS, least=1), "The nodes, in the order of their ranks.", required=True),
    Field("groups", items(GROUP_FIELDS), "Labels over nodes, as in a job."),
    naming="{name}",
)


def read_shorthand(text: str, what: str = "cluster") -> Topology:
    """Read `4x8:H100,2x4:4090,1x0`: a list of nodes x accelerators : model. Messages call it `what`."""
    if not isinstance(text, str):
        raise ConfigError(f"a cluster is described by text such as '2x8', not by a {type(text).__name__}")
    nodes: list[Node] = []
    what = f"{what} {shorten(text)!r}"
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*[xX]\s*([0-9]{1,9})\s*(?::\s*([^\s:,]+)\s*)?", part)
        if not match:
            hint = "write 2x8, or 4x8:H100,2x4:4090,1x0 for several kinds of node"
            raise ConfigError(f"{what}: {shorten(part.strip())!r} is not nodes x accelerators", hint=hint)
        count, accelerators, model = int(match[1]), int(match[2]), match[3]
        if count < 1:
            raise ConfigError(f"{what}: {shorten(part.strip())!r} has no node", hint="the first number counts nodes")
        if len(nodes) + count > MAX_NODES or accelerators > MAX_ACCELERATORS_PER_NODE:
            most = f"{MAX_NODES} nodes of {MAX_ACCELERATORS_PER_NODE} accelerators"
            raise ConfigError(f"{what} is too large: at most {most}")
        nodes += [Node(accelerators=(Accelerator(model=model),) * accelerators)] * count
    return Topology(nodes=tuple(nodes))


def _read_shorthand_value(value: Value, notes: Notes, what: str) -> Topology | None:
    text = read_text(value, notes, what)
    if text is None:
        return None
    try:
        return read_shorthand(text, what)
    except ConfigError as error:
        for problem in error.problems:
            notes.config(value, problem.message, problem.hint)
        return None


_GROUP = r"\s*[0-9]{1,9}\s*[xX]\s*[0-9]{1,9}\s*(:\s*[^\s:,]+\s*)?"
SHORTHAND = Kind(
    _read_shorthand_value,
    lambda: typed(
        "string", pattern=f"^{_GROUP}(,{_GROUP})*$", error="write nodes x accelerators, such as 2x8 or 4x8:H100,1x0"
    ),
)
"""A cluster in shorthand, read as its topology."""


def read_inventory_file(path: str | Path) -> Topology:
    """Read an inventory file, YAML or JSON; every mistake comes with line and column."""
    return _read(read_file(path, limit=INVENTORY_FILE_LIMIT))


def read_inventory(data: Mapping[str, Any]) -> Topology:
    """Read the inventory format from a dict."""
    return _read(PlainValue(data, ("inventory",)))


def write_inventory(topology: Topology) -> dict[str, Any]:
    """Return the shortest dict that `read_inventory` reads as the topology."""
    groups = [group.to_dict() for group in topology.groups]
    return {"nodes": [_write_node(node) for node in topology.nodes], "groups": groups}


def inventory_text(topology: Topology) -> str:
    """Return the text of an inventory file for the topology."""
    return str(yaml.safe_dump(write_inventory(topology), sort_keys=False))


def _read(value: Value) -> Topology:
    notes = Notes()
    section = INVENTORY_FIELDS.read(value, notes, "an inventory")
    values = section.read("nodes", [])
    nodes = [_read_node(item, notes) for item in values]
    if "nodes" in section and not nodes and section.value("nodes").kind == "list":
        notes.config(section.value("nodes"), "an inventory needs at least one node")
    first: dict[str, int] = {}
    for rank, (node, item) in enumerate(zip(nodes, values, strict=True)):
        if node.name is not None and first.setdefault(node.name, rank) != rank:
            notes.config(item.get("name") or item, f"nodes {first[node.name]} and {rank} are both named {node.name!r}")
    has = f"the inventory has {plural(len(nodes), 'node')}"
    groups = read_node_groups(section.read("groups", ()), notes, len(nodes), has)
    notes.raise_if_any()
    return Topology(nodes=tuple(nodes), groups=groups)


def _read_node(value: Value, notes: Notes) -> Node:
    section = NODE_FIELDS.read(value, notes, "a node")
    accelerators = _read_accelerators(section.value("accelerators"), notes) if "accelerators" in section else ()
    return Node(
        accelerators=accelerators,
        labels=tuple(sorted(section.read("labels", {}).items())),
        **{key: section.read(key) for key in ("name", "address", "cpus", "memory")},
    )


def _read_accelerators(value: Value, notes: Notes) -> tuple[Accelerator, ...]:
    """Read a count, a mapping with a count, or a list with one mapping for each."""
    if value.kind == "scalar":
        return (Accelerator(),) * (_COUNT.read(value, notes, "the number of accelerators") or 0)
    if value.kind == "list":
        listed = read_list(value, notes, "the accelerators of a node")
        if len(listed) > MAX_ACCELERATORS_PER_NODE:
            most = f"may have at most {MAX_ACCELERATORS_PER_NODE}"
            notes.config(value, f"a node has {len(listed)} accelerators, and {most}")
            return ()
        found = tuple(_read_accelerator(ACCELERATOR_FIELDS.read(item, notes, "an accelerator")) for item in listed)
    else:
        section = ACCELERATORS_FIELDS.read(value, notes, "the mapping of accelerators")
        found = (_read_accelerator(section),) * section.read("count", 0)
    node = Node(accelerators=found)
    if twice := node.doubled_devices():
        hint = "an accelerator without a device is called by its place, from 0"
        notes.config(value, f"two accelerators of a node have the device {', '.join(twice)}", hint)
    if len(types := node.accelerator_types()) > 1:
        notes.config(value, f"a node has accelerators of several types: {', '.join(types)}")
    return found


def _read_accelerator(section: Section) -> Accelerator:
    return Accelerator(
        type=AcceleratorType(section.read("type", AcceleratorType.NVIDIA)),
        labels=tuple(sorted(section.read("labels", {}).items())),
        **{key: section.read(key) for key in ("model", "memory", "device")},
    )


def _write_node(node: Node) -> dict[str, Any]:
    out = {
        "accelerators": _write_accelerators(node.accelerators),
        "name": node.name,
        "address": node.address,
        "cpus": node.cpus,
        "labels": dict(node.labels) or None,
        "memory": _write_memory(node.memory),
    }
    return {key: value for key, value in out.items() if value is not None}


def _write_accelerators(accelerators: tuple[Accelerator, ...]) -> int | dict[str, Any] | list[dict[str, Any]]:
    if not accelerators or set(accelerators) == {Accelerator()}:
        return len(accelerators)
    if len(set(accelerators)) == 1 and accelerators[0].device is None:
        return {"count": len(accelerators), **_write_accelerator(accelerators[0])}
    return [_write_accelerator(item) for item in accelerators]


def _write_accelerator(item: Accelerator) -> dict[str, Any]:
    out: dict[str, Any] = {
        "type": str(item.type),
        "model": item.model,
        "memory": _write_memory(item.memory),
        "device": item.device,
    }
    out["labels"] = dict(item.labels) or None
    return {key: value for key, value in out.items() if value is not None}


def _write_memory(size: int | None) -> int | str | None:
    for unit in ("TiB", "GiB", "MiB"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return size
