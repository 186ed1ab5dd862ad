"""The files that people write, as values: job files, inventories, rank expressions, hardware. Pure."""
