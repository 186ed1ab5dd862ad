"""What the search predicts, against real workers that wait as long as their profile says."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from roost import Channel, Cluster, FlexiblePlacementStrategy, Worker, WorkerGroup
from roost.config.profile import read_profile
from roost.config.run import read_run_draft
from roost.config.topology import Topology
from roost.runtime.events.format import worker_file
from roost.search.answer import Option, search
from roost.search.setup import make_setup
from soak.workers import SoakWorker
from waiting import wait_until

STEPS, WARM = 8, 2
SECONDS = 120.0


def ways(seed: int, kind: str) -> tuple[dict, dict]:
    """A random flow and its profile: together on all accelerators, apart, or apart and asynchronous."""
    choose = random.Random(f"{seed} {kind}")  # noqa: S311 - to be repeated
    counts = [4] if kind == "colocated" else [2]
    calls = ["rollout.generate", "actor.train"] + (["rollout.judge"] if choose.random() < 0.5 else [])
    step = " -> ".join(["rollout.generate", *(["rollout.judge"] if len(calls) > 2 else []), "actor.train"])
    flow = {"step": step, "weights": "actor -> rollout", "staleness": 1 if kind == "asynchronous" else 0}
    seconds = {call: {"seconds": {count: round(choose.uniform(0.15, 0.5), 3) for count in counts}} for call in calls}
    # Where they are to be apart, taking turns costs more than it gains.
    cost = 0.05 if kind == "colocated" else 0.5
    switch = {role: {"wake": cost, "sleep": cost} for role in ("rollout", "actor")}
    return flow, {"version": 1, "calls": seconds, "weights": {"seconds": 0.06}, "switch": switch}


def predict(flow: dict, profile: dict) -> Option:
    cluster = {"num_nodes": 1, "component_placement": {"actor": "0", "rollout": "0"}}
    draft = read_run_draft({"cluster": cluster, "flow": flow})
    return search(make_setup(draft.flow, read_profile(profile), Topology.from_shorthand("1x4")), 1).best


class Job:
    """Runs the steps of a flow with real workers: a thread for each event, which waits for those before it."""

    def __init__(self, groups: dict[str, WorkerGroup], ranks: dict[str, tuple[int, ...]], flow: dict, profile: dict):
        self.groups, self.flow, self.profile = groups, flow, profile
        self.ranks = {role: set(own) for role, own in ranks.items()}
        self.calls = [call.strip() for call in flow["step"].split("->")]
        self.done: defaultdict[tuple[str, int], threading.Event] = defaultdict(threading.Event)
        self.ends: dict[int, float] = {}
        self.is_shared = bool(self.ranks["actor"] & self.ranks["rollout"])
        self.staleness = flow["staleness"]

    def wait(self, event: str, step: int) -> None:
        if step >= 0:
            assert self.done[event, step].wait(SECONDS), f"{event} of step {step}"

    def nap(self, role: str, seconds: float) -> None:
        self.groups[role][0].nap(seconds).wait(SECONDS)

    def switch(self, before: str, after: str) -> float:
        costs = self.profile["switch"]
        return costs[before]["sleep"] + costs[after]["wake"] if self.is_shared and before != after else 0.0

    def run_call(self, place: int) -> None:
        """One call, step after step; the first call of a step comes after the update of an earlier one."""
        call = self.calls[place]
        role = call.partition(".")[0]
        seconds = next(iter(self.profile["calls"][call]["seconds"].values()))
        before = self.calls[place - 1].partition(".")[0] if place else role
        for step in range(STEPS):
            if place:
                self.wait(self.calls[place - 1], step)
            else:
                self.wait("weights", step - 1 - self.staleness)
                self.wait("received", step - 1)
            if role == "actor":
                self.wait("weights", step - 1)
            self.nap(role, seconds + (self.switch(before, role) if place else 0.0))
            self.done[call, step].set()

    def run_weights(self) -> None:
        """The update occupies the trainer's devices, and the engines' too unless they are behind it."""
        seconds = self.profile["weights"]["seconds"]
        for step in range(STEPS):
            self.wait(self.calls[-1], step)
            self.nap("actor", seconds)
            self.ends[step] = time.monotonic()
            self.done["weights", step].set()

    def run_receive(self) -> None:
        """The engines' part of an update: at its turn, and without waiting for the trainer if they may be behind."""
        seconds = self.profile["weights"]["seconds"]
        last = [call for call in self.calls if call.startswith("rollout")][-1]
        for step in range(STEPS):
            self.wait(last, step)
            if self.staleness:
                self.nap("rollout", seconds)
            else:
                self.wait("weights", step)
            self.done["received", step].set()

    def measure(self) -> float:
        works = [lambda place=place: self.run_call(place) for place in range(len(self.calls))]
        threads = [threading.Thread(target=work) for work in (*works, self.run_weights, self.run_receive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        return (self.ends[STEPS - 1] - self.ends[WARM - 1]) / (STEPS - WARM)


def compare(cluster: Cluster, kind: str, seeds: Iterator[int], tmp_path) -> list[float]:
    """How much longer a step took than was predicted, for each seed."""
    found = []
    for seed in seeds:
        flow, profile = ways(seed, kind)
        best = predict(flow, profile)
        assert bool(set(best.ranks["actor"]) & set(best.ranks["rollout"])) == (kind == "colocated")
        groups = {}
        for role, own in best.ranks.items():
            place = FlexiblePlacementStrategy([list(own)])
            draft = SoakWorker.create_group(str(tmp_path), f"{kind}{seed}")
            groups[role] = draft.launch(cluster, place, name=f"{role}{seed}{kind}", share=0.4)
        try:
            measured = Job(groups, dict(best.ranks), flow, profile).measure()
        finally:
            for group in groups.values():
                group.close()
        found.append(measured / (best.step_time / 1e9))
    return found


@pytest.mark.parametrize("kind", ["colocated", "disaggregated", "asynchronous"])
def test_no_step_is_shorter_than_the_search_predicts(shared_cluster, kind, tmp_path):
    (ratio,) = compare(shared_cluster, kind, iter([1]), tmp_path)
    # On a machine with much to do it takes longer.
    assert ratio > 0.99


def test_any_run_leaves_the_times_of_its_calls_for_a_profile(small_cluster, roost, tmp_path):
    folder = Path(small_cluster.run_dir)
    group = SoakWorker.create_group(str(tmp_path), "profiled").launch(small_cluster, name="actor", share=0.4)
    for _ in range(3):
        group.nap(0.05).wait(SECONDS)
    group.close()
    events = folder / worker_file("actor:0")
    wait_until(lambda: events.is_file() and events.read_text().count('"call":"nap"') == 3, "the last call")
    code, out, err = roost("profile", str(folder))
    assert code == 0, err
    nap = read_profile(yaml.safe_load(out)).calls["actor.nap"]
    assert list(nap.timings[""]) == [1]
    assert len(nap.timings[""][1].samples) == 2
    assert min(nap.timings[""][1].samples) >= 50_000_000


class Maker(Worker):
    def make(self, channel: Channel, count: int) -> None:
        for number in range(count):
            time.sleep(0.1)
            channel.put(number, timeout=SECONDS)


class Learner(Worker):
    def learn(self, channel: Channel, count: int, seconds: float) -> None:
        for _ in range(count):
            channel.get(timeout=SECONDS)
            time.sleep(seconds)


@pytest.mark.parametrize(("seconds", "is_refused"), [(0.0, False), (0.1, True)])
def test_a_job_whose_calls_meet_in_a_channel_is_predicted_or_refused(
    small_cluster, roost, tmp_path, seconds, is_refused
):
    """Waits for a channel are no work; where a call works while the other puts, no flow of calls describes the job."""
    folder, job = Path(small_cluster.run_dir), tmp_path / "job.yaml"
    flow = {"step": "maker.make -> learner.learn", "weights": "learner -> maker"}
    sections = {"cluster": {"component_placement": {"maker": 0, "learner": 0}}, "flow": flow}
    job.write_text(yaml.safe_dump(sections))
    (folder / "job.yaml").write_text(job.read_text())
    groups = [
        cls.create_group().launch(small_cluster, name=cls.__name__.lower(), share=0.4) for cls in (Maker, Learner)
    ]
    with Channel.create("samples") as channel:
        for _ in range(4):
            made, learned = groups[0].make(channel, 3), groups[1].learn(channel, 3, seconds)
            made.wait(SECONDS)
            learned.wait(SECONDS)
    for group, call in zip(groups, ("make", "learn"), strict=True):
        events = folder / worker_file(f"{group.name}:0")
        group.close()
        wait_until(lambda events=events, call=call: events.read_text().count(f'"call":"{call}"') == 4, "the last call")
    profile = tmp_path / "profile.yaml"
    code, _, err = roost("profile", str(folder), "--out", str(profile))
    assert code == 0, err
    learn = read_profile(profile).calls["learner.learn"].timings[""][1]
    assert 3 * seconds <= learn.median / 1e9 < 3 * seconds + 0.1
    code, out, err = roost("search", str(job), "--cluster", "1x1", "--profile", str(profile))
    if is_refused:
        assert code == 2, out
        assert "learner.learn begins" in err
        assert "before maker.make has ended" in err
    else:
        assert code == 0, err
        assert "with maker on 0 and learner on 0 a step took" in out


@pytest.mark.soak
def test_steps_take_as_long_as_the_search_predicts(shared_cluster, tmp_path):
    found = {}
    for kind in ("colocated", "disaggregated", "asynchronous"):
        found[kind] = compare(shared_cluster, kind, iter(range(2, 7)), tmp_path)
        print(f"{kind}: " + ", ".join(f"{ratio:.3f}" for ratio in found[kind]))
    every = [abs(ratio - 1) for ratios in found.values() for ratio in ratios]
    assert statistics.median(every) <= 0.05
