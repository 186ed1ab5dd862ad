"""ROLL: `device_mapping` says on which GPUs of the cluster a role is, `num_gpus_per_worker` how many a worker has.

The mapping is a Python expression there, which ROLL evaluates. Here it is parsed, by a grammar of ranges and lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import Split, engines, product, sizes, trained
from roost.text import shorten

_MAPPING = ".device_mapping"
_MEGATRON = ("tensor_model", "context", "pipeline_model", "expert_model")
_DEFAULTS = table("""
    *: num_gpus_per_node=8 adv_estimator=gae enable_reference=false use_kl_loss=false init_kl_coef=0.2
    *: rollout_batch_size=null actor_train.model_args.lora_target=null
""")
_NUMBER = r"\s*([-+]?\d{1,7})\s*"
_RANGE = re.compile(rf"(?:list\s*\(\s*)?range\s*\({_NUMBER}(?:,{_NUMBER})?(?:,{_NUMBER})?\)\s*(?P<close>\))?")
_LIST = re.compile(r"(?:list\s*\(\s*)?\[\s*((?:\d{1,7}\s*(?:,\s*|(?=\])))*)\]\s*(?P<close>\))?")
_MOST = 1_000_000


def parse_mapping(text: str) -> list[int] | None:
    """Return the GPUs of an expression made of `list(range(a, b, step))`, `[a, b]` and `+`; None for anything else.

    >>> parse_mapping("list(range(0, 4)) + [6, 7]")
    [0, 1, 2, 3, 6, 7]
    """
    found: list[int] = []
    at, text = 0, text.strip()
    while True:
        part = _RANGE.match(text, at) or _LIST.match(text, at)
        if part is None or part[0].lstrip().startswith("list") is not bool(part["close"]):
            return None
        if part.re is _LIST:
            found += [int(item) for item in part[1].split(",") if item.strip()]
        else:
            first, last, step = part[1], part[2], part[3]
            start, stop = (0, int(first)) if last is None else (int(first), int(last))
            each = int(step or 1)
            if not each or len(numbers := range(start, stop, each)) > _MOST:
                return None
            found += numbers
        at = part.end()
        if at == len(text):
            return found
        sign = re.compile(r"\s*\+\s*").match(text, at)
        if sign is None or len(found) > _MOST:
            return None
        at = sign.end()


def _used(settings: Settings, role: str) -> bool:
    """Tell whether the pipeline starts a role that the config describes."""
    if role == "critic":
        return settings.text("adv_estimator") == "gae"
    if role == "reference" and settings.has("actor_infer.device_mapping"):
        if settings.has("actor_train.model_args.lora_target"):
            # Without its adapter, the actor is its own reference.
            return False
        wanted = settings.flag("enable_reference") or settings.flag("use_kl_loss")
        return wanted or settings.real("init_kl_coef") > 0
    return True


def _mappings(settings: Settings) -> dict[str, list[int]]:
    """Return the GPUs of each role that has some and that the pipeline starts."""
    found: dict[str, list[int]] = {}
    for key in list(settings.given):
        role = key.removesuffix(_MAPPING)
        if role == key or not settings.has(key) or not _used(settings, role):
            continue
        text = settings.text(key) or ""
        ranks = parse_mapping(text)
        if ranks is None or any(rank < 0 for rank in ranks):
            hint = "write it as list(range(0, 16)), as [0, 1, 8, 9], or as a sum of those"
            message = f"{key} is {shorten(repr(text))}, which is not a list of GPUs that can be read"
            settings.error("not-a-mapping", message, hint, key)
        elif ranks:
            found[role] = ranks
    return found


def _size(settings: Settings) -> tuple[int, int]:
    per_node = settings.whole("num_gpus_per_node")
    most = max((rank for ranks in _mappings(settings).values() for rank in ranks), default=0)
    return (1, per_node) if not per_node else (most // per_node + 1, per_node)


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role | None]:
    for role, ranks in _mappings(settings).items():
        key = f"{role}{_MAPPING}"
        if max(ranks) >= gpus.total:
            message = f"{role} is on GPU {max(ranks)}, and the {gpus.total} GPUs are numbered from 0"
            settings.error("too-many-gpus", message, "take more nodes, or a smaller range", key)
            continue
        if len(set(ranks)) < len(ranks):
            settings.error("twice", f"{key} names a GPU twice", "name each GPU once", key)
            continue
        yield _role(settings, gpus, _name(role), role, ranks)
    settings.only_checks = True
    _check(settings)


def _name(role: str) -> str:
    """Return the name of a role: `reward_math` for `rewards.math`, `teacher_8B` for `teacher.teacher_8B`."""
    kind, _, own = role.rpartition(".")
    kind = kind.removesuffix("s").replace(".", "_")
    return own if not kind or own.startswith(kind) else f"{kind}_{own}"


def _role(settings: Settings, gpus: Gpus, name: str, role: str, ranks: list[int]) -> Role | None:
    config = f"{role}.strategy_args.strategy_config"
    strategy = settings.text(f"{role}.strategy_args.strategy_name") or ""
    mapping = f"{role}{_MAPPING}"
    if strategy in ("vllm", "sglang", "hf_infer"):
        split, keys = _engine_split(settings, role, strategy)
        return engines(settings, name, ranks, split, *keys, mapping, gpus=gpus, by_count=False)
    split, keys, experts = _split(settings, role, strategy, config)
    return trained(settings, name, ranks, split, *keys, mapping, experts=experts, by_count=False)


def _one(settings: Settings, key: str) -> int:
    return settings.number(key) or 1


def _engine_split(settings: Settings, role: str, strategy: str) -> tuple[Split, tuple[str, ...]]:
    config = f"{role}.strategy_args.strategy_config"
    keys = (f"{config}.tensor_parallel_size", f"{config}.pipeline_parallel_size", f"{role}.num_gpus_per_worker")
    tensor, pipeline, worker = (_one(settings, key) for key in keys)
    if strategy == "vllm":
        return sizes(TP=tensor, PP=pipeline), keys[:2]
    return sizes(TP=worker if strategy == "hf_infer" else max(worker, tensor)), keys[2:]


def _split(settings: Settings, role: str, strategy: str, config: str) -> tuple[Split, tuple[str, ...], int]:
    if "megatron" in strategy:
        keys = tuple(f"{config}.{axis}_parallel_size" for axis in _MEGATRON)
        tensor, context, pipeline, expert = (_one(settings, key) for key in keys)
        return sizes(TP=tensor, CP=context, PP=pipeline), keys, expert
    key = f"{role}.model_args.ulysses_size"
    return sizes(SP=_one(settings, key)), (key,), 1


def _check(settings: Settings) -> None:
    """Check what ROLL refuses before it starts."""
    key = "actor_train.device_mapping"
    if "megatron" not in (settings.text("actor_train.strategy_args.strategy_name") or "") or not settings.has(key):
        return
    ranks = parse_mapping(settings.text(key) or "") or []
    copy, _ = product(_split(settings, "actor_train", "megatron", "actor_train.strategy_args.strategy_config")[0])
    ways, batch = len(ranks) // copy, settings.number("rollout_batch_size")
    if batch and ways > 1 and len(ranks) % copy == 0 and batch % ways:
        message = f"rollout_batch_size is {batch}, which data parallel {ways} of actor_train does not divide"
        settings.error(
            "batch-not-divisible", message, "ROLL refuses this: change one of them", "rollout_batch_size", key
        )


ROLL = Framework(
    name="roll",
    version="0.3.0",
    defaults=_DEFAULTS,
    size=_size,
    lay_out=_lay_out,
    marks=("actor_train.", "actor_infer.", "student.", "student_train.", "sft_train."),
    in_config=True,
    says_cluster=True,
)
