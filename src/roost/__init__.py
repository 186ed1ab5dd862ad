"""Roost: say which worker process sits on which hardware, see it before you pay for it, launch it on Ray.

`__init__.pyi` lists the public names, and each is loaded on first use, so that `import roost` is quick.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)
