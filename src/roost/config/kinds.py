"""Kinds of declared hardware that the user registers: a dataclass is the schema of the settings.

    @register_hardware("Franka")
    @dataclass(frozen=True)
    class Franka:
        robot_ip: str
        gripper: bool = True

        def check(self) -> None:  # optional: runs on the robot's node before anything is launched
            socket.create_connection((self.robot_ip, 80), timeout=2).close()

A kind that is not registered takes any settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeVar

from roost.config.hardware import taken_types
from roost.config.reading import name_problem
from roost.errors import ConfigError
from roost.text import did_you_mean, join_words

Kind = TypeVar("Kind", bound=type)

_KINDS: dict[str, type] = {}
NODE_RANK = "node_rank"
"""The key of a piece's node, next to its settings."""


def register_hardware(name: str) -> Callable[[Kind], Kind]:
    """Make a dataclass the schema of a kind of hardware; its `check()`, if any, runs on the hardware's node."""
    if not isinstance(name, str) or name_problem(name) or name in taken_types():
        raise ConfigError(
            f"{name!r} cannot name a kind of hardware", hint="it is not a valid name, or already means something else"
        )

    def register(kind: Kind) -> Kind:
        if not dataclasses.is_dataclass(kind):
            raise ConfigError(f"hardware {name!r} needs a dataclass for its settings, and {kind!r} is not one")
        known = _KINDS.setdefault(name, kind)
        # A module that is loaded again, as in a notebook, registers its class again.
        if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ConfigError(f"hardware {name!r} is already registered, with {known.__module__}.{known.__qualname__}")
        _KINDS[name] = kind
        return kind

    return register


def hardware_kind(name: str) -> type | None:
    """Return the dataclass registered for a kind, or None."""
    return _KINDS.get(name)


def is_setting(name: str, setting: str) -> bool:
    """Return whether a registered kind has this setting."""
    kind = _KINDS.get(name)
    return kind is not None and setting in {field.name for field in dataclasses.fields(kind)}


def make_piece(name: str, node_rank: int, settings: Mapping[str, Any]) -> Any:
    """Make one piece of hardware as its registered class; ConfigError if the settings do not fit the class."""
    kind = _KINDS[name]
    problems = setting_problems(name, settings)
    if problems:
        raise ConfigError("; ".join(problems.values()))
    from omegaconf import OmegaConf  # slow to load, and few jobs register hardware

    own_rank = {NODE_RANK: node_rank} if NODE_RANK in {field.name for field in dataclasses.fields(kind)} else {}
    try:
        return OmegaConf.to_object(_merged(kind, {**settings, **own_rank}))
    except Exception as error:
        # The class's __post_init__ may refuse what its types allow.
        raise ConfigError(f"{name!r} does not take {dict(settings)!r}: {error}") from None


def setting_problems(name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with the settings of a registered kind, by setting, including those that are missing."""
    kind = _KINDS.get(name)
    if kind is None:
        return {}
    from omegaconf.errors import OmegaConfBaseException  # as above

    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    # `make_piece` fills in the node, which is written next to the settings.
    fields.pop(NODE_RANK, None)
    found: dict[str, str] = {}
    for setting in sorted(set(settings) - set(fields)):
        close = did_you_mean(setting, fields)
        hint = f"did you mean {close!r}?" if close else f"it has {join_words([repr(item) for item in fields], most=12)}"
        found[setting] = f"{name!r} has no setting {setting!r}; {hint}"
    for setting, field in fields.items():
        if setting in settings:
            try:
                _merged(kind, {setting: settings[setting]})
            except OmegaConfBaseException as error:
                first = str(error).partition("\n")[0]
                found[setting] = f"the setting {setting!r} of {name!r} is {settings[setting]!r}: {first}"
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            found[setting] = f"{name!r} lacks the setting {setting!r}"
    return found


def with_defaults(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings together with the registered kind's own values for those that are left out."""
    kind = _KINDS.get(name)
    # Settings that do not fit are reported when the piece is checked.
    if kind is None or setting_problems(name, settings):
        return dict(settings)
    from omegaconf import OmegaConf  # as above

    every: Any = OmegaConf.to_container(_merged(kind, settings), enum_to_str=True)
    # A path is a text in a config.
    plain = {key: str(value) if isinstance(value, PurePath) else value for key, value in every.items()}
    return {key: value for key, value in plain.items() if key != NODE_RANK} | dict(settings)


def _merged(kind: type, settings: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf  # as above

    schema = OmegaConf.structured(kind)
    # A frozen dataclass makes a read-only config.
    OmegaConf.set_readonly(schema, False)
    return OmegaConf.merge(schema, {name: _literal(value) for name, value in settings.items()})


def _literal(value: Any) -> Any:
    """Escape what OmegaConf would interpolate: the settings are already resolved."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {name: _literal(item) for name, item in value.items()}
    return value
