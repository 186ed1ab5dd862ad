"""How long the runtime waits for what, and how often it looks: every number in one place."""

from __future__ import annotations

# --- the limits that callers can change ---

TIMEOUT_SECONDS = 180.0
"""`Cluster(…)` waits so long until all nodes are there and have answered."""
RESERVE_SECONDS = 60.0
"""A reservation waits so long for accelerators that other jobs hold."""
LAUNCH_SECONDS = 600.0
"""`launch` waits so long until every worker is ready."""
GROUP_CLOSE_SECONDS = 15.0
"""`group.close` waits so long until its workers have ended."""
CALL_SECONDS = 60.0
"""A call to a manager of the job waits so long for its answer."""
STATUS_SECONDS = 60.0
"""Commands that look at a cluster from outside wait so long for its nodes."""

# --- Ray's head ---

ASK_SECONDS = 10.0
"""Whoever asks Ray's head, or joins it, waits so long for an answer."""
BLIP_SECONDS = 5.0
"""A head that is silent for longer counts as gone, until it answers again."""
LOST_SECONDS = 20.0
"""A head that is silent for longer is given up: what waits for a worker would never return."""
OUTLIVE_SECONDS = 10**6
"""Ray ends a driver so long after its head died, which is never: Roost ends it in order, and sooner."""
LEAST_SECONDS = 0.5
"""A call of Ray's gets at least so long, even after the deadline of the caller."""
SOON_SECONDS = 1.0
"""A wait for a worker stays so long in Ray itself, which is a little quicker than in another thread."""
STILL_HANGS_SECONDS = 1.0
"""A call waits so long for an earlier one of its kind that hangs."""
HANGING_CALLS_SECONDS = 5.0
"""A new connection waits so long until the calls of a lost one have ended."""
HEAD_EVERY_SECONDS = 0.5
"""The watch of the head looks so often whether it and the raylet are there."""
KNOCK_SECONDS = 0.2
"""Whoever only wants to know whether a port refuses waits so long."""
RAYLET_ANSWER_SECONDS = 2.0
"""A raylet that answers within this time can share its probe with the other nodes of its machine."""
DISCONNECT_SECONDS = 20.0
"""Disconnecting waits so long for Ray to shut down."""
GUARD_POLL_SECONDS = 0.5
"""The guard of a Ray that a driver started looks so often whether the driver is there."""
GUARD_END_SECONDS = 10.0
"""The driver waits so long for its guard to end."""

# --- opening, closing and stopping a job ---

CLUSTER_CLOSE_SECONDS = 30.0
"""All steps of `Cluster.close` share this time."""
CLOSE_STEP_SECONDS = 1.0
"""Each step of it gets at least so long."""
CLOSE_DISCONNECT_SECONDS = 10.0
"""Its last step, disconnecting, gets at least so long."""
STOP_GRACE_SECONDS = 60.0
"""A driver may take so long to end after SIGTERM, beside what its hooks may take."""

# --- nodes ---

POLL_SECONDS = 0.1
"""Whoever waits for something that nothing announces looks so often."""
SAY_EVERY_SECONDS = 10.0
"""A long wait says so often what it waits for."""
SPARE_NODES_SECONDS = 15.0
"""Discovery waits so long for nodes that it may not need, so that a sick one does not take all the time."""
SETTLE_SECONDS = 10.0
"""Ray gets so long to place or refuse a placement group."""
SETTLE_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at it."""
PROBE_SECONDS = 120.0
"""The probe of a reserved accelerator may take so long."""
LOST_LOOK_SECONDS = 1.0
"""Probes and launches look so often whether what they wait for is lost, since Ray would wait for ever."""
LOGS_EVERY_SECONDS = 0.2
"""The driver looks at the logs that grew lately so often."""
LOGS_LATELY_SECONDS = 5.0
"""A log that has not grown for so long did not grow lately."""
LOGS_ALL_SECONDS = 5.0
"""The driver looks at all logs so often at least."""
LOGS_FIND_SECONDS = 2.0
"""The driver looks so often for logs that are only on their own nodes."""
LOGS_CATCH_UP_SECONDS = 1.0
"""Errors that show the end of a log fetch everything so often at most."""
LOGS_STOP_SECONDS = 5.0
"""Fetching the rest of the logs may take so long."""
LOGS_READER_SECONDS = 30.0
"""A node whose reader has ended gets another one after so long."""

# --- managers ---

HANG_SECONDS = 5.0
"""A manager answers at once: one that takes longer counts as hanging, where others must not wait for it."""
MANAGER_RETRY_SECONDS = 0.05
"""A call to a manager that Ray restarts is repeated so often."""
RESTORE_SECONDS = 10.0
"""A manager waits so long for the one that keeps its copy."""
COPIES_SECONDS = 2.0
"""A manager that is back waits so long for the copies that it had kept for others."""
DEATHS_EVERY_SECONDS = 0.5
"""Managers and drivers look so often who has died."""
WATCH_STOP_SECONDS = 2.0
"""The end of the watch waits so long for its thread."""
WATCH_KNOCK_SECONDS = 0.5
"""One round of the watch spends at most so long on nodes that do not answer."""
PORT_TRY_SECONDS = 30.0
"""The node manager waits so long for a node to try ports."""

# --- reserving ---

RESERVE_LEAST_SECONDS = 2.0
"""A reservation tries at least so long: Ray takes a second to notice that an accelerator was released."""
RESERVE_NOTICE_SECONDS = 1.5
"""After so long, Ray has noticed earlier releases."""
RESERVE_PAUSE_SECONDS = (0.1, 0.6)
"""The shortest and the longest pause between two tries."""
RESERVE_PATIENCE_SECONDS = 10.0
"""After waiting so long, a reservation pauses twice as long between two tries."""
RESERVE_SAY_SECONDS = 1.0
"""A reservation that waits for less is not worth a message."""
RESERVE_UNDO_SECONDS = 0.5
"""A reservation that fails gets so long to release what it had."""
HOLDERS_SECONDS = 2.0
"""Whoever asks who has which accelerator waits so long for all jobs together."""

# --- launching and calling ---

LAUNCH_TICK_SECONDS = 0.2
"""A launch shows so often how far it is."""
LAUNCH_LINE_SECONDS = 5.0
"""Where there is no bar, it prints a line so often."""
LATE_SECONDS = 0.5
"""A launch that is over waits so much longer for a manager."""
GRACE_SECONDS = 1.0
"""After the first failure, so long for others of the same launch or call: together they show what happened."""
SLICE_SECONDS = 1.0
"""A wait for workers looks so often whether the job is still there."""
TRANSFER_SECONDS = 60.0
"""A call whose workers have all answered waits so long for large values that are on their way."""
KEPT_CALL_SECONDS = 600.0
"""A call is kept so long for a rank that is to be restarted; others may be restarted before it."""
DEATH_NEWS_SECONDS = 1.0
"""Ray may take so long to learn that a worker died."""
CAUSE_SECONDS = 2.0
"""A restart waits so long for Ray to say why a worker died."""
PREDECESSOR_SECONDS = 10.0
"""A restarted worker waits so long for the process that it replaces to end."""
CONSUMERS_EVERY_SECONDS = 2.0
"""A worker looks so often whether the consumers of its streams are alive."""

# --- events and records ---

FLUSH_SECONDS = 0.3
"""The end of a group waits so long for the last events of its workers; those that are in a call do not answer."""
EVENTS_EVERY_SECONDS = 0.2
"""A process writes its events so often."""
EVENTS_ASLEEP_SECONDS = 2.0
"""A process that has had none for a while looks so often."""
EVENTS_USAGE_SECONDS = 2.0
"""It writes how much it uses so often."""
EVENTS_CLOCK_SECONDS = 60.0
"""It writes what time of day it is so often."""
EVENTS_GAUGE_SECONDS = 0.5
"""It writes its gauges so often at most."""
EVENTS_CLOSE_SECONDS = 1.0
"""Its end waits so long for the last of them."""
EVENTS_RETRY_SECONDS = 5.0
"""After a write that failed, as on a full disk, the next one comes so much later."""
EVENTS_FILE_SECONDS = 5.0
"""A process looks so often whether its file of events is still the one in the folder."""
SAMPLES_EVERY_SECONDS = 1.0
"""A node is sampled so often."""
RECORD_WRITE_SECONDS = 1.0
"""Writing the record may take so long before it is written less often."""
GIT_SECONDS = 10.0
"""The recorder waits so long for git."""
RUN_LOCK_SECONDS = 2.0
"""The list of runs waits so long for folders on a file system that hangs."""

# --- what dead jobs left ---

BUSY_HEAD_SECONDS = 3.0
"""Longer than the kernel waits before it asks a busy head a second time."""
REMNANTS_SECONDS = 15.0
"""`roost clean` waits so long until what it ended is gone."""
