"""roost doctor: what each check says of which facts, and the looks that need no cluster."""

# ruff: noqa: S108 - paths in facts; nothing is written there

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from roost.cli.text.doctor import report_text
from roost.doctor import child, machine_look
from roost.doctor.child import cannot_join, finding_of
from roost.doctor.cluster_rules import (
    judge_accelerators,
    judge_addresses,
    judge_clocks,
    judge_cluster,
    judge_job_leftovers,
    judge_jobs,
    judge_limits,
    judge_object_stores,
    judge_run_folder,
    judge_versions,
)
from roost.doctor.examine import examine
from roost.doctor.facts import (
    Clock,
    ClusterFacts,
    Device,
    Devices,
    DeviceUser,
    Finding,
    Heap,
    HomeFacts,
    HostName,
    JobFacts,
    Level,
    Limits,
    MachineFacts,
    MarkedProcess,
    NodeFacts,
    NodeLook,
    Ports,
    Practice,
    RayletFacts,
    RayProcess,
    Report,
    Silent,
    Software,
    Space,
    Unseen,
    note,
    ok,
    problem,
    warning,
)
from roost.doctor.machine_rules import (
    fold,
    judge,
    judge_devices,
    judge_disks,
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

GIB = 2**30
SOFTWARE = Software(python="3.11.7", interpreter="/opt/python", packages={"roost": "1.0", "ray": "2.60.0"})
H100 = Device(index=0, model="H100", memory=80 * GIB, memory_used=GIB)
LIMITS = Limits(open_files=65536, most_open_files=65536, tasks=100_000, tasks_now=500, cpus=8)


def machine(name: str = "here", **changes: object) -> MachineFacts:
    """A machine that has nothing wrong."""
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


def node(number: int = 1, on: str = "", *, ahead: float = 0.0, error: float = 0.002, gpus: float = 0, **look: object):
    """A node that has nothing wrong; those with `on` share a machine."""
    facts = NodeLook(
        machine=machine(on or f"m{number}"),
        host=f"host{number}",
        raylet=RayletFacts(session="/tmp/ray/s", object_store=GIB, object_store_folder="/dev/shm"),
        sees_folder=True,
        drivers=(),
        accelerator_problem=None,
    )
    return NodeFacts(
        name=f"10.0.0.{number} (n{number})",
        address=f"10.0.0.{number}",
        resources={"CPU": 8.0, "GPU": gpus} if gpus else {"CPU": 8.0},
        look=replace(facts, **look),
        clock=Clock(ahead=ahead, error=error),
    )


def levels(findings: list[Finding]) -> list[str]:
    return [str(item.level) for item in findings]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_machine_with_nothing_wrong_has_a_line_for_each_check_and_all_are_ok():
    found = judge_machine(machine())
    assert set(levels(found)) == {"ok"}
    assert len(found) == len({item.check for item in found}) == 14
    assert all(item.seen and not item.do for item in found)


def test_what_could_not_be_looked_at_is_told_for_each_check_and_never_raises():
    blind = Unseen(why="no answer in 15 s")
    names = [name for name in MachineFacts.__slots__ if name != "machine"]
    found = judge_machine(machine(**dict.fromkeys(names, blind)))
    assert {item.seen for item in found} == {"could not be looked at: no answer in 15 s"}
    assert set(levels(found)) == {"note"}


def test_a_rule_that_fails_on_what_it_got_is_told_too():
    found = only(judge("memory", object(), lambda fact: [fact.nothing]))
    assert found.level == Level.NOTE
    assert "could not be looked at: AttributeError" in found.seen


def test_what_cannot_be_looked_at_for_a_reason_that_hinders_jobs_too_is_a_warning():
    found = judge_home(HomeFacts(practice=None, heaps=Unseen(why="not yours", do="remove it")))[1]
    assert found == warning("old files", "could not be looked at: not yours", "remove it")


def test_python_and_ray_must_be_new_enough():
    assert levels(judge_python(SOFTWARE)) == ["ok"]
    assert levels(judge_python(replace(SOFTWARE, python="3.10.2"))) == ["problem"]
    old = only(judge_ray(replace(SOFTWARE, packages={"ray": "2.40.0"})))
    assert old.level == Level.PROBLEM
    assert old.seen == "this is Ray 2.40.0, and Roost needs Ray 2.47.0 or newer"
    assert "pip install 'ray>=2.47.0'" in old.do
    assert only(judge_ray(replace(SOFTWARE, packages={}))).seen == "not installed"


def test_a_torch_for_cpus_beside_gpus_is_a_warning():
    software = replace(SOFTWARE, packages={"torch": "2.5.0+cpu"})
    assert levels(judge_packages(software, Devices())) == ["ok"]
    found = only(judge_packages(software, Devices(nvidia=(H100,))))
    assert found.level == Level.WARNING
    assert found.seen.startswith("torch 2.5.0+cpu is a build for CPUs, and this machine has 1 x H100")


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


def test_who_uses_an_accelerator_without_ray_is_named():
    users = (
        DeviceUser(pid=7, command="ray::Trainer", user="ana", memory=GIB, of_ray=True),
        DeviceUser(pid=8, command="python serve.py", user="bob", memory=2 * GIB, of_ray=False),
        DeviceUser(pid=9, command="", user="", memory=None, of_ray=False),
    )
    fine, bob, hidden = judge_devices(Devices(nvidia=(replace(H100, users=users),)))
    assert fine.level == Level.OK
    assert bob.seen == "accelerator 0 is used by pid 8 with 2.0 GiB, not of Ray: bob, python serve.py"
    assert "kill 8" in bob.do
    assert "pid 9, not of Ray, which cannot be seen from here" in hidden.seen
    many = judge_devices(Devices(nvidia=(replace(H100, users=users[1:2] * 20),)))
    assert many[-1].seen.startswith("12 more processes")


def test_visible_devices_are_noted_and_wrong_ones_warned_of():
    pair = Devices(nvidia=(H100, H100))
    assert levels(judge_visible_devices({}, pair)) == ["ok"]
    assert "shows 1 accelerator " in only(judge_visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, pair)).seen
    assert "hides all accelerators" in only(judge_visible_devices({"CUDA_VISIBLE_DEVICES": ""}, pair)).seen
    wrong = only(judge_visible_devices({"CUDA_VISIBLE_DEVICES": "0,7"}, pair))
    assert wrong.level == Level.WARNING
    assert "names 7, and there are 0-1" in wrong.seen


@pytest.mark.parametrize(("free", "level"), [(50, "ok"), (8, "warning"), (4, "problem"), (0, "problem")])
def test_memory_and_disks_that_are_nearly_full(free, level):
    space = Space(total=100 * GIB, free=free * GIB, path="/data", uses=("runs",))
    assert levels(judge_memory(space)) == [level]
    found = only(judge_disks([space]))
    assert found.level == level
    assert "/data (runs)" in found.seen


def test_a_small_disk_is_warned_of_before_it_is_full():
    assert levels(judge_disks([Space(total=4 * GIB, free=GIB, path="/tmp", uses=("runs",))])) == ["warning"]


def test_the_shared_memory_of_a_container_is_too_small_for_an_object_store():
    memory = Space(total=64 * GIB, free=60 * GIB)
    found = only(judge_shm(Space(total=64 * 2**20, free=64 * 2**20, path="/dev/shm"), memory))
    assert found.level == Level.WARNING
    assert found.seen == "/dev/shm has 64 MiB, and Ray's object store wants 10.0 GiB"
    assert "--shm-size=11g" in found.do
    full = Space(total=32 * GIB, free=GIB, path="/dev/shm")
    assert levels(judge_shm(full, memory)) == ["warning"]
    assert levels(judge_shm(full, Unseen(why="?"))) == ["warning"]


def test_limits_of_files_and_processes():
    assert levels(judge_open_files(LIMITS)) == ["ok"]
    assert only(judge_open_files(replace(LIMITS, open_files=None))).seen == "no limit"
    soft = only(judge_open_files(replace(LIMITS, open_files=1024, most_open_files=1_048_576)))
    assert "ulimit -n 65536" in soft.do
    hard = only(judge_open_files(replace(LIMITS, open_files=1024, most_open_files=1024)))
    assert "--ulimit nofile=65536" in hard.do
    assert levels(judge_tasks(replace(LIMITS, tasks=None))) == ["ok"]
    few = only(judge_tasks(replace(LIMITS, tasks=4096, tasks_now=3000)))
    assert few.level == Level.WARNING
    assert few.seen.startswith("3000 of 4096 processes and threads in use")


def test_ports_that_the_kernel_or_ray_may_take_too():
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


def test_a_head_that_could_not_start_on_the_usual_ports_is_told():
    assert judge_head_ports(Ports(ephemeral=(32768, 60999), used=frozenset())) == []
    found = only(judge_head_ports(Ports(ephemeral=(32768, 60999), used=frozenset({6379, 8265}))))
    assert found.seen == "6379 and 8265, which `ray start --head` wants, are in use"
    assert "--port=PORT and --dashboard-port=PORT" in found.do


def test_a_host_name_that_leads_nowhere_or_home():
    assert levels(judge_host_name(HostName(name="a", addresses=("10.0.0.1", "::1")))) == ["ok"]
    assert levels(judge_host_name(HostName(name="a", addresses=("127.0.1.1",)))) == ["note"]
    lost = only(judge_host_name(HostName(name="a", addresses=(), error="Name or service not known")))
    assert lost.level == Level.WARNING
    assert lost.seen == "a leads nowhere: Name or service not known"


def test_a_proxy_that_stands_between_nodes():
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
        RayProcess(pid=1, name="raylet", user="ana", head="10.0.0.1:6379", belongs=True),
        RayProcess(pid=2, name="raylet", user="ana", head="10.0.0.9:6379", belongs=False),
        RayProcess(pid=3, name="log_monitor.py", user="ana", head="10.0.0.9:6379", belongs=False),
        RayProcess(pid=4, name="ray::Trainer", user="ana", head=None, belongs=False),
    )
    marked = (
        MarkedProcess(pid=5, command="sim", job="10.0.0.9:6379|roost:a:1:2/env:0", head_answers=False),
        MarkedProcess(pid=6, command="sim", job="10.0.0.1:6379|roost:a:1:2/env:0", head_answers=True),
    )
    lost, orphan, sim = judge_leftovers(machine(ray_processes=processes, marked=marked))
    assert lost.seen == "2 processes of Ray (log_monitor.py and raylet): the head at 10.0.0.9:6379 does not answer"
    assert lost.do.endswith("kill 2 3")
    assert orphan.seen == "1 process of Ray (ray::Trainer): their raylet is gone"
    assert sim.seen == "1 process of jobs whose cluster is gone, such as pid 5, sim"


def test_a_practice_cluster_and_big_heaps_are_noted():
    assert levels(judge_home(HomeFacts(practice=None, heaps=()))) == ["ok", "ok"]
    heap = Heap(what="sessions of Ray", folder="/tmp/ray", pattern="session_*", count=3, size=5 * GIB)
    small = replace(heap, what="runs", size=10)
    home = HomeFacts(practice=Practice(spec="2x4", address="127.1.1.1:2", seconds=7300), heaps=(heap, small))
    practice, files = judge_home(home)
    assert practice.seen == "2x4 is up at 127.1.1.1:2 for 2 hours"
    assert practice.do.startswith("roost down")
    assert files.level == Level.NOTE
    assert files.seen == "3 sessions of Ray, 5.0 GiB"
    assert "/tmp/ray/session_*" in files.do
    assert levels(judge_home(replace(home, heaps=(small,)))) == ["note", "ok"]


def test_findings_of_many_nodes_fold():
    bad = warning("disk", "full", "make room")
    found = fold(
        [("a", [ok("memory", "1"), bad]), ("b", [ok("memory", "2"), bad]), ("c", [ok("memory", "3"), ok("disk", "x")])]
    )
    assert found == [ok("memory", "fine on 3 nodes"), replace(bad, nodes=("a", "b"))]
    assert fold([("a", [ok("memory", "1")]), ("b", [ok("memory", "1")])]) == [ok("memory", "1")]
    assert fold([]) == []


def test_a_cluster_with_nothing_wrong_has_no_finding_but_ok():
    facts = ClusterFacts(
        address="10.0.0.1:6379", driver=machine("m1"), nodes=(node(1), node(2)), run_folder="/shared/runs"
    )
    found = judge_cluster(facts)
    assert set(levels(found)) == {"ok"}
    seen = {item.check: item.seen for item in found}
    assert seen["nodes"] == "2 nodes, no accelerators; all answer"
    assert seen["run folder"] == "/shared/runs: all nodes see it"
    assert seen["memory"] == "60.0 GiB of 64.0 GiB free", "the other machine is looked at as well"


def test_nodes_that_do_not_answer_or_left_are_named():
    silent = Silent(name="10.0.0.3 (n3)", why="no answer in 30 s", do="look there")
    facts = ClusterFacts(address="a:1", driver=machine(), nodes=(node(1),), silent=(silent,), gone=("10.0.0.4",))
    found = [item for item in judge_cluster(facts) if item.check == "nodes"]
    assert found[0] == problem("nodes", "did not answer: no answer in 30 s", "look there", ("10.0.0.3 (n3)",))
    assert found[1].seen == "1 node left the cluster: 10.0.0.4"
    nobody = judge_cluster(replace(facts, nodes=(), gone=()))
    assert levels(nobody) == ["problem"], "nothing is fine on nodes of which nothing is known"


def test_versions_that_differ_are_named():
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


def test_packages_that_differ_between_nodes_are_warned_of_and_missing_ones_noted():
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
def test_only_what_is_sure_of_a_clock_counts(ahead, error, level):
    found = only(judge_clocks([node(1), node(2, ahead=ahead, error=error)]))
    assert found.level == level
    if level != "ok":
        way = "ahead of" if ahead > 0 else "behind"
        assert found.seen == f"{abs(ahead):.1f} s {way} this machine (± {error:.1f} s)"
        assert found.nodes == ("10.0.0.2 (n2)",)
        assert "chrony" in found.do


def test_a_run_folder_that_is_not_shared_is_noted():
    nodes = [node(1, on="here"), node(2, sees_folder=False)]
    found = only(judge_run_folder("/tmp/runs", "here", nodes))
    assert found.level == Level.NOTE
    assert found.nodes == ("10.0.0.2 (n2)",)
    assert "stays on their node" in found.seen
    assert only(judge_run_folder("/r", "here", nodes[:1])).seen == "/r: all nodes are on this machine"


def test_loopback_and_shared_addresses():
    home = replace(node(1), address="127.0.0.1")
    assert levels(judge_addresses("m1", [home])) == ["ok"], "one machine may talk to itself"
    found = only(judge_addresses("m1", [home, node(2)]))
    assert (found.level, found.nodes) == (Level.PROBLEM, ("10.0.0.1 (n1)",))
    assert "--node-ip-address" in found.do
    twice = only(judge_addresses("m1", [node(1), replace(node(2), address="10.0.0.1")]))
    assert twice.level == Level.WARNING
    assert twice.nodes == ("10.0.0.1 (n1)", "10.0.0.2 (n2)")


def test_what_ray_counts_beside_what_the_machine_shows():
    def judged(gpus: float, shown: int, environment: dict[str, str] | None = None) -> Finding:
        facts = machine("m1", devices=Devices(nvidia=(H100,) * shown), environment=environment or {})
        return only(judge_accelerators([node(1, gpus=gpus, machine=facts)]))

    assert judged(8, 8).seen == "Ray counts what the machines show: 8 GPU"
    assert judged(0, 0).seen == "Ray counts what the machines show: none"
    assert judged(4, 0).level == Level.NOTE
    fewer = judged(2, 8, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert fewer.level == Level.WARNING
    assert fewer.seen == "Ray counts 2 GPU, and the machine shows 8: nobody can use the rest"
    assert "started with CUDA_VISIBLE_DEVICES=0,1: unset that there" in fewer.do
    assert "--num-gpus" in judged(2, 8).do
    assert judged(8, 4).seen == "Ray counts 8 GPU, and the machine shows 4"


def test_nodes_that_share_a_machine_share_its_accelerators():
    facts = machine("m1", devices=Devices(nvidia=(H100,) * 4))
    assert levels(judge_accelerators([node(1, gpus=2, machine=facts), node(2, gpus=2, machine=facts)])) == ["ok"]


def test_accelerators_that_a_cluster_would_refuse_are_a_problem():
    found = only(judge_accelerators([node(1, gpus=4, accelerator_problem=("Ray counts 4", "start it anew"))]))
    assert found == problem("accelerators", "Ray counts 4", "start it anew", ("10.0.0.1 (n1)",))


def test_an_object_store_outside_shared_memory_is_slow():
    slow = RayletFacts(session="/tmp/ray/s", object_store=20 * GIB, object_store_folder="/tmp")
    found = only(judge_object_stores([node(1), node(2, raylet=slow), node(3, raylet=slow)]))
    assert found.level == Level.WARNING
    assert found.seen == "20.0 GiB in /tmp, and not in /dev/shm: it is slow"
    assert found.nodes == ("10.0.0.2 (n2)", "10.0.0.3 (n3)")
    assert levels(judge_object_stores([node(1, raylet=Unseen(why="?"))])) == ["note"]


def test_the_limits_of_nodes_hang_on_what_started_them():
    few = machine("m2", limits=replace(LIMITS, open_files=1024))
    files, tasks = judge_limits([node(1), node(2, machine=few)])
    assert (files.level, files.nodes) == (Level.WARNING, ("10.0.0.2 (n2)",))
    assert tasks.level == Level.OK


def test_jobs_that_lost_their_managers_or_their_driver():
    nodes = [node(1, drivers=(7,))]
    fine = JobFacts(namespace="roost", host="host1", pid=7)
    assert only(judge_jobs([fine], nodes)).seen == "'roost'"
    assert only(judge_jobs([replace(fine, host="elsewhere", pid=1)], nodes)).level == Level.OK, "it cannot be told"
    gone = only(judge_jobs([replace(fine, pid=8)], nodes))
    assert gone.seen == "the driver of job 'roost', pid 8 on host1, is gone, and its managers are not"
    assert "does not answer" in only(judge_jobs([replace(fine, pid=None)], nodes)).seen
    assert (
        "WorkerManager of job 'roost' died" in only(judge_jobs([replace(fine, missing=("WorkerManager",))], nodes)).seen
    )


def test_processes_of_jobs_that_have_ended_are_leftovers():
    marked = tuple(
        MarkedProcess(pid=pid, command="sim", job=job, head_answers=True)
        for pid, job in ((1, "a:1|roost:h:7:9/env:0"), (2, "a:1|roost:h:8:9/env:0"), (3, "b:1|roost:h:8:9/env:0"))
    )
    nodes = [node(1, machine=machine("m1", marked=marked)), node(2, machine=machine("m1", marked=marked))]
    found = only(judge_job_leftovers("a:1", ["a:1|roost:h:7:9/"], nodes))
    assert found.seen == "1 process of jobs that have ended, such as pid 2, sim"
    assert found.do == "kill 2, there"
    assert levels(judge_job_leftovers("a:1", ["a:1|roost:"], nodes)) == ["ok"]


def test_no_cluster_is_a_note_unless_one_was_named():
    none = "there is no Ray cluster to attach to"
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
    assert report.has_problem
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["problems"], data["warnings"], data["notes"]) == (1, 1, 1)
    assert [finding_of(item) for item in data["cluster"]] == list(report.cluster)
    assert report_text(Report(host="a", machine=(ok("python", "3"),))).plain.endswith("all is well")


def test_looks_that_fail_or_hang_are_unseen_and_the_others_are_not_lost():
    def fail() -> None:
        raise ConfigError("no", hint="yes")

    told: list[list[str]] = []
    forever = threading.Event()
    found = machine_look.at_once({"a": fail, "b": forever.wait, "c": lambda: 3, "d": lambda: {}["x"]}, 0.2, told.append)
    forever.set()
    assert found["a"] == Unseen(why="no", do="yes")
    assert found["b"] == Unseen(why="no answer in 0.2 s")
    assert found["c"] == 3
    assert found["d"] == Unseen(why="KeyError: 'x'")


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path):
    assert machine_look.look_at_memory(tmp_path).total > GIB
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    (tmp_path / "memory.current").write_text(f"{2**27}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**26}\n")
    assert machine_look.look_at_memory(tmp_path) == Space(total=2**28, free=2**27 + 2**26)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_look.look_at_memory(tmp_path).total > GIB


def test_ports_in_use_are_read_from_the_kernel(tmp_path):
    settings = tmp_path / "sys/net/ipv4"
    settings.mkdir(parents=True)
    (settings / "ip_local_port_range").write_text("32768\t60999\n")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text("  sl  local_address rem_address\n   0: 0100007F:4E20 00000000:0000 0A\n")
    assert machine_look.look_at_ports(tmp_path) == Ports(ephemeral=(32768, 60999), used=frozenset({20000}))


def test_devices_of_vendors_are_counted_where_the_kernel_shows_them(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci0", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for number, simds in enumerate((0, 1024)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 64\nsimd_count {simds}\n")
    found = machine_look.look_at_devices(tmp_path)
    assert (found.nvidia_files, found.nvidia_installed, found.amd, found.ascend) == (2, 1, 1, 1)


def test_folders_on_one_file_system_are_one_disk(tmp_path):
    folders = {"runs": str(tmp_path / "not" / "there"), "temporary files": str(tmp_path)}
    found = only(list(machine_look.look_at_disks(folders)))
    assert found.uses == ("runs", "temporary files")
    assert 0 < found.free <= found.total


def test_variables_are_told_under_one_name():
    found = machine_look.look_at_environment({"HTTP_PROXY": "http://p", "CUDA_VISIBLE_DEVICES": "", "HOME": "/root"})
    assert found == {"http_proxy": "http://p", "CUDA_VISIBLE_DEVICES": ""}


def test_a_command_of_another_process_is_shown_in_one_line_and_upsets_no_terminal():
    assert machine_look.in_one_line(["python", "-c", "import time\ntime.sleep(9)\x1b[2J"], 80) == (
        "python -c import time time.sleep(9)\\x1b[2J"
    )
    assert len(machine_look.in_one_line(["x" * 500], 80)) == 80


def test_the_mark_of_a_job_is_the_one_that_workers_get():
    from roost.runtime.managers.proxies import JOB_VARIABLE

    assert machine_look.JOB_VARIABLE == JOB_VARIABLE


def test_a_folder_where_this_user_may_not_look_or_that_hangs_is_not_seen(tmp_path, monkeypatch):
    from roost.doctor import node_look

    (tmp_path / "marker").touch()
    assert node_look.sees(str(tmp_path / "marker"))
    assert not node_look.sees(str(tmp_path / "nothing"))

    def stat(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert not node_look.sees(str(tmp_path / "marker"))
    released = threading.Event()
    monkeypatch.setattr(node_look, "_SEE_SECONDS", 0.01)
    monkeypatch.setattr(os.path, "exists", lambda _: released.wait(60))
    assert not node_look.sees(str(tmp_path / "marker"))
    released.set()


def test_a_run_folder_that_does_not_answer_is_told(monkeypatch):
    from roost.doctor import examine as module

    released = threading.Event()
    monkeypatch.setattr(module, "_FOLDER_SECONDS", 0.01)
    monkeypatch.setattr(os.path, "isdir", lambda _: released.wait(60))
    with pytest.raises(ConfigError, match=r"--run-dir /far cannot be looked at: no answer in 0\.01 s"):
        examine(address=None, run_dir="/far", seconds=1, waiting=print)
    released.set()


def test_the_driver_looks_around_while_the_nodes_do_and_a_run_folder_that_hangs_holds_up_neither(tmp_path, monkeypatch):
    from roost.doctor import cluster_look

    looked, released = threading.Event(), threading.Event()
    monkeypatch.setattr(cluster_look, "look_at_machine", lambda *_: looked.set() or machine())
    monkeypatch.setattr(cluster_look, "_ask", lambda *_: node(1) if looked.wait(60) else None)
    monkeypatch.setattr(cluster_look, "_jobs", tuple)
    monkeypatch.setattr(cluster_look, "_gone", tuple)
    monkeypatch.setattr(cluster_look.discover, "wait_for_nodes", lambda *_: [SimpleNamespace(ray_id="a")])
    facts = cluster_look._look("a:1", str(tmp_path), time.monotonic() + 60, print)
    assert (facts.nodes, facts.driver, facts.run_folder) == ((node(1),), machine(), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(cluster_look, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(cluster_look, "_put_marker", lambda _: released.wait(60))
    facts = cluster_look._look("a:1", str(tmp_path), time.monotonic() + 60, print)
    assert (facts.nodes, facts.run_folder) == ((node(1),), Unseen(why="no answer in 0.01 s"))
    released.set()


def test_a_finding_is_one_line_whatever_an_exception_said():
    report = Report(host="a", machine=(note("memory", "could not be looked at: two\nlines \x1b[2J", "look\nthere"),))
    assert report_text(report).plain.splitlines()[1:3] == [
        "  note     memory  could not be looked at: two lines \\x1b[2J",
        "                   do: look there",
    ]


def test_a_run_folder_that_is_not_there_is_a_mistake():
    with pytest.raises(ConfigError, match="--run-dir /nowhere is no folder"):
        examine(address=None, run_dir="/nowhere", seconds=1, waiting=print)


@pytest.fixture
def doctor(tmp_path):
    """Run the command where no cluster is found: neither that of a variable, nor a practice cluster, nor any other."""
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
    assert checks["practice cluster"]["seen"] == "none is up"
    assert not any("could not be looked at" in item["seen"] for item in answer["machine"])


def test_a_cluster_that_does_not_answer_is_a_problem_and_an_address_that_is_none_a_mistake():
    said: list[dict[str, object]] = []
    child.examine("127.0.0.1:9", None, 5, said.append)
    loaded, found = said
    assert loaded == {"loaded": True}
    assert found["finding"]["level"] == "problem"
    assert found["finding"]["seen"].startswith("nothing answers at 127.0.0.1:9")
    child.examine("nowhere", None, 5, said.append)
    assert said[-1] == {
        "mistake": ["'nowhere' is not an address of a Ray cluster", "write host:port, as in 10.0.0.2:6379"]
    }


def test_a_ray_that_cannot_be_loaded_is_a_problem_and_the_rest_is_looked_at(doctor, tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "ray.py").write_text("raise ImportError('protobuf is broken')")
    done = doctor(PYTHONPATH=str(tmp_path / "fake"))
    assert done.returncode == 1, done.stderr
    assert "it cannot be loaded: ImportError: protobuf is broken" in done.stdout
    assert "  memory " in done.stdout


def test_without_ray_that_is_the_one_problem():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from roost.doctor.child import examine\n"
        "examine(None, None, 5, lambda said: print(said['finding']['level'], said['finding']['seen']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "note could not be looked at without Ray\n"
