"""The task that collects the facts of a node for `roost doctor`."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial

import psutil

from roost.doctor.facts import NodeFacts, RayletFacts, Unknown
from roost.doctor.gather import gather
from roost.doctor.machine_facts import collect_machine
from roost.machine.probe import starting_environment

_SEE_SECONDS = 5.0


def collect_node(
    name: str,
    address: str,
    resources: Mapping[str, float],
    marker: str | None,
    drivers: Sequence[tuple[int, float]],
    seconds: float,
) -> NodeFacts:
    """Collect the facts of this node; `marker` is a file of the driver's, `drivers` are (pid, start of its job)."""
    raylet = _raylet()
    folders = {"temporary files": tempfile.gettempdir()}
    if isinstance(raylet, RayletFacts):
        folders["Ray's session"] = raylet.session
    return NodeFacts(
        name=name,
        address=address,
        resources=resources,
        host=socket.gethostname(),
        machine=collect_machine(folders, starting_environment(), seconds),
        raylet=raylet,
        sees_folder=marker is not None and sees(marker),
        drivers=tuple(pid for pid, since in drivers if _is_alive(pid, since)),
    )


def sees(marker: str) -> bool:
    """Return whether a file exists: not if this user may not read its folder, or its file system does not answer."""
    return gather({"marker": partial(os.path.exists, marker)}, _SEE_SECONDS)["marker"] is True


def tell_time() -> float:
    """Return the time of this node's clock."""
    return time.time()


def _raylet() -> RayletFacts | Unknown:
    """Read the command line of the raylet that started this worker: no public call of Ray returns these options."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            if process.name() == "raylet":
                words = [word.partition("=") for word in process.cmdline()]
                flags = {name.removeprefix("--"): value for name, _, value in words}
                try:
                    return RayletFacts(
                        session=flags["session_dir"],
                        object_store=int(flags["object_store_memory"]),
                        object_store_folder=flags["plasma_directory"],
                    )
                except (KeyError, ValueError) as error:
                    return Unknown(why=f"this Ray starts its raylet with other options: {error}")
    return Unknown(why="the raylet is not visible from its worker")


def _is_alive(pid: int, since: float) -> bool:
    """Return whether the process is alive, and not a later one with the same id."""
    try:
        return psutil.Process(pid).create_time() <= since + 1
    except psutil.Error:
        return False
