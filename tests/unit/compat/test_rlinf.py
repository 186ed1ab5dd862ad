"""RLinf's names: all are there, nothing of RLinf is imported, and what Roost has not is refused by name."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest

from roost import ConfigError, PlacementError, Topology
from roost.compat import rlinf
from roost.compat.rlinf.placement import HybridComponentPlacement, ModelParallelComponentPlacement, PlacementMode

PATHS = {
    "placement.packed": "PackedPlacementStrategy",
    "placement.flexible": "FlexiblePlacementStrategy",
    "placement.node": "NodePlacementStrategy",
    "placement.placement": "Placement",
    "placement.strategy": "PlacementStrategy",
}


def job(**placement):
    return {
        "cluster": {"num_nodes": 1, "component_placement": placement},
        "actor": {"model": {"tensor_model_parallel_size": 2}},
        "rollout": {"tensor_parallel_size": 2},
    }


def test_importing_it_imports_nothing_of_rlinf():
    code = "import sys, roost.compat.rlinf; print([name for name in sys.modules if name.split('.')[0] == 'rlinf'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_that_it_replaces_has_one_of_ours():
    for ours in rlinf.REPLACES.values():
        assert importlib.import_module(ours)
    assert rlinf.REPLACES["rlinf.utils.placement"] == "roost.compat.rlinf.placement"
    for path, name in PATHS.items():
        module = importlib.import_module(f"roost.compat.rlinf.{path}")
        assert getattr(module, name) is getattr(rlinf, name)
        assert rlinf.REPLACES[f"rlinf.scheduler.{path}"] == module.__name__


@pytest.mark.parametrize(
    "name", ["SchedulerWorker", "CollectiveGroup", "Tracer", "ModelParallelEvalComponentPlacement"]
)
def test_what_roost_has_not_can_be_imported_and_is_refused_by_name(name):
    found = getattr(rlinf, name)
    with pytest.raises(ConfigError, match=f"Roost has no {name}: "):
        found(1, a=2)
    with pytest.raises(ConfigError, match=f"Roost has no {name}: "):
        found.get_proxy()
    with pytest.raises(AttributeError, match="has no attribute 'Chanel'"):
        _ = rlinf.Chanel


def test_placements_are_those_of_rlinf_and_their_errors_say_what_rlinf_says():
    topology = Topology.from_shorthand("1x8")
    placement = HybridComponentPlacement(job(**{"actor,rollout": "0-3"}), topology)
    assert placement.get_strategy("actor") is placement.get_strategy("rollout")
    assert isinstance(placement.get_strategy("actor"), rlinf.FlexiblePlacementStrategy)
    with pytest.raises(PlacementError, match="Resource ranks must be unique"):
        HybridComponentPlacement(job(actor="0-1,1-2"), topology)
    with pytest.raises(IndexError, match="it is out of range"):
        rlinf.NodePlacementStrategy([3]).get_placement(topology)
    late = rlinf.FlexiblePlacementStrategy([[0, 0]])
    with pytest.raises(AssertionError, match="must be unique"):
        late.get_placement(topology)


def test_the_modes_of_a_model_parallel_placement():
    topology = Topology.from_shorthand("1x8")
    shared = ModelParallelComponentPlacement(job(**{"actor,rollout,reward": "0-7"}), topology)
    assert shared.is_collocated
    assert not shared.is_auto
    assert (shared.placement_mode, shared.rollout_dp_size) == (PlacementMode.COLLOCATED, 4)
    with pytest.raises(PlacementError, match="Reward GPUs must be specified"):
        ModelParallelComponentPlacement(job(**{"actor,rollout": "0-7"}), topology)
    dynamic = job(actor="0-3", rollout="4-7", reward="4-7")
    dynamic["cluster"]["auto_scheduler"] = True
    auto = ModelParallelComponentPlacement(dynamic, topology)
    assert (auto.is_auto, auto.placement_mode) == (True, PlacementMode.AUTO)
    assert len(auto.get_strategy("actor").get_placement(topology)) == 8, "where the trainer is at the beginning"


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 4), (4, 2), (2, 3), (3, 2), (6, 4)])
def test_every_row_of_a_batch_has_one_way(source, target):
    sent = [
        (rank, peer, rows)
        for rank in range(source)
        for peer, rows in rlinf.CommMapper.get_dst_ranks(24, source, target, rank)
    ]
    received = [
        (peer, rank, rows)
        for rank in range(target)
        for peer, rows in rlinf.CommMapper.get_src_ranks(24, source, target, rank)
    ]
    assert sorted(sent) == sorted(received)
    assert sum(rows for *_, rows in sent) == 24


def test_a_batch_is_split_and_joined():
    batch = {"obs": np.arange(12).reshape(6, 2), "names": list("abcdef"), "none": None, "step": 3}
    parts = rlinf.split_batch(batch, [4, 2])
    assert [rlinf.get_batch_size(part) for part in parts] == [4, 2]
    joined = rlinf.merge_batches(parts)
    assert joined["names"] == list("abcdef")
    assert (joined["obs"] == batch["obs"]).all()
    assert (joined["none"], joined["step"]) == (None, 3)
    for wrong in (None, 3, "text", {}, {"a": None}, np.float64(1.0)):
        with pytest.raises(ConfigError, match="a batch is a list"):
            rlinf.infer_batch_size(wrong)
    with pytest.raises(ConfigError, match="cannot be divided evenly among 5 ranks"):
        rlinf.CommMapper.get_dst_ranks(12, 5, 3, 0)
    with pytest.raises(ConfigError, match="parts of str differ"):
        rlinf.merge_batches(["a", "b"])
    with pytest.raises(ConfigError, match="no parts"):
        rlinf.merge_batches([])
