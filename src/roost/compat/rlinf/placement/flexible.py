"""Stands for `rlinf.scheduler.placement.flexible`."""

from roost.compat.rlinf.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
