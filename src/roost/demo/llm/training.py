"""One run of the demo with a language model: engines of vLLM answer prompts, and two ranks learn from the answers."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from roost import Channel, Cluster, ClusterError, Plan
from roost.deadline import Deadline
from roost.demo.limits import RETRY_SECONDS, ROUND_SECONDS
from roost.demo.llm.model import DIGITS, make_prompts, reward, write_model
from roost.demo.rounds import Run
from roost.demo.tasks import Goal, Mode
from roost.rl import RayTrainGroup, RolloutManager, create_placement_groups
from roost.rl.engines import Sample, VllmEngine
from roost.rl.grpo import policy_loss, score
from roost.weights import WeightLink, WeightWorker

_PROMPTS, _SAMPLES = 32, 16
_RANKS, _ENGINES = 2, 2
_RATE = 1e-3
_VICTIM = 1
"""The engine that the demo kills, in the middle of answers of this round."""
_KILL_ROUND = 4
_ROUNDS_AFTER = 4
"""How many rounds there are at least once it is back."""
_OPTIONS = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": "64M", "max_model_len": 256}


class Trainer(WeightWorker):
    """One rank of the training. All have the same weights, and average their gradients."""

    def __init__(self, model: str) -> None:
        super().__init__()
        import torch

        transformers: Any = importlib.import_module("transformers")
        torch.set_num_threads(1)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        # With a long memory for the size of gradients, steps grow too large once nearly all answers are right.
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def init(self) -> None:
        """Meet the other ranks."""
        self._samples = self.connect_channel("samples")
        self._peers = self.collective(self.group_name, timeout=ROUND_SECONDS)

    def offer(self) -> Any:
        """Return the weights that the engines get."""
        return self._model

    def train(self, count: int, step: int) -> float:
        """Learn from `count` samples; return the largest change of a log probability since it was sampled."""
        import torch
        import torch.distributed as dist

        batch = self._samples.get_many(count, timeout=ROUND_SECONDS)
        self.log_metric("reward", fmean(reward(one.sample.prompt, one.sample.tokens) for one in batch), step=step)
        self._optimizer.zero_grad()
        loss, change = policy_loss(self._model, batch, allowed=DIGITS)
        loss.backward()
        for parameter in self._model.parameters():
            dist.all_reduce(parameter.grad, group=self._peers)
            parameter.grad /= self.world_size
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return change


def train(cluster: Cluster, plan: Plan, mode: Mode, *, seed: int, goal: Goal, kill: bool, watcher: Any) -> Run:
    """Train in one mode until the goal is reached."""
    del plan
    began = time.monotonic()
    model = Path(cluster.job.run_dir.path) / "model"
    write_model(model, seed)
    flags = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": _RANKS,
        "rollout_num_gpus": _ENGINES,
        "rollout_num_gpus_per_engine": 1,
        "colocate": mode is Mode.COLOCATE,
    }
    with contextlib.ExitStack() as stack:
        groups = stack.enter_context(create_placement_groups(flags, cluster))
        since = time.monotonic()
        actor = stack.enter_context(
            RayTrainGroup(flags, Trainer, groups["actor"], cluster=cluster, actor_args=(str(model),))
        )
        watcher.launched("actor", _RANKS, time.monotonic() - since)
        since = time.monotonic()
        options: dict[str, Any] = {"engine_args": (str(model),), "engine_kwargs": {"options": _OPTIONS}}
        manager = stack.enter_context(
            RolloutManager(
                flags, VllmEngine, groups["rollout"], cluster=cluster, health_timeout=ROUND_SECONDS, **options
            )
        )
        watcher.launched("rollout", _ENGINES, time.monotonic() - since)
        samples = stack.enter_context(Channel.create("samples"))
        actor.init().wait(ROUND_SECONDS)
        link = stack.enter_context(WeightLink.between(actor.group, manager.engines.group))
        # One generates ahead, the other brings an engine back that was killed.
        aside = stack.enter_context(ThreadPoolExecutor(2))
        parts: dict[str, Any] = {"cluster": cluster, "actor": actor, "manager": manager, "aside": aside}
        run = _Run(mode=mode, watcher=watcher, has_to_kill=kill, seed=seed, samples=samples, link=link, **parts)
        manager.update_weights(link, 0, ROUND_SECONDS)
        run.seconds["launch"] = time.monotonic() - began
        run.train(goal)
        # The time may have been over before it was back.
        if run.mending is not None:
            run.mending.result(ROUND_SECONDS)
    spent = run.ended - run.began
    # Engines answer requests, which are no calls: only their driver knows how long they worked.
    run.busy = {"rollout": min(1.0, run.generating / spent)}
    run.remarks = (
        f"{run.tokens / max(run.generating, 1e-9):,.0f} tokens a second while generating; "
        f"a step took {spent / len(run.rounds):.2f} s",
    )
    return run


class _Made(NamedTuple):
    """The samples of a round, which are in the channel, and how long it took to make them."""

    samples: list[Sample]
    seconds: float


@dataclass(kw_only=True)
class _Run(Run):
    """Trainer and engines at work together."""

    verb = "generate"

    actor: RayTrainGroup
    manager: RolloutManager
    samples: Channel
    link: WeightLink
    seed: int
    aside: ThreadPoolExecutor
    version: int = 0
    tokens: int = 0
    generating: float = 0.0
    """The seconds in which the engines answered what was learned from."""
    mending: Future[int] | None = None
    """Brings an engine that was killed back, and returns how many rounds were over then."""

    def is_over(self, goal: Goal) -> bool:
        """Whether it is, some rounds after an engine that was killed is back."""
        if self.mending is not None:
            is_back = self.mending.done() and len(self.rounds) >= self.mending.result() + _ROUNDS_AFTER
            # Only the time ends it before then.
            goal = goal if is_back else replace(goal, least_rounds=len(self.rounds) + 1)
        return super().is_over(goal)

    def make(self, step: int) -> Callable[[], _Made]:
        return partial(self.aside.submit(self._generate, step).result, ROUND_SECONDS)

    def _generate(self, step: int) -> _Made:
        """Let the engines answer the prompts of a round; each that is answered goes to the trainers at once."""
        began = time.monotonic()
        finished: dict[int, list[Sample]] = defaultdict(list)
        for place, sample in self.manager.generate(make_prompts(step, self.seed, _PROMPTS, _SAMPLES), ROUND_SECONDS):
            finished[place].append(sample)
            if len(finished[place]) == _SAMPLES:
                rewards = [reward(one.prompt, one.tokens) for one in finished[place]]
                self.samples.put_many(score(finished[place], rewards), timeout=ROUND_SECONDS)
            if self.has_to_kill and step >= _KILL_ROUND:
                worker = f"rollout:{_VICTIM}"
                self.kill(worker)
                self.mending = self.aside.submit(self._mend, worker)
        return _Made([one for group in finished.values() for one in group], time.monotonic() - began)

    def _mend(self, worker: str) -> int:
        """Go on without an engine that died, restart it in its place, and bring it to the present version."""
        began = time.monotonic()
        group = self.manager.engines.workers_of(_VICTIM)
        (end,) = group.health().outcomes(ROUND_SECONDS)
        self.link.without(worker, timeout=ROUND_SECONDS)
        self.manager.restart_engine(_VICTIM, weights=self.link, timeout=ROUND_SECONDS)
        back = len(self.rounds)
        error = str(end.error).partition("\n")[0]
        self.note_restart(worker, group, time.monotonic() - began, error)
        return back

    def learn(self, made: _Made, seconds: dict[str, float]) -> None:
        engines, takes_turns = self.manager.engines, self.mode is Mode.COLOCATE
        if takes_turns:
            # The engines sleep while all ranks learn.
            engines.offload().wait(ROUND_SECONDS)
        with self.phase("learn", seconds):
            self.actor.train(_PROMPTS * _SAMPLES // _RANKS, self.version).wait(ROUND_SECONDS)
        samples, version = made.samples, self.version
        self.version += 1
        with self.phase("weights", seconds):
            if takes_turns:
                engines.onload().wait(ROUND_SECONDS)
            deadline = Deadline.after(ROUND_SECONDS)
            while True:
                try:
                    self.manager.update_weights(self.link, self.version, ROUND_SECONDS)
                    break
                except ClusterError:
                    # An engine that has just died gets them when it is back.
                    if self.mending is None or deadline.is_over:
                        raise
                    time.sleep(RETRY_SECONDS)
        self.tokens += sum(len(one.tokens) for one in samples)
        self.generating += made.seconds
        self.end_round(
            mean_return=fmean(reward(one.prompt, one.tokens) for one in samples),
            episodes=len(samples),
            seconds=seconds,
            made_in=made.seconds,
            behind=version - min(min(one.versions) for one in samples),
        )
