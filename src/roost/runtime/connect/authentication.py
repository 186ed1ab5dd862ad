"""Ray's token authentication, for a process that loaded Ray before it knew the cluster."""

from __future__ import annotations

import sys


def refresh_authentication() -> None:
    """Let Ray read `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN_PATH` anew.

    Ray reads them once, when it is loaded, and has no public way to read them again; a test or a script usually
    loads Ray before it starts or finds the cluster. Without a connection nothing else hangs on what is read here.
    Ray before 2.52 has no tokens, and nothing to refresh.
    """
    raylet = sys.modules.get("ray._raylet")
    if raylet is None or not hasattr(raylet, "AuthenticationTokenLoader"):
        return
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
