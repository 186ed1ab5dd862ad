"""What is in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

from roost.rl.engines.staging import SHARED_FOLDER


def shared_memory() -> list[Path]:
    """Entries of its folder, without those of engines, which other tests have at the same time."""
    return [path for path in SHARED_FOLDER.iterdir() if not path.name.startswith(f"roost-{os.geteuid()}-")]
