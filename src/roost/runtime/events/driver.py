"""The driver's own events, and the folder that it prepares for its workers' events."""

from __future__ import annotations

import contextlib
from pathlib import Path

from roost.machine.folders import open_regular
from roost.runtime.events.emitter import emitter
from roost.runtime.events.file import is_ours
from roost.runtime.events.format import DRIVER, DRIVER_FILE, EVENTS_FOLDER
from roost.runtime.runs.folder import RunDir

EVENTS_VARIABLE = "ROOST_EVENTS"
"""Set to `off`, the processes of a job write no events."""


def start_driver_events(run_dir: RunDir) -> None:
    """Remove the events of an earlier run in the same folder, and begin to write the events of this process."""
    folder = Path(run_dir.path) / EVENTS_FOLDER
    for path in [] if folder.is_symlink() else [*folder.rglob("*.jsonl")]:
        with contextlib.suppress(OSError):
            with open(path, "rb", opener=open_regular) as file:
                was_ours = is_ours(file.read(64))
            if was_ours:
                path.unlink()
    emitter.start(Path(run_dir.path), Path(EVENTS_FOLDER, DRIVER_FILE), DRIVER, run=run_dir.token)
