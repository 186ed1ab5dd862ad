"""How long what waits for what when workers talk."""

from __future__ import annotations

READ_SECONDS = 0.02
"""How long a thread that waits for something reads its connection itself before it leaves that to another thread."""
LINGER_SECONDS = 0.005
"""How long the communication thread leaves a connection to threads that read it again and again."""
GREET_SECONDS = 10.0
"""How long the other end of a new connection may take to prove that it is a member."""
RETRY_SECONDS = 0.1
"""After how long a connection that could not be opened is tried again, at first; then twice as long, up to 13 s."""
BUSY_SECONDS = 0.3
"""After how long a process connects again that was refused because the other end was connecting, too."""
LOST_SECONDS = 30.0
"""How long a peer whose connection broke may stay unreachable before all that waits for it fails."""
FIRST_LOOK_SECONDS = 10.0
"""How long the worker manager is asked for a process that is not there yet before a warning says so."""
LOOK_SECONDS = 30.0
"""How long it is asked each time after that."""
CONNECT_SECONDS = 30.0
"""How long `Channel.connect` waits for a channel that is not there yet, unless it is told."""
ASK_SECONDS = 60.0
"""How long a home has, unless the caller says, for what it answers at once: all but gets and puts that may wait."""
GRACE_SECONDS = 1.0
"""How long a call that timed out waits to learn from the home what became of its request."""
STATUS_SECONDS = 5.0
"""How long `roost status --channels` waits for one manager, or for all homes: one that hangs must not hide the rest."""
RATE_SECONDS = 10.0
"""Over how long a home counts its rates of puts and gets."""
FETCH_SECONDS = 600.0
"""A receiver waits so long for the owner of a tensor on a device to hand over its content, in any way."""
MEET_SECONDS = 60.0
"""The two processes of a process group wait so long for each other to join it."""
LOCK_POLL_SECONDS = 0.01
"""A worker that waits for locked accelerators looks so often whether they are free."""
LOCK_SAY_SECONDS = 10.0
"""After waiting so long for them, it says so."""
DIRECTORY_RETRY_SECONDS = 0.5
"""A process asks a worker manager that Ray restarts again after so long."""
COPY_POLL_SECONDS = 0.0002
"""A receiver looks so often whether a tensor has come through NCCL: its `wait` returns before it has."""
KEPT_SECONDS = 10.0
"""After so long without use, a process returns memory to the system that it received buffers in, but for a part."""
