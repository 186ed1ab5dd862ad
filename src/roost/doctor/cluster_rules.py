"""From facts about a Ray cluster to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from roost.config.hardware import accelerator_types
from roost.doctor.facts import (
    ClusterFacts,
    Devices,
    Finding,
    JobFacts,
    MachineFacts,
    MarkedProcess,
    NodeFacts,
    Silent,
    Software,
    Unseen,
    note,
    ok,
    problem,
    warning,
)
from roost.doctor.machine_rules import (
    fold,
    fold_alike,
    is_loopback,
    judge,
    judge_machine,
    judge_open_files,
    judge_tasks,
)
from roost.text import join_words, plural, size_text

_CLOCK_WARNING = 1.0
_CLOCK_PROBLEM = 5.0
_SHM = "/dev/shm"  # noqa: S108 - where an object store is quick
# Judged by comparing the nodes, or a matter of the driver alone.
_NOT_ON_NODES = {"python", "ray", "visible devices"}


def judge_cluster(facts: ClusterFacts) -> list[Finding]:
    """All that there is to say of a cluster."""
    nodes = facts.nodes
    if not nodes:
        # Of nodes that do not answer nothing is known, and so nothing is fine.
        return judge_nodes(facts)
    return [
        *judge_nodes(facts),
        *judge("versions", facts.driver.software, lambda found: judge_versions(found, nodes)),
        *judge_clocks(nodes),
        *judge("run folder", facts.run_folder, lambda found: judge_run_folder(found, facts.driver.machine, nodes)),
        *judge_addresses(facts.driver.machine, nodes),
        *judge_accelerators(nodes),
        *judge_object_stores(nodes),
        *judge_limits(nodes),
        *judge_other_machines(facts),
        *judge("jobs", facts.jobs, lambda found: judge_jobs(found, nodes)),
        *judge("leftovers", facts.jobs, lambda _: judge_job_leftovers(facts.address, facts.marks, nodes)),
    ]


def judge_nodes(facts: ClusterFacts) -> list[Finding]:
    """Who is there, who does not answer, who went."""
    there = len(facts.nodes) + len(facts.silent)
    counts: dict[str, float] = {}
    for node in facts.nodes:
        for resource in _resources():
            counts[resource] = counts.get(resource, 0) + node.resources.get(resource, 0)
    has = [f"{count:g} {resource}" for resource, count in counts.items() if count] or ["no accelerators"]
    findings = [_silence(item) for item in facts.silent]
    if not findings:
        findings = [ok("nodes", f"{plural(there, 'node')}, {join_words(has)}; all answer")]
    if facts.gone:
        do = "if they should be there, look at them and run `ray start --address=…` there again"
        gone = facts.gone
        findings.append(note("nodes", f"{plural(len(gone), 'node')} left the cluster: {join_words(gone)}", do))
    return findings


def judge_versions(driver: Software, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Driver and nodes must have the same Python, Ray and Roost; nodes the same of what workers import."""
    findings = []
    software = {node.name: node.look.machine.software for node in nodes}
    known = {name: item for name, item in software.items() if isinstance(item, Software)}
    for name, item in known.items():
        if item.python != driver.python:
            same_minor = item.python.split(".")[:2] == driver.python.split(".")[:2]
            level = warning if same_minor else problem
            do = "use one Python for the driver and all nodes: what is sent between them is pickled"
            findings.append(level("versions", f"Python {item.python}, and {driver.python} here", do, (name,)))
        for package in ("ray", "roost"):
            mine, theirs = driver.packages.get(package), item.packages.get(package)
            if mine != theirs:
                seen = f"{package} {theirs or 'is not installed as a package'}, and {mine or 'not as one'} here"
                ways = [f"{package}=={it} {where}" for it, where in ((mine, "there"), (theirs, "here")) if it]
                do = f"pip install {', or '.join(ways)}, and start the node again"
                level = problem if package == "ray" else warning
                findings.append(level("versions", seen, do, (name,)))
    findings = fold_alike(findings)
    others = {package for item in known.values() for package in item.packages} - {"ray", "roost"}
    for package in sorted(others):
        versions: dict[str, list[str]] = {}
        for name, item in known.items():
            versions.setdefault(item.packages.get(package, "missing"), []).append(name)
        if len(versions) > 1:
            seen = "; ".join(f"{package} {version} on {join_words(where)}" for version, where in versions.items())
            # Nodes that only run environments need no torch.
            level = note if len(set(versions) - {"missing"}) == 1 else warning
            findings.append(level("versions", seen, f"install one {package} where workers that use it run"))
    unknown = tuple(name for name in software if name not in known)
    if unknown:
        findings.append(note("versions", "could not be looked at", nodes=unknown))
    if findings:
        return findings
    return [ok("versions", f"Python {driver.python} and Ray {driver.packages.get('ray')} here and on all nodes")]


def judge_clocks(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Timestamps of logs, tokens and leases need clocks that agree; only what is sure counts."""
    findings = []
    furthest = 0.0
    for node in nodes:
        if isinstance(node.clock, Unseen):
            findings.append(note("clock", f"could not be looked at: {node.clock.why}", nodes=(node.name,)))
            continue
        surely = max(0.0, abs(node.clock.ahead) - node.clock.error)
        furthest = max(furthest, abs(node.clock.ahead))
        if surely > _CLOCK_WARNING:
            way = "ahead of" if node.clock.ahead > 0 else "behind"
            seen = f"{abs(node.clock.ahead):.1f} s {way} this machine (± {node.clock.error:.1f} s)"
            level = problem if surely > _CLOCK_PROBLEM else warning
            findings.append(
                level("clock", seen, "let chrony or ntpd set the clock there: see `chronyc tracking`", (node.name,))
            )
    if findings or not nodes:
        return findings
    return [ok("clock", f"within {max(furthest, 0.01):.2f} s of this machine on {plural(len(nodes), 'node')}")]


def judge_run_folder(folder: str, here: str, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Whether what a worker writes to the run folder is in the driver's run folder."""
    others = [node for node in nodes if node.look.machine.machine != here]
    blind = tuple(node.name for node in nodes if not node.look.sees_folder)
    if not blind:
        where = "all nodes see it" if others else "all nodes are on this machine"
        return [ok("run folder", f"{folder}: {where}")]
    return [
        note(
            "run folder",
            f"{folder} is not shared: logs are fetched, but what workers write there stays on their node",
            "for checkpoints use a shared file system: set ROOST_RUNS_DIR or run_dir to a folder on it, "
            "and check it with roost doctor --run-dir",
            blind,
        )
    ]


def judge_addresses(here: str, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Nodes must be reached by their addresses, each by its own."""
    findings = []
    machines = {here, *(node.look.machine.machine for node in nodes)}
    by_address: dict[str, list[str]] = {}
    for node in nodes:
        by_address.setdefault(node.address, []).append(node.name)
        if len(machines) > 1 and is_loopback(node.address):
            do = "start it with ray start --node-ip-address=ADDRESS, one that the other machines reach"
            seen = f"Ray took {node.address} for it, which other machines cannot reach"
            findings.append(problem("addresses", seen, do, (node.name,)))
    for address, names in by_address.items():
        if len(names) > 1:
            seen = f"{len(names)} nodes have the address {address}: was `ray start` run there twice?"
            do = "ray stop there, then start one node for each machine: both count the same accelerators"
            findings.append(warning("addresses", seen, do, tuple(names)))
    return findings or [ok("addresses", "each node has its own")]


def judge_accelerators(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """What Ray counts beside what the machines show."""
    findings = []
    fine: list[str] = []
    for group in _by_machine(nodes):
        names = tuple(node.name for node in group)
        refused = [node for node in group if node.look.accelerator_problem is not None]
        for node in refused:
            seen, do = node.look.accelerator_problem or ("", "")
            findings.append(problem("accelerators", seen, do, (node.name,)))
        devices = group[0].look.machine.devices
        if isinstance(devices, Unseen):
            findings.append(note("accelerators", f"could not be looked at: {devices.why}", nodes=names))
            continue
        if refused:
            continue
        odd = [item for resource in _resources() for item in _compare(resource, group, devices, names)]
        findings += odd
        if not odd:
            fine += [f"{count:g} {name}" for name, count in _counts(group).items() if count]
    findings = fold_alike(findings)
    if findings:
        return findings
    return [ok("accelerators", f"Ray counts what the machines show: {join_words(fine) or 'none'}")]


def judge_object_stores(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """An object store that is not in shared memory is slow."""
    findings = []
    sizes = []
    for node in nodes:
        raylet = node.look.raylet
        if isinstance(raylet, Unseen):
            findings.append(note("object store", f"could not be looked at: {raylet.why}", nodes=(node.name,)))
        elif raylet.object_store_folder != _SHM:
            seen = f"{size_text(raylet.object_store)} in {raylet.object_store_folder}, and not in {_SHM}: it is slow"
            do = f"make {_SHM} larger (docker run --shm-size), or start the node with a smaller --object-store-memory"
            findings.append(warning("object store", seen, do, (node.name,)))
        else:
            sizes.append(raylet.object_store)
    if findings or not sizes:
        return fold_alike(findings)
    least, most = size_text(min(sizes)), size_text(max(sizes))
    each = least if least == most else f"{least} to {most}"
    return [ok("object store", f"{each} on each node, in {_SHM}")]


def judge_limits(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """What the processes of each node may have: it hangs on the shell or service that started the node."""
    return fold(
        [
            (
                node.name,
                [
                    *judge("open files", node.look.machine.limits, judge_open_files),
                    *judge("processes", node.look.machine.limits, judge_tasks),
                ],
            )
            for node in nodes
        ]
    )


def judge_other_machines(facts: ClusterFacts) -> list[Finding]:
    """The checks of a machine, on each that is not the driver's own."""
    hosts = [node.address for node in facts.nodes]
    skipped = {*_NOT_ON_NODES, "open files", "processes"}
    judged = []
    for group in _by_machine(facts.nodes):
        machine = group[0].look.machine
        if machine.machine != facts.driver.machine:
            found = judge_machine(machine, hosts=hosts)
            judged.append((group[0].name, [item for item in found if item.check not in skipped]))
    return fold(judged)


def judge_jobs(jobs: Sequence[JobFacts], nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Managers that died, hang, or were left without a driver."""
    findings = []
    hosts = {node.look.host for node in nodes}
    alive = {(node.look.host, pid) for node in nodes for pid in node.look.drivers}
    for job in jobs:
        if job.missing:
            do = "close the job's Cluster and start it anew"
            findings.append(warning("jobs", f"{join_words(job.missing)} of job {job.namespace!r} died", do))
        elif job.pid is None:
            do = "look again; if it stays so, end the job's driver: `roost status` shows who it is"
            findings.append(warning("jobs", f"the NodeManager of job {job.namespace!r} does not answer", do))
        elif job.host in hosts and (job.host, job.pid) not in alive:
            do = "Ray ends them within a minute; if they stay, kill the actors' processes on node 0"
            seen = (
                f"the driver of job {job.namespace!r}, pid {job.pid} on {job.host}, is gone, and its managers are not"
            )
            findings.append(warning("jobs", seen, do))
    if findings:
        return findings
    return [ok("jobs", join_words([repr(job.namespace) for job in jobs]) or "none of Roost")]


def judge_job_leftovers(address: str, alive: Sequence[str], nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Processes of jobs of this cluster that have ended; `alive` is what the marks of the others begin with."""
    findings = []
    for group in _by_machine(nodes):
        marked = group[0].look.machine.marked
        if isinstance(marked, Unseen):
            continue
        left = left_over(marked, address, alive)
        if left:
            such = f"pid {left[0].pid}, {left[0].command}"
            seen = f"{plural(len(left), 'process', 'processes')} of jobs that have ended, such as {such}"
            pids = " ".join(str(item.pid) for item in left[:32])
            findings.append(warning("leftovers", seen, f"kill {pids}, there", (group[0].name,)))
    return findings or [ok("leftovers", "no process of a job that has ended")]


def left_over(marked: Iterable[MarkedProcess], address: str, alive: Sequence[str]) -> list[MarkedProcess]:
    """Those whose mark is of this cluster and of no job that is alive."""
    return [item for item in marked if item.head == address and not item.job.startswith(tuple(alive))]


def _silence(item: Silent) -> Finding:
    return problem("nodes", f"did not answer: {item.why}", item.do, (item.name,))


def _resources() -> list[str]:
    return list(dict.fromkeys(entry.resource for entry in accelerator_types().values()))


def _by_machine(nodes: Sequence[NodeFacts]) -> list[list[NodeFacts]]:
    found: dict[str, list[NodeFacts]] = {}
    for node in nodes:
        found.setdefault(node.look.machine.machine, []).append(node)
    return list(found.values())


def _counts(group: Sequence[NodeFacts]) -> dict[str, float]:
    return {name: sum(node.resources.get(name, 0) for node in group) for name in _resources()}


def _compare(resource: str, group: Sequence[NodeFacts], devices: Devices, names: tuple[str, ...]) -> list[Finding]:
    """What Ray counts of one resource on a machine, beside what the machine shows."""
    ray = _counts(group)[resource]
    shown = devices.by_resource.get(resource, 0)
    if ray == shown:
        return []
    if not shown:
        seen = f"Ray counts {ray:g} {resource}, and the machine shows none"
        names = tuple(node.name for node in group if node.resources.get(resource))
        return [note("accelerators", seen, "as on a practice cluster; else start the node without --num-gpus", names)]
    seen = f"Ray counts {ray:g} {resource}, and the machine shows {shown}"
    if ray > shown:
        do = "start the node with a --num-gpus that is true: workers on the others would fail"
        return [warning("accelerators", seen, do, names)]
    machine = group[0].look.machine
    variables = _visible(machine, resource)
    if variables:
        settings = join_words([f"{name}={value}" for name, value in variables.items()])
        do = f"it was started with {settings}: unset that there"
    else:
        do = "it was started with --num-gpus, or before the devices were there"
    return [warning("accelerators", f"{seen}: nobody can use the rest", f"{do}, and start the node again", names)]


def _visible(machine: MachineFacts, resource: str) -> Mapping[str, str]:
    environment = {} if isinstance(machine.environment, Unseen) else machine.environment
    variables = {entry.variable for entry in accelerator_types().values() if entry.resource == resource}
    return {name: value for name, value in environment.items() if name in variables}
