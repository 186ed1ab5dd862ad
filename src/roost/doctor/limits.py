"""How long the doctor waits for what."""

HEAD_SECONDS = 3.0
"""The head of a cluster has so long to answer: longer than the kernel waits before it tries a busy one again."""
SEE_SECONDS = 5.0
"""A file system has so long to say whether a file exists."""
ASK_SECONDS = 5.0
"""A manager of a job, or a file system, has so long to answer; all managers together have twice that."""
PING_SECONDS = 1.0
"""The doctor asks so often whether the cluster's head is still there."""
MACHINE_SECONDS = 15.0
"""The checks of this machine have so long."""
FOLDER_SECONDS = 10.0
"""The file system of --run-dir has so long to say whether the folder exists."""
SPARE_SECONDS = 15.0
"""Beyond the time of the nodes, the check of the cluster has so long to find it, ask for its jobs and leave it."""
SAY_SECONDS = 5.0
"""`roost doctor` says so often what it waits for."""
