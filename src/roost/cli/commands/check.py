"""`roost check`: the mistakes of jobs that can be found without a cluster, and what is valid but may be a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from roost.cli.commands.run import import_from_here
from roost.cli.options import Job, Overrides
from roost.cli.out import tell, write_text
from roost.cli.plans import Flags, Loaded, plan_job, read_job, split_jobs, with_flags
from roost.cli.report import error_data, tell_error
from roost.cli.terminal import print_answer
from roost.cli.text.plans import findings_text
from roost.config.readers.reading import VariablesMissing
from roost.config.reading import Notes
from roost.config.run import RunConfig, RunDraft, read_run_config
from roost.errors import RoostError, Where
from roost.placement.lint import Finding
from roost.text import plural


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A job that can be placed, and what was found."""

    path: Path
    loaded: Loaded | None
    """None if the placement depends on variables that nobody gave."""
    entry: str | None
    findings: tuple[Finding, ...]

    def summary(self) -> dict[str, Any]:
        plan = self.loaded and self.loaded.plan
        components = plan.components if plan else ()
        counts = {"components": len(components), "workers": sum(len(item.placements) for item in components)}
        findings = [_data(item) for item in self.findings]
        return {**counts, "plan": plan and plan.hash, "entry": self.entry, "findings": findings}

    def verdict(self) -> str:
        if self.loaded is None:
            return f"{self.path} cannot be placed without {plural(len(self.findings), 'variable')}"
        plan, foreign = self.loaded.plan, self.loaded.foreign
        workers = sum(len(component.placements) for component in plan.components)
        verb = "run" if self.entry else "be placed"
        parts = [plural(len(plan.components), "component"), plural(workers, "worker")]
        parts += [f"entry {self.entry}"] if self.entry else []
        parts += [foreign.framework.name] if foreign else []
        can = "would be refused" if any(item.level == "error" for item in self.findings) else f"can {verb}"
        return f"{self.path} {can}: {', '.join(parts)}, plan {plan.hash[:8]}"


@with_flags
def check(
    job: Job,
    flags: Flags,
    overrides: Overrides = None,
    form: Annotated[
        Literal["text", "json", "github"],
        typer.Option("--format", metavar="FORMAT", help="Output format: text, json, or github for annotations."),
    ] = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there is a warning.")] = False,
) -> None:
    jobs, settings = split_jobs(job, overrides or ())
    if len(jobs) == 1 and form != "github":
        checked = _check(job, settings, flags)
        print_answer(form, checked.summary(), lambda: _text(checked))
        found = list(checked.findings)
    else:
        found = _check_all(jobs, settings, flags, form)
    if any(item.level == "error" for item in found):
        raise typer.Exit(2)
    if strict and any(item.level == "warning" for item in found):
        raise typer.Exit(1)


def _check(job: Path, settings: Sequence[str], flags: Flags) -> _Checked:
    given = read_job(job, settings, flags)
    notes = Notes()
    loaded: Loaded | None = None
    run: RunConfig | None = None
    # A job without both only says where its components sit, for a script that launches them.
    if isinstance(given.found, RunDraft) and {"workers", "entry"} & {*given.found.job.document.keys()}:
        with notes.catching():
            run = read_run_config(given.found)
    with notes.catching():
        try:
            loaded = plan_job(given, flags)
        except VariablesMissing as error:
            # The script may be right; nobody can tell here.
            missing = tuple(
                Finding(code="variable", level="warning", message=item.message, hint=item.hint, where=item.where)
                for item in error.problems
            )
            return _Checked(path=given.path, loaded=None, entry=None, findings=missing)
    if run is not None:
        from roost.runtime.job import check_flow, load_code  # loads Ray, which checking a placement does without

        import_from_here()
        with notes.catching():
            code = load_code(run)
            if isinstance(given.found, RunDraft) and given.found.flow is not None:
                check_flow(given.found.flow, code)
    notes.raise_if_any()
    if loaded is None:
        raise typer.Abort
    return _Checked(path=given.path, loaded=loaded, entry=run.entry if run else None, findings=loaded.findings)


def _check_all(jobs: Sequence[Path], settings: Sequence[str], flags: Flags, form: str) -> list[Finding]:
    """Check jobs one by one, and print what each has; a job that cannot be read is an error among the others."""
    found: list[Finding] = []
    answers: dict[str, Any] = {}
    for path in jobs:
        try:
            checked = _check(path, settings, flags)
        except RoostError as error:
            answers[str(path)] = error_data(error)
            own = [
                Finding(code="error", level="error", message=item.message, hint=item.hint, where=item.where)
                for item in error.problems
            ]
            if form == "text":
                tell_error(error, as_data=False)
        else:
            answers[str(path)] = checked.summary()
            own = list(checked.findings)
            if form == "text":
                print_answer("text", None, lambda checked=checked: _text(checked))  # type: ignore[misc]
        if form == "github":
            write_text("".join(f"{line}\n" for line in _annotations(path, own)))
        found += own
    if form == "json":
        print_answer("json", {"jobs": answers}, Text)
    else:
        levels = [(level, sum(item.level == level for item in found)) for level in ("error", "warning")]
        counts = ", ".join(plural(count, level) for level, count in levels if count)
        tell(f"{plural(len(jobs), 'job')}: {counts or 'no error and no warning'}")
    return found


def _text(checked: _Checked) -> Text:
    return Text("\n").join([Text(checked.verdict()), *findings_text(checked.findings)])


def _annotations(path: Path, found: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as commands that GitHub shows beside the lines that they are about."""
    words = {"error": "error", "warning": "warning", "info": "notice"}
    for item in found:
        where = item.where if item.where and item.where.file else Where(key="", file=str(path), line=1)
        place = f"file={_escaped(str(where.file))},line={max(1, where.line)},col={where.offset + 1}"
        text = f"{item.message}\n{item.hint}" if item.hint else item.message
        yield f"::{words[item.level]} {place},title=roost {item.code}::{_escaped(text, message=True)}"


def _escaped(text: str, *, message: bool = False) -> str:
    """Escape a text for a workflow command."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text if message else text.replace(":", "%3A").replace(",", "%2C")


def _data(item: Finding) -> dict[str, Any]:
    place = item.where and {"key": item.where.key, "file": item.where.file, "line": item.where.line}
    more = {"hint": item.hint, "where": place} if item.hint or place else {}
    return {"code": item.code, "level": item.level, "message": item.message, **more}
