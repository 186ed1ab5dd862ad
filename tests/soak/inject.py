"""Carries out faults, on what belongs to the round and on nothing else.

Only processes that descend from the keeper of the round's own cluster, or drivers that the round itself started, are
ever signalled or starved. Only their connections are reset, only their ports are robbed, only addresses of that cluster
are cut off, and only the round's own disk is filled.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from roost.testing import LocalCluster
from soak.history import InjectedFault
from soak.schedule import FAULTS, PlannedFault

# How Ray titles the processes of actors: by the name of the class.
_TITLES = {
    "worker": "ray::SoakWorker",
    "channel": "ray::ChannelWorker",
    "engine": "ray::EngineWorker",
    "rollout manager": "ray::ManagerWorker",
    "node manager": "ray::NodeManagerActor",
    "worker manager": "ray::WorkerManagerActor",
    "collective manager": "ray::CollectiveManagerActor",
}
# Those that talk to each other through Roost's own connections, and accept no other ones at the address of their node.
_TALKERS = ("worker", "channel")
_STOLEN = b'{"healthy": true, "proof": "00", "actions": ["stolen"], "version": 1000000000, "engine": -1}'
_RETRY_SECONDS = 0.3
_DIE_SECONDS = 5.0
_RESET_AGAIN_SECONDS = 1.0
_PIDFD_GETFD = 438
"""The number of the system call, for which the standard library has no function."""
_NO_LINGER = struct.pack("ii", 1, 0)
_UNSPECIFIED = struct.pack("H14x", socket.AF_UNSPEC)
_libc = ctypes.CDLL(None, use_errno=True)


def impossible_here() -> dict[str, str]:
    """Return the acts that this machine does not let this user do, and why."""
    reasons = {}
    if os.geteuid() != 0:
        reasons = dict.fromkeys(("cut", "blip", "fill", "reset"), "only root can do it")
    for act, command in (("cut", "ss"), ("blip", "ip"), ("fill", "mount")):
        if shutil.which(command) is None:
            reasons[act] = f"there is no {command} here"
    if "reset" not in reasons:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                borrow_socket(os.getpid(), ours.fileno()).close()
            except OSError as error:
                reasons["reset"] = f"this kernel does not hand out sockets of other processes: {error.strerror}"
    return reasons


def borrow_socket(pid: int, descriptor: int) -> socket.socket:
    """Return a socket of another process, which both then have open."""
    process = os.pidfd_open(pid)
    try:
        found = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    try:
        return socket.socket(fileno=found)
    except OSError:
        os.close(found)
        raise


def reset(connection: socket.socket) -> None:
    """Break a connection at both ends at once, as a network does that forgot it; what is on its way is lost."""
    if connection.family == socket.AF_UNIX:
        connection.shutdown(socket.SHUT_RDWR)
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    if _libc.connect(connection.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def accepted_from_peers(process: psutil.Process) -> Iterator[socket.socket]:
    """Yield the connections of a worker that its peers opened; Ray listens at every address, Roost at that of the node.

    A descriptor may be closed, and be another file, by the time that it is borrowed.
    """
    found = process.net_connections("all")
    listening = {one.laddr for one in found if one.status == psutil.CONN_LISTEN and one.family == socket.AF_INET}
    for one in found:
        is_near = one.family == socket.AF_UNIX and str(one.laddr).startswith("@roost-")
        if not is_near and (one.laddr not in listening or one.status != psutil.CONN_ESTABLISHED):
            continue
        with contextlib.suppress(OSError), borrow_socket(process.pid, one.fd) as borrowed:
            name = borrowed.getsockname()
            name = name.decode().replace("\0", "@") if isinstance(name, bytes) else name
            listens = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if name == (one.laddr if is_near else tuple(one.laddr)) and not listens:
                yield borrowed


class Thief(socketserver.ThreadingTCPServer):
    """Answers 200 to everything at an address that was another process's, and notes what it should not have heard."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _ThiefTalk)
        self.heard: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def hear(self, data: bytes) -> None:
        """Note secrets, prompts and weights."""
        self.heard += [word for word in ("Authorization", "observations", "weights") if word.encode() in data]

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()
        self._thread.join(_DIE_SECONDS)


class _ThiefTalk(socketserver.BaseRequestHandler):
    server: Thief

    def handle(self) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(_STOLEN)}\r\n\r\n"
        with contextlib.suppress(OSError):
            while data := self.request.recv(2**16):
                self.server.hear(data)
                self.request.sendall(head.encode() + _STOLEN)


@contextlib.contextmanager
def starved(process: psutil.Process) -> Iterator[None]:
    """Let a process open nothing more; what it closes it can open again."""
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    opened = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    first_free = next(number for number in itertools.count() if number not in opened)
    process.rlimit(psutil.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.Error):
            process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))


class Injector:
    """Injects the faults of a round from a thread of its own, and undoes those that last."""

    def __init__(
        self,
        local: LocalCluster,
        drivers: Mapping[str, subprocess.Popen[bytes]],
        disk: Path,
        clock: Path,
        faults: Sequence[PlannedFault],
    ) -> None:
        self._local = local
        self._keeper = psutil.Process(local.keeper_pid)
        self._drivers = drivers
        self._disk = disk
        self._clock = clock
        self._faults = faults
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.injected: list[InjectedFault] = []
        self.heard: list[dict[str, object]] = []
        """Events: what thieves heard."""
        self.missed: list[str] = []

    def start(self) -> None:
        """Begin; the faults come when they are due."""
        began = time.monotonic()
        for fault in self._faults:
            thread = threading.Thread(target=self._run, args=(fault, began), name=f"soak-{fault.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Undo what still lasts, and inject nothing more."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)

    def wait_for_end(self, timeout: float) -> None:
        """Wait until every fault was injected and has ended."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, fault: PlannedFault, began: float) -> None:
        if self._over.wait(max(0.0, began + fault.at - time.monotonic())):
            return
        kind = FAULTS[fault.name]
        while not self._over.is_set():
            acts = {
                "cut": self._network,
                "blip": self._network,
                "fill": self._fill,
                "step": self._step,
                "reset": self._reset,
                "rob": self._rob,
                "starve": self._starve,
            }
            acted = acts.get(kind.act, self._signal)(fault)
            if acted:
                self.injected.append(acted)
                return
            # The target is not there yet.
            self._over.wait(_RETRY_SECONDS)
        self.missed.append(fault.name)

    def _signal(self, fault: PlannedFault) -> InjectedFault | None:
        kind = FAULTS[fault.name]
        found = self._targets(kind.target)
        if not found:
            return None
        name, process = found[int(fault.pick * len(found))]
        began = time.time()
        with contextlib.suppress(psutil.Error):
            if not self._is_ours(process):
                return None
            # psutil does not signal a later process with the same id.
            process.kill() if kind.act == "kill" else process.suspend()
            if kind.act == "stop":
                self._over.wait(fault.seconds)
        if kind.act == "stop":
            with contextlib.suppress(psutil.Error):
                process.resume()
        return InjectedFault(
            name=fault.name,
            target=name,
            began=began,
            ended=time.time() if kind.act == "stop" else began,
            pid=process.pid,
        )

    def _reset(self, fault: PlannedFault) -> InjectedFault | None:
        """Reset what the peers of one worker have opened to it, and after a second again, also what is just opening."""
        found = [item for target in _TALKERS for item in self._targets(target)]
        if not found:
            return None
        name, process = found[int(fault.pick * len(found))]
        began = time.time()
        until, count = time.monotonic() + fault.seconds, 0
        while time.monotonic() < until and not self._over.is_set():
            with contextlib.suppress(psutil.Error):
                if not self._is_ours(process):
                    break
                for connection in accepted_from_peers(process):
                    with contextlib.suppress(OSError):
                        reset(connection)
                        count += 1
            self._over.wait(_RESET_AGAIN_SECONDS)
        if not count:
            return None
        target = f"{count} connections of {name}"
        return InjectedFault(name=fault.name, target=target, began=began, ended=time.time(), pid=process.pid)

    def _rob(self, fault: PlannedFault) -> InjectedFault | None:
        """Kill an engine, and answer in its place wherever it listened."""
        found = self._targets("engine")
        if not found:
            return None
        name, process = found[int(fault.pick * len(found))]
        began, thieves = time.time(), []
        with contextlib.suppress(psutil.Error), contextlib.ExitStack() as stack:
            if not self._is_ours(process):
                return None
            # Ray listens at every address.
            listening = {
                tuple(one.laddr)
                for one in process.net_connections("inet4")
                if one.status == psutil.CONN_LISTEN and one.laddr.ip != "0.0.0.0"  # noqa: S104 - compared, not bound
            }
            if not listening:
                # It does not serve yet.
                return None
            process.kill()
            psutil.wait_procs([process], timeout=_DIE_SECONDS)
            for address in sorted(listening):
                # The engine may have been restarted there already.
                with contextlib.suppress(OSError):
                    thieves.append(stack.enter_context(Thief(address)))
            self._over.wait(fault.seconds)
        for thief in thieves:
            where = f"{thief.server_address[0]}:{thief.server_address[1]}"
            self.heard += [{"e": "leak", "t": time.time(), "what": word, "where": where} for word in thief.heard]
        target = f"{name} at {', '.join(str(thief.server_address[1]) for thief in thieves)}"
        return InjectedFault(name=fault.name, target=target, began=began, ended=time.time(), pid=process.pid)

    def _starve(self, fault: PlannedFault) -> InjectedFault | None:
        found = [item for target in _TALKERS for item in self._targets(target)]
        if not found:
            return None
        name, process = found[int(fault.pick * len(found))]
        began = time.time()
        with contextlib.suppress(psutil.Error, OSError):
            if not self._is_ours(process):
                return None
            with starved(process):
                self._over.wait(fault.seconds)
        return InjectedFault(name=fault.name, target=name, began=began, ended=time.time(), pid=process.pid)

    def _targets(self, target: str) -> list[tuple[str, psutil.Process]]:
        """Return the processes that a fault can hit, oldest first, each with its name."""
        if target == "driver":
            running = {who: item.pid for who, item in self._drivers.items() if item.poll() is None}
            return [(who, psutil.Process(pid)) for who, pid in running.items()]
        if target in ("raylet", "head raylet", "gcs"):
            ranks = [rank for rank in self._local.pids if (rank == 0) == (target != "raylet")]
            name = "gcs_server" if target == "gcs" else "raylet"
            pids = {pid: rank for rank in ranks for pid in self._local.pids[rank]}
            return [
                (f"{name} of node {pids[process.pid]}", process)
                for process in self._descendants()
                if process.pid in pids and self._title(process).startswith(name)
            ]
        found = [process for process in self._descendants() if self._title(process).startswith(_TITLES[target])]
        return [(self._title(process), process) for process in sorted(found, key=lambda process: process.pid)]

    def _descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return self._keeper.children(recursive=True)
        return []

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether the process belongs to this round's cluster, or is one of its drivers."""
        if process.pid in {item.pid for item in self._drivers.values() if item.poll() is None}:
            return process.ppid() == os.getpid()
        return self._keeper.is_running() and self._keeper in process.parents()

    def _title(self, process: psutil.Process) -> str:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            return words[0] if words and words[0].startswith("ray::") else process.name()
        return ""

    def _network(self, fault: PlannedFault) -> InjectedFault | None:
        """Cut the connections of a node, or make its address unreachable for a while."""
        kind = FAULTS[fault.name]
        head = self._local.address.rpartition(":")[0]
        ranks = [rank for rank in self._local.pids if (rank == 0) == kind.at_head]
        if not ranks:
            return None
        rank = ranks[int(fault.pick * len(ranks))]
        address = f"{head.rpartition('.')[0]}.{rank + 1}"
        began = time.time()
        if kind.act == "cut":
            for side in ("src", "dst"):
                _run(["ss", "-K", "-H", "state", "established", side, address])
        else:
            route = ["unreachable", f"{address}/32", "table", "local"]
            _run(["ip", "route", "replace", *route])
            try:
                self._over.wait(min(3.0, fault.seconds))
            finally:
                _run(["ip", "route", "del", *route])
        return InjectedFault(name=fault.name, target=f"node {rank} at {address}", began=began, ended=time.time())

    def _fill(self, fault: PlannedFault) -> InjectedFault | None:
        """Fill the disk of the runs for a while."""
        began = time.time()
        ballast = self._disk / f"ballast-{fault.at:g}"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 2**16)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        self._over.wait(fault.seconds)
        ballast.unlink()
        return InjectedFault(name=fault.name, target=str(self._disk), began=began, ended=time.time())

    def _step(self, fault: PlannedFault) -> InjectedFault:
        """Step the time of day of all Python processes of the round, an hour ahead or back, and after a while again."""
        began, hours = time.time(), 1 if fault.pick < 0.5 else -1
        replace_file(self._clock, str(hours * 3600))
        self._over.wait(fault.seconds)
        replace_file(self._clock, "0")
        return InjectedFault(name=fault.name, target=f"{hours:+} h", began=began, ended=time.time())


def replace_file(path: Path, text: str) -> None:
    """Write a file so that nobody reads half of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


@contextlib.contextmanager
def small_disk(path: Path, is_possible: bool):
    """A disk of some MiB at a path, or a plain folder where this user cannot mount one."""
    path.mkdir()
    if not is_possible:
        yield
        return
    _run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "soak", str(path)])
    try:
        yield
    finally:
        # Lazily: a process that is about to end may still have a file open.
        _run(["umount", "--lazy", str(path)])


def resume_all(processes: Sequence[psutil.Process]) -> None:
    """Let everything go on that is stopped."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=False, capture_output=True, timeout=30)
