"""Roost under the trainers that people have: one module for each framework, the only place that knows it.

`roost.compat.NAME` is imported in the place of a module of the framework, or `roost compat NAME -- python train.py`
puts it there and changes no file. It has two values, and importing it imports nothing of the framework:

- `REPLACES: dict[str, str]`: the framework's modules, each with the module of ours that stands in for it.
- `TRIED: tuple[str, ...]`: the framework's versions that it was tried with.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.errors import ConfigError
from roost.text import did_you_mean, join_words

NAME = "ROOST_COMPAT"
"""The environment variable with the framework's name, for every Python that has `HOOK` on its path."""
TOLD = "ROOST_COMPAT_TOLD"
"""Set in the processes below one that has told the user what is in place."""
NEXT_HOOK = "ROOST_COMPAT_NEXT_HOOK"
"""The user's own RAY_RUNTIME_ENV_HOOK."""
HOOK = Path(__file__).parent / "hook"
"""A folder with a `sitecustomize`, which every Python imports that finds it on its path."""


def frameworks() -> list[str]:
    """Return the frameworks that Roost can stand in for.

    >>> "slime" in frameworks()
    True
    """
    return sorted({found.name for found in pkgutil.iter_modules(__path__)} - {"hook", "job", "limits"})


def check_framework(name: str) -> None:
    """Raise ConfigError unless Roost can stand in for a framework of that name."""
    known = frameworks()
    if name not in known:
        close = did_you_mean(name, known)
        hint = f"did you mean {close!r}?" if close else f"it knows {join_words(known)}"
        raise ConfigError(f"roost compat knows no framework {name!r}", hint=hint)


def environment(name: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process below which every Python takes our modules, and so do its Ray workers."""
    check_framework(name)
    own = {NAME: name, "PYTHONPATH": _first(variables.get("PYTHONPATH", ""))}
    hook = f"{pass_on.__module__}.{pass_on.__name__}"
    if (before := variables.get("RAY_RUNTIME_ENV_HOOK", hook)) != hook:
        own[NEXT_HOOK] = before
    return {**variables, **own, "RAY_RUNTIME_ENV_HOOK": hook}


def pass_on(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Let the Ray workers of this job begin as this process did: Ray calls it with the job's runtime environment.

    Workers of a cluster that another process started have nothing of this process's environment.
    """
    found = dict(runtime_env or {})
    if before := os.environ.get(NEXT_HOOK):
        module, _, function = before.rpartition(".")
        found = dict(getattr(importlib.import_module(module), function)(found) or {})
    variables = dict(found.get("env_vars") or {})
    # Ray puts the node's own value there.
    variables["PYTHONPATH"] = _first(variables.get("PYTHONPATH", "${PYTHONPATH}"))
    own = {name: value for name in (NAME, TOLD) if (value := os.environ.get(name))}
    return {**found, "env_vars": variables | own}


def tell(name: str, replaced: str, tried: Sequence[str]) -> None:
    """Say once, for all processes of a program, what is in place, and if the framework is of a version never tried."""
    # Below torchrun, the ranks have no process of the program above them.
    if os.environ.get(TOLD) or os.environ.get("RANK", "0") != "0":
        return
    os.environ[TOLD] = "1"
    version = _version_of(name)
    print(f"roost: stands in for {replaced} of {name} {version}", file=sys.stderr, flush=True)
    if version not in tried:
        renamed = f"what {name} renamed, added or moved since then is as {name} has it, or missing"
        print(f"roost: it was tried with {name} {join_words(tried)}: {renamed}", file=sys.stderr, flush=True)


def load_theirs(name: str, *needed: str) -> Any:
    """Load the framework's own module, a copy for Roost to change; ConfigError if it has not what Roost changes."""
    parent, _, _ = name.rpartition(".")
    places = importlib.import_module(parent).__path__ if parent else None
    spec = importlib.machinery.PathFinder.find_spec(name, places)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if missing := join_words([repr(needs) for needs in needed if not hasattr(module, needs)]):
        framework = name.partition(".")[0]
        tried = importlib.import_module(f"{__name__}.{framework}").TRIED
        hint = f"Roost was tried with {framework} {join_words(tried)}"
        raise ConfigError(f"{name} has no {missing}: it is of a version that Roost does not know", hint=hint)
    return module


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # A checkout that is only on the path.
        return str(getattr(sys.modules.get(name), "__version__", "of an unknown version"))


def _first(path: str) -> str:
    """Put our folder first on a search path.

    >>> _first("/theirs") == f"{HOOK}:/theirs", _first(f"{HOOK}") == f"{HOOK}"
    (True, True)
    """
    return os.pathsep.join(dict.fromkeys([str(HOOK), *filter(None, path.split(os.pathsep))]))
