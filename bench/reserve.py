"""Measures what it costs to reserve accelerators and identify them, compared with the documented way.

The documented way is one placement group, with an actor in each bundle that reports where it is. The variants
alternate on one local cluster and over one connection, so that a busy machine slows them alike. Before each turn Ray
counts every accelerator as free, and each node has either one idle process, as discovery leaves it, or none.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import psutil
from parts import finish, run, start

NODES = 4
ROUNDS = {8: 3, 32: 3, 128: 1}
SUBSET_ROUNDS = 3
SUBSET = (3, 5)
JUDGED, LIMIT = 32, 0.4
SECONDS = 300
WORKERS = ("InfoActor", "Holder", "_read_device", "ray::IDLE", "default_worker.py")
"""The titles of a worker process while it starts, works or waits; the job's managers have other titles."""

NONE, IDLE = "no process", "one idle process"
"""The state of a node at the start of a turn."""

Free = Callable[[], None]


class Holder:
    """An actor of another program that holds an accelerator."""

    def nothing(self) -> None:
        pass


class Field:
    """The local cluster, the job on it, and the ways to reserve; each returns a function that releases everything."""

    def __init__(self, per_node: int) -> None:
        from roost import Cluster, CollectiveManager
        from roost.testing import local_cluster

        self.per_node = per_node
        self.total = NODES * per_node
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            local = undo.enter_context(local_cluster(f"{NODES}x{per_node}", cpus=max(8, 2 * per_node), warm=False))
            self._keeper = psutil.Process(local.keeper_pid)
            self.cluster = undo.enter_context(Cluster(num_nodes=NODES, quiet=True))
            # Start the managers' processes now, so that settle() does not find them idle.
            self.cluster.node_manager.get_slots()
            self.cluster.worker_manager.get_workers()
            CollectiveManager.get_proxy().get_groups()
            self._stack = undo.pop_all()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def documented(self) -> Free:
        """Create a placement group, ask an actor in each bundle where it is, and sort the bundles."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from roost.rl import InfoActor, sort_key

        group = placement_group([{"GPU": 1, "CPU": 1}] * self.total, strategy="PACK")
        ray.get(group.ready(), timeout=SECONDS)
        actors = [
            InfoActor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                )
            ).remote()
            for index in range(self.total)
        ]
        places = ray.get([actor.get_ip_and_gpu_id.remote() for actor in actors], timeout=SECONDS)
        for actor in actors:
            ray.kill(actor)
        bundles = sorted(((index, *place) for index, place in enumerate(places)), key=sort_key)
        check(len({place[1:] for place in bundles}), self.total)
        return lambda: remove_placement_group(group)

    def plan(self) -> Free:
        """Make and reserve a plan of all accelerators."""
        return self.reserve(f"0-{self.total - 1}", self.total)

    def reserve(self, ranks: str, count: int) -> Free:
        from roost import make_plan

        config = {"cluster": {"num_nodes": NODES, "component_placement": {"actor": ranks}}}
        reservation = self.cluster.reserve(make_plan(config, self.cluster), timeout=SECONDS)
        check(len(set(reservation.accelerators)), count)
        return reservation.close

    def flags(self) -> Free:
        """Reserve the same accelerators from the documents' flags."""
        from roost.rl import create_placement_groups

        flags = {"actor_num_nodes": NODES, "actor_num_gpus_per_node": self.per_node, "colocate": True}
        groups = create_placement_groups(flags, self.cluster, timeout=SECONDS)
        check(len(groups["actor"][1]), self.total)
        return groups.close

    def hold_one(self, node_rank: int) -> None:
        """Give an accelerator to an actor outside the job."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node_id=self.cluster.nodes[node_rank].ray_id, soft=False)
        actor = ray.remote(num_gpus=1, num_cpus=0)(Holder).options(scheduling_strategy=where).remote()
        ray.get(actor.nothing.remote(), timeout=SECONDS)
        self._stack.callback(lambda: ray.kill(actor))

    def wait_until_free(self, gpus: int) -> None:
        """Wait until Ray counts everything as free again."""
        import ray

        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            free = ray.available_resources()
            if free.get("GPU", 0) == gpus and free.get("CPU", 0) == ray.cluster_resources()["CPU"]:
                return
            time.sleep(0.05)
        sys.exit(f"only {free.get('GPU', 0)} of {gpus} accelerators are free again")

    def settle(self, state: str, but: int = 0) -> None:
        """Wait until at most `but` earlier workers remain; then leave each node with an idle process or none."""
        from roost.deadline import Deadline
        from roost.runtime.nodes.discover import on_nodes

        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            workers = [item for item in self._processes() if any(word in item[1] for word in WORKERS)]
            for process, title in workers:
                if title.startswith("ray::IDLE"):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            if len(workers) <= but:
                break
            time.sleep(0.05)
        else:
            sys.exit(f"workers of an earlier round are still running: {[title for _, title in workers]}")
        # Give the raylets and the head time to clean up; until then they schedule work on processes that are gone.
        time.sleep(1)
        if state == IDLE:
            nodes = {node.ray_id: node.name for node in self.cluster.nodes}
            on_nodes(nodes, nothing, deadline=Deadline.after(SECONDS))

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        found = []
        for process in self._keeper.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.append((process, " ".join(process.cmdline()[:3]).strip()))
        return found


def nothing() -> None:
    pass


def check(found: int, wanted: int) -> None:
    if found != wanted:
        sys.exit(f"expected {wanted} accelerators, but got {found}")


def timed(what: str, way: Callable[[], Free]) -> tuple[float, Free]:
    start = time.perf_counter()
    free = way()
    seconds = time.perf_counter() - start
    print(f"    {what}: {seconds:.3f} s", file=sys.stderr)
    return seconds, free


def all_of_it(count: int) -> dict[str, float]:
    """Measure the seconds until all accelerators are reserved and identified, for each way and node state."""
    found: dict[str, list[float]] = {}
    with Field(count // NODES) as field:
        ways = {"documented": field.documented, "plan": field.plan, "flags": field.flags}
        for _ in range(ROUNDS[count]):
            for state in (NONE, IDLE):
                for name, way in ways.items():
                    field.settle(state)
                    field.wait_until_free(count)
                    seconds, free = timed(f"{count} {name}, {state}", way)
                    found.setdefault(f"{name}, {state}", []).append(seconds)
                    free()
                    field.wait_until_free(count)
    return {name: statistics.median(values) for name, values in found.items()}


def subset() -> dict[str, float]:
    """Measure the seconds to reserve two given accelerators of a node on which another program has one."""
    found: dict[str, list[float]] = {}
    per_node = JUDGED // NODES
    ranks = ",".join(str(per_node + local) for local in SUBSET)
    with Field(per_node) as field:
        field.hold_one(1)
        for _ in range(SUBSET_ROUNDS):
            for state in (NONE, IDLE):
                field.settle(state, but=1)
                field.wait_until_free(JUDGED - 1)
                seconds, free = timed(f"subset, {state}", lambda: field.reserve(ranks, len(SUBSET)))
                found.setdefault(state, []).append(seconds)
                free()
    return {name: statistics.median(values) for name, values in found.items()}


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    **{f"reserve-{count}": lambda count=count: all_of_it(count) for count in ROUNDS},
    "subset": subset,
}


def main() -> None:
    over = []
    print(f"\n| reserve, on {NODES} nodes | the documented way, s | a plan, s | ratio | flags, s | ratio | limit |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for count in ROUNDS:
        found = run(__file__, f"reserve-{count}")
        for state in (IDLE, NONE):
            usual = found[f"documented, {state}"]
            cells = [f"{usual:.2f}"]
            for way in ("plan", "flags"):
                ours = found[f"{way}, {state}"]
                cells += [f"{ours:.2f}", f"{ours / usual:.2f}"]
                if count == JUDGED and ours / usual > LIMIT:
                    over.append(f"{way} for {count}, {state}")
            limit = LIMIT if count == JUDGED else ""
            print(f"| {count} accelerators, a node has {state} | {' | '.join(cells)} | {limit} |", flush=True)
    found = run(__file__, "subset")
    print("\n| part of a node | s |")
    print("|---|---:|")
    what = f"accelerators {SUBSET[0]} and {SUBSET[1]} of {JUDGED // NODES}, another program has one"
    for state in (IDLE, NONE):
        print(f"| {what}, a node has {state} | {found[state]:.2f} |")
    finish(over)


if __name__ == "__main__":
    start(PARTS, main)
