"""From facts about a Ray cluster to findings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from roost.config.hardware import accelerator_types
from roost.doctor.facts import Clock, ClusterFacts, JobFacts, NodeFacts, RayletFacts, Unknown
from roost.doctor.findings import Finding, Findings, fold, fold_alike, judge, note, ok, problem, warning
from roost.doctor.machine_rules import is_loopback, judge_machine, judge_open_files, judge_tasks, kill_text
from roost.errors import CheckFailed
from roost.machine.devices import Devices
from roost.machine.probe import Software
from roost.runtime.nodes.accelerators import node_accelerators
from roost.text import join_words, plural, size_text

_CLOCK_WARNING = 1.0
_CLOCK_PROBLEM = 5.0
_SHM = "/dev/shm"  # noqa: S108 - where an object store is quick
# Other rules compare these between the nodes, or they concern the driver alone.
_NOT_ON_NODES = {"python", "ray", "visible devices", "open files", "processes"}


def judge_cluster(facts: ClusterFacts) -> list[Finding]:
    """Return all findings about a cluster."""
    nodes, here = facts.nodes, facts.driver.machine
    if not nodes:
        # Nothing is known about nodes that do not answer, so nothing is fine.
        return list(judge_nodes(facts))
    return [
        *judge_nodes(facts),
        *judge("versions", facts.driver.software, lambda found: judge_versions(found, nodes)),
        *judge_clocks(facts.clocks),
        *judge("run folder", facts.run_folder, lambda found: judge_run_folder(found, here, nodes)),
        *judge_addresses(here, nodes),
        *judge_accelerators(nodes),
        *judge_settings(nodes),
        *_judge_other_machines(facts),
        *judge("jobs", facts.jobs, lambda found: judge_jobs(found, nodes)),
        *judge("leftovers", facts.jobs, lambda _: judge_job_leftovers(facts.address, facts.marks, nodes)),
    ]


def judge_nodes(facts: ClusterFacts) -> Findings:
    """Every node must answer."""
    for name, silent in facts.silent:
        do = silent.do or "check the load on the node, and its raylet.out"
        yield problem("nodes", f"did not answer: {silent.why}", do, (name,))
    if not facts.silent:
        has = _counts_text(facts.nodes) or "no accelerators"
        yield ok("nodes", f"{plural(len(facts.nodes), 'node')}, {has}; all answer")
    if facts.gone:
        do = "if they should be there, check them and run `ray start --address=…` there again"
        yield note("nodes", f"{plural(len(facts.gone), 'node')} left the cluster: {join_words(facts.gone)}", do)


def judge_versions(driver: Software, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Driver and nodes must have the same Python, Ray and Roost; the nodes the same versions of what workers import."""
    findings = []
    known = {node.name: node.machine.software for node in nodes if isinstance(node.machine.software, Software)}
    for name, item in known.items():
        if item.python != driver.python:
            level = warning if item.python.split(".")[:2] == driver.python.split(".")[:2] else problem
            do = "use one Python for the driver and all nodes: they exchange pickled objects"
            findings.append(level("versions", f"Python {item.python}, and {driver.python} here", do, (name,)))
        for package, level in (("ray", problem), ("roost", warning)):
            here, there = driver.packages.get(package), item.packages.get(package)
            if here != there:
                seen = f"{package} {there or 'is not installed as a package'}, and {here or 'not as one'} here"
                ways = [f"{package}=={it} {where}" for it, where in ((here, "there"), (there, "here")) if it]
                do = f"pip install {', or '.join(ways)}, and start the node again"
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
    unknown = tuple(node.name for node in nodes if node.name not in known)
    if unknown:
        findings.append(note("versions", "could not be checked", nodes=unknown))
    fine = ok("versions", f"Python {driver.python} and Ray {driver.packages.get('ray')} here and on all nodes")
    return findings or [fine]


def judge_clocks(clocks: Sequence[tuple[str, Clock | Unknown]]) -> list[Finding]:
    """Timestamps of logs, tokens and leases need clocks that agree; the error of a measurement does not count."""

    def rule(node: str, clock: Clock) -> Findings:
        off = abs(clock.ahead) - clock.error
        if off > _CLOCK_WARNING:
            way = "ahead of" if clock.ahead > 0 else "behind"
            seen = f"{abs(clock.ahead):.1f} s {way} this machine (± {clock.error:.1f} s)"
            level = problem if off > _CLOCK_PROBLEM else warning
            yield level("clock", seen, "let chrony or ntpd set the clock there: see `chronyc tracking`", (node,))

    findings = [item for node, clock in clocks for item in judge("clock", clock, partial(rule, node), (node,))]
    furthest = max((abs(clock.ahead) for _, clock in clocks if isinstance(clock, Clock)), default=0.0)
    fine = f"within {max(furthest, 0.01):.2f} s of this machine on {plural(len(clocks), 'node')}"
    return findings or [ok("clock", fine)]


def judge_run_folder(folder: str, here: str, nodes: Sequence[NodeFacts]) -> Finding:
    """The files that a worker writes to the run folder should reach the driver's run folder."""
    blind = tuple(node.name for node in nodes if not node.sees_folder)
    if blind:
        seen = f"{folder} is not shared: logs are fetched, but what workers write there stays on their node"
        do = "for checkpoints use a shared file system: set ROOST_RUNS_DIR or run_dir to a folder on it"
        return note("run folder", seen, f"{do}, and check it with roost doctor --run-dir", blind)
    is_spread = any(node.machine.machine != here for node in nodes)
    return ok("run folder", f"{folder}: all nodes {'see it' if is_spread else 'are on this machine'}")


def judge_addresses(here: str, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Each node needs its own address, which the other machines reach."""
    findings = []
    machines = {here, *(node.machine.machine for node in nodes)}
    by_address: dict[str, list[str]] = {}
    for node in nodes:
        by_address.setdefault(node.address, []).append(node.name)
        if len(machines) > 1 and is_loopback(node.address):
            do = "start it with ray start --node-ip-address=ADDRESS, where ADDRESS is reachable from the other machines"
            seen = f"Ray took {node.address} for it, which other machines cannot reach"
            findings.append(problem("addresses", seen, do, (node.name,)))
    for address, names in by_address.items():
        if len(names) > 1:
            seen = f"{len(names)} nodes have the address {address}: was `ray start` run there twice?"
            do = "ray stop there, then start one node for each machine: both count the same accelerators"
            findings.append(warning("addresses", seen, do, tuple(names)))
    return findings or [ok("addresses", "each node has its own")]


def judge_accelerators(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Ray must count what the machines show, and a Cluster must accept it."""
    findings = []
    fine: list[NodeFacts] = []
    for group in _by_machine(nodes):
        names = tuple(node.name for node in group)
        found: list[Finding] = []
        for node in group:
            try:
                if not isinstance(node.machine.environment, Unknown):
                    node_accelerators(node.resources, node.machine.environment, (), node.name)
            except CheckFailed as error:
                first = error.problems[0]
                found.append(problem("accelerators", first.message, first.hint, (node.name,)))
        devices = group[0].machine.devices
        if isinstance(devices, Unknown) or not found:
            found += judge("accelerators", devices, partial(_compare, group), names)
        findings += found
        fine += [] if found else group
    text = f"Ray counts what the machines show: {_counts_text(fine) or 'none'}"
    return fold_alike(findings) or [ok("accelerators", text)]


def judge_settings(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """The object store and the limits of a node depend on the shell or service that started it."""
    judged = [
        (
            node.name,
            judge("object store", node.raylet, judge_object_store)
            + judge("open files", node.machine.limits, judge_open_files)
            + judge("processes", node.machine.limits, judge_tasks),
        )
        for node in nodes
    ]
    return fold(judged)


def judge_object_store(found: RayletFacts) -> Finding:
    """An object store outside shared memory is slow."""
    seen = f"{size_text(found.object_store)} in {found.object_store_folder}"
    if found.object_store_folder == _SHM:
        return ok("object store", seen)
    do = f"make {_SHM} larger (docker run --shm-size), or start the node with a smaller --object-store-memory"
    return warning("object store", f"{seen}, and not in {_SHM}: it is slow", do)


def _judge_other_machines(facts: ClusterFacts) -> list[Finding]:
    """Apply the rules for a machine to each that is not the driver's own."""
    hosts = [node.address for node in facts.nodes]
    judged = [
        (group[0].name, [item for item in judge_machine(machine, hosts=hosts) if item.check not in _NOT_ON_NODES])
        for group in _by_machine(facts.nodes)
        if (machine := group[0].machine).machine != facts.driver.machine
    ]
    return fold(judged)


def judge_jobs(jobs: Sequence[JobFacts], nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Managers may have died, hang, or lack their driver."""
    findings = []
    hosts = {node.host for node in nodes}
    alive = {(node.host, pid) for node in nodes for pid in node.drivers}
    for job in jobs:
        name, info = f"job {job.namespace!r}", job.info
        if job.missing:
            do = "close the job's Cluster and start it again"
            findings.append(warning("jobs", f"{join_words(job.missing)} of {name} died", do))
        elif info is None:
            do = "run roost doctor again; if it stays so, end the job's driver: `roost status` names it"
            findings.append(warning("jobs", f"the NodeManager of {name} does not answer", do))
        elif info.host in hosts and (info.host, info.pid) not in alive:
            seen = f"the driver of {name}, pid {info.pid} on {info.host}, is gone, and its managers are not"
            do = "Ray ends them within a minute; if they stay, kill the actors' processes on node 0"
            findings.append(warning("jobs", seen, do))
    return findings or [ok("jobs", join_words([repr(job.namespace) for job in jobs]) or "none of Roost")]


def judge_job_leftovers(address: str, alive: Sequence[str], nodes: Sequence[NodeFacts]) -> list[Finding]:
    """No process should outlive its job on this cluster; `alive` is how the marks of living jobs begin."""
    findings = []
    for group in _by_machine(nodes):
        marked = group[0].machine.marked
        ours = () if isinstance(marked, Unknown) else [item for item in marked if item.owner.startswith(f"{address}|")]
        left = [item for item in ours if not item.owner.startswith(tuple(alive))]
        if left:
            number = plural(len(left), "process", "processes")
            seen = f"{number} of jobs that have ended, such as pid {left[0].pid}, {left[0].name}"
            findings.append(warning("leftovers", seen, f"{kill_text(left)}, there", (group[0].name,)))
    return findings or [ok("leftovers", "no process of a job that has ended")]


def _by_machine(nodes: Sequence[NodeFacts]) -> list[list[NodeFacts]]:
    machines = dict.fromkeys(node.machine.machine for node in nodes)
    return [[node for node in nodes if node.machine.machine == machine] for machine in machines]


def _counts(nodes: Sequence[NodeFacts]) -> dict[str, float]:
    """Return what Ray counts on these nodes, by resource."""
    names = dict.fromkeys(entry.resource for entry in accelerator_types().values())
    return {name: sum(node.resources.get(name, 0) for node in nodes) for name in names}


def _counts_text(nodes: Sequence[NodeFacts]) -> str:
    return join_words([f"{count:g} {name}" for name, count in _counts(nodes).items() if count])


def _compare(group: Sequence[NodeFacts], devices: Devices) -> Findings:
    """Compare what Ray counts on the nodes of one machine with what the machine shows."""
    names = tuple(node.name for node in group)
    for resource, ray in _counts(group).items():
        shown = devices.by_resource.get(resource, 0)
        seen = f"Ray counts {ray:g} {resource}, and the machine shows {shown or 'none'}"
        if ray and not shown:
            where = tuple(node.name for node in group if node.resources.get(resource))
            do = "as on a local cluster; otherwise start the node without --num-gpus"
            yield note("accelerators", seen, do, where)
        elif ray > shown:
            do = "start the node with a --num-gpus that is true: workers on the others would fail"
            yield warning("accelerators", seen, do, names)
        elif ray < shown:
            environment = {} if isinstance(group[0].machine.environment, Unknown) else group[0].machine.environment
            variables = dict.fromkeys(e.variable for e in accelerator_types().values() if e.resource == resource)
            settings = [f"{name}={environment[name]}" for name in variables if name in environment]
            if settings:
                do = f"it was started with {join_words(settings)}: unset that there"
            else:
                do = "it was started with --num-gpus, or before the devices were there"
            yield warning("accelerators", f"{seen}: no job can use the rest", f"{do}, and start the node again", names)
