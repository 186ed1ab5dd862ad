"""A job's config as a value: `ClusterConfig` for the `cluster` section, `JobConfig` for the whole.

`run` reads `workers` and `entry`. The other sections belong to the user; `ParallelSizes` holds the few numbers in them
that a model-parallel placement needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roost.config.document import Value
from roost.config.fields import Field, Table
from roost.config.inventory import SHORTHAND
from roost.config.node_groups import GROUP_FIELDS, MAX_NODES, NodeGroup, read_node_groups
from roost.config.ranks import MAX_PROCESSES, Segment
from roost.config.reading import Notes, Pair, PlacementText, check_name, describe, read_fields
from roost.config.topology import Topology
from roost.config.values import FILLED_TEXT, FLAG, LABELS, MODULES, PLACEMENT, Kind, Schema, by_name, items, whole
from roost.config.yaml_file import as_document, parse_text, read_file
from roost.errors import ConfigError, Where
from roost.text import did_you_mean, plural

COMPONENT_FIELDS = Table(
    "Ranks of hardware, and after a colon the process ranks on them: `0-7`, `0-3:0-7` for two processes on each, "
    "`0-7:0-3` for two pieces of hardware each, `all`; or a mapping with node_group, and placement or count.",
    Field("placement", PLACEMENT, "The ranks, counted over the node group."),
    Field("count", whole(1, MAX_PROCESSES), "So many accelerators, a process on each: which ones the rules decide."),
    Field("node_group", LABELS, "The label of the node group, or several: `a800,4090`. `node` is all nodes, bare."),
    short=PLACEMENT,
    otherwise="write ranks such as 0-3:0-7 (without a space), or a mapping of node_group and placement",
)


def _component_schema() -> Schema:
    return COMPONENT_FIELDS.schema() | {"anyOf": [{"required": [name]} for name in ("placement", "count")]}


_MOST_COMPONENTS = 10_000
_NOT_PLACEMENT = {
    **dict.fromkeys(
        ("auto_scheduler", "use_pre_process_policy", "use_wait_before_last_iter_policy", "recreate_nccl_groups"),
        "RLinf's dynamic scheduling",
    ),
    "net_emulation": "RLinf's emulation of slow networks",
    "tracer": "RLinf's tracer",
}
CLUSTER_FIELDS = Table(
    "Where each component of the job goes.",
    Field("num_nodes", whole(1, MAX_NODES), "How many nodes the job uses.", examples=(1, 2)),
    Field(
        "component_placement",
        by_name(Kind(COMPONENT_FIELDS.read, _component_schema)),
        "The components, each with its place. Several may share one: `actor,rollout: 0-7`.",
        required=True,
    ),
    Field(
        "hardware",
        SHORTHAND,
        "The cluster to plan on where no flag names another: nodes x accelerators : model. `roost run` takes what is "
        "there.",
        examples=("4x8:H100,3x0",),
    ),
    Field(
        "working_dir",
        FILLED_TEXT,
        "A folder with the job's code, which Ray copies to every node; from the folder that `roost run` is started in.",
        examples=(".",),
    ),
    Field(
        "preload",
        MODULES,
        "Installed packages whose import the workers share, on nodes that Roost started: `preload: [torch]`.",
        examples=(["torch"],),
    ),
    Field("node_groups", items(GROUP_FIELDS), "Labels over nodes, with their hardware and their environment."),
    naming="{name}",
    otherwise="components belong under component_placement, one level deeper",
    elsewhere=_NOT_PLACEMENT,
)
_SIZE = whole(1)
PARALLEL_SIZES = {
    "actor_tp": Field(
        "actor.model.tensor_model_parallel_size",
        _SIZE,
        "Tensor parallel size of the actor: with the rollout's, it makes the job a model-parallel one.",
    ),
    "actor_pp": Field("actor.model.pipeline_model_parallel_size", _SIZE, "Pipeline parallel size of the actor."),
    "actor_cp": Field("actor.model.context_parallel_size", _SIZE, "Context parallel size of the actor."),
    "rollout_tp": Field("rollout.tensor_parallel_size", _SIZE, "Tensor parallel size of a rollout engine."),
    "rollout_pp": Field("rollout.pipeline_parallel_size", _SIZE, "Pipeline parallel size of a rollout engine."),
    "inference_tp": Field(
        "inference.model.tensor_model_parallel_size",
        _SIZE,
        "Tensor parallel size of inference; by default the actor's.",
    ),
    "inference_pp": Field(
        "inference.model.pipeline_model_parallel_size",
        _SIZE,
        "Pipeline parallel size of inference; by default the actor's.",
    ),
}
"""The fields of `ParallelSizes`, each with its path in a job."""
RECOMPUTE_LOGPROBS = Field(
    "algorithm.recompute_logprobs", FLAG, "Whether the job computes log probabilities again; true for inference."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentConfig:
    """One component in the config: its node groups (none means the cluster) and its segments."""

    name: str
    node_groups: tuple[str, ...]
    segments: tuple[Segment, ...]
    source: PlacementText = field(repr=False, compare=False)
    group_values: tuple[Value, ...] = field(default=(), repr=False, compare=False)
    count: int | None = None
    """How many accelerators it takes, where it does not name them; it has no segments then."""

    def where(self, segment: Segment | None = None, *, last: bool = False) -> Where:
        """Return the place of the placement, of one segment, or of that segment's last resource."""
        if segment is None:
            return self.source.where()
        return self.source.where(segment.last_span if last else segment.span)

    def where_group(self, label: str | None = None) -> Where:
        """Return the place where the component names its node groups, or one of them."""
        found = dict(zip(self.node_groups, self.group_values, strict=True))
        return (found.get(label or "") or next(iter(found.values()), self.source.value)).where()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The `cluster` section: how many nodes, which node groups, and where each component goes."""

    num_nodes: int | None
    components: tuple[ComponentConfig, ...]
    node_groups: tuple[NodeGroup, ...] = ()
    hardware: Topology | None = None
    """The cluster to plan on, if the job says."""
    working_dir: str | None = None
    """The folder with the job's code that Ray copies to every node."""
    preload: tuple[str, ...] = ()
    """Modules whose import the workers share, on nodes that Roost started."""


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
    """Whether the config gives sizes for inference; by default it has those of the actor."""
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
        """Read YAML text; messages call the file `name`."""
        return _checked(parse_text(text, name=name))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> JobConfig:
        """Read a dict or DictConfig; every mistake comes with its key."""
        return _checked(as_document(config))

    def where_group(self, label: str) -> Where | None:
        """Return the place where the job declares a node group, even wrongly; None if it does not."""
        cluster = self.document.get("cluster")
        # The key may be misspelt: reading the section reports that.
        key = (
            did_you_mean("node_groups", cluster.keys()[:1000])
            if cluster is not None and cluster.kind == "mapping"
            else None
        )
        section = self.document.get("cluster", key or "node_groups")
        for item in section.elements() if section is not None and section.kind == "list" else ():
            found = item.get("label")
            readable = found is not None and found.broken is None and found.kind == "scalar"
            if found is not None and readable and str(found.scalar).strip() == label:
                return (item.get("node_ranks") or item).where()
        return None

    def tensor_parallel_sizes(self) -> dict[str, str]:
        """Return the two sizes that only a model-parallel job has, as typed, by key, if they are given."""
        names = [PARALLEL_SIZES[key].name for key in ("actor_tp", "rollout_tp")]
        found = {name: self.document.get(*name.split(".")) for name in names}
        return {name: describe(value).strip("'") for name, value in found.items() if value is not None}

    def parallel_sizes(self) -> ParallelSizes:
        """Read the parallel sizes of `actor`, `rollout` and `inference`; the default is 1."""
        notes = Notes()

        def read(field: Field) -> Any:
            path = field.name.split(".")
            value = self.document.get(*path)
            return None if value is None else field.kind.read(value, notes, path[-1])

        sizes = {name: size for name, field in PARALLEL_SIZES.items() if (size := read(field)) is not None}
        recompute = read(RECOMPUTE_LOGPROBS)
        notes.raise_if_any()
        # Inference recomputes with the actor's weights, so by default it has the actor's sizes.
        as_actor = {"inference_tp": sizes.get("actor_tp", 1), "inference_pp": sizes.get("actor_pp", 1)}
        is_own = any(name in sizes for name in as_actor)
        return ParallelSizes(**{**as_actor, **sizes}, inference_is_own=is_own, recompute_logprobs=recompute)

    def where_components(self) -> Where:
        """Return the place where the components are named."""
        return (self.document.get("cluster", "component_placement") or self.document).where()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """A job's config as far as it can be read, and the mistakes in it.

    `job` leaves out what is mistaken, so that a planner can check the rest and report all mistakes together.
    """

    job: JobConfig
    notes: Notes
    names: tuple[str, ...]
    """Every component that the job names, including those whose placement cannot be read."""


def read_job_draft(config: object) -> JobDraft:
    """Read any config once: a path, a dict, a DictConfig, a JobConfig, or a draft, which is returned."""
    if isinstance(config, JobDraft):
        return config
    notes = Notes()
    if isinstance(config, JobConfig):
        return JobDraft(job=config, notes=notes, names=tuple(item.name for item in config.cluster.components))
    document = as_document(config)
    cluster, names = _read_cluster(document, notes, CLUSTER_FIELDS)
    return JobDraft(job=JobConfig(cluster=cluster, document=document), notes=notes, names=names)


def read_cluster_section(section: object) -> ClusterConfig:
    """Read the `cluster` section alone, as in `Cluster(cluster_cfg=cfg.cluster)`; components are optional there."""
    document = as_document({"cluster": section})
    if isinstance(section, Mapping) and "cluster" in section:
        raise ConfigError(
            "cluster_cfg is the whole config", hint="pass its section 'cluster': Cluster(cluster_cfg=cfg.cluster)"
        )
    notes = Notes()
    config, _ = _read_cluster(document, notes, CLUSTER_FIELDS.optional())
    notes.raise_if_any()
    return config


def _checked(document: Value) -> JobConfig:
    draft = read_job_draft(document)
    draft.notes.raise_if_any()
    return draft.job


def _read_cluster(document: Value, notes: Notes, table: Table) -> tuple[ClusterConfig, tuple[str, ...]]:
    """Read the section as far as possible, and the names of all components."""
    empty = ClusterConfig(num_nodes=None, components=())
    if document.kind != "mapping":
        notes.config(document, f"a job is a mapping with a section 'cluster', not a {document.kind}")
        return empty, ()
    value = None
    with notes.catching():
        value = document.get("cluster")
        if value is None:
            notes.config(document, "the job has no section 'cluster'", hint=_no_cluster_hint(document.keys()))
    if value is None:
        return empty, ()
    bare = _bare_components(value)
    section = (table.optional(is_open=True) if bare else table).read(value, notes, "cluster")
    num_nodes = section.read("num_nodes")
    groups = read_node_groups(section.read("node_groups", ()), notes, num_nodes, f"num_nodes is {num_nodes}")
    hardware = section.read("hardware")
    if hardware is not None and num_nodes is not None and hardware.num_nodes < num_nodes:
        has = f"hardware has {plural(hardware.num_nodes, 'node')}"
        notes.config(section.value("hardware"), f"{has}, but num_nodes is {num_nodes}", "change one of the two")
    given = bare or section.read("component_placement", {})
    if len(given) > _MOST_COMPONENTS:
        message = f"it has {len(given):,} components, and a job has at most {_MOST_COMPONENTS:,}"
        notes.config(section.value("component_placement"), message, "is this the right file?")
        given = {}
    components, names = _read_components(given, notes)
    config = ClusterConfig(
        num_nodes=num_nodes,
        components=components,
        node_groups=groups,
        hardware=hardware,
        working_dir=section.read("working_dir"),
        preload=section.read("preload", ()),
    )
    return config, names


def _no_cluster_hint(keys: list[str]) -> str:
    close = did_you_mean("cluster", keys[:1000])
    if close:
        return f"is that {close!r}?"
    if "component_placement" in keys:
        return "this is the section itself: put it under 'cluster:', or pass the whole config"
    if "defaults" in keys:
        return "this looks like a Hydra config that is not composed: plan the composed one, as --cfg job prints it"
    return "put num_nodes, component_placement and node_groups under 'cluster:'"


def _bare_components(value: Value) -> dict[str, Pair]:
    """Return the components of a section that has them without the level `component_placement`, as one page of RLinf's.

    All its other keys must be placements, none of them a number alone and none a slip of a key of the section.
    """
    notes = Notes()
    with notes.catching():
        keys = value.keys() if value.kind == "mapping" else []
        bare = [name for name in keys if name not in CLUSTER_FIELDS.fields]
        slips = (name for name in bare if name in _NOT_PLACEMENT or did_you_mean(name, CLUSTER_FIELDS.fields))
        if not bare or "component_placement" in keys or len(bare) > _MOST_COMPONENTS or any(slips):
            return {}
        pairs = read_fields(value, notes, "cluster")
        found = {name: pair for name, pair in pairs.items() if name not in CLUSTER_FIELDS.fields}
        for name, pair in found.items():
            _read_component(name, pair.value, notes)
        if not notes.problems and not any(describe(pair.value).strip("'").isdecimal() for pair in found.values()):
            return found
    return {}


def _read_components(given: Mapping[str, Pair], notes: Notes) -> tuple[tuple[ComponentConfig, ...], tuple[str, ...]]:
    found: dict[str, ComponentConfig | None] = {}
    for text, pair in given.items():
        for part in text.split(","):
            name = check_name(part, pair.key, notes, "the component name")
            if name in found:
                notes.config(pair.key, f"component {name!r} is named twice")
            elif name is not None:
                found[name] = _read_component(name, pair.value, notes)
    return tuple(item for item in found.values() if item is not None), tuple(found)


def _read_component(name: str, value: Value, notes: Notes) -> ComponentConfig | None:
    what = f"component {name!r}"
    groups: dict[str, Value] = {}
    if value.kind == "mapping":
        section = COMPONENT_FIELDS.read(value, notes, what)
        groups = section.read("node_group", {})
        if "node_group" in section and not groups:
            return None
        if "count" in section:
            if "placement" in section:
                hint = "name the ranks, or say how many"
                notes.config(section.value("count"), f"{what} has a placement and a count", hint)
            value = section.value("count")
            count = section.read("count", what=f"the count of {what}")
            labels, source = tuple(groups), PlacementText(value, "", ((0, value),))
            return None if count is None else ComponentConfig(
                name=name, node_groups=labels, segments=(), source=source, group_values=tuple(groups.values()),
                count=count,
            )  # fmt: skip
        read = section.read("placement", what=what)
        if "placement" not in section and not any(key not in COMPONENT_FIELDS.fields for key in section.pairs):
            notes.config(value, f"{what} lacks 'placement'", "or say how many accelerators: count: 8")
    else:
        read = PLACEMENT.read(value, notes, what)
    if read is None:
        return None
    source, segments = read
    return ComponentConfig(
        name=name, node_groups=tuple(groups), segments=segments, source=source, group_values=tuple(groups.values())
    )
