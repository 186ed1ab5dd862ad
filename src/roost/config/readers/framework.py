"""The readers' common ground: a framework as a table, the settings of one job, and the GPUs of its roles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

from roost.errors import PlacementError, Problem, Where
from roost.text import did_you_mean, plural, shorten

Default = int | str | bool | float | None
Level = Literal["error", "warning", "info"]
_COUNT = re.compile(r"(?:[gn]pus|nodes|nproc|processes|engines|replicas|servers|prefill)(?:[._-]|$)|parallel[_-]size$")
"""Keys that count something, which is never less than nothing."""
_SPLIT = re.compile(r"parallel[_-]size$")
"""Keys that say over how many GPUs a model is split."""
_MOST_LINKS = 20
_LONGEST = 10_000
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0", "", "null", "none", "~"})
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


def table(text: str) -> dict[str, Default]:
    """Read the keys of a framework: lines of sections and of names with their defaults; `=other.key` is its value.

    >>> table("actor, ref: nodes=1 path=null")
    {'actor.nodes': 1, 'actor.path': None, 'ref.nodes': 1, 'ref.path': None}
    >>> table("*: seed==actor.seed shared=false")
    {'seed': '=actor.seed', 'shared': False}
    """
    plain: dict[str, Default] = {"null": None, "true": True, "false": False}
    found: dict[str, Default] = {}
    for line in filter(str.strip, text.splitlines()):
        sections, _, rest = line.strip().partition(":")
        for section in sections.split(","):
            for item in rest.split():
                name, _, value = item.partition("=")
                known = int(value) if value.isdecimal() else plain.get(value, value)
                found[name if section == "*" else f"{section.strip()}.{name}"] = known
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value as a job gives it; `names` are the variables that it depends on, and `why` it is not known."""

    key: str
    text: str | None
    where: Where | None = None
    names: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def is_known(self) -> bool:
        """Whether reading found the value."""
        return not self.unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The processes of one role, each with the ranks of its GPUs in the cluster, in the framework's order of ranks."""

    name: str
    processes: tuple[tuple[int, ...], ...]
    parallel: tuple[tuple[str, int], ...] = ()
    """How the role is split: `("tp", 4), ("dp", 2)`, in the order of the ranks."""
    together: int = 1
    """How many consecutive processes work as one: an engine, or a tensor-parallel group."""
    by_count: bool = False
    """Whether the framework asks Ray for a number of GPUs, and Ray chooses which."""
    segment: int = 0
    """How many nodes, one after the other, the framework puts into one NVLink domain; 0 if it does not look."""

    @classmethod
    def of(cls, name: str, ranks: Iterable[int], *, by_count: bool = True) -> Role:
        """Return a role with one process for each GPU, of which nothing more is known."""
        return cls(name=name, processes=tuple((rank,) for rank in ranks), by_count=by_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A remark on a job: a stable code, its level, and what to do."""

    code: str
    level: Level
    message: str
    hint: str = ""
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework as its table says: where it keeps its placement, and how it lays roles out."""

    name: str
    version: str
    """The version that the table was read from."""
    defaults: Mapping[str, Default]
    """The keys that decide the placement. A default of `"=other.key"` is the value of that key."""
    size: Callable[[Settings], tuple[int, int]]
    """How many nodes of how many GPUs the job is for."""
    lay_out: Callable[[Settings, Gpus], Iterable[Role | None]]
    older: Mapping[str, str] = field(default_factory=dict)
    """Older names of keys."""
    switches: frozenset[str] = frozenset()
    """Flags that take no value."""
    command: re.Pattern[str] = re.compile(r"(?!)")
    """The name of the program in a launch script."""
    common: re.Pattern[str] = re.compile(r"(?!)")
    """Names of its programs that those of others have too, so that only its marks or its config tell."""
    marks: tuple[str, ...] = ()
    """Beginnings of arguments, or keys of a config, that only this framework has."""
    in_config: bool = False
    """Whether the placement is in a file that the command names, so that nothing is known without it."""
    placing: re.Pattern[str] | None = None
    """Names of flags that place workers in any version, for a program that passes over unknown flags."""
    says_cluster: bool = False
    """Whether a job says which nodes it is for, and not only which GPUs it takes."""
    suffix: str = ".yaml"
    """The endings of its configs' names."""
    files: tuple[str, ...] = ()
    """Keys that name a YAML file with more settings."""
    configs: Mapping[str, str] = field(default_factory=dict)
    """The config that a program takes if it is given none, from its own folder."""


@dataclass(slots=True)
class Settings:
    """The settings of one job, over the defaults of its framework."""

    framework: Framework
    given: dict[str, Setting]
    assume: bool = False
    missing: dict[str, Setting] = field(default_factory=dict)
    """The keys whose value depends on something unknown."""
    assumed: list[str] = field(default_factory=list)
    literals: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The texts with which a script compares its unknown variables."""
    only_checks: bool = False
    """Whether what is read now decides no placement, so that nobody is asked for it."""
    remarks: list[Remark] = field(default_factory=list)
    _known: dict[str, Setting] = field(default_factory=dict)
    """The settings with references, as they are resolved; those on the way as they are given."""

    def find(self, key: str) -> Setting | None:
        """Return a setting as it is given, under this name or an older one."""
        found = self.given.get(key)
        if found is None:
            older = (old for old, new in self.framework.older.items() if new == key and old in self.given)
            found = next((self.given[old] for old in older), None)
        return found

    def has(self, key: str) -> bool:
        """Tell whether the job gives a value that is not null."""
        found = self.find(key)
        return found is not None and (found.text is not None or not found.is_known)

    def where(self, *keys: str) -> Where | None:
        """Return the place of the first of these keys that the job gives."""
        return next((found.where for key in keys if (found := self.find(key)) is not None), None)

    def text(self, key: str) -> str | None:
        """Return a value as text; None for null, and for a key without a default that is not given."""
        return self._text(key, 0)

    def whole(self, key: str) -> int:
        """Return a whole number; 0 for null."""
        return self.number(key) or 0

    def number(self, key: str) -> int | None:
        """Return a whole number; None for null."""
        text = self._text(key, 0)
        if text is None:
            return None
        cleaned = text.strip().strip("'\"")
        plain = re.fullmatch(r"[-+]?\d{1,12}(_\d{1,12}){0,3}(\.0*)?", cleaned)
        default = self.framework.defaults.get(key)
        if plain or (re.fullmatch(r"[-+]?\d{1,9}(\.\d*)?e[-+]?\d{1,2}", cleaned) and float(cleaned).is_integer()):
            found = int(float(cleaned.replace("_", "")))
            least = 1 if _SPLIT.search(key) and default else 0 if _COUNT.search(key) else None
            if least is None or found >= least:
                return found
            self.error("too-small", f"{key} is {found}, and must be at least {least}", "", key)
        else:
            self.error("not-a-number", f"{key} must be a whole number, not {shorten(repr(text))}", "", key)
        return default if isinstance(default, int) else None

    def real(self, key: str) -> float:
        """Return a number; 0 for null."""
        text = (self._text(key, 0) or "0").strip().strip("'\"")
        if re.fullmatch(r"[-+]?(\d{1,18}\.?\d{0,18}|\.\d{1,18})(e[-+]?\d{1,2})?", text, re.IGNORECASE):
            return float(text)
        self.error("not-a-number", f"{key} must be a number, not {shorten(repr(text))}", "", key)
        return 0.0

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        text = (self._text(key, 0) or "").strip().strip("'\"").lower()
        if text not in _TRUE and text not in _FALSE:
            self.error("not-a-flag", f"{key} must be true or false, not {shorten(repr(text))}", "", key)
        return text in _TRUE

    def error(self, code: str, message: str, hint: str, *keys: str) -> None:
        """Note what the framework itself would refuse."""
        self._remark(code, "error", message, hint, keys)

    def warn(self, code: str, message: str, hint: str, *keys: str) -> None:
        """Note what is probably not meant."""
        self._remark(code, "warning", message, hint, keys)

    def inform(self, code: str, message: str, hint: str, *keys: str) -> None:
        """Note what is worth knowing."""
        self._remark(code, "info", message, hint, keys)

    def divides(self, number: int, by: int, what: str, of: str, *keys: str) -> bool:
        """Note that a number of GPUs is not a multiple of what one copy of the model needs."""
        if not self.knows(*keys) or by < 1 or number % by == 0:
            return True
        below, above = number // by * by, (number // by + 1) * by
        fits = f"{below} or {above}" if below else f"at least {by}"
        of = f"{of} = {by}" if " x " in of else of
        self.error("not-divisible", f"{what} is {number}, which {of} does not divide", f"take {fits}", *keys)
        return False

    def knows(self, *keys: str) -> bool:
        """Tell whether reading found the values of all these keys."""
        return all(found.is_known for key in keys if (found := self.find(key)) is not None)

    def note_unknown_keys(self) -> None:
        """Note keys that are a slip away from one that decides the placement, or that are called like one."""
        defaults = self.framework.defaults
        known: dict[str, list[str]] = {}
        for key in defaults:
            known.setdefault(key.rpartition(".")[0], []).append(key)
        for key, item in self.given.items():
            if key in defaults or key in self.framework.older or item.where is None:
                continue
            near = known.get(key.rpartition(".")[0], ())
            meant = next((other for other in near if _is_slip(key, other)), None)
            slipped = meant is not None and meant not in self.given
            message = f"{self.framework.name} {self.framework.version} has no {key}"
            if (placing := self.framework.placing) and (slipped or placing.match(key)):
                close = meant or did_you_mean(key, defaults)
                hint = f"did you mean {close!r}?" if close else "leave it out"
                self.error("unknown-key", f"{message}, and passes over it", hint, key)
            elif slipped:
                self.warn("unknown-key", message, f"did you mean {meant!r}?", key)

    def _remark(self, code: str, level: Level, message: str, hint: str, keys: Sequence[str]) -> None:
        remark = Remark(code=code, level=level, message=message, hint=hint, where=self.where(*keys))
        if remark not in self.remarks and self.knows(*keys):
            self.remarks.append(remark)

    def _text(self, key: str, links: int) -> str | None:
        found = self.find(key)
        default = self.framework.defaults.get(key)
        if found is None:
            if isinstance(default, str) and default.startswith("="):
                return self._text(default[1:], links + 1) if links < _MOST_LINKS else None
            return None if default is None else str(default)
        if found.is_known and found.text is not None and "${" in found.text:
            found = self._resolved(found, links)
        if found.is_known:
            text = found.text
            return None if text is None or text in ("null", "~", "None") else text
        if self.only_checks:
            pass
        elif self.assume:
            shown = "null" if default is None else str(default)
            said = f"{key}={shown}"
            self.assumed += [said] if said not in self.assumed else []
        else:
            self.missing[key] = found
        if isinstance(default, str) and default.startswith("="):
            return self._text(default[1:], links + 1) if links < _MOST_LINKS else None
        return None if default is None else str(default)

    def _resolved(self, setting: Setting, links: int) -> Setting:
        """Resolve references such as `${trainer.nnodes}` and `${oc.env:NAME,8}`, each setting once."""
        if setting.key not in self._known:
            self._known[setting.key] = setting
            self._known[setting.key] = self._resolve(setting, links)
        return self._known[setting.key]

    def _resolve(self, setting: Setting, links: int) -> Setting:
        text = setting.text or ""
        names: list[str] = []
        for _ in range(_MOST_LINKS):
            found = _REFERENCE.search(text)
            if found is None or links > _MOST_LINKS or len(text) > _LONGEST:
                break
            value = self._reference(found[1], setting.key, links, names)
            if value is None:
                return Setting(key=setting.key, text=text, where=setting.where, names=tuple(names), unknown=text)
            text = text[: found.start()] + value + text[found.end() :]
        return Setting(key=setting.key, text=text, where=setting.where)

    def _reference(self, inner: str, key: str, links: int, names: list[str]) -> str | None:
        name, sign, rest = inner.partition(":")
        parts = [part.strip() for part in rest.split(",")]
        if sign and name in ("oc.env", "env"):
            if len(parts) > 1:
                return parts[1].strip("'\"")
            names.append(parts[0])
            return None
        if sign and name == "oc.select":
            found = self._text(parts[0], links + 1)
            return found if found is not None else parts[1] if len(parts) > 1 else "null"
        numbers = [int(part) for part in parts if re.fullmatch(r"-?\d{1,12}", part)]
        if sign and name in ("mul", "multiply", "add", "div", "int_div", "sub") and len(numbers) == len(parts) == 2:
            one, other = numbers
            results = {"mul": one * other, "multiply": one * other, "add": one + other, "sub": one - other}
            return str(results.get(name, one // other if other else 0))
        if sign:
            return None
        if name.startswith("."):
            up = len(name) - len(name.lstrip("."))
            name = ".".join([*key.split(".")[:-up], name[up:]])
        if self.find(name) is None and name not in self.framework.defaults:
            return None
        found = self._text(name, links + 1)
        return "null" if found is None else found


def _is_slip(key: str, other: str) -> bool:
    """Tell whether two names differ by a slip within one word, or a long one by the word `model`.

    >>> _is_slip("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"), _is_slip("sglang-ep-size", "sglang-pp-size")
    (True, False)
    """
    words, others = (re.split(r"[._-]", name) for name in (key, other))
    if len(words) > 3:
        words, others = ([part for part in name if part != "model"] for name in (words, others))
    differ = [(one, two) for one, two in zip(words, others, strict=False) if one != two]
    if len(words) != len(others) or len(differ) > 1:
        return False
    return all(len(one) > 2 and SequenceMatcher(None, one, two).ratio() > 0.75 for one, two in differ)


class Gpus:
    """The GPUs of an empty cluster, given out in the order in which Ray gives them out there."""

    def __init__(self, sizes: Sequence[int]) -> None:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._free = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
        self.sizes: tuple[int, ...] = tuple(sizes)

    @property
    def total(self) -> int:
        """How many GPUs the cluster has."""
        return sum(self.sizes)

    @property
    def free(self) -> int:
        """How many are not given out yet."""
        return sum(map(len, self._free))

    @property
    def most(self) -> int:
        """How many are free on the node that has the most of them."""
        return max(map(len, self._free), default=0)

    def node_of(self, rank: int) -> int:
        """Return the node of a GPU."""
        node = 0
        while rank >= self.sizes[node]:
            rank -= self.sizes[node]
            node += 1
        return node

    def on_one_node(self, count: int, what: str, where: Where | None = None) -> list[int]:
        """Take GPUs of one node, as `STRICT_PACK` does: of the node with the most of them free."""
        best = max(range(len(self._free)), key=lambda node: (len(self._free[node]), -node))
        if len(self._free[best]) < count:
            self._refuse(f"{what} takes {plural(count, 'GPU')} of one node", where, one_node=True)
        taken, self._free[best] = self._free[best][:count], self._free[best][count:]
        return taken

    def pack(self, count: int, what: str, where: Where | None = None, bundle: int = 1) -> list[int]:
        """Take bundles of GPUs as `PACK` does: all that fit on the node that has the most free, then on the next."""
        if self.free < count:
            self._refuse(f"{what} takes {plural(count, 'GPU')}", where, one_node=False)
        found: list[int] = []
        while len(found) < count:
            node = max(self._free, key=len)
            size = min(count - len(found), len(node) // bundle * bundle)
            if not size:
                self._refuse(f"{what} takes {plural(bundle, 'GPU')} of one node", where, one_node=True)
            found += node[:size]
            del node[:size]
        return found

    def nodes(self, count: int, per_node: int, what: str, where: Where | None = None) -> list[list[int]]:
        """Take as many GPUs of each of several nodes, with a group of `STRICT_PACK` for each; in the order of nodes."""
        asked = self.free, count * per_node
        try:
            found = [self.on_one_node(per_node, what) for _ in range(count)]
        except PlacementError:
            has = ", ".join(f"{self.sizes.count(size)} x {size}" for size in sorted(set(self.sizes), reverse=True))
            message = f"{what} takes {count} x {per_node} GPUs, and of {has} {asked[0]} are free"
            hint = f"the job asks for {asked[1]} GPUs here: plan on a larger cluster, or ask for fewer"
            raise PlacementError(message, hint=hint, where=where) from None
        return sorted(found)

    def _refuse(self, message: str, where: Where | None, *, one_node: bool) -> None:
        there = self.most if one_node else self.free
        most = "the most that a node has free" if one_node else f"free of {self.total}"
        problem = f"{message}, and {there} {'is' if there == 1 else 'are'} {most}"
        raise PlacementError(Problem(message=problem, hint="plan on a larger cluster, or ask for fewer", where=where))


def fitted(groups: Iterable[int], node: int = 8) -> tuple[int, int]:
    """Return the smallest cluster for groups of GPUs that each need one node; nodes have 8 unless a group is larger.

    >>> fitted([7, 1]), fitted([8, 8, 4]), fitted([4, 4, 4])
    ((1, 8), (3, 8), (2, 8))
    """
    asked = [size for size in groups if size > 0]
    node = max([node, *asked])
    free: list[int] = []
    for size in asked:
        place = next((index for index, left in enumerate(free) if left >= size), None)
        if place is None:
            free.append(node - size)
        else:
            free[place] -= size
    return (1, node - free[0]) if len(free) == 1 else (max(1, len(free)), node)
