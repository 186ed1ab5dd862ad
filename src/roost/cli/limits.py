"""How long commands wait, and how often they look."""

TIMEOUT_SECONDS = 30.0
"""The nodes of a live cluster have so long to answer, unless --timeout says otherwise."""
SPARE_SECONDS = 15.0
"""Beyond that, the process that asks has so long to find a cluster, ask for its jobs, and leave it."""
STOP_SECONDS = 120.0
"""`roost stop` waits so long for the driver to end, unless --timeout says otherwise."""
DOWN_SECONDS = 30.0
"""`roost down` waits so long for the processes of the local cluster to end."""
LOOK_SECONDS = 0.2
"""`roost logs --follow` looks for new lines, and `roost top` draws, so often."""
