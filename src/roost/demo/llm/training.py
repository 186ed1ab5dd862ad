"""One run of the demo with a language model: engines of vLLM answer prompts, and two ranks learn from the answers."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from statistics import fmean
from typing import Any

from roost import Channel, Cluster, ClusterError, Plan
from roost.deadline import Deadline
from roost.demo.jobs import Mode
from roost.demo.limits import RETRY_SECONDS, ROUND_SECONDS
from roost.demo.llm.model import DIGITS, make_prompts, reward, write_model
from roost.demo.rounds import Goal, Restart, Round, Trained, Watcher
from roost.rl import RayTrainGroup, RolloutManager, create_placement_groups
from roost.rl.engines import Sample, VllmEngine
from roost.rl.grpo import policy_loss, score
from roost.weights import WeightLink, WeightWorker

_PROMPTS, _SAMPLES = 32, 16
_RANKS, _ENGINES = 2, 2
_RATE = 1e-3
_STALENESS = 1
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


def train(cluster: Cluster, plan: Plan, mode: Mode, *, seed: int, goal: Goal, kill: bool, watcher: Watcher) -> Trained:
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
        run = _Run(cluster, actor, manager, samples, link, watcher, seed=seed, kill=kill)
        run.seconds["launch"] = time.monotonic() - began
        run.colocate(goal) if mode is Mode.COLOCATE else run.disagg(goal)
        ended = time.time()
    spent = ended - run.began
    # Engines answer requests, which are no calls: only their driver knows how long they worked.
    busy = {"rollout": min(1.0, run.generating / spent)}
    return Trained(
        mode=mode,
        rounds=run.rounds,
        seconds=run.seconds,
        began=run.began,
        ended=ended,
        restarts=tuple(run.restarts),
        remarks=(
            f"{run.tokens / max(run.generating, 1e-9):,.0f} tokens a second while generating; "
            f"a step took {spent / len(run.rounds):.2f} s",
        ),
        busy=busy,
    )


class _Made:
    """The samples of a round, which are in the channel, in short."""

    def __init__(self, samples: list[Sample], seconds: float) -> None:
        self.reward = fmean(reward(one.prompt, one.tokens) for one in samples)
        self.oldest = min(min(one.versions) for one in samples)
        self.tokens = sum(len(one.tokens) for one in samples)
        self.count = len(samples)
        self.seconds = seconds


class _Run:
    """Trainer and engines at work together, and the record of what they did."""

    def __init__(
        self,
        cluster: Cluster,
        actor: RayTrainGroup,
        manager: RolloutManager,
        samples: Channel,
        link: WeightLink,
        watcher: Watcher,
        *,
        seed: int,
        kill: bool,
    ) -> None:
        self._cluster, self._actor, self._manager = cluster, actor, manager
        self._samples, self._link, self._watcher = samples, link, watcher
        self._seed, self._has_to_kill = seed, kill
        self.rounds: tuple[Round, ...] = ()
        self.restarts: list[Restart] = []
        self.seconds: dict[str, float] = {}
        self._version = 0
        self.tokens = 0
        self.generating = 0.0
        """The seconds in which the engines answered what was learned from."""
        self._mending: threading.Thread | None = None
        self._failure: Exception | None = None
        """Why an engine that was killed did not come back."""
        self._back = 0
        """How many rounds were over when an engine that was killed was back."""
        self._began = time.monotonic()
        manager.update_weights(link, 0, ROUND_SECONDS)
        self.began = time.time()

    def colocate(self, goal: Goal) -> None:
        """Take turns: the engines answer with the newest weights, then sleep while all ranks learn."""
        engines = self._manager.engines
        while not self._is_over(goal):
            seconds: dict[str, float] = {}
            with self._phase("generate", seconds):
                made = self._generate(len(self.rounds))
            engines.offload().wait(ROUND_SECONDS)
            self._learn(made, seconds, lambda: engines.onload().wait(ROUND_SECONDS))

    def disagg(self, goal: Goal) -> None:
        """Work at the same time: the engines answer the prompts of a round while the ranks learn from the last one."""
        room, ready, is_over = threading.Semaphore(1 + _STALENESS), Queue[_Made | BaseException](), threading.Event()

        def produce() -> None:
            step = 0
            try:
                while room.acquire(timeout=ROUND_SECONDS) and not is_over.is_set():
                    ready.put(self._generate(step))
                    step += 1
            except BaseException as error:
                ready.put(error)

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        try:
            while not self._is_over(goal):
                seconds: dict[str, float] = {}
                with self._phase("generate", seconds):
                    made = ready.get(timeout=ROUND_SECONDS)
                if isinstance(made, BaseException):
                    raise made
                self._learn(made, seconds)
                room.release()
        finally:
            is_over.set()
            room.release()
            producer.join(ROUND_SECONDS)
            if self._mending is not None:
                self._mending.join(ROUND_SECONDS)
        # The time may have been over before it was back.
        if self._failure is not None:
            raise self._failure
        if self._mending is not None and not self.restarts:
            raise ClusterError(f"rollout:{_VICTIM} was killed, and is not back after {ROUND_SECONDS:g} s")

    def _is_over(self, goal: Goal) -> bool:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._began > goal.seconds:
            return bool(self.rounds)
        if self._mending is not None and (self._mending.is_alive() or len(self.rounds) < self._back + _ROUNDS_AFTER):
            return False
        return len(self.rounds) >= goal.least_rounds and self.rounds[-1].mean_return >= goal.mean_return

    def _generate(self, step: int) -> _Made:
        """Let the engines answer the prompts of a round; each that is answered goes to the trainers at once."""
        began = time.monotonic()
        finished: dict[int, list[Sample]] = defaultdict(list)
        for place, sample in self._manager.generate(make_prompts(step, self._seed, _PROMPTS, _SAMPLES), ROUND_SECONDS):
            finished[place].append(sample)
            if len(finished[place]) == _SAMPLES:
                rewards = [reward(one.prompt, one.tokens) for one in finished[place]]
                self._samples.put_many(score(finished[place], rewards), timeout=ROUND_SECONDS)
            if self._has_to_kill and step >= _KILL_ROUND:
                self._has_to_kill = False
                self._kill(f"rollout:{_VICTIM}")
        return _Made([one for group in finished.values() for one in group], time.monotonic() - began)

    def _kill(self, worker: str) -> None:
        pid = self._pid_of(worker)
        self._watcher.killing(worker, pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._mending = threading.Thread(target=self._try_to_mend, args=(worker, len(self.rounds)), daemon=True)
        self._mending.start()

    def _pid_of(self, worker: str) -> int:
        return self._cluster.worker_manager.get_workers([worker])[0].pid or 0

    def _try_to_mend(self, worker: str, after_round: int) -> None:
        try:
            self._mend(worker, after_round)
        except Exception as error:
            self._failure = error

    def _mend(self, worker: str, after_round: int) -> None:
        """Go on without an engine that died, restart it in its place, and bring it to the present version."""
        began, rank = time.monotonic(), int(worker.rpartition(":")[2])
        group = self._manager.engines.workers_of(rank)
        (end,) = group.health().outcomes(ROUND_SECONDS)
        self._link.without(worker, timeout=ROUND_SECONDS)
        self._manager.restart_engine(rank, weights=self._link, timeout=ROUND_SECONDS)
        place = group.placements[0]
        restart = Restart(
            worker=worker,
            where=f"node {place.cluster_node_rank}, accelerator {','.join(map(str, place.local_hardware_ranks))}",
            pid=self._pid_of(worker),
            seconds=time.monotonic() - began,
            after_round=after_round,
            error=str(end.error).partition("\n")[0],
        )
        self._back = len(self.rounds)
        self.restarts.append(restart)
        self._watcher.restarted(restart)

    def _learn(self, made: _Made, seconds: dict[str, float], wake: Any = None) -> None:
        """Learn from the samples of a round, bring the new weights into the engines, and end the round."""
        with self._phase("learn", seconds):
            self._actor.train(_PROMPTS * _SAMPLES // _RANKS, self._version).wait(ROUND_SECONDS)
        behind = self._version - made.oldest
        self._version += 1
        with self._phase("weights", seconds):
            if wake:
                wake()
            self._update()
        self.tokens += made.tokens
        self.generating += made.seconds
        done = Round(
            number=len(self.rounds) + 1,
            mean_return=made.reward,
            episodes=made.count,
            seconds=seconds,
            made_in=made.seconds,
            behind=behind,
        )
        self.rounds += (done,)
        self._watcher.round_ended(done)

    def _update(self) -> None:
        """Bring the weights into every engine that lives; an engine that has just died gets them when it is back."""
        deadline = Deadline.after(ROUND_SECONDS)
        while True:
            try:
                self._manager.update_weights(self._link, self._version, ROUND_SECONDS)
            except ClusterError:
                if self._mending is None or deadline.is_over:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return

    @contextlib.contextmanager
    def _phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """Add the time of the `with` block to the whole run, and to a round."""
        began = time.monotonic()
        try:
            yield
        finally:
            for spent in (self.seconds, seconds):
                spent[name] = spent.get(name, 0.0) + time.monotonic() - began
