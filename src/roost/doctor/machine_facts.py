"""Collects the facts of one machine, or of one node on it, for `roost doctor`.

Nothing here waits for ever, changes anything or loads Ray: a machine whose Ray is missing or broken is checked too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from roost.deadline import Deadline
from roost.doctor import facts
from roost.doctor.facts import HomeFacts, HostName, MachineFacts, NodeFacts, OwnedProcess, RayletFacts, Unknown
from roost.doctor.limits import HEAD_SECONDS, SAY_SECONDS, SEE_SECONDS
from roost.errors import RoostError
from roost.machine.allowances import find_limits, find_memory
from roost.machine.devices import find_devices
from roost.machine.disks import OldFiles, file_system, file_systems, find_old_files
from roost.machine.folders import socket_folder
from roost.machine.ports import answers, find_ports
from roost.machine.probe import find_software, machine_id, starting_environment
from roost.machine.processes import list_processes, one_line
from roost.runtime.connect.local_cluster import folders_in_use, read_local_cluster
from roost.runtime.nodes.accelerators import variables_of_interest
from roost.runtime.runs.folder import runs_folder
from roost.text import error_text

JOB_VARIABLE = "ROOST_JOB"  # as in `managers`, which loads Ray
_PACKAGES = ("roost", "ray", "numpy", "torch", *(name for names in facts.ENGINES.values() for name in names))


def gather(
    functions: Mapping[str, Callable[[], Any]], seconds: float, waiting: Callable[[list[str]], None] = lambda _: None
) -> dict[str, Any]:
    """Run functions at the same time; a function that raises, or is not back in time, gives `Unknown`.

    `waiting` is called every few seconds with the names of the functions that are not back.
    """
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            found[name] = functions[name]()
        except RoostError as error:
            found[name] = Unknown(why=error.problems[0].message, do=error.problems[0].hint)
        except Exception as error:
            found[name] = Unknown(why=error_text(error))

    # Not a pool: Python waits for its threads at exit, and a thread that hangs in a dead file system never ends.
    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in functions}
    for thread in threads.values():
        thread.start()
    deadline, say = Deadline.after(seconds), Deadline.after(SAY_SECONDS)
    while not deadline.is_over and (out := [name for name, thread in threads.items() if thread.is_alive()]):
        if say.is_over:
            say = Deadline.after(SAY_SECONDS)
            waiting(out)
        threads[out[0]].join(min(deadline, say).left)
    late = Unknown(why=f"no answer in {seconds:g} s")
    return {name: found.get(name, late) for name in functions}


def collect_machine(folders: Mapping[str, str], environment: Mapping[str, str], seconds: float) -> MachineFacts:
    """Collect the facts of this machine; what is missing after `seconds` is unknown.

    `folders` (use -> path) are the folders that jobs write to.
    """
    found = gather(
        {
            "software": partial(find_software, _PACKAGES),
            "memory": find_memory,
            "shm": partial(file_system, "/dev/shm"),  # noqa: S108 - only its size is read
            "disks": partial(file_systems, folders),
            "limits": find_limits,
            "ports": find_ports,
            "devices": find_devices,
            "host_name": _host_name,
            "environment": partial(find_variables, environment),
            "processes": find_owned_processes,
        },
        seconds,
    )
    processes = found.pop("processes")
    ray, marked = processes if isinstance(processes, tuple) else (processes, processes)
    return MachineFacts(machine=machine_id("net", "mnt"), ray_processes=ray, marked=marked, **found)


def collect_home(seconds: float) -> HomeFacts:
    """Collect what is kept for this user."""
    found = gather({"local_cluster": read_local_cluster, "old_files": _old_files}, seconds)
    return HomeFacts(now=time.time() - psutil.boot_time(), **found)


def driver_folders(run_dir: str | None) -> dict[str, str]:
    """Return the folders (use -> path) that a driver on this machine writes to."""
    folders = {"temporary files": tempfile.gettempdir()}
    # Where Roost's own folder is unusable, the check of old files says so.
    with contextlib.suppress(RoostError):
        folders["runs"] = str(Path(run_dir).absolute() if run_dir else runs_folder())
    return folders


def _host_name() -> HostName:
    """Return the name of this machine, and what it resolves to."""
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return HostName(name=name, addresses=(), error=error.strerror or str(error))
    return HostName(name=name, addresses=tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))


def find_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies, each under its name in lower case, and the visible devices."""
    proxies = {name: environment.get(name) or environment.get(name.upper()) for name in facts.PROXY_VARIABLES}
    devices = {name: environment[name] for name in variables_of_interest() if name in environment}
    return {name: value for name, value in proxies.items() if value} | devices


def find_owned_processes() -> tuple[tuple[OwnedProcess, ...], tuple[OwnedProcess, ...]]:
    """Return the processes of Ray on this machine, and the processes that jobs of Roost started."""
    head_answers = cache(partial(answers, timeout=HEAD_SECONDS))
    ray, marked = [], []
    for item in list_processes(["RAY_RAYLET_PID", JOB_VARIABLE]):
        head = item.flag("gcs-address")
        if head:
            ray.append(OwnedProcess(pid=item.pid, name=item.name, owner=head, has_owner=bool(head_answers(head))))
        elif item.name.startswith("ray::"):
            raylet = item.environment.get("RAY_RAYLET_PID", "")
            is_alive = not raylet.isdigit() or psutil.pid_exists(int(raylet))
            ray.append(OwnedProcess(pid=item.pid, name=item.name, owner="", has_owner=is_alive))
        head, bar, _ = (job := item.environment.get(JOB_VARIABLE, "")).partition("|")
        if bar:
            command = one_line([item.command], 120)
            marked.append(OwnedProcess(pid=item.pid, name=command, owner=job, has_owner=bool(head_answers(head))))
    return tuple(ray), tuple(marked)


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
    return gather({"marker": partial(os.path.exists, marker)}, SEE_SECONDS)["marker"] is True


def tell_time() -> float:
    """Return the time of this node's clock: Ray takes no function that is written in C."""
    return time.time()


def _old_files() -> tuple[OldFiles, ...]:
    used = folders_in_use()
    sessions = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"  # noqa: S108 - where Ray keeps them
    return (
        find_old_files("sessions of Ray", sessions, "session_*", used),
        find_old_files("folders of local clusters", socket_folder(), "ray-*", used),
        find_old_files("runs", runs_folder(), "*", used),
    )


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
