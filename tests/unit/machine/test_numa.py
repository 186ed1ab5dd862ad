"""The cores, NUMA nodes and network cards near a device, read from a folder that pretends to be a machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from roost.machine.numa import nearest_nic, numa_cores, numa_of

CARDS = {
    "0000:17:00.0": "devices/pci0000:16/0000:16:01.0/0000:17:00.0",
    "0000:18:00.0": "devices/pci0000:16/0000:16:01.0/0000:18:00.0",
    "0000:98:00.0": "devices/pci0000:97/0000:97:01.0/0000:98:00.0",
    "0000:99:00.0": "devices/pci0000:97/0000:97:02.0/0000:99:00.0",
}


@pytest.fixture
def machine(tmp_path):
    """Two NUMA nodes, a GPU at each, and a network card beside the first and below the root of the second."""
    sys_ = tmp_path / "sys"
    for node, cores in enumerate(("0-3,8-11\n", "4-7,12-15\n")):
        folder = sys_ / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    (sys_ / "bus/pci/devices").mkdir(parents=True)
    for pci, place in CARDS.items():
        (sys_ / place).mkdir(parents=True)
        (sys_ / place / "numa_node").write_text("0\n" if "pci0000:16" in place else "1\n")
        (sys_ / "bus/pci/devices" / pci).symlink_to(sys_ / place)
    for name, pci in {"mlx5_0": "0000:99:00.0", "mlx5_1": "0000:18:00.0"}.items():
        (sys_ / "class/infiniband" / name).mkdir(parents=True)
        (sys_ / "class/infiniband" / name / "device").symlink_to(sys_ / CARDS[pci])
    return tmp_path


def test_the_cores_of_each_node_are_those_that_are_allowed(machine):
    assert numa_cores(root=machine) == {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}
    assert numa_cores({0, 1, 4, 99}, machine) == {0: (0, 1), 1: (4,)}
    assert numa_cores(set(), machine) == {0: (), 1: ()}


def test_a_machine_of_one_node_or_of_none_says_nothing(machine, tmp_path):
    assert numa_cores(root=tmp_path / "nowhere") == {}
    (machine / "sys/devices/system/node/node1/cpulist").write_text("no cores")
    assert numa_cores(root=machine) == {}


def test_a_device_is_found_as_nvidia_writes_its_address(machine):
    assert [numa_of(pci, machine) for pci in ("00000000:17:00.0", "00000000:98:00.0", "0000:98:00.0")] == [0, 1, 1]
    (machine / "sys" / CARDS["0000:17:00.0"] / "numa_node").write_text("-1\n")
    assert [numa_of(pci, machine) for pci in ("00000000:17:00.0", "00000000:55:00.0", "")] == [None, None, None]


def test_the_nearest_card_shares_most_of_the_way(machine):
    assert nearest_nic("00000000:17:00.0", machine) == "mlx5_1"
    assert nearest_nic("00000000:98:00.0", machine) == "mlx5_0"
    assert nearest_nic("00000000:55:00.0", machine) is None
    assert nearest_nic("0000:17:00.0", machine / "nowhere") is None


BOUND = """
import ctypes, os, platform, threading
from roost.machine.numa import bind_to, own_cores
before = threading.Event()
threading.Thread(target=before.wait, daemon=True).start()
core = max(os.sched_getaffinity(0))
bind_to([core], 0)
assert own_cores() == (core,), own_cores()
seen = []
later = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
later.start(); later.join()
assert seen == [{core}], seen
number = {"x86_64": 238, "aarch64": 237}.get(platform.machine(), -1)
# Setting the default is allowed where setting a preference is; some containers allow neither.
with open("/proc/self/numa_maps") as maps:
    is_preferred = "prefer:0" in maps.read()
assert is_preferred == (ctypes.CDLL(None).syscall(number, 0, None, 0) == 0)
print(core)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="needs a Linux that knows NUMA")
def test_every_thread_of_a_process_is_bound_the_older_ones_too():
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == max(os.sched_getaffinity(0))
