"""NeMo-RL: a cluster is a number of bundles on each of its nodes; a reward model and inference are subtracted from it.

Inference takes whole nodes, or GPUs of the one node that there is. The ranks of a cluster go by node and GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import engines, sizes, trained
from roost.text import plural

_MEGATRON = ("tensor_model", "pipeline_model", "context", "expert_model")
_GENERATION = "policy.generation"
_RESOURCES = f"{_GENERATION}.colocated.resources"
_REWARD = "env.reward_model"
_TEACHERS = "on_policy_distillation"
_APART = f"{_TEACHERS}.non_colocated_teachers"
_TEACHER = ("num_nodes", "gpus_per_node", *(f"{name}_parallel_size" for name in _MEGATRON))
_ENGINE = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
_MODELS = "policy, teacher, value, env.reward_model"
_DEFAULTS = table(f"""
    cluster: num_nodes=1 gpus_per_node=8 segment_size=null
    {_MODELS}: megatron_cfg.enabled=false megatron_cfg.tensor_model_parallel_size=1 megatron_cfg.context_parallel_size=1
    {_MODELS}: megatron_cfg.pipeline_model_parallel_size=1 megatron_cfg.expert_model_parallel_size=1
    {_MODELS}: dtensor_cfg.enabled=false dtensor_cfg.tensor_parallel_size=1 dtensor_cfg.context_parallel_size=1
    {_MODELS}: dtensor_cfg.expert_parallel_size=1
    {_GENERATION}: backend=vllm colocated.enabled=true
    {_GENERATION}: colocated.resources.num_nodes=null colocated.resources.gpus_per_node=null
    {_GENERATION}.sglang_cfg: tp_size=1 gpus_per_server=={_GENERATION}.sglang_cfg.tp_size
    {_GENERATION}.vllm_cfg, generation.vllm_cfg: tensor_parallel_size=1 pipeline_parallel_size=1 expert_parallel_size=1
    {_GENERATION}.trtllm_cfg: tensor_parallel_size=1 pipeline_parallel_size=1 expert_parallel_size=1
    {_REWARD}.resources: num_nodes=1 gpus_per_node=8
    {_TEACHERS}: enabled=false deduplicate_shared_teacher_checkpoints=true non_colocated_teachers.enabled=false
""")


def _teachers(settings: Settings) -> dict[str, dict[str, str]]:
    """Return the key of each setting of each teacher that has nodes of its own, by the alias of the teacher."""
    if not (settings.flag(f"{_TEACHERS}.enabled") and settings.flag(f"{_APART}.enabled")):
        return {}
    names = {key: f"{_APART}.default_teacher_cfg.{key}" for key in _TEACHER}
    found: dict[str, dict[str, str]] = {}
    models: set[str | None] = set()
    for key in list(settings.given):
        alias = key.removeprefix(f"{_TEACHERS}.teacher_model_by_agent_name.")
        if alias == key:
            continue
        model = settings.text(key)
        if model in models and settings.flag(f"{_TEACHERS}.deduplicate_shared_teacher_checkpoints"):
            continue
        models.add(model)
        own = {name: f"{_APART}.teacher_overrides.{alias}.{name}" for name in _TEACHER}
        found[alias] = {name: own[name] if settings.find(own[name]) else names[name] for name in _TEACHER}
    return found


def _shares(settings: Settings) -> dict[str, tuple[int, int]]:
    """Return the nodes x GPUs of each part of the cluster, in the order in which NeMo-RL makes them."""
    total, per_node = _size(settings)
    reward = (0, 0)
    if any(
        re.fullmatch(r"data\.(train|validation|default)(\.\d+)?\.env_name", key) and item.text == "reward_model"
        for key, item in settings.given.items()
    ):
        reward = (
            settings.whole(f"{_REWARD}.resources.num_nodes"),
            settings.whole(f"{_REWARD}.resources.gpus_per_node"),
        )
    teachers = {
        f"teacher_{alias}": (settings.number(keys["num_nodes"]) or 1, settings.number(keys["gpus_per_node"]) or 8)
        for alias, keys in _teachers(settings).items()
    }
    nodes, left = (total, per_node - reward[1]) if total == 1 else (total - reward[0], per_node)
    nodes -= sum(count for count, _ in teachers.values())
    found = {"policy": (nodes, left)}
    if _generates(settings) and not settings.flag(f"{_GENERATION}.colocated.enabled"):
        own = (settings.whole(f"{_RESOURCES}.num_nodes"), settings.whole(f"{_RESOURCES}.gpus_per_node"))
        keys = (f"{_RESOURCES}.gpus_per_node", f"{_RESOURCES}.num_nodes", f"{_GENERATION}.colocated.enabled")
        message = hint = ""
        if not own[1]:
            message, hint = "inference is apart, and nothing says on how many GPUs", f"set {keys[0]}"
        elif nodes == 1:
            found |= {"policy": (1, left - own[1]), "generation": (1, own[1])}
            if own[0] > 1:
                message = f"inference takes {own[0]} nodes, and there is one to share"
                hint = "set num_nodes to null or 1, or take more nodes"
        else:
            found |= {"policy": (nodes - own[0], left), "generation": own}
            if own[1] != per_node:
                message = f"inference takes {own[1]} GPUs of each of its nodes, which have {per_node}"
                hint = f"set gpus_per_node to {per_node}: it takes whole nodes"
        if message:
            settings.error("inference-nodes", message, hint, *keys)
    found |= {"reward_model": reward} if reward[1] else {}
    for name, (rows, columns) in found.items():
        if rows < 1 or columns < 1:
            settings.error("nothing-left", f"nothing of the {total} x {per_node} GPUs is left for {name}",
                           "take more nodes, or give fewer to the others", "cluster.num_nodes",
                           f"{_RESOURCES}.num_nodes", "cluster.gpus_per_node")  # fmt: skip
    return {name: share for name, share in (found | teachers).items() if min(share) > 0}


def _generates(settings: Settings) -> bool:
    """Tell whether the job generates: supervised training has a section for generation now and then, and uses none."""
    sections = {key.partition(".")[0] for key in settings.given}
    return not sections & {"dpo", "sft", "rm"} and any(key.startswith(f"{_GENERATION}.") for key in settings.given)


def _size(settings: Settings) -> tuple[int, int]:
    return settings.whole("cluster.num_nodes"), settings.whole("cluster.gpus_per_node")


_COUNTS = ("cluster.gpus_per_node", "cluster.num_nodes")


def _model(settings: Settings, name: str, section: str, ranks: list[int]) -> Role:
    if settings.flag(f"{section}.megatron_cfg.enabled"):
        keys = {axis: f"{section}.megatron_cfg.{axis}_parallel_size" for axis in _MEGATRON}
        return _megatron(settings, name, keys, ranks)
    keys = {axis: f"{section}.dtensor_cfg.{axis}_parallel_size" for axis in ("tensor", "context", "expert")}
    split = sizes(TP=_of(settings, keys["tensor"]), CP=_of(settings, keys["context"]))
    return trained(settings, name, ranks, split, *keys.values(), *_COUNTS, experts=_of(settings, keys["expert"]))


def _megatron(settings: Settings, name: str, keys: Mapping[str, str], ranks: list[int]) -> Role:
    tensor, pipeline, context, expert = (_of(settings, keys[axis]) for axis in _MEGATRON)
    split = sizes(TP=tensor, CP=context, PP=pipeline)
    return trained(settings, name, ranks, split, *keys.values(), *_COUNTS, experts=expert)


def _of(settings: Settings, key: str) -> int:
    return settings.number(key) or 1


def _engines(settings: Settings, ranks: list[int]) -> Role | None:
    section = _GENERATION if _generates(settings) else "generation"
    backend = settings.text(f"{_GENERATION}.backend")
    if backend == "megatron":
        return _model(settings, "generation", "policy", ranks)
    at = f"{section}.{backend if backend in ('trtllm', 'sglang') else 'vllm'}_cfg"
    keys = [f"{at}.{name}" for name in _ENGINE]
    if backend == "sglang":
        keys = [f"{at}.gpus_per_server"]
    tensor, *pipeline = (settings.whole(key) for key in keys[:2])
    split = sizes(TP=tensor, PP=pipeline[0] if pipeline else 1)
    return engines(settings, "generation", ranks, split, *keys, *_COUNTS)


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role | None]:
    if not any(key.startswith("policy.") for key in settings.given):
        # An evaluation: engines on all of the cluster.
        yield _engines(settings, _take(settings, gpus, "generation", _size(settings)))
        return
    ranks = {name: _take(settings, gpus, name, share) for name, share in _shares(settings).items()}
    train = ranks.get("policy", [])
    yield replace(_model(settings, "policy", "policy", train), segment=_segment(settings, gpus, train))
    sections = {key.partition(".")[0] for key in settings.given}
    if "distillation" in sections:
        several = sorted({key.split(".")[1] for key in settings.given if re.match(r"teachers\.\d+\.", key)}, key=int)
        for index in several:
            yield _model(settings, f"teacher_{index}", f"teachers.{index}", train)
        if not several and "teacher" in sections:
            yield _model(settings, "teacher", "teacher", train)
    if "ppo" in sections and "value" in sections:
        yield _model(settings, "value", "value", train)
    if _generates(settings):
        yield _engines(settings, ranks.get("generation", train))
    if "reward_model" in ranks:
        yield _model(settings, "reward_model", _REWARD, ranks["reward_model"])
    for alias, keys in _teachers(settings).items():
        axes = {axis: keys[f"{axis}_parallel_size"] for axis in _MEGATRON}
        yield _megatron(settings, f"teacher_{alias}", axes, ranks[f"teacher_{alias}"])


def _segment(settings: Settings, gpus: Gpus, train: list[int]) -> int:
    """Return how many nodes of the policy NeMo-RL puts into one NVLink domain."""
    size, nodes = settings.whole("cluster.segment_size"), len({gpus.node_of(rank) for rank in train})
    if size < 0 or (size and nodes % size):
        message = f"segment_size is {size}, which does not divide the {plural(nodes, 'node')} of policy"
        settings.error("segments", message, "take a number of nodes that it divides", "cluster.segment_size")
        return 0
    return size


def _take(settings: Settings, gpus: Gpus, name: str, share: tuple[int, int]) -> list[int]:
    groups = gpus.nodes(*share, f"the cluster of {name}", settings.where("cluster.num_nodes", "cluster.gpus_per_node"))
    return [rank for group in groups for rank in group]


_PROGRAMS = {
    r"(^|/)run_grpo_nemo_gym\.py$": "grpo_workplace_assistant_nemotron_nano_v2_9b.yaml",
    r"(^|/)run_distillation_nemo_gym\.py$": "../configs/distillation_math.yaml",
    r"(^|/)run_grpo_single_controller\.py$": "configs/grpo_math_1B_megatron_single_controller.yaml",
    r"(^|/)run_grpo_sliding_puzzle\.py$": "configs/grpo_sliding_puzzle.yaml",
    r"(^|/)run_grpo\.py$": "configs/grpo_math_1B.yaml",
    r"(^|/)run_vlm_grpo\.py$": "configs/vlm_grpo_3B.yaml",
    r"(^|/)run_ppo\.py$": "configs/ppo_math_1B.yaml",
    r"(^|/)run_distillation\.py$": "configs/distillation_math.yaml",
    r"(^|/)run_(dpo|sft|rm)\.py$": r"configs/\2.yaml",
    r"(^|/)run_eval\.py$": "configs/evals/eval.yaml",
}
NEMO_RL = Framework(
    name="nemo-rl",
    version="August 2026",
    defaults=_DEFAULTS,
    size=_size,
    lay_out=_lay_out,
    command=re.compile("|".join(_PROGRAMS)),
    common=re.compile("|".join(_PROGRAMS)),
    marks=("cluster.gpus_per_node", "policy.megatron_cfg", "policy.dtensor_cfg", "policy.generation"),
    in_config=True,
    says_cluster=True,
    configs=_PROGRAMS,
)
