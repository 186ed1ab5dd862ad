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
SETTLE_SECONDS = 60.0
"""How long a receive whose message is here waits for the thread that is about to hand it over."""
