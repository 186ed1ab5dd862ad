"""Rounds of the soak: a cluster, drivers and faults from one seed, and the invariants at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from roost.testing import LocalCluster, LocalNode, local_cluster
from shared_memory import shared_memory
from soak.history import DriverEnd, History, InjectedFault, check
from soak.inject import Injector, impossible_here, resume_all, small_disk
from soak.record import read_events
from soak.schedule import FAULTS, Round, make_round

TESTS = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 90.0
"""How long a driver may take before and after its work: opening, an operation, and all closes."""
GO_SECONDS = 20.0
"""How long after the end of the drivers something of them may still be there."""
RAY_SECONDS = 15.0
"""How long after the death of its raylet Ray may end a driver."""


@dataclass(slots=True)
class Summary:
    """What all rounds did together."""

    rounds: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    samples: int = 0

    def add(self, history: History, missed: Collection[str]) -> None:
        """Count a round."""
        self.rounds += 1
        names = {event["op"]: event["what"] for event in history.of("begin")}
        self.operations.update(names.values())
        self.failed.update(names[name] for name, end in history.ends().items() if not end["ok"] and name in names)
        self.samples += sum(len(event["ids"]) for event in history.of("get"))
        self.errors.update(event["error"]["type"] for event in history.of("end") if event.get("error"))
        self.faults.update(fault.name for fault in history.faults)
        self.missed.update(missed)

    def __str__(self) -> str:
        def counted(found: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "none"

        return (
            f"{self.rounds} rounds, {self.operations.total()} operations, {self.samples} samples delivered\n"
            f"  operations: {counted(self.operations)}\n"
            f"  of these failed: {counted(self.failed)}\n"
            f"  faults injected: {counted(self.faults)}\n"
            f"  faults without a target: {counted(self.missed)}\n"
            f"  errors that drivers saw: {counted(self.errors)}"
        )


def possible_faults(names: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Return those of these faults that can be injected here, and why not for the others."""
    reasons = impossible_here()
    why = {name: reasons[FAULTS[name].act] for name in names if FAULTS[name].act in reasons}
    return [name for name in names if name not in why], why


def run_round(seed: int, faults: Collection[str], folder: Path, summary: Summary) -> None:
    """Run the round of a seed; AssertionError if it broke an invariant."""
    planned = make_round(seed, faults)
    folder.mkdir(parents=True)
    began = time.monotonic()
    history, missed = _carry_out(planned, folder)
    summary.add(history, missed)
    violations = check(history)
    took = time.monotonic() - began
    print(f"{planned}\n  {len(history.of('begin'))} operations, {took:.0f} s, {len(violations)} violations", flush=True)
    if violations:
        raise AssertionError(_report(planned, history, [str(item) for item in violations], folder))
    shutil.rmtree(folder, ignore_errors=True)


def _carry_out(planned: Round, folder: Path) -> tuple[History, list[str]]:
    shm_before = _shared_memory()
    has_disk = "fill" not in impossible_here()
    clock = folder / "clock"
    environment = _environment(clock)
    local = local_cluster([LocalNode(accelerators=count, env=environment) for count in planned.accelerators])
    seen: set[psutil.Process] = set()
    drivers: dict[str, subprocess.Popen[bytes]] = {}
    with small_disk(folder / "disk", has_disk), _page_readers(folder):
        local.start()
        try:
            injector = Injector(local, drivers, folder / "disk", clock, planned.faults)
            for number, driver in enumerate(planned.drivers):
                who = f"d{number}"
                given = {
                    "folder": str(folder),
                    "who": who,
                    "seed": driver.seed,
                    "num_nodes": driver.num_nodes,
                    "has_rollout": driver.has_rollout,
                    "seconds": planned.seconds,
                }
                drivers[who] = _start_driver(folder, who, given, local)
            injector.start()
            ends = _wait_for(drivers, planned, injector, seen, local)
            injector.stop()
            faults = [*injector.injected]
            left = _find_left(planned, local, folder, drivers)
            kept = _find_exceptions(folder)
        finally:
            with contextlib.suppress(psutil.Error):
                seen.update(psutil.Process(local.keeper_pid).children(recursive=True))
            resume_all([*seen, *(psutil.Process(item.pid) for item in drivers.values() if item.poll() is None)])
            for item in drivers.values():
                if item.poll() is None:
                    item.kill()
                item.wait(30)
            local.stop()
    left["process of the cluster"] = _still_running(seen)
    left["shared memory"] = _wait_for_shared_memory(shm_before)
    left["folder of the cluster"] = [str(local.folder)] if local.folder.exists() else []
    killed = {fault.target for fault in faults if fault.name == "kill-driver"}
    ended = [
        DriverEnd(
            who=who,
            code=code,
            ended=when,
            was_killed=who in killed,
            was_ended_by_ray=code == 1
            and "Traceback" not in (folder / f"{who}.out").read_text(errors="replace")
            and any(item.name == "kill-head-raylet" and 0 < when - item.began < RAY_SECONDS for item in faults),
        )
        for who, (code, when) in ends.items()
    ]
    events = [*read_events(folder), *injector.heard]
    return History(events=events, faults=faults, drivers=ended, left=left, kept=kept), injector.missed


@contextlib.contextmanager
def _page_readers(folder: Path) -> Iterator[None]:
    """Let a process read the runs of the round with clocks that differ."""
    command = [sys.executable, str(TESTS / "soak" / "page.py"), str(folder / "disk"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    with (folder / "page.out").open("wb") as out:
        reading = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
        try:
            yield
        finally:
            reading.communicate(timeout=GO_SECONDS)
    if reading.returncode:
        raise AssertionError(f"the readers of pages failed:\n{(folder / 'page.out').read_text()}")


def _find_exceptions(folder: Path) -> dict[str, set[str]]:
    """Return where the exceptions are that workers raised, by their names."""
    names = [event["name"] for event in read_events(folder) if event["e"] == "raised"]
    kept: dict[str, set[str]] = {name: set() for name in names}
    for path in (folder / "disk").rglob("*") if names else ():
        if (where := {".log": "log", ".jsonl": "events"}.get(path.suffix)) and path.is_file():
            text = path.read_text(errors="replace")
            for name in names:
                if name in text:
                    kept[name].add(where)
    return kept


def _environment(clock: Path) -> dict[str, str]:
    """What all processes of a round get: the code of the soak, and a clock that can be stepped."""
    paths = [str(TESTS), str(TESTS / "soak" / "clock"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), "SOAK_CLOCK": str(clock)}


def _start_driver(folder: Path, who: str, given: dict[str, object], local: LocalCluster) -> subprocess.Popen[bytes]:
    """Start a driver in a home of its own, where it should leave nothing."""
    for name in ("home", "here", "tmp", "state"):
        (folder / who / name).mkdir(parents=True)
    environment = {
        **os.environ,
        **local.environment,
        **_environment(folder / "clock"),
        "HOME": str(folder / who / "home"),
        "TMPDIR": str(folder / who / "tmp"),
        "XDG_STATE_HOME": str(folder / who / "state"),
    }
    with (folder / f"{who}.out").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-u", str(TESTS / "soak" / "job.py"), json.dumps(given)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder / who / "here",
        )


def _wait_for(
    drivers: dict[str, subprocess.Popen[bytes]],
    planned: Round,
    injector: Injector,
    seen: set[psutil.Process],
    local: LocalCluster,
) -> dict[str, tuple[int | None, float]]:
    """Wait until every driver has ended; return its exit code and when it ended."""
    ends: dict[str, tuple[int | None, float]] = {}
    deadline = time.monotonic() + planned.seconds + PATIENCE_SECONDS
    faults_end = time.monotonic() + planned.seconds + 20
    while len(ends) < len(drivers) and time.monotonic() < deadline:
        for who, item in drivers.items():
            if who not in ends and item.poll() is not None:
                ends[who] = (item.returncode, time.time())
        with contextlib.suppress(psutil.Error):
            seen.update(psutil.Process(local.keeper_pid).children(recursive=True))
        if time.monotonic() > faults_end:
            injector.stop()
        time.sleep(0.2)
    for who in drivers:
        ends.setdefault(who, (None, time.time()))
    return ends


def _find_left(
    planned: Round, local: LocalCluster, folder: Path, drivers: dict[str, subprocess.Popen[bytes]]
) -> dict[str, list[str]]:
    """Return what is left of the jobs some seconds after their end."""
    left: dict[str, list[str]] = {}
    if any(item.poll() is None for item in drivers.values()):
        # They are reported as drivers that did not end.
        return left
    if not planned.ends_cluster:
        left |= _look(local)
        deadline = time.monotonic() + GO_SECONDS
        while (actors := _actors(local)) and time.monotonic() < deadline:
            time.sleep(0.2)
        left["process"] = actors
    for who in drivers:
        for name in ("home", "here", "tmp"):
            found = [path for path in (folder / who / name).rglob("*") if not path.is_dir()]
            left.setdefault("file outside of the run folder", []).extend(map(str, found))
    return left


def _look(local: LocalCluster) -> dict[str, list[str]]:
    """Look from a process of its own: Ray ends processes that are connected to a head that dies."""
    command = [sys.executable, str(TESTS / "soak" / "look.py"), str(GO_SECONDS)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=3 * GO_SECONDS,
            check=False,
            env={**os.environ, **local.environment},
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"look": [f"the cluster could not be looked at: {error}"]}


def _actors(local: LocalCluster) -> list[str]:
    """Processes of the cluster that serve an actor."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(local.keeper_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = (process.cmdline() or [""])[0]
                if title.startswith("ray::") and "IDLE" not in title:
                    found.append(f"{title} (pid {process.pid})")
    return found


def _still_running(seen: set[psutil.Process]) -> list[str]:
    gone, alive = psutil.wait_procs(list(seen), timeout=GO_SECONDS)
    del gone
    left = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.name()} (pid {process.pid})")
    return left


def _wait_for_shared_memory(before: set[str]) -> list[str]:
    """Return what is in shared memory that was not there before, and stays; other programs have theirs for moments."""
    left = _shared_memory() - before
    deadline = time.monotonic() + GO_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left &= _shared_memory()
    return sorted(left)


def _shared_memory() -> set[str]:
    """What is in shared memory and no process has mapped."""
    there = {str(path) for path in shared_memory()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            there -= {line.rpartition(" ")[2] for line in maps.read_text().splitlines()}
    return there


def _report(planned: Round, history: History, violations: list[str], folder: Path) -> str:
    start = min((event["t"] for event in history.events), default=0.0)

    def relative(fault: InjectedFault) -> str:
        when = f"{fault.began - start:.1f} to {fault.ended - start:.1f}"
        return f"  {when}: {fault.name}, {fault.target} (pid {fault.pid})"

    lines = [
        f"{len(violations)} violations in {planned}",
        *(f"  - {item}" for item in violations[:20]),
        "faults as they were injected, in seconds from the first event:",
        *(relative(fault) for fault in sorted(history.faults, key=lambda fault: fault.began)),
        f"replay: SOAK_SEED={planned.seed} SOAK_ROUNDS=1 make soak",
        f"everything that the round wrote: {folder}",
    ]
    for path in sorted(folder.glob("*.out")):
        lines += [
            f"the end of {path.name}:",
            *(f"  {line}" for line in path.read_text(errors="replace").splitlines()[-40:]),
        ]
    return "\n".join(lines)
