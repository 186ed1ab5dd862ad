"""The sections of a job that say what runs: `workers`, a class for each component, `entry`, a function, and more."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.config.document import Value
from roost.config.fields import Field, Table
from roost.config.flow import FLOW_FIELDS, FlowConfig, read_flow
from roost.config.job import JobDraft, read_job_draft
from roost.config.memory import MEMORY_FIELDS, PHASES_FIELDS, MemoryConfig, read_memory
from roost.config.node_groups import WORKER_VARIABLES
from roost.config.overrides import override
from roost.config.reading import Notes, known_hint, read_fields
from roost.config.rules import KEEP_FIELDS, MESH_FIELDS, SPREAD_FIELDS, RulesConfig, read_rules
from roost.config.values import MODULES, PLAIN_LIST, PLAIN_MAPPING, SHARE, TARGET, by_name, choice, variables, whole
from roost.config.yaml_file import parse_text
from roost.errors import Where
from roost.text import did_you_mean

BINDS = ("numa", "none")
MOST_CONCURRENCY = 10_000
"""Ray starts a thread for each call at a time: with far more of them, a worker dies while it starts."""

WORKER_FIELDS = Table(
    "The class that runs as this component, as module.Name; or a mapping with its arguments.",
    Field("class", TARGET, "The class, as module.Name; it derives from Worker.", required=True),
    Field("args", PLAIN_LIST, "The positional arguments of its constructor."),
    Field("kwargs", PLAIN_MAPPING, "The keyword arguments of its constructor."),
    Field("env_vars", variables(lambda: WORKER_VARIABLES)),
    Field("max_concurrency", whole(1, MOST_CONCURRENCY), "How many calls a worker serves at the same time."),
    Field("restarts", whole(), "How often a rank is started again when it dies."),
    Field("share", SHARE, "The part of each of its accelerators that a worker uses."),
    Field("preload", MODULES, "As `preload` of the cluster: the imports that the job's workers share."),
    Field(
        "bind",
        choice(lambda: BINDS, "bind"),
        "numa, the default: a worker runs on the cores near its accelerators, if the machine tells them. none: on any.",
    ),
    short=TARGET,
)
RUN_FIELDS = Table(
    "What runs.",
    Field("workers", by_name(WORKER_FIELDS), "The class of each component, for `roost run`."),
    Field(
        "entry",
        TARGET,
        "The function that `roost run` calls when all workers are ready, as module.name.",
        examples=("my_job.main",),
    ),
    Field("flow", FLOW_FIELDS),
    Field("memory", MEMORY_FIELDS),
    Field("phases", PHASES_FIELDS),
    Field("mesh", MESH_FIELDS),
    Field("keep", KEEP_FIELDS),
    Field("spread", SPREAD_FIELDS),
    is_open=True,
    naming="{name}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The workers of one component: a class by name, its arguments, and how to launch it."""

    component: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
    restarts: int = 0
    share: float | None = None
    """The part of each of its accelerators that a worker uses."""
    preload: tuple[str, ...] = ()
    bind: str = "numa"
    """`numa`: on the cores near its accelerators, or `none`."""
    source: Value | None = field(default=None, repr=False, compare=False)

    def where(self, key: str = "class") -> Where | None:
        """Return the place of one of its settings, or of the whole if it has no such setting."""
        if self.source is None:
            return None
        return (self.source.get(key) or self.source).where()

    def where_variable(self, name: str) -> Where | None:
        """Return the place where the job names an environment variable."""
        section = self.source.get("env_vars") if self.source else None
        return next((key.where() for key, _ in section.items() if key.scalar == name), None) if section else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The programs of a job: its workers in the order of the components, and the function to call."""

    workers: tuple[WorkerConfig, ...]
    entry: str
    entry_where: Where | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDraft(JobDraft):
    """A job read in full: as a draft, and with it the other sections as far as they can be read."""

    workers: dict[str, WorkerConfig]
    entry: str | None
    flow: FlowConfig | None = None
    memory: MemoryConfig | None = None
    rules: RulesConfig | None = None


def read_job_text(text: str, *, name: str, overrides: Sequence[str] = ()) -> RunDraft:
    """Read all sections of a job from its text, with settings of the command line; messages call the file `name`."""
    return read_run_draft(override(parse_text(text, name=name), overrides))


def read_run_draft(config: object) -> RunDraft:
    """Read all sections of any config, as `read_job_draft` does; all but `cluster` may be left out."""
    if isinstance(config, RunDraft):
        return config
    draft = read_job_draft(config)
    notes = draft.notes.copy()
    found = {name: _section(draft.job.document, name, notes) for name in RUN_FIELDS.fields}
    section, entry, flow = (found[name] for name in ("workers", "entry", "flow"))
    # Where the components cannot be read, every name would be unknown.
    names = draft.names if draft.names or not draft.notes.problems else None
    workers = {} if section is None else _read_workers(section, names, notes)
    # A name that `workers` has been told about is not told about again.
    names = None if names is None else tuple(dict.fromkeys((*names, *workers)))
    return RunDraft(
        job=draft.job,
        notes=notes,
        names=draft.names,
        workers=workers,
        entry=None if entry is None else TARGET.read(entry, notes, "entry"),
        flow=None if flow is None else read_flow(flow, names, notes),
        memory=read_memory(found["memory"], found["phases"], names, notes, _meant_section(draft, found)),
        rules=read_rules(found["mesh"], found["keep"], found["spread"], names, notes),
    )


def read_run_config(config: object) -> RunConfig:
    """Read `workers` and `entry`, both of which `roost run` needs; raise one error with all mistakes of the job."""
    draft = read_run_draft(config)
    notes, document = draft.notes.copy(), draft.job.document
    given = document.keys() if document.kind == "mapping" else RUN_FIELDS.fields
    if "workers" not in given:
        example = f"{draft.names[0] if draft.names else 'actor'}: my_job.Actor"
        hint = _meant("workers", given) or f"name a class: workers: {{{example}}}"
        notes.config(document, "the job has no section 'workers'", hint=hint)
    if "entry" not in given:
        hint = _meant("entry", given) or "name the function that runs it: entry: my_job.main"
        notes.config(document, "the job has no 'entry'", hint=hint)
    notes.raise_if_any()
    entry = document.get("entry")
    return RunConfig(
        workers=tuple(draft.workers[name] for name in draft.names),
        entry=str(draft.entry),
        entry_where=None if entry is None else entry.where(),
    )


def _meant(name: str, given: Collection[str]) -> str:
    """Return a hint if another key of the job looks like this one; what is not known to Roost may be the user's."""
    close = did_you_mean(name, set(given) - set(RUN_FIELDS.fields))
    return f"it has {close!r}: did you mean {name!r}?" if close else ""


def _meant_section(draft: JobDraft, found: Mapping[str, Value | None]) -> str:
    """Return a hint if the one of two sections that go together has a name that looks like the other's."""
    missing = next((name for name in ("memory", "phases") if found[name] is None), "")
    return _meant(missing, draft.job.document.keys()) if missing and draft.job.document.kind == "mapping" else ""


def _section(document: Value, name: str, notes: Notes) -> Value | None:
    with notes.catching():
        return document.get(name)
    return None


def _read_workers(section: Value, names: tuple[str, ...] | None, notes: Notes) -> dict[str, WorkerConfig]:
    found: dict[str, WorkerConfig] = {}
    seen: set[str] = set()
    for text, pair in read_fields(section, notes, "workers").items():
        for name in (unicodedata.normalize("NFC", part.strip()) for part in text.split(",")):
            if names is not None and name not in names:
                notes.config(pair.key, f"workers: the job has no component {name!r}", hint=known_hint(name, names))
            elif name in seen:
                notes.config(pair.key, f"workers names {name!r} twice")
            seen.add(name)
            worker = _read_worker(name, pair.value, notes)
            if worker is not None:
                found[name] = worker
    # A component that is misspelt here, or in its placement, has its class.
    meant = {did_you_mean(name, names) for name in seen.difference(names or ()) if names}
    for name in names or () if section.kind == "mapping" else ():
        if name not in seen and name not in meant:
            notes.config(section, f"component {name!r} has no class in 'workers'", hint=f"write {name}: my_job.Actor")
    return found


def _read_worker(name: str, value: Value, notes: Notes) -> WorkerConfig | None:
    what = f"worker {name!r}"
    if value.kind != "mapping":
        target = TARGET.read(value, notes, what)
        return None if target is None else WorkerConfig(component=name, target=target, source=value)
    section = WORKER_FIELDS.read(value, notes, what)
    read = {key: section.read(key) for key in WORKER_FIELDS.fields}
    target, args = read.pop("class"), tuple(read.pop("args") or ())
    if target is None:
        return None
    given = {key: item for key, item in read.items() if item is not None}
    return WorkerConfig(component=name, target=target, args=args, source=value, **given)
