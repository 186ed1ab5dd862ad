"""The probe that runs on every node: short, without Ray, with only what every node has installed."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from roost.machine.devices import Device, nvidia_devices
from roost.machine.limits import INTERPRETER_SECONDS
from roost.machine.numa import numa_cores
from roost.machine.ports import ephemeral_ports
from roost.text import error_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The interpreter of a process, and the versions of packages that it can import."""

    python: str
    interpreter: str
    packages: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The findings of a probe on its node."""

    hostname: str
    memory: int
    software: Software
    network: str
    """The same for all processes that share their ports."""
    ephemeral_ports: tuple[int, int]
    environment: Mapping[str, str]
    """The variables asked for, as the node was started with them."""
    nvidia: tuple[Device, ...]
    numa: Mapping[int, tuple[int, ...]]
    """The cores of each NUMA node that processes may use here; none of a machine that has one."""


def probe(variables: Iterable[str]) -> NodeReport:
    """Describe this node, with these variables of the environment that it was started with."""
    started_with = starting_environment()
    return NodeReport(
        hostname=socket.gethostname(),
        memory=psutil.virtual_memory().total,
        software=find_software(["ray"]),
        network=machine_id("net"),
        ephemeral_ports=ephemeral_ports(),
        environment={name: started_with[name] for name in variables if name in started_with},
        nvidia=nvidia_devices()[0],
        numa=numa_cores(os.sched_getaffinity(0)) if sys.platform == "linux" else {},
    )


def find_software(packages: Iterable[str]) -> Software:
    """Return the interpreter of this process, and the versions of those of these packages that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            # Looking through what is installed takes ten milliseconds.
            versions[name] = getattr(sys.modules.get(name), "__version__", None) or metadata.version(name)
    return Software(python=platform.python_version(), interpreter=sys.executable, packages=versions)


def machine_id(*namespaces: str) -> str:
    """Return an id of this boot of this machine, and of these kernel namespaces (`net`, `mnt`) of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        inodes = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in namespaces]
    except OSError:
        return socket.gethostname()
    return ":".join([boot, *inodes])


def starting_environment() -> dict[str, str]:
    """Return the environment that this process began with: Ray overwrites CUDA_VISIBLE_DEVICES before any code runs."""
    try:
        return psutil.Process().environ()
    except (psutil.Error, OSError):
        return dict(os.environ)


def check(paths: Iterable[str], pieces: Iterable[Any]) -> tuple[dict[str, str], dict[int, str]]:
    """Return which of these interpreters do not work on this node, and which pieces of hardware, by index; and why."""
    bad_paths: dict[str, str] = {}
    for path in paths:
        if not Path(path).is_file():
            bad_paths[path] = "there is no such file"
        elif not os.access(path, os.X_OK):
            bad_paths[path] = "it cannot be executed"
        else:
            try:
                done = subprocess.run(  # noqa: S603 - the interpreter that the user's config names, with our arguments
                    [path, "-c", "import ray"], capture_output=True, text=True, timeout=INTERPRETER_SECONDS, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                bad_paths[path] = f"it does not run: {error}"
                continue
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no message"])[-1]
                bad_paths[path] = f"it cannot import ray: {why}"
    bad_pieces: dict[int, str] = {}
    for index, piece in enumerate(pieces):
        try:
            piece.check()
        except Exception as error:
            bad_pieces[index] = error_text(error)
    return bad_paths, bad_pieces
