"""The keeper of a local cluster as a fork of the warm process; as in an interpreter of its own, it leads a session."""

import os

from roost.testing.keeper import main

os.setsid()
main()
