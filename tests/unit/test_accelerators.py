"""From what Ray counts and a probe reports to a node's accelerators."""

from __future__ import annotations

import pytest

from roost import CheckFailed, ClusterError, ConfigError, Topology, make_plan, register_accelerator_type
from roost.config.hardware import accelerator_types
from roost.machine.probe import NodeReport, VendorDevice, probe
from roost.runtime.connect.versions import check_ray_version, has_token_authentication
from roost.runtime.nodes.accelerators import node_accelerators, variables_of_interest


def report(nvidia: tuple[VendorDevice, ...] = (), **environment: str) -> NodeReport:
    return NodeReport(
        hostname="h", memory=1, interpreter="python", python="3.11", ray="2.60", network="n",
        ephemeral_ports=(32768, 60999), environment=tuple(environment.items()), nvidia=nvidia,
    )  # fmt: skip


def real(index: int) -> VendorDevice:
    uuid = f"GPU-{index}{index}{index}{index}-abcd"
    return VendorDevice(
        index=index, uuid=uuid, model="H200", memory=141 * 2**30, pci=f"0000:0{index}:00.0", numa=index // 4
    )


def devices(resources: dict[str, float], found: NodeReport) -> list[tuple[str, str, str | None]]:
    return [(item.type, item.device, item.model) for item in node_accelerators(resources, found, "n")]


def test_a_node_without_any_has_none():
    assert devices({"CPU": 8}, report()) == []
    assert devices({"CPU": 8, "GPU": 0.5}, report()) == []


def test_fake_ones_are_counted_and_named_as_ray_names_them():
    assert devices({"GPU": 2, "accelerator_type:H100": 1}, report()) == [
        ("nvidia", "0", "H100"),
        ("nvidia", "1", "H100"),
    ]


def test_the_vendors_library_tells_more_by_index_and_by_uuid():
    known = tuple(real(index) for index in range(8))
    found = node_accelerators({"GPU": 3.0}, report(known, CUDA_VISIBLE_DEVICES="5, 2,GPU-7777"), "n")
    assert [item.device for item in found] == ["5", "2", "GPU-7777"]
    assert [item.uuid for item in found] == [known[5].uuid, known[2].uuid, known[7].uuid]
    assert [item.numa for item in found] == [1, 0, 1]
    assert found[0].model == "H200"
    assert found[0].memory == 141 * 2**30


def test_fewer_than_the_node_offers_are_the_first():
    assert devices({"GPU": 1}, report(CUDA_VISIBLE_DEVICES="6,4")) == [("nvidia", "6", None)]


@pytest.mark.parametrize("value", ["", "-1", "3", "NoDevFiles"])
def test_more_than_the_node_offers_is_told(value):
    with pytest.raises(CheckFailed, match="Ray counts 2 accelerators on n, but the node was started with"):
        devices({"GPU": 2}, report(CUDA_VISIBLE_DEVICES=value))


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
def test_vendors_are_told_apart(resources, environment, kind):
    assert devices(resources, report(**environment))[0][:2] == (kind, "0")


def test_two_vendors_on_one_node_are_told():
    with pytest.raises(CheckFailed, match="of several vendors on n: GPU and NPU"):
        devices({"GPU": 1, "NPU": 1}, report())


def test_a_registered_vendor_is_found_by_its_resource():
    register_accelerator_type("musa", variable="MUSA_VISIBLE_DEVICES")
    register_accelerator_type("mlu", variable="MLU_VISIBLE_DEVICES", resource="cambricon")
    assert "MUSA_VISIBLE_DEVICES" in variables_of_interest()
    assert devices({"MUSA": 2}, report(MUSA_VISIBLE_DEVICES="1,0")) == [("musa", "1", None), ("musa", "0", None)]
    assert devices({"cambricon": 1}, report()) == [("mlu", "0", None)]


def test_every_vendor_reads_what_it_writes():
    for entry in accelerator_types().values():
        assert entry.devices(entry.value(["2", "0"])) == ("2", "0")


def test_a_probe_works_on_this_machine():
    found = probe(["PATH", "NOT_SET_ANYWHERE"])
    assert [name for name, _ in found.environment] == ["PATH"]
    assert found.ephemeral_ports[0] < found.ephemeral_ports[1]
    assert found.network
    assert found.memory > 0


def test_devices_travel_through_inventory_and_plan():
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


@pytest.mark.parametrize("version", ["2.47.0", "2.47.1rc0", "2.60.0", "3.0.0.dev0", "10.0"])
def test_a_ray_that_is_new_enough_is_taken(version):
    check_ray_version(version)


@pytest.mark.parametrize("version", ["2.46.9", "1.13.0", "2.9.3"])
def test_an_older_ray_is_refused_with_both_versions(version):
    with pytest.raises(ClusterError, match=rf"this is Ray {version}, and Roost needs Ray 2\.47\.0"):
        check_ray_version(version)


def test_tokens_are_known_since_2_52():
    assert [has_token_authentication(version) for version in ("2.51.2", "2.52.0", "2.60.0")] == [False, True, True]
