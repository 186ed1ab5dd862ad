"""A driver of the soak: random work from a seed, every operation of it written down. Run as a program of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from roost import (
    CallTimedOut,
    Channel,
    ChannelClosed,
    Cluster,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
    RoostError,
    WorkerGroup,
    make_plan,
)
from roost.runtime.connect import head
from roost.weights.link import WeightLink
from soak.record import Recorder
from soak.workers import SoakWorker, inside

OPEN_SECONDS = 30.0
LAUNCH_SECONDS = 20.0
CALL_SECONDS = 10.0
END_SECONDS = 15.0
CLOSE_SECONDS = 30.0
CHANNEL_SECONDS = LAUNCH_SECONDS + CLOSE_SECONDS
PROVE_SECONDS = 20.0
STATS_SECONDS = 60.0
"""What a manager has to answer a call that takes no timeout."""
WEIGHTS = {"w": [[0.0, 1.0]] * 4, "b": [0.0, 0.0]}


class Soaked:
    """One driver at work."""

    def __init__(self, folder: Path, who: str, seed: int, num_nodes: int, least_nodes: int, seconds: float) -> None:
        self.folder = folder
        self.who = who
        self.num_nodes = num_nodes
        self.least_nodes = least_nodes
        self.choose = random.Random(seed)  # noqa: S311 - to be repeated
        self.recorder = Recorder(folder, who)
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self.groups: list[WorkerGroup] = []
        self.launched = 0
        self.ports = 10**9
        self.cluster: Cluster

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until

    def open(self) -> bool:
        """Open the Cluster, with fewer nodes if some are gone; whether that worked."""
        num_nodes = self.num_nodes
        while self.has_time:
            with self.recorder.op("open", OPEN_SECONDS) as op:
                run_dir = self.folder / "disk" / f"{self.who}-{self.launched}"
                self.cluster = Cluster(num_nodes=num_nodes, timeout=OPEN_SECONDS, run_dir=run_dir, quiet=True)
            if op.ok:
                self.resources("opened")
                self.until = time.monotonic() + self.seconds
                return True
            num_nodes = max(self.least_nodes, num_nodes - 1)
            self.launched += 1
            time.sleep(0.5)
        return False

    def close(self) -> None:
        """Close everything, and write down what is still open after it."""
        self.prove()
        for group in reversed([*self.groups]):
            self.end_group(group)
        self.resources("groups closed")
        with self.recorder.op("close cluster", CLOSE_SECONDS):
            self.cluster.close()
        self.resources("closed")

    def prove(self) -> None:
        """Launch and call a group on the head, which is always there; try for some time, as after a fault."""
        ok = False
        deadline = time.monotonic() + PROVE_SECONDS
        while not ok and time.monotonic() < deadline:
            self.launched += 1
            with self.recorder.op("prove", LAUNCH_SECONDS + CALL_SECONDS + CLOSE_SECONDS) as op:
                draft = SoakWorker.create_group(str(self.folder), self.who)
                strategy, name = NodePlacementStrategy([0]), f"p{self.launched}"
                with draft.launch(self.cluster, strategy, name=name, timeout=LAUNCH_SECONDS) as group:
                    op.expect(group.echo("here").wait(CALL_SECONDS), [(0, "here")])
            ok = op.ok
            time.sleep(0.0 if ok else 0.5)
        self.recorder.note("proved", ok=ok)

    def resources(self, when: str, **more: Any) -> None:
        """Write down what this process has open."""
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("roost")]
        # Calls of Ray's that hang have threads without a name.
        threads += [f"roost-{what}" for what in [*head._running.values()]]
        with contextlib.suppress(Exception):
            if when in ("opened", "groups closed"):
                more["ports"] = self.count_ports()
        self.recorder.note("resources", when=when, descriptors=psutil.Process().num_fds(), threads=threads, **more)

    def count_ports(self) -> int:
        """Count the leased ports, after a moment in which those of processes that ended are released."""
        manager = self.cluster.node_manager.within(CALL_SECONDS)
        deadline = time.monotonic() + CALL_SECONDS
        self.ports = min(self.ports, manager.count_leased_ports())
        while (found := manager.count_leased_ports()) > self.ports and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    # Groups that come and go.

    def work(self) -> None:
        """Do one random thing after the other."""
        steps: list[tuple[int, Callable[[], None]]] = [
            (3, self.launch),
            (8, self.call),
            (4, self.map),
            (4, self.stream),
            (3, self.channel),
            (3, self.message),
            (3, self.update),
            (2, self.race),
            (2, self.reward),
            (2, self.pipeline),
            (2, self.fail),
            (1, self.die),
            (3, self.restart),
            (2, self.reserve),
            (2, self.end),
        ]
        weights = [weight for weight, _ in steps]
        while self.has_time:
            self.choose.choices([step for _, step in steps], weights)[0]()
            time.sleep(self.choose.uniform(0.0, 0.1))

    def strategy(self) -> PlacementStrategy:
        """Choose where a group goes: a few accelerators in order, some of them, or nodes."""
        total = self.cluster.num_accelerators
        kind = self.choose.choice(["packed", "flexible", "flexible", "node"])
        if kind == "node" or not total:
            nodes = range(self.cluster.num_nodes)
            return NodePlacementStrategy(sorted(self.choose.choices(nodes, k=self.choose.randint(1, 3))))
        if kind == "packed":
            first = self.choose.randrange(total)
            return PackedPlacementStrategy(first, min(total - 1, first + self.choose.randint(0, 2)))
        ranks = self.choose.sample(range(total), self.choose.randint(1, min(3, total)))
        return FlexiblePlacementStrategy([[rank] for rank in sorted(ranks)])

    def launch(self) -> None:
        if len(self.groups) >= 2:
            return
        self.launched += 1
        strategy, restarts = self.strategy(), self.choose.choice([0, 0, 1, 2])
        share = self.choose.choice([None, None, 0.5, 0.3])
        name = f"g{self.launched}"
        with self.recorder.op("launch", LAUNCH_SECONDS, name=name, strategy=repr(strategy), restarts=restarts):
            draft = SoakWorker.create_group(str(self.folder), self.who)
            self.groups.append(
                draft.launch(self.cluster, strategy, name=name, timeout=LAUNCH_SECONDS, restarts=restarts, share=share)
            )

    def pick(self) -> WorkerGroup | None:
        return self.choose.choice(self.groups) if self.groups else None

    def call(self) -> None:
        group, value = self.pick(), self.choose.randrange(10**6)
        if group is None:
            return
        some = group.on(*self.choose.sample(group.ranks, self.choose.randint(1, len(group))))
        with self.recorder.op("call", CALL_SECONDS) as op:
            op.expect(some.echo(value).wait(CALL_SECONDS), [(rank, value) for rank in some.ranks])

    def map(self) -> None:
        group = self.pick()
        if group is None:
            return
        values = [self.choose.randrange(10**6) for _ in group.ranks]
        with self.recorder.op("map", CALL_SECONDS) as op:
            got = group.map("echo", values).wait(CALL_SECONDS)
            op.expect(got, list(zip(group.ranks, values, strict=True)))

    def stream(self) -> None:
        group, number = self.pick(), self.choose.randint(1, 20)
        if group is None:
            return
        with self.recorder.op("stream", 3 * CALL_SECONDS) as op:
            got: dict[int, list[Any]] = {}
            for rank, item in group.stream("count", number).within(CALL_SECONDS):
                got.setdefault(rank, []).append(item)
            op.expect(got, {rank: [(rank, item) for item in range(number)] for rank in group.ranks})

    def channel(self) -> None:
        """Let all ranks put values into a new channel, and take them all out again, here or in one of them."""
        group, number = self.pick(), self.choose.randint(1, 20)
        if group is None:
            return
        in_worker = self.choose.random() < 0.5
        limit = 3 * CALL_SECONDS + CHANNEL_SECONDS
        with self.recorder.op("channel", limit) as op, self.new_channels(1) as (channel,):
            group.pour(channel, list(range(number)), CALL_SECONDS).wait(CALL_SECONDS)
            if in_worker:
                taken = group[0].take(channel, number * len(group), CALL_SECONDS).wait(CALL_SECONDS)[0]
            else:
                taken = channel.get_many(number * len(group), timeout=CALL_SECONDS)
            got: dict[int, list[Any]] = {}
            for rank, value in taken:
                got.setdefault(rank, []).append(value)
            # What a receive that was given up had got comes back, perhaps behind the next item.
            got = {rank: sorted(values) for rank, values in got.items()} if in_worker else got
            op.expect(got, {rank: list(range(number)) for rank in group.ranks})
            op.expect(channel.qsize(timeout=CALL_SECONDS), 0)

    @contextlib.contextmanager
    def new_channels(self, count: int) -> Iterator[list[Channel]]:
        """Make channels, each on any node, and close them after a block."""
        self.launched += 1
        made = []
        with contextlib.ExitStack() as stack:
            for number in range(count):
                node = self.choose.randrange(self.cluster.num_nodes)
                new = Channel.create(f"c{self.launched}-{number}", node_rank=node, timeout=LAUNCH_SECONDS)
                made.append(stack.enter_context(new))
            yield made

    def message(self) -> None:
        """Let each rank send a value to the next one."""
        group = self.pick()
        if group is None:
            return
        values = [self.choose.randrange(10**6) for _ in group.ranks]
        self.launched += 1
        with self.recorder.op("message", CALL_SECONDS) as op:
            given = [(value, self.launched, CALL_SECONDS) for value in values]
            got = group.map("pass_on", given).wait(CALL_SECONDS)
            op.expect(got, values[-1:] + values[:-1])

    def update(self) -> None:
        """Give one group the weights of another; whether or not that works, each worker has one version of them."""
        for _ in range(2 - len(self.groups)):
            self.launch()
        if len(self.groups) < 2:
            return
        source, target = self.choose.sample(self.groups, 2)
        in_place = self.choose.random() < 0.5
        self.launched += 1
        version = self.launched
        with self.recorder.op("update weights", 4 * CALL_SECONDS) as op:
            source.train(version).wait(CALL_SECONDS)
            with WeightLink.between(source, target, in_place=in_place, timeout=CALL_SECONDS) as link:
                link.update(version, timeout=CALL_SECONDS)
            op.expect(target.served().wait(CALL_SECONDS), [(version, [float(version)])] * len(target))
        with self.recorder.op("call", CALL_SECONDS) as op:
            for said, values in target.served().wait(CALL_SECONDS):
                op.expect(values, [float(said)] if said >= 0 else values)

    def race(self) -> None:
        """Let two trainers update one group at the same time: it ends on the newer version, wholly."""
        target = self.pick()
        if target is None:
            return
        self.launched += 2
        versions = (self.launched - 1, self.launched)
        in_place, node = self.choose.random() < 0.5, self.choose.randrange(self.cluster.num_nodes)
        limit = 2 * (LAUNCH_SECONDS + END_SECONDS) + 6 * CALL_SECONDS
        with self.recorder.op("race", limit) as op, contextlib.ExitStack() as stack:
            links = []
            for version in versions:
                draft, strategy = SoakWorker.create_group(str(self.folder), self.who), NodePlacementStrategy([node])
                trainer = stack.enter_context(
                    draft.launch(self.cluster, strategy, name=f"t{version}", timeout=LAUNCH_SECONDS)
                )
                trainer.train(version).wait(CALL_SECONDS)
                link = WeightLink.between(trainer, target, in_place=in_place, timeout=CALL_SECONDS)
                links.append(stack.enter_context(link))
            with ThreadPoolExecutor(2) as pool:
                older, newer = (
                    pool.submit(link.update, version, timeout=CALL_SECONDS)
                    for link, version in zip(links, versions, strict=True)
                )
            newer.result()
            # The older one may be refused, or come first.
            op.expect(older.exception() is None or isinstance(older.exception(), RoostError), True)
            op.expect(target.served().wait(CALL_SECONDS), [(versions[1], [float(versions[1])])] * len(target))

    def reward(self) -> None:
        """Let a call fail that nobody waits for, while the driver waits for something else: its error says so."""
        group = self.pick()
        if group is None:
            return
        is_dropped = self.choose.random() < 0.5
        limit = 2 * CALL_SECONDS + CHANNEL_SECONDS
        with self.recorder.op("reward", limit) as op, self.new_channels(1) as (channel,):
            name = f"oops-{self.who}-{self.launched}"
            failed = group[0].score(name)
            deadline = time.monotonic() + CALL_SECONDS
            while not failed.done() and time.monotonic() < deadline:
                time.sleep(0.05)
            if is_dropped:
                del failed
            op.note("hidden", name=name)
            channel.get(timeout=0.5)

    def pipeline(self) -> None:
        """Let items go through two channels and the workers between them, one of which may die with one."""
        group, number = self.pick(), self.choose.randint(5, 40)
        if group is None or len(group) < 2:
            return
        dies_at = self.choose.choice([None, None, 1, -1, 3])
        limit = 10 * CALL_SECONDS + 2 * CHANNEL_SECONDS
        with self.recorder.op("pipeline", limit) as op, self.new_channels(2) as (source, sink):
            name = f"{self.who}-{self.launched}"
            feeding = group[0].feed(source, name, [f"{name}-{item}" for item in range(number)], CALL_SECONDS)
            for turn in range(4):
                if not (judges := [rank for rank in group.alive if rank > 0]):
                    return
                judging = group.on(*judges).judge(source, sink, name, None if turn else dies_at, CALL_SECONDS)
                feeding.wait(CALL_SECONDS)
                source.close(timeout=CALL_SECONDS)
                # What one had that died is passed on by the others in the next turn.
                if all(outcome.is_ok for outcome in judging.outcomes(CALL_SECONDS)):
                    break
            else:
                return
            sink.close(timeout=CALL_SECONDS)
            with contextlib.suppress(ChannelClosed):
                while True:
                    op.note("taken", pipeline=name, ids=sink.get_many(64, wait=1, timeout=CALL_SECONDS))
            op.note("emptied", pipeline=name)

    def fail(self) -> None:
        group = self.pick()
        if group is None:
            return
        with self.recorder.op("fail", CALL_SECONDS) as op:
            op.expect(group.fail().wait(CALL_SECONDS), "an exception")

    def die(self) -> None:
        group = self.pick()
        if group is None:
            return
        with self.recorder.op("die", CALL_SECONDS) as op:
            op.expect(group[0].die().wait(CALL_SECONDS), "an exception")

    def restart(self) -> None:
        group = self.pick()
        if group is None:
            return
        by_force = self.choose.random() < 0.3
        with self.recorder.op("restart", LAUNCH_SECONDS + END_SECONDS):
            if by_force:
                group.restart(self.choose.choice(group.ranks), force=True, timeout=LAUNCH_SECONDS)
            elif dead := sorted(set(group.ranks) - set(group.alive)):
                group.restart(dead[0], timeout=LAUNCH_SECONDS)

    def reserve(self) -> None:
        total = self.cluster.num_accelerators
        if not total:
            return
        first = self.choose.randrange(total)
        last = min(total - 1, first + self.choose.randint(0, 2))
        with self.recorder.op("reserve", CALL_SECONDS) as op:
            plan = make_plan({"cluster": {"component_placement": {"x": f"{first}-{last}"}}}, self.cluster)
            reservation = self.cluster.reserve(plan, timeout=CALL_SECONDS)
        if op.ok:
            with self.recorder.op("release", CLOSE_SECONDS):
                reservation.close()

    def end(self) -> None:
        group = self.pick()
        if group is not None:
            self.end_group(group)

    def end_group(self, group: WorkerGroup) -> None:
        with self.recorder.op("close", END_SECONDS) as op:
            group.close(END_SECONDS)
        # One that could not be closed is closed again later.
        if op.ok:
            self.groups.remove(group)

    # Engines and a rollout manager under load.

    def roll_out(self) -> None:
        """Run engines under load until the time is over."""
        from roost.rl import RolloutManager, create_placement_groups
        from roost.testing import NumpyEngine

        args = argparse.Namespace(actor_num_nodes=1, rollout_num_gpus=2, debug_rollout_only=True)
        while self.has_time:
            with contextlib.ExitStack() as undo:
                opened: list[RolloutManager] = []
                with self.recorder.op("launch engines", 2 * LAUNCH_SECONDS):
                    groups = create_placement_groups(args, self.cluster, timeout=LAUNCH_SECONDS)
                    undo.callback(self.closed, "close reservation", groups.close)
                    opened.append(
                        RolloutManager(
                            args,
                            NumpyEngine,
                            groups["rollout"],
                            cluster=self.cluster,
                            buffer_size=64,
                            timeout=LAUNCH_SECONDS,
                            health_timeout=LAUNCH_SECONDS,
                        )
                    )
                    undo.callback(self.closed, "close engines", opened[0].close)
                if opened:
                    Load(self, opened[0]).run()
            time.sleep(0.2)

    def closed(self, what: str, close: Callable[[], None]) -> None:
        with self.recorder.op(what, CLOSE_SECONDS):
            close()


class Load:
    """Threads that use a rollout manager at the same time."""

    def __init__(self, soaked: Soaked, manager: Any) -> None:
        self.soaked = soaked
        self.manager = manager
        self.recorder = soaked.recorder
        self.numbers = iter(range(10**9))
        self.version = 0
        self.consumers: WorkerGroup | None = None

    def run(self) -> None:
        soaked = self.soaked
        with self.recorder.op("launch", LAUNCH_SECONDS, name="consumers"):
            draft = SoakWorker.create_group(str(soaked.folder), soaked.who)
            nodes = NodePlacementStrategy([0, soaked.cluster.num_nodes - 1])
            self.consumers = draft.launch(soaked.cluster, nodes, name="consumers", timeout=LAUNCH_SECONDS, restarts=5)
            soaked.groups.append(self.consumers)
        works = [self.put, self.put, self.get, self.generate, self.generate, self.update, self.lock, self.mend]
        if self.consumers is not None:
            works += [self.consume, self.enter]
        threads = [threading.Thread(target=self.repeat, args=(work, index)) for index, work in enumerate(works)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.drain()

    def repeat(self, work: Callable[[random.Random], None], index: int) -> None:
        choose = random.Random(f"{self.soaked.who}{index}")  # noqa: S311 - to be repeated
        while self.soaked.has_time:
            work(choose)
            time.sleep(choose.uniform(0.0, 0.2))

    def put(self, choose: random.Random) -> None:
        ids = [f"{self.soaked.who}-{threading.get_ident()}-{next(self.numbers)}" for _ in range(choose.randint(1, 4))]
        with self.recorder.op("put", CALL_SECONDS) as op:
            op.note("put", ids=ids)
            self.manager.put(ids, timeout=CALL_SECONDS)
        # Slower than they are taken, so that consumers wait.
        time.sleep(choose.uniform(0.0, 0.6))

    def get(self, choose: random.Random) -> None:
        count, timeout = choose.randint(1, 4), choose.choice([0.1, 1.0, CALL_SECONDS])
        with self.recorder.op("get", timeout, count=count) as op, contextlib.suppress(CallTimedOut):
            op.note("get", ids=self.manager.get(count, timeout=timeout))

    def consume(self, choose: random.Random) -> None:
        with self.recorder.op("call", CALL_SECONDS):
            self.consumers.consume(self.manager, choose.randint(1, 3), CALL_SECONDS / 2).wait(CALL_SECONDS)

    def generate(self, _choose: random.Random) -> None:
        with self.recorder.op("generate", CALL_SECONDS) as op:
            answer = self.manager.generate({"observations": [[1.0] * 4]}, timeout=CALL_SECONDS)
            op.expect((len(answer["actions"]), answer["engine"] in (0, 1)), (1, True))
            op.note("served", version=answer["version"])

    def update(self, choose: random.Random) -> None:
        self.version += 1
        with self.recorder.op("update", CALL_SECONDS) as op:
            op.note("update", version=self.version)
            self.manager.update_weights(WEIGHTS, self.version, timeout=CALL_SECONDS)
        time.sleep(choose.uniform(0.0, 2.0))

    def lock(self, _choose: random.Random) -> None:
        with self.recorder.op("lock", 2 * CALL_SECONDS) as op:
            inside(self.manager, CALL_SECONDS, self.soaked.folder, self.soaked.who, op)

    def enter(self, _choose: random.Random) -> None:
        with self.recorder.op("call", 3 * CALL_SECONDS):
            self.consumers[0].enter(self.manager, CALL_SECONDS).wait(3 * CALL_SECONDS)

    def mend(self, _choose: random.Random) -> None:
        """Restart what does not serve, as a job does that wants to go on."""
        time.sleep(1.0)
        if not self.is_manager_alive():
            with self.recorder.op("restart manager", LAUNCH_SECONDS):
                self.manager.restart(LAUNCH_SECONDS)
        ill: list[int] = []
        with self.recorder.op("health", CALL_SECONDS):
            health = self.manager.engines.health(timeout=CALL_SECONDS)
            ill = [rank for rank, is_well in enumerate(health) if not is_well]
        for rank in ill[:1]:
            with self.recorder.op("restart engine", LAUNCH_SECONDS):
                self.manager.restart_engine(rank, weights=WEIGHTS, version=self.version, timeout=LAUNCH_SECONDS)

    def is_manager_alive(self) -> bool:
        with self.recorder.op("stats", STATS_SECONDS) as op:
            self.manager.buffer_stats()
        return op.ok

    def drain(self) -> None:
        """Take what is left in the buffer, so that nothing that is lost is taken for something that waits."""
        is_empty = False
        while not is_empty:
            with self.recorder.op("get", 2.0, count=1) as op:
                try:
                    op.note("get", ids=self.manager.get(1, timeout=2.0))
                except CallTimedOut:
                    is_empty = True
            if not op.ok:
                return
        self.soaked.resources("drained", drained=True)


def main() -> None:
    """Work as the first argument says."""
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    has_rollout = given["has_rollout"]
    # Two engines need an accelerator each.
    least = 2 if has_rollout else 1
    soaked = Soaked(folder, given["who"], given["seed"], given["num_nodes"], least, given["seconds"])
    if soaked.open():
        try:
            soaked.roll_out() if has_rollout else soaked.work()
        finally:
            soaked.close()
    soaked.recorder.note("done")
    # What an interpreter does at its end is part of the job.
    sys.exit(0)


if __name__ == "__main__":
    main()
