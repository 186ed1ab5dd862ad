"""Post-train a language model with GRPO: engines of vLLM, a data-parallel trainer, samples through a channel.

    python examples/grpo.py                          # writes a tiny model, and trains it in a minute on two cores
    python examples/grpo.py --model DIR --colocate   # trainer and engines share the accelerators and take turns

The engines generate while the trainer learns, with weights at most `--staleness` versions old. The task is to repeat
the digit of a prompt, as in `5=555555`; the reward is the part that is right. It needs torch, transformers and vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from roost import Channel, Cluster
from roost.demo.llm.model import make_prompts, reward, write_model
from roost.rl import RayTrainGroup, RolloutManager, create_placement_groups
from roost.rl.engines import Sample, VllmEngine
from roost.testing import local_cluster
from roost.weights import WeightLink, WeightWorker

PROMPTS, SAMPLES = 32, 16  # of a step, and for each prompt
SECONDS = 120.0  # how long anything may take
OPTIONS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": "64M", "max_model_len": 256}


@dataclass(frozen=True)
class Scored:
    """A sample, and how much better it is than the others of its prompt."""

    sample: Sample
    advantage: float


class Trainer(WeightWorker):
    """One rank of the training. All have the same weights, and average their gradients."""

    def __init__(self, model: str, lr: float) -> None:
        super().__init__()
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    def init(self) -> None:
        self.peers = self.collective(self.group_name, timeout=SECONDS)

    def offer(self) -> object:
        return self.model

    def train(self, samples: Channel, count: int) -> float:
        """Take a step on `count` samples of the channel; returns the largest change of a probability's logarithm."""
        import torch
        import torch.distributed as dist

        batch: list[Scored] = samples.get_many(count, timeout=SECONDS)
        width = max(len(one.sample.prompt) + len(one.sample.tokens) for one in batch)
        tokens = torch.zeros(count, width, dtype=torch.long)
        old, mask = torch.zeros(count, width), torch.zeros(count, width)
        for row, one in enumerate(batch):
            start, made = len(one.sample.prompt), torch.tensor(one.sample.tokens)
            tokens[row, :start] = torch.tensor(one.sample.prompt)
            tokens[row, start : start + len(made)] = made
            old[row, start : start + len(made)] = torch.tensor(one.sample.logprobs)
            mask[row, start : start + len(made)] = 1.0
        advantages = torch.tensor([one.advantage for one in batch])[:, None]
        logits = self.model(tokens).logits[:, :-1]
        allowed = make_prompts(0, 0, 1, 1)[0].allowed_token_ids  # what the engines sampled from
        limits = torch.full(logits.shape[-1:], -torch.inf)
        limits[list(allowed)] = 0.0
        new = torch.log_softmax(logits + limits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        old, mask = old[:, 1:], mask[:, 1:]
        change = torch.where(mask > 0, new - old, 0.0)
        ratio = change.exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        self.optimizer.zero_grad()
        (-(gain * mask).sum() / mask.sum()).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.peers)
            parameter.grad /= self.world_size
        self.optimizer.step()
        return float(change.detach().abs().max())


def score(samples: list[Sample]) -> list[Scored]:
    """Compare the samples of one prompt with each other."""
    rewards = [reward(one.prompt, one.tokens) for one in samples]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [Scored(one, (value - mean) / (spread + 1e-4)) for one, value in zip(samples, rewards, strict=True)]


class RollOut(threading.Thread):
    """Generates for the next steps while the trainer learns, but never too far ahead of it."""

    def __init__(self, manager: RolloutManager, samples: Channel, args: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.manager, self.samples, self.args = manager, samples, args
        self.room = threading.Semaphore(1 + args.staleness)
        self.rewards: list[float] = []

    def run(self) -> None:
        for step in range(self.args.steps):
            self.room.acquire()
            finished: dict[int, list[Sample]] = defaultdict(list)
            for place, sample in self.manager.generate(make_prompts(step, self.args.seed, PROMPTS, SAMPLES), SECONDS):
                finished[place].append(sample)
                if len(finished[place]) == SAMPLES:
                    self.samples.put_many(score(finished[place]), timeout=SECONDS)
            every = [reward(one.prompt, one.tokens) for group in finished.values() for one in group]
            self.rewards.append(statistics.fmean(every))


def main() -> None:
    """Train, and say how the reward rises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--colocate", action="store_true")
    for name, default in {"steps": 20, "seed": 0, "staleness": 1, "ranks": 2, "engines": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sizes = {"actor_num_nodes": 1, "actor_num_gpus_per_node": args.ranks, "rollout_num_gpus": args.engines}
    flags = {**sizes, "colocate": args.colocate, "rollout_num_gpus_per_engine": 1}
    with tempfile.TemporaryDirectory() as made, local_cluster("1x4"), Cluster(num_nodes=1, quiet=True):
        model = str(args.model or made)
        if args.model is None:
            write_model(Path(made), args.seed)
        with (
            create_placement_groups(flags) as groups,
            RayTrainGroup(flags, Trainer, groups["actor"], actor_args=(model, 2e-3)) as actor,
            RolloutManager(
                flags, VllmEngine, groups["rollout"], engine_args=(model,), engine_kwargs={"options": OPTIONS}
            ) as manager,
            Channel.create("samples") as samples,
            WeightLink.between(actor.group, manager.engines.group) as link,
        ):
            actor.init().wait(SECONDS)
            manager.update_weights(link, 0)
            rollout = RollOut(manager, samples, args)
            rollout.start()
            for step in range(args.steps):
                changes = actor.train(samples, PROMPTS * SAMPLES // args.ranks).wait(2 * SECONDS)
                manager.update_weights(link, step + 1)
                rollout.room.release()
                print(f"step {step:2}  mean reward {rollout.rewards[step]:.2f}  largest change {max(changes):.4f}")


if __name__ == "__main__":
    main()
