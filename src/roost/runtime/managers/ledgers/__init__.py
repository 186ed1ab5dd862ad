"""The managers' knowledge as plain state: no Ray calls, no clock, no I/O."""
