"""The packages that the light install leaves out, and how to add them."""

from __future__ import annotations

from importlib.util import find_spec

from roost.errors import ConfigError

_LAUNCHES = frozenset({"ray", "numpy", "packaging", "pynvml"})


def missing_extra(error: ModuleNotFoundError) -> tuple[str, str] | None:
    """Return what a missing package of the extra `ray` is called and how to install it; None for any other package.

    People know Ray, and not the packages that come with it.

    >>> what, how = missing_extra(ModuleNotFoundError("No module named 'ray'", name="ray"))
    >>> what
    'needs Ray, which is not installed'
    """
    package = (error.name or "").partition(".")[0]
    if package not in _LAUNCHES:
        return None
    return "needs Ray, which is not installed", "pip install 'roost[ray]'"


def has_ray() -> bool:
    """Tell whether Ray is installed, without importing it."""
    # A folder of that name, such as /tmp/ray, is no package.
    found = find_spec("ray")
    return found is not None and found.origin is not None


def need_ray(what: str) -> None:
    """Raise ConfigError unless Ray is installed."""
    if not has_ray():
        raise ConfigError(f"{what} needs Ray, which is not installed", hint="pip install 'roost[ray]'")
