"""What a run writes while it runs: the format of its events, and what collects them without holding up a call."""
