"""Stands for `rlinf.scheduler.placement.strategy`."""

from roost.compat.rlinf.placement import PlacementStrategy as PlacementStrategy
