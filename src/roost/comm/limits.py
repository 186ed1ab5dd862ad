"""How long the communication of a process waits, and for whom."""

from __future__ import annotations

FETCH_SECONDS = 600.0
"""A receiver waits so long for the owner of a tensor on a device to hand over its content, in any way."""
MEET_SECONDS = 60.0
"""The two processes of a process group wait so long for each other to join it."""
COPY_POLL_SECONDS = 0.0002
"""A receiver looks so often whether a tensor has come through NCCL: its `wait` returns before it has."""
