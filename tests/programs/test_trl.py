"""TRL's GRPOTrainer on two ranks: on Roost it has the same losses as with torchrun, to the last bit."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from roost import Cluster, PackedPlacementStrategy
from roost.testing import local_cluster

HERE = Path(__file__).parent
RANKS = 2


def results(folder):
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def test_trl_has_the_losses_and_weights_of_torchrun(program, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="needs TRL: make test-programs")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Nothing is fetched: the model is made here.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    with_torchrun, on_roost = tmp_path / "torchrun", tmp_path / "roost"
    for folder in (with_torchrun, on_roost):
        folder.mkdir()
        program("-c", f"from trl_job import make_model; make_model({str(folder / 'model')!r})")

    program("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", str(HERE / "trl_job.py"), str(with_torchrun))
    trl_job = importlib.import_module("trl_job")
    with local_cluster("1x2"), Cluster(num_nodes=1) as cluster:
        strategy = PackedPlacementStrategy(0, RANKS - 1)
        with trl_job.Rank.create_group().launch(cluster, strategy, name="trl") as group:
            group.train(str(on_roost)).wait(timeout=300)

    own, ours = results(with_torchrun), results(on_roost)
    assert ours == own
    assert [one["ranks"] for one in ours] == [RANKS] * RANKS
    losses = [loss for loss, _ in ours[0]["history"]]
    assert len(losses) == 3
    assert any(losses)
