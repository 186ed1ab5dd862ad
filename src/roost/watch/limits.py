"""How often the views of a run look, and how long they wait."""

WINDOW_SECONDS = 30.0
"""The idle share of a worker is that of so many last seconds."""
RECENT_SECONDS = 1.0
"""A worker between two calls counts as busy if it was for most of so long."""
SILENT_SECONDS = 10.0
"""A worker that has written nothing for so long is silent."""
HANG_SECONDS = 60.0
"""A call without progress is stuck after so long, or five times the longest call of its method, whichever is more."""
FIRST_HANG_SECONDS = 600.0
"""A call without progress is stuck after so long where no call of its method has ended yet."""
SKEW_SECONDS = 0.5
"""Clocks that differ by less than this are not corrected."""
CLOCK_SECONDS = 5.0
"""From so many seconds of new lines a reader finds that its own clock is ahead of those of the run."""
RATE_SECONDS = 10.0
"""The rates of channels and engines are those of so many last seconds."""
RECORD_SECONDS = 1.0
"""The record of a run is read, to see whether its driver is there, at most so often."""
PAGE_SECONDS = 0.05
"""The page reads the run, and is sent what changed, at most so often."""
BEAT_SECONDS = 5.0
"""The page is sent something at least so often, so that a lost connection shows."""
CHART_SECONDS = 1.0
"""The page is sent the charts so often."""
LONGEST_LANE_SECONDS = 3600.0
"""The lanes of workers show at most so much of a run."""
SHORTEST_LANE_SECONDS = 0.1
"""The lanes of workers show at least so much of a run."""
EXPORT_SECONDS = 5.0
"""Figures go to a collector of OpenTelemetry so often."""
FRESH_SECONDS = 1.0
"""The figures of one export are read once, and serve for so long."""
ANSWER_SECONDS = 10.0
"""A worker has so long to write its stacks, unless --timeout says otherwise."""
STACK_LOOK_SECONDS = 0.05
"""`roost stack` looks for the answer of the worker so often."""
LAUNCH_SECONDS = 20.0
"""A recorded run is played from here on: before, it launches."""
EARLY_HANG_SECONDS = 10.0
"""What limits a run may be a call that lasts so long, if its CPU is idle and its method never took a fifth of that."""
JUDGE_SECONDS = 1.0
"""What limits a run is judged at most so often."""
