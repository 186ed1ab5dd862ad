"""SkyRL: one `PACK` group of GPUs for everything, or engines first, then policy with reference, then critic."""

from __future__ import annotations

import re
from collections.abc import Iterator

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import Split, engines, product, sizes, trained

_ROLES = ("policy", "critic", "ref")
_PLACE = "trainer.placement"
_ENGINE = "generator.inference_engine"
_AXES = ("tensor_model", "context", "pipeline_model", "expert_model")
_DEFAULTS = table("""
    trainer.placement: colocate_all=true colocate_policy_ref=true
    trainer.placement: policy_num_nodes=1 critic_num_nodes=1 ref_num_nodes=1
    trainer.placement: policy_num_gpus_per_node=1 critic_num_gpus_per_node=1 ref_num_gpus_per_node=1
    generator.inference_engine: num_engines=1 run_engines_locally=true enable_pd=false num_prefill=0
    generator.inference_engine: external_proxy_url=null external_server_urls=null
    generator.inference_engine: tensor_parallel_size=1 pipeline_parallel_size=1 data_parallel_size=1
    generator.inference_engine: expert_parallel_size=1
    generator: n_samples_per_prompt=5
    trainer: strategy=fsdp critic.model.path=null fully_async.simulate_training=false
    trainer: train_batch_size=1024 policy_mini_batch_size=256 micro_train_batch_size_per_gpu=1
    trainer.algorithm: use_kl_loss=true use_kl_in_reward=false
    trainer.policy, trainer.critic, trainer.ref: sequence_parallel_size=1
    trainer.policy.megatron_config, trainer.ref.megatron_config: tensor_model_parallel_size=1 context_parallel_size=1
    trainer.policy.megatron_config, trainer.ref.megatron_config: pipeline_model_parallel_size=1
    trainer.policy.megatron_config, trainer.ref.megatron_config: expert_model_parallel_size=1
    placement: num_nodes=1 num_gpus_per_node=4
    *: strategy=fsdp sequence_parallel_size=1
    megatron_config: tensor_model_parallel_size=1 context_parallel_size=1
    megatron_config: pipeline_model_parallel_size=1 expert_model_parallel_size=1
""")
"""Those without a section of their own are of supervised training, which has a config of its own."""
_OLDER = {
    **{key.replace(f"{_ENGINE}.", "generator."): key for key in _DEFAULTS if key.startswith(_ENGINE)},
    "generator.num_inference_engines": f"{_ENGINE}.num_engines",
    "generator.inference_engine_tensor_parallel_size": f"{_ENGINE}.tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size": f"{_ENGINE}.pipeline_parallel_size",
    "generator.inference_engine_data_parallel_size": f"{_ENGINE}.data_parallel_size",
    "generator.inference_engine_expert_parallel_size": f"{_ENGINE}.expert_parallel_size",
    **{f"{_PLACE}.{role}_num_gpus": f"{_PLACE}.{role}_num_gpus_per_node" for role in _ROLES},
}


def _counts(role: str) -> tuple[str, str]:
    return f"{_PLACE}.{role}_num_gpus_per_node", f"{_PLACE}.{role}_num_nodes"


def _shape(settings: Settings, role: str) -> tuple[int, int]:
    per_node, nodes = _counts(role)
    return settings.whole(nodes), settings.whole(per_node)


def _is_supervised(settings: Settings) -> bool:
    return re.search(r"main_sft|(^|\.)sft", settings.text("program") or "") is not None


def _engine_split(settings: Settings) -> Split:
    tensor, pipeline, data = (
        settings.whole(f"{_ENGINE}.{axis}_parallel_size") for axis in ("tensor", "pipeline", "data")
    )
    return sizes(TP=tensor, PP=pipeline, DP=data)


def _num_engines(settings: Settings) -> int:
    has_others = settings.has(f"{_ENGINE}.external_proxy_url") or settings.has(f"{_ENGINE}.external_server_urls")
    if has_others or not settings.flag(f"{_ENGINE}.run_engines_locally"):
        return 0
    return settings.whole(f"{_ENGINE}.num_engines")


def _models(settings: Settings) -> list[str]:
    if "serve" in (settings.text("program") or "") or settings.flag("trainer.fully_async.simulate_training"):
        return []
    uses_ref = settings.flag("trainer.algorithm.use_kl_loss") or settings.flag("trainer.algorithm.use_kl_in_reward")
    has = {"policy": True, "ref": uses_ref, "critic": settings.has("trainer.critic.model.path")}
    return [role for role, is_there in has.items() if is_there]


def _groups(settings: Settings) -> list[tuple[str, int, int]]:
    """Return the GPUs that are asked for, in order: who asks, and nodes x GPUs, or 1 x GPUs of any nodes."""
    count = _num_engines(settings) * product(_engine_split(settings))[0]
    models = _models(settings)
    if settings.flag(f"{_PLACE}.colocate_all") and models:
        nodes, per_node = _shape(settings, "policy")
        return [("everything", 1, count or nodes * per_node)]
    shares = settings.flag(f"{_PLACE}.colocate_policy_ref")
    apart = [role for role in models if role != "ref" or not shares]
    return [("rollout", 1, count)] * bool(count) + [(role, *_shape(settings, role)) for role in apart]


def _size(settings: Settings) -> tuple[int, int]:
    if _is_supervised(settings):
        return settings.whole("placement.num_nodes"), settings.whole("placement.num_gpus_per_node")
    total = sum(nodes * per_node for _, nodes, per_node in _groups(settings))
    shapes = [_shape(settings, role) for role in _models(settings)]
    if settings.flag(f"{_PLACE}.colocate_all") and shapes and shapes[0][0] * shapes[0][1] == total:
        return shapes[0]
    per_node = max([8, *(per_node for _, per_node in shapes)])
    return (1, total) if total <= per_node else (-(-total // per_node), per_node)


def _model_split(settings: Settings, at: str, strategy: str) -> tuple[Split, int, tuple[str, ...]]:
    if settings.text(strategy) == "megatron":
        keys = tuple(f"{at}megatron_config.{axis}_parallel_size" for axis in _AXES)
        tensor, context, pipeline, expert = (settings.whole(key) for key in keys)
        return sizes(TP=tensor, CP=context, PP=pipeline), expert, keys
    key = f"{at}sequence_parallel_size"
    return sizes(SP=settings.whole(key)), 1, (key,)


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role | None]:
    if _is_supervised(settings):
        split, expert, keys = _model_split(settings, "", "strategy")
        nodes, per_node = _size(settings)
        counts = ("placement.num_gpus_per_node", "placement.num_nodes")
        groups = gpus.nodes(nodes, per_node, "sft", settings.where(*counts))
        yield trained(
            settings, "sft", [rank for group in groups for rank in group], split, *keys, *counts, experts=expert
        )
        return
    found: dict[str, list[int]] = {}
    for name, nodes, per_node in _groups(settings):
        where = settings.where(*(_counts(name) if name in _ROLES else (f"{_ENGINE}.num_engines", *_counts("policy"))))
        ranks = gpus.pack(nodes * per_node, name, where, bundle=per_node if name in _ROLES else 1)
        found[name] = ranks if name in _ROLES else sorted(ranks)
    everything = found.get("everything", [])
    for role in _models(settings):
        nodes, per_node = _shape(settings, role)
        ranks = found.get(role, found.get("policy", everything) if role == "ref" else everything)[: nodes * per_node]
        split, expert, keys = _model_split(settings, f"trainer.{role}.", "trainer.strategy")
        yield trained(settings, role, ranks, split, *keys, *_counts(role), experts=expert)
    yield from _engines(settings, found.get("rollout", everything))
    settings.only_checks = True
    _check(settings)


def _engines(settings: Settings, ranks: list[int]) -> Iterator[Role | None]:
    split = _engine_split(settings)
    size, _ = product(split)
    keys = [f"{_ENGINE}.{axis}_parallel_size" for axis in ("tensor", "pipeline", "data")]
    ranks = ranks[: _num_engines(settings) * size]
    prefill = settings.whole(f"{_ENGINE}.num_prefill") * size if settings.flag(f"{_ENGINE}.enable_pd") else 0
    if prefill:
        yield engines(settings, "rollout_prefill", ranks[:prefill], split, *keys)
        yield engines(settings, "rollout_decode", ranks[prefill:], split, *keys)
    elif ranks:
        yield engines(settings, "rollout", ranks, split, *keys)


def _check(settings: Settings) -> None:
    """Check what SkyRL asserts before it starts."""
    models = _models(settings)
    if not models:
        return
    nodes, per_node = _shape(settings, "policy")
    world = nodes * per_node
    everything = settings.flag(f"{_PLACE}.colocate_all")
    engine, text = product(_engine_split(settings))
    if everything and _num_engines(settings) and _num_engines(settings) * engine != world:
        count = _num_engines(settings)
        sizes_of = f"policy has {world} GPUs, and {count} engines of {text} have {count * engine}"
        settings.error("colocate-contradicts", f"everything is colocated: {sizes_of}",
                       "give both as many, or set colocate_all=false",
                       f"{_ENGINE}.num_engines", f"{_ENGINE}.tensor_parallel_size", *_counts("policy"))  # fmt: skip
    for role in models[1:]:
        own = _shape(settings, role)
        shares = everything or (role == "ref" and settings.flag(f"{_PLACE}.colocate_policy_ref"))
        same = own[0] * own[1] == world if everything else own == (nodes, per_node)
        if shares and not same:
            message = f"policy and {role} share GPUs: {nodes} x {per_node} and {own[0]} x {own[1]} are not the same"
            settings.error("colocate-contradicts", message, "give both the same nodes and GPUs per node",
                           *_counts(role), *_counts("policy"))  # fmt: skip
    keys = ("trainer.train_batch_size", "trainer.policy_mini_batch_size")
    batch, mini = (settings.whole(key) for key in keys)
    if not mini or not settings.knows(*keys):
        return
    if batch % mini:
        message = f"train_batch_size is {batch}, which policy_mini_batch_size {mini} does not divide"
        settings.error("batch-not-divisible", message, "SkyRL refuses this: change one of them", *keys)
        return
    copy, _ = product(_model_split(settings, "trainer.policy.", "trainer.strategy")[0])
    samples, micro = (
        settings.whole("generator.n_samples_per_prompt"),
        settings.whole("trainer.micro_train_batch_size_per_gpu"),
    )
    more = ("generator.n_samples_per_prompt", "trainer.micro_train_batch_size_per_gpu", *_counts("policy"))
    if not world or world % copy or not micro or not settings.knows(*more):
        return
    each = mini * samples // (world // copy)
    if not each or each % micro:
        has = f"a mini batch is {each} samples for each of {world // copy} copies"
        message = f"{has}, which micro batch {micro} does not divide"
        settings.error("batch-not-divisible", message, "SkyRL refuses this: change one of them", keys[1], *more)


SKYRL = Framework(
    name="skyrl",
    version="August 2026",
    defaults=_DEFAULTS,
    older=_OLDER,
    size=_size,
    lay_out=_lay_out,
    command=re.compile(r"^(skyrl|skyrl_train|examples)\.[\w.]*(entrypoints\.\w+|main_\w+)$"),
    common=re.compile(r"^examples\."),
    marks=("trainer.placement.", "generator.inference_engine.", "generator.num_inference_engines"),
)
