"""Node groups: a label over nodes, with the hardware declared there and the environment of its workers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.config.document import Value
from roost.config.hardware import accelerator_types, taken_types
from roost.config.kinds import is_setting, setting_problems
from roost.config.ranks import format_ranks
from roost.config.reading import (
    Keys,
    Notes,
    name_problem,
    outside,
    read_bool,
    read_fields,
    read_filled_text,
    read_int,
    read_list,
    read_mapping,
    read_name,
    read_rank_list,
    read_text,
)
from roost.errors import ConfigError
from roost.text import join_words, shorten

CLUSTER = "cluster"
"""The reserved group of all nodes with their accelerators."""
NODE = "node"
"""The reserved group of all nodes as bare nodes."""
RESERVED = (CLUSTER, NODE)
MAX_NODES = 1_000_000

GROUP_KEYS = Keys(
    ("label", "node_ranks", "hardware", "ignore_hardware", "env_configs"), required=("label", "node_ranks")
)
HARDWARE_KEYS = Keys(("type", "configs"), required=("type", "configs"))
PIECE_NODE = "node_rank"
"""Beside it, a piece of declared hardware has settings that are the user's."""
ENV_CONFIG_KEYS = Keys(("node_ranks", "env_vars", "python_interpreter_path"), required=("node_ranks",))
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Roost writes these, and the visible devices, for every worker: a group that set them would make it lie.
_OWN_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "ROOST_JOB"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredHardware:
    """One piece of hardware that the user declared, such as a robot, with its settings.

    >>> DeclaredHardware.make("Franka", 0, {"robot_ip": "10.0.1.1"}).settings
    {'robot_ip': '10.0.1.1'}
    """

    type: str
    node_rank: int
    settings_json: str = "{}"
    """The settings as JSON: text cannot be changed, and every reader of `settings` gets dicts of its own."""

    @classmethod
    def make(cls, kind: str, node_rank: int, settings: Mapping[str, Any] | None = None) -> DeclaredHardware:
        """A piece of hardware with settings, which are numbers, texts, lists and dicts."""
        try:
            text = json.dumps(settings or {}, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the settings of {kind!r} cannot be written as JSON: {error}") from None
        return cls(type=kind, node_rank=node_rank, settings_json=text)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as a dict that belongs to the caller."""
        found: dict[str, Any] = json.loads(self.settings_json)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """What the workers of a group get on some of its nodes: variables and an interpreter."""

    node_ranks: tuple[int, ...]
    env_vars: tuple[tuple[str, str], ...] = ()
    python_interpreter_path: str | None = None

    def __post_init__(self) -> None:
        # Their order means nothing, and two that say the same are equal.
        object.__setattr__(self, "env_vars", tuple(sorted(self.env_vars)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """A label over nodes. Its hardware is what it declares, else accelerators, else the nodes themselves."""

    label: str
    node_ranks: tuple[int, ...]
    hardware: tuple[DeclaredHardware, ...] = ()
    ignore_hardware: bool = False
    env_configs: tuple[EnvConfig, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or name_problem(self.label):
            raise ConfigError(f"{self.label!r} cannot be the label of a node group")
        what = f"node group {self.label!r}"
        _check_ascending(self.node_ranks, f"the node ranks of {what}")
        nodes = set(self.node_ranks)
        kinds = {item.type for item in self.hardware}
        if kinds and (len(kinds) > 1 or kinds & taken_types() or name_problem(self.hardware[0].type)):
            raise ConfigError(f"{what} cannot declare hardware of the type {', '.join(sorted(kinds))}")
        if self.hardware and self.ignore_hardware:
            raise ConfigError(f"{what} declares hardware and ignores it")
        if not {item.node_rank for item in self.hardware} <= nodes:
            raise ConfigError(f"{what} declares hardware on a node that it does not have")
        covered = [rank for item in self.env_configs for rank in item.node_ranks]
        if len(set(covered)) != len(covered) or not set(covered) <= nodes:
            raise ConfigError(f"{what} has env_configs that overlap, or that name a node that it does not have")
        # Hardware ranks follow the nodes; on one node, the order in which the pieces are declared.
        object.__setattr__(self, "hardware", tuple(sorted(self.hardware, key=lambda piece: piece.node_rank)))

    def to_dict(self) -> dict[str, Any]:
        """The group as an inventory or a job file says it."""
        out: dict[str, Any] = {"label": self.label, "node_ranks": list(self.node_ranks)}
        if self.ignore_hardware:
            out["ignore_hardware"] = True
        if self.hardware:
            configs = [{"node_rank": item.node_rank, **item.settings} for item in self.hardware]
            out["hardware"] = {"type": self.hardware[0].type, "configs": configs}
        if self.env_configs:
            out["env_configs"] = [_env_to_dict(item) for item in self.env_configs]
        return out


def read_node_groups(value: Value, notes: Notes, num_nodes: int | None, limit: str) -> tuple[NodeGroup, ...]:
    """Read a list of node groups, noting every mistake; `num_nodes` bounds the node ranks, and `limit` says why."""
    groups: dict[str, NodeGroup] = {}
    declared: dict[tuple[str, int], str] = {}
    for item in read_list(value, notes, "node_groups"):
        group = _read_group(item, notes, num_nodes, limit)
        if group is None:
            continue
        if group.label in groups:
            notes.config(_at(item, "label"), f"node group {group.label!r} is declared twice")
        elif _is_declared_once(group, declared, item, notes):
            groups[group.label] = group
    return tuple(groups.values())


def _read_group(value: Value, notes: Notes, num_nodes: int | None, limit: str) -> NodeGroup | None:
    fields = read_mapping(value, notes, "a node group", GROUP_KEYS)
    if "label" not in fields or "node_ranks" not in fields:
        return None
    label = read_name(fields["label"], notes, "the node group label")
    if label is None:
        return None
    what = f"node group {label!r}"
    noted = len(notes.problems)
    if label in RESERVED:
        notes.config(fields["label"], f"the label {label!r} is reserved", hint=_reserved_hint(label))
        return None
    node_ranks = read_rank_list(fields["node_ranks"], notes, f"{what}: node_ranks")
    if node_ranks is None:
        return None
    if num_nodes is not None and node_ranks[-1] >= num_nodes:
        strange = [rank for rank in node_ranks if rank >= num_nodes]
        hint = "node ranks count from 0, and ranges include both ends"
        notes.config(fields["node_ranks"], outside(strange, what, num_nodes, limit), hint=hint)
        return None
    ignore = False
    if "ignore_hardware" in fields:
        ignore = bool(read_bool(fields["ignore_hardware"], notes, f"{what}: ignore_hardware"))
    hardware: tuple[DeclaredHardware, ...] = ()
    if "hardware" in fields:
        hardware = _read_hardware(fields["hardware"], notes, what, node_ranks)
        if ignore:
            notes.config(
                fields["ignore_hardware"],
                f"{what} declares hardware and ignores it",
                hint="leave out ignore_hardware, or make a second group for the bare nodes",
            )
    env_configs: tuple[EnvConfig, ...] = ()
    if "env_configs" in fields:
        env_configs = _read_env_configs(fields["env_configs"], notes, what, node_ranks)
    if len(notes.problems) > noted:
        return None
    return NodeGroup(
        label=label, node_ranks=node_ranks, hardware=hardware, ignore_hardware=ignore, env_configs=env_configs
    )


def _read_hardware(value: Value, notes: Notes, what: str, node_ranks: Sequence[int]) -> tuple[DeclaredHardware, ...]:
    fields = read_mapping(value, notes, f"{what}: hardware", HARDWARE_KEYS)
    if "type" not in fields or "configs" not in fields:
        return ()
    kind = read_name(fields["type"], notes, f"{what}: the hardware type")
    if kind is None or not _is_free_type(kind, fields["type"], notes, what):
        return ()
    items = read_list(fields["configs"], notes, f"{what}: hardware configs")
    if not items and fields["configs"].kind == "list":
        notes.config(fields["configs"], f"{what} declares hardware but no piece of it")
    nodes = set(node_ranks)
    found: list[DeclaredHardware] = []
    for item in items:
        settings = read_fields(item, notes, f"{what}: a hardware config")
        if PIECE_NODE not in settings:
            if item.kind == "mapping":
                notes.config(item, f"{what}: a hardware config lacks {PIECE_NODE!r}")
            continue
        rank_value = settings.pop(PIECE_NODE).value
        node_rank = read_int(rank_value, notes, f"{what}: node_rank of a hardware config")
        if node_rank is None:
            continue
        if node_rank not in nodes:
            has = shorten(format_ranks(node_ranks))
            notes.config(rank_value, f"{what} declares hardware on node rank {node_rank}, but has nodes {has}")
            continue
        try:
            plain = {name: setting.value.plain() for name, setting in settings.items()}
        except ConfigError as error:
            notes.take(error)
            continue
        for setting, problem in setting_problems(kind, plain).items():
            entry = settings.get(setting)
            at = item if entry is None else entry.value if is_setting(kind, setting) else entry.key
            notes.config(at, f"{what}: {problem}")
        found.append(DeclaredHardware.make(kind, node_rank, plain))
    return tuple(found)


def _is_free_type(kind: str, value: Value, notes: Notes, what: str) -> bool:
    """Whether hardware can be declared under this name: not where it already means something else."""
    if kind in RESERVED:
        notes.config(value, f"{what}: the hardware type {kind!r} is reserved", hint="give it another name")
    elif kind in taken_types():
        hint = "accelerators are found on the node and not declared: leave out 'hardware'"
        notes.config(value, f"{what} declares {kind!r} as hardware", hint=hint)
    return kind not in taken_types()


def _check_ascending(ranks: object, what: str) -> None:
    whole = isinstance(ranks, tuple) and all(type(rank) is int and rank >= 0 for rank in ranks)
    if not whole or not ranks or list(ranks) != sorted(set(ranks)):  # type: ignore[call-overload]
        raise ConfigError(f"{what} must be a tuple of whole numbers that ascend, with at least one in it")


def _read_env_configs(value: Value, notes: Notes, what: str, node_ranks: Sequence[int]) -> tuple[EnvConfig, ...]:
    nodes = set(node_ranks)
    taken: set[int] = set()
    found: list[EnvConfig] = []
    for item in read_list(value, notes, f"{what}: env_configs"):
        fields = read_mapping(item, notes, f"{what}: an env_config", ENV_CONFIG_KEYS)
        if "node_ranks" not in fields:
            continue
        ranks = read_rank_list(fields["node_ranks"], notes, f"{what}: node_ranks of an env_config")
        if ranks is None:
            continue
        if strange := [rank for rank in ranks if rank not in nodes]:
            notes.config(
                fields["node_ranks"],
                f"{what}: an env_config names node rank {shorten(format_ranks(strange))}, "
                f"but the group has nodes {shorten(format_ranks(node_ranks))}",
            )
        if twice := sorted(taken & set(ranks)):
            notes.config(
                fields["node_ranks"],
                f"{what}: two env_configs cover node rank {shorten(format_ranks(twice))}",
                hint="a node takes one env_config; merge them, or give them different nodes",
            )
        taken.update(ranks)
        path = None
        if "python_interpreter_path" in fields:
            path = read_filled_text(fields["python_interpreter_path"], notes, f"{what}: python_interpreter_path")
        env_vars = _read_env_vars(fields["env_vars"], notes, what) if "env_vars" in fields else ()
        found.append(EnvConfig(node_ranks=ranks, env_vars=env_vars, python_interpreter_path=path))
    return tuple(found)


def _read_env_vars(value: Value, notes: Notes, what: str) -> tuple[tuple[str, str], ...]:
    """A mapping of variables, or a list of such mappings."""
    own = own_variables()
    found: dict[str, str] = {}
    for part in read_list(value, notes, f"{what}: env_vars") if value.kind == "list" else [value]:
        for name, entry in read_fields(part, notes, f"{what}: env_vars").items():
            if not VARIABLE.fullmatch(name):
                notes.config(entry.key, f"{what}: {shorten(name)!r} cannot name an environment variable")
            elif name in own:
                notes.config(entry.key, f"{what}: {name} is set by Roost for each worker and cannot be set here")
            elif name in found:
                notes.config(entry.key, f"{what}: env_vars names {name!r} twice")
            else:
                text = _variable_text(entry.value, notes, f"{what}: the variable {shorten(name)}")
                if text is not None:
                    found[name] = text
    return tuple(sorted(found.items()))


def own_variables() -> frozenset[str]:
    """The variables that Roost sets for each worker, which a node group cannot set."""
    return _OWN_VARIABLES | {item.variable for item in accelerator_types().values()}


def _variable_text(value: Value, notes: Notes, what: str) -> str | None:
    """Variables are text: numbers are taken as typed, and a boolean in a dict has no one spelling."""
    if value.kind == "scalar" and isinstance(value.scalar, float):
        return repr(value.scalar)
    text = read_text(value, notes, what)
    if text is not None and "\0" in text:
        notes.config(value, f"{what} has a zero byte in it")
        return None
    return text


def _is_declared_once(group: NodeGroup, declared: dict[tuple[str, int], str], value: Value, notes: Notes) -> bool:
    for kind, node_rank in dict.fromkeys((item.type, item.node_rank) for item in group.hardware):
        other = declared.setdefault((kind, node_rank), group.label)
        if other != group.label:
            notes.config(_at(value, "hardware"), *declared_twice(other, group.label, kind, node_rank))
            return False
    return True


def declared_twice(one: str, other: str, kind: str, node_rank: int) -> tuple[str, str]:
    """Message and hint for hardware that two groups declare."""
    return (
        f"node groups {one!r} and {other!r} both declare {kind!r} on node rank {node_rank}",
        "declare each piece once; several components may use one group",
    )


def _at(value: Value, key: str) -> Value:
    return value.get(key) or value


def _reserved_hint(label: str) -> str:
    meaning = "all nodes with their accelerators" if label == CLUSTER else "all nodes as bare nodes"
    return f"{label!r} already means {meaning}; {join_words([repr(item) for item in RESERVED])} need no declaration"


def _env_to_dict(item: EnvConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"node_ranks": list(item.node_ranks)}
    if item.env_vars:
        out["env_vars"] = dict(item.env_vars)
    if item.python_interpreter_path:
        out["python_interpreter_path"] = item.python_interpreter_path
    return out
