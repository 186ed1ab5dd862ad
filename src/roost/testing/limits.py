"""How long local clusters wait for what."""

BOOT_SECONDS = 90.0
"""A cluster that Ray itself starts has so long to come up."""
NODES_SECONDS = 10.0
"""The processes of a local cluster have so long to end before they are killed."""
KEEPER_SECONDS = 20.0
"""The keeper of a local cluster has so long to stop it, and again as long once it is killed."""
AGENT_SECONDS = 60.0
"""The agent of a node has so long to start when it is first needed."""
