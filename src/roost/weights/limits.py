"""How long an update of weights waits, and for whom."""

from __future__ import annotations

UPDATE_SECONDS = 60.0
"""A caller that says nothing else waits so long for an update, and for all that opens or mends a link."""
PEER_SECONDS = 5.0
"""A target that is refilled waits so long for other targets to say which version they have."""
MARGIN_SECONDS = 1.0
"""Members give up so long before the caller of an update does, so that it gets their errors, which say more."""
LOOK_SECONDS = 0.5
"""A member that waits for another one looks so often whether the update was broken off meanwhile."""
SENT_SECONDS = 1.0
"""A source waits so long for a send to report what its handle already knows."""
RELEASE_SECONDS = 60.0
"""A worker that wants its memory back waits so long for links to let go of it."""
