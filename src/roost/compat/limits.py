"""How long the frameworks' own processes may take."""

START_SECONDS = 3600.0
"""Until ranks and engines that load large models are there; the frameworks themselves wait without end."""
