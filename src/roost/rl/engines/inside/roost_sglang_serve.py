"""The server of SGLang, which proves to know the engine's secret, and has it as its key.

On the command line every user could read the key. SGLang takes no middleware: it is put around the application that it
hands to uvicorn, which it does in this process as long as it has one process for tokenizing.
"""

import os
import runpy
import sys
from typing import Any

if __name__ == "__main__":
    import roost_proof
    import uvicorn

    run = uvicorn.run

    def run_with_proof(app: Any, **options: Any) -> None:
        """Serve the application behind the proof."""
        if isinstance(app, str):
            raise SystemExit("with tokenizer_worker_num above 1 SGLang cannot prove that it is the job's: leave it out")
        run(roost_proof.Proof(app), **options)

    uvicorn.run = run_with_proof
    sys.argv += ["--api-key", os.environ[roost_proof.SECRET]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
