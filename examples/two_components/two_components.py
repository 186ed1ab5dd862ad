"""A job of two components: rollout workers generate samples, trainers learn from them and send new weights back.

`job.yaml` says where they go, and `roost run job.yaml` launches them and calls `main`.
"""

from __future__ import annotations

from collections.abc import Iterator

from roost import Job, Worker


class Rollout(Worker):
    """Generates samples with its latest weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0

    def set_weight(self, weight: float) -> None:
        self.weight = weight

    def samples(self, count: int) -> Iterator[float]:
        """Yield samples one at a time, so that the caller can use each as it arrives."""
        for number in range(count):
            yield 10.0 - self.weight + self.rank + number


class Actor(Worker):
    """Moves its weight towards the mean of the samples."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.weight = 0.0
        self.learning_rate = learning_rate

    def train(self, samples: list[float]) -> float:
        with self.worker_timer("update"):
            self.weight += self.learning_rate * sum(samples) / len(samples)
        if self.rank == 0:
            self.log_info(f"the weight is {self.weight:.2f}")
        return self.weight


def main(job: Job) -> None:
    """Run the job; `roost run` calls this once every group is ready."""
    actor, rollout = job.groups["actor"], job.groups["rollout"]
    for step in range(job.config["steps"]):
        samples = [sample for _, sample in rollout.stream("samples", 4)]
        training = actor.train(sorted(samples))
        weight = training.wait()[0]
        rollout.set_weight(weight).wait()
        print(f"step {step}: {len(samples)} samples, weight {weight:.2f}, timed {sorted(training.consume_durations())}")
