"""The server of SGLang with the engine's secret as its key, which every user could read on the command line."""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv += ["--api-key", os.environ["ROOST_ENGINE_SECRET"]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
