"""From what Ray counts on a node and what its probe reports to its accelerators, in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roost.config.hardware import AcceleratorType, VisibleDevices, accelerator_types
from roost.errors import CheckFailed, Problem
from roost.machine.probe import NodeReport, VendorDevice
from roost.runtime.nodes.info import AcceleratorInfo
from roost.text import join_words, plural

_MODEL_RESOURCE = "accelerator_type:"
_MODEL_STARTS = {"AMD": AcceleratorType.AMD, "Intel": AcceleratorType.INTEL}


def node_accelerators(resources: Mapping[str, float], report: NodeReport, node: str) -> tuple[AcceleratorInfo, ...]:
    """The accelerators of a node: as many as Ray counts, called what the node's own variable calls them."""
    environment = dict(report.environment)
    model = next((name.removeprefix(_MODEL_RESOURCE) for name in resources if name.startswith(_MODEL_RESOURCE)), None)
    counts = {kind: int(resources.get(entry.resource, 0)) for kind, entry in accelerator_types().items()}
    present = [kind for kind, count in counts.items() if count]
    by_resource: dict[str, list[str]] = {}
    for kind in present:
        by_resource.setdefault(accelerator_types()[kind].resource, []).append(kind)
    if len(by_resource) > 1:
        raise CheckFailed(
            Problem(
                message=f"Ray counts accelerators of several vendors on {node}: {join_words(sorted(by_resource))}",
                hint="start the node with one of them: a worker sees one vendor's devices",
            )
        )
    if not present:
        return ()
    kind = _vendor(present, model, environment)
    entry = accelerator_types()[kind]
    count = counts[kind]
    devices = _devices(entry, environment, count, node)
    known = report.nvidia if kind == AcceleratorType.NVIDIA else ()
    return tuple(_describe(AcceleratorType(kind), device, model, known) for device in devices)


def variables_of_interest() -> list[str]:
    """The visible-devices variables of all known vendors."""
    return sorted({entry.variable for entry in accelerator_types().values()})


def _vendor(present: Sequence[str], model: str | None, environment: Mapping[str, str]) -> str:
    """Ray calls the devices of several vendors GPU: its name for the model tells them apart, or their variable."""
    if model is not None:
        for start, kind in _MODEL_STARTS.items():
            if model.startswith(start) and kind in present:
                return kind
        return present[0]
    return next((kind for kind in present if accelerator_types()[kind].variable in environment), present[0])


def _devices(entry: VisibleDevices, environment: Mapping[str, str], count: int, node: str) -> tuple[str, ...]:
    value = environment.get(entry.variable)
    if value is None:
        return tuple(str(index) for index in range(count))
    devices = entry.devices(value)
    if entry.prefix and not all(device.isdigit() for device in devices):
        # A pattern such as level_zero:gpu names none in particular.
        return tuple(str(index) for index in range(count))
    if len(devices) < count:
        raise CheckFailed(
            Problem(
                message=f"Ray counts {plural(count, 'accelerator')} on {node}, "
                f"but the node was started with {entry.variable}={value}, which names {len(devices)}",
                hint="start the node with a --num-gpus that fits, or without it",
            )
        )
    return devices[:count]


def _describe(kind: AcceleratorType, device: str, model: str | None, known: Sequence[VendorDevice]) -> AcceleratorInfo:
    # An index counts devices as the vendor's library does; a UUID may be cut short.
    found = next(
        (item for item in known if str(item.index) == device or (len(device) > 4 and item.uuid.startswith(device))),
        None,
    )
    if found is None:
        return AcceleratorInfo(type=kind, device=device, model=model)
    return AcceleratorInfo(
        type=kind,
        device=device,
        model=found.model,
        memory=found.memory,
        uuid=found.uuid,
        pci=found.pci,
        numa=found.numa,
    )
