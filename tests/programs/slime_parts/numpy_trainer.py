"""Megatron's place in the tests: ranks that average the gradients of a model of four numbers."""

import os

import numpy as np
import ray
import torch
import torch.distributed as dist
from slime.ray.train_actor import TrainRayActor
from slime.utils.accelerator import register_accelerator
from slime.utils.accelerator.cuda import CUDAAccelerator
from tracing import note


class NoDevices(CUDAAccelerator):
    """slime takes the ranks' device numbers from its accelerator, and there is none here."""

    def is_available(self):
        return True


register_accelerator("stand-in", NoDevices)


class MegatronTrainRayActor(TrainRayActor):
    def init(self, args, role, with_ref=False, with_opd_teacher=False):
        self.args, self.role, self.version = args, role, 0
        self.name = f"{role}-{os.environ['RANK']}"
        dist.init_process_group("gloo")
        self.rank = args.rank = dist.get_rank()
        args.world_size = dist.get_world_size()
        self.weights = np.zeros(4)
        self.train_parallel_config = {
            "dp_size": dist.get_world_size(),
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        names = ("LOCAL_RANK", "WORLD_SIZE", "NCCL_CUMEM_ENABLE", "TMS_INIT_ENABLE")
        seen = {name: os.environ.get(name) for name in names}
        is_preloaded = "preload" in os.environ.get("LD_PRELOAD", "")
        note(self.name, "init", gpus=gpus, ref=with_ref, preloaded=is_preloaded, **seen)
        return 0

    def train(self, rollout_id, rollout_data_ref, external_data=None):
        data = ray.get(rollout_data_ref[self.rank].inner)
        baseline = np.array((external_data or {}).get("values", [0.0] * len(data["rewards"])))
        features = np.array([np.bincount(np.asarray(tokens) % 4, minlength=4) for tokens in data["tokens"]])
        values = features @ self.weights
        gradient = torch.tensor(((np.array(data["rewards"]) - baseline)[:, None] * features).mean(axis=0))
        dist.all_reduce(gradient)
        self.weights = self.weights + 0.1 * gradient.numpy() / dist.get_world_size()
        note(
            self.name,
            "train",
            rollout=rollout_id,
            samples=[int(index) for index in data["sample_indices"]],
            rewards=[float(reward) for reward in data["rewards"]],
            baseline=baseline.tolist(),
            weights=self.weights.tolist(),
        )
        return {"values": values.tolist()} if self.role == "critic" else None

    def update_weights(self):
        self.version += 1
        engines, lock, *_ = ray.get(self.rollout_manager.get_updatable_engines_and_lock.remote())
        if self.rank == 0:
            assert ray.get(lock.acquire.remote())
            ray.get([engine.load.remote(self.weights.tolist(), self.version) for engine in engines])
            ray.get(lock.release.remote())
        dist.barrier()

    def save_model(self, rollout_id, force_sync=False):
        note(self.name, "save", rollout=rollout_id, force=force_sync)

    def clear_memory(self):
        note(self.name, "clear_memory")

    def sleep(self, tags=None):
        note(self.name, "sleep")

    def wake_up(self, tags=None):
        note(self.name, "wake_up")

    def _get_parallel_config(self):
        return self.train_parallel_config
