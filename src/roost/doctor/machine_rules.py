"""From facts about a machine to findings. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roost.config.hardware import accelerator_types
from roost.doctor.facts import (
    Device,
    Devices,
    Finding,
    HomeFacts,
    HostName,
    Level,
    Limits,
    MachineFacts,
    Ports,
    Practice,
    Software,
    Space,
    Unseen,
    note,
    ok,
    problem,
    warning,
)
from roost.errors import ClusterError
from roost.runtime.connect.versions import OLDEST_RAY, check_ray_version
from roost.runtime.managers.ledgers.ports import lease_range
from roost.text import join_words, plural, size_text

_GIB = 2**30
# Ray kills workers when more than this part of the memory is used, and stops to spill objects to a disk that full.
_FULL = 0.95
_NEARLY_FULL = 0.90
_LITTLE_DISK = 2 * _GIB
# The part of the memory that Ray takes for its object store, if nobody says something else.
_STORE_PART = 0.3
# Ray wants no more shared memory than this before it complains.
_ENOUGH_SHM = 10 * _GIB
# Below the first Ray warns; the second is what large clusters use.
_FEW_FILES = 4096
_GOOD_FILES = 65536
# A worker of Ray has some dozens of threads, and a node starts a worker for each CPU.
_TASKS_PER_CPU = 64
_FEW_TASKS = 2048
_FEW_PORTS = 500
_RAY_WORKER_PORTS = range(10002, 20000)
_HEAD_PORTS = {6379: "--port", 8265: "--dashboard-port", 10001: "--ray-client-server-port"}
_BIG_HEAP = 1 * _GIB
_MOST_LINES = 8


def judge_machine(facts: MachineFacts, *, hosts: Sequence[str] = ()) -> list[Finding]:
    """All that there is to say of one machine; `hosts` are those that its processes talk to."""
    devices = Devices() if isinstance(facts.devices, Unseen) else facts.devices
    judged: list[tuple[str, Any, Callable[[Any], Iterable[Finding]]]] = [
        ("python", facts.software, judge_python),
        ("ray", facts.software, judge_ray),
        ("packages", facts.software, lambda found: judge_packages(found, devices)),
        ("accelerators", facts.devices, judge_devices),
        ("visible devices", facts.environment, lambda found: judge_visible_devices(found, devices)),
        ("memory", facts.memory, judge_memory),
        ("shared memory", facts.shm, lambda found: judge_shm(found, facts.memory)),
        ("disk", facts.disks, judge_disks),
        ("open files", facts.limits, judge_open_files),
        ("processes", facts.limits, judge_tasks),
        ("ports", facts.ports, judge_ports),
        ("host name", facts.host_name, judge_host_name),
        ("proxies", facts.environment, lambda found: judge_proxies(found, hosts)),
        ("leftovers", facts.ray_processes, lambda _: judge_leftovers(facts)),
    ]
    return [item for name, fact, rule in judged for item in judge(name, fact, rule)]


def judge_home(facts: HomeFacts) -> list[Finding]:
    """All that there is to say of what is kept for a user."""
    return [
        *judge("practice cluster", facts.practice, judge_practice),
        *judge("old files", facts.heaps, judge_heaps),
    ]


def judge(check: str, fact: Any, rule: Callable[[Any], Iterable[Finding]]) -> list[Finding]:
    """Apply a rule to a fact; one that could not be had is told, and so is a rule that fails on what it got."""
    if isinstance(fact, Unseen):
        return [unseen(check, fact)]
    try:
        return list(rule(fact))
    except Exception as error:
        return [unseen(check, Unseen(why=f"{type(error).__name__}: {error}"))]


def unseen(check: str, fact: Unseen) -> Finding:
    """A finding for what could not be looked at."""
    level = Level.WARNING if fact.do else Level.NOTE
    return Finding(check=check, level=level, seen=f"could not be looked at: {fact.why}", do=fact.do)


def judge_python(found: Software) -> list[Finding]:
    """Roost needs 3.11."""
    seen = f"{found.python}, {found.interpreter}"
    if _numbers(found.python) < (3, 11):
        return [problem("python", seen, "install Python 3.11 or newer: Roost does not run on older ones")]
    return [ok("python", seen)]


def judge_ray(found: Software) -> list[Finding]:
    """Ray must be there and not too old."""
    version = found.packages.get("ray")
    if version is None:
        return [problem("ray", "not installed", f"pip install 'ray>={OLDEST_RAY}', on every node of the cluster")]
    try:
        check_ray_version(version)
    except ClusterError as error:
        return [problem("ray", error.problems[0].message, error.problems[0].hint)]
    return [ok("ray", version)]


def judge_packages(found: Software, devices: Devices) -> list[Finding]:
    """What is installed beside Ray; torch must be able to use the accelerators that are there."""
    others = [f"{name} {version}" for name, version in found.packages.items() if name != "ray"]
    torch = found.packages.get("torch", "")
    if devices.nvidia and torch.endswith("+cpu"):
        return [
            warning(
                "packages",
                f"torch {torch} is a build for CPUs, and this machine has {_devices_text(devices.nvidia)}",
                "install a build of torch for CUDA",
            )
        ]
    return [ok("packages", ", ".join(others) or "none")]


def judge_devices(found: Devices) -> list[Finding]:
    """Which accelerators there are, whether their driver works, and who else uses them."""
    findings = []
    texts = [_devices_text(found.nvidia)] if found.nvidia else []
    texts += [f"{count} of {vendor}" for vendor, count in (("AMD", found.amd), ("Ascend", found.ascend)) if count]
    if found.nvidia_files and not found.nvidia:
        findings.append(
            problem(
                "accelerators",
                f"{plural(found.nvidia_files, 'NVIDIA device')} in /dev, "
                f"but the driver's library does not answer: {found.nvidia_error or 'it shows none'}",
                "see what nvidia-smi says; after an update of the driver, load it anew or restart the machine",
            )
        )
    elif found.nvidia_installed > len(found.nvidia):
        findings.append(
            note(
                "accelerators",
                f"the machine has {plural(found.nvidia_installed, 'NVIDIA device')}, "
                f"and {len(found.nvidia) or 'none'} can be seen from here",
                "if this is a container that should have them: docker run --gpus all, or nvidia.com/gpu in the pod",
            )
        )
    if texts or not findings:
        findings.insert(0, ok("accelerators", ", ".join(texts) or "none on this machine"))
    strangers = [(device, user) for device in found.nvidia for user in device.users if not user.of_ray]
    for device, user in strangers[:_MOST_LINES]:
        memory = "" if user.memory is None else f" with {size_text(user.memory)}"
        who = f": {user.user}, {user.command}" if user.command else ", which cannot be seen from here"
        findings.append(
            warning(
                "accelerators",
                f"accelerator {device.index} is used by pid {user.pid}{memory}, not of Ray{who}",
                f"end it if it is yours (kill {user.pid}): Ray does not know of it and places workers there"
                if user.command
                else "look for it outside this container: Ray does not know of it and places workers there",
            )
        )
    if len(strangers) > _MOST_LINES:
        more = f"{len(strangers) - _MOST_LINES} more processes that are not of Ray use accelerators"
        findings.append(warning("accelerators", more, "nvidia-smi lists them all"))
    return findings


def judge_visible_devices(found: Mapping[str, str], devices: Devices) -> list[Finding]:
    """What the variables say that hide accelerators from whatever is started here."""
    findings = []
    for kind, entry in accelerator_types().items():
        if entry.variable not in found:
            continue
        value = found[entry.variable]
        named = entry.devices(value)
        wrong = [word for word in named if word.isdigit() and int(word) >= len(devices.nvidia)]
        there = f"are 0-{len(devices.nvidia) - 1}" if len(devices.nvidia) > 1 else "is only 0"
        if kind == "nvidia" and devices.nvidia and wrong:
            findings.append(
                warning(
                    "visible devices",
                    f"{entry.variable}={value} names {join_words(wrong)}, and there {there}",
                    f"unset {entry.variable}",
                )
            )
            continue
        hidden = "hides all accelerators" if not named else f"shows {plural(len(named), 'accelerator')}"
        findings.append(
            note(
                "visible devices",
                f"{entry.variable}={value!r} {hidden} to what is started here, such as `ray start`",
                f"unset {entry.variable} unless you mean it; for its workers Roost sets it itself",
            )
        )
    return findings or [ok("visible devices", "no variable hides any")]


def judge_memory(found: Space) -> list[Finding]:
    """Ray kills workers where memory runs out."""
    seen = f"{size_text(found.free)} of {size_text(found.total)} free"
    used = _used(found)
    if used >= _FULL:
        do = "end what uses it: over 95 % Ray kills workers, the newest first"
        return [problem("memory", f"{seen}, {used:.0%} used", do)]
    if used >= _NEARLY_FULL:
        return [warning("memory", f"{seen}, {used:.0%} used", "make room: over 95 % Ray kills workers")]
    return [ok("memory", seen)]


def judge_shm(found: Space, memory: Space | Unseen) -> list[Finding]:
    """Ray's object store is in shared memory, or slow."""
    seen = f"{size_text(found.free)} of {size_text(found.total)} free in {found.path}"
    wanted = 0 if isinstance(memory, Unseen) else int(min(memory.total * _STORE_PART, _ENOUGH_SHM))
    if found.total < wanted:
        return [
            warning(
                "shared memory",
                f"{found.path} has {size_text(found.total)}, and Ray's object store wants {size_text(wanted)}",
                f"docker run --shm-size={wanted // _GIB + 1}g; in a pod an emptyDir of medium Memory at {found.path}",
            )
        ]
    if _used(found) >= _NEARLY_FULL:
        do = f"look at `ls -l {found.path}`, and remove what programs that ended left there"
        return [warning("shared memory", f"{seen}, {_used(found):.0%} used", do)]
    return [ok("shared memory", seen)]


def judge_disks(found: Sequence[Space]) -> list[Finding]:
    """A file system that is nearly full stops Ray."""
    findings = []
    for space in found:
        seen = f"{size_text(space.free)} of {size_text(space.total)} free at {space.path} ({join_words(space.uses)})"
        used = _used(space)
        if used >= _FULL:
            do = f"make room below {space.path}: over 95 % Ray writes no more objects to disk, and tasks fail"
            findings.append(problem("disk", f"{seen}, {used:.0%} used", do))
        elif used >= _NEARLY_FULL or space.free < _LITTLE_DISK:
            do = f"make room below {space.path}: over 95 % Ray writes no more objects to disk"
            findings.append(warning("disk", f"{seen}, {used:.0%} used", do))
        else:
            findings.append(ok("disk", seen))
    return findings


def judge_open_files(found: Limits) -> list[Finding]:
    """Each worker and each connection takes some."""
    if found.open_files is None or found.open_files >= _FEW_FILES:
        return [ok("open files", "no limit" if found.open_files is None else f"up to {found.open_files}")]
    if found.most_open_files is None or found.most_open_files >= _FEW_FILES:
        most = min(_GOOD_FILES, found.most_open_files or _GOOD_FILES)
        do = f"ulimit -n {most} in the shell that runs `ray start`, or LimitNOFILE of its service"
    else:
        do = f"raise the limit to {_GOOD_FILES}: docker run --ulimit nofile={_GOOD_FILES}, or limits.conf"
    seen = f"up to {found.open_files}: a node with many workers needs more"
    return [warning("open files", seen, do)]


def judge_tasks(found: Limits) -> list[Finding]:
    """Where there can be no more threads, workers fail in odd places."""
    if found.tasks is None:
        return [ok("processes", "no limit")]
    seen = f"{found.tasks_now} of {found.tasks} processes and threads in use"
    need = max(_FEW_TASKS, _TASKS_PER_CPU * found.cpus)
    if found.tasks - found.tasks_now < need:
        do = "raise ulimit -u; in a container docker run --pids-limit, or podPidsLimit of the kubelet"
        return [warning("processes", f"{seen}: Ray on {plural(found.cpus, 'CPU')} may need {need} more", do)]
    return [ok("processes", seen)]


def judge_ports(found: Ports) -> list[Finding]:
    """Whether there are ports to lease, and whether others help themselves to them."""
    leases = lease_range(found.ephemeral)
    free = len(leases) - sum(port in leases for port in found.used)
    first, last = found.ephemeral
    seen = f"{free} of {len(leases)} free to lease, {leases.start}-{leases.stop - 1}"
    if first <= leases.stop - 1 and leases.start <= last:
        return [
            warning(
                "ports",
                f"{seen}; the kernel hands out {first}-{last} by itself, and may take a port that was leased",
                "sysctl -w net.ipv4.ip_local_port_range='32768 60999', or give Cluster a port_range outside it",
            )
        ]
    if free < _FEW_PORTS:
        return [warning("ports", f"only {seen}", "see who has them with `ss -ltn`, or give Cluster a port_range")]
    if leases.start < _RAY_WORKER_PORTS.stop and _RAY_WORKER_PORTS.start < leases.stop:
        shared = f"{_RAY_WORKER_PORTS.start}-{_RAY_WORKER_PORTS.stop - 1}"
        return [
            note(
                "ports",
                f"{seen}; Ray's workers take theirs from {shared}, unless the node was started otherwise",
                f"give Cluster a port_range outside both, or ray start --max-worker-port={leases.start - 1}",
            )
        ]
    return [ok("ports", seen)]


def judge_head_ports(found: Ports) -> list[Finding]:
    """Where no cluster runs, whether a head could start on the usual ports."""
    taken = [port for port in _HEAD_PORTS if port in found.used]
    if not taken:
        return []
    flags = join_words([f"{_HEAD_PORTS[port]}=PORT" for port in taken])
    verb = "is" if len(taken) == 1 else "are"
    seen = f"{join_words(taken)}, which `ray start --head` wants, {verb} in use"
    return [note("ports", seen, f"give the head another with {flags}, or end what has it: ss -ltnp")]


def judge_host_name(found: HostName) -> list[Finding]:
    """Other machines, and gloo, look for this one by its name."""
    if not found.addresses:
        do = f"add a line with this machine's address and {found.name} to /etc/hosts"
        return [warning("host name", f"{found.name} leads nowhere: {found.error or 'no address'}", do)]
    seen = f"{found.name} is {join_words(found.addresses)}"
    if all(is_loopback(address) for address in found.addresses):
        return [
            note(
                "host name",
                f"{seen}, which is this machine for itself only",
                "for a cluster of several machines give it its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
            )
        ]
    return [ok("host name", seen)]


def judge_proxies(found: Mapping[str, str], hosts: Sequence[str]) -> list[Finding]:
    """A proxy between the nodes of a cluster does not know them."""
    proxies = [
        f"{name}={_without_password(found[name])}" for name in found if name.endswith("_proxy") and name[0] != "n"
    ]
    if not proxies:
        return [ok("proxies", "none")]
    bypass = found.get("no_proxy", "")
    wanted = ["localhost", "127.0.0.1", *(host for host in hosts if not is_loopback(host))]
    missing = [host for host in dict.fromkeys(wanted) if not bypasses(bypass, host)]
    if missing:
        full = ",".join([*([bypass] if bypass else []), *missing[:_MOST_LINES]])
        return [
            warning(
                "proxies",
                f"{join_words(proxies)}, also for {join_words(missing)}: calls to engines and routers go astray",
                f"export no_proxy={full} where nodes and drivers are started",
            )
        ]
    return [ok("proxies", f"{join_words(proxies)}, not for {join_words(wanted)}")]


def judge_leftovers(facts: MachineFacts) -> list[Finding]:
    """Processes of Ray whose head is gone, and of jobs whose cluster is gone."""
    findings = []
    lost = [] if isinstance(facts.ray_processes, Unseen) else [item for item in facts.ray_processes if not item.belongs]
    heads = dict.fromkeys(item.head for item in lost)
    for head in heads:
        mine = [item for item in lost if item.head == head]
        names = join_words(sorted({item.name for item in mine}))
        why = f"the head at {head} does not answer" if head else "their raylet is gone"
        findings.append(
            warning(
                "leftovers",
                f"{plural(len(mine), 'process', 'processes')} of Ray ({names}): {why}",
                f"they end within a minute or so; if not: kill {_pids([item.pid for item in mine])}",
            )
        )
    marked = () if isinstance(facts.marked, Unseen) else facts.marked
    orphans = [item for item in marked if not item.head_answers]
    if orphans:
        findings.append(
            warning(
                "leftovers",
                f"{plural(len(orphans), 'process', 'processes')} of jobs whose cluster is gone, such as "
                f"pid {orphans[0].pid}, {orphans[0].command}",
                f"kill {_pids([item.pid for item in orphans])}",
            )
        )
    return findings or [ok("leftovers", "no process of an earlier run")]


def judge_practice(found: Practice | None) -> list[Finding]:
    """A practice cluster stays until somebody ends it."""
    if found is None:
        return [ok("practice cluster", "none is up")]
    seen = f"{found.spec} is up at {found.address} for {_age(found.seconds)}"
    return [note("practice cluster", seen, "roost down, when you are done with it")]


def judge_heaps(found: Sequence[Any]) -> list[Finding]:
    """Nobody else removes these."""
    there = [heap for heap in found if heap.count]
    if not there:
        return [ok("old files", "none")]
    big = [heap for heap in there if heap.size >= _BIG_HEAP]
    text = join_words([f"{heap.count} {heap.what}, {size_text(heap.size)}" for heap in big or there])
    if big:
        do = join_words(
            [f"remove those that you do not need of {heap.folder}/{heap.pattern}" for heap in big], last="and"
        )
        return [note("old files", text, do)]
    return [ok("old files", text)]


def fold(by_node: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """The findings of several nodes as few: a check that is fine everywhere in one line, what is alike in one line."""
    out: list[Finding] = []
    for check in dict.fromkeys(item.check for _, findings in by_node for item in findings):
        found = [replace(item, nodes=(node,)) for node, items in by_node for item in items if item.check == check]
        odd = [item for item in found if item.level != Level.OK]
        texts = {item.seen for item in found}
        where = f"fine on {plural(len({item.nodes for item in found}), 'node')}"
        out += fold_alike(odd) or [ok(check, texts.pop() if len(texts) == 1 else where)]
    return out


def fold_alike(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ only in their nodes, as one each."""
    nodes: dict[Finding, list[str]] = {}
    for item in findings:
        nodes.setdefault(replace(item, nodes=()), []).extend(item.nodes)
    return [replace(item, nodes=tuple(names)) for item, names in nodes.items()]


def is_loopback(address: str) -> bool:
    """Whether an address leads to the machine that uses it.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.2"), is_loopback("localhost")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def bypasses(no_proxy: str, host: str) -> bool:
    """Whether a host is reached without the proxy: it is named, or its domain, or its network, or all are.

    >>> bypasses("localhost,.lab,10.0.0.0/8", "10.1.2.3"), bypasses(".lab", "node1.lab"), bypasses("lab", "slab")
    (True, True, False)
    """
    for word in (part.strip() for part in no_proxy.split(",")):
        if word in ("*", host):
            return True
        if word and host.endswith(f".{word.lstrip('.')}"):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:
            continue
    return False


def _devices_text(devices: Sequence[Device]) -> str:
    models: dict[str, list[Device]] = {}
    for device in devices:
        models.setdefault(device.model, []).append(device)
    texts = []
    for model, found in models.items():
        memory = found[0].memory
        used = sum(device.memory_used or 0 for device in found)
        each = "" if memory is None else f" of {size_text(memory)}, {size_text(used)} in use"
        texts.append(f"{len(found)} x {model}{each}")
    return ", ".join(texts)


def _without_password(url: str) -> str:
    """A proxy's address without who may use it."""
    scheme, slashes, rest = url.rpartition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


def _pids(pids: Sequence[int]) -> str:
    return " ".join(map(str, pids[:32])) + (" …" if len(pids) > 32 else "")


def _age(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            return plural(int(seconds // size), unit)
    return plural(int(seconds), "second")


def _used(space: Space) -> float:
    return 1 - space.free / space.total if space.total else 0.0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
