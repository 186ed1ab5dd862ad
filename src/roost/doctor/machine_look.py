"""Looks at one machine for `roost doctor`: each gives a fact, none waits for ever, none changes anything.

No Ray here: a machine whose Ray is missing or broken is looked at too.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from roost.config.hardware import accelerator_types
from roost.doctor.facts import (
    Device,
    Devices,
    DeviceUser,
    Heap,
    HomeFacts,
    HostName,
    Limits,
    MachineFacts,
    MarkedProcess,
    Ports,
    Practice,
    RayProcess,
    Software,
    Space,
    Unseen,
)
from roost.errors import RoostError
from roost.machine.folders import socket_folder
from roost.runtime.connect.local_cluster import read_practice
from roost.runtime.runs.folder import runs_folder
from roost.text import shorten

LOOK_SECONDS = 15.0
"""How long a look at a machine may take; what is not there by then is unseen."""
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
NO_PROXY = "no_proxy"
_PACKAGES = ("roost", "ray", "numpy", "torch", "transformers", "vllm", "sglang")
JOB_VARIABLE = "ROOST_JOB"
"""As in `managers`, which loads Ray."""
# Longer than the kernel waits before it asks a busy head a second time.
_KNOCK_SECONDS = 3.0
_SAY_SECONDS = 5.0
_YOUNG_SECONDS = 30.0
_MOST_FILES = 200_000


def look_at_machine(
    folders: Mapping[str, str], environment: Mapping[str, str], seconds: float = LOOK_SECONDS
) -> MachineFacts:
    """Look around on this machine; `folders` are where things are kept, by what they are."""
    found = at_once(
        {
            "software": look_at_software,
            "memory": look_at_memory,
            "shm": lambda: _space("/dev/shm"),  # noqa: S108 - its room is looked at
            "disks": partial(look_at_disks, folders),
            "limits": look_at_limits,
            "ports": look_at_ports,
            "devices": look_at_devices,
            "host_name": look_at_host_name,
            "environment": partial(look_at_environment, environment),
            "processes": look_at_processes,
        },
        seconds,
    )
    processes = found.pop("processes")
    ray, marked = processes if isinstance(processes, tuple) else (processes, processes)
    return MachineFacts(machine=machine_id(), ray_processes=ray, marked=marked, **found)


def look_at_home(seconds: float = LOOK_SECONDS) -> HomeFacts:
    """Look at what is kept for this user."""
    return HomeFacts(**at_once({"practice": look_at_practice, "heaps": look_at_heaps}, seconds))


def at_once(
    looks: Mapping[str, Callable[[], Any]], seconds: float, waiting: Callable[[list[str]], None] | None = None
) -> dict[str, Any]:
    """Take several looks at once; one that fails, or is not back in time, gives `Unseen`.

    `waiting` is told every few seconds which are not back.
    """
    found: dict[str, Any] = {}

    def look(name: str) -> None:
        try:
            found[name] = looks[name]()
        except RoostError as error:
            found[name] = unseen_for(error)
        except Exception as error:
            found[name] = Unseen(why=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    # Not a pool: its threads are waited for at exit, and one that hangs in a dead file system never ends.
    threads = {name: threading.Thread(target=look, args=(name,), daemon=True) for name in looks}
    for thread in threads.values():
        thread.start()
    now = time.monotonic()
    deadline, say_at = now + seconds, now + _SAY_SECONDS
    while now < deadline and (out := [name for name, thread in threads.items() if thread.is_alive()]):
        if now >= say_at and waiting is not None:
            waiting(out)
        if now >= say_at:
            say_at = now + _SAY_SECONDS
        threads[out[0]].join(min(deadline, say_at) - now)
        now = time.monotonic()
    late = Unseen(why=f"no answer in {seconds:g} s")
    return {name: found.get(name, late) for name in looks}


def unseen_for(error: RoostError) -> Unseen:
    """What an error of ours says: why, and what to do."""
    return Unseen(why=error.problems[0].message, do=error.problems[0].hint)


def machine_id() -> str:
    """The same for processes that share memory, file systems and ports: this boot, and the kernel's rooms for them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        rooms = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "mnt")]
    except OSError:
        return socket.gethostname()
    return ":".join([boot, *map(str, rooms)])


def driver_folders(run_dir: str | None) -> dict[str, str]:
    """The folders that a driver on this machine writes to, by what they are."""
    folders = {"temporary files": tempfile.gettempdir()}
    # Where Roost's own folder cannot be had, the look at what is in it tells so.
    with contextlib.suppress(RoostError):
        folders["runs"] = str(Path(run_dir).absolute() if run_dir else runs_folder())
    return folders


def look_at_software() -> Software:
    """The interpreter, and the packages that must fit between machines."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return Software(python=platform.python_version(), interpreter=sys.executable, packages=packages)


def look_at_memory(root: Path = Path("/sys/fs/cgroup")) -> Space:
    """The memory of the machine, or of the container where that is less."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, now = _number(root / limit), _number(root / used)
        if most is not None and now is not None and most < total:
            # What only caches files is given back when it is needed.
            total, free = most, min(free, most - now + _cached(root / stat))
    return Space(total=total, free=max(0, free))


def look_at_disks(folders: Mapping[str, str]) -> tuple[Space, ...]:
    """The file systems of these folders, each once."""
    found: dict[int, tuple[str, list[str]]] = {}
    for use, folder in folders.items():
        path = Path(folder)
        while not path.exists() and path != path.parent:
            path = path.parent
        found.setdefault(path.stat().st_dev, (str(path), []))[1].append(use)
    return tuple(_space(path, tuple(uses)) for path, uses in found.values())


def look_at_limits() -> Limits:
    """How many files, processes and threads there may be."""
    files, most_files = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    tasks = None if os.getuid() == 0 else _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    now = 0
    if tasks is not None:
        for process in psutil.process_iter(["uids", "num_threads"]):
            uids = process.info["uids"]
            if uids is not None and uids.real == os.getuid():
                now += process.info["num_threads"] or 0
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
        most, there = _number(Path(folder) / "pids.max"), _number(Path(folder) / "pids.current")
        if most is not None and there is not None and (tasks is None or most - there < tasks - now):
            tasks, now = most, there
    return Limits(
        open_files=files, most_open_files=most_files, tasks=tasks, tasks_now=now, cpus=psutil.cpu_count() or 1
    )


def look_at_ports(root: Path = Path("/proc")) -> Ports:
    """The ports in use, as the kernel lists them: to try them all would be in the way of others for a moment."""
    first, last = (root / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    used = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in (root / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                used.add(int(line.split()[1].rpartition(":")[2], 16))
    return Ports(ephemeral=(int(first), int(last)), used=frozenset(used))


def look_at_host_name() -> HostName:
    """What this machine calls itself, and where that leads."""
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return HostName(name=name, addresses=(), error=error.strerror or str(error))
    return HostName(name=name, addresses=tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))


def look_at_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Proxies, each under its name in small letters, and visible devices."""
    proxies = {
        name: environment.get(name) or environment.get(name.upper(), "") for name in (*PROXY_VARIABLES, NO_PROXY)
    }
    devices = {entry.variable for entry in accelerator_types().values()}
    return {name: value for name, value in proxies.items() if value} | {
        name: environment[name] for name in sorted(devices) if name in environment
    }


def look_at_devices(root: Path = Path("/")) -> Devices:
    """The accelerators that this machine shows."""
    nvidia, error = _nvidia()
    return Devices(
        nvidia=nvidia,
        nvidia_error=error,
        nvidia_files=_count(root / "dev", r"nvidia\d+"),
        nvidia_installed=_count(root / "proc/driver/nvidia/gpus", r".+"),
        amd=_amd(root / "sys/class/kfd/kfd/topology/nodes"),
        ascend=_count(root / "dev", r"davinci\d+"),
    )


def look_at_processes() -> tuple[tuple[RayProcess, ...], tuple[MarkedProcess, ...]]:
    """The processes of Ray on this machine, and those that jobs of Roost started."""
    answers: dict[str, bool] = {}

    def is_there(head: str) -> bool:
        if head not in answers:
            answers[head] = _answers(head)
        return answers[head]

    ray, marked = [], []
    for item in _processes():
        head = item.flag("gcs-address")
        if head:
            ray.append(RayProcess(pid=item.pid, name=item.name, user=item.user, head=head, belongs=is_there(head)))
        elif item.name.startswith("ray::"):
            raylet = item.environment.get("RAY_RAYLET_PID", "")
            belongs = not raylet.isdigit() or psutil.pid_exists(int(raylet))
            ray.append(RayProcess(pid=item.pid, name=item.name, user=item.user, head=None, belongs=belongs))
        job = item.environment.get(JOB_VARIABLE)
        if job and "|" in job:
            answering = is_there(job.partition("|")[0])
            marked.append(MarkedProcess(pid=item.pid, command=item.command, job=job, head_answers=answering))
    return tuple(ray), tuple(marked)


def look_at_practice() -> Practice | None:
    """The practice cluster of this user, if one is up."""
    found = read_practice()
    if found is None:
        return None
    return Practice(spec=found.spec, address=found.address, seconds=max(0.0, time.time() - found.keeper_started))


def look_at_heaps() -> tuple[Heap, ...]:
    """Files that nothing uses any more."""
    used = {flag for item in _processes() for flag in (item.flag("session_dir"), item.flag("temp_dir")) if flag}
    sessions = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"  # noqa: S108 - where Ray keeps them
    home = socket_folder()
    runs = runs_folder()
    return tuple(
        _heap(what, folder, pattern, used)
        for what, folder, pattern in (
            ("sessions of Ray", sessions, "session_*"),
            ("folders of local clusters", home, "ray-*"),
            ("runs", runs, "*"),
        )
    )


def in_one_line(words: Sequence[str], most: int) -> str:
    """A command as it can be shown: whoever wrote it, it has one line and upsets no terminal."""
    text = " ".join(" ".join(words).split())
    return shorten("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text), most)


class _Process(NamedTuple):
    pid: int
    name: str
    words: tuple[str, ...]
    user: str
    environment: Mapping[str, str]

    @property
    def command(self) -> str:
        return in_one_line(self.words or (self.name,), 120)

    def flag(self, name: str) -> str:
        start = f"--{name}="
        return next((word.removeprefix(start) for word in self.words if word.startswith(start)), "")


def _processes() -> Iterator[_Process]:
    """All processes; the environment only of those that this user may look into."""
    for process in psutil.process_iter(["name", "cmdline", "username"]):
        with contextlib.suppress(psutil.Error, OSError):
            words = tuple(process.info["cmdline"] or ())
            name = _process_name(process.info["name"] or "", words)
            try:
                environment = process.environ()
            except (psutil.Error, OSError):
                environment = {}
            yield _Process(process.pid, name, words, process.info["username"] or "", environment)


def _process_name(name: str, words: tuple[str, ...]) -> str:
    """What a process is called: what it wrote over its command, as Ray's workers do, or the script that Python runs."""
    if words and words[0].startswith("ray::"):
        return words[0]
    script = next((word for word in words[:4] if word.endswith(".py")), "")
    return Path(script).name if script and name.startswith("python") else name


def _heap(what: str, folder: Path, pattern: str, used: set[str]) -> Heap:
    count = size = files = 0
    for path in folder.glob(pattern):
        if path.is_symlink() or not path.is_dir() or any(item.startswith(str(path)) for item in used):
            continue
        with contextlib.suppress(OSError):
            # It may be about to be used.
            if time.time() - path.stat().st_mtime < _YOUNG_SECONDS:
                continue
        count += 1
        for file in path.rglob("*"):
            files += 1
            if files > _MOST_FILES:
                break
            with contextlib.suppress(OSError):
                size += file.lstat().st_size
    return Heap(what=what, folder=str(folder), pattern=pattern, count=count, size=size)


def _nvidia() -> tuple[tuple[Device, ...], str]:
    """The devices that NVIDIA's library shows, or what it says where it does not work."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception as error:
        return (), str(error)
    try:
        return tuple(_nvidia_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())), ""
    except pynvml.NVMLError as error:
        return (), str(error)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvidia_device(nvml: Any, index: int) -> Device:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory: Any = None
    users: Any = ()
    with contextlib.suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
    with contextlib.suppress(nvml.NVMLError):
        users = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    name = nvml.nvmlDeviceGetName(device)
    return Device(
        index=index,
        model=(name.decode() if isinstance(name, bytes) else name).removeprefix("NVIDIA "),
        memory=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        users=tuple(_device_user(int(item.pid), item.usedGpuMemory) for item in users),
    )


def _device_user(pid: int, memory: int | None) -> DeviceUser:
    try:
        process = psutil.Process(pid)
        line = [process, *process.parents()]
        of_ray = any(item.name().startswith("ray::") or item.name() == "raylet" for item in line)
        command = in_one_line(process.cmdline() or [process.name()], 80)
        user = process.username()
    except psutil.Error:
        return DeviceUser(pid=pid, command="", user="", memory=memory, of_ray=False)
    return DeviceUser(pid=pid, command=command, user=user, memory=memory, of_ray=of_ray)


def _amd(nodes: Path) -> int:
    """The kernel lists CPUs beside GPUs: those have no SIMD units."""
    found = 0
    for properties in nodes.glob("*/properties"):
        with contextlib.suppress(OSError):
            found += re.search(r"^simd_count [1-9]", properties.read_text(encoding="ascii"), re.M) is not None
    return found


def _count(folder: Path, pattern: str) -> int:
    try:
        return sum(re.fullmatch(pattern, path.name) is not None for path in folder.iterdir())
    except OSError:
        return 0


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _space(path: str, uses: tuple[str, ...] = ()) -> Space:
    found = os.statvfs(path)
    return Space(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize, path=path, uses=uses)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _number(path: Path) -> int | None:
    """The number in a file of the kernel; None where there is no such file, or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cached(path: Path) -> int:
    try:
        found = re.search(r"^(?:total_)?inactive_file (\d+)", path.read_text(encoding="ascii"), re.M)
    except OSError:
        return 0
    return int(found[1]) if found else 0
