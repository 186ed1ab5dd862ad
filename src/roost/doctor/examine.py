"""`roost doctor`: look at this machine and at the cluster, and tell what is not as a job needs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from roost.doctor.child import finding_of
from roost.doctor.facts import Finding, Level, MachineFacts, Report, Unseen, note, problem
from roost.doctor.machine_look import at_once, driver_folders, look_at_home, look_at_machine
from roost.doctor.machine_rules import judge, judge_head_ports, judge_home, judge_machine
from roost.errors import ConfigError
from roost.machine.processes import die_with_parent
from roost.text import shorten

_LOAD_SECONDS = 60.0
_FOLDER_SECONDS = 10.0
# To find out that there is nothing to join, to ask for jobs, and to leave the cluster.
_SPARE_SECONDS = 15.0
_END_SECONDS = 5.0


def examine(*, address: str | None, run_dir: str | None, seconds: float, waiting: Callable[[str], None]) -> Report:
    """Look at this machine and, in a process of its own, at the cluster; never raises for what it finds."""
    if run_dir is not None:
        _check_folder(run_dir)
    told = _Told(waiting=waiting)
    with tempfile.TemporaryFile() as complaints:
        child = _start(complaints)
        try:
            reader = threading.Thread(target=told.read, args=(child,), daemon=True)
            reader.start()
            _send(child, {"address": address, "run_dir": run_dir, "seconds": seconds})
            machine = look_at_machine(driver_folders(run_dir), os.environ)
            home = look_at_home()
            told.loaded.wait(_LOAD_SECONDS)
            reader.join(seconds + _SPARE_SECONDS)
            is_late = reader.is_alive()
        finally:
            child.kill()
            # One that hangs in the kernel, as on a dead file system, is not waited for.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)
        reader.join(1)
        complaints.seek(0)
        last_words = complaints.read().decode(errors="replace")
    if told.mistake is not None and address is not None:
        raise ConfigError(told.mistake[0], hint=told.mistake[1])
    cluster = told.findings
    if told.mistake is not None:
        cluster.append(problem("cluster", f"RAY_ADDRESS: {told.mistake[0]}", told.mistake[1]))
    elif not told.is_done:
        cluster.append(_broke_off(seconds + _SPARE_SECONDS if is_late else None, last_words))
    if all(item.level == Level.NOTE for item in cluster) and told.address is None:
        cluster += _other_heads(machine)
    findings = [*judge_machine(machine, hosts=told.hosts), *judge_home(home)]
    if told.address is None and not _heads(machine):
        findings += judge("ports", machine.ports, judge_head_ports)
    return Report(host=socket.gethostname(), machine=tuple(findings), address=told.address, cluster=tuple(cluster))


def _check_folder(run_dir: str) -> None:
    there = at_once({"folder": partial(os.path.isdir, run_dir)}, _FOLDER_SECONDS)["folder"]
    if isinstance(there, Unseen):
        hint = "its file system may be gone: `mount` shows where it comes from"
        raise ConfigError(f"--run-dir {run_dir} cannot be looked at: {there.why}", hint=hint)
    if not there:
        raise ConfigError(f"--run-dir {run_dir} is no folder", hint="name one that is there, on the shared file system")


@dataclass(slots=True)
class _Told:
    """What the child has said so far."""

    waiting: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)
    address: str | None = None
    hosts: tuple[str, ...] = ()
    mistake: tuple[str, str] | None = None
    is_done: bool = False
    loaded: threading.Event = field(default_factory=threading.Event)
    """Set when Ray is loaded, or will not be."""

    def read(self, child: subprocess.Popen[str]) -> None:
        for line in child.stdout or ():
            # A line may be cut off where the child was.
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError):
                continue
        self.loaded.set()

    def _take(self, said: dict[str, Any]) -> None:
        if "finding" in said:
            self.findings.append(finding_of(said["finding"]))
        elif "waiting" in said:
            self.waiting(said["waiting"])
        elif "mistake" in said:
            self.mistake = (said["mistake"][0], said["mistake"][1])
        elif "address" in said:
            self.address, self.hosts = said["address"], tuple(said["hosts"])
        elif "loaded" in said:
            self.loaded.set()
        elif "done" in said:
            self.is_done = True


def _start(complaints: IO[bytes]) -> subprocess.Popen[str]:
    # -P: a file in the folder that it is started from must not stand in for a module.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "roost.doctor.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        preexec_fn=die_with_parent,
    )


def _send(child: subprocess.Popen[str], wanted: dict[str, Any]) -> None:
    try:
        if child.stdin is not None:
            child.stdin.write(json.dumps(wanted))
            child.stdin.close()
    except BrokenPipeError:
        # It is gone already: its last words tell why.
        return


def _broke_off(seconds: float | None, last_words: str) -> Finding:
    lines = [line for line in last_words.splitlines() if line.strip()]
    # Ray's own lines begin with the time, the process and the place in its source.
    last = re.sub(r"^\[[^]]*\]( [^ ]+:[0-9]+:)?", "", lines[-1]).strip() if lines else ""
    said = f": {shorten(last, 300)}" if last else ""
    if seconds is not None:
        return problem(
            "cluster",
            f"the look at it did not end in {seconds:.0f} s{said}",
            "Ray's head may hang: look at its machine, and at gcs_server.out of its session",
        )
    return problem(
        "cluster",
        f"the look at it broke off{said}",
        "Ray ends whoever is connected when its head dies: is it up? look again",
    )


def _heads(machine: MachineFacts) -> list[str]:
    """The heads of Ray clusters that processes on this machine belong to, and that answer."""
    if isinstance(machine.ray_processes, Unseen):
        return []
    return sorted({item.head for item in machine.ray_processes if item.head and item.belongs})


def _other_heads(machine: MachineFacts) -> list[Finding]:
    heads = _heads(machine)
    if not heads:
        return []
    seen = f"processes on this machine are of a Ray cluster at {', '.join(heads[:8])}"
    return [note("cluster", seen, f"roost doctor --address {heads[0]} looks at it")]
