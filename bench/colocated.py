"""Trains a language model of a billion parameters with GRPO, where trainer and engine take turns on one GPU.

python bench/colocated.py [STEPS]    # needs a GPU with 40 GB, torch and transformers

The trainer has weights in float32 and Adam's two moments of each; while the engine generates, gradients are gone and
the moments are on the host. The engine has weights in bfloat16 and its cache; while the trainer learns, both are away.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from roost import Cluster
from roost.demo.llm.model import DIGITS, make_prompts, reward
from roost.machine.devices import nvidia_devices
from roost.rl import RayTrainGroup, RolloutManager, create_placement_groups
from roost.rl.engines import TransformersEngine
from roost.rl.grpo import Scored, policy_loss, score
from roost.rl.host_copies import HostCopies
from roost.testing import local_cluster
from roost.weights import WeightLink, WeightWorker

PROMPTS, SAMPLES = 32, 16
SECONDS = 300.0
FLAGS = {
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "colocate": True,
}


def make_model() -> Any:
    """A model with 1.3 billion random parameters, on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Trainer(WeightWorker):
    """The one rank of the training."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.away = HostCopies()

    def offer(self) -> Any:
        return self.model

    def count(self) -> int:
        return sum(one.numel() for one in self.model.parameters())

    def train(self, batch: list[Scored]) -> float:
        import torch

        with torch.autocast("cuda", torch.bfloat16):
            loss, change = policy_loss(self.model, batch, allowed=DIGITS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        torch.cuda.synchronize()
        return change

    def offload(self) -> None:
        """Leave the device to the engine, but for the weights."""
        self.optimizer.zero_grad(set_to_none=True)
        self.away.leave(state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))

    def onload(self) -> None:
        self.away.come_back()

    def most_memory(self) -> int:
        """The most bytes that torch had of the device in this process."""
        import torch

        return torch.cuda.max_memory_reserved()


class Watch:
    """Measures how long phases take, and how much of the device is in use in each."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.used: defaultdict[str, int] = defaultdict(int)
        self._phase = ""
        self._is_over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase, began = name, time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - began)
        self._note()
        self._phase = ""

    def _note(self) -> None:
        name = self._phase
        self.used[name] = max(self.used[name], nvidia_devices()[0][0].memory_used or 0)

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self._note()

    def close(self) -> None:
        self._is_over.set()


def main(steps: int) -> None:
    """Train for some steps, and print the table."""
    watch, rewards = Watch(), []
    with (
        contextlib.closing(watch),
        local_cluster("1x1"),
        Cluster(num_nodes=1, quiet=True),
        create_placement_groups(FLAGS) as groups,
        RayTrainGroup(FLAGS, Trainer, groups["actor"], timeout=SECONDS) as actor,
        RolloutManager(
            FLAGS,
            TransformersEngine,
            groups["rollout"],
            engine_args=(make_model,),
            engine_kwargs={"dtype": "bfloat16", "max_batch": PROMPTS * SAMPLES},
            health_timeout=SECONDS,
        ) as manager,
        # The engine is idle during an update, and has no room for a second version.
        WeightLink.between(actor.group, manager.engines.group, in_place=True, timeout=SECONDS) as link,
    ):
        print(f"{actor.group.count().wait(SECONDS)[0] / 1e9:.2f} billion parameters")
        actor.offload().wait(SECONDS)
        for step in range(steps):
            with watch.phase("weights to the engine, float32 to bfloat16"):
                manager.update_weights(link, step, SECONDS)
            prompts = make_prompts(step, 0, PROMPTS, SAMPLES)
            answers: defaultdict[int, list[Any]] = defaultdict(list)
            with watch.phase("generate"):
                for place, sample in manager.generate(prompts, SECONDS):
                    answers[place].append(sample)
            made = [one for some in answers.values() for one in some]
            versions = {version for one in made for version in one.versions}
            if len(made) != PROMPTS * SAMPLES or versions != {step}:
                raise SystemExit(f"{len(made)} samples of versions {versions} in step {step}")
            found = {place: [reward(one.prompt, one.tokens) for one in some] for place, some in answers.items()}
            rewards.append(statistics.fmean(value for values in found.values() for value in values))
            batch = [one for place, some in answers.items() for one in score(some, found[place])]
            with watch.phase("engine sleeps"):
                manager.engines.offload().wait(SECONDS)
            with watch.phase("trainer wakes up"):
                actor.onload().wait(SECONDS)
            with watch.phase("learn"):
                change = actor.train(batch).wait(SECONDS)[0]
            with watch.phase("trainer sleeps"):
                actor.offload().wait(SECONDS)
            with watch.phase("engine wakes up"):
                manager.engines.onload().wait(SECONDS)
            print(f"step {step:2}  mean reward {rewards[-1]:.2f}  largest change {change:.4f}", flush=True)
        most = actor.group.most_memory().wait(SECONDS)[0]
    print(f"| {'a step':45} | median, s | most of the device, GB |\n|---|---:|---:|")
    for name, seconds in watch.seconds.items():
        print(f"| {name:45} | {statistics.median(seconds[1:] or seconds):9.3f} | {watch.used[name] / 1e9:.1f} |")
    print(f"the trainer's process had at most {most / 1e9:.1f} GB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
