"""The job's config as a value: `ClusterConfig` for the `cluster` section, `JobConfig` for the whole.

The other sections belong to the user and pass untouched; `ParallelSizes` holds the few numbers of them
that a model-parallel placement needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roost.config.document import Value
from roost.config.node_groups import MAX_NODES, NodeGroup, read_node_groups
from roost.config.ranks import Segment
from roost.config.reading import (
    Keys,
    Notes,
    PlacementText,
    check_name,
    describe,
    read_bool,
    read_fields,
    read_int,
    read_list,
    read_mapping,
    read_placement,
    read_text,
)
from roost.config.yaml_file import as_document, parse_text, read_file
from roost.errors import ConfigError, Where
from roost.text import did_you_mean

CLUSTER_KEYS = Keys(("num_nodes", "component_placement", "node_groups"), required=("component_placement",))
COMPONENT_KEYS = Keys(("node_group", "placement"), required=("placement",))
PARALLEL_SIZES: dict[str, tuple[str, ...]] = {
    "actor_tp": ("actor", "model", "tensor_model_parallel_size"),
    "actor_pp": ("actor", "model", "pipeline_model_parallel_size"),
    "actor_cp": ("actor", "model", "context_parallel_size"),
    "rollout_tp": ("rollout", "tensor_parallel_size"),
    "rollout_pp": ("rollout", "pipeline_parallel_size"),
    "inference_tp": ("inference", "model", "tensor_model_parallel_size"),
    "inference_pp": ("inference", "model", "pipeline_model_parallel_size"),
}
"""Where a job says each of `ParallelSizes`."""
RECOMPUTE_LOGPROBS = ("algorithm", "recompute_logprobs")
_FORMS = "write ranks such as 0-3:0-7 (without a space), or a mapping of node_group and placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentConfig:
    """What the config says of one component: its node groups (none: the cluster) and its segments."""

    name: str
    node_groups: tuple[str, ...]
    segments: tuple[Segment, ...]
    source: PlacementText = field(repr=False, compare=False)
    group_values: tuple[Value, ...] = field(default=(), repr=False, compare=False)

    def where(self, segment: Segment | None = None, *, last: bool = False) -> Where:
        """Where the placement stands, or one segment of it, or that segment's last resource."""
        if segment is None:
            return self.source.where()
        return self.source.where(segment.last_span if last else segment.span)

    def where_group(self, label: str | None = None) -> Where:
        """Where the component names its node groups, or one of them."""
        found = dict(zip(self.node_groups, self.group_values, strict=True))
        return (found.get(label or "") or next(iter(found.values()), self.source.value)).where()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The `cluster` section: how many nodes, which node groups, and where each component goes."""

    num_nodes: int | None
    components: tuple[ComponentConfig, ...]
    node_groups: tuple[NodeGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """The parallel sizes of a model-parallel job, each at least 1."""

    actor_tp: int = 1
    actor_pp: int = 1
    actor_cp: int = 1
    rollout_tp: int = 1
    rollout_pp: int = 1
    inference_tp: int = 1
    inference_pp: int = 1
    inference_is_own: bool = False
    """Whether the config gives inference sizes of its own; else it is cut as the actor is."""
    recompute_logprobs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A job's config, read and checked.

    >>> config = JobConfig.from_dict({"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-7"}}})
    >>> config.cluster.components[0].name
    'actor'
    """

    cluster: ClusterConfig
    document: Value = field(repr=False, compare=False)

    @classmethod
    def from_file(cls, path: str | Path) -> JobConfig:
        """Read a YAML or JSON file; every mistake comes with line and column."""
        return _checked(read_file(path))

    @classmethod
    def from_text(cls, text: str, name: str = "<text>") -> JobConfig:
        """Read YAML text; `name` stands for the file in messages."""
        return _checked(parse_text(text, name=name))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> JobConfig:
        """Read a dict or DictConfig; every mistake comes with its key."""
        return _checked(as_document(config))

    def where_group(self, label: str) -> Where | None:
        """Where the job declares a node group, rightly or wrongly; None where it does not."""
        section = self.document.get("cluster", "node_groups")
        for item in section.elements() if section is not None and section.kind == "list" else ():
            found = item.get("label")
            readable = found is not None and found.broken is None and found.kind == "scalar"
            if found is not None and readable and str(found.scalar).strip() == label:
                return (item.get("node_ranks") or item).where()
        return None

    def tensor_parallel_sizes(self) -> dict[str, str]:
        """The two sizes that only a model-parallel job has, as typed, by key; those that are given."""
        keys = (PARALLEL_SIZES["actor_tp"], PARALLEL_SIZES["rollout_tp"])
        found = {".".join(key): self.document.get(*key) for key in keys}
        return {key: describe(value).strip("'") for key, value in found.items() if value is not None}

    def parallel_sizes(self) -> ParallelSizes:
        """The parallel sizes of `actor`, `rollout`, `inference` and `algorithm`; what is left out is 1."""
        notes = Notes()
        sizes = _read_parallel_sizes(self.document, notes)
        notes.raise_if_any()
        return sizes

    def where_components(self) -> Where:
        """Where the components are named."""
        return (self.document.get("cluster", "component_placement") or self.document).where()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """A job's config as far as it can be read, and the mistakes in it.

    What is mistaken is left out of `job`, so that a planner can check the rest and tell all mistakes in one go.
    """

    job: JobConfig
    notes: Notes


def read_job_draft(config: object) -> JobDraft:
    """Read any config once: a path, a dict, a DictConfig, a JobConfig, or a draft, which is handed back."""
    if isinstance(config, JobDraft):
        return config
    notes = Notes()
    if isinstance(config, JobConfig):
        return JobDraft(job=config, notes=notes)
    document = as_document(config)
    return JobDraft(job=JobConfig(cluster=_read_cluster(document, notes), document=document), notes=notes)


def read_cluster_section(section: object) -> ClusterConfig:
    """Read the `cluster` section alone, as `Cluster(cluster_cfg=cfg.cluster)` has it; components may be left out."""
    document = as_document({"cluster": section})
    if isinstance(section, Mapping) and "cluster" in section:
        raise ConfigError(
            "cluster_cfg is the whole config", hint="hand over its section 'cluster': Cluster(cluster_cfg=cfg.cluster)"
        )
    notes = Notes()
    config = _read_cluster(document, notes, CLUSTER_KEYS._replace(required=()))
    notes.raise_if_any()
    return config


def _checked(document: Value) -> JobConfig:
    draft = read_job_draft(document)
    draft.notes.raise_if_any()
    return draft.job


def _read_cluster(document: Value, notes: Notes, keys: Keys = CLUSTER_KEYS) -> ClusterConfig:
    empty = ClusterConfig(num_nodes=None, components=())
    if document.kind != "mapping":
        notes.config(document, f"a job is a mapping with a section 'cluster', not a {document.kind}")
        return empty
    try:
        section = document.get("cluster")
    except ConfigError as error:
        notes.take(error)
        return empty
    if section is None:
        notes.config(document, "the job has no section 'cluster'", hint=_no_cluster_hint(document.keys()))
        return empty
    hint = "components stand under component_placement, one level deeper"
    fields = read_mapping(section, notes, "cluster", keys, otherwise=hint)
    num_nodes = None
    if "num_nodes" in fields:
        num_nodes = read_int(fields["num_nodes"], notes, "num_nodes", minimum=1, maximum=MAX_NODES)
    groups: tuple[NodeGroup, ...] = ()
    if "node_groups" in fields:
        groups = read_node_groups(fields["node_groups"], notes, num_nodes, f"num_nodes is {num_nodes}")
    components: tuple[ComponentConfig, ...] = ()
    if "component_placement" in fields:
        components = _read_components(fields["component_placement"], notes)
    return ClusterConfig(num_nodes=num_nodes, components=components, node_groups=groups)


def _no_cluster_hint(keys: list[str]) -> str:
    close = did_you_mean("cluster", keys[:1000])
    if close:
        return f"is that {close!r}?"
    if "component_placement" in keys:
        return "this is the section itself: put it under 'cluster:', or hand over the whole config"
    if "defaults" in keys:
        return "this looks like a Hydra config that is not composed: plan the composed one, as --cfg job prints it"
    return "put num_nodes, component_placement and node_groups under 'cluster:'"


def _read_components(value: Value, notes: Notes) -> tuple[ComponentConfig, ...]:
    if value.kind == "mapping" and not value.keys():
        notes.config(value, "component_placement names no component")
    found: dict[str, ComponentConfig] = {}
    seen: set[str] = set()
    for text, entry in read_fields(value, notes, "component_placement").items():
        for part in text.split(","):
            name = check_name(part, entry.key, notes, "the component name")
            if name is None:
                continue
            if name in seen:
                notes.config(entry.key, f"component {name!r} is named twice")
                continue
            seen.add(name)
            component = _read_component(name, entry.value, notes)
            if component is not None:
                found[name] = component
    return tuple(found.values())


def _read_component(name: str, value: Value, notes: Notes) -> ComponentConfig | None:
    groups: dict[str, Value] = {}
    placement = value
    if value.kind == "mapping":
        what = f"component {name!r}"
        fields = read_mapping(value, notes, what, COMPONENT_KEYS, otherwise=_FORMS)
        if "node_group" in fields:
            labels = _read_labels(fields["node_group"], notes, what)
            if labels is None:
                return None
            groups = labels
        if "placement" not in fields:
            return None
        placement = fields["placement"]
    read = read_placement(placement, notes, f"component {name!r}")
    if read is None:
        return None
    source, segments = read
    return ComponentConfig(
        name=name,
        node_groups=tuple(groups),
        segments=segments,
        source=source,
        group_values=tuple(groups.values()),
    )


def _read_labels(value: Value, notes: Notes, what: str) -> dict[str, Value] | None:
    found: dict[str, Value] = {}
    for part in read_list(value, notes, f"{what}: node_group") if value.kind == "list" else [value]:
        text = read_text(part, notes, f"{what}: node_group")
        if text is None:
            return None
        for name in text.split(","):
            label = check_name(name, part, notes, f"{what}: the node group")
            if label is None:
                return None
            if label in found:
                notes.config(part, f"{what} names node group {label!r} twice")
                return None
            found[label] = part
    if not found:
        notes.config(value, f"{what}: node_group is an empty list")
        return None
    return found


def _read_parallel_sizes(document: Value, notes: Notes) -> ParallelSizes:
    def size(name: str, default: int = 1) -> int:
        value = document.get(*PARALLEL_SIZES[name])
        if value is None:
            return default
        return read_int(value, notes, PARALLEL_SIZES[name][-1], minimum=1) or default

    recompute = document.get(*RECOMPUTE_LOGPROBS)
    actor_tp = size("actor_tp")
    actor_pp = size("actor_pp")
    return ParallelSizes(
        actor_tp=actor_tp,
        actor_pp=actor_pp,
        actor_cp=size("actor_cp"),
        rollout_tp=size("rollout_tp"),
        rollout_pp=size("rollout_pp"),
        # Inference recomputes with the actor's weights, so it is cut as the actor is unless it says otherwise.
        inference_tp=size("inference_tp", actor_tp),
        inference_pp=size("inference_pp", actor_pp),
        inference_is_own=any(
            document.get(*PARALLEL_SIZES[name]) is not None for name in ("inference_tp", "inference_pp")
        ),
        recompute_logprobs=None if recompute is None else read_bool(recompute, notes, RECOMPUTE_LOGPROBS[-1]),
    )
