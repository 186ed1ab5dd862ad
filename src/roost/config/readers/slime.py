"""slime and miles: one `PACK` group of GPUs, sorted by node and GPU; training takes its first ones, engines the others.

An engine is a process for each node that it is on; the processes of a group of engines follow one another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import product, sizes, trained

_DEFAULTS = table("""
    *: actor-num-nodes=1 actor-num-gpus-per-node=8 num-gpus-per-node=8 colocate=false
    *: rollout-num-gpus=null rollout-num-gpus-per-engine=1 rollout-external=false rollout-external-engine-addrs=null
    *: debug-train-only=false debug-rollout-only=false load-debug-rollout-data=null
    *: advantage-estimator=grpo use-kl-loss=false kl-coef=0 train-backend=megatron update-weight-mode=full
    *: tensor-model-parallel-size=1 pipeline-model-parallel-size=1 context-parallel-size=1
    *: expert-model-parallel-size=1 expert-tensor-parallel-size=null
    *: sglang-config=null sglang-pp-size==sglang-pipeline-parallel-size sglang-pipeline-parallel-size=1
    *: prefill-num-servers=null rollout-batch-size=null over-sampling-batch-size=null n-samples-per-prompt=1
    *: global-batch-size=null num-steps-per-rollout=null
    *: critic-num-nodes==actor-num-nodes critic-num-gpus-per-node==actor-num-gpus-per-node
""")
_ONLY_MILES = table("""
    *: eval-num-gpus=0 eval-num-gpus-per-engine==rollout-num-gpus-per-engine update-weight-transfer-mode=null
""")
PLACING = re.compile(
    r"coll?ocat|(actor|critic|decode|eval|prefill|ref|reward|rollout|train)[-_]"
    r"([a-z]+[-_])*(engine|gpu|node|server)s?([-_]|$)"
)
"""Names of flags that say how much hardware a role has; neither Megatron nor SGLang has such names."""
_SWITCHES = frozenset(
    {
        *("colocate", "debug-train-only", "debug-rollout-only", "rollout-external", "use-kl-loss", "sequence-parallel"),
        *("balance-data", "apply-chat-template", "rollout-shuffle", "use-dynamic-batch-size", "use-critic"),
        *("offload", "offload-train", "offload-rollout"),
    }
)


@dataclass(frozen=True)
class _Group:
    """A group of alike engines."""

    name: str
    gpus: int
    per_engine: int
    keys: tuple[str, ...] = ("rollout-num-gpus", "rollout-num-gpus-per-engine")


@dataclass(frozen=True)
class _Share:
    """How many GPUs training and rollout take, and where those of the rollout begin."""

    training: int
    rollout: int
    offset: int

    @property
    def total(self) -> int:
        return max(self.training, self.offset + self.rollout)


def _share(settings: Settings) -> _Share:
    training = settings.whole("actor-num-nodes") * settings.whole("actor-num-gpus-per-node")
    given = settings.number("rollout-num-gpus")
    colocated = settings.flag("colocate")
    is_external = settings.flag("rollout-external") or settings.has("rollout-external-engine-addrs")
    if settings.flag("debug-train-only") or settings.has("load-debug-rollout-data") or is_external:
        return _Share(training, 0, 0)
    if settings.flag("debug-rollout-only"):
        return _Share(0, training if given is None else given, 0)
    if given is None and not colocated:
        settings.error(
            "no-rollout-gpus",
            "training and rollout are apart, and nothing says how many GPUs the rollout has",
            "give --rollout-num-gpus, or --colocate",
            "rollout-num-gpus",
            "actor-num-gpus-per-node",
        )
    is_miles = settings.framework.name == "miles"
    if colocated:
        return _Share(training, training if given is None or is_miles else given, 0)
    return _Share(training, (given or 0) + (settings.whole("eval-num-gpus") if is_miles else 0), training)


def _size(settings: Settings) -> tuple[int, int]:
    share = _share(settings)
    nodes, per_node = settings.whole("actor-num-nodes"), settings.whole("actor-num-gpus-per-node")
    if share.total == share.training and nodes:
        return nodes, per_node
    # Nodes have 8 GPUs unless the job says otherwise.
    on_node = settings.whole("num-gpus-per-node") if settings.has("num-gpus-per-node") else max(8, per_node)
    return (-(-share.total // max(1, on_node)), on_node) if share.total > on_node else (1, share.total)


def _groups(settings: Settings, share: _Share) -> list[_Group]:
    """Return the groups of engines in the order in which they take GPUs."""
    per_engine = settings.whole("rollout-num-gpus-per-engine")
    extra = settings.whole("eval-num-gpus") if settings.framework.name == "miles" else 0
    regular = share.rollout - extra
    found = [_Group("rollout", regular, per_engine)]
    if settings.has("sglang-config"):
        return _configured(settings, per_engine) or found
    if settings.has("prefill-num-servers"):
        prefill = settings.whole("prefill-num-servers") * per_engine
        keys = ("prefill-num-servers", "rollout-num-gpus")
        found = [
            _Group("rollout_prefill", prefill, per_engine, keys),
            _Group("rollout_decode", regular - prefill, per_engine, keys),
        ]
        if prefill >= regular:
            message = f"{prefill} GPUs are for prefill, and the rollout has {regular}: none is left to decode"
            settings.error("no-decode", message, "take fewer prefill servers", *keys)
    if extra:
        keys = ("eval-num-gpus", "eval-num-gpus-per-engine")
        found.append(_Group("eval", extra, settings.whole("eval-num-gpus-per-engine"), keys))
    return found


def _configured(settings: Settings, per_engine: int) -> list[_Group]:
    """Read the groups of the YAML file of `--sglang-config`, which the reader has put among the settings."""
    found: list[_Group] = []
    groups = {
        key.rsplit(".", 1)[0] for key in settings.given if re.fullmatch(r"sglang\.\d+\.\w+_groups\.\d+\.\w+", key)
    }
    for at in sorted(groups, key=lambda key: [int(part) for part in re.findall(r"\d+", key)]):
        model = at.rsplit(".", 2)[0]
        name, kind = settings.text(f"{model}.name"), settings.text(f"{at}.worker_type")
        own = (
            settings.number(f"{at}.num_gpus_per_engine")
            or settings.number(f"{model}.num_gpus_per_engine")
            or per_engine
        )
        parts = [part for part in (name, kind) if part and part not in ("default", "regular")]
        label = "_".join(["rollout", *parts])
        taken = [group.name for group in found]
        found.append(
            _Group(
                label if label not in taken else f"{label}_{len(found)}",
                settings.whole(f"{at}.num_gpus"),
                0 if kind == "placeholder" else own,
                (f"{at}.num_gpus_per_engine", f"{at}.num_gpus"),
            )
        )
    if not found:
        message = f"--sglang-config {settings.text('sglang-config')} is not there: its engines are not known"
        settings.warn("no-engines-file", message, "put the file beside the script", "sglang-config")
    return found


def _engines(settings: Settings, group: _Group, ranks: list[int], gpus: Gpus) -> Role | None:
    """Lay out a group of engines over the GPUs that follow one another."""
    settings.divides(
        group.gpus,
        group.per_engine,
        f"the number of GPUs of {group.name}",
        f"{group.per_engine} GPUs per engine",
        *group.keys,
    )
    on_node = min(group.per_engine, settings.whole("num-gpus-per-node"))
    if not on_node or not ranks:
        return None
    processes = [tuple(ranks[at : at + on_node]) for at in range(0, len(ranks) - on_node + 1, on_node)]
    cut = [own for own in processes if len({gpus.node_of(rank) for rank in own}) > 1]
    if cut:
        settings.error(
            "engine-cut",
            f"{len(cut)} of {len(processes)} processes of {group.name} have {on_node} GPUs on two nodes, "
            "and a process has one",
            "set --num-gpus-per-node to what a node has"
            if on_node > max(gpus.sizes)
            else "change the GPUs per engine, or where the rollout begins",
            *group.keys,
            "num-gpus-per-node",
        )
        processes = [own for own in processes if own not in cut]
    pipeline = settings.whole("sglang-pp-size")
    together = max(1, group.per_engine // on_node)
    split = sizes(TP=group.per_engine // max(1, pipeline), PP=pipeline)
    return Role(
        name=group.name,
        processes=tuple(processes),
        parallel=(*split, ("engines", len(processes) // together)),
        together=together,
        by_count=True,
    )


def _training(settings: Settings, ranks: list[int]) -> Role:
    tensor, context, pipeline = (
        settings.whole(f"{name}-parallel-size") for name in ("tensor-model", "context", "pipeline-model")
    )
    is_megatron = settings.text("train-backend") == "megatron"
    split = sizes(TP=tensor, CP=context, PP=pipeline) if is_megatron else sizes(CP=context)
    counts = ("actor-num-gpus-per-node", "actor-num-nodes")
    keys = (*counts, *(f"{name}-parallel-size" for name in ("tensor-model", "context", "pipeline-model")))
    expert = settings.whole("expert-model-parallel-size") if is_megatron else 1
    found = trained(settings, "actor", ranks, split, *keys, experts=expert)
    if expert > 1 and len(ranks) % product(split)[0] == 0:
        own = settings.number("expert-tensor-parallel-size")
        needed, parts = product(sizes(EP=expert, ETP=tensor if own is None else own, PP=pipeline))
        about = ("expert-model-parallel-size", *counts)
        settings.divides(len(ranks), needed, "the number of GPUs of actor", parts, *about)
    return found


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role]:
    share = _share(settings)
    where = settings.where("rollout-num-gpus", "actor-num-gpus-per-node", "actor-num-nodes")
    ranks = sorted(gpus.pack(share.total, "the job", where))
    if share.training:
        actor = _training(settings, ranks[: share.training])
        yield actor
        if settings.flag("use-kl-loss") or settings.real("kl-coef"):
            yield replace(actor, name="ref")
        if settings.text("advantage-estimator") == "ppo":
            yield replace(actor, name="critic")
    at = share.offset
    for group in _groups(settings, share) if share.rollout else ():
        own = ranks[at : at + group.gpus]
        at += group.gpus
        found = _engines(settings, group, own, gpus)
        if found is not None:
            yield found
    settings.only_checks = True
    _check(settings, share)


def _check(settings: Settings, share: _Share) -> None:
    per_node, nodes = settings.whole("actor-num-gpus-per-node"), settings.whole("actor-num-nodes")
    if settings.flag("colocate") and share.rollout and per_node < 8 and not settings.has("num-gpus-per-node"):
        more = ", and counts engines on the wrong node" if nodes > 1 else ""
        settings.warn(
            "gpus-per-node",
            f"it is colocated on {per_node} GPUs a node, and --num-gpus-per-node is not given: "
            f"{settings.framework.name} takes a node for one of 8{more}",
            f"add --num-gpus-per-node {per_node}",
            "colocate",
        )
    batch, samples, steps = (
        settings.number(key) for key in ("rollout-batch-size", "n-samples-per-prompt", "num-steps-per-rollout")
    )
    whole, over = settings.number("global-batch-size"), settings.number("over-sampling-batch-size")
    one_step = batch * samples // steps if batch and samples and steps else None
    if whole and one_step and one_step != whole:
        settings.error(
            "batch-not-divisible",
            f"--global-batch-size is {whole}, and {batch} prompts x {samples} samples / {steps} steps are {one_step}",
            "leave out one of --global-batch-size and --num-steps-per-rollout",
            "global-batch-size",
        )
    if batch and over and over < batch:
        message = f"--over-sampling-batch-size {over} is less than --rollout-batch-size {batch}"
        settings.error("batch-too-small", message, "take at least as many", "over-sampling-batch-size")
    mode = settings.text("update-weight-transfer-mode" if settings.framework.name == "miles" else "update-weight-mode")
    if settings.flag("colocate") and mode in ("delta", "p2p", "disk-delta"):
        message = f"{settings.framework.name} does not update weights by {mode} when it is colocated"
        settings.error("colocate-contradicts", message, "take out --colocate, or the mode", "colocate")


_COMMAND = re.compile(r"(^|/)train(_async|_multi_lora_async)?\.py$")
_MARKS = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus")
SLIME = Framework(
    name="slime",
    version="August 2026",
    defaults=_DEFAULTS,
    size=_size,
    lay_out=_lay_out,
    switches=_SWITCHES,
    command=_COMMAND,
    common=_COMMAND,
    marks=_MARKS,
    files=("sglang-config",),
    placing=PLACING,
)
MILES = replace(
    SLIME,
    name="miles",
    defaults={**_DEFAULTS, **_ONLY_MILES},
    switches=frozenset({*_SWITCHES, "indep-dp", "fully-async"}),
)
