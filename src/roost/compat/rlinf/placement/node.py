"""Stands for `rlinf.scheduler.placement.node`."""

from roost.compat.rlinf.placement import NodePlacementStrategy as NodePlacementStrategy
