"""For tests of code that uses Roost: a multi-node Ray cluster on one machine with fake accelerators, and a toy engine.

from roost.testing import local_cluster

with local_cluster("2x8,1x0"):
    cluster = Cluster(num_nodes=3)

`__init__.pyi` lists the public names, and each is loaded on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
