"""Stands for `rlinf.scheduler.placement.packed`."""

from roost.compat.rlinf.placement import PackedPlacementStrategy as PackedPlacementStrategy
