"""JSON Schemas of the files that people write, for editors: what can stand where, with a word on each.

A schema knows shapes and never the hardware: what it refuses, the readers refuse as well, and they refuse more. It is
made of the readers' own tables of keys. Draft 7 is what the editors' YAML support understands best.

One mapping describes all forms that a value may have (`"type": ["string", "array", …]`) and not a list of
alternatives: an editor then says what is wrong with the form that was begun. Anything may be an interpolation.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from roost.config.hardware import accelerator_types, taken_types
from roost.config.inventory import (
    ACCELERATOR_KEYS,
    ACCELERATORS_KEYS,
    INVENTORY_KEYS,
    MAX_ACCELERATORS_PER_NODE,
    NODE_KEYS,
    UNITS,
)
from roost.config.job import CLUSTER_KEYS, COMPONENT_KEYS, PARALLEL_SIZES, RECOMPUTE_LOGPROBS
from roost.config.node_groups import (
    ENV_CONFIG_KEYS,
    GROUP_KEYS,
    HARDWARE_KEYS,
    MAX_NODES,
    PIECE_NODE,
    RESERVED,
    VARIABLE,
    own_variables,
)
from roost.config.reading import NAME_EXTRA, Keys
from roost.config.run import WORKER_KEYS

Schema = dict[str, Any]

_DRAFT = "http://json-schema.org/draft-07/schema#"
_REFERENCE = r"\$\{"


def job_schema() -> Schema:
    """The schema of a job: the sections that Roost reads, and anything else beside them."""
    sections = {
        "cluster": _cluster(CLUSTER_KEYS),
        "workers": _workers(),
        "entry": {
            "description": "The function that `roost run` calls when all workers are ready, as module.name.",
            **_target(),
            "examples": ["my_job.main"],
        },
    }
    return {
        "$schema": _DRAFT,
        "title": "A job of Roost",
        "description": "Which component sits on which hardware, and what runs there. Other keys are yours.",
        "type": "object",
        "properties": sections | _sizes(),
        "required": ["cluster"],
    }


def cluster_schema() -> Schema:
    """The schema of the section `cluster` in a file of its own, as Hydra composes it; components may be left out."""
    return {
        "$schema": _DRAFT,
        "title": "The section 'cluster' of a job of Roost",
        **_cluster(CLUSTER_KEYS._replace(required=())),
    }


def inventory_schema() -> Schema:
    """The schema of an inventory: the hardware, described in a file."""
    return {
        "$schema": _DRAFT,
        "title": "An inventory of Roost",
        **_mapping(
            INVENTORY_KEYS,
            "The hardware of a cluster, to plan on.",
            nodes=_list("The nodes, in the order of their ranks.", _node(), minItems=1),
            groups=_list("Labels over nodes, as in a job.", _group()),
        ),
    }


def _cluster(keys: Keys) -> Schema:
    return _mapping(
        keys,
        "Where each component of the job goes.",
        num_nodes=_number("How many nodes the job uses.", 1, MAX_NODES, examples=[1, 2]),
        component_placement={
            "description": "The components, each with its place. Several may share one: `actor,rollout: 0-7`.",
            "type": ["object", "string"],
            "pattern": _REFERENCE,
            "minProperties": 1,
            "propertyNames": _component_names(),
            "additionalProperties": _component(),
        },
        node_groups=_list("Labels over nodes, with their hardware and their environment.", _group()),
    )


def _component() -> Schema:
    """Ranks alone, or a mapping with the node group: both forms at once."""
    described = (
        "Ranks of hardware, and after a colon the process ranks on them: `0-7`, `0-3:0-7` for two processes on each, "
        "`0-7:0-3` for two pieces of hardware each, `all`; or a mapping of node_group and placement."
    )
    ranks = _placement("The ranks, counted over the node group.")
    mapping = _mapping(
        COMPONENT_KEYS,
        described,
        placement=ranks,
        node_group={
            "description": "The label of the node group, or several: `a800,4090`. `node` is all nodes as bare nodes.",
            "type": ["string", "integer", "number", "boolean", "array"],
            **_pattern(_several(_NAME), "write the label of a node group, or several with commas"),
            "items": {
                "type": ["string", "integer", "number", "boolean"],
                **_pattern(_several(_NAME), "write the label of a node group"),
            },
            "minItems": 1,
            "examples": ["cluster", "node"],
        },
    )
    return {**mapping, **ranks, "description": described, "type": ["string", "integer", "array", "object"]}


def _placement(description: str) -> Schema:
    one = _ranks(_PLACEMENT, "write ranks such as 0-7, 0-3:0-7 (without a space) or all")
    return _one_or_several(description, one, ["0-7", "0-3:0-7", "all"])


def _group() -> Schema:
    taken = "|".join(sorted(taken_types()))
    piece = {
        "description": "One piece: its node, and settings of your own.",
        "type": ["object", "string"],
        "pattern": _REFERENCE,
        "properties": {PIECE_NODE: _number("The rank of the node that it is on.", 0)},
        "required": [PIECE_NODE],
    }
    return _mapping(
        GROUP_KEYS,
        "A label over nodes.",
        label={
            "description": "The name by which components ask for the group.",
            "type": ["string", "integer", "number", "boolean"],
            **_pattern(
                rf"^(?!\s*({'|'.join(RESERVED)})\s*$)\s*{_NAME}\s*$",
                "a label has letters, digits, '_', '-' and '.'; 'cluster' and 'node' are reserved",
            ),
            "examples": ["a800", "4090"],
        },
        node_ranks=_node_ranks("The ranks of its nodes: `0-3,5`, a number, or a list."),
        hardware=_mapping(
            HARDWARE_KEYS,
            "Hardware that is declared and not found, such as robots.",
            type={
                "description": "The kind of hardware, in your words.",
                "type": ["string", "integer", "number", "boolean"],
                **_pattern(
                    rf"^(?!\s*({taken})\s*$)\s*{_NAME}\s*$",
                    "a kind has letters, digits, '_', '-' and '.'; accelerators are found and not declared",
                ),
                "examples": ["Franka"],
            },
            configs=_list("The pieces, in the order of their ranks on a node.", piece, minItems=1),
        ),
        ignore_hardware={
            "description": "Take the nodes as bare nodes, whatever hardware they have.",
            "type": ["boolean", "string"],
            **_pattern(rf"^({'|'.join(map(_any_case, _BOOLEANS))})$", "write true or false"),
            "default": False,
        },
        env_configs=_list(
            "What workers get on some of the nodes: variables, an interpreter.",
            _mapping(
                ENV_CONFIG_KEYS,
                "What workers get on these nodes. A node takes one.",
                node_ranks=_node_ranks("The nodes that it is for; they belong to the group."),
                env_vars={
                    **_variables(rf"(?!({'|'.join(sorted(own_variables()))})$)"),
                    "type": ["object", "array", "string"],
                    "items": _variables(rf"(?!({'|'.join(sorted(own_variables()))})$)"),
                },
                python_interpreter_path=_text(
                    "The Python that runs the workers there.", filled=True, examples=["/opt/venv/bin/python"]
                ),
            ),
        ),
    )


def _workers() -> Schema:
    options = _mapping(
        WORKER_KEYS,
        "The class that runs as this component, as module.Name; or a mapping with its arguments.",
        **{
            "class": {"description": "The class, as module.Name; it derives from Worker.", **_target()},
            "args": _list("The arguments of its constructor, by place.", {}),
            "kwargs": {
                "description": "The arguments of its constructor, by name.",
                "type": ["object", "string"],
                "pattern": _REFERENCE,
            },
            "env_vars": _variables(),
            "max_concurrency": _number("How many calls a worker serves at once.", 1),
            "restarts": _number("How often a rank is started again when it dies.", 0),
            "share": {
                "description": "The part of each of its accelerators that a worker uses.",
                "type": ["number", "string"],
                "exclusiveMinimum": 0,
                "maximum": 1,
                "examples": [0.5],
            },
        },
    )
    return {
        "description": "The class of each component, for `roost run`.",
        "type": ["object", "string"],
        "pattern": _REFERENCE,
        "propertyNames": _component_names(),
        "additionalProperties": {**options, **_target(), "type": ["string", "object"]},
    }


def _sizes() -> Schema:
    """The sizes that place a model-parallel job: described, never refused, since other jobs have these names too."""
    found: Schema = {}
    described = {
        **{path: _SIZES[name] for name, path in PARALLEL_SIZES.items()},
        RECOMPUTE_LOGPROBS: "Whether the job computes log probabilities again; a job with inference says true.",
    }
    for path, text in described.items():
        inner = found
        for key in path[:-1]:
            inner = inner.setdefault(key, {"properties": {}})["properties"]
        inner[path[-1]] = {"description": text}
    return found


def _node() -> Schema:
    kind = {
        "description": "The vendor; nvidia where it is left out.",
        "type": "string",
        **_pattern(rf"^({'|'.join(accelerator_types())})$", f"known are {', '.join(accelerator_types())}"),
        "examples": list(accelerator_types()),
    }
    same = {"type": kind, "model": _text("The model.", examples=["H100"]), "memory": _memory("The memory of each.")}
    device = {
        "description": "What the visible-devices variable calls it: an index or a UUID.",
        "type": ["string", "integer", "number", "boolean"],
        **_pattern(rf"^[^\s{_not_in('_.:/-')}]+$", "write an index such as 3, or a UUID"),
    }
    described = "How many accelerators it has; or `{count: 8, model: H100}`; or a list with a mapping for each."
    count = _number(described, 0, MAX_ACCELERATORS_PER_NODE)
    accelerators = {
        **_mapping(ACCELERATORS_KEYS, described, **same, count=_number("How many of them.", 0, count["maximum"])),
        **count,
        "type": ["integer", "object", "array", "string"],
        "items": _mapping(ACCELERATOR_KEYS, "One accelerator.", **same, device=device),
        "maxItems": MAX_ACCELERATORS_PER_NODE,
        "examples": [8],
    }
    return _mapping(
        NODE_KEYS,
        "One node.",
        accelerators=accelerators,
        name=_text("Its name.", filled=True),
        address=_text("Its address.", filled=True),
        labels={
            "description": "Labels of your own.",
            "type": ["object", "string"],
            "pattern": _REFERENCE,
            "additionalProperties": _text("Text."),
        },
        cpus=_number("How many CPUs it has.", 0),
        memory=_memory("Its memory."),
    )


_SIZES = {
    "actor_tp": "Tensor parallel size of the actor: with the rollout's, it makes the job a model-parallel one.",
    "actor_pp": "Pipeline parallel size of the actor.",
    "actor_cp": "Context parallel size of the actor.",
    "rollout_tp": "Tensor parallel size of a rollout engine.",
    "rollout_pp": "Pipeline parallel size of a rollout engine.",
    "inference_tp": "Tensor parallel size of inference; the actor's where it is left out.",
    "inference_pp": "Pipeline parallel size of inference; the actor's where it is left out.",
}
_BOOLEANS = ("true", "false", "yes", "no", "on", "off")


def _not_in(extra: str) -> str:
    """For a class of characters: the ASCII punctuation that is not in `extra`. What is beyond ASCII is the readers'."""
    return "".join(f"\\{c}" if c in r"\]^-[" else c for c in string.punctuation if c not in extra)


_NAME = rf"[^\s{_not_in(NAME_EXTRA)}]+"
_IDENTIFIER = rf"[A-Za-z_][^\s{_not_in('_')}]*"
_RANGE = r"[0-9]+(\s*-\s*[0-9]+)?"
_SEGMENT = rf"{_RANGE}(\s*:\s*{_RANGE})?"
_PLACEMENT = rf"^\s*(all(\s*:\s*{_RANGE})?|{_SEGMENT}(\s*,\s*{_SEGMENT})*)\s*$"
_NODE_RANKS = rf"^\s*{_RANGE}(\s*,\s*{_RANGE})*\s*$"


def _several(one: str) -> str:
    return rf"^\s*{one}\s*(,\s*{one}\s*)*$"


def _any_case(word: str) -> str:
    """The word in small and large letters: a pattern in a schema has no flags."""
    return "".join(f"[{c}{c.upper()}]" for c in word)


def _pattern(pattern: str, message: str) -> Schema:
    """A pattern that lets interpolations through, and what an editor may say where it does not fit."""
    return {"pattern": f"{pattern}|{_REFERENCE}", "patternErrorMessage": message}


def _mapping(keys: Keys, description: str, /, **properties: Schema) -> Schema:
    """A mapping of these keys and no other: exactly those that its reader knows."""
    found: Schema = {
        "description": description,
        "type": ["object", "string"],
        "pattern": _REFERENCE,
        "properties": {name: properties[name] for name in keys.known},
        "additionalProperties": False,
    }
    return {**found, "required": list(keys.required)} if keys.required else found


def _list(description: str, items: Schema, /, **more: int) -> Schema:
    return {"description": description, "type": ["array", "string"], "pattern": _REFERENCE, "items": items, **more}


def _number(description: str, minimum: int, maximum: int | None = None, examples: list[int] | None = None) -> Schema:
    """A whole number, which may be quoted."""
    digits = r"^\s*0*[1-9][0-9]*\s*$" if minimum else r"^\s*-?[0-9]+\s*$"
    found = {
        "description": description,
        "type": ["integer", "string"],
        "minimum": minimum,
        **_pattern(digits, f"write a whole number from {minimum} on"),
    }
    more: Mapping[str, Any] = {"maximum": maximum, "examples": examples}
    return {**found, **{key: value for key, value in more.items() if value is not None}}


def _text(description: str, *, filled: bool = False, examples: list[str] | None = None) -> Schema:
    found: Schema = {"description": description, "type": ["string", "integer", "number", "boolean"]}
    if filled:
        found |= {"pattern": r"\S"}
    return {**found, "examples": examples} if examples else found


def _ranks(pattern: str, message: str) -> Schema:
    return {"type": ["string", "integer"], "minimum": 0, **_pattern(pattern, message)}


def _node_ranks(description: str) -> Schema:
    return _one_or_several(description, _ranks(_NODE_RANKS, "write node ranks such as 0-3,5"), [0, "0-3"])


def _one_or_several(description: str, one: Schema, examples: list[Any]) -> Schema:
    """Ranks, or a list of such ranks."""
    return {
        "description": description,
        **one,
        "type": ["string", "integer", "array"],
        "items": one,
        "minItems": 1,
        "examples": examples,
    }


def _component_names() -> Schema:
    return {
        "pattern": _several(_NAME),
        "patternErrorMessage": "a component has letters, digits, '_', '-' and '.' in its name",
    }


def _target() -> Schema:
    pattern = rf"^{_IDENTIFIER}(\.{_IDENTIFIER})*[.:]{_IDENTIFIER}$"
    return {"type": "string", **_pattern(pattern, "write module.Name")}


def _variables(but: str = "") -> Schema:
    return {
        "description": "Environment variables for the workers, by name; a number is taken as it is typed.",
        "type": ["object", "string"],
        "pattern": _REFERENCE,
        "propertyNames": {
            "pattern": f"^{but}{VARIABLE.pattern}$",
            "patternErrorMessage": "this cannot be set as an environment variable here",
        },
        "additionalProperties": {"type": ["string", "integer", "number", "boolean"]},
    }


def _memory(description: str) -> Schema:
    units = "|".join(re.escape(unit) for unit in UNITS if unit)
    return {
        "description": f"{description} Bytes, or a number with a unit.",
        "type": ["string", "integer", "number"],
        "minimum": 0,
        **_pattern(rf"^\s*[0-9]+(\.[0-9]+)?\s*({units})?\s*$", "write bytes, or a unit: 80GiB, 512GB"),
        "examples": ["80GiB"],
    }
