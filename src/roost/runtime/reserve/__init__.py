"""Reserving exactly the accelerators of a plan."""
