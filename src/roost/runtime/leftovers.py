"""The remnants of ended jobs, on a Ray cluster and on this machine: `roost clean` shows them and ends them.

Only what belongs to this user is found, and nothing of a job that may be alive: where that cannot be told, the job
counts as alive. Everything is looked for a second time right before it is ended.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import psutil
import ray
from ray._raylet import PlacementGroupID  # no public call reaches a placement group of another namespace
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup

from roost.deadline import Deadline
from roost.errors import ClusterError
from roost.machine.disks import old_folders
from roost.machine.folders import socket_folder
from roost.machine.ports import answers
from roost.machine.processes import Process, account, end_processes, find_processes, one_line
from roost.runtime.connect.calls import list_actors
from roost.runtime.connect.local_cluster import find_stale_files, folders_in_use, one_at_a_time
from roost.runtime.limits import BUSY_HEAD_SECONDS, POLL_SECONDS, REMNANTS_SECONDS
from roost.runtime.managers.job_info import JOB_VARIABLE, driver_of
from roost.runtime.nodes import discover
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.placement_groups import GROUP_PREFIX, remove_groups
from roost.runtime.nodes.ray_state import read_jobs
from roost.runtime.status import find_left_processes, visit
from roost.text import printable

_RAYLET_VARIABLE = "RAY_RAYLET_PID"
_HERE = "on this machine"
_MOST_CHARACTERS = 80
_KNOCKS = 3


class RemnantKind(StrEnum):
    """The kinds of things that a job leaves behind."""

    PROCESS = "process"
    ACTOR = "actor"
    PLACEMENT_GROUP = "placement group"
    FOLDER = "folder"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remnant:
    """One thing that a job left behind."""

    kind: RemnantKind
    name: str
    """A process id, the name of an actor or a placement group, or a path."""
    where: str
    """The node, the namespace, or this machine."""
    what: str
    """The job that left it and the command of a process, as far as they are known."""
    id: str
    """Never used again: the start of a process, Ray's id, the number of a file."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.where}, {self.what}"

    def to_dict(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {key: value for key, value in asdict(self).items() if key != "id"}


def find_remnants(address: str | None = None) -> tuple[tuple[Remnant, ...], str]:
    """Return what is left over on the Ray cluster and on this machine, and why no cluster was searched, if none was.

    Raises ClusterError if the cluster that `address` names does not answer.
    """
    user = account()
    found = list(_find_here(user))
    try:
        with visit(address) as (at, deadline):
            nodes, _ = discover.survey(deadline)
            found += _find_on_ray(at, nodes, deadline, user)
    except ClusterError as error:
        if address is not None:
            raise
        return tuple(found), error.problems[0].message
    return tuple(found), ""


def end_remnants(remnants: Sequence[Remnant], address: str | None = None) -> tuple[Remnant, ...]:
    """End the remnants that are still there, and return the ones that could not be ended."""
    user = account()
    here = {item for item in remnants if item.where == _HERE}
    found = here.intersection(_find_here(user))
    pids = {(item.name, item.id) for item in found if item.kind is RemnantKind.PROCESS}
    end_processes([item for item in _orphans(user) if (str(item.pid), str(item.since)) in pids], user)
    paths = {item.name for item in found}
    for path in old_folders(socket_folder(), "ray-*", folders_in_use()):
        if str(path) in paths:
            shutil.rmtree(path, ignore_errors=True)
    if any(item.kind is RemnantKind.FILE for item in found):
        # `roost up` writes such a file, too.
        with one_at_a_time():
            for path in find_stale_files():
                if str(path) in paths:
                    path.unlink(missing_ok=True)
    left = here.intersection(_find_here(user))
    on_ray = set(remnants) - here
    if on_ray:
        with visit(address) as (at, deadline):
            nodes, _ = discover.survey(deadline)
            still = on_ray.intersection(_find_on_ray(at, nodes, deadline, user))
            _end_on_ray(still, nodes, deadline, user)
            soon = deadline.within(REMNANTS_SECONDS)
            while still and not soon.is_over:
                time.sleep(POLL_SECONDS)
                still &= set(_find_on_ray(at, nodes, deadline, user))
        left |= still
    return tuple(item for item in remnants if item in left)


def _find_on_ray(address: str, nodes: tuple[NodeInfo, ...], deadline: Deadline, user: str) -> Iterator[Remnant]:
    processes, _ = find_left_processes(nodes, address, deadline, user)
    for left in processes:
        command = one_line([left.command], _MOST_CHARACTERS)
        yield Remnant(
            kind=RemnantKind.PROCESS,
            name=str(left.pid),
            where=f"on {left.node}",
            what=f"of {printable(left.job)}: {command}",
            id=str(left.since),
        )
    ended = {job.id: job for job in read_jobs().values() if job.user == user and job.has_ended}
    left_by = {job.id: f"of {printable(job.namespace)} (Ray job {job.id}, pid {job.pid})" for job in ended.values()}
    namespaces = {job.namespace for job in ended.values()}
    for entry in list_actors(all_namespaces=True):
        name, namespace = entry["name"], entry["namespace"]
        if namespace not in namespaces:
            continue
        # It may have ended since it was listed.
        with contextlib.suppress(ValueError):
            actor_id = ray.get_actor(name, namespace=namespace)._actor_id.hex()
            # The end of Ray's ids is the job that made the thing; a later job may have the same namespace.
            if actor_id[-8:] in ended:
                yield Remnant(
                    kind=RemnantKind.ACTOR,
                    name=printable(name),
                    where=f"in namespace {printable(namespace)}",
                    what=left_by[actor_id[-8:]],
                    id=actor_id,
                )
    for group_id, group in placement_group_table().items():
        job = ended.get(group_id[-8:])
        if job and group["name"].startswith(GROUP_PREFIX) and group["state"] != "REMOVED":
            yield Remnant(
                kind=RemnantKind.PLACEMENT_GROUP,
                name=printable(group["name"]),
                where=f"in namespace {printable(job.namespace)}",
                what=left_by[job.id],
                id=group_id,
            )


def _end_on_ray(remnants: Collection[Remnant], nodes: tuple[NodeInfo, ...], deadline: Deadline, user: str) -> None:
    pids = {(item.where, int(item.name), item.id) for item in remnants if item.kind is RemnantKind.PROCESS}
    on_nodes = {node.ray_id: str(node) for node in nodes if f"on {node}" in {where for where, _, _ in pids}}
    if pids:
        discover.on_nodes(on_nodes, _end_marked, [(pid, since) for _, pid, since in pids], user, deadline=deadline)
    actors = {item.id for item in remnants if item.kind is RemnantKind.ACTOR}
    for entry in list_actors(all_namespaces=True) if actors else ():
        with contextlib.suppress(ValueError):
            handle = ray.get_actor(entry["name"], namespace=entry["namespace"])
            if handle._actor_id.hex() in actors:
                ray.kill(handle)
    groups = [item.id for item in remnants if item.kind is RemnantKind.PLACEMENT_GROUP]
    remove_groups([PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))) for group_id in groups])


def _end_marked(asked: Sequence[tuple[int, str]], user: str) -> None:
    """End the processes of this node with these ids and starts, where they still carry the mark of a job."""
    found = find_processes(JOB_VARIABLE, user)
    end_processes([item for item in found if (item.pid, str(item.since)) in asked], user)


def _find_here(user: str) -> Iterator[Remnant]:
    for item in _orphans(user):
        command = one_line(item.words, _MOST_CHARACTERS)
        yield Remnant(
            kind=RemnantKind.PROCESS,
            name=str(item.pid),
            where=_HERE,
            what=f"of {printable(item.environment[JOB_VARIABLE])}, whose cluster is gone: {command}",
            id=str(item.since),
        )
    folders = old_folders(socket_folder(), "ray-*", folders_in_use())
    for kind, paths, why in (
        (RemnantKind.FOLDER, folders, "of a local cluster that is gone"),
        (RemnantKind.FILE, find_stale_files(), "of a process that is gone"),
    ):
        for path in paths:
            with contextlib.suppress(OSError):
                number = str(path.lstat().st_ino)
                yield Remnant(kind=kind, name=printable(str(path)), where=_HERE, what=why, id=number)


def _orphans(user: str) -> list[Process]:
    """Find processes of this machine that jobs started whose cluster is gone."""
    found = find_processes(JOB_VARIABLE, user, also=[_RAYLET_VARIABLE])
    heads = {item.environment[JOB_VARIABLE].partition("|")[0] for item in found}
    gone = {head for head in heads if not any(answers(head, BUSY_HEAD_SECONDS) for _ in range(_KNOCKS))}
    orphans = []
    for item in found:
        mark, raylet = item.environment[JOB_VARIABLE], item.environment.get(_RAYLET_VARIABLE, "")
        driver = driver_of(mark)
        # A process that does not name its raylet may have one, and so may its driver run on this machine.
        if mark.partition("|")[0] not in gone or not raylet.isdigit() or driver is None:
            continue
        if f":{socket.gethostname()}:{driver}:" in mark and psutil.pid_exists(driver):
            continue
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(raylet))
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                continue
        orphans.append(item)
    return orphans
