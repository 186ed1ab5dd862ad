"""`roost check`: the mistakes of jobs that can be found without a cluster, and what is valid but may be a mistake."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from roost.cli.commands.run import import_from_here
from roost.cli.options import Job, Overrides
from roost.cli.out import as_json, tell, write_text
from roost.cli.plans import Flags, Loaded, plan_job, read_job, split_jobs, with_flags
from roost.cli.report import error_data, tell_error
from roost.cli.terminal import print_text
from roost.config.readers.reading import SettingsUnknown, VariablesMissing
from roost.config.reading import Notes
from roost.config.run import RunConfig, RunDraft, read_run_config
from roost.errors import RoostError, Where, WorkerDied
from roost.extras import has_ray
from roost.placement.lint import Finding
from roost.text import plural

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A job, and what was found."""

    verdict: Text
    """For people; nothing for a job that cannot be read, of which the error says more."""
    summary: dict[str, Any]
    findings: tuple[Finding, ...]


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
    is_alone = len(jobs) == 1 and form != "github"
    found: list[Finding] = []
    answers: dict[str, Any] = {}
    unknown = {path: _unknown_to(path, settings, flags) for path in jobs} if len(jobs) > 1 and settings else {}
    in_vain = frozenset.intersection(*unknown.values()) if unknown else frozenset()
    for path in jobs:
        try:
            left_out = unknown.get(path, in_vain) - in_vain
            checked = _check(path, [item for item in settings if item not in left_out], flags)
        except RoostError as error:
            if is_alone:
                raise
            if form == "text":
                tell_error(error, as_data=False)
            # A job that cannot be read is an error among the others.
            checked = _Checked(verdict=Text(), summary=error_data(error), findings=_findings(error, "error", "error"))
        answers[str(path)] = checked.summary
        found += checked.findings
        if form == "text" and checked.verdict:
            print_text(checked.verdict)
        if form == "github":
            write_text("".join(f"{line}\n" for line in _annotations(path, checked.findings)))
    if form == "json":
        write_text(as_json(answers[str(job)] if is_alone else {"jobs": answers}))
    elif not is_alone:
        levels = [(level, sum(item.level == level for item in found)) for level in ("error", "warning")]
        counts = ", ".join(plural(count, level) for level, count in levels if count)
        tell(f"{plural(len(jobs), 'job')}: {counts or 'no error and no warning'}")
    if any(item.level == "error" for item in found):
        raise typer.Exit(2)
    if strict and any(item.level == "warning" for item in found):
        raise typer.Exit(1)


def _unknown_to(job: Path, settings: Sequence[str], flags: Flags) -> frozenset[str]:
    """Return the settings that a job does not know: of several jobs, others may."""
    try:
        read_job(job, settings, flags)
    except SettingsUnknown as error:
        return frozenset(error.words)
    except RoostError:
        # Whatever else is wrong with it, the check says.
        pass
    return frozenset()


def _check(job: Path, settings: Sequence[str], flags: Flags) -> _Checked:
    given = read_job(job, settings, flags)
    notes = Notes()
    loaded: Loaded | None = None
    run: RunConfig | None = None
    missing: tuple[Finding, ...] = ()
    # A job without both only says where its components sit, for a script that launches them.
    if isinstance(given.found, RunDraft) and {"workers", "entry"} & {*given.found.job.document.keys()}:
        with notes.catching():
            run = read_run_config(given.found)
    with notes.catching():
        try:
            loaded = plan_job(given, flags)
        except VariablesMissing as error:
            # The script may be right; nobody can tell here.
            missing = _findings(error, "variable", "warning")
    unchecked: tuple[Finding, ...] = ()
    if run is not None and not has_ray():
        message = "the code of the job is not checked without Ray: pip install 'roost[ray]'"
        unchecked = (Finding(code="no-ray", level="info", message=message),)
    elif run is not None:
        from roost.runtime.job import check_flow, load_code  # loads Ray, which checking a placement does without

        import_from_here()
        with notes.catching():
            drafts, entry_point = load_code(run)
            unchecked = _unhandled(run, entry_point)
            if isinstance(given.found, RunDraft) and given.found.flow is not None:
                check_flow(given.found.flow, drafts)
    notes.raise_if_any()
    findings = (*loaded.findings, *unchecked) if loaded is not None else missing
    entry, plan = run and run.entry, loaded.plan if loaded else None
    components = plan.components if plan else ()
    workers = sum(len(item.placements) for item in components)
    if loaded is None or plan is None:
        verdict = f"{given.path} cannot be placed without {plural(len(findings), 'variable')}"
    else:
        parts = [plural(len(components), "component"), plural(workers, "worker")]
        parts += [f"entry {entry}"] if entry else []
        parts += [loaded.foreign.framework.name] if loaded.foreign else []
        can = "can run" if entry else "can be placed"
        can = "would be refused" if any(item.level == "error" for item in findings) else can
        verdict = f"{given.path} {can}: {', '.join(parts)}, plan {plan.hash[:8]}"
    summary = {"components": len(components), "workers": workers, "plan": plan and plan.hash, "entry": entry}
    lines = [Text(verdict)]
    for item in findings:
        place, hint = f"{item.where}: " if item.where else "", f"\n  hint: {item.hint}" if item.hint else ""
        level = (f"{item.level}: ", _STYLES[item.level])
        lines.append(Text.assemble(place, level, f"{item.message} [{item.code}]", (hint, "cyan")))
    return _Checked(
        verdict=Text("\n").join(lines),
        summary={**summary, "findings": [_data(item) for item in findings]},
        findings=findings,
    )


def _unhandled(run: RunConfig, entry_point: object) -> tuple[Finding, ...]:
    """Say of restarts that the job ends nevertheless: a call in which a worker dies raises, and nothing handles it."""
    restarted = [worker for worker in run.workers if worker.restarts]
    try:
        tree = ast.parse(inspect.getsource(sys.modules[str(getattr(entry_point, "__module__", ""))]))
    except (OSError, TypeError, KeyError, SyntaxError):
        # Nobody can tell.
        return ()
    if not restarted or any(map(_handles_death, ast.walk(tree))):
        return ()
    message = f"a call in which a worker dies raises WorkerDied, although it is restarted; {run.entry} does "
    return tuple(
        Finding(
            code="death-unhandled",
            level="info",
            message=f"{worker.component}: {message}not handle that, and the job ends",
            hint="handle it and call again, or use group.keep_calling",
            where=worker.where("restarts"),
        )
        for worker in restarted
    )


def _handles_death(node: ast.AST) -> bool:
    """Whether a piece of code is a handler of WorkerDied, or calls what raises none."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("keep_calling", "outcomes")
    if not isinstance(node, ast.ExceptHandler):
        return False
    named = {getattr(item, "id", getattr(item, "attr", "")) for item in ast.walk(node.type)} if node.type else set()
    return not named or any(kind.__name__ in named for kind in WorkerDied.__mro__)


def _findings(error: RoostError, code: str, level: Literal["error", "warning"]) -> tuple[Finding, ...]:
    return tuple(
        Finding(code=code, level=level, message=item.message, hint=item.hint, where=item.where)
        for item in error.problems
    )


def _annotations(path: Path, found: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as commands that GitHub shows beside the lines that they are about."""
    words = {"error": "error", "warning": "warning", "info": "notice"}
    for item in found:
        where = item.where if item.where and item.where.file else Where(key="", file=str(path), line=1)
        file = _escaped(str(where.file)).replace(":", "%3A").replace(",", "%2C")
        place = f"file={file},line={max(1, where.line)},col={where.offset + 1}"
        text = f"{item.message}\n{item.hint}" if item.hint else item.message
        yield f"::{words[item.level]} {place},title=roost {item.code}::{_escaped(text)}"


def _escaped(text: str) -> str:
    """Escape a text for a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _data(item: Finding) -> dict[str, Any]:
    place = item.where and {"key": item.where.key, "file": item.where.file, "line": item.where.line}
    more = {"hint": item.hint, "where": place} if item.hint or place else {}
    return {"code": item.code, "level": item.level, "message": item.message, **more}
