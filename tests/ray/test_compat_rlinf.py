"""A program in RLinf's words, on a cluster: groups, workers and channels."""

from __future__ import annotations

import multiprocessing

import pytest

from roost import ConfigError
from roost.compat.rlinf import (
    AcceleratorType,
    Channel,
    Cluster,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Worker,
    WorkerGroup,
    WorkerInfo,
)


class Teller(Worker):
    def __init__(self, word: str):
        super().__init__()
        self._word = word

    def where(self):
        self._logger.info("asked")
        Worker.logger.info("asked of the class")
        self.log_on_first_rank("only once")
        return self._word, self._rank, self._cluster_node_rank, self._node_local_rank, self._local_rank

    def info(self) -> WorkerInfo:
        return self.worker_info

    def seen(self):
        return self.devices, self.has_accelerator, self.accelerator_type, Worker.torch_device_type

    def ports(self):
        return self.acquire_free_port(), self.acquire_free_port()

    @Worker.timer("whole")
    def timed(self):
        with self.worker_timer("part"):
            pass
        with self.worker_timer("other"):
            pass
        assert self.pop_execution_time("other") >= 0
        return sorted(self.pop_execution_times()), self.pop_execution_times()

    def put(self, channel: Channel, key):
        channel.put({"from": self._rank}, key=key)

    def get(self, channel: Channel, key):
        return type(channel).__module__, channel.get(key=key)

    def give(self, channel, rows, **options):
        data = {"row": [10 * self._rank + place for place in range(rows)], "step": 3}
        return self.send_to("other", channel, data, tag="obs", **options) is not None

    async def take(self, channel, total, **options):
        found = self.recv_from("worker_group_Teller", channel, tag="obs", batch_size=total, **options)
        return await found.async_wait() if options.get("async_op") else found

    def start_rank(self):
        spawn = multiprocessing.get_context("spawn")
        self._child = spawn.Process(target=be_rank, args=(self.worker_address, 2, 1), daemon=True)
        self._child.start()
        return self.recv(self.worker_address.get_name(), 1)

    def attached(self, name: str):
        return WorkerGroup.from_group_name(Teller, name).execute_on(1).where().wait()


def be_rank(parent, world_size, rank):
    worker = Worker(parent_address=parent, world_size=world_size, rank=rank)
    name, node = worker.worker_address.get_name(), worker.worker_info.cluster_node_rank
    about = name, worker._rank, worker._world_size, worker._group_name, worker.get_parent_rank(), node
    worker.send(about, parent.root_group_name, parent.rank)


@pytest.mark.usefixtures("roost_local_cluster")
def test_a_program_in_rlinf_s_words():
    with Cluster(num_nodes=0) as cluster:
        assert (cluster.num_nodes, cluster._num_nodes) == (4, 4)
        group = Teller.create_group("hi").launch(
            cluster,
            PackedPlacementStrategy(4, 7),
            max_concurrency=2**31 - 1,
            isolate_gpu=True,
            catch_system_failure=True,
            disable_distributed_log=True,
        )
        assert group.worker_group_name == "worker_group_Teller"
        assert [worker.rank for worker in group.worker_info_list] == [0, 1, 2, 3]
        # By node 1, its own index there, and the index of its device in the process.
        assert group.where().wait() == [("hi", rank, 1, rank, 0) for rank in range(4)]
        assert [found[1] for found in group.execute_on(3, 0).where().wait()] == [3, 0], "in the order given"
        assert [info.address for info in group.info().wait()] == [f"worker_group_Teller:{rank}" for rank in range(4)]
        (info,) = group.execute_on(2).info().wait()
        assert (info.rank, info.group_world_size, info.cluster_node_rank) == (2, 4, 1)
        assert info.accelerator_type == AcceleratorType.NV_GPU
        assert [piece.type for piece in info.hardware_infos] == ["Accelerator"]
        # There is no device here that torch could see.
        assert group.execute_on(1).seen().wait() == [(("1",), True, "nvidia", None)]
        first, second = group.execute_on(0).ports().wait()[0]
        assert first != second
        timed = group.timed()
        assert timed.wait() == [(["part"], {})] * 4
        assert sorted(timed.consume_durations()) == ["timed", "whole"], "not what was taken"

        channel = Channel.create("samples", maxsize=8)
        other = Teller.create_group("other").launch(cluster, NodePlacementStrategy([3]), name="other")
        assert other.attached("worker_group_Teller").wait() == [[("hi", 1, 1, 1, 0)]]
        for key in ("text", 7, ("route", 0, 1), None):
            other.put(channel, key).wait()
            assert group.execute_on(3).get(channel, key).wait() == [("roost.compat.rlinf.channels", {"from": 0})]
        assert not channel.is_local
        started = group.execute_on(2).start_rank().wait()
        assert started == [("worker_group_Teller:2:1", 1, 2, "worker_group_Teller:2", 2, 1)]

        for options in ({}, {"async_op": True}, {"enable_p2p": True}, {"route_key": 7}):
            sent = group.give(channel, 3, **options)
            (taken,) = other.take(channel, 12, **options).wait()
            assert taken == {"row": [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32], "step": 3}
            assert sent.wait() == [bool(options.get("async_op"))] * 4
        with pytest.raises(ConfigError, match="have no 'decoupled_mode'"):
            group.give(channel, 3, decoupled_mode=True).wait()
        with pytest.raises(ConfigError, match="there is no channel"):
            other.take(None, 12).wait()
        assert Channel.create("own", local=True).is_local
