"""The flags of a train/rollout job, checked, and the same layout as `cluster.component_placement`. Pure.

>>> from roost import Topology
>>> flags = TrainRolloutFlags(actor_num_nodes=1, actor_num_gpus_per_node=4, rollout_num_gpus=2)
>>> flags_to_config(flags, Topology.from_shorthand("2x4"))["cluster"]["component_placement"]
{'actor': '0-3:0-3', 'rollout': '4-5:0-1'}
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from itertools import chain, groupby
from typing import Any

from roost.config.ranks import format_ranks
from roost.config.readers.slime import MILES, PLACING
from roost.config.topology import Topology
from roost.errors import ConfigError, Problem
from roost.placement.plan import Plan
from roost.placement.planner import make_plan
from roost.text import did_you_mean, join_words, plural

TRAIN = "actor"
CRITIC = "critic"
ROLLOUT = "rollout"
_SECTION = "train_rollout"
_MOST = 1_000_000
_COUNTS = {
    "actor_num_nodes": _MOST,
    "actor_num_gpus_per_node": _MOST,
    "rollout_num_gpus": _MOST,
    "rollout_num_gpus_per_engine": _MOST,
    "dp_attention_size": 4000,
}
_SWITCHES = ("colocate", "debug_train_only", "debug_rollout_only", "rollout_external", "use_critic")
_SHARES = ("num_gpus_per_actor", "num_gpus_per_engine")
_SHARE = 0.8
_NEAR = 0.84
"""How alike a name is to that of a flag that is probably meant."""
_ELSEWHERE = frozenset({"sglang_config", "prefill_num_servers", "eval_num_gpus"})
"""Flags of slime and miles that divide the accelerators among engines in a way that these flags cannot say."""
_OTHERS = {*(name.replace("-", "_") for name in MILES.defaults), "rollout_num_engines", "rollout_external_engine_infos"}
_OTHERS -= _ELSEWHERE
"""Flags of slime and miles that a reader knows, and two names that slime adds to what it has parsed."""


class Mode(StrEnum):
    """How training and rollout share the accelerators: the flag that asks for it, or `dis-agg`."""

    TRAIN_ONLY = "debug_train_only"
    ROLLOUT_ONLY = "debug_rollout_only"
    COLOCATE = "colocate"
    """Both on the same accelerators."""
    DISAGGREGATED = "dis-agg"
    """Each on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRolloutFlags:
    """The command-line flags of a train/rollout job, under the documents' names."""

    actor_num_nodes: int = 1
    actor_num_gpus_per_node: int = 8
    rollout_num_gpus: int | None = None
    """With `colocate` the default is as many as the training has; 0 is a router without engines of its own."""
    rollout_num_gpus_per_engine: int = 1
    colocate: bool = False
    debug_train_only: bool = False
    debug_rollout_only: bool = False
    rollout_external: bool = False
    """Whether the engines run elsewhere, and need no accelerators of this cluster."""
    use_critic: bool = False
    """Whether a critic trains on the accelerators of the actor."""
    num_gpus_per_actor: float = _SHARE
    """The part of an accelerator that a training actor takes, and a critic; by default half as much with a critic."""
    num_gpus_per_engine: float = 0.2
    """The part of each of its accelerators that an engine takes."""
    dp_attention_size: int = 1
    """How many ranks an engine's data-parallel attention has: each gets one of as many consecutive ports."""

    def __post_init__(self) -> None:
        if self.use_critic is True and self.num_gpus_per_actor == _SHARE:
            object.__setattr__(self, "num_gpus_per_actor", _SHARE / 2)
        wrong = _wrong_values(self)
        problems = [(message, "") for message in wrong.values()]
        problems += _conflicts(self, wrong.keys())
        if problems:
            raise ConfigError([Problem(message=message, hint=hint) for message, hint in problems])

    @property
    def mode(self) -> Mode:
        """How training and rollout share; the first flag that is set decides, in the documents' order."""
        return next((mode for mode in Mode if getattr(self, mode, False)), Mode.DISAGGREGATED)

    @property
    def train_num_gpus(self) -> int:
        """How many accelerators the training has."""
        return 0 if self.mode is Mode.ROLLOUT_ONLY else self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def engines_num_gpus(self) -> int:
        """How many accelerators the engines have."""
        if self.mode is Mode.TRAIN_ONLY or self.rollout_external:
            return 0
        if self.mode is Mode.COLOCATE and self.rollout_num_gpus is None:
            return self.train_num_gpus
        return self.rollout_num_gpus or 0

    @property
    def num_gpus(self) -> int:
        """How many accelerators the job needs in all."""
        return max(self.train_num_gpus, self.rollout_offset + self.engines_num_gpus)

    @property
    def rollout_offset(self) -> int:
        """Where the engines' accelerators begin."""
        is_apart = self.mode is Mode.DISAGGREGATED or (self.mode is Mode.COLOCATE and self.rollout_external)
        return self.train_num_gpus if is_apart else 0

    @property
    def num_engines(self) -> int:
        """How many engines there are."""
        return self.engines_num_gpus // self.rollout_num_gpus_per_engine


def read_flags(args: object) -> TrainRolloutFlags:
    """Read flags from a namespace, a dict, a config or any object that has them; missing ones have their defaults.

    Other names belong to the job and are ignored, unless they look like a flag that is written otherwise, or say how
    much hardware a role has.
    """
    if isinstance(args, TrainRolloutFlags):
        return args
    if args is None or isinstance(args, str | bytes | int | float):
        raise ConfigError(f"{args!r} has no flags", hint="give the parsed arguments, or a dict")
    read = args.get if isinstance(args, Mapping) else partial(getattr, args)
    known = [field.name for field in fields(TrainRolloutFlags)]
    given = {str(name) for name in (args if isinstance(args, Mapping) else getattr(args, "__dict__", ()))}
    found = {name: value for name in known if (value := read(name, None)) is not None}
    problems = []
    for name in sorted({*given, *_ELSEWHERE}.difference(known, _OTHERS)):
        value = read(name, None)
        if close := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR):
            problems.append(Problem(message=f"there is no flag {name!r}", hint=f"did you mean {close[0]!r}?"))
        elif (name in _ELSEWHERE or PLACING.match(name)) and isinstance(value, int | float | str) and value:
            hint = "leave it out, or write the placement into a job.yaml"
            if name not in _ELSEWHERE and (nearest := did_you_mean(name, known)):
                hint = f"did you mean {nearest!r}? Otherwise {hint}"
            problems.append(Problem(message=f"{name} is {value!r}: Roost has no such flag", hint=hint))
    for name in ("num_nodes", "num_gpus_per_node"):
        own, of_actor = read(f"{CRITIC}_{name}", None), found.get(f"{TRAIN}_{name}")
        if found.get("use_critic") and None not in (own, of_actor) and own != of_actor:
            message = f"{CRITIC}_{name} is {own!r}, and {TRAIN}_{name} is {of_actor!r}"
            problems.append(Problem(message=message, hint="the critic is on the accelerators of the actor"))
    if problems:
        raise ConfigError(problems)
    if read("rollout_external_engine_addrs", None) is not None:
        found.setdefault("rollout_external", True)
    return TrainRolloutFlags(**found)


def engine_parts(num_gpus: int, per_engine: int, nodes: Sequence[int]) -> list[list[list[int]]]:
    """Divide slots among engines: for each engine, for each of its nodes, the indices of its slots.

    `nodes` has the node of each slot, as measured.

    >>> engine_parts(4, 4, [0, 0, 1, 1])
    [[[0, 1], [2, 3]]]
    >>> engine_parts(6, 2, [0, 1, 1, 1, 1, 1])
    [[[0], [1]], [[2, 3]], [[4, 5]]]
    """
    return [
        [list(run) for _, run in groupby(range(first, first + per_engine), key=nodes.__getitem__)]
        for first in range(0, num_gpus - per_engine + 1, per_engine)
    ]


def flags_to_config(args: object, topology: Topology) -> dict[str, Any]:
    """Return the config with the same layout: `cluster.component_placement`, and what a placement cannot express."""
    flags = read_flags(args)
    nodes = [rank for rank, node in enumerate(topology.nodes) for _ in node.accelerators]
    if flags.num_gpus > len(nodes):
        train = f"actor_num_nodes {flags.actor_num_nodes} x actor_num_gpus_per_node {flags.actor_num_gpus_per_node}"
        rollout = f"rollout_num_gpus {flags.engines_num_gpus}"
        asked = {Mode.DISAGGREGATED: f"{train} + {rollout}", Mode.ROLLOUT_ONLY: rollout}.get(flags.mode, train)
        if flags.mode is Mode.COLOCATE and flags.engines_num_gpus > flags.train_num_gpus:
            asked = rollout
        hint = f"{asked}: lower one of them, or plan on more nodes"
        needed = plural(flags.num_gpus, "accelerator")
        raise ConfigError(f"the flags ask for {needed}, and the cluster has {len(nodes)}", hint=hint)
    placement: dict[str, str] = {}
    if flags.train_num_gpus:
        ranks = format_ranks(range(flags.train_num_gpus))
        placement[TRAIN] = f"{ranks}:{ranks}"
        if flags.use_critic:
            placement[CRITIC] = placement[TRAIN]
    if flags.engines_num_gpus:
        offset = flags.rollout_offset
        engines = engine_parts(flags.engines_num_gpus, flags.rollout_num_gpus_per_engine, nodes[offset:])
        placement[ROLLOUT] = _segments([[place + offset for place in part] for engine in engines for part in engine])
    cluster = {"num_nodes": len(topology.nodes), "component_placement": placement}
    # What the placement shows, the flags need not say again.
    names = ["rollout_num_gpus_per_engine", *_SHARES, "dp_attention_size"]
    names += [name for name in ("rollout_external",) if getattr(flags, name)]
    if flags.engines_num_gpus == 0 and flags.mode is not Mode.TRAIN_ONLY:
        names += ["rollout_num_gpus", "colocate", "debug_train_only", "debug_rollout_only"]
    if flags.mode is not Mode.ROLLOUT_ONLY:
        names += ["actor_num_nodes", "actor_num_gpus_per_node"]
    return {"cluster": cluster, _SECTION: {name: getattr(flags, name) for name in names}}


def config_to_flags(config: Mapping[str, Any], topology: Topology) -> TrainRolloutFlags:
    """Return the flags of a config; ConfigError if no flags would place its components that way."""
    plan = make_plan(config, topology)
    if others := join_words([name for name in plan.names if name not in (TRAIN, CRITIC, ROLLOUT)]):
        hint = "place it with component_placement and launch it as another group"
        known_names = join_words([repr(name) for name in (TRAIN, CRITIC, ROLLOUT)])
        raise ConfigError(f"flags know only {known_names}, and the config places {others} too", hint=hint)
    section = config.get(_SECTION) or {}
    known = [field.name for field in fields(TrainRolloutFlags)]
    for name in section:
        if name not in known:
            close = did_you_mean(str(name), known)
            hint = f"did you mean {close!r}?" if close else ""
            raise ConfigError(f"{_SECTION}: there is no flag {name!r}", hint=hint)
    flags = TrainRolloutFlags(**{**_counts(plan), **section})
    expected = flags_to_config(flags, topology)
    again = make_plan(expected, topology)
    for name in plan.names:
        if name not in again.names or plan.component(name).placements != again.component(name).placements:
            hint = f"flags would say {expected['cluster']['component_placement']}"
            raise ConfigError(f"component {name!r} is not placed as flags would place it", hint=hint)
    return flags


def make_flags_plan(args: object, topology: Topology) -> Plan:
    """Return the plan that the flags describe on some hardware."""
    return make_plan(flags_to_config(args, topology), topology)


def _counts(plan: Plan) -> dict[str, Any]:
    """Return the flags that a plan shows."""
    ranks = {name: plan.component(name).hardware_ranks for name in plan.names}
    found: dict[str, Any] = {}
    if TRAIN in ranks:
        nodes = [placement.cluster_node_rank for placement in plan.component(TRAIN).placements]
        sizes = {nodes.count(node) for node in nodes}
        num_nodes = len(set(nodes)) if len(sizes) == 1 else 1
        found |= {"actor_num_nodes": num_nodes, "actor_num_gpus_per_node": len(nodes) // num_nodes}
    if ROLLOUT in ranks:
        found["rollout_num_gpus"] = len(ranks[ROLLOUT])
        found["rollout_num_gpus_per_engine"] = len(plan.component(ROLLOUT).placements[0].local_hardware_ranks)
    found["use_critic"] = CRITIC in ranks
    found["debug_train_only"] = ROLLOUT not in ranks
    found["debug_rollout_only"] = TRAIN not in ranks
    found["colocate"] = bool({*ranks.get(ROLLOUT, ())} & {*ranks.get(TRAIN, ())})
    if found["colocate"] and len(ranks[ROLLOUT]) == len(ranks[TRAIN]):
        # The default is as many as the training has.
        found["rollout_num_gpus"] = None
    return found


def _segments(parts: Sequence[Sequence[int]]) -> str:
    """Write processes with consecutive ranks as a placement: one segment for each run of processes of the same size."""
    segments = []
    for _, run in groupby(enumerate(parts), key=lambda numbered: len(numbered[1])):
        processes, ranks = zip(*run, strict=True)
        segments.append(f"{format_ranks(list(chain(*ranks)))}:{format_ranks(processes)}")
    return ",".join(segments)


def _wrong_values(flags: TrainRolloutFlags) -> dict[str, str]:
    """Return a message for each flag whose value is wrong, whatever the others are."""
    wrong = {}
    for name, most in _COUNTS.items():
        value = getattr(flags, name)
        # A router alone has no engines, and slime then writes 0 for the actor, which is not trained.
        least = 0 if name == "rollout_num_gpus" or (flags.debug_rollout_only and name.startswith(TRAIN)) else 1
        if (value is not None or name != "rollout_num_gpus") and (type(value) is not int or not least <= value <= most):
            wrong[name] = f"{name} is {value!r}: it is a whole number, from {least} to {most}"
    for name in _SWITCHES:
        if type(value := getattr(flags, name)) is not bool:
            wrong[name] = f"{name} is {value!r}: it is true or false"
    for name in _SHARES:
        value = getattr(flags, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0001 <= value <= 1:
            wrong[name] = f"{name} is {value!r}: it is a part of an accelerator, from 0.0001 to 1"
    return wrong


def _conflicts(flags: TrainRolloutFlags, wrong: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield what contradicts the mode, each with a hint, as far as none of the flags that it is about is wrong."""
    if wrong.isdisjoint(_SHARES):
        parts = [f"num_gpus_per_actor {flags.num_gpus_per_actor:g}"] * (2 if flags.use_critic else 1)
        total = flags.num_gpus_per_actor * len(parts)
        if flags.mode is Mode.COLOCATE:
            parts.append(f"num_gpus_per_engine {flags.num_gpus_per_engine:g}")
            total += flags.num_gpus_per_engine
        if len(parts) > 1 and flags.mode is not Mode.ROLLOUT_ONLY and total > 1 + 1e-6:
            why = join_words([name for name in ("colocate", "use_critic") if getattr(flags, name)])
            message = f"with {why} an accelerator is shared: {join_words(parts)} add up to {total:g}"
            yield message, "they add up to 1 at most: 0.8 and 0.2 are the defaults, with a critic 0.4, 0.4 and 0.2"
    if wrong - set(_SHARES):
        return
    if flags.debug_train_only and flags.debug_rollout_only:
        yield "debug_train_only and debug_rollout_only exclude each other", "leave one of them out"
    elif flags.rollout_external:
        return
    elif flags.mode in (Mode.DISAGGREGATED, Mode.ROLLOUT_ONLY) and flags.rollout_num_gpus is None:
        message = "rollout_num_gpus is missing: how many accelerators the engines have"
        yield message, "with colocate they have those of the training"
    elif flags.mode is not Mode.TRAIN_ONLY and flags.engines_num_gpus % flags.rollout_num_gpus_per_engine:
        engines = plural(flags.engines_num_gpus, "accelerator")
        message = f"{engines} cannot be divided among engines of {flags.rollout_num_gpus_per_engine}"
        yield message, "rollout_num_gpus is a multiple of rollout_num_gpus_per_engine"
