"""How long a channel waits for what."""

from __future__ import annotations

CONNECT_SECONDS = 30.0
"""How long `Channel.connect` waits for a channel that is not there yet, unless it is told."""
ASK_SECONDS = 60.0
"""How long `Channel.create` and `connect` wait for a home that exists to describe its channel."""
GRACE_SECONDS = 1.0
"""How long a call that timed out waits to learn from the home what became of its request."""
STATUS_SECONDS = 5.0
"""How long `roost channels` waits for one job's manager, or for all homes: one that hangs must not hide the others."""
RATE_SECONDS = 10.0
"""Over how long a home counts its rates of puts and gets."""
