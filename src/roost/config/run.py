"""The sections of a job that say what runs: `workers`, a class for each component, and `entry`, what is called then."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from roost.config.document import Value
from roost.config.job import JobDraft
from roost.config.node_groups import VARIABLE
from roost.config.reading import (
    Keys,
    Notes,
    describe,
    known_hint,
    read_fields,
    read_filled_text,
    read_int,
    read_mapping,
)
from roost.errors import ConfigError

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
WORKER_KEYS = Keys(("class", "args", "kwargs", "env_vars", "max_concurrency", "restarts", "share"), required=("class",))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What runs as one component: a class by its name, its arguments, and how it is launched."""

    component: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
    restarts: int = 0
    share: float | None = None
    """The part of each of its accelerators that a worker uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a job runs: its workers in the order of the components, and the function that is called."""

    workers: tuple[WorkerConfig, ...]
    entry: str


def read_run_config(draft: JobDraft) -> RunConfig:
    """Read `workers` and `entry`; all mistakes at once, with those of the section `cluster`."""
    notes = draft.notes.copy()
    document = draft.job.document
    names = [component.name for component in draft.job.cluster.components]
    workers: dict[str, WorkerConfig] = {}
    section, entry = document.get("workers"), document.get("entry")
    if section is None:
        notes.config(document, "the job has no section 'workers'", hint=f"name a class: workers: {{{_example(names)}}}")
    else:
        workers = _read_workers(section, names, notes)
        missing = [name for name in names if name not in workers and section.get(name) is None]
        for name in missing:
            notes.config(section, f"component {name!r} has no class in 'workers'", hint=f"write {name}: my_job.Actor")
    target = None
    if entry is None:
        notes.config(document, "the job has no 'entry'", hint="name the function that runs it: entry: my_job.main")
    else:
        target = _read_target(entry, notes, "entry")
    notes.raise_if_any()
    return RunConfig(workers=tuple(workers[name] for name in names), entry=str(target))


def _read_workers(section: Value, names: list[str], notes: Notes) -> dict[str, WorkerConfig]:
    found: dict[str, WorkerConfig] = {}
    for text, item in read_fields(section, notes, "workers").items():
        for name in (part.strip() for part in text.split(",")):
            if name not in names:
                notes.config(item.key, f"workers: the job has no component {name!r}", hint=known_hint(name, names))
                continue
            worker = _read_worker(name, item.value, notes)
            if worker is not None:
                found[name] = worker
    return found


def _read_worker(name: str, value: Value, notes: Notes) -> WorkerConfig | None:
    what = f"worker {name!r}"
    if value.kind != "mapping":
        target = _read_target(value, notes, what)
        return None if target is None else WorkerConfig(component=name, target=target)
    fields = read_mapping(value, notes, what, WORKER_KEYS)
    target = _read_target(fields["class"], notes, what) if "class" in fields else None
    options: dict[str, Any] = {}
    for key, minimum in (("max_concurrency", 1), ("restarts", 0)):
        if key in fields:
            options[key] = read_int(fields[key], notes, f"{what}: {key}", minimum=minimum)
    if "share" in fields:
        options["share"] = _read_share(fields["share"], notes, what)
    for key, kind in (("args", "list"), ("kwargs", "mapping"), ("env_vars", "mapping")):
        if key in fields and fields[key].kind != kind:
            notes.config(fields[key], f"{what}: {key} has to be a {kind}, and this is {describe(fields[key])}")
        elif key in fields:
            try:
                options[key] = fields[key].plain()
            except ConfigError as error:
                notes.take(error)
    if "args" in options:
        options["args"] = tuple(options["args"])
    if "env_vars" in options:
        options["env_vars"] = _read_env_vars(fields["env_vars"], notes, what)
    if target is None:
        return None
    return WorkerConfig(
        component=name, target=target, **{key: item for key, item in options.items() if item is not None}
    )


def _read_share(value: Value, notes: Notes, what: str) -> float | None:
    try:
        share = float(str(value.scalar)) if value.kind == "scalar" else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        notes.config(
            value, f"{what}: share is {describe(value)}", hint="it is a part of an accelerator, above 0 and at most 1"
        )
        return None
    return share


def _read_env_vars(value: Value, notes: Notes, what: str) -> dict[str, str]:
    """Names and values are text: the file's own spelling, where it gives a number."""
    found: dict[str, str] = {}
    for name, item in read_fields(value, notes, f"{what}: env_vars").items():
        if not VARIABLE.fullmatch(name):
            notes.config(item.key, f"{what}: {name!r} cannot be set as an environment variable")
        elif item.value.kind != "scalar" or item.value.scalar is None:
            notes.config(item.value, f"{what}: the value of {name} is text", hint=f'write {name}: ""')
        else:
            found[name] = str(item.value.scalar)
    return found


def _read_target(value: Value, notes: Notes, what: str) -> str | None:
    text = read_filled_text(value, notes, what)
    if text is None:
        return None
    if not _TARGET.fullmatch(text):
        notes.config(value, f"{what}: {text!r} names nothing that can be imported", hint="write module.Name")
        return None
    return text.replace(":", ".")


def _example(names: list[str]) -> str:
    return f"{names[0] if names else 'actor'}: my_job.Actor"
