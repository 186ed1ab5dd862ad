"""The limit of a run in one sentence: a worker that died or hangs, a slow one, or the role that sets the pace. Pure.

The verdict rests on the last calls and waits of each worker. Where they do not tell, it is `UNCLEAR` and says so: a
wrong sentence costs more than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from roost.runtime.events.format import DRIVER
from roost.text import join_words, plural
from roost.watch.limits import EARLY_HANG_SECONDS, HANG_SECONDS, SILENT_SECONDS
from roost.watch.model import RunModel
from roost.watch.roles import LEAST_PERIODS, TORCH, Role, clip, find_window, lane, roles_of
from roost.watch.views import Limit, RunView, State, Verdict, WorkerView

_MOST_NAMES = 4
_IDLE_CPU = 0.05
_AT_BOUND = 1.1
_TURNS = 1.15
"""Roles that take turns work so much of the time together at most."""
_ROUTER = "the router"


def judge(model: RunModel, view: RunView, bound: float | None = None) -> Verdict:
    """Say what limits a run, by its model and the view of it; `bound` is the least seconds that a step can take."""
    return _dead(view) or _hanging(model, view) or _silent(view) or _pace(model, view, bound)


def _dead(view: RunView) -> Verdict | None:
    dead = [worker.address for worker in view.workers if worker.state is State.DEAD]
    if not dead:
        return None
    told = [event for event in view.events if event.what in ("died", "lost") and event.who in dead]
    lines = tuple(f"{event.who} {event.what}{f': {event.text}' if event.text else ''}" for event in told[:_MOST_NAMES])
    sentence = f"{join_words(dead, most=_MOST_NAMES)} died"
    return Verdict(limit=Limit.DEATH, sentence=sentence, evidence=lines, is_sure=True, who=tuple(dead))


def _hanging(model: RunModel, view: RunView) -> Verdict | None:
    found = [told for worker in view.workers if (told := _hang(model, view, worker)) is not None]
    # A worker that hangs on its own comes before those that wait for it.
    found = [told for told in found if not told[0].waits_for] or found
    if not found:
        return None
    worker, quiet, _ = max(found, key=lambda told: told[1])
    who = tuple(item.address for item, _, _ in found)
    names = join_words(list(who), most=_MOST_NAMES)
    absent = _absent(view, worker)
    was = "was" if view.is_over else "has been"
    cpu = "" if worker.cpu is None else f"; its CPU is at {worker.cpu:.0%}"
    if absent:
        sentence, who = f"{join_words(absent)} is not in {worker.waits_for}, where {names} wait", tuple(absent)
    elif worker.waits_for:
        waits = {f"{item.component} for {item.waits_for}": None for item, _, _ in found}
        sentence = f"all wait and nobody works: {join_words(list(waits), most=_MOST_NAMES)}"
    elif len(found) > 1:
        methods = {item.doing: None for item, _, _ in found}
        sentence = f"{names} have been in {join_words(list(methods))} for {_time(quiet)}"
    else:
        sentence = f"{worker.address} {was} in {worker.doing} for {_time(quiet)}{'' if view.is_over else cpu}"
    lines = [f"nothing has come of the work of {worker.address} for {_time(quiet)}"]
    if usual := _took(model, worker):
        lines.append(f"before, {worker.doing} took {_time(max(usual))} at most")
    if not view.is_over:
        lines.append(f"`roost stack latest {who[0]}` shows where it stands")
    is_sure = all(sure for _, _, sure in found)
    return Verdict(limit=Limit.HANG, sentence=sentence, evidence=tuple(lines), is_sure=is_sure, who=who)


def _hang(model: RunModel, view: RunView, worker: WorkerView) -> tuple[WorkerView, float, bool] | None:
    """Return a worker without progress, for how long, and whether that is sure."""
    under_way = model.under_way(worker.address, view.now)
    calls = [span for span in under_way if not span.is_wait]
    is_idle = worker.cpu is not None and worker.cpu < _IDLE_CPU
    if worker.state is State.STUCK:
        is_sure = bool(worker.waits_for) or is_idle or worker.cpu is None or bool(_took(model, worker))
        # A loop that feeds others brings nothing that shows, other than that they go on.
        is_alone = all(view.now - other.progress > HANG_SECONDS for other in view.workers if other is not worker)
        return (worker, view.now - worker.progress, is_sure) if is_sure or is_alone else None
    if not calls or any(span.is_wait and not span.is_aside for span in under_way):
        return None
    if worker.state is not (State.ENDED if view.is_over else State.BUSY):
        return None
    # In a run that is over, the call went on until the last line.
    quiet, worker = calls[-1].end - worker.progress, replace(worker, doing=calls[-1].name)
    usual = _took(model, worker)
    longest = max(usual, default=math.inf)
    # Before it counts as stuck: far longer than its calls took, and its CPU has nothing to do.
    is_early = is_idle and len(usual) >= LEAST_PERIODS and not view.is_over
    patience = max(EARLY_HANG_SECONDS if is_early else HANG_SECONDS, 5 * longest)
    return (worker, quiet, False) if quiet > patience else None


def _took(model: RunModel, worker: WorkerView) -> list[float]:
    """Return how long each call took of the method that a worker is in."""
    spans = model.spans(worker.address)
    return [span.busy / span.calls for span in spans if span.name == worker.doing and not span.is_wait]


def _absent(view: RunView, worker: WorkerView) -> list[str]:
    """Return the workers of a component that are not where all others of it wait for each other."""
    group = [item for item in view.workers if item.component == worker.component]
    absent = [item.address for item in group if item.waits_for != worker.waits_for]
    return absent if worker.waits_for == TORCH and len(absent) < len(group) / 2 else []


def _silent(view: RunView) -> Verdict | None:
    silent = [worker for worker in view.workers if worker.state is State.SILENT]
    if not silent:
        return None
    quiet = max(view.now - worker.since for worker in silent)
    who = tuple(worker.address for worker in silent)
    nodes = {worker.node or 0 for worker in silent}
    is_all = len(silent) > 1 and all(item in silent for item in view.workers if (item.node or 0) in nodes)
    cause = "a node that is gone" if is_all else "code that lets no other thread run, or a node that is gone"
    sentence = f"{join_words(list(who), most=_MOST_NAMES)} wrote nothing for {_time(quiet)}: it looks like {cause}"
    where = "on " + join_words([f"node {node}" for node in sorted(nodes)], most=_MOST_NAMES)
    is_sure = quiet > 2 * SILENT_SECONDS
    return Verdict(limit=Limit.HANG, sentence=sentence, evidence=(where,), is_sure=is_sure, who=who)


def _pace(model: RunModel, view: RunView, bound: float | None) -> Verdict:
    window = find_window(model, view)
    roles = [] if window is None else roles_of(model, view, *window[:2])
    if window is None or not roles:
        return Verdict(limit=Limit.UNCLEAR, sentence="not clear yet what limits it")
    start, end, count = window
    length = end - start
    # Those that take turns add up to all of the time; then a step lasts until the last worker of each is done.
    whole = sum(role.any_works for role in roles)
    shares = {role.name: role.any_works if whole <= _TURNS else role.share for role in roles}
    roles.sort(key=lambda role: -shares[role.name])
    lines = (
        *[role.words() for role in roles[:6]],
        f"in the last {_time(length)} of calls the longest came {plural(count, 'time')}",
    )
    sets = "set" if view.is_over else "sets"

    def verdict(limit: Limit, sentence: str, *who: str, is_sure: bool = True) -> Verdict:
        return Verdict(limit=limit, sentence=sentence, evidence=lines, is_sure=is_sure, who=who)

    steps = [took for _, took in view.steps[-20:]]
    if bound is not None and len(steps) >= LEAST_PERIODS and median(steps) <= _AT_BOUND * bound:
        took, least = _time(median(steps)), _time(bound)
        return verdict(Limit.BOUND, f"nothing: it is at the proven bound, {took} a step of at least {least}")
    top, *others = roles
    share = shares[top.name]
    gap = share - max((shares[role.name] for role in others), default=0.0)
    updates = {link.name: sum(took for at, took in link.updates if start <= at <= end) / length for link in view.links}
    link, updating = max(updates.items(), key=lambda item: item[1], default=("", 0.0))
    if updating > max(0.35, share + 0.1):
        return verdict(Limit.WEIGHTS, f"updates of weights set the pace: {link} takes {updating:.0%} of the time", link)
    if top.in_torch > 0.3 and top.share + top.waits.get(TORCH, 0.0) > 0.7:
        sentence = f"all workers of {top.name} wait {top.waits.get(TORCH, 0.0):.0%} of the time for {TORCH}"
        return verdict(Limit.COMMUNICATION, sentence, top.name)
    asking = max(roles, key=lambda role: role.waits.get(_ROUTER, 0.0))
    if view.engines and asking.waits.get(_ROUTER, 0.0) > max(0.5, share):
        sentence = (
            f"the engines set the pace: {asking.name} waits {asking.waits.get(_ROUTER, 0.0):.0%} of the time for them"
        )
        return verdict(Limit.PACE, sentence, *{item.worker.rpartition(":")[0] for item in view.engines})
    waits = clip([span for span in lane(model, DRIVER, view.now) if span.is_wait], start, end)
    driven = 1 - sum(span.busy for span in waits) / length
    if whole < 0.6 and driven > max(0.4, whole) and all(sum(role.waits.values()) < 0.5 for role in roles):
        sentence = f"the driver {sets} the pace: it computes {driven:.0%} of the time while no worker has a call"
        return verdict(Limit.DRIVER, sentence, DRIVER, is_sure=whole < 0.5)
    margin, sure = (0.06, 0.12) if whole <= _TURNS else (0.12, 0.2)
    if share >= 0.35 and gap >= margin:
        is_sure = gap >= sure and count >= 2 * LEAST_PERIODS
        if top.slow:
            is_one = len(top.slow) == 1
            verb = ("was" if is_one else "were") if view.is_over else ("is" if is_one else "are")
            sentence = f"{len(top.slow)} of {len(top.works)} workers of {top.name} {verb} {top.slower:.0%} slower"
            names = join_words(list(top.slow), most=_MOST_NAMES)
            return verdict(Limit.STRAGGLER, f"{sentence} than the others: {names}", *top.slow, is_sure=is_sure)
        return verdict(
            Limit.PACE, f"{top.name} {sets} the pace: {_against(top, others, shares)}", top.name, is_sure=is_sure
        )
    close = [role for role in roles if shares[role.name] > share - margin]
    if len(close) > 1 and whole > 0.8:
        told = join_words([f"{role.name} works {shares[role.name]:.0%}" for role in close], most=_MOST_NAMES)
        return verdict(
            Limit.BALANCE, f"no role more than another: {told}", *[role.name for role in close], is_sure=False
        )
    return verdict(Limit.UNCLEAR, "not clear what limits it", is_sure=False)


def _against(top: Role, others: Sequence[Role], shares: Mapping[str, float]) -> str:
    """Say what the others do meanwhile."""
    waiting = max(others, key=lambda role: max(role.waits.values(), default=0.0), default=top)
    whom, most = max(waiting.waits.items(), key=lambda item: item[1], default=("", 0.0))
    if waiting is not top and most >= 0.2:
        return f"{waiting.name} waits {most:.0%} of the time for {whom}"
    also = "".join(f", {role.name} {shares[role.name]:.0%}" for role in others[:3])
    return f"it works {shares[top.name]:.0%} of the time{also}"


def _time(seconds: float) -> str:
    """Return a duration for a sentence.

    >>> _time(0.25), _time(42.4), _time(125)
    ('0.25 s', '42 s', '2 min')
    """
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
