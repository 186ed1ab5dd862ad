"""Imported by every Python below `roost compat NAME` when it starts: hands out Roost's modules in the place of NAME's.

Nothing but the standard library is imported before the framework is, since launchers and Ray's own processes run this,
too.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType


class _InTheirPlace:
    """A finder and loader for the modules of one framework that Roost stands in for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._name or name not in self._compat().REPLACES:
            return None
        # Not an importlib.abc.Loader, which takes time to import.
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, _spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        replaced, compat = module.__name__, self._compat()
        ours = importlib.import_module(compat.REPLACES[replaced])
        if any(other.startswith(f"{replaced}.") for other in compat.REPLACES) and not hasattr(ours, "__path__"):
            # Python imports the modules below a package only.
            ours.__path__ = []
        sys.modules[replaced] = ours
        importlib.import_module("roost.compat").tell(self._name, replaced, compat.TRIED)

    def _compat(self) -> ModuleType:
        return importlib.import_module(f"roost.compat.{self._name}")


def _import_theirs() -> None:
    """Import the `sitecustomize` that this one hides."""
    own = os.path.dirname(os.path.abspath(__file__))
    places = [place for place in sys.path if os.path.abspath(place) != own]
    if (spec := importlib.machinery.PathFinder.find_spec("sitecustomize", places)) and spec.loader:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("ROOST_COMPAT"):
    sys.meta_path.insert(0, _InTheirPlace(os.environ["ROOST_COMPAT"]))
_import_theirs()
