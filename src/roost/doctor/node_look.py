"""What a task on a node looks at for `roost doctor`."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial

import psutil

from roost.doctor.facts import NodeLook, RayletFacts, Unseen
from roost.doctor.machine_look import LOOK_SECONDS, at_once, look_at_machine
from roost.errors import CheckFailed
from roost.machine.probe import probe, starting_environment
from roost.runtime.nodes.accelerators import node_accelerators, variables_of_interest

_SEE_SECONDS = 5.0


def look_at_node(
    node: str,
    resources: Mapping[str, float],
    marker: str | None,
    drivers: Sequence[tuple[int, float]],
    seconds: float = LOOK_SECONDS,
) -> NodeLook:
    """Look around here; `marker` is a file of the driver's, `drivers` are process ids and when their jobs began."""
    raylet = _raylet()
    folders = {"temporary files": tempfile.gettempdir()}
    if isinstance(raylet, RayletFacts):
        folders["Ray's session"] = raylet.session
    return NodeLook(
        machine=look_at_machine(folders, starting_environment(), seconds),
        host=socket.gethostname(),
        raylet=raylet,
        sees_folder=marker is not None and sees(marker),
        drivers=tuple(pid for pid, since in drivers if _is_alive(pid, since)),
        accelerator_problem=_refused(node, resources),
    )


def sees(marker: str) -> bool:
    """Whether a file is there: not where this user may not look, nor where its file system does not answer."""
    return at_once({"marker": partial(os.path.exists, marker)}, _SEE_SECONDS)["marker"] is True


def tell_time() -> float:
    """What the clock here says."""
    return time.time()


def _refused(node: str, resources: Mapping[str, float]) -> tuple[str, str] | None:
    """Why a Cluster would refuse this node's accelerators."""
    try:
        node_accelerators(resources, probe(variables_of_interest()), node)
    except CheckFailed as error:
        return error.problems[0].message, error.problems[0].hint
    return None


def _raylet() -> RayletFacts | Unseen:
    """How the raylet that started this worker was started: its command tells what no public call does."""
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
                    return Unseen(why=f"this Ray starts its raylet otherwise: {error}")
    return Unseen(why="the raylet cannot be seen from its worker")


def _is_alive(pid: int, since: float) -> bool:
    """Whether the process is there and not another one that got its number later."""
    try:
        return psutil.Process(pid).create_time() <= since + 1
    except psutil.Error:
        return False
