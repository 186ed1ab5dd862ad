"""`roost doctor`: check this machine and the cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from roost.doctor.facts import Unknown
from roost.doctor.findings import Finding, Level, Report, judge, note, problem
from roost.doctor.limits import FOLDER_SECONDS, MACHINE_SECONDS, SPARE_SECONDS
from roost.doctor.machine_facts import collect_home, collect_machine, driver_folders, gather
from roost.doctor.machine_rules import judge_head_ports, judge_home, judge_machine
from roost.errors import ConfigError
from roost.machine.child import Child, last_line


def examine(*, address: str | None, run_dir: str | None, seconds: float, waiting: Callable[[str], None]) -> Report:
    """Check this machine and, in a child process, the cluster; raise only for a mistake in the arguments."""
    if run_dir is not None:
        there = gather({"folder": partial(os.path.isdir, run_dir)}, FOLDER_SECONDS)["folder"]
        if isinstance(there, Unknown):
            hint = "its file system may be gone: `mount` shows where it comes from"
            raise ConfigError(f"--run-dir {run_dir} could not be checked: {there.why}", hint=hint)
        if not there:
            hint = "name a folder that exists, on the shared file system"
            raise ConfigError(f"--run-dir {run_dir} is not a folder", hint=hint)
    heard: list[dict[str, Any]] = []

    def hear(said: dict[str, Any]) -> bool:
        heard.append(said)
        if "waiting" in said:
            waiting(said["waiting"])
        return "done" in said

    task = {"address": address, "run_dir": run_dir, "seconds": seconds}
    with Child("roost.doctor.child", task, hear) as child:
        machine = collect_machine(driver_folders(run_dir), os.environ, MACHINE_SECONDS)
        home = collect_home(MACHINE_SECONDS)
        is_late = not child.wait(seconds + SPARE_SECONDS)
    cluster: list[Finding] = [answer["finding"] for answer in heard if "finding" in answer]
    said = {key: value for answer in heard for key, value in answer.items()}
    joined, mistake = said.get("address"), said.get("mistake")
    if mistake and address is not None:
        raise ConfigError(mistake[0], hint=mistake[1])
    if mistake:
        cluster.append(problem("cluster", f"RAY_ADDRESS: {mistake[0]}", mistake[1]))
    elif "done" not in said:
        last = last_line(child.last_words)
        seen = "broke off"
        do = "Ray ends every process that is connected when its head dies: is it up? run roost doctor again"
        if is_late:
            seen = f"did not end in {seconds + SPARE_SECONDS:.0f} s"
            do = "Ray's head may hang: check its machine, and gcs_server.out of its session"
        cluster.append(problem("cluster", f"the check {seen}{f': {last}' if last else ''}", do))
    # The heads that processes on this machine belong to, and that answer.
    processes = () if isinstance(machine.ray_processes, Unknown) else machine.ray_processes
    heads = sorted({item.owner for item in processes if item.owner and item.has_owner})
    if heads and joined is None and all(item.level == Level.NOTE for item in cluster):
        seen = f"processes on this machine are of a Ray cluster at {', '.join(heads[:8])}"
        cluster.append(note("cluster", seen, f"roost doctor --address {heads[0]} checks it"))
    findings = [*judge_machine(machine, hosts=said.get("hosts", ())), *judge_home(home)]
    if joined is None and not heads:
        findings += judge("ports", machine.ports, judge_head_ports)
    return Report(host=socket.gethostname(), machine=tuple(findings), address=joined, cluster=tuple(cluster))
