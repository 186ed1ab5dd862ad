"""Topologies from a shorthand, a dict or an inventory file, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roost.config.document import PlainValue, Value
from roost.config.hardware import AcceleratorType, accelerator_types
from roost.config.node_groups import MAX_NODES, NodeGroup, read_node_groups
from roost.config.reading import (
    Keys,
    Notes,
    describe,
    known_hint,
    read_fields,
    read_filled_text,
    read_int,
    read_list,
    read_mapping,
    read_text,
)
from roost.config.topology import Accelerator, Node, Topology
from roost.config.yaml_file import INVENTORY_FILE_LIMIT, read_file
from roost.errors import ConfigError
from roost.text import plural, shorten

MAX_ACCELERATORS_PER_NODE = 1024

INVENTORY_KEYS = Keys(("nodes", "groups"), required=("nodes",))
NODE_KEYS = Keys(("accelerators", "name", "address", "labels", "cpus", "memory"), required=("accelerators",))
ACCELERATOR_KEYS = Keys(("type", "model", "memory", "device"))
# Devices differ, so a mapping that stands for several has none.
ACCELERATORS_KEYS = Keys(("type", "model", "memory", "count"), required=("count",))
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def read_shorthand(text: str) -> Topology:
    """`4x8:H100,2x4:4090,1x0`: nodes x accelerators : model, one after the other."""
    if not isinstance(text, str):
        raise ConfigError(f"a cluster is described by text such as '2x8', not by a {type(text).__name__}")
    nodes: list[Node] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*[xX]\s*([0-9]{1,9})\s*(?::\s*([^\s:,]+)\s*)?", part)
        if not match:
            raise ConfigError(
                f"cluster {shorten(text)!r}: {shorten(part.strip())!r} is not nodes x accelerators",
                hint="write 2x8, or 4x8:H100,2x4:4090,1x0 for several kinds of node",
            )
        count, accelerators, model = int(match[1]), int(match[2]), match[3]
        if count < 1:
            raise ConfigError(
                f"cluster {shorten(text)!r}: {shorten(part.strip())!r} has no node",
                hint="the first number counts nodes",
            )
        if len(nodes) + count > MAX_NODES or accelerators > MAX_ACCELERATORS_PER_NODE:
            raise ConfigError(
                f"cluster {shorten(text)!r}: at most {MAX_NODES} nodes of {MAX_ACCELERATORS_PER_NODE} accelerators "
                f"are planned"
            )
        nodes += [Node(accelerators=(Accelerator(model=model),) * accelerators)] * count
    return Topology(nodes=tuple(nodes))


def read_inventory_file(path: str | Path) -> Topology:
    """An inventory file, YAML or JSON; every mistake with line and column."""
    return _read(read_file(path, limit=INVENTORY_FILE_LIMIT))


def read_inventory(data: Mapping[str, Any]) -> Topology:
    """The inventory format as a dict."""
    return _read(PlainValue(data, ("inventory",)))


def write_inventory(topology: Topology) -> dict[str, Any]:
    """The shortest dict that reads back as the topology."""
    out: dict[str, Any] = {"nodes": [_write_node(node) for node in topology.nodes]}
    out["groups"] = [group.to_dict() for group in topology.groups]
    return out


def inventory_text(topology: Topology) -> str:
    """The topology as an inventory file."""
    import yaml

    text: str = yaml.safe_dump(write_inventory(topology), sort_keys=False)
    return text


def _read(value: Value) -> Topology:
    notes = Notes()
    fields = read_mapping(value, notes, "an inventory", INVENTORY_KEYS)
    nodes: list[Node] = []
    if "nodes" in fields:
        items = read_list(fields["nodes"], notes, "nodes")
        nodes = [_read_node(item, notes) for item in items]
        if not nodes and fields["nodes"].kind == "list":
            notes.config(fields["nodes"], "an inventory needs at least one node")
        _check_unique(nodes, items, notes)
    groups: tuple[NodeGroup, ...] = ()
    if "groups" in fields:
        has = f"the inventory has {plural(len(nodes), 'node')}"
        groups = read_node_groups(fields["groups"], notes, len(nodes), has)
    notes.raise_if_any()
    return Topology(nodes=tuple(nodes), groups=groups)


def _read_node(value: Value, notes: Notes) -> Node:
    fields = read_mapping(value, notes, "a node", NODE_KEYS)
    accelerators: tuple[Accelerator, ...] = ()
    if "accelerators" in fields:
        accelerators = _read_accelerators(fields["accelerators"], notes)
    labels: dict[str, str] = {}
    if "labels" in fields:
        for name, field in read_fields(fields["labels"], notes, "the labels of a node").items():
            text = read_text(field.value, notes, f"the label {shorten(name)!r} of a node")
            if text is not None:
                labels[name] = text
    return Node(
        accelerators=accelerators,
        name=read_filled_text(fields["name"], notes, "the name of a node") if "name" in fields else None,
        address=read_filled_text(fields["address"], notes, "the address of a node") if "address" in fields else None,
        labels=tuple(sorted(labels.items())),
        cpus=read_int(fields["cpus"], notes, "the cpus of a node") if "cpus" in fields else None,
        memory=_read_memory(fields["memory"], notes, "the memory of a node") if "memory" in fields else None,
    )


def _read_accelerators(value: Value, notes: Notes) -> tuple[Accelerator, ...]:
    """A count, a mapping with a count, or a list with one mapping for each."""
    if value.kind == "scalar":
        count = read_int(value, notes, "the number of accelerators", maximum=MAX_ACCELERATORS_PER_NODE)
        return (Accelerator(),) * (count or 0)
    if value.kind == "list":
        items = read_list(value, notes, "the accelerators of a node")
        if len(items) > MAX_ACCELERATORS_PER_NODE:
            notes.config(
                value, f"a node has {len(items)} accelerators, and may have at most {MAX_ACCELERATORS_PER_NODE}"
            )
            return ()
        found = tuple(_read_accelerator(item, notes)[0] for item in items)
    else:
        one, count = _read_accelerator(value, notes, with_count=True)
        found = (one,) * count
    if twice := Node(accelerators=found).doubled_devices():
        notes.config(
            value,
            f"two accelerators of a node have the device {', '.join(twice)}",
            hint="an accelerator without a device is called by its place, from 0",
        )
    types = sorted({item.type for item in found})
    if len(types) > 1:
        notes.config(value, f"a node has accelerators of several types: {', '.join(types)}")
    return found


def _read_accelerator(value: Value, notes: Notes, *, with_count: bool = False) -> tuple[Accelerator, int]:
    what = "the accelerators of a node" if with_count else "an accelerator"
    fields = read_mapping(value, notes, what, ACCELERATORS_KEYS if with_count else ACCELERATOR_KEYS)
    kind = AcceleratorType.NVIDIA
    if "type" in fields and (name := read_text(fields["type"], notes, "the type of an accelerator")) is not None:
        if name in accelerator_types():
            kind = AcceleratorType(name)
        else:
            notes.config(
                fields["type"],
                f"accelerator type {shorten(name)!r} is not known",
                hint=known_hint(name, accelerator_types()),
            )
    model = read_text(fields["model"], notes, "the model of an accelerator") if "model" in fields else None
    memory = _read_memory(fields["memory"], notes, "the memory of an accelerator") if "memory" in fields else None
    device = _read_device(fields["device"], notes) if "device" in fields else None
    count = 1
    if "count" in fields:
        count = read_int(fields["count"], notes, "the count of accelerators", maximum=MAX_ACCELERATORS_PER_NODE) or 0
    return Accelerator(type=kind, model=model, memory=memory, device=device), count


def _read_device(value: Value, notes: Notes) -> str | None:
    text = read_filled_text(value, notes, "the device of an accelerator")
    if text is not None and not re.fullmatch(r"[\w.:/-]+", text):
        notes.config(value, f"the device of an accelerator is {describe(value)}", hint="an index such as 3, or a UUID")
        return None
    return text


def _read_memory(value: Value, notes: Notes, what: str) -> int | None:
    """Bytes, or a number with a unit: `80GiB`, `512 GB`."""
    text = read_text(value, notes, what)
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in UNITS:
        notes.config(value, f"{what} is {describe(value)}", hint="write bytes, or a unit: 80GiB, 512GB")
        return None
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def _check_unique(nodes: list[Node], items: list[Value], notes: Notes) -> None:
    first: dict[str, int] = {}
    for rank, (node, item) in enumerate(zip(nodes, items, strict=True)):
        if node.name is not None and first.setdefault(node.name, rank) != rank:
            notes.config(item.get("name") or item, f"nodes {first[node.name]} and {rank} are both named {node.name!r}")


def _write_node(node: Node) -> dict[str, Any]:
    out: dict[str, Any] = {"accelerators": _write_accelerators(node.accelerators)}
    for key in ("name", "address", "cpus"):
        if getattr(node, key) is not None:
            out[key] = getattr(node, key)
    if node.labels:
        out["labels"] = dict(node.labels)
    if node.memory is not None:
        out["memory"] = _write_memory(node.memory)
    return out


def _write_accelerators(accelerators: tuple[Accelerator, ...]) -> int | dict[str, Any] | list[dict[str, Any]]:
    if not accelerators or set(accelerators) == {Accelerator()}:
        return len(accelerators)
    if len(set(accelerators)) == 1 and accelerators[0].device is None:
        return {"count": len(accelerators), **_write_accelerator(accelerators[0])}
    return [_write_accelerator(item) for item in accelerators]


def _write_accelerator(accelerator: Accelerator) -> dict[str, Any]:
    out: dict[str, Any] = {"type": str(accelerator.type)}
    if accelerator.model is not None:
        out["model"] = accelerator.model
    if accelerator.memory is not None:
        out["memory"] = _write_memory(accelerator.memory)
    if accelerator.device is not None:
        out["device"] = accelerator.device
    return out


def _write_memory(size: int) -> int | str:
    for unit in ("TiB", "GiB", "MiB"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return size
