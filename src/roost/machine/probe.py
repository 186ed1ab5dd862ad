"""What runs on a node to find out what it has: short, no Ray calls, only what every node has installed."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

_EPHEMERAL_PORTS = (32768, 60999)
_INTERPRETER_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorDevice:
    """A device as the vendor's library describes it."""

    index: int
    uuid: str
    model: str
    memory: int | None
    pci: str | None
    numa: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a probe found on its node."""

    hostname: str
    memory: int
    interpreter: str
    python: str
    ray: str
    network: str
    ephemeral_ports: tuple[int, int]
    environment: tuple[tuple[str, str], ...]
    """Those of the variables asked for that the node was started with."""
    nvidia: tuple[VendorDevice, ...]


def probe(variables: Iterable[str]) -> NodeReport:
    """Look around on this node; `variables` are those to report."""
    started_with = starting_environment()
    return NodeReport(
        hostname=socket.gethostname(),
        memory=psutil.virtual_memory().total,
        interpreter=sys.executable,
        python=platform.python_version(),
        ray=ray.__version__,
        network=_network(),
        ephemeral_ports=_ephemeral_ports(),
        environment=tuple((name, started_with[name]) for name in variables if name in started_with),
        nvidia=_nvidia_devices(),
    )


def starting_environment() -> dict[str, str]:
    """The environment that this process began with: Ray writes CUDA_VISIBLE_DEVICES over before any code runs."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def find_interpreters(paths: Iterable[str]) -> dict[str, str]:
    """Which interpreters are not usable on this node, and why."""
    found = {path: _interpreter_problem(path) for path in paths}
    return {path: problem for path, problem in found.items() if problem}


def run_checks(pieces: Iterable[Any]) -> list[tuple[int, str]]:
    """Run `check()` of hardware that is attached here; those that failed, by place in the list."""
    failed = []
    for place, piece in enumerate(pieces):
        try:
            piece.check()
        except Exception as error:
            failed.append((place, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__))
    return failed


def find_processes(variable: str) -> list[dict[str, Any]]:
    """This user's processes on this node that have a variable in their environment."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
        with contextlib.suppress(psutil.Error, OSError):
            environment: Mapping[str, str] = process.environ()
            if variable in environment:
                info: dict[str, Any] = process.info
                found.append(
                    {
                        "pid": info["pid"],
                        "command": " ".join(info["cmdline"] or [process.name()]),
                        "since": info["create_time"],
                        "value": environment[variable],
                    }
                )
    return found


def _interpreter_problem(path: str) -> str | None:
    if not Path(path).is_file():
        return "there is no such file"
    if not os.access(path, os.X_OK):
        return "it cannot be executed"
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the user's config names, with our arguments
            [path, "-c", "import ray; print(ray.__version__)"],
            capture_output=True,
            text=True,
            timeout=_INTERPRETER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run: {error}"
    if done.returncode:
        return f"it cannot import ray: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return None


def _network() -> str:
    """An id of what shares this process's ports: the network namespace, on this boot of this machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _ephemeral_ports() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _EPHEMERAL_PORTS


def _nvidia_devices() -> tuple[VendorDevice, ...]:
    """The devices that NVIDIA's library knows, in its order; none where there is no driver."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:
        # No library, no driver, a driver of another version: whatever it is, there are no details to be had.
        return ()
    try:
        return tuple(_nvidia_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvidia_device(nvml: Any, index: int) -> VendorDevice:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Any) -> Any:
        # A question that this device or driver does not know leaves a gap, not a failure.
        try:
            return question(device)
        except nvml.NVMLError:
            return None

    memory, bus = ask(nvml.nvmlDeviceGetMemoryInfo), ask(nvml.nvmlDeviceGetPciInfo)
    pci = _text(bus.busId).lower() if bus else None
    return VendorDevice(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(device)),
        model=_text(nvml.nvmlDeviceGetName(device)).removeprefix("NVIDIA "),
        memory=int(memory.total) if memory else None,
        pci=pci,
        numa=_numa_node(pci) if pci else None,
    )


def _numa_node(pci: str) -> int | None:
    """The kernel writes the domain with 4 digits where NVIDIA writes 8."""
    try:
        text = Path(f"/sys/bus/pci/devices/{pci[-12:]}/numa_node").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text) if int(text) >= 0 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
