"""Node groups: a label over nodes, with the hardware declared there and the environment of its workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from roost.config.document import Value
from roost.config.fields import Field, Section, Table
from roost.config.hardware import accelerator_types, taken_types
from roost.config.kinds import NODE_RANK, is_setting, setting_problems, with_defaults
from roost.config.ranks import format_ranks
from roost.config.reading import Notes, name_problem, outside
from roost.config.values import FLAG, NODE_RANKS, OPTIONAL_TEXT, items, name, variables, whole
from roost.errors import ConfigError
from roost.text import join_words, shorten

CLUSTER = "cluster"
"""The reserved group of all nodes with their accelerators."""
NODE = "node"
"""The reserved group of all nodes as bare nodes."""
RESERVED = (CLUSTER, NODE)
MAX_NODES = 1_000_000
WORKER_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "ROOST_JOB"})
"""The variables that Roost sets for every worker: a job that set one of them would contradict the plan."""


def group_variables() -> frozenset[str]:
    """Return the variables that a node group cannot set: its workers', their master's address, the visible devices."""
    visible = {item.variable for item in accelerator_types().values()}
    return WORKER_VARIABLES | {"MASTER_ADDR", "MASTER_PORT"} | visible


HARDWARE_CONFIG_FIELDS = Table(
    "One piece: its node, and settings of your own.",
    Field(NODE_RANK, whole(), "The rank of the node that it is on.", required=True),
    is_open=True,
)
HARDWARE_FIELDS = Table(
    "Hardware that is declared and not found, such as robots.",
    Field(
        "type",
        name(taken_types, "a kind has letters, digits, '_', '-' and '.'; accelerators are found, not declared"),
        "The kind of hardware, under a name that you choose.",
        required=True,
        examples=("Franka",),
    ),
    Field(
        "configs",
        items(HARDWARE_CONFIG_FIELDS, least=1),
        "The pieces, in the order of their ranks on a node.",
        required=True,
    ),
)
ENV_CONFIG_FIELDS = Table(
    "What workers get on these nodes. A node takes one.",
    Field("node_ranks", NODE_RANKS, "The nodes that it is for; they belong to the group.", required=True),
    Field("env_vars", variables(group_variables, lists=True)),
    Field(
        "python_interpreter_path",
        OPTIONAL_TEXT,
        "The Python that runs the workers there.",
        examples=("/opt/venv/bin/python",),
    ),
)
GROUP_FIELDS = Table(
    "A label over nodes.",
    Field(
        "label",
        name(lambda: RESERVED, "a label has letters, digits, '_', '-' and '.'; 'cluster' and 'node' are reserved"),
        "The name by which components ask for the group.",
        required=True,
        examples=("a800", "4090"),
    ),
    Field("node_ranks", NODE_RANKS, "The ranks of its nodes: `0-3,5`, a number, or a list.", required=True),
    Field("hardware", HARDWARE_FIELDS),
    Field("ignore_hardware", FLAG, "Take the nodes as bare nodes, whatever hardware they have."),
    Field("env_configs", items(ENV_CONFIG_FIELDS), "What workers get on some of the nodes: variables, an interpreter."),
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
    """The settings as JSON: text is immutable, and `settings` returns a new dict each time."""

    @classmethod
    def make(cls, kind: str, node_rank: int, settings: Mapping[str, Any] | None = None) -> DeclaredHardware:
        """Make a piece of hardware; its settings are numbers, texts, lists and dicts."""
        try:
            text = json.dumps(settings or {}, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the settings of {kind!r} cannot be written as JSON: {error}") from None
        return cls(type=kind, node_rank=node_rank, settings_json=text)

    def complete(self) -> DeclaredHardware:
        """Return the piece with the values that its registered kind gives to settings that are left out."""
        return self.make(self.type, self.node_rank, with_defaults(self.type, self.settings))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as a new dict."""
        found: dict[str, Any] = json.loads(self.settings_json)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """The environment of a group's workers on some of its nodes: variables and an interpreter."""

    node_ranks: tuple[int, ...]
    env_vars: tuple[tuple[str, str], ...] = ()
    python_interpreter_path: str | None = None

    def __post_init__(self) -> None:
        # Their order has no meaning: two configs with the same variables are equal.
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
        ranks = self.node_ranks
        whole = isinstance(ranks, tuple) and all(type(rank) is int and rank >= 0 for rank in ranks)
        if not whole or not ranks or list(ranks) != sorted(set(ranks)):
            raise ConfigError(f"the node ranks of {what} must be a tuple of ascending whole numbers, at least one")
        nodes = set(ranks)
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
        # Hardware ranks follow the nodes, and on one node the order of declaration.
        object.__setattr__(self, "hardware", tuple(sorted(self.hardware, key=lambda piece: piece.node_rank)))

    def to_dict(self) -> dict[str, Any]:
        """Return the group as it is written in an inventory or a job."""
        out: dict[str, Any] = {"label": self.label, "node_ranks": list(self.node_ranks)}
        if self.ignore_hardware:
            out["ignore_hardware"] = True
        if self.hardware:
            configs = [{"node_rank": item.node_rank, **item.settings} for item in self.hardware]
            out["hardware"] = {"type": self.hardware[0].type, "configs": configs}
        for item in self.env_configs:
            env: dict[str, Any] = {"node_ranks": list(item.node_ranks)}
            env |= {"env_vars": dict(item.env_vars)} if item.env_vars else {}
            path = item.python_interpreter_path
            env |= {"python_interpreter_path": path} if path else {}
            out.setdefault("env_configs", []).append(env)
        return out


def read_node_groups(values: Iterable[Value], notes: Notes, num_nodes: int | None, limit: str) -> tuple[NodeGroup, ...]:
    """Read node groups, noting every mistake; `num_nodes` bounds the node ranks, and `limit` says why."""
    groups: dict[str, NodeGroup] = {}
    declared: dict[tuple[str, int], str] = {}
    for value in values:
        group = _read_group(value, notes, num_nodes, limit)
        if group is None:
            continue
        if group.label in groups:
            notes.config(_at(value, "label"), f"node group {group.label!r} is declared twice")
        elif problem := declared_twice(group, declared):
            notes.config(_at(value, "hardware"), *problem)
        else:
            groups[group.label] = group
    return tuple(groups.values())


def _read_group(value: Value, notes: Notes, num_nodes: int | None, limit: str) -> NodeGroup | None:
    noted = len(notes.problems)
    section = GROUP_FIELDS.read(value, notes, "a node group")
    label = section.read("label", what="the node group label")
    if label is None or "node_ranks" not in section:
        return None
    if label in RESERVED:
        meaning = "all nodes with their accelerators" if label == CLUSTER else "all nodes as bare nodes"
        hint = f"{label!r} already means {meaning}; {join_words([repr(item) for item in RESERVED])} need no declaration"
        notes.config(section.value("label"), f"the label {label!r} is reserved", hint)
        return None
    section = replace(section, what=f"node group {label!r}")
    node_ranks = _read_nodes(section, None if num_nodes is None else range(num_nodes))
    if node_ranks is None:
        return None
    if num_nodes is not None and node_ranks[-1] >= num_nodes:
        strange = [rank for rank in node_ranks if rank >= num_nodes]
        hint = "node ranks count from 0, and ranges include both ends"
        notes.config(section.value("node_ranks"), outside(strange, section.what, num_nodes, limit), hint=hint)
        return None
    ignore = section.read("ignore_hardware", False)
    nodes = set(node_ranks)
    hardware = _read_hardware(section, notes, nodes)
    if "hardware" in section and ignore:
        hint = "leave out ignore_hardware, or make a second group for the bare nodes"
        notes.config(section.value("ignore_hardware"), f"{section.what} declares hardware and ignores it", hint)
    env_configs = _read_env_configs(section, notes, nodes)
    if len(notes.problems) > noted:
        return None
    return NodeGroup(
        label=label, node_ranks=node_ranks, hardware=hardware, ignore_hardware=ignore, env_configs=env_configs
    )


def _read_hardware(group: Section, notes: Notes, nodes: Set[int]) -> tuple[DeclaredHardware, ...]:
    section, what = group.read("hardware"), group.what
    kind = section.read("type", what=f"{what}: the hardware type") if section else None
    if kind is None or "configs" not in section:
        return ()
    if kind in RESERVED:
        notes.config(section.value("type"), f"{what}: the hardware type {kind!r} is reserved", "give it another name")
    elif kind in taken_types():
        hint = "accelerators are found on the node and not declared: leave out 'hardware'"
        notes.config(section.value("type"), f"{what} declares {kind!r} as hardware", hint)
    if kind in taken_types():
        return ()
    configs = section.value("configs")
    if configs.kind == "list" and not list(configs.elements()):
        notes.config(configs, f"{what} declares hardware but no piece of it")
    found: list[DeclaredHardware] = []
    for value in section.read("configs", what=f"{what}: hardware configs"):
        piece = HARDWARE_CONFIG_FIELDS.read(value, notes, f"{what}: a hardware config")
        node_rank = piece.read(NODE_RANK, what=f"{what}: node_rank of a hardware config")
        if node_rank is not None and node_rank not in nodes:
            has = shorten(format_ranks(sorted(nodes)))
            message = f"{what} declares hardware on node rank {node_rank}, but has nodes {has}"
            notes.config(piece.value(NODE_RANK), message)
        if node_rank not in nodes:
            continue
        with notes.catching():
            plain = {name: pair.value.plain() for name, pair in piece.pairs.items() if name != NODE_RANK}
            for setting, problem in setting_problems(kind, plain).items():
                pair = piece.pairs.get(setting)
                at = value if pair is None else pair.value if is_setting(kind, setting) else pair.key
                notes.config(at, f"{what}: {problem}")
            found.append(DeclaredHardware.make(kind, node_rank, plain))
    return tuple(found)


def _read_env_configs(group: Section, notes: Notes, nodes: Set[int]) -> tuple[EnvConfig, ...]:
    taken: set[int] = set()
    found: list[EnvConfig] = []
    what = group.what
    for value in group.read("env_configs", ()):
        section = replace(ENV_CONFIG_FIELDS.read(value, notes, f"{what}: an env_config"), what=what)
        ranks = _read_nodes(section, sorted(nodes), f"{what}: node_ranks of an env_config")
        env_vars, path = section.read("env_vars", {}), section.read("python_interpreter_path")
        if ranks is None:
            continue
        at = section.value("node_ranks")
        if strange := [rank for rank in ranks if rank not in nodes]:
            has = f"the group has nodes {shorten(format_ranks(sorted(nodes)))}"
            notes.config(at, f"{what}: an env_config names node rank {shorten(format_ranks(strange))}, but {has}")
        if twice := sorted(taken & set(ranks)):
            hint = "a node takes one env_config; merge them, or give them different nodes"
            notes.config(at, f"{what}: two env_configs cover node rank {shorten(format_ranks(twice))}", hint)
        taken.update(ranks)
        found.append(EnvConfig(node_ranks=ranks, env_vars=tuple(env_vars.items()), python_interpreter_path=path))
    return tuple(found)


def _read_nodes(section: Section, every: Sequence[int] | None, what: str = "") -> tuple[int, ...] | None:
    """Read the ranks of nodes, where `all` means every one that there is."""
    if "node_ranks" not in section:
        return None
    value = section.value("node_ranks")
    if value.broken is not None or value.kind != "scalar" or str(value.scalar).strip() != "all":
        ranks: tuple[int, ...] | None = section.read("node_ranks", what=what)
        return ranks
    if every is None:
        hint = "give num_nodes, or write the ranks"
        section.notes.config(value, f"{section.what}: node_ranks is all, of a number of nodes that is not known", hint)
    return None if every is None else tuple(every)


def declared_twice(group: NodeGroup, declared: dict[tuple[str, int], str]) -> tuple[str, str] | None:
    """Return the message and the hint if a group before declares the same; add the group's hardware to `declared`."""
    for kind, node_rank in dict.fromkeys((item.type, item.node_rank) for item in group.hardware):
        other = declared.setdefault((kind, node_rank), group.label)
        if other != group.label:
            message = f"node groups {other!r} and {group.label!r} both declare {kind!r} on node rank {node_rank}"
            return message, "declare each piece once; several components may use one group"
    return None


def _at(value: Value, key: str) -> Value:
    return value.get(key) or value
