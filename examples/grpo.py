"""Post-train a language model with GRPO: engines of vLLM, a data-parallel trainer, samples through a channel.

    python examples/grpo.py                          # writes a tiny model, and trains it in a minute on two cores
    python examples/grpo.py --staleness 0 --steps 40 # engines and trainer wait for each other

The engines generate while the trainer learns, with weights at most `--staleness` versions old. The task is to repeat
the digit of a prompt, as in `5=555555`; the reward is the part that is right. It needs torch, transformers and vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

from roost import Channel, Cluster
from roost.demo.llm.model import DIGITS, make_prompts, reward, write_model
from roost.rl import RayTrainGroup, RolloutManager, create_placement_groups
from roost.rl.engines import Sample, VllmEngine
from roost.rl.grpo import policy_loss, score
from roost.testing import local_cluster
from roost.weights import WeightLink, WeightWorker

PROMPTS, SAMPLES = 32, 16  # of a step, and for each prompt
SECONDS = 120.0  # how long anything may take
OPTIONS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": "64M", "max_model_len": 256}


class Trainer(WeightWorker):
    """One rank of the training. All have the same weights, and average their gradients."""

    def __init__(self, model: str, lr: float) -> None:
        super().__init__()
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        # With a long memory for the size of gradients, steps grow too large once nearly all answers are right.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def init(self) -> None:
        self.peers = self.collective(self.group_name, timeout=SECONDS)

    def offer(self) -> object:
        return self.model  # what a link brings into the engines

    def train(self, samples: Channel, count: int) -> float:
        """Take a step on some samples of the channel."""
        import torch
        import torch.distributed as dist

        self.optimizer.zero_grad()
        loss, change = policy_loss(self.model, samples.get_many(count, timeout=SECONDS), allowed=DIGITS)
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.peers)
            parameter.grad /= self.world_size
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return change


class Rollout(threading.Thread):
    """Generates for the next steps while the trainer learns, but never too far ahead of it."""

    def __init__(self, manager: RolloutManager, samples: Channel, args: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.manager, self.samples, self.args = manager, samples, args
        self.room = threading.Semaphore(1 + args.staleness)
        self.rewards: list[float] = []

    def run(self) -> None:
        try:
            for step in range(self.args.steps):
                self.room.acquire()
                self.rewards.append(statistics.fmean(self.generate(step)))
        finally:
            self.samples.close()  # also after an error, so that no trainer waits in vain

    def generate(self, step: int) -> list[float]:
        """Let the engines answer the prompts of a step; each that is answered goes to the trainers at once."""
        finished: dict[int, list[Sample]] = defaultdict(list)
        rewards: list[float] = []
        for place, sample in self.manager.generate(make_prompts(step, self.args.seed, PROMPTS, SAMPLES), SECONDS):
            finished[place].append(sample)
            if len(finished[place]) == SAMPLES:
                found = [reward(one.prompt, one.tokens) for one in finished[place]]
                self.samples.put_many(score(finished[place], found), timeout=SECONDS)
                rewards += found
        return rewards


def main() -> None:
    """Train, and say how the reward rises."""
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 20, "seed": 0, "staleness": 1, "ranks": 2, "engines": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    flags = {"actor_num_nodes": 1, "actor_num_gpus_per_node": args.ranks, "rollout_num_gpus": args.engines}
    flags |= {"rollout_num_gpus_per_engine": 1}
    with (
        tempfile.TemporaryDirectory() as model,
        local_cluster(f"1x{args.ranks + args.engines}"),
        Cluster(num_nodes=1, quiet=True),
        create_placement_groups(flags) as groups,
    ):
        write_model(Path(model), args.seed)
        engine = {"engine_args": (model,), "engine_kwargs": {"options": OPTIONS}}
        with (
            RayTrainGroup(flags, Trainer, groups["actor"], actor_args=(model, 1e-3)) as actor,
            RolloutManager(flags, VllmEngine, groups["rollout"], **engine) as manager,
            Channel.create("samples") as samples,
            WeightLink.between(actor.group, manager.engines.group) as link,
        ):
            actor.init().wait(SECONDS)
            manager.update_weights(link, 0)
            rollout = Rollout(manager, samples, args)
            rollout.start()
            for step in range(args.steps):
                change = max(actor.train(samples, PROMPTS * SAMPLES // args.ranks).wait(2 * SECONDS))
                manager.update_weights(link, step + 1)
                rollout.room.release()
                print(f"step {step:2}  mean reward {rollout.rewards[step]:.2f}  largest change {change:.4f}")


if __name__ == "__main__":
    main()
