"""The differences between two runs, apart from their plans."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from roost.redact import hide_in_words
from roost.runtime.runs.record import RunRecord

Fact = tuple[str, str, str]
"""A difference: what differs, its value before, its value after."""


def diff_records(before: RunRecord, after: RunRecord) -> list[Fact]:
    """Return the differences between two runs, apart from their plans."""
    found: list[Fact] = [
        ("job", _job_text(before), _job_text(after)),
        ("text of the job", before.job.hash[:8] if before.job else "none", after.job.hash[:8] if after.job else "none"),
        ("command", shlex.join(before.command[1:]), shlex.join(after.command[1:])),
        ("folder", before.cwd, after.cwd),
        ("host", before.host, after.host),
        ("user", before.user, after.user),
        ("git", str(before.git or "no checkout"), str(after.git or "no checkout")),
    ]
    found += [(f"version of {name}", a, b) for name, a, b in _compared(before.versions, after.versions, "not loaded")]
    found += diff_environments(before.environment, after.environment)
    found.append(("outcome", str(before.outcome), str(after.outcome)))
    found.append(("restarts", str(len(before.restarts)), str(len(after.restarts))))
    found.append(("seconds", _seconds_text(before.seconds), _seconds_text(after.seconds)))
    old, new = ({group.name: _seconds_text(group.seconds) for group in run.groups} for run in (before, after))
    found += [(f"launch of {name}", a, b) for name, a, b in _compared(old, new, "not launched")]
    return [fact for fact in found if fact[1] != fact[2]]


def diff_environments(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> list[Fact]:
    """Return the variables in which two environments differ."""
    old, new = ({name: "hidden" if value is None else value for name, value in env.items()} for env in (before, after))
    return list(_compared(old, new, "unset"))


def _compared(before: Mapping[str, str], after: Mapping[str, str], missing: str) -> list[Fact]:
    found = [(name, before.get(name, missing), after.get(name, missing)) for name in {**before, **after}]
    return [fact for fact in found if fact[1] != fact[2]]


def _job_text(record: RunRecord) -> str:
    return " ".join([record.job.file, *hide_in_words(record.job.arguments)]) if record.job else "none"


def _seconds_text(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds:.1f}"
