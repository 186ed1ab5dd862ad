"""From facts about a machine to findings. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from roost.config.hardware import accelerator_types
from roost.doctor.facts import ENGINES, PROXY_VARIABLES, HomeFacts, HostName, MachineFacts, OwnedProcess, Unknown
from roost.doctor.findings import Finding, Findings, Rule, judge, note, ok, problem, warning
from roost.errors import ClusterError
from roost.machine.allowances import Limits
from roost.machine.devices import Device, Devices
from roost.machine.disks import OldFiles, Space
from roost.machine.ports import Ports, lease_range
from roost.machine.probe import Software
from roost.runtime.connect.local_cluster import LocalClusterRecord
from roost.runtime.connect.versions import OLDEST_RAY, check_ray_version
from roost.text import join_words, plural, size_text

_GIB = 2**30
# Ray kills workers when more than this part of the memory is used, and stops spilling objects to a disk that full.
_FULL = 0.95
_NEARLY_FULL = 0.90
_LITTLE_DISK = 2 * _GIB
# The part of the memory that Ray takes for its object store by default, and the size beyond which it does not complain.
_STORE_PART = 0.3
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
_MANY_BYTES = 1 * _GIB
_MAX_LINES = 8
_MAX_PIDS = 32


def judge_machine(facts: MachineFacts, *, hosts: Sequence[str] = ()) -> list[Finding]:
    """Return all findings about one machine; `hosts` are the machines that its processes talk to."""
    devices = Devices() if isinstance(facts.devices, Unknown) else facts.devices
    judged: list[tuple[str, Any, Rule]] = [
        ("python", facts.software, judge_python),
        ("ray", facts.software, judge_ray),
        ("packages", facts.software, lambda found: judge_packages(found, devices)),
        ("engines", facts.software, judge_engines),
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
        ("leftovers", facts.ray_processes, lambda found: judge_leftovers(found, facts.marked)),
    ]
    return [item for name, fact, rule in judged for item in judge(name, fact, rule)]


def judge_home(facts: HomeFacts) -> list[Finding]:
    """Return all findings about what is kept for a user."""
    return [
        *judge("local cluster", facts.local_cluster, lambda found: judge_local_cluster(found, facts.now)),
        *judge("old files", facts.old_files, judge_old_files),
    ]


def judge_python(found: Software) -> Finding:
    """Roost needs 3.11."""
    seen = f"{found.python}, {found.interpreter}"
    if tuple(int(part) for part in found.python.split(".")[:2]) < (3, 11):
        return problem("python", seen, "install Python 3.11 or newer: Roost does not run on older ones")
    return ok("python", seen)


def judge_ray(found: Software) -> Finding:
    """Ray must be installed and not too old."""
    version = found.packages.get("ray")
    if version is None:
        return problem("ray", "not installed", f"pip install 'ray>={OLDEST_RAY}', on every node of the cluster")
    try:
        check_ray_version(version)
        return ok("ray", version)
    except ClusterError as error:
        return problem("ray", error.problems[0].message, error.problems[0].hint)


def judge_packages(found: Software, devices: Devices) -> Finding:
    """The installed torch must be able to use the accelerators of the machine."""
    torch = found.packages.get("torch", "")
    if devices.nvidia and torch.endswith("+cpu"):
        seen = f"torch {torch} is a build for CPUs, and this machine has {_devices_text(devices.nvidia)}"
        return warning("packages", seen, "install a build of torch for CUDA")
    elsewhere = {"ray", *(name for names in ENGINES.values() for name in names)}
    others = [f"{name} {version}" for name, version in found.packages.items() if name not in elsewhere]
    return ok("packages", ", ".join(others) or "none")


def judge_engines(found: Software) -> Finding:
    """Which engines are there: it depends on the job whether one is missing, and an engine may have its own Python."""
    names = [name for engine in ENGINES.values() for name in engine if name in found.packages]
    missing = [package for package, engine in ENGINES.items() if not {*engine} & {*names}]
    texts = [f"{name} {found.packages[name]}" for name in names]
    texts += [f"no {join_words(missing, last='or')}"] if missing else []
    return ok("engines", ", ".join(texts))


def judge_devices(found: Devices) -> Findings:
    """The driver must work, and no process outside Ray should use the accelerators."""
    texts = [_devices_text(found.nvidia)] if found.nvidia else []
    texts += [f"{count} of {vendor}" for vendor, count in (("AMD", found.amd), ("Ascend", found.ascend)) if count]
    is_broken = found.nvidia_files and not found.nvidia
    is_hidden = found.nvidia_installed > len(found.nvidia)
    if texts or not (is_broken or is_hidden):
        yield ok("accelerators", ", ".join(texts) or "none on this machine")
    if is_broken:
        files, why = plural(found.nvidia_files, "NVIDIA device"), found.nvidia_error or "it shows none"
        do = "see what nvidia-smi says; after an update of the driver, reload it or restart the machine"
        yield problem("accelerators", f"{files} in /dev, but the driver's library does not answer: {why}", do)
    elif is_hidden:
        has = f"the machine has {plural(found.nvidia_installed, 'NVIDIA device')}"
        do = "if this is a container that should have them: docker run --gpus all, or nvidia.com/gpu in the pod"
        yield note("accelerators", f"{has}, and {len(found.nvidia) or 'none'} visible here", do)
    strangers = [(device, user) for device in found.nvidia for user in device.users if not user.of_ray]
    for device, user in strangers[:_MAX_LINES]:
        memory = "" if user.memory is None else f" with {size_text(user.memory)}"
        who = f": {user.user}, {user.command}" if user.command else ", which is not visible here"
        seen = f"accelerator {device.index} is used by pid {user.pid}{memory}, not of Ray{who}"
        do = f"end it if it is yours (kill {user.pid})" if user.command else "look for it outside this container"
        yield warning("accelerators", seen, f"{do}: Ray does not know of it and places workers there")
    if len(strangers) > _MAX_LINES:
        more = f"{len(strangers) - _MAX_LINES} more processes that are not of Ray use accelerators"
        yield warning("accelerators", more, "nvidia-smi lists them all")


def judge_visible_devices(found: Mapping[str, str], devices: Devices) -> Findings:
    """A variable may hide accelerators from programs that are started here."""
    count = len(devices.nvidia)
    for kind, entry in accelerator_types().items():
        if (value := found.get(entry.variable)) is None:
            continue
        named = entry.devices(value)
        wrong = [word for word in named if word.isdigit() and int(word) >= count]
        if kind == "nvidia" and count and wrong:
            there = f"are 0-{count - 1}" if count > 1 else "is only 0"
            seen = f"{entry.variable}={value} names {join_words(wrong)}, and there {there}"
            yield warning("visible devices", seen, f"unset {entry.variable}")
        else:
            hidden = f"shows {plural(len(named), 'accelerator')}" if named else "hides all accelerators"
            seen = f"{entry.variable}={value!r} {hidden} to programs started here, such as `ray start`"
            do = f"unset {entry.variable} unless you mean it; Roost sets it for its workers"
            yield note("visible devices", seen, do)
    if not any(entry.variable in found for entry in accelerator_types().values()):
        yield ok("visible devices", "no variable hides any")


def judge_memory(found: Space) -> Finding:
    """Ray kills workers where memory runs out."""
    do = "end what uses it: over 95 % Ray kills workers, the newest first"
    return _judge_space("memory", found, f"{size_text(found.free)} of {size_text(found.total)} free", do)


def judge_shm(found: Space, memory: Space | Unknown) -> Finding:
    """Ray's object store needs shared memory, and is slow elsewhere."""
    wanted = 0 if isinstance(memory, Unknown) else int(min(memory.total * _STORE_PART, _ENOUGH_SHM))
    seen = f"{size_text(found.free)} of {size_text(found.total)} free in {found.path}"
    if found.total < wanted:
        seen = f"{found.path} has {size_text(found.total)}, and Ray's object store wants {size_text(wanted)}"
        do = f"docker run --shm-size={wanted // _GIB + 1}g; in a pod an emptyDir of medium Memory at {found.path}"
        return warning("shared memory", seen, do)
    if found.used >= _NEARLY_FULL:
        do = f"list it with `ls -l {found.path}`, and remove what programs that ended left there"
        return warning("shared memory", f"{seen}, {found.used:.0%} used", do)
    return ok("shared memory", seen)


def judge_disks(found: Sequence[Space]) -> Findings:
    """A full disk stops Ray."""
    for space in found:
        seen = f"{size_text(space.free)} of {size_text(space.total)} free at {space.path} ({join_words(space.uses)})"
        do = f"make room below {space.path}: over 95 % Ray writes no more objects to disk, and tasks fail"
        yield _judge_space("disk", space, seen, do, little=_LITTLE_DISK)


def _judge_space(check: str, space: Space, seen: str, do: str, little: int = 0) -> Finding:
    if space.used < _NEARLY_FULL and space.free >= little:
        return ok(check, seen)
    level = problem if space.used >= _FULL else warning
    return level(check, f"{seen}, {space.used:.0%} used", do)


def judge_open_files(found: Limits) -> Finding:
    """Each worker and each connection needs some."""
    if found.open_files is None or found.open_files >= _FEW_FILES:
        return ok("open files", "no limit" if found.open_files is None else f"up to {found.open_files}")
    if found.max_open_files is None or found.max_open_files >= _FEW_FILES:
        limit = min(_GOOD_FILES, found.max_open_files or _GOOD_FILES)
        do = f"ulimit -n {limit} in the shell that runs `ray start`, or LimitNOFILE of its service"
    else:
        do = f"raise the limit to {_GOOD_FILES}: docker run --ulimit nofile={_GOOD_FILES}, or limits.conf"
    return warning("open files", f"up to {found.open_files}: a node with many workers needs more", do)


def judge_tasks(found: Limits) -> Finding:
    """Without room for more threads, workers fail in odd places."""
    if found.tasks is None:
        return ok("processes", "no limit")
    seen = f"{found.tasks_now} of {found.tasks} processes and threads in use"
    need = max(_FEW_TASKS, _TASKS_PER_CPU * found.cpus)
    if found.tasks - found.tasks_now < need:
        do = "raise ulimit -u; in a container docker run --pids-limit, or podPidsLimit of the kubelet"
        return warning("processes", f"{seen}: Ray on {plural(found.cpus, 'CPU')} may need {need} more", do)
    return ok("processes", seen)


def judge_ports(found: Ports) -> Finding:
    """There must be ports to lease that neither the kernel nor Ray gives to others."""
    leases = lease_range(found.ephemeral)
    free = len(leases) - sum(port in leases for port in found.used)
    first, last = found.ephemeral
    seen = f"{free} of {len(leases)} free to lease, {leases.start}-{leases.stop - 1}"
    if first < leases.stop and leases.start <= last:
        seen += f"; the kernel gives {first}-{last} to outgoing connections, and may take a port that was leased"
        do = "sysctl -w net.ipv4.ip_local_port_range='32768 60999', or give Cluster a port_range outside it"
        return warning("ports", seen, do)
    if free < _FEW_PORTS:
        return warning("ports", f"only {seen}", "see what uses them with `ss -ltn`, or give Cluster a port_range")
    if leases.start < _RAY_WORKER_PORTS.stop and _RAY_WORKER_PORTS.start < leases.stop:
        ray = f"{_RAY_WORKER_PORTS.start}-{_RAY_WORKER_PORTS.stop - 1}"
        seen += f"; Ray's workers take theirs from {ray}, unless the node was started otherwise"
        do = f"give Cluster a port_range outside both, or ray start --max-worker-port={leases.start - 1}"
        return note("ports", seen, do)
    return ok("ports", seen)


def judge_head_ports(found: Ports) -> Findings:
    """Where no cluster runs, a head should be able to start on the usual ports."""
    taken = [port for port in _HEAD_PORTS if port in found.used]
    if taken:
        flags = join_words([f"{_HEAD_PORTS[port]}=PORT" for port in taken])
        verb = "is" if len(taken) == 1 else "are"
        seen = f"{join_words(taken)}, which `ray start --head` wants, {verb} in use"
        yield note("ports", seen, f"give the head another with {flags}, or end the process that has it: ss -ltnp")


def judge_host_name(found: HostName) -> Finding:
    """Other machines, and gloo, find this one by its name."""
    seen = f"{found.name} is {join_words(found.addresses)}"
    if not found.addresses:
        do = f"add a line with this machine's address and {found.name} to /etc/hosts"
        return warning("host name", f"{found.name} does not resolve: {found.error or 'no address'}", do)
    if all(is_loopback(address) for address in found.addresses):
        do = "for a cluster of several machines give it its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return note("host name", f"{seen}, which other machines cannot reach", do)
    return ok("host name", seen)


def judge_proxies(found: Mapping[str, str], hosts: Sequence[str]) -> Finding:
    """A proxy must not come between the nodes of a cluster, which it does not know."""
    settings = [f"{name}={found[name]}" for name in PROXY_VARIABLES[:-1] if name in found]
    proxies = [re.sub(r"=(.*://)?.*@", r"=\1", text) for text in settings]  # without user and password
    bypass = found.get("no_proxy", "")
    wanted = ["localhost", "127.0.0.1", *(host for host in hosts if not is_loopback(host))]
    missing = [host for host in dict.fromkeys(wanted) if not bypasses(bypass, host)]
    if not proxies:
        return ok("proxies", "none")
    if missing:
        seen = f"{join_words(proxies)}, also for {join_words(missing)}: calls to engines and routers fail"
        full = ",".join([*([bypass] if bypass else []), *missing[:_MAX_LINES]])
        return warning("proxies", seen, f"export no_proxy={full} where nodes and drivers are started")
    return ok("proxies", f"{join_words(proxies)}, not for {join_words(wanted)}")


def judge_leftovers(ray: Sequence[OwnedProcess], marked: Sequence[OwnedProcess] | Unknown) -> Findings:
    """Processes of Ray without their head, and of jobs without their cluster, still hold memory and ports."""
    lost = [item for item in ray if not item.has_owner]
    for head in dict.fromkeys(item.owner for item in lost):
        own = [item for item in lost if item.owner == head]
        names = join_words(sorted({item.name for item in own}))
        why = f"the head at {head} does not answer" if head else "their raylet is gone"
        seen = f"{plural(len(own), 'process', 'processes')} of Ray ({names}): {why}"
        yield warning("leftovers", seen, f"they end within a minute or so; if not: {kill_text(own)}")
    orphans = [] if isinstance(marked, Unknown) else [item for item in marked if not item.has_owner]
    if orphans:
        seen = f"{plural(len(orphans), 'process', 'processes')} of jobs whose cluster is gone, such as "
        yield warning("leftovers", f"{seen}pid {orphans[0].pid}, {orphans[0].name}", kill_text(orphans))
    if not lost and not orphans:
        yield ok("leftovers", "no process of an earlier run")


def judge_local_cluster(found: LocalClusterRecord | None, now: float) -> Finding:
    """A local cluster stays until `roost down`."""
    if found is None:
        return ok("local cluster", "none is up")
    seconds = max(0.0, now - found.keeper_started)
    units = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, size = next((item for item in units if seconds >= item[1]), units[-1])
    age = plural(int(seconds // size), unit)
    return note("local cluster", f"{found.spec} is up at {found.address} for {age}", "roost down ends it")


def judge_old_files(found: Sequence[OldFiles]) -> Finding:
    """Nothing removes these but the user."""
    there = [item for item in found if item.count]
    big = [item for item in there if item.size >= _MANY_BYTES]
    seen = join_words([f"{item.count} {item.what}, {size_text(item.size)}" for item in big or there])
    if big:
        do = join_words([f"remove the files that you do not need of {item.folder}/{item.pattern}" for item in big])
        return note("old files", seen, do)
    return ok("old files", seen or "none")


def is_loopback(address: str) -> bool:
    """Return whether an address leads to the machine that uses it.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.2"), is_loopback("localhost")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def bypasses(no_proxy: str, host: str) -> bool:
    """Return whether `no_proxy` names a host, its domain, its network, or everything.

    >>> bypasses("localhost,.lab,10.0.0.0/8", "10.1.2.3"), bypasses(".lab", "node1.lab"), bypasses("lab", "slab")
    (True, True, False)
    """
    for word in (part.strip() for part in no_proxy.split(",")):
        if word in ("*", host) or (word and host.endswith(f".{word.lstrip('.')}")):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:
            continue
    return False


def kill_text(processes: Sequence[OwnedProcess]) -> str:
    """Return the command that ends these processes."""
    pids = " ".join(str(item.pid) for item in processes[:_MAX_PIDS])
    return f"kill {pids}" + (" …" if len(processes) > _MAX_PIDS else "")


def _devices_text(devices: Sequence[Device]) -> str:
    texts = []
    for model in dict.fromkeys(device.model for device in devices):
        found = [device for device in devices if device.model == model]
        memory = found[0].memory
        used = sum(device.memory_used or 0 for device in found)
        each = "" if memory is None else f" of {size_text(memory)}, {size_text(used)} in use"
        texts.append(f"{len(found)} x {model}{each}")
    return ", ".join(texts)
