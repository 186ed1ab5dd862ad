"""The events that a run writes: their format, and their collection without holding up a call."""
