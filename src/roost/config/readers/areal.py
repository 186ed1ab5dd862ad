"""AReaL: `backend: "sglang:d4p1t1"` for each role, on GPUs of its own or on those of the role it is colocated with.

A role that is trained is one `PACK` group of GPUs; each engine has a group of its own. Roles come in the order actor,
critic, ref, teacher, rollout. The older `allocation_mode` says the same in one line, with the rollout first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from roost.config.readers.framework import Framework, Gpus, Role, Settings, table
from roost.config.readers.roles import Split, engines, product, sizes, trained

_ROLES = ("actor", "critic", "ref", "teacher", "rollout")
_ENGINES = ("sglang", "vllm")
_DEFAULTS = table("""
    cluster: n_nodes=1 n_gpus_per_node=8
    *: scheduler.type=null allocation_mode=null
    actor: kl_ctl=0.1
    actor, critic, ref, teacher, rollout: backend=null
    actor, critic, ref, teacher, rollout: scheduling_strategy.type=separation scheduling_strategy.target=null
""")
_AXES = r"(?:[dtpce][1-9]\d{0,5})+"
_ALLOCATION = re.compile(
    rf"(?:(?P<engine>sglang|vllm|fsdp|megatron|archon)(?:\[\w+\])?:|\[\w+\]:)?"
    rf"(?:(?P<axes>{_AXES})|\(?attn:(?P<attention>{_AXES})\|ffn:(?P<experts>{_AXES})\)?)$"
)


class _Share(NamedTuple):
    """How the model of a role is split."""

    engine: str
    split: Split
    data: int
    experts: int

    @property
    def copy(self) -> int:
        return product(self.split)[0]

    @property
    def world(self) -> int:
        return self.copy * self.data


def _axes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"([dtpce])(\d+)", text)}


def _parse(text: str) -> _Share | None:
    """Parse an allocation such as `megatron:(attn:d4p4t2|ffn:d2p4e4)`.

    >>> _parse("sglang:d4p1t2")
    _Share(engine='sglang', split=(('TP', 2),), data=4, experts=1)
    """
    found = _ALLOCATION.match(re.sub(r"\s", "", text)[:200])
    if found is None:
        return None
    axes = _axes(found["axes"] or found["attention"])
    experts = _axes(found["experts"]).get("e", 1) if found["experts"] else axes.get("e", 1)
    split = sizes(TP=axes.get("t", 1), CP=axes.get("c", 1), PP=axes.get("p", 1))
    return _Share(found["engine"] or "fsdp", split, axes.get("d", 1), experts)


def _shares(settings: Settings) -> dict[str, _Share]:
    """Return how each role that the job starts is split."""
    if settings.has("allocation_mode"):
        return _older_shares(settings)
    # The reference is for a penalty, and is left out without one; programs have further engines, such as a judge.
    absent = {"ref"} if settings.real("actor.kl_ctl") <= 0 else set()
    others = [key.partition(".")[0] for key in settings.given if re.fullmatch(r"\w+\.backend", key)]
    found = {}
    for role in dict.fromkeys((*_ROLES, *others)):
        key = f"{role}.backend"
        text = settings.text(key) if role not in absent else None
        share = None if text is None else _parse(text)
        if share is not None:
            found[role] = share
        elif text is not None and role in _ROLES:
            hint = "write it as fsdp:d4t2 or megatron:(attn:d4p4t2|ffn:d2p4e4): d, t, p, c or e, and a number"
            settings.error("not-an-allocation", f"{key} is {text!r}, which is no allocation", hint, key)
    return found


def _older_shares(settings: Settings) -> dict[str, _Share]:
    found: dict[str, _Share] = {}
    text = settings.text("allocation_mode") or ""
    for part in re.split(r"[+|](?![^(]*\))", text):
        share = _parse(part)
        if share is None:
            settings.error("not-an-allocation", f"allocation_mode is {text!r}, which is no allocation",
                           "write it as sglang:d4t2+fsdp:d8", "allocation_mode")  # fmt: skip
            return {}
        found["rollout" if share.engine in _ENGINES else "actor"] = share
    return found


def _targets(settings: Settings, shares: dict[str, _Share]) -> dict[str, str]:
    """Return the role whose GPUs another one shares."""
    if settings.has("allocation_mode"):
        together = "|" in re.sub(r"\([^)]*\)", "", settings.text("allocation_mode") or "")
        return {"actor": "rollout"} if together and len(shares) > 1 else {}
    found = {}
    for role in shares:
        at = f"{role}.scheduling_strategy"
        target = settings.text(f"{at}.target")
        if settings.text(f"{at}.type") != "colocation":
            continue
        if target not in shares or target == role:
            message = f"{role} is colocated with {target}, which this job does not have"
            hint = "name a role that it has, or take type: separation"
            settings.error("no-such-role", message, hint, f"{at}.target", f"{at}.type")
        else:
            found[role] = target
    return found


def _size(settings: Settings) -> tuple[int, int]:
    return settings.whole("cluster.n_nodes"), settings.whole("cluster.n_gpus_per_node")


def _lay_out(settings: Settings, gpus: Gpus) -> Iterator[Role | None]:
    shares = _shares(settings)
    targets = _targets(settings, shares)
    asked = {role: share.world for role, share in shares.items() if role not in targets}
    # What does not fit is said once, with all who ask, and the others are drawn.
    if sum(asked.values()) > gpus.total:
        parts = " + ".join(f"{role} {count}" for role, count in asked.items())
        message = f"{sum(asked.values())} GPUs are asked for ({parts}), and there are {gpus.total}"
        keys = ("allocation_mode", *(f"{role}.backend" for role in reversed(asked)))
        hint = "take more nodes, or colocate roles with scheduling_strategy"
        if settings.text("scheduler.type") in ("ray", "slurm"):
            settings.error("too-many-gpus", message, hint, *keys)
        else:
            # The local scheduler begins again with the first GPU.
            settings.warn("too-many-gpus", f"{message}: some share a GPU that should not", hint, *keys)
    found: dict[str, list[int]] = {}
    older = settings.has("allocation_mode")
    for role in sorted(asked, key=lambda role: role != "rollout") if older else asked:
        share = shares[role]
        if share.world <= gpus.free:
            found[role] = _take(gpus, role, share)
            continue
        settings.inform("not-drawn", f"{role} is not in the map: no GPU is left for it", "", f"{role}.backend")
    for role, share in shares.items():
        ranks = found.get(targets.get(role, role), found.get(targets.get(targets.get(role, ""), ""), []))
        where = (f"{role}.backend", "allocation_mode")
        if role in targets and ranks and share.world != len(ranks):
            settings.error("colocate-contradicts",
                           f"{role} has {share.world} GPUs, and {targets[role]}, whose GPUs it shares, {len(ranks)}",
                           "give both as many", *where)  # fmt: skip
        ranks = ranks[: share.world]
        if not ranks:
            continue
        if share.engine in _ENGINES:
            yield engines(settings, role, ranks, share.split, *where, gpus=gpus)
        else:
            yield trained(settings, role, ranks, share.split, *where, experts=share.experts)


def _take(gpus: Gpus, role: str, share: _Share) -> list[int]:
    if share.engine not in _ENGINES:
        return gpus.pack(share.world, role)
    ranks: list[int] = []
    for _ in range(share.data):
        ranks += gpus.on_one_node(share.copy, role) if share.copy <= gpus.most else gpus.pack(share.copy, role)
    return ranks


AREAL = Framework(
    name="areal",
    version="May 2026",
    defaults=_DEFAULTS,
    size=_size,
    lay_out=_lay_out,
    marks=("cluster.n_gpus_per_node", "allocation_mode", "rollout.backend", "actor.backend"),
    in_config=True,
    says_cluster=True,
)
