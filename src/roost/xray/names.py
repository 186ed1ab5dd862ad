"""The names of actors in pictures, and their roles in known frameworks. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from roost.config.ranks import format_ranks
from roost.xray.facts import Actor

_ROLES = (
    # verl, slime, miles, OpenRLHF, NeMo-RL, SkyRL, ROLL and RLinf, as of November 2026. The first that fits counts.
    (r"[Cc]ritic", "critic"),
    (r"[Rr]eward|(^|_)rm(_|$)", "reward"),
    (r"Reference|RefWorker|(^|_)ref(_|$)", "reference"),
    (r"RolloutManager|rollout_manager", "rollout manager"),
    (r"SGLang|vLLM|LLMRayActor|RolloutRayActor|RayWorkerWrapper|InferenceEngine|HttpServer|rollout|infer", "rollout"),
    (r"AgentLoop|EnvWorker|(^|_)env(_|:|$)|EnvGroup", "environment"),
    (r"WorkerDict|FusedWorker", "train and rollout"),
    (r"MegatronTrain|FSDPTrain|PolicyModel|ActorModel|PolicyWorker|policy|RayTrainWorker|Trainer|ActorGroup", "train"),
)
_SAME = re.compile(r"(.*?)(0|[1-9]\d{0,5})")


def role_of(actor: Actor) -> str:
    """Return the role of an actor in a known framework, by its class and its name; nothing for other classes.

    >>> role_of(Actor(id="", class_name="MegatronTrainRayActor", job="", state="ALIVE"))
    'train'
    """
    known = (role for text in (actor.class_name, actor.name) for pattern, role in _ROLES if re.search(pattern, text))
    return next(known, "")


def name_actors(actors: Iterable[Actor]) -> dict[str, str]:
    """Name actors by their ids: their own names, or class and rank; the order of actors is that of their start.

    >>> name_actors([Actor(id="a", class_name="Env", job="", state="ALIVE"),
    ...              Actor(id="b", class_name="WorkerDict", job="", state="ALIVE", name="x7YkWorkerDict_0:3")])
    {'a': 'Env:0', 'b': 'WorkerDict_0:3'}
    """
    nameless: defaultdict[tuple[str, str], list[Actor]] = defaultdict(list)
    names = {}
    for actor in actors:
        # verl begins a name with random letters.
        names[actor.id] = actor.name[max(0, actor.name.find(actor.class_name)) :]
        if not actor.name:
            nameless[actor.job, actor.class_name].append(actor)
    for (_, class_name), alike in nameless.items():
        ranks = [item.rank for item in alike]
        has_ranks = None not in ranks and len(set(ranks)) == len(ranks)
        for index, actor in enumerate(alike):
            names[actor.id] = f"{class_name}:{actor.rank if has_ranks else index}"
    return names


def fold_names(names: Iterable[str], most: int = 6) -> str:
    """Join names, those that differ in their last number as one.

    >>> fold_names(["Trainer:0", "Trainer:1", "Trainer:3", "head"])
    'Trainer:0-1,3, head'
    """
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = _SAME.fullmatch(name)
        numbers.setdefault(found[1] if found else name, []).extend([int(found[2])] if found else [])
    words = [f"{name}{format_ranks(sorted(set(ranks)))}" if ranks else name for name, ranks in numbers.items()]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
