"""The environment of a worker's process: what is set, what is joined with the node's own, what must be set early."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from roost.config.values import variable_problem
from roost.errors import ConfigError

SEARCH_PATHS = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH"),
)
"""Search paths: a value for one of them is prepended to the existing value instead of replacing it."""

_EARLY = re.compile(
    r"LD_.*|MALLOC_.*|PYTHON(PATH|HOME|HASHSEED|MALLOC\w*|OPTIMIZE|UNBUFFERED|DONTWRITEBYTECODE|FAULTHANDLER|TRACEMALLOC|"
    r"UTF8|IOENCODING|WARNINGS|NOUSERSITE|USERBASE|DEBUG|VERBOSE|ASYNCIODEBUG|PROFILEIMPORTTIME|DEVMODE|PYCACHEPREFIX|"
    r"SAFEPATH|INTMAXSTRDIGITS|COERCECLOCALE|PLATLIBDIR|NODEBUGRANGES|PERFSUPPORT|_GIL|_JIT)"
)
"""The variables that the loader, the C library or the interpreter reads before any Python code runs."""


def check_variables(variables: Mapping[str, str], taken: Iterable[str] = ()) -> None:
    """Raise ConfigError for what cannot be set as an environment variable, or is `taken`."""
    for name, value in variables.items():
        if problem := variable_problem(name, value, taken):
            raise ConfigError(f"env_vars: {problem[0]}", hint=problem[1])


def build_environment(
    layers: Iterable[Mapping[str, str]], node_has: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Merge environments, later ones taking precedence; search paths are joined, with the node's own last.

    Return the variables that can be set in the process, and those that must be set when it begins.

    >>> layers = [{"A": "1", "PYTHONPATH": "/group"}, {"A": "2", "PYTHONPATH": "/caller"}]
    >>> build_environment(layers, {"PYTHONPATH": "/node", "B": "3"})
    ({'A': '2'}, {'PYTHONPATH': '/caller:/group:/node'})
    """
    out: dict[str, str] = {}
    for name, value in (item for layer in layers for item in layer.items()):
        below = out.get(name, node_has.get(name, "")) if name in SEARCH_PATHS else ""
        places = [*value.split(os.pathsep), *below.split(os.pathsep)]
        out[name] = os.pathsep.join(dict.fromkeys(filter(None, places))) if name in SEARCH_PATHS else value
    early = {name: value for name, value in out.items() if _EARLY.fullmatch(name)}
    return {name: value for name, value in out.items() if name not in early}, early
