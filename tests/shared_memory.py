"""What is in shared memory."""

from __future__ import annotations

from pathlib import Path

from roost.rl.engines.staging import staging_folder


def shared_memory() -> list[Path]:
    """Entries of its folder, without those of engines, which other tests have at the same time."""
    folder = staging_folder("")
    return [path for path in folder.parent.iterdir() if not path.name.startswith(folder.name)]
