"""Checks of what the methods of `Channel` are given."""

from __future__ import annotations

from typing import Any

from roost.errors import ConfigError
from roost.text import shorten


def check_name(name: Any) -> None:
    """Raise ConfigError unless it can be the name of a channel."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{name!r} is not the name of a channel")


def check_size(label: str, value: Any) -> None:
    """Raise ConfigError unless it can be a limit of a channel."""
    if type(value) is not int or value < 0:
        raise ConfigError(f"{label} is {value!r}: it is a whole number, and 0 is no limit")


def check_weight(weight: Any) -> float:
    """Return the weight of an item as a number; ConfigError if it is none."""
    if type(weight) is int or type(weight) is float:
        if weight >= 0:
            return weight
    elif not isinstance(weight, bool | str) and hasattr(weight, "__float__") and float(weight) >= 0:
        return float(weight)
    raise ConfigError(f"weight is {weight!r}: it is a number, 0 or more")


def check_key(key: Any) -> None:
    """Raise ConfigError unless it can be the key of a queue."""
    parts = key if type(key) is tuple else (key,)
    if not all(part is None or isinstance(part, str | int | float | bytes) for part in parts):
        raise ConfigError(f"key is {shorten(repr(key), 100)}", hint="a key is a string or a number, or a tuple of them")


def check_async(async_op: bool, timeout: float | None) -> None:
    """Raise ConfigError if a call that does not wait was given a timeout."""
    if async_op and timeout is not None:
        raise ConfigError(
            "with async_op=True the call does not wait", hint="give the timeout to the handle: wait(timeout)"
        )
