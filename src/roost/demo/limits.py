"""How long the demo waits for what."""

ROUND_SECONDS = 180.0
"""The driver waits so long for a call of a round, and a trainer of the language model for its samples."""
POLL_SECONDS = 0.25
"""While a round is played, the driver looks so often for rollout workers that died."""
UPDATE_SECONDS = 30.0
"""One try to bring the weights of CartPole into the rollout workers takes at most so long."""
AWAY_SECONDS = 90.0
"""An Env waits so long for a rollout worker that died and is being restarted."""
PEER_SECONDS = 60.0
"""Ranks that learn together wait so long for each other, and a rollout worker for its weights."""
RETRY_SECONDS = 0.05
"""The pause before a question, or an update of the engines, is tried again."""
PAGE_SECONDS = 5.0
"""The page of a run has so long to stop."""
