"""Stands for `rlinf.scheduler.placement.placement`."""

from roost.compat.rlinf.placement import Placement as Placement
from roost.compat.rlinf.placement import PlacementStrategy as PlacementStrategy
