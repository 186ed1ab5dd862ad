"""Roost: say which worker process sits on which hardware, see it before you pay for it, launch it on Ray.

`__init__.pyi` lists the public names, and each is loaded on first use, so that `import roost` is quick.
"""

from typing import Any

import lazy_loader

__version__ = "0.1.0"

_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        from roost.extras import missing_extra  # only a light install needs it

        missing = missing_extra(error)
        if missing is None:
            raise
        message = f"roost.{name} {missing[0]}: {missing[1]}"
        raise ModuleNotFoundError(message, name=error.name) from None


def __dir__() -> list[str]:
    return sorted(__all__)
