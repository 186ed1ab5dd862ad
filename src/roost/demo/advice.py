"""The last line of the demo: which placement the measured times of its runs would have made the best."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from roost.config.profile import read_profile
from roost.config.run import read_run_draft
from roost.config.topology import Topology
from roost.demo.rounds import Run
from roost.demo.tasks import Task
from roost.search.answer import search
from roost.search.problem import seconds
from roost.search.setup import make_setup

_STALENESS = 1


def advise(task: Task, done: Sequence[Run]) -> str:
    """Search the placements of actor and rollout on the demo's accelerators, from what its rounds took."""
    topology = Topology.from_shorthand(task.hardware)
    times: dict[str, dict[int, float]] = {task.call: {}, "actor.learn": {}}
    updates = []
    for trained in done:
        placement = task.make_job(trained.mode)["cluster"]["component_placement"]
        # The first rounds warm up.
        rounds = trained.rounds[1:] or trained.rounds
        updates += [item.seconds["weights"] for item in rounds]
        times[task.call][_count(placement["rollout"])] = median(item.made_in for item in rounds)
        times["actor.learn"][_count(placement["actor"])] = median(item.seconds["learn"] for item in rounds)
    job = {
        "cluster": {"num_nodes": topology.num_nodes, "component_placement": {"actor": "0", "rollout": "0"}},
        "flow": {"step": f"{task.call} -> actor.learn", "weights": "actor -> rollout", "staleness": _STALENESS},
    }
    calls = {call: {"seconds": found} for call, found in times.items()}
    profile = {"version": 1, "calls": calls, "weights": {"seconds": median(updates)}}
    draft = read_run_draft(job)
    if draft.flow is None:
        return ""
    best = search(make_setup(draft.flow, read_profile(profile), topology), 1).best
    places = ", ".join(f"{name} on {ranks}" for name, ranks in best.component_placement.items())
    return f"by these times the best placement is {places}: {seconds(best.step_time):.2f} s a step"


def _count(placement: str) -> int:
    """Return how many accelerators a placement such as `0-7:0-3` has."""
    first, _, last = placement.partition(":")[0].partition("-")
    return int(last or first) - int(first) + 1
