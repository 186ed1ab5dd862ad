"""How long code that deals with processes and files of this machine waits for what."""

LOAD_SECONDS = 60.0
"""A child process has so long to load its modules before its own time begins."""
END_SECONDS = 5.0
"""A child process that was killed has so long to end: it may hang in the kernel."""
PIPE_SECONDS = 0.2
"""The guard of a server looks so often whether the server or its caller ended."""
MEMORY_LOOK_SECONDS = 1.0
"""The guard of a server notes so often which shared memory its processes use."""
KILL_SECONDS = 5.0
"""The processes of a server have so long to end after SIGKILL."""
TIDY_SECONDS = 2.0
"""Python's resource tracker of a server that ended has so long to remove shared memory before it is killed."""
TERMINATE_SECONDS = 3.0
"""Processes have so long to end after SIGTERM, and as long after SIGKILL."""
LOOK_SECONDS = 0.02
"""The wait between two looks at whether a process has ended."""
INTERPRETER_SECONDS = 30
"""The interpreter of a node group has so long to import Ray."""
YOUNG_SECONDS = 30.0
"""A file younger than this may be about to be used, and is left alone."""
PY_SPY_SECONDS = 20.0
"""py-spy has so long to read the stacks of a process."""
