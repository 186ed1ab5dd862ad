"""How long an X-ray waits for what."""

TIMEOUT_SECONDS = 20.0
"""The cluster has so long to answer, unless --timeout says otherwise."""
DASHBOARD_SECONDS = 3.0
"""The dashboard's server has so long for each answer."""
STACK_SECONDS = 10.0
"""The dashboard's server has so long to read the stacks of one process."""
WATCH_SECONDS = 5.0
"""`roost xray --watch` looks so often."""
