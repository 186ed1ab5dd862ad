"""What the managers know, as plain state: no Ray calls, no clock, no I/O."""
