"""Layouts by example, and the shapes of models from their files."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from roost import ClusterError, ConfigError
from roost.cli.main import main
from roost.weights import (
    At,
    Fuse,
    Held,
    Layout,
    Numbered,
    Route,
    Split,
    SyncPlan,
    TensorSpec,
    columns,
    make_layout,
    map_safetensors,
    read_safetensors,
    save_safetensors,
)
from roost.weights.safetensors import create_safetensors

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "weights.yaml"


def boxes(layout: Layout, name: str) -> dict[str, tuple]:
    held = layout.tensors[name]
    return {layout.workers[part.worker]: part.box for part in held.parts}


def test_parts_are_split_as_torch_splits_them():
    layout = make_layout({"t": TensorSpec((7, 2), "float32")}, "a", {"dp": 4}, [Split("dp", 0, ("*",))])
    assert boxes(layout, "t") == {
        "a:0": ((0, 2), (0, 2)),
        "a:1": ((2, 4), (0, 2)),
        "a:2": ((4, 6), (0, 2)),
        "a:3": ((6, 7), (0, 2)),
    }
    few = make_layout({"t": TensorSpec((2, 2), "float32")}, "a", {"dp": 4}, [Split("dp", 0, ("*",))])
    assert list(boxes(few, "t")) == ["a:0", "a:1"]


def test_fewer_heads_than_workers_are_held_by_several():
    layout = make_layout({"k": TensorSpec((8, 2), "float32")}, "r", {"tp": 4}, [columns("tp", "k", units=2)])
    assert [box[0] for box in boxes(layout, "k").values()] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_layers_go_to_stages_and_experts_to_owners():
    names = ["embed", *(f"layers.{layer}.experts.{expert}.up" for layer in range(4) for expert in range(4))]
    specs = {name: TensorSpec((2,), "bfloat16") for name in names}
    rules = [Numbered("pp", "layers.{}.*", 4), Numbered("ep", "*.experts.{}.*", 4), At("pp", 0, ("embed",))]
    layout = make_layout(specs, "a", {"pp": 2, "ep": 2}, rules)
    assert list(boxes(layout, "embed")) == ["a:0", "a:1"]
    assert list(boxes(layout, "layers.1.experts.3.up")) == ["a:1"]
    assert list(boxes(layout, "layers.2.experts.0.up")) == ["a:2"]


def test_fused_tensors_lie_one_after_the_other():
    specs = {f"l.{name}": TensorSpec((rows, 4), "float32") for name, rows in (("q", 8), ("k", 4), ("v", 4))}
    rules = [columns("tp", "*"), Fuse("{}.qkv", ("{}.q", "{}.k", "{}.v"))]
    layout = make_layout(specs, "r", {"tp": 2}, rules)
    second = [(held.name, held.storage, held.box[0], held.at) for held in layout.held_by("r:1")]
    assert second == [
        ("l.q", "l.qkv", (4, 8), (0, 0)),
        ("l.k", "l.qkv", (2, 4), (4, 0)),
        ("l.v", "l.qkv", (2, 4), (6, 0)),
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Split("tp", 0, ("*",))], "a rule is about axis 'tp'"),
        ([Split("dp", 3, ("*",))], "t has no dimension 3"),
        ([Split("dp", 0, ("*",), units=3)], "not 3 equal units"),
        ([Numbered("dp", "layers.*", 2)], "write {} once"),
        ([Fuse("qkv", ("q",))], "has not one {}"),
        ([Fuse("{}.qkv", ("{}.s", "{}"))], "fused with t.s, which is not there"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, message):
    specs = {"t": TensorSpec((4, 4), "float32")}
    with pytest.raises(ConfigError) as caught:
        make_layout(specs, "a", {"dp": 2}, rules)
    assert message in str(caught.value)


def test_workers_that_contradict_each_other_are_named():
    one, other = (Held(name="t", spec=TensorSpec((size,), "int8"), box=((0, size),)) for size in (2, 3))
    with pytest.raises(ConfigError, match=r"t is int8 \[2\] in a:0, and int8 \[3\] in a:1"):
        Layout.from_reports({"a:0": [one], "a:1": [other]})
    with pytest.raises(ConfigError, match="'complex' is not a type"):
        TensorSpec((1,), "complex")


def write_safetensors(path, tensors):
    header = json.dumps({"__metadata__": {}, **tensors}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_shapes_are_read_from_the_headers_of_a_model(tmp_path):
    write_safetensors(tmp_path / "a-1.safetensors", {"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}})
    write_safetensors(tmp_path / "a-2.safetensors", {"y": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [0, 1]}})
    index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    both = {"x": TensorSpec((2, 3), "bfloat16"), "y": TensorSpec((), "float8_e4m3fn")}
    assert read_safetensors(tmp_path) == both
    assert read_safetensors(tmp_path / "model.safetensors.index.json") == both
    assert list(read_safetensors(tmp_path / "a-1.safetensors")) == ["x"]


def test_what_is_saved_is_mapped_again_and_a_full_disk_leaves_nothing(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7, np.int8), "c": np.zeros((0, 2), bool)}
    # By numpy's rules the first is a number.
    arrays = {"d": np.full((), 2.0) * 3, **arrays}
    path = tmp_path / "model.safetensors"
    save_safetensors(path, arrays)
    assert read_safetensors(path)["a"] == TensorSpec((2, 3), "float32")
    found = map_safetensors(path)
    assert {name: (list(one.shape), np.asarray(one).tolist()) for name, one in found.items()} == {
        name: (list(one.shape), one.tolist()) for name, one in arrays.items()
    }
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(ClusterError, match=r"model\.safetensors cannot be written: File too large"):
            save_safetensors(path, {"a": np.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
    assert path.read_bytes() == before
    path.write_bytes(before[:-1])
    with pytest.raises(ConfigError, match="is cut off: it ends before b"):
        map_safetensors(path)


SMALL_SHM = """
import os, torch
from roost.comm.move.mover import make_offer
weights = {"small": torch.ones(1000), "large": torch.ones(1 << 20)}
offer = make_offer(weights, 0, may_share=True)
print([array.places["host"][1] is None for array in offer.arrays.values()], float(weights["large"].sum()))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_weights_stay_where_they_are_if_there_is_no_room_in_shared_memory():
    command = (
        f"mount -t tmpfs -o size=1m none /dev/shm && exec {shlex.quote(sys.executable)} -c {shlex.quote(SMALL_SHM)}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    if "mount" in done.stderr and done.returncode == 32:
        pytest.skip("this user cannot mount")
    assert done.stdout.split("\n")[0] == "[True, True] 1048576.0", done.stderr
    assert "has no room for the weights of this process" in done.stderr


def test_files_that_are_no_models_are_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "i.safetensors.index.json").write_text('{"weight_map": {"x": "../../etc/passwd"}}')
    for name, message in {
        "x.safetensors": "is not a safetensors file",
        "none.safetensors": "cannot be read: No such file",
        "i.safetensors.index.json": "is not an index",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_safetensors(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.safetensors file"):
        read_safetensors(tmp_path / "empty")


def test_a_file_for_weights_is_made_only_where_there_is_room_for_all_of_it(tmp_path):
    specs = {"a": TensorSpec((1 << 20,), "float32")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ClusterError, match=r"a\.safetensors cannot be made with 4 MiB: File too large"):
            create_safetensors(tmp_path / "a.safetensors", specs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    create_safetensors(tmp_path / "b.safetensors", specs)["a"][:] = 7
    assert map_safetensors(tmp_path / "b.safetensors")["a"].sum() == 7 << 20
    assert (tmp_path / "b.safetensors").stat().st_mode & 0o077 == 0
    (tmp_path / "c.safetensors").symlink_to(tmp_path / "b.safetensors")
    with pytest.raises(ClusterError, match=r"c\.safetensors cannot be made"):
        create_safetensors(tmp_path / "c.safetensors", specs)
    (tmp_path / "d.safetensors").write_text("mine")
    with pytest.raises(ClusterError, match=r"d\.safetensors is there, and is another file"):
        create_safetensors(tmp_path / "d.safetensors", specs)
    assert (tmp_path / "d.safetensors").read_text() == "mine"


@pytest.fixture
def run_weights(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Run `roost weights` with arguments: its exit code, and what it prints."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["roost", "weights", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return run


def test_the_command_shows_what_goes_where(run_weights):
    code, out, _ = run_weights(str(EXAMPLE), "--cluster", "2x8")
    assert code == 0
    assert "[act… 0][act… 1]" in out
    assert out.count("↑333M") == out.count("↓333M") == 8
    assert "9 tensors, 2.6 GiB from 8 workers to 8, plan " in out
    _, out, _ = run_weights(str(EXAMPLE), "--cluster", "2x8", "--format", "svg")
    assert out.count("↑333M</text>") == out.count("↓333M</text>") == 8
    _, out, _ = run_weights(str(EXAMPLE), "--cluster", "2x8", "--format", "text")
    assert out.splitlines()[0].startswith("9 tensors, 2.6 GiB from 8 workers to 8, plan ")
    assert "  rollout:7      sends    0 bytes, receives    333 MiB" in out
    code, out, _ = run_weights(str(EXAMPLE), "--cluster", "2x8", "--format", "json")
    assert SyncPlan.from_json(out).bytes_by_route()[Route.NETWORK] == sum(row[2] for row in json.loads(out)["traffic"])


def test_mistakes_in_the_section_have_a_place_and_a_hint(run_weights, tmp_path):
    text = EXAMPLE.read_text(encoding="utf-8")
    for wrong, right in {
        "axis: tq, dim: 1": "axis: tp, dim: 1",
        "component: rolout": "component: rollout",
        "[bfloat16, x]": "[bfloat16, 4096]",
        'off: ["{}.gate': 'of: ["{}.gate',
        "{names: axis, at: 1}": '{names: "*", axis: dp, dim: 0}',
    }.items():
        assert right in text
        text = text.replace(right, wrong)
    (tmp_path / "job.yaml").write_text(text)
    code, _, err = run_weights(str(tmp_path / "job.yaml"), "--cluster", "2x8")
    assert code == 2
    for message in (
        "tensor 'model.norm.weight' is not a type and a shape",
        "the job has no component 'rolout'",
        "did you mean 'rollout'?",
        "a rule is about axis 'tq', which is not there",
        "a rule has no key 'off'",
        "a rule has the keys at and names",
    ):
        assert message in err
    (tmp_path / "job.yaml").write_text(EXAMPLE.read_text(encoding="utf-8").replace("dp: 8", "dp: 4"))
    _, _, err = run_weights(str(tmp_path / "job.yaml"), "--cluster", "2x8")
    assert "'actor' has 8 workers in the plan, and axes of dp 4" in err
