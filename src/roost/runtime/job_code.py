"""What a job names: the class of each component and the entry point, imported and checked without a cluster."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roost.config.reading import Notes
from roost.config.run import RunConfig, WorkerConfig
from roost.errors import ConfigError, Where
from roost.runtime.groups.group import GroupDraft
from roost.text import did_you_mean, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCode:
    """The code of a job."""

    drafts: tuple[tuple[WorkerConfig, GroupDraft[Any]], ...]
    """Each component with its class and the arguments of its constructor."""
    entry: Callable[..., Any]


def load_code(run: RunConfig) -> JobCode:
    """Import all that a job names; one ConfigError has everything that is missing or does not fit.

    What a module raises while it is imported is raised as it is.
    """
    notes = Notes()
    drafts, entry = [], None
    for worker in run.workers:
        with notes.catching():
            drafts.append((worker, _draft(worker)))
    with notes.catching():
        entry = load(run.entry, run.entry_where)
        if not callable(entry):
            raise ConfigError(f"entry: {run.entry} cannot be called", where=run.entry_where)
    notes.raise_if_any()
    return JobCode(drafts=tuple(drafts), entry=entry)


def load(target: str, where: Where | None = None) -> Any:
    """Import `module.Name`; ConfigError if the module or the name does not exist."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if this module is missing, and not one that it imports.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        message, hint = f"{target}: there is no module {error.name!r}", "run from its folder, or set PYTHONPATH"
        raise ConfigError(message, hint=hint, where=where) from None
    if not hasattr(module, name):
        close = did_you_mean(name, dir(module))
        hint = f"did you mean {module_name}.{close}?" if close else ""
        raise ConfigError(f"{target}: module {module_name!r} has no {name!r}", hint=hint, where=where)
    return getattr(module, name)


def _draft(worker: WorkerConfig) -> GroupDraft[Any]:
    cls = load(worker.target, worker.where())
    if not isinstance(cls, type) or not hasattr(cls, "create_group"):
        message, hint = f"{worker.target} is not a worker: {shorten(repr(cls))}", "derive the class from roost.Worker"
        raise ConfigError(message, hint=hint, where=worker.where())
    try:
        draft: GroupDraft[Any] = cls.create_group(*worker.args, **worker.kwargs)
        return draft
    except TypeError as error:
        where = worker.where("kwargs" if worker.kwargs or not worker.args else "args")
        message, hint = f"worker {worker.component!r}: {error}", "see its args and kwargs"
        raise ConfigError(message, hint=hint, where=where) from None
