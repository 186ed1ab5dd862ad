"""OpenRLHF: a `PACK` group of GPUs for engines, for actor and reference, and for critic and reward, in this order.

Colocated models share the group of the actor or of the critic; otherwise each has one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import TORCHRUN, engines, sizes, torchrun_ranks, torchrun_size, trained

_ROLES = ("actor", "ref", "critic", "reward")
_DEFAULTS = table("""
    actor, ref, critic, reward: num_nodes=1 num_gpus_per_node=8
    vllm: num_engines=null tensor_parallel_size=1 enable_sleep=false
    train: colocate_all=false colocate_actor_ref=false colocate_critic_reward=false
    train: async_enable=false partial_rollout_enable=false agent_func_path=null
    train: batch_size=128 micro_batch_size=1 dynamic_batch_enable=false
    rollout: batch_size=1024 micro_batch_size=1 n_samples_per_prompt=1
    reward: remote_url=null
    critic: model_name_or_path=null
    algo: kl.init_coef=0.01 advantage.estimator=gae
    ds: ring_attn_size=1 tensor_parallel_size=1
""")
_DEFAULTS |= TORCHRUN
_RENAMED = """
    colocate_all_models=train.colocate_all colocate_actor_ref=train.colocate_actor_ref
    colocate_critic_reward=train.colocate_critic_reward async_train=train.async_enable
    partial_rollout=train.partial_rollout_enable agent_func_path=train.agent_func_path
    train_batch_size=train.batch_size micro_train_batch_size=train.micro_batch_size
    use_dynamic_batch=train.dynamic_batch_enable rollout_batch_size=rollout.batch_size
    micro_rollout_batch_size=rollout.micro_batch_size n_samples_per_prompt=rollout.n_samples_per_prompt
    remote_rm_url=reward.remote_url critic_pretrain=critic.model_name_or_path init_kl_coef=algo.kl.init_coef
    advantage_estimator=algo.advantage.estimator ring_attn_size=ds.ring_attn_size
"""
_OLDER = dict(item.split("=") for item in _RENAMED.split())
_OLDER |= {key.replace(".", "_"): key for key in _DEFAULTS if key.endswith(("num_nodes", "num_gpus_per_node"))}
_OLDER |= {key.replace(".", "_"): key for key in _DEFAULTS if key.startswith(("vllm.", "ds.tensor"))}
_SWITCHES = frozenset(key for key, default in _DEFAULTS.items() if default is False)


def _counts(role: str) -> tuple[str, str]:
    return f"{role}.num_gpus_per_node", f"{role}.num_nodes"


def _world(settings: Settings, role: str) -> int:
    per_node, nodes = _counts(role)
    return settings.whole(nodes) * settings.whole(per_node)


def _is_supervised(settings: Settings) -> bool:
    return "ppo" not in (settings.text("program") or "ppo")


def _groups(settings: Settings) -> list[tuple[tuple[str, ...], int]]:
    """Return the groups of GPUs in the order in which OpenRLHF asks for them: who is in each, and its size."""
    has = {"actor": True, "ref": settings.real("algo.kl.init_coef") > 0}
    has["critic"] = (settings.text("algo.advantage.estimator") or "gae") == "gae"
    has["reward"] = not (settings.has("reward.remote_url") or settings.has("train.agent_func_path"))
    roles = [role for role in _ROLES if has[role]]
    count = settings.whole("vllm.num_engines") * settings.whole("vllm.tensor_parallel_size")
    everything, apart = settings.flag("train.colocate_all"), settings.flag("train.async_enable")
    # Critic and reward have a group of their own even where everything is colocated, if they are to share one.
    both = settings.flag("train.colocate_critic_reward") and has["critic"]
    shares: list[tuple[str, ...]] = [("critic", "reward")] if both else []
    if everything:
        shares.insert(0, tuple(role for role in _ROLES if not both or role in ("actor", "ref")))
    elif settings.flag("train.colocate_actor_ref"):
        shares.insert(0, ("actor", "ref"))
    own = {role: next((share for share in shares if role in share), (role,)) for role in roles}
    groups = dict.fromkeys(tuple(other for other in own[role] if has[other]) for role in roles)
    first, *rest = ((names, _world(settings, names[0])) for names in groups)
    rollout: list[tuple[tuple[str, ...], int]] = [(("rollout",), count)] if count else []
    if everything and rollout and not apart:
        return [((*first[0], "rollout"), first[1]), *rest]
    # The group that actor and reference share is made before the engines are, and all others after them.
    shared = everything or settings.flag("train.colocate_actor_ref")
    return [first, *rollout, *rest] if shared else [*rollout, first, *rest]


def _size(settings: Settings) -> tuple[int, int]:
    if _is_supervised(settings):
        return torchrun_size(settings)
    total = sum(count for _, count in _groups(settings))
    per_node = (
        max(settings.whole(f"{role}.num_gpus_per_node") for role in _ROLES if settings.has(f"{role}.num_nodes"))
        if any(settings.has(f"{role}.num_nodes") for role in _ROLES)
        else 8
    )
    return (1, total) if total <= 8 else (-(-total // max(8, per_node)), max(8, per_node))


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role | None]:
    split = sizes(SP=settings.whole("ds.ring_attn_size"), TP=settings.whole("ds.tensor_parallel_size"))
    about = ("ds.ring_attn_size", "ds.tensor_parallel_size")
    if _is_supervised(settings):
        name = re.sub(r".*train_|\.py$", "", settings.text("program") or "train")
        yield trained(settings, name, torchrun_ranks(settings, gpus, name), split, *about, by_count=False)
        return
    found: dict[str, list[int]] = {}
    for names, count in _groups(settings):
        ranks = gpus.pack(count, " and ".join(names), settings.where(*_counts(names[0]), "vllm.num_engines"))
        found |= dict.fromkeys(names, ranks)
    for role in _ROLES:
        if role in found:
            # One that shares a group takes the first GPUs of it.
            own = found[role][: _world(settings, role)]
            yield trained(settings, role, own, split, *_counts(role), *about)
    if "rollout" in found:
        tensor = sizes(TP=settings.whole("vllm.tensor_parallel_size"))
        count = settings.whole("vllm.num_engines") * settings.whole("vllm.tensor_parallel_size")
        yield engines(settings, "rollout", found["rollout"][:count], tensor, "vllm.tensor_parallel_size")
    settings.only_checks = True
    _check(settings, found)


def _check(settings: Settings, found: dict[str, list[int]]) -> None:
    """Check what OpenRLHF asserts before it starts."""
    everything, apart = settings.flag("train.colocate_all"), settings.flag("train.async_enable")
    world = _world(settings, "actor")
    if everything and not apart and "rollout" in found:
        count = settings.whole("vllm.num_engines") * settings.whole("vllm.tensor_parallel_size")
        if count != world:
            message = f"everything is colocated: the actor has {world} GPUs and the engines have {count}"
            settings.error("colocate-contradicts", message, "give both as many, or take out --train.colocate_all",
                           "vllm.num_engines", "train.colocate_all", *_counts("actor"))  # fmt: skip
    together = {"ref": "actor"} if everything or settings.flag("train.colocate_actor_ref") else {}
    together |= {"reward": "critic"} if settings.flag("train.colocate_critic_reward") and "critic" in found else {}
    for role, other in together.items():
        shapes = [tuple(settings.whole(key) for key in _counts(name)) for name in (role, other)]
        if role in found and shapes[0] != shapes[1]:
            (one, nodes), (two, more) = shapes
            message = f"{role} and {other} share GPUs: {nodes} x {one} and {more} x {two} are not the same"
            settings.error("colocate-contradicts", message, "give both the same nodes and GPUs per node",
                           *_counts(role), *_counts(other))  # fmt: skip
    if apart and settings.flag("vllm.enable_sleep") and everything:
        settings.error("colocate-contradicts", "engines that sleep do not work with --train.async_enable",
                       "take out --vllm.enable_sleep", "vllm.enable_sleep")  # fmt: skip
    if settings.flag("train.partial_rollout_enable") and not apart:
        settings.error("colocate-contradicts", "--train.partial_rollout_enable needs --train.async_enable",
                       "add --train.async_enable", "train.partial_rollout_enable")  # fmt: skip
    copies = settings.whole("ds.ring_attn_size") * settings.whole("ds.tensor_parallel_size")
    whole, micro = settings.whole("train.batch_size"), settings.whole("train.micro_batch_size")
    batches = ("train.batch_size", "train.micro_batch_size", *_counts("actor"))
    uneven = bool(world and micro) and whole * copies % (micro * world) > 0
    if uneven and not settings.flag("train.dynamic_batch_enable") and settings.knows(*batches):
        ways = f"micro batch {micro} x data parallel {world // copies}"
        message = f"train.batch_size is {whole}, which {ways} does not divide"
        settings.error("batch-not-divisible", message, "DeepSpeed refuses this: change one of them", *batches)
    prompts = ("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size")
    batch, samples, micro = (settings.whole(key) for key in prompts)
    if micro and copies and settings.knows(*prompts, *_counts("actor")) and batch * samples // micro < world // copies:
        message = f"a rollout has {batch * samples // micro} micro batches for {world // copies} groups of the actor"
        settings.error("batch-too-small", message, "take a larger rollout.batch_size", *prompts)


OPENRLHF = Framework(
    name="openrlhf",
    version="0.11.0",
    defaults=_DEFAULTS,
    older=_OLDER,
    size=_size,
    lay_out=_lay_out,
    switches=_SWITCHES,
    command=re.compile(r"openrlhf\.cli\.train_\w+$|(^|/)openrlhf/cli/train_\w+\.py$"),
    marks=("--actor.num_nodes", "--actor.num_gpus_per_node", "--vllm.num_engines", "--colocate_all_models"),
)
