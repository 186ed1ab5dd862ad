"""verl: pools of nodes x GPUs, in which actor, reference, critic and rollout share every GPU, and engines apart.

A pool is one `STRICT_PACK` placement group for each node, and the groups are ordered by the address of their nodes; the
ranks of a pool run through its nodes, and an engine is the next tensor x data x pipeline parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roost.config.readers.framework import Framework, Gpus, Role, Settings, fitted, table
from roost.config.readers.roles import (
    TORCHRUN,
    Split,
    engines,
    product,
    sizes,
    torchrun_ranks,
    torchrun_size,
    trained,
)

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_REWARD = "reward.reward_model"
_ENGINE = ("tensor_model", "data", "pipeline_model", "expert")
_SEQUENCE = "fsdp_config.ulysses_sequence_parallel_size"
_DEFAULTS = table(f"""
    trainer: nnodes=1 n_gpus_per_node=8 use_v1=true v1.trainer_mode=sync device=cuda
    *: model_engine=null actor@actor_rollout_ref.actor=null
    algorithm: adv_estimator=gae use_kl_in_reward=false
    data: train_batch_size=1024
    actor_rollout_ref: hybrid_engine=true model.lora_rank=0 model.lora.rank=0 model.lora_adapter_path=null
    actor_rollout_ref.actor: strategy=null use_kl_loss=false use_dynamic_bsz=false
    actor_rollout_ref.actor: ppo_mini_batch_size=256 ppo_micro_batch_size_per_gpu=null
    actor_rollout_ref.actor: {_SEQUENCE}=1 veomni.ulysses_parallel_size=1
    actor_rollout_ref.actor: ulysses_sequence_parallel_size=={_ACTOR}.{_SEQUENCE}
    actor_rollout_ref.ref: ulysses_sequence_parallel_size=={_ACTOR}.ulysses_sequence_parallel_size
    critic: enable=null strategy==actor_rollout_ref.actor.strategy ulysses_sequence_parallel_size=1
    actor_rollout_ref.actor.megatron, critic.megatron: tensor_model_parallel_size=1 pipeline_model_parallel_size=1
    actor_rollout_ref.actor.megatron, critic.megatron: context_parallel_size=1 expert_model_parallel_size=1
    actor_rollout_ref.actor.megatron, critic.megatron: expert_tensor_parallel_size=null
    actor_rollout_ref.rollout: name=null mode=async n=1 nnodes=0 n_gpus_per_node==trainer.n_gpus_per_node
    actor_rollout_ref.rollout.disaggregation: enabled=false prefill_replicas=1 decode_replicas=1
    actor_rollout_ref.rollout.disaggregation: decode_tensor_model_parallel_size=null
    actor_rollout_ref.rollout, reward.reward_model.rollout: tensor_model_parallel_size=2 data_parallel_size=1
    actor_rollout_ref.rollout, reward.reward_model.rollout: pipeline_model_parallel_size=1 expert_parallel_size=1
    rollout: nnodes=1 n_gpus_per_node=8 tensor_model_parallel_size=null
    reward.reward_model: enable=false enable_resource_pool=false nnodes=0 n_gpus_per_node=8
    distillation: enabled=false nnodes=0 n_gpus_per_node=8
    engine: tensor_model_parallel_size=1 context_parallel_size=1 pipeline_model_parallel_size=1
    engine: ulysses_sequence_parallel_size=1
""")
_DEFAULTS |= TORCHRUN
_DEFAULTS |= {
    key.replace(_ACTOR, _REF): f"={key}" for key in _DEFAULTS if key.startswith(f"{_ACTOR}.megatron.")
}  # what the actor has holds for its reference
_OLDER = {key.removeprefix("reward."): key for key in _DEFAULTS if key.startswith(_REWARD)}
_SEPARATE = ("one_step_off_policy", "fully_async_policy")
"""Programs whose rollout has nodes of its own, under `rollout`."""


_SUPERVISED = "sft_trainer"
_GENERATION = "main_generation"


def _program(settings: Settings) -> str:
    return settings.text("program") or ""


def _is_apart(settings: Settings) -> bool:
    return any(name in _program(settings) for name in _SEPARATE)


def _pools(settings: Settings) -> list[tuple[str, int, int, tuple[str, str]]]:
    """Return the pools of GPUs that the job takes, in verl's order: nodes x GPUs, and the keys that say so."""

    def pool(name: str, section: str) -> tuple[str, int, int, tuple[str, str]]:
        keys = (f"{section}.n_gpus_per_node", f"{section}.nnodes")
        return name, settings.whole(keys[1]), settings.whole(keys[0]), keys

    found = [pool("trainer", "trainer")]
    if settings.flag(f"{_REWARD}.enable_resource_pool"):
        found.append(pool("reward", _REWARD))
    if settings.flag("distillation.enabled"):
        found.append(pool("teacher", "distillation"))
    if _is_apart(settings):
        found.append(pool("rollout", "rollout"))
    elif settings.text("trainer.v1.trainer_mode") == "separate_async":
        found.append(pool("rollout", _ROLLOUT))
    return found


def _size(settings: Settings) -> tuple[int, int]:
    if _SUPERVISED in _program(settings):
        return torchrun_size(settings)
    pools = _pools(settings)
    if len(pools) == 1:
        return pools[0][1], pools[0][2]
    return fitted(count for _, nodes, count, _ in pools for _ in range(min(nodes, 100_000)))


def _trainer_split(settings: Settings, section: str) -> Split | None:
    """Return how a training role is split, in the order of its ranks; None for an engine that is not in the table."""
    strategy = _strategy(settings)
    if strategy == "megatron":
        at = f"{section}.megatron"
        return sizes(
            TP=settings.whole(f"{at}.tensor_model_parallel_size"),
            CP=settings.whole(f"{at}.context_parallel_size"),
            PP=settings.whole(f"{at}.pipeline_model_parallel_size"),
        )
    if strategy == "veomni":
        return sizes(SP=settings.whole(f"{_ACTOR}.veomni.ulysses_parallel_size"))
    if strategy in ("dp", "fsdp", "fsdp2"):
        key = f"{section}.ulysses_sequence_parallel_size"
        return sizes(SP=settings.whole(key if key in _DEFAULTS else f"{_ACTOR}.ulysses_sequence_parallel_size"))
    return None


def _strategy(settings: Settings) -> str:
    """Return the engine of the training roles."""
    for key in (f"{_ACTOR}.strategy", f"actor@{_ACTOR}", "model_engine"):
        if given := settings.text(key):
            return given.removesuffix("_actor")
    return "megatron" if "megatron" in (settings.text("config") or "") else "dp"


def _trained(settings: Settings, name: str, section: str, ranks: list[int]) -> Role:
    split = _trainer_split(settings, section)
    if split is None:
        return Role.of(name, ranks)
    keys = ("trainer.n_gpus_per_node", "trainer.nnodes", *(key for key in _DEFAULTS if key.startswith(f"{section}.")))
    return trained(settings, name, ranks, split, *keys)


def _engine_split(settings: Settings, section: str) -> Split:
    return sizes(
        TP=settings.whole(f"{section}.tensor_model_parallel_size"),
        DP=settings.whole(f"{section}.data_parallel_size"),
        PP=settings.whole(f"{section}.pipeline_model_parallel_size"),
    )


def _engines(settings: Settings, name: str, section: str, ranks: list[int], *keys: str) -> Role | None:
    """Lay out engines over the ranks of a pool, one after the other."""
    split = _engine_split(settings, section)
    size, _ = product(split)
    if section == _ROLLOUT and settings.flag(f"{_ROLLOUT}.disaggregation.enabled"):
        at = f"{_ROLLOUT}.disaggregation"
        tp = settings.whole(f"{_ROLLOUT}.tensor_model_parallel_size")
        decode = settings.whole(f"{at}.decode_tensor_model_parallel_size") or tp
        parts = tp * settings.whole(f"{at}.prefill_replicas") + decode * settings.whole(f"{at}.decode_replicas")
        size = size // max(1, tp) * parts
    return engines(
        settings, name, ranks, split, *(f"{section}.{key}_parallel_size" for key in _ENGINE), *keys, size=size
    )


def _standalone(
    settings: Settings, gpus: Gpus, name: str, section: str, pool: tuple[int, int], keys: tuple[str, str]
) -> Role | None:
    """Lay out engines that each take GPUs of their own, as many on each of their nodes as a node has."""
    nodes, count = pool
    split = _engine_split(settings, section)
    size, text = product(split)
    own = (f"{section}.tensor_model_parallel_size", *keys)
    settings.divides(nodes * count, size, "the number of GPUs of rollout", text, *own)
    on_node = min(count, size)
    if not on_node or size % on_node:
        settings.error("engine-on-nodes", f"an engine of {size} GPUs does not fill nodes of {count}",
                       f"take an engine of a multiple of {count} GPUs", *own)  # fmt: skip
        return None
    ranks: list[int] = []
    for _ in range(nodes * count // size):
        for group in gpus.nodes(size // on_node, on_node, "an engine of rollout", settings.where(*keys)):
            ranks += group
    return engines(settings, name, ranks, split)


def _supervised(settings: Settings, gpus: Gpus) -> Role:
    axes = {"TP": "tensor_model", "CP": "context", "PP": "pipeline_model", "SP": "ulysses_sequence"}
    keys = {axis: f"engine.{name}_parallel_size" for axis, name in axes.items()}
    split = sizes(**{axis: settings.whole(key) for axis, key in keys.items()})
    ranks = torchrun_ranks(settings, gpus, "sft")
    return trained(settings, "sft", ranks, split, *keys.values(), *TORCHRUN, by_count=False)


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role]:
    if _SUPERVISED in _program(settings):
        yield _supervised(settings, gpus)
        return
    if _GENERATION in _program(settings):
        section = "rollout" if settings.has("rollout.tensor_model_parallel_size") else _ROLLOUT
        _, nodes, count, keys = _pools(settings)[0]
        found = _standalone(settings, gpus, "rollout", section, (nodes, count), keys)
        yield from (found,) if found else ()
        return
    apart = _is_apart(settings)
    ranks: dict[str, list[int]] = {}
    pools = {pool[0]: pool for pool in _pools(settings)}
    for name, nodes, count, keys in pools.values():
        if name != "rollout":
            groups = gpus.nodes(nodes, count, f"the pool of the {name}", settings.where(*keys))
            ranks[name] = [rank for group in groups for rank in group]
    trainer = ranks["trainer"]
    uses_reference = settings.flag(f"{_ACTOR}.use_kl_loss") or settings.flag("algorithm.use_kl_in_reward")
    estimator = (settings.text("algorithm.adv_estimator") or "").strip("'\"")
    has_critic = settings.flag("critic.enable") if settings.has("critic.enable") else estimator == "gae"
    lora = settings.whole("actor_rollout_ref.model.lora_rank") or settings.whole("actor_rollout_ref.model.lora.rank")
    actor = _trained(settings, "actor", _ACTOR, trainer)
    yield actor
    if uses_reference and lora <= 0 and not settings.has("actor_rollout_ref.model.lora_adapter_path"):
        yield _trained(settings, "ref", _REF, trainer)
    if has_critic:
        yield _trained(settings, "critic", "critic", trainer)
    if not apart:
        found = _engines(settings, "rollout", _ROLLOUT, trainer, "trainer.n_gpus_per_node", "trainer.nnodes")
        if found:
            yield found
    if "rollout" in pools:
        _, nodes, count, keys = pools["rollout"]
        name = "rollout" if apart else "rollout_standalone"
        found = _standalone(settings, gpus, name, _ROLLOUT, (nodes, count), keys)
        if found:
            yield found
    if "teacher" in ranks:
        yield Role.of("teacher", ranks["teacher"])
    if "reward" in ranks or settings.flag(f"{_REWARD}.enable"):
        found = _engines(settings, "reward", f"{_REWARD}.rollout", ranks.get("reward", trainer))
        if found:
            yield found
    settings.only_checks = True
    _check_batches(settings, len(trainer), apart)


def _check_batches(settings: Settings, world: int, apart: bool) -> None:
    """Check the batch sizes as verl does before it starts."""
    keys = ("data.train_batch_size", f"{_ROLLOUT}.n", "trainer.n_gpus_per_node", "trainer.nnodes")
    # Programs of others count their batches otherwise.
    is_own = re.search(r"verl\.(trainer|recipe)|^recipe\.|main_\w+\.py$", _program(settings) or "verl.trainer")
    if apart or not is_own or settings.flag(f"{_ACTOR}.use_dynamic_bsz"):
        return
    batch, per_prompt = settings.whole(keys[0]), settings.whole(keys[1])
    mini = settings.whole(f"{_ACTOR}.ppo_mini_batch_size")
    least, text = world, f"the number of GPUs, {world},"
    if _strategy(settings) == "megatron":
        needed, _ = product(_trainer_split(settings, _ACTOR) or ())
        micro = settings.number(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
        if micro is None or world % needed:
            return
        least = world // needed * micro
        text = f"data parallel {world // needed} x micro batch {micro} = {least}"
    if not settings.knows(*keys) or not least:
        return
    if batch * per_prompt % least:
        settings.error(
            "batch-not-divisible",
            f"train_batch_size {batch} x rollout.n {per_prompt} = {batch * per_prompt}, which {text} does not divide",
            "verl refuses this: change the batch size, or the number of GPUs",
            *keys,
        )
    if batch < mini:
        settings.error(
            "batch-too-small",
            f"train_batch_size is {batch}, and ppo_mini_batch_size is {mini}",
            "verl refuses a mini batch that is larger than the batch",
            f"{_ACTOR}.ppo_mini_batch_size",
            keys[0],
        )


VERL = Framework(
    name="verl",
    version="0.9.1",
    defaults=_DEFAULTS,
    older=_OLDER,
    size=_size,
    lay_out=_lay_out,
    command=re.compile(
        r"verl\.(trainer|experimental)\.[\w.]*main\w*$|(^|/)(main_ppo\w*|main_dapo|\w*sft_trainer)\.py$|"
        r"recipe\.[\w.]*main\w*$|verl\.trainer\.\w*sft_trainer\w*$"
    ),
    marks=("actor_rollout_ref.",),
)
