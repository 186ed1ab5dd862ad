"""The examples of the documents, line by line, with the results that they state.

Only imports differ: from `roost`, and a stand-in for torch, which finds no device on a machine without one.
"""

from __future__ import annotations

import argparse
import os

import pytest
import ray

from roost import (
    Cluster,
    CollectiveManager,
    FlexiblePlacementStrategy,
    NodeManager,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Worker,
    WorkerManager,
)
from roost.rl import RayTrainGroup, create_placement_groups

pytestmark = pytest.mark.shown


class MyWorker(Worker):
    def __init__(self, msg: str = "Hello, World!"):
        super().__init__()
        self._msg = msg

    def hello(self):
        return self._rank

    def available_gpus(self):
        import visible_torch as torch

        available_gpus = torch.cuda.device_count()
        gpu_ids = [torch.cuda.get_device_properties(i) for i in range(available_gpus)]
        assert len(set(gpu_ids)) == available_gpus
        return available_gpus


@pytest.mark.usefixtures("roost_local_cluster")
def test_the_examples_of_the_documents_give_what_they_say():
    cluster = Cluster(num_nodes=1)

    placement = FlexiblePlacementStrategy([[0, 1], [2], [3]])
    my_worker = MyWorker.create_group().launch(cluster=cluster, name="flexible_placement", placement_strategy=placement)
    assert my_worker.available_gpus().wait() == [2, 1, 1]

    placement = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3)
    my_worker = MyWorker.create_group().launch(cluster=cluster, name="packed_placement", placement_strategy=placement)
    assert my_worker.available_gpus().wait() == [1, 1, 1, 1]

    placement_chunked = PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3, num_hardware_per_process=2)
    my_worker_chunked = MyWorker.create_group().launch(
        cluster=cluster, name="chunked_placement", placement_strategy=placement_chunked
    )
    assert my_worker_chunked.available_gpus().wait() == [2, 2]

    placement_strided = PackedPlacementStrategy(
        start_hardware_rank=0, end_hardware_rank=3, stride=2, num_hardware_per_process=2
    )
    my_worker_strided = MyWorker.create_group().launch(
        cluster=cluster, name="strided_placement", placement_strategy=placement_strided
    )
    assert my_worker_strided.available_gpus().wait() == [2, 2]
    assert [placement.visible_accelerators for placement in my_worker_strided.placements] == [("0", "2"), ("1", "3")]

    placement = NodePlacementStrategy([0] * 4)
    my_worker = MyWorker.create_group().launch(cluster=cluster, name="node_placement", placement_strategy=placement)
    assert my_worker.hello().wait() == [0, 1, 2, 3]


HYDRA_EXAMPLE = """
import hydra
from roost import Cluster, ComponentPlacement, Worker

class TestWorker(Worker):
    def __init__(self):
        super().__init__()

    def run(self):
        self.log_info(f"Hello from TestWorker rank {self._rank}!")

@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg):
    cluster = Cluster(cluster_cfg=cfg.cluster)
    placement = ComponentPlacement(cfg, cluster)
    strategy = placement.get_strategy("test_worker")
    worker = TestWorker.create_group().launch(cluster, placement_strategy=strategy)
    worker.run().wait()

main()
"""
CONF = """
cluster:
  num_nodes: 1
  component_placement:
    test_worker:
      node_group: a800
      placement: 0-3

  node_groups:
    - label: a800
      node_ranks: 0
"""


def test_the_example_with_hydra_greets_from_every_rank(driver, tmp_path):
    (tmp_path / "conf.yaml").write_text(CONF)
    shown, errors = driver(HYDRA_EXAMPLE).finish()
    for rank in range(4):
        assert f"Hello from TestWorker rank {rank}!" in shown + errors


class Handled:
    """A class for `allocate`, which takes any."""

    def __init__(self, first, second="b"):
        self._given = first, second

    def seen(self):
        return *self._given, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MINE"]


@pytest.mark.usefixtures("roost_local_cluster")
def test_the_cluster_page_holds():
    with Cluster(num_nodes=2) as opened:
        assert opened.namespace == Cluster.NAMESPACE
        assert Cluster() is opened, "whoever asks later gets the same view"
        handle = Cluster.allocate(
            Handled,
            "handled",
            1,
            2,
            {"MINE": "yes"},
            cls_args=[1],
            cls_kwargs={"second": "c"},
        )
        assert ray.get(handle.seen.remote(), timeout=60) == (1, "c", "2", "yes")
        assert ray.get(ray.get_actor("handled", namespace=opened.namespace).seen.remote(), timeout=60)[0] == 1
        node_manager = NodeManager.get_proxy()
        nodes = node_manager.get_nodes()
        assert len(nodes) == opened.num_nodes == 2
        assert node_manager.get_master_ip() == nodes[0].node_ip == opened.get_node_ip(0)
        assert node_manager.get_master_port() == opened.master_port
        assert node_manager.get_num_gpus_per_node() == [node.num_gpus for node in nodes]
        assert all(manager.get_proxy() for manager in (WorkerManager, CollectiveManager))


class Trainer(Worker):
    def init(self):
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def train(self, step):
        return step, self._rank


@pytest.mark.usefixtures("roost_local_cluster")
def test_the_train_and_rollout_page_holds():
    args = argparse.Namespace(
        actor_num_nodes=1, actor_num_gpus_per_node=2, rollout_num_gpus=2, colocate=False,
        debug_train_only=False, debug_rollout_only=False,
    )  # fmt: skip
    with Cluster(num_nodes=2), create_placement_groups(args) as pgs:
        pg, actor_pg_reordered_bundle_indices = pgs["actor"]
        assert pgs["rollout"] == (pg, actor_pg_reordered_bundle_indices[2:])
        assert len(actor_pg_reordered_bundle_indices) == 4
        with RayTrainGroup(args, Trainer, pgs["actor"]) as train:
            assert len(train._actor_handlers) == train.world_size == 2
            masters = train.init().wait()
            assert len(set(masters)) == 1, "rank 0's MASTER_ADDR and MASTER_PORT are those of all"
            assert train.train(7).wait() == [(7, 0), (7, 1)]
            shares = [share for slot in NodeManager.get_proxy().get_slots() for _, share in slot.users if share]
            assert shares == [0.8, 0.8], "what a training rank takes unless another share is given"
            first = train._actor_handlers[0]
            address, port = ray.get(first._get_current_node_ip_and_free_port.remote(), timeout=60)
            assert (address, port >= 10000) == (masters[0][0], True)
            found = first._get_current_node_ip_and_free_port.remote(start_port=30000, consecutive=3)
            assert 30000 <= ray.get(found, timeout=60)[1] < 65533
