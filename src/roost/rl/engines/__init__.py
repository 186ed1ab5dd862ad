"""Engines for language models: each starts a real inference server, and takes weights from a link.

`__init__.pyi` lists the public names, and each is loaded on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
