"""How long the parts of `roost.rl` wait for what."""

from __future__ import annotations

CALL_SECONDS = 60.0
"""How long a caller waits for the manager's process, for samples, for room or for the lock, unless it is told."""
GRACE_SECONDS = 1.0
"""How much longer a caller waits than the one that it asked, so that the other can say what happened."""
STATE_SECONDS = 2.0
"""How long a call that did not get the lock in time waits to learn who has it."""
JOIN_POLL_SECONDS = 0.02
"""How long the manager pauses before it looks again whether the router reaches the engines."""
HEALTH_SECONDS = 300.0
"""How long engines may take until they are healthy, unless it is told."""
HEALTH_POLL_SECONDS = (0.05, 1.0)
"""How long the driver pauses before it asks engines again whether they are healthy: at first, and at most."""
STOP_SECONDS = 30.0
"""How long the driver waits for engines to stop."""
WEIGHTS_SECONDS = 600.0
"""How long the driver waits for new weights at the engines, and an engine for its server to take them or to pause."""
GENERATE_SECONDS = 600.0
"""How long a caller waits for samples, and an engine for its server's answer, unless it is told."""
VERSIONS_SECONDS = 30.0
"""How long the driver waits for engines to say which version they serve."""
LOOK_SECONDS = 0.2
"""How often an engine looks whether the client of a running request is still there."""
END_SECONDS = 60.0
"""How long an engine waits at its end for the thread that generates."""
DRAIN_SECONDS = 5
"""How long a server that stops lets its running requests go on: half of what it has before it is killed."""
STEP_SECONDS = 60
"""How long one step of a server may take before it counts as hanging."""
FIND_SECONDS = 60.0
"""How long an engine waits for a Python to say whether its package is installed there."""
SERVER_SECONDS = 30.0
"""How long the caller of a server in this process waits for its thread."""
CUT_SECONDS = 1.0
"""How long a connection that a server closes may take to send what was written, and to close."""
PAUSE_SECONDS = 0.05
"""How long a server that stops pauses before it looks again whether its requests are done."""
IDLE_SECONDS = 3.0
"""How long the router keeps a connection to an engine that it does not use: less than servers do."""
