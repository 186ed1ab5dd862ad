"""Findings about a machine or a cluster: made by rules from facts, merged, and reported. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from roost.doctor.facts import Unknown
from roost.text import error_text, plural


class Level(StrEnum):
    """How bad a finding is, from the best to the worst."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do about it where it is not fine."""

    check: str
    seen: str
    do: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes concerned; none for this machine, or for the cluster as a whole."""
    level: Level = field(kw_only=True)


ok: partial[Finding] = partial(Finding, level=Level.OK)
note: partial[Finding] = partial(Finding, level=Level.NOTE)
warning: partial[Finding] = partial(Finding, level=Level.WARNING)
problem: partial[Finding] = partial(Finding, level=Level.PROBLEM)

Findings = Iterator[Finding]
Rule = Callable[[Any], Finding | Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings: about this machine, and about the cluster where there is one."""

    host: str
    address: str | None = None
    machine: tuple[Finding, ...]
    cluster: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them."""
        return (*self.machine, *self.cluster)

    def count(self, level: Level) -> int:
        """Return the number of findings of this level."""
        return sum(item.level == level for item in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        counts = {f"{level}s": self.count(level) for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)}
        return {**counts, **asdict(self)}


def judge(check: str, fact: Any, rule: Rule, nodes: tuple[str, ...] = ()) -> list[Finding]:
    """Apply a rule to a fact; an unknown fact is a finding too, and so is a rule that fails on what it got."""
    if not isinstance(fact, Unknown):
        try:
            found = rule(fact)
            return [found] if isinstance(found, Finding) else list(found)
        except Exception as error:
            fact = Unknown(why=error_text(error))
    level = Level.WARNING if fact.do else Level.NOTE
    return [Finding(check, f"could not be checked: {fact.why}", fact.do, nodes, level=level)]


def fold(by_node: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Merge the findings of several nodes: one line for a check that is fine everywhere, one for findings alike."""
    out: list[Finding] = []
    for check in dict.fromkeys(item.check for _, findings in by_node for item in findings):
        found = [replace(item, nodes=(node,)) for node, items in by_node for item in items if item.check == check]
        odd = [item for item in found if item.level != Level.OK]
        texts = {item.seen for item in found}
        where = f"fine on {plural(len({item.nodes for item in found}), 'node')}"
        out += fold_alike(odd) or [ok(check, texts.pop() if len(texts) == 1 else where)]
    return out


def fold_alike(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in their nodes."""
    nodes: dict[Finding, list[str]] = {}
    for item in findings:
        nodes.setdefault(replace(item, nodes=()), []).extend(item.nodes)
    return [replace(item, nodes=tuple(names)) for item, names in nodes.items()]
