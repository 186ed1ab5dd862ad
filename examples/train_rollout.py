"""Reinforcement learning with training and rollout on one cluster, colocated or disaggregated.

    python examples/train_rollout.py                     # both modes, one after the other
    python examples/train_rollout.py --mode colocate     # they share the accelerators and take turns
    python examples/train_rollout.py --mode disagg       # each has its own, and both work at the same time
    python examples/train_rollout.py --actor-num-gpus-per-node 2 --rollout-num-gpus 6 --steps 60 --seed 7

It needs numpy, aiohttp and no GPU: the policy is tiny. It sees a noisy picture of one of four things and picks one of
four actions, of which one is right. The reward is 1 or 0, and guessing earns 0.25 on average. The rest is as in a large
job: engines behind a router, a buffer of samples, weights with versions, ranks that average their gradients.

It runs on the Ray cluster at RAY_ADDRESS, or on the local cluster (`roost up 2x4`), with `--num-nodes` nodes. Without
either, it starts one on this machine for as long as it runs. The exit code is 1 if the reward did not rise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from roost import CallTimedOut, Cluster, ConfigError, Worker
from roost.rl import RayTrainGroup, RolloutManager, create_placement_groups, read_flags
from roost.runtime.connect.local_cluster import read_local_cluster
from roost.testing import NumpyEngine, TinyPolicy, local_cluster

RIGHT = np.array([2, 0, 3, 1])
THINGS = len(RIGHT)
SAMPLES = 32  # in a request to an engine, and for each rank in a step
SECONDS = 60.0  # how long any process waits for another


class Trainer(Worker):
    """One rank of the training: it learns from its own samples, and all ranks take the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = True

    def init(self, seed: int) -> None:
        self.policy = TinyPolicy.random(THINGS, THINGS, seed)

    def train(self, manager: RolloutManager, min_version: int) -> tuple[float, int, int]:
        """Take a step; return the samples' mean reward, and the oldest and newest weights that made them."""
        assert self.is_loaded, "the engines have the accelerator's memory now"
        shard = manager.get(SAMPLES, SECONDS, min_version)
        observations, actions, logprobs, rewards, versions = map(np.array, zip(*shard, strict=True))
        # Older weights may have made a sample: weigh it by how likely it is now.
        likelihoods = self.policy.probabilities(observations)[np.arange(SAMPLES), actions]
        advantages = np.minimum(likelihoods / np.exp(logprobs), 2.0) * (rewards - rewards.mean())
        gradient = self.policy.gradient(observations, actions, advantages)
        self.policy.apply({name: self._mean(gradient[name]) for name in ("w", "b")}, lr=6.0)
        return float(rewards.mean()), int(versions.min()), int(versions.max())

    def _mean(self, own: np.ndarray) -> np.ndarray:
        """Return the mean of all ranks' arrays; rank 0 computes it, so that every rank has the same."""
        name, (first, *others) = self.group_name, range(self.world_size)
        if self.rank != first:
            self.send(own, name, first)
        else:
            own = (own + sum(self.recv(name, rank, timeout=SECONDS) for rank in others)) / self.world_size
        return self.broadcast(own, [(name, [first, *others])], timeout=SECONDS)

    def update(self, manager: RolloutManager, version: int) -> str:
        """Send rank 0's weights to the engines; return a hash of this rank's weights."""
        weights = self.policy.weights
        if self.rank == 0:
            manager.update_weights(weights, version, SECONDS)
        return hashlib.sha256(weights["w"].tobytes() + weights["b"].tobytes()).hexdigest()[:12]

    def eval(self) -> float:
        """Return how often the likeliest action is right, without noise."""
        return float((self.policy.probabilities(np.eye(THINGS)).argmax(axis=1) == RIGHT).mean())

    def offload(self) -> None:
        """On a real accelerator this moves weights and optimizer state to the host's memory."""
        self.is_loaded = False

    def onload(self) -> None:
        self.is_loaded = True


class Run:
    """The training and the rollout at work together."""

    def __init__(self, train: RayTrainGroup, manager: RolloutManager, args: argparse.Namespace) -> None:
        self.train, self.manager, self.steps, self.seed = train, manager, args.steps, args.seed
        self.version, self.rewards = 0, list[float]()
        train.init(self.seed).wait(2 * SECONDS)
        self.update_engines()

    def make_samples(self, number: int) -> tuple[list[tuple], int]:
        """Let an engine act; return the samples, and the version of the weights that made them."""
        rng = np.random.default_rng([self.seed, number])
        things = rng.integers(THINGS, size=SAMPLES)
        seen = (np.eye(THINGS)[things] + rng.normal(scale=0.2, size=(SAMPLES, THINGS))).tolist()
        answer = self.manager.generate({"observations": seen, "seed": int(rng.integers(2**31))}, SECONDS)
        actions, version = answer["actions"], answer["version"]
        rewards = (actions == RIGHT[things]).astype(float)
        return list(zip(seen, actions, answer["logprobs"], rewards, [version] * SAMPLES, strict=True)), version

    def step(self, most_behind: int) -> None:
        """Train on samples whose weights are at most `most_behind` versions old."""
        reports = self.train.train(self.manager, self.version - most_behind).wait(2 * SECONDS)
        rewards, oldest, newest = zip(*reports, strict=True)
        assert self.version - most_behind <= min(oldest) <= max(newest) <= self.version
        self.rewards.append(sum(rewards) / len(rewards))
        if self.version % 5 == 0 or self.version == self.steps - 1:
            weights = " and ".join(map(str, sorted({min(oldest), max(newest)})))
            print(f"  step {self.version:2}  mean reward {self.rewards[-1]:.2f}  samples of weights {weights}")
        self.version += 1

    def update_engines(self) -> None:
        """Send the current weights to the engines."""
        names = self.train.update(self.manager, self.version).wait(2 * SECONDS)
        assert len(set(names)) == 1, f"the ranks have different weights: {names}"
        self.weights = names[0]

    def colocate(self) -> None:
        """Take turns: the side that does not work has freed the accelerators' memory."""
        train, engines, world_size = self.train, self.manager.engines, self.train.world_size
        train.offload().wait(SECONDS)
        with ThreadPoolExecutor(world_size) as pool:
            for step in range(self.steps):
                for made in pool.map(self.make_samples, range(step * world_size, (step + 1) * world_size)):
                    self.manager.put(*made, SECONDS)
                engines.offload().wait(SECONDS)
                train.onload().wait(SECONDS)
                self.step(most_behind=0)
                train.offload().wait(SECONDS)
                engines.onload().wait(SECONDS)
                self.update_engines()

    def disagg(self) -> None:
        """Work at the same time: the engines generate during training steps, and while they get new weights."""
        numbers, is_over, num_engines = itertools.count(), threading.Event(), self.manager.engines.num_engines

        def produce() -> None:
            made = None
            while not is_over.is_set():
                made = made or self.make_samples(next(numbers))
                with contextlib.suppress(CallTimedOut):  # the buffer is full: the engines are ahead
                    self.manager.put(*made, timeout=0.5)
                    made = None

        with ThreadPoolExecutor(num_engines) as pool:
            producers = [pool.submit(produce) for _ in range(num_engines)]
            try:
                for _ in range(self.steps):
                    self.step(most_behind=1)
                    self.update_engines()
            finally:
                is_over.set()
                for producer in producers:
                    producer.result(2 * SECONDS)


def run(mode: str, args: argparse.Namespace) -> bool:
    """Train in one mode; return whether the reward rose."""
    asked = {**vars(args), "colocate": mode == "colocate"}
    flags = read_flags({**asked, "rollout_num_gpus": None} if mode == "colocate" else asked)
    print(f"{mode}: {flags.train_num_gpus} ranks and {flags.num_engines} engines on {flags.num_gpus} accelerators")
    # Room for one batch: more samples would only become old.
    options = {"engine_kwargs": {"features": THINGS, "actions": THINGS}, "buffer_size": flags.train_num_gpus * SAMPLES}
    with (
        create_placement_groups(flags) as groups,
        RayTrainGroup(flags, Trainer, groups["actor"]) as train,
        RolloutManager(flags, NumpyEngine, groups["rollout"], **options) as manager,
    ):
        for place in train.group.placements:
            print(f"  rank {place.rank} on node {place.node_rank}, accelerator", *place.visible_accelerators)
        for spec in manager.engines.specs:
            print(f"  engine {spec.engine_rank} on node {spec.cluster_node_rank}, accelerators", *spec.devices)
        job = Run(train, manager, args)
        job.colocate() if mode == "colocate" else job.disagg()
        print(f"  all {train.world_size} ranks have the same weights, {job.weights}", end="; ")
        print(f"{manager.buffer_stats().dropped} samples were too old")
        print(f"  the likeliest action is right for {train.eval().wait(SECONDS)[0]:.0%} of the things")
    print(f"{mode}: mean reward {job.rewards[0]:.2f} -> {job.rewards[-1]:.2f}")
    return job.rewards[-1] > job.rewards[0]


def main() -> int | str:
    """Read the flags, find or start a cluster, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["colocate", "disagg", "both"], default="both")
    counts = {"steps": 30, "seed": 0, "num-nodes": 2, "actor-num-nodes": 1, "actor-num-gpus-per-node": 4}
    for name, default in {**counts, "rollout-num-gpus": 4, "rollout-num-gpus-per-engine": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    is_there = os.environ.get("RAY_ADDRESS") or read_local_cluster()
    place = contextlib.nullcontext() if is_there else local_cluster(f"{args.num_nodes}x4")
    with place, Cluster(num_nodes=args.num_nodes):
        modes = ["colocate", "disagg"] if args.mode == "both" else [args.mode]
        try:
            return 0 if all(run(mode, args) for mode in modes) else 1
        except ConfigError as error:
            return str(error)  # such as a cluster that is too small


if __name__ == "__main__":
    sys.exit(main())
