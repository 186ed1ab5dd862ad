"""Kinds of hardware: accelerators by vendor, with the variable that says which ones a process sees.

One table. A vendor that is not in it is added with `register_accelerator_type`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from roost.errors import ConfigError
from roost.text import join_words

ACCELERATOR = "accelerator"
"""The kind of hardware that Roost finds on a node; it cannot be declared."""
BARE_NODE = "node"
"""The kind of a node that is placed on as a whole."""


class AcceleratorType(str):
    """A vendor's kind of accelerator: a string, so that more can be registered.

    >>> AcceleratorType.NVIDIA == "nvidia"
    True
    """

    __slots__ = ()

    NVIDIA: ClassVar[AcceleratorType]
    AMD: ClassVar[AcceleratorType]
    ASCEND: ClassVar[AcceleratorType]
    INTEL: ClassVar[AcceleratorType]
    NONE: ClassVar[AcceleratorType]
    """The type of a node without accelerators."""


for _name in ("nvidia", "amd", "ascend", "intel", "none"):
    setattr(AcceleratorType, _name.upper(), AcceleratorType(_name))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevices:
    """The variable that tells a vendor's runtime which devices to see, and the prefix of its value.

    `resource` is Ray's name for these accelerators.
    """

    variable: str
    prefix: str = ""
    resource: str = "GPU"

    def value(self, devices: Sequence[str]) -> str:
        """Return the value of the variable for these devices."""
        return self.prefix + ",".join(devices)

    def devices(self, value: str) -> tuple[str, ...]:
        """Return the devices that such a value names, in its order.

        >>> VisibleDevices(variable="CUDA_VISIBLE_DEVICES").devices("3, 1")
        ('3', '1')
        """
        words = [word.strip() for word in value.strip().removeprefix(self.prefix).split(",")]
        # As the runtimes do: nothing after an invalid index counts.
        return tuple(itertools.takewhile(lambda word: word not in ("", "-1"), words))


_VISIBLE_DEVICES: dict[str, VisibleDevices] = {
    AcceleratorType.NVIDIA: VisibleDevices(variable="CUDA_VISIBLE_DEVICES"),
    AcceleratorType.AMD: VisibleDevices(variable="HIP_VISIBLE_DEVICES"),
    AcceleratorType.ASCEND: VisibleDevices(variable="ASCEND_RT_VISIBLE_DEVICES", resource="NPU"),
    AcceleratorType.INTEL: VisibleDevices(variable="ONEAPI_DEVICE_SELECTOR", prefix="level_zero:"),
}


def register_accelerator_type(
    name: str, *, variable: str, prefix: str = "", resource: str | None = None
) -> AcceleratorType:
    """Add a vendor: its name in inventories, and the variable that says which devices a process sees.

    `resource` is Ray's name for these accelerators, as in `ray start --resources '{"MUSA": 8}'`; by default it is
    the name in capitals.

    >>> register_accelerator_type("musa", variable="MUSA_VISIBLE_DEVICES")
    'musa'
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name == AcceleratorType.NONE:
        raise ConfigError(f"{name!r} cannot name an accelerator type: use small letters, digits, '_' and '-'")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ConfigError(f"{variable!r} cannot name an environment variable")
    entry = VisibleDevices(variable=variable, prefix=prefix, resource=resource or name.upper())
    if _VISIBLE_DEVICES.setdefault(name, entry) != entry:
        raise ConfigError(f"accelerator type {name!r} is known already, with {_VISIBLE_DEVICES[name].variable}")
    return AcceleratorType(name)


def accelerator_types() -> Mapping[str, VisibleDevices]:
    """Return every known accelerator type, and how its visible devices are set."""
    return dict(_VISIBLE_DEVICES)


def taken_types() -> set[str]:
    """Return the kinds of hardware that cannot be declared: accelerators, and the words for nodes."""
    return {"cluster", BARE_NODE, ACCELERATOR, *_VISIBLE_DEVICES}


def visible_devices(accelerator_type: str) -> VisibleDevices:
    """Return how to tell this vendor's runtime which devices to see."""
    try:
        return _VISIBLE_DEVICES[accelerator_type]
    except KeyError:
        raise ConfigError(
            f"accelerator type {accelerator_type!r} is not known",
            hint=f"known are {join_words(sorted(_VISIBLE_DEVICES))}; add one with register_accelerator_type",
        ) from None
