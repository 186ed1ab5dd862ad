"""How long the runtime waits for what, and how often it looks: every number in one place."""

from __future__ import annotations

# --- the limits that callers can change ---

TIMEOUT_SECONDS = 180.0
"""How long `Cluster(…)` waits for all nodes to join and answer."""
RESERVE_SECONDS = 60.0
"""How long a reservation waits for accelerators that other jobs hold."""
LAUNCH_SECONDS = 600.0
"""How long `launch` waits for every worker to be ready."""
GROUP_CLOSE_SECONDS = 15.0
"""How long `group.close` waits for its workers to end."""
CALL_SECONDS = 60.0
"""How long a call to a manager of the job waits for its answer."""
STATUS_SECONDS = 60.0
"""How long commands that look at a cluster from outside wait for its nodes."""

# --- Ray's head ---

ASK_SECONDS = 10.0
"""How long a process that asks or joins Ray's head waits for its answer."""
BLIP_SECONDS = 5.0
"""A head that is silent for longer counts as gone, until it answers again."""
LOST_SECONDS = 20.0
"""A head that is silent for longer is given up: a wait for a worker would never return."""
OUTLIVE_SECONDS = 10**6
"""How long after the death of its head Ray ends a driver: never, because Roost ends it in order, and sooner."""
LEAST_SECONDS = 0.5
"""The least time that a call of Ray's gets, even after the caller's deadline."""
SOON_SECONDS = 1.0
"""How long a wait for a worker stays in Ray itself, which is a little quicker than in another thread."""
STILL_HANGS_SECONDS = 1.0
"""How long a call waits for an earlier one of its kind that hangs."""
HANGING_CALLS_SECONDS = 5.0
"""How long a new connection waits for the calls of a lost one to end."""
HEAD_EVERY_SECONDS = 0.5
"""How often the watch of the head looks whether it and the raylet are there."""
KNOCK_SECONDS = 0.2
"""How long a process waits that only wants to know whether a port refuses."""
RAYLET_ANSWER_SECONDS = 2.0
"""A raylet that answers within this time can share its probe with the other nodes of its machine."""
DISCONNECT_SECONDS = 20.0
"""How long disconnecting waits for Ray to shut down."""
GUARD_POLL_SECONDS = 0.5
"""How often the guard of a Ray that a driver started looks whether the driver is there."""
GUARD_END_SECONDS = 10.0
"""How long the driver waits for its guard to end."""

# --- opening, closing and stopping a job ---

CLUSTER_CLOSE_SECONDS = 30.0
"""How long all steps of `Cluster.close` may take together."""
CLOSE_STEP_SECONDS = 1.0
"""The least time that each of them gets."""
CLOSE_DISCONNECT_SECONDS = 10.0
"""The least time that the last of them gets, which disconnects."""
STOP_GRACE_SECONDS = 60.0
"""How long a driver may take to end after SIGTERM, in addition to its hooks."""

# --- nodes ---

POLL_SECONDS = 0.1
"""How often a process looks for something that nothing announces."""
SAY_EVERY_SECONDS = 10.0
"""How often a long wait says what it waits for."""
SPARE_NODES_SECONDS = 15.0
"""How long discovery waits for nodes that it may not need: a sick one must not take all the time."""
SETTLE_SECONDS = 10.0
"""How long Ray may take to place or refuse a placement group."""
SETTLE_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at it."""
PROBE_SECONDS = 120.0
"""How long the probe of a reserved accelerator may take."""
LOST_LOOK_SECONDS = 1.0
"""How often probes and launches look whether what they wait for is lost: Ray would wait for ever."""
LOGS_EVERY_SECONDS = 0.2
"""How often the driver looks at the logs that grew lately."""
LOGS_LATELY_SECONDS = 5.0
"""How long ago a log may have grown to count as one of these."""
LOGS_ALL_SECONDS = 5.0
"""How often the driver looks at all logs, at least."""
LOGS_FIND_SECONDS = 2.0
"""How often the driver looks for logs that are only on their own nodes."""
LOGS_CATCH_UP_SECONDS = 1.0
"""How often errors that show the end of a log fetch everything, at most."""
LOGS_STOP_SECONDS = 5.0
"""How long fetching the rest of the logs may take."""
LOGS_READER_SECONDS = 30.0
"""After how long a node whose reader has ended gets another one."""

# --- managers ---

HANG_SECONDS = 5.0
"""A manager answers at once: one that takes longer counts as hanging, where others must not wait for it."""
MANAGER_RETRY_SECONDS = 0.05
"""How often a call to a manager that Ray restarts is repeated."""
RESTORE_SECONDS = 10.0
"""How long a manager waits for the one that keeps its copy."""
COPIES_SECONDS = 2.0
"""How long a restarted manager waits for the copies that it had kept for others."""
DEATHS_EVERY_SECONDS = 0.5
"""How often managers and drivers look who has died."""
WATCH_STOP_SECONDS = 2.0
"""How long the end of the watch waits for its thread."""
WATCH_KNOCK_SECONDS = 0.5
"""How long one round of the watch spends on nodes that do not answer, at most."""
PORT_TRY_SECONDS = 30.0
"""How long the node manager waits for a node to try ports."""

# --- reserving ---

RESERVE_LEAST_SECONDS = 2.0
"""How long a reservation tries at least: Ray takes a second to notice that an accelerator was released."""
RESERVE_NOTICE_SECONDS = 1.5
"""After how long Ray has noticed earlier releases."""
RESERVE_PAUSE_SECONDS = (0.1, 0.6)
"""The shortest and the longest pause between two tries."""
RESERVE_PATIENCE_SECONDS = 10.0
"""After how long a reservation pauses twice as long between two tries."""
RESERVE_SAY_SECONDS = 1.0
"""A shorter wait for a reservation is not worth a message."""
RESERVE_UNDO_SECONDS = 0.5
"""How long a reservation that fails may take to release what it had."""
HOLDERS_SECONDS = 2.0
"""How long a process that asks who has which accelerator waits for all jobs together."""

# --- launching and calling ---

LAUNCH_TICK_SECONDS = 0.2
"""How often a launch shows how far it is."""
LAUNCH_LINE_SECONDS = 5.0
"""How often it prints a line where there is no bar."""
LATE_SECONDS = 0.5
"""How much longer a launch that is over waits for a manager."""
GRACE_SECONDS = 1.0
"""How long the first failure of a launch or call waits for others: together they show what happened."""
LONG_WAIT_SECONDS = 30.0
"""After how long a driver says what it waits for; again after 1, 2, 5 and 10 minutes, and every ten minutes then."""
STOP_WAIT_SECONDS = 3.0
"""After how long a function that `on_stop` was given says what it waits for."""
LONG_WAITS_EVERY_SECONDS = 1.0
"""How often a driver looks which of its waits take long."""
SLICE_SECONDS = 1.0
"""How often a wait for workers looks whether the job is still there."""
TRANSFER_SECONDS = 60.0
"""How long a call whose workers have all answered waits for large values that are on their way."""
KEPT_CALL_SECONDS = 600.0
"""How long a call is kept for a rank that is to be restarted; others may be restarted before it."""
DEATH_NEWS_SECONDS = 1.0
"""How long Ray may take to learn that a worker died."""
CAUSE_SECONDS = 2.0
"""How long a restart waits for Ray to say why a worker died."""
PREDECESSOR_SECONDS = 10.0
"""How long a restarted worker waits for the process that it replaces to end."""
CONSUMERS_EVERY_SECONDS = 2.0
"""How often a worker looks whether the consumers of its streams are alive."""
FAILURES_EVERY_SECONDS = 1.0
"""How often a worker tells others of exceptions of one kind in one method after the first; its log has each of them."""
TELL_SECONDS = 0.2
"""How long the answer of a call that failed waits until the worker manager knows."""
MEANWHILE_SECONDS = 1.0
"""How long an error waits to learn what else has failed in the job; one that makes many asks twice in that time."""
MEANWHILE_LATER_SECONDS = 30.0
"""After how long a process asks again that got no answer."""
MEANWHILE_EVERY_SECONDS = 5.0
"""How often a driver looks what has failed, for the record of its run."""

# --- events and records ---

FLUSH_SECONDS = 0.3
"""How long the end of a group waits for the last events of its workers; workers in a call do not answer."""
EVENTS_EVERY_SECONDS = 0.2
"""How often a process writes its events."""
EVENTS_ASLEEP_SECONDS = 2.0
"""How often a process that has had none for a while looks for new ones."""
EVENTS_USAGE_SECONDS = 2.0
"""How often it writes its own CPU time and memory."""
LEAST_WAIT_SECONDS = 1e-3
"""How long a wait must take to be worth a line in the events."""
EVENTS_CLOCK_SECONDS = 60.0
"""How often it writes the time of day."""
EVENTS_GAUGE_SECONDS = 0.5
"""How often it writes its gauges, at most."""
EVENTS_CLOSE_SECONDS = 1.0
"""How long its end waits for the last of them."""
EVENTS_RETRY_SECONDS = 5.0
"""How long after a write that failed, as on a full disk, the next one comes."""
EVENTS_FILE_SECONDS = 5.0
"""How often a process looks whether its file of events is still the one in the folder."""
METRICS_SAVED_SECONDS = 60.0
"""A process that logs little saves up the metrics of so much time, to write them at once."""
SAMPLES_EVERY_SECONDS = 1.0
"""How often a node is sampled."""
RECORD_WRITE_SECONDS = 1.0
"""How long writing the record may take before it is written less often."""
GIT_SECONDS = 10.0
"""How long the recorder waits for git."""
RUN_LOCK_SECONDS = 2.0
"""How long the list of runs waits for folders on a file system that hangs."""

# --- what dead jobs left ---

BUSY_HEAD_SECONDS = 3.0
"""Longer than the kernel waits before it asks a busy head a second time."""
REMNANTS_SECONDS = 15.0
"""How long `roost clean` waits for what it ended to go."""
