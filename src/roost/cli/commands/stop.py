"""`roost stop`: end a run that is running, as Ctrl-C in its terminal would."""

from __future__ import annotations

import contextlib
import socket
from typing import Annotated

import typer

from roost.cli.completion import complete_run
from roost.cli.limits import LOOK_SECONDS, STOP_SECONDS
from roost.cli.out import tell
from roost.deadline import Deadline
from roost.errors import ClusterError, ConfigError
from roost.machine.processes import stop_process
from roost.runtime.runs.index import LATEST, find_run, find_running, read_run
from roost.runtime.runs.record import Status


def stop(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Its id, the first characters of that, or its folder; default: the only run of this project.",
            autocompletion=complete_run,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, max=86400, help="How long it may take to end.")
    ] = STOP_SECONDS,
) -> None:
    # Which run is the newest is no reason to end it.
    folder = find_running() if run in (None, LATEST) else find_run(str(run))
    record = read_run(folder)
    if record.outcome.status is not Status.RUNNING:
        raise ConfigError(f"run {record.id} is not running: {record.outcome}", hint="`roost runs` shows which are")
    if record.host != socket.gethostname():
        hint = f"on {record.host}: kill {record.pid}"
        raise ConfigError(f"the driver of run {record.id} is on another machine, {record.host}", hint=hint)
    said, look = record.waiting, Deadline.after(LOOK_SECONDS)

    def say() -> None:
        """Say what its driver waits for before it can end."""
        nonlocal said, look
        if not look.is_over:
            return
        look = Deadline.after(LOOK_SECONDS)
        with contextlib.suppress(ConfigError):
            waiting = read_run(folder).waiting
            if waiting and waiting != said:
                tell(f"run {record.id} waits for {waiting}")
            said = waiting

    try:
        has_ended = stop_process(record.pid, record.pid_began, timeout, say)
    except PermissionError:
        raise ConfigError(f"run {record.id} is {record.user}'s: you may not stop it") from None
    if not has_ended:
        hint = f"it may be saving; kill -9 {record.pid} ends it at once, and `roost clean` what it leaves behind"
        raise ClusterError(f"run {record.id} was asked to stop {timeout:g} s ago, and still runs", hint=hint)
    tell(f"run {record.id} has ended: {read_run(folder).outcome}")
