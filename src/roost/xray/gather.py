"""Reads the facts of a cluster: Ray's tables at its head, this machine's processes, and the dashboard's server.

It reads the tables as Ray's own `ray status` does, without becoming a driver: nothing is registered, no task runs, and
no driver or node is asked, which may hang. What is on other machines only the dashboard's server knows.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from roost.config.hardware import accelerator_types
from roost.deadline import Deadline
from roost.errors import CheckFailed
from roost.machine.allowances import find_memory
from roost.machine.devices import nvidia_devices
from roost.machine.limits import PY_SPY_SECONDS
from roost.machine.processes import one_line
from roost.machine.py_spy import find_py_spy, read_stacks
from roost.runtime.connect.authentication import find_token
from roost.runtime.connect.connection import locate
from roost.runtime.connect.find_head import list_raylets
from roost.runtime.connect.head import Head, until, within
from roost.runtime.limits import ASK_SECONDS
from roost.runtime.nodes.accelerators import node_accelerators
from roost.runtime.nodes.ray_state import read_jobs
from roost.text import error_text, plural, without_colours
from roost.xray.facts import (
    Actor,
    Bundle,
    Driver,
    Facts,
    Gpu,
    Group,
    Node,
    Process,
    Stack,
    Task,
    accelerators,
    redacted,
)
from roost.xray.limits import DASHBOARD_SECONDS, STACK_SECONDS
from roost.xray.stacks import place_of

_STATES = ("ALIVE", "PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")
_CAUSES = {
    "oom_context": "OOM",
    "creation_task_failure_context": "CREATION",
    "runtime_env_failed_context": "RUNTIME_ENV",
    "actor_unschedulable_context": "UNSCHEDULABLE",
}
_WAITS_FOR_NODE = 2
_CREATION = 1
"""Ray's numbers for the state of a task that waits for a node, and for the kind that constructs an actor."""
_MOST_LOGS, _LOG_LINES, _LOG_BYTES = 16, 8, 2**16
_MOST_PROCESSES, _LEAST_BYTES = 5, 2**28
_NOBODY = re.compile("(ff)*")


def gather(address: str | None, timeout: float, *, stacks: bool = False, native: bool = False) -> Facts:
    """Return the facts of the cluster at an address, without secrets; ClusterError if it does not answer."""
    deadline = Deadline.after(timeout)
    at, _ = locate(address, min(timeout, ASK_SECONDS))
    Head(at).use()
    with until(deadline):
        return _gather(at, timeout, deadline, stacks, native)


def _gather(at: str, timeout: float, deadline: Deadline, stacks: bool, native: bool) -> Facts:
    tables = _Tables(at, timeout)
    jobs = read_jobs()
    drivers = tuple(
        Driver(id=job.id, pid=job.pid, address=job.address, entrypoint=job.entrypoint)
        for job in jobs.values()
        # Ray lists its own parts as jobs, too.
        if not job.has_ended and not job.namespace.startswith("_ray_internal")
    )
    ended = [job.id for job in jobs.values() if job.has_ended]
    actors = tables.actors([item.id for item in drivers] or ended[-1:])
    nodes, demands = tables.nodes()
    groups = tables.groups()
    waiting = [item for item in actors if item.state in ("PENDING_CREATION", "DEPENDENCIES_UNREADY")]
    tasks: tuple[Task, ...] = ()
    if demands or waiting:
        tasks, since = tables.tasks(demands, waiting)
        actors = tuple(replace(item, since=since.get(item.id, 0)) if item in waiting else item for item in actors)
    unknown: list[str] = []
    sight = _Sight(tables, nodes, unknown)
    nodes = sight.measure(nodes, deadline)
    # Ray counts the accelerators of each node from 0; the actors' own settings and the vendor's library do not.
    ids = {item.id: dict(enumerate(item.ids)) for item in nodes if item.ids}
    actors = tuple(
        replace(item, holds={ids[item.node].get(index, index): share for index, share in item.holds.items()})
        if item.node in ids
        else item
        for item in actors
    )
    actors = sight.find_pids(actors)
    memory = {(node_id, pid): size for node_id, sizes in sight.sizes.items() for pid, size in sizes.items()}
    actors = tuple(replace(item, memory=memory.get((item.node, item.pid), 0)) for item in actors)
    actors = sight.read_logs(actors, deadline)
    read = sight.read_stacks(actors, drivers, native, deadline) if stacks else None
    return redacted(
        Facts(
            address=at,
            at=time.time(),
            nodes=nodes,
            actors=actors,
            groups=groups,
            tasks=tasks,
            drivers=drivers,
            stacks=read,
            unknown=tuple(unknown),
        )
    )


class _Tables:
    """Ray's tables, as its head has them: there is no public way to them without becoming a driver."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connect to them; all reads in this thread together end by the deadline of `until`."""
        self._timeout = timeout
        private: Any = importlib.import_module("ray._private.state")
        options = private.GcsClientOptions.create(
            address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
        )
        private.state._initialize_global_state(options)
        self._of: Any = within(timeout, private.state._connect_and_get_accessor, "show its tables")
        self._types: Any = importlib.import_module("ray.core.generated.gcs_pb2")
        self.sockets: dict[str, str] = {}
        """The socket of each node's raylet."""
        self._job_id: Any = importlib.import_module("ray").JobID

    def _read(self, what: str, call: Callable[[], Any]) -> Any:
        return within(self._timeout, call, f"show its {what}")

    def value(self, namespace: str, key: str) -> str:
        """Return a text that Ray keeps for its own parts, such as the address of the dashboard's server."""
        found = self._read("settings", lambda: self._of.get_internal_kv(namespace.encode(), key.encode()))
        return found.decode(errors="replace") if found else ""

    def actors(self, with_dead: Iterable[str]) -> tuple[Actor, ...]:
        """Return the actors that are not dead, and the dead ones of some jobs."""
        asks = [(None, state) for state in _STATES] + [(self._job_id.from_hex(job), "DEAD") for job in with_dead]
        rows: dict[str, Actor] = {}
        for job, state in asks:
            found = self._read("actors", partial(self._of.get_actor_table, job, state))
            for entry in map(self._types.ActorTableData.FromString, found):
                rows[entry.actor_id.hex()] = self._actor(entry)
        return tuple(sorted(rows.values(), key=lambda item: (item.job, item.since or time.time(), item.id)))

    def _actor(self, entry: Any) -> Actor:
        state = self._types.ActorTableData.ActorState.Name(entry.state)
        variables: Any = {}
        with contextlib.suppress(ValueError, AttributeError):
            variables = json.loads(entry.serialized_runtime_env or "{}").get("env_vars") or {}
        devices = next((variables[name] for name in _variables() if name in variables), "")
        holds: dict[int, float] = {}
        for resource in entry.resource_mapping:
            # In a placement group GPU is called GPU_group_<id>, and GPU_group_<bundle>_<id> once more.
            name, _, rest = resource.name.partition("_group_")
            if name in accelerators() and not rest.count("_"):
                holds |= {int(item.index): float(item.quantity) for item in resource.resource_ids}
        context, reason, cause = entry.death_cause.WhichOneof("context"), "", ""
        if context:
            died = getattr(entry.death_cause, context)
            reason, cause = _CAUSES.get(context, ""), getattr(died, "error_message", "")
            if context == "creation_task_failure_context":
                cause = died.formatted_exception_string
            elif context == "actor_died_error_context" and hasattr(died, "reason"):
                reason = type(died).DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number[died.reason].name
        wants, wants_of_group = {}, {}
        for full_name, amount in entry.required_resources.items():
            name, _, rest = full_name.partition("_group_")
            if rest:
                wants_of_group[full_name] = amount
            if name != "bundle" and not rest.count("_"):
                wants[name] = amount
        rank = str(variables.get("RANK", ""))
        return Actor(
            id=entry.actor_id.hex(),
            class_name=entry.class_name or "actor",
            job=entry.job_id.hex(),
            state=state,
            name=entry.name,
            rank=int(rank) if rank.isdecimal() else None,
            node=entry.address.node_id.hex(),
            pid=entry.pid,
            worker=_id(entry.address.worker_id),
            wants=wants,
            wants_of_group=wants_of_group,
            holds=holds,
            told=tuple(int(word) for word in str(devices).split(",") if word.strip().isdecimal()),
            group=_id(entry.placement_group_id),
            since=(entry.end_time if state == "DEAD" else entry.start_time) / 1000,
            restarts=entry.num_restarts,
            reason=reason,
            cause=cause,
        )

    def groups(self) -> tuple[Group, ...]:
        """Return the placement groups that are not removed."""
        found = []
        for row in self._read("placement groups", self._of.get_placement_group_table):
            entry = self._types.PlacementGroupTableData.FromString(row)
            state = type(entry).PlacementGroupState.Name(entry.state)
            if state != "REMOVED":
                strategy = type(entry).DESCRIPTOR.fields_by_name["strategy"].enum_type.values_by_number[entry.strategy]
                bundles = tuple(
                    Bundle(
                        wants=dict(item.unit_resources),
                        node=_id(item.node_id),
                        labels=dict(getattr(item, "label_selector", {})),
                    )
                    for item in entry.bundles
                )
                found.append(
                    Group(
                        id=entry.placement_group_id.hex(),
                        name=entry.name,
                        job=entry.creator_job_id.hex(),
                        strategy=strategy.name,
                        state=state,
                        bundles=bundles,
                        since=entry.stats.creation_request_received_ns / 1e9,
                    )
                )
        return tuple(found)

    def nodes(self) -> tuple[tuple[Node, ...], Counter[frozenset[tuple[str, float]]]]:
        """Return the nodes, and how many tasks and actors want what that no node has given them."""
        usage = self._types.ResourceUsageBatchData.FromString(
            self._read("resources", self._of.get_all_resource_usage) or b""
        )
        free = {item.node_id.hex(): dict(item.resources_available) for item in usage.batch}
        demands: Counter[frozenset[tuple[str, float]]] = Counter()
        for item in usage.resource_load_by_shape.resource_demands:
            count = item.num_ready_requests_queued + item.num_infeasible_requests_queued + item.backlog_size
            # What waits inside a placement group wants parts of its bundles.
            if item.shape and not any("_group_" in name for name in item.shape):
                demands[frozenset(item.shape.items())] += count
        found = []
        table = self._read("nodes", self._of.get_node_table)
        for entry in table:
            total = {name: amount for name, amount in entry["Resources"].items() if "_group_" not in name}
            # Ray gives no reason for the end of a node that was stopped in order.
            why = "" if entry["Alive"] else entry.get("DeathReasonMessage") or "it ended"
            found.append(
                Node(
                    id=entry["NodeID"],
                    address=entry["NodeManagerAddress"],
                    name=entry.get("NodeName", ""),
                    is_head="node:__internal_head__" in total,
                    total=total,
                    # What is not listed is used up.
                    free=free.get(entry["NodeID"], {}),
                    labels=entry.get("Labels", {}),
                    died=why,
                )
            )
        self.sockets = {entry["NodeID"]: entry["RayletSocketName"] for entry in table}
        return tuple(sorted(found, key=lambda item: (not item.is_head, item.address, item.id))), demands

    def tasks(
        self, demands: Counter[frozenset[tuple[str, float]]], waiting: Iterable[Actor]
    ) -> tuple[tuple[Task, ...], dict[str, float]]:
        """Return the tasks that wait for a node, and since when each actor waits or is constructed."""
        since: dict[str, float] = {}
        found: defaultdict[tuple[str, frozenset[tuple[str, float]], str], list[float]] = defaultdict(list)
        outside = (item.wants.items() for item in waiting if not item.group)
        left = demands - Counter(frozenset(wants or [("CPU", 1.0)]) for wants in outside)
        for row in self._read("tasks", self._of.get_task_events):
            entry = self._types.TaskEvents.FromString(row)
            times = dict(entry.state_updates.state_ts_ns)
            if not times or not entry.HasField("task_info"):
                continue
            began, info = max(times.values()) / 1e9, entry.task_info
            if info.type == _CREATION:
                since[info.actor_id.hex()] = began
            elif max(times) == _WAITS_FOR_NODE and not info.actor_id:
                found[info.name, frozenset(info.required_resources.items()), info.job_id.hex()].append(began)
        tasks = []
        for (name, wants, job), began in found.items():
            if left[wants]:
                tasks.append(Task(name=name, wants=dict(wants), count=len(began), since=min(began), job=job))
        named = {frozenset(task.wants.items()) for task in tasks}
        # Ray keeps the names of the newest tasks only.
        tasks += [
            Task(name="(its name is not known)", wants=dict(wants), count=count)
            for wants, count in left.items()
            if wants not in named and count > 0
        ]
        return tuple(tasks), since


class _Sight:
    """The processes that can be seen: those of this machine by the kernel, others by the dashboard's server."""

    def __init__(self, tables: _Tables, nodes: Iterable[Node], unknown: list[str]) -> None:
        self.sizes: dict[str, dict[int, int]] = {}
        """The memory of each process by node."""
        self._unknown = unknown
        self._at = {node.address: node.id for node in nodes if not node.died}
        here = {(item.flag("raylet_socket_name"), item.flag("node_ip_address")): item for item in list_raylets()}
        self._here: dict[str, Path] = {}
        """The nodes of this machine, and the folders of their logs."""
        self._devices: dict[str, list[str]] = {}
        """The names of their accelerators."""
        for node in nodes:
            raylet = here.get((tables.sockets[node.id], node.address))
            if raylet is not None and not node.died:
                self._here[node.id] = Path(raylet.flag("session_dir")) / "logs"
                with contextlib.suppress(psutil.Error, CheckFailed):
                    environment = psutil.Process(raylet.pid).environ()
                    found = node_accelerators(node.total, environment, (), str(node))
                    self._devices[node.id] = [item.device for item in found]
        self._url = ""
        far = [node for node in nodes if node.id not in self._here and not node.died]
        at = tables.value("dashboard", "dashboard")
        if at and far:
            self._url = at if "://" in at else f"http://{at}"
            if not self._ask("/api/version")[0]:
                self._url = ""
        if far and not self._url:
            unknown.append(
                f"processes, memory, logs and GPUs in use on {plural(len(far), 'node')} of other machines: "
                "the cluster has no dashboard's server that answers (pip install 'ray[default]' on its head), "
                "or run this there"
            )

    def _ask(self, path: str, seconds: float = DASHBOARD_SECONDS) -> tuple[str, str]:
        """Return what the dashboard's server answers, or nothing and why."""
        token = find_token() if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Without the proxies of the environment, which do not know the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            request = urllib.request.Request(self._url + path, headers=headers)  # noqa: S310 - the head says where
            with opener.open(request, timeout=seconds) as answer:
                return str(answer.read(2**24).decode(errors="replace")), ""
        except urllib.error.HTTPError as error:
            with contextlib.suppress(OSError):
                return "", one_line([error.read(2**12).decode(errors="replace")], 200)
            return "", str(error)
        except (OSError, ValueError) as error:
            return "", error_text(error)

    def measure(self, nodes: Iterable[Node], deadline: Deadline) -> tuple[Node, ...]:
        """Return the nodes with what is measured there."""
        devices, _ = nvidia_devices(with_users=True) if self._here else ((), "")
        gpus = tuple(
            Gpu(
                index=item.index,
                memory_used=item.memory_used or 0,
                memory=item.memory or 0,
                pids=tuple(user.pid for user in item.users),
                strangers=tuple(
                    f"pid {user.pid} ({user.user}: {user.command})"
                    for user in item.users
                    if user.command and not user.of_ray
                ),
            )
            for item in devices
        )
        sizes, largest = _own_processes() if self._here else ({}, ())
        space = find_memory()

        def measured(node: Node) -> Node:
            if node.id in self._here:
                self.sizes[node.id] = sizes
                used = (space.total - space.free, space.total)
                devices = self._devices.get(node.id, [])
                ids = tuple(int(item) for item in devices if item.isdecimal())
                # Which of the devices are the node's is not known where they are called otherwise.
                seen = tuple(gpu for gpu in gpus if gpu.index in ids) if len(ids) == len(devices) else ()
                ids = ids if ids != tuple(range(len(devices))) and len(ids) == len(devices) else ()
                return replace(node, memory=used, gpus=seen or None, ids=ids, processes=largest)
            if node.died or not self._url or deadline.is_over:
                return node
            return self._measure_far(node)

        with ThreadPoolExecutor(16) as pool:
            return tuple(pool.map(measured, nodes))

    def _measure_far(self, node: Node) -> Node:
        found: Any = {}
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(self._ask(f"/nodes/{node.id}")[0])["data"]["detail"]
        try:
            total, free, *_ = found["mem"]
            sizes = {int(item["pid"]): int(item["memoryInfo"]["rss"]) for item in found.get("workers") or ()}
            commands = {int(item["pid"]): item.get("cmdline") or [] for item in found.get("workers") or ()}
            gpus = tuple(
                Gpu(
                    index=int(item["index"]),
                    memory_used=int(item.get("memoryUsed") or 0) * 2**20,
                    memory=int(item.get("memoryTotal") or 0) * 2**20,
                    pids=_pids(item.get("processesPids")),
                )
                for item in found.get("gpus") or ()
            )
        except (KeyError, TypeError, ValueError) as error:
            self._unknown.append(
                f"processes and memory of {node}: the dashboard's server has none ({error_text(error)})"
            )
            return node
        self.sizes[node.id] = sizes
        largest = sorted(sizes, key=lambda pid: -sizes[pid])[:_MOST_PROCESSES]
        processes = tuple(Process(pid=pid, memory=sizes[pid], command=one_line(commands[pid], 120)) for pid in largest)
        # Of a machine with more GPUs than the node has, nobody says which are the node's.
        measured = gpus if len(gpus) == node.total.get("GPU", 0) else None
        return replace(node, memory=(int(total - free), int(total)), gpus=measured or None, processes=processes)

    def find_pids(self, actors: tuple[Actor, ...]) -> tuple[Actor, ...]:
        """Return the actors, with the processes whose constructors run: the head does not know their pids yet."""

        def found(actor: Actor) -> Actor:
            folder = self._here.get(actor.node)
            if actor.pid or not actor.worker or folder is None:
                return actor
            logs = folder.glob(f"worker-{actor.worker}-*.err")
            return next((replace(actor, pid=int(path.stem.rpartition("-")[2])) for path in logs), actor)

        return tuple(map(found, actors))

    def read_logs(self, actors: tuple[Actor, ...], deadline: Deadline) -> tuple[Actor, ...]:
        """Return the actors, those that are not well with the end of their logs."""
        sick = [item for item in actors if item.worker and item.state != "ALIVE" and item.reason != "RAY_KILL"]
        # The newest deaths tell most.
        logs = {item.id: () if deadline.is_over else self._log(item) for item in sick[-_MOST_LOGS:]}
        return tuple(replace(item, log=logs[item.id]) if item.id in logs else item for item in actors)

    def _log(self, actor: Actor) -> tuple[str, ...]:
        for suffix in ("err", "out"):
            text = ""
            if actor.node in self._here:
                path = self._here[actor.node] / f"worker-{actor.worker}-{actor.job}-{actor.pid}.{suffix}"
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                    text = file.read(_LOG_BYTES).decode(errors="replace")
            elif self._url and actor.pid:
                asked = {"node_id": actor.node, "pid": actor.pid, "suffix": suffix, "lines": 2 * _LOG_LINES}
                text, _ = self._ask(f"/api/v0/logs/file?{urllib.parse.urlencode(asked)}")
            # Ray's own marks for its log monitor say nothing.
            lines = [line for line in without_colours(text).splitlines() if line.strip() and line[0] != ":"]
            if lines:
                return tuple(lines[-_LOG_LINES:])
        return ()

    def read_stacks(
        self, actors: Iterable[Actor], drivers: Iterable[Driver], native: bool, deadline: Deadline
    ) -> tuple[Stack, ...]:
        """Return where each actor and each driver stands, as far as that can be read."""
        asked = {item.id: (item.node, item.pid) for item in actors if item.state in _STATES and item.pid}
        # Ray does not say on which of the nodes of an address a driver is: they are on one machine.
        asked |= {item.id: (self._at[item.address], item.pid) for item in drivers if item.address in self._at}
        if any(node in self._here for node, _ in asked.values()) and find_py_spy() is None:
            self._unknown.append("stacks of this machine: py-spy is not installed, pip install 'roost[xray]' has it")
        failures: Counter[str] = Counter()

        def read(item: tuple[str, tuple[str, int]]) -> Stack | None:
            id_, (node, pid) = item
            text, why = "", "there was no time left"
            if node in self._here and not deadline.is_over:
                text, why = read_stacks(pid, native=native, seconds=min(PY_SPY_SECONDS, deadline.left))
            elif self._url and not deadline.is_over:
                query = urllib.parse.urlencode({"node_id": node, "pid": pid, "native": int(native)})
                text, why = self._ask(f"/worker/traceback?{query}", min(STACK_SECONDS, deadline.left))
            if "Thread " in text:
                return Stack(id=id_, place=place_of(text), text=text)
            failures[why] += 1
            return None

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            found = [stack for stack in pool.map(read, asked.items()) if stack is not None]
        if find_py_spy() is not None or self._url:
            self._unknown += [
                f"stacks of {plural(count, 'process', 'processes')}: {why}" for why, count in failures.items()
            ]
        return tuple(found)


def _own_processes() -> tuple[dict[int, int], tuple[Process, ...]]:
    """Return the memory of each process of this machine, and the largest."""
    sizes = {
        process.pid: int(process.info["memory_info"].rss)
        for process in psutil.process_iter(["memory_info"])
        if process.info["memory_info"] is not None
    }
    largest = []
    for pid in sorted((pid for pid in sizes if sizes[pid] >= _LEAST_BYTES), key=lambda pid: -sizes[pid]):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            largest.append(
                Process(pid=pid, memory=sizes[pid], command=one_line(process.cmdline() or [process.name()], 120))
            )
        if len(largest) == _MOST_PROCESSES:
            break
    return sizes, tuple(largest)


def _pids(found: Any) -> tuple[int, ...]:
    """Return the processes of a device, which the dashboard's server lists as objects, by pid, or not at all."""
    items = found.values() if isinstance(found, Mapping) else found or ()
    return tuple(int(item["pid"] if isinstance(item, Mapping) else item) for item in items)


def _variables() -> list[str]:
    return [entry.variable for entry in accelerator_types().values()]


def _id(value: bytes) -> str:
    """Return an id as text, or nothing for Ray's id of nobody."""
    return "" if _NOBODY.fullmatch(value.hex()) else value.hex()
