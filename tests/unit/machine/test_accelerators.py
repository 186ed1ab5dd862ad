"""A node's accelerators, from what Ray counts and what a probe reports; and the versions of Ray."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from roost import CheckFailed, ClusterError, ConfigError, Topology, make_plan, register_accelerator_type
from roost.config.hardware import accelerator_types
from roost.machine.devices import Device, DeviceUser, nvidia_devices
from roost.machine.probe import probe
from roost.runtime.connect.versions import check_ray_version
from roost.runtime.nodes.accelerators import node_accelerators, variables_of_interest


def real(index: int) -> Device:
    return Device(
        index=index,
        uuid=f"GPU-{str(index) * 4}-abcd",
        model="H200",
        memory=141 * 2**30,
        pci=f"0000:0{index}:00.0",
        numa=index // 4,
    )


def devices(resources: dict[str, float], **environment: str) -> list[tuple[str, str, str | None]]:
    return [(item.type, item.device, item.model) for item in node_accelerators(resources, environment, (), "n")]


def test_a_node_without_accelerators_has_none():
    assert devices({"CPU": 8}) == []
    assert devices({"CPU": 8, "GPU": 0.5}) == []


def test_fake_accelerators_have_the_count_and_the_model_that_ray_reports():
    assert devices({"GPU": 2, "accelerator_type:H100": 1}) == [
        ("nvidia", "0", "H100"),
        ("nvidia", "1", "H100"),
    ]


def test_the_vendors_library_adds_details_by_index_and_by_uuid():
    known = tuple(real(index) for index in range(8))
    found = node_accelerators({"GPU": 3.0}, {"CUDA_VISIBLE_DEVICES": "5, 2,GPU-7777"}, known, "n")
    assert [item.device for item in found] == ["5", "2", "GPU-7777"]
    assert [item.uuid for item in found] == [known[5].uuid, known[2].uuid, known[7].uuid]
    assert [item.numa for item in found] == [1, 0, 1]
    assert found[0].model == "H200"
    assert found[0].memory == 141 * 2**30


def test_if_ray_counts_fewer_than_the_variable_names_the_first_are_used():
    assert devices({"GPU": 1}, CUDA_VISIBLE_DEVICES="6,4") == [("nvidia", "6", None)]


@pytest.mark.parametrize("value", ["", "-1", "3", "NoDevFiles"])
def test_if_ray_counts_more_than_the_variable_names_the_check_fails(value):
    with pytest.raises(CheckFailed, match="Ray counts 2 accelerators on n, but the node was started with"):
        devices({"GPU": 2}, CUDA_VISIBLE_DEVICES=value)


@pytest.mark.parametrize(
    ("resources", "environment", "kind"),
    [
        ({"GPU": 1, "accelerator_type:AMD-Instinct-MI300X-OAM": 1}, {}, "amd"),
        ({"GPU": 1, "accelerator_type:Intel-GPU-Max-1550": 1}, {}, "intel"),
        ({"GPU": 1}, {"HIP_VISIBLE_DEVICES": "0"}, "amd"),
        ({"GPU": 1}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, "intel"),
        ({"GPU": 1}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, "intel"),
        ({"NPU": 1}, {}, "ascend"),
        ({"GPU": 1}, {}, "nvidia"),
    ],
)
def test_the_vendor_follows_from_the_model_or_the_variable(resources, environment, kind):
    assert devices(resources, **environment)[0][:2] == (kind, "0")


def test_two_vendors_on_one_node_fail_the_check():
    with pytest.raises(CheckFailed, match="of several vendors on n: GPU and NPU"):
        devices({"GPU": 1, "NPU": 1})


def test_a_registered_vendor_is_found_by_its_resource():
    register_accelerator_type("musa", variable="MUSA_VISIBLE_DEVICES")
    register_accelerator_type("mlu", variable="MLU_VISIBLE_DEVICES", resource="cambricon")
    assert "MUSA_VISIBLE_DEVICES" in variables_of_interest()
    assert devices({"MUSA": 2}, MUSA_VISIBLE_DEVICES="1,0") == [("musa", "1", None), ("musa", "0", None)]
    assert devices({"cambricon": 1}) == [("mlu", "0", None)]


def test_every_vendor_reads_what_it_writes():
    for entry in accelerator_types().values():
        assert entry.devices(entry.value(["2", "0"])) == ("2", "0")


def test_a_probe_works_on_this_machine():
    found = probe(["PATH", "NOT_SET_ANYWHERE"])
    assert list(found.environment) == ["PATH"]
    assert found.software.packages == {"ray": metadata.version("ray")}
    assert found.ephemeral_ports[0] < found.ephemeral_ports[1]
    assert found.network
    assert found.memory > 0


class LibraryError(Exception):
    """NVML's own error."""


def library(calls: list[str], error: str = "") -> SimpleNamespace:
    """Return an NVML with two devices, of which the second answers few questions."""

    def init() -> None:
        calls.append("init")
        if error:
            raise LibraryError(error)

    def memory(device: int) -> SimpleNamespace:
        if device:
            raise LibraryError("Not Supported")
        return SimpleNamespace(total=8, used=3)

    def processes(device: int) -> list[SimpleNamespace]:
        calls.append("processes")
        if device:
            raise LibraryError("Not Supported")
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2), SimpleNamespace(pid=2**31 - 1, usedGpuMemory=None)]

    return SimpleNamespace(
        NVMLError=LibraryError,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: "NVIDIA H200",
        nvmlDeviceGetUUID=lambda device: f"GPU-{device}",
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId="00000000:AB:00.0"),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )


def test_a_question_that_nvml_cannot_answer_leaves_a_gap(monkeypatch):
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", library(calls))
    (first, second), error = nvidia_devices()
    assert error == ""
    assert (first.model, first.uuid, first.memory, first.memory_used) == ("H200", "GPU-0", 8, 3)
    assert (second.pci, second.memory, second.memory_used) == ("00000000:ab:00.0", None, None)
    assert calls == ["init", "shutdown"], "a probe of the runtime does not list processes"
    (first, second), _ = nvidia_devices(with_users=True)
    own, hidden = first.users
    assert own.command
    assert own.memory == 2
    assert hidden == DeviceUser(pid=2**31 - 1, memory=None), "a process of another container"
    assert second.users == ()


def test_without_a_driver_there_are_no_devices_and_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library([], "Driver Not Loaded"))
    assert nvidia_devices() == ((), "Driver Not Loaded")


def test_devices_survive_inventory_and_plan():
    data = {"nodes": [{"accelerators": [{"device": "GPU-12ab"}, {"device": 3}]}, {"accelerators": 2}]}
    topology = Topology.from_dict(data)
    assert Topology.from_dict(topology.to_dict()) == topology
    alone = Topology.from_dict({"nodes": [{"accelerators": [{"device": "GPU-12ab"}]}]})
    assert Topology.from_dict(alone.to_dict()) == alone
    job = {"cluster": {"component_placement": {"actor": "0-3", "wide": "0-3:0-1"}}}
    plan = make_plan(job, topology)
    seen = [plan.environment("actor", rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert seen == ["GPU-12ab", "3", "0", "1"]
    assert plan.environment("wide", 0)["CUDA_VISIBLE_DEVICES"] == "GPU-12ab,3"
    assert plan.placement("actor", 0).local_accelerator_rank == 0
    shared = make_plan(job, topology, isolate_accelerator=False)
    assert shared.environment("actor", 1)["CUDA_VISIBLE_DEVICES"] == "GPU-12ab,3"
    for pair in ([{"device": "1"}, {"device": "1"}], [{"device": "1"}, {}]):
        with pytest.raises(ConfigError, match="two accelerators of a node have the device 1"):
            Topology.from_dict({"nodes": [{"accelerators": pair}]})
    for wrong in ({"device": "a b"}, {"device": ""}, {"device": ["x"]}):
        with pytest.raises(ConfigError, match="device"):
            Topology.from_dict({"nodes": [{"accelerators": [wrong]}]})


@pytest.mark.parametrize(
    "version", ["2.55.0", "2.55", "2.55.0rc1", "2.55.1rc0", "2.60.0", "2.60.0+local", "3.0.0.dev0", "10.0"]
)
def test_a_ray_that_is_new_enough_is_accepted(version):
    check_ray_version(version)


@pytest.mark.parametrize("version", ["2.54.9", "1.13.0", "2.9.3"])
def test_an_older_ray_is_refused_with_both_versions(version):
    with pytest.raises(ClusterError, match=rf"this is Ray {version}, and Roost needs Ray 2\.55\.0"):
        check_ray_version(version)
