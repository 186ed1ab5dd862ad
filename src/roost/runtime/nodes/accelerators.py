"""From what Ray counts on a node and what its probe reports to its accelerators, in order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roost.config.hardware import AcceleratorType, VisibleDevices, accelerator_types
from roost.errors import CheckFailed
from roost.machine.devices import Device
from roost.runtime.nodes.info import AcceleratorInfo
from roost.text import join_words, plural

_MODEL_RESOURCE = "accelerator_type:"
_MODEL_STARTS = {"AMD": AcceleratorType.AMD, "Intel": AcceleratorType.INTEL}


def node_accelerators(
    resources: Mapping[str, float], environment: Mapping[str, str], nvidia: Sequence[Device], node: str
) -> tuple[AcceleratorInfo, ...]:
    """Return the accelerators of a node: as many as Ray counts, under the names in the node's own environment.

    `nvidia` adds details; CheckFailed names `node` where Ray counts what a worker cannot use.
    """
    model = next((name.removeprefix(_MODEL_RESOURCE) for name in resources if name.startswith(_MODEL_RESOURCE)), None)
    present = [kind for kind, entry in accelerator_types().items() if int(resources.get(entry.resource, 0))]
    names = {accelerator_types()[kind].resource for kind in present}
    if len(names) > 1:
        raise CheckFailed(
            f"Ray counts accelerators of several vendors on {node}: {join_words(sorted(names))}",
            hint="start the node with one of them: a worker sees one vendor's devices",
        )
    if not present:
        return ()
    # Ray counts the devices of several vendors as GPU: its name for the model tells them apart, or their variable.
    if model is not None:
        fits: list[str] = [kind for start, kind in _MODEL_STARTS.items() if model.startswith(start) and kind in present]
    else:
        fits = [kind for kind in present if accelerator_types()[kind].variable in environment]
    kind = [*fits, *present][0]
    entry = accelerator_types()[kind]
    devices = _devices(entry, environment, int(resources[entry.resource]), node)
    known = nvidia if kind == AcceleratorType.NVIDIA else ()
    return tuple(_describe(AcceleratorType(kind), device, model, known) for device in devices)


def variables_of_interest() -> list[str]:
    """Return the visible-devices variables of all known vendors."""
    return sorted({entry.variable for entry in accelerator_types().values()})


def _devices(entry: VisibleDevices, environment: Mapping[str, str], count: int, node: str) -> tuple[str, ...]:
    value = environment.get(entry.variable)
    devices = None if value is None else entry.devices(value)
    # A pattern such as level_zero:gpu names none in particular.
    if devices is None or (entry.prefix and not all(device.isdigit() for device in devices)):
        return tuple(str(index) for index in range(count))
    if len(devices) < count:
        raise CheckFailed(
            f"Ray counts {plural(count, 'accelerator')} on {node}, "
            f"but the node was started with {entry.variable}={value}, which names {len(devices)}",
            hint="start the node with a --num-gpus that fits, or without it",
        )
    return devices[:count]


def _describe(kind: AcceleratorType, device: str, model: str | None, known: Sequence[Device]) -> AcceleratorInfo:
    for item in known:
        # An index counts devices as the vendor's library does; a UUID may be cut short.
        if str(item.index) == device or (len(device) > 4 and item.uuid.startswith(device)):
            return AcceleratorInfo(
                type=kind,
                device=device,
                model=item.model,
                memory=item.memory,
                uuid=item.uuid or None,
                pci=item.pci,
                numa=item.numa,
                nic=item.nic,
            )
    return AcceleratorInfo(type=kind, device=device, model=model)
