"""The record of a run: what was started, by whom, on what, how long it took and how it ended.

A driver keeps it as `run.json` in the run's folder; whoever asks later reads it there. A record is data: nothing in it
is ever run, apart from the command that `roost rerun` shows first.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from roost.errors import (ConfigError)
from roost.text import shorten, plural

RECORD_VERSION = 1
RECORD_FILE = "run.json"
PLAN_FILE = "plan.json"
JOB_FILES = ("job.yaml", "job.json")
_LIMIT = 256 * 2**20
_ERROR_LINES = 12


class Status(StrEnum):
    """How far a run is, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Somebody pressed Ctrl-C, or asked it to end."""
    ENDED = "ended"
    """Its script came to an end without closing its Cluster, whether well is not known."""
    DIED = "died"
    """Its driver is gone without a word: only a reader can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended, and with what error, of which worker."""

    status: Status
    error: str = ""
    """The name of the exception's class."""
    message: str = ""
    """The first lines of what it said."""
    worker: str = ""
    log: str = ""

    def __str__(self) -> str:
        if not self.error or self.error == KeyboardInterrupt.__name__:
            return str(self.status)
        return f"{self.status}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNode:
    """A node that the run had."""

    rank: int
    name: str
    address: str
    accelerators: tuple[tuple[str, int], ...]
    """Models, and how many of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """A group that the driver launched."""

    name: str
    class_name: str
    began: str
    placements: tuple[str, ...]
    """Where each rank sat, in words; the plan has it in all detail."""
    seconds: float | None = None
    """How long the launch took; None while it goes on."""
    phases: tuple[tuple[str, float], ...] = ()
    """The seconds after which the last worker had come so far."""
    error: str = ""
    """The class of the exception that the launch ended with, if it did."""

    @property
    def world_size(self) -> int:
        """How many workers it has."""
        return len(self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRestart:
    """A rank that was started again in its place."""

    worker: str
    when: str
    reason: str
    seconds: float
    error: str = ""
    """Why it could not be started again, where it could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """What `roost run` was given: the job's file, and the flags that say how it runs."""

    file: str
    hash: str
    """Of the file's text."""
    flags: tuple[tuple[str, str | bool], ...] = ()
    rerun_of: str = ""
    """The id of the run that this one repeats."""

    @property
    def stored(self) -> str:
        """The name of the file in the run's folder that has the text as it was."""
        return "job.json" if self.file.endswith(".json") else "job.yaml"

    @property
    def arguments(self) -> list[str]:
        """The flags as they are typed."""
        return [part for name, value in self.flags for part in ([name] if value is True else [name, str(value)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The checkout that the driver was started in."""

    commit: str
    branch: str = ""
    changed: bool | None = None
    """Whether tracked files differed from the commit; None where that was not found out."""

    def __str__(self) -> str:
        branch = f" ({self.branch})" if self.branch else ""
        return f"{self.commit[:12]}{branch}{', with changes' if self.changed else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that is kept of a run."""

    id: str
    began: str
    command: tuple[str, ...]
    cwd: str
    user: str
    host: str
    pid: int
    pid_began: float
    """When the driver's process began: process ids are used again."""
    address: str
    """Where Ray was."""
    namespace: str
    ended: str | None = None
    seconds: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    git: GitState | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """The variables that matter; None stands for a value that looks like a secret."""
    job: RunJob | None = None
    nodes: tuple[RunNode, ...] = ()
    plan: str | None = None
    """The hash of the plan."""
    groups: tuple[RunGroup, ...] = ()
    restarts: tuple[RunRestart, ...] = ()
    outcome: RunOutcome = RunOutcome(status=Status.RUNNING)

    @property
    def what(self) -> str:
        """What ran, in a word: the job's file or the script.

        >>> what_of(["python", "-u", "/home/me/train.py", "--lr", "1"]), what_of(["python", "/usr/bin/roost", "demo"])
        ('train.py', 'roost demo')
        """
        return PurePath(self.job.file).name if self.job is not None else what_of(self.command)

    @property
    def num_workers(self) -> int:
        """How many workers the groups had, each name counted once."""
        return sum({group.name: group.world_size for group in self.groups}.values())

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON has it; `docs/guides/runs.md` describes it."""
        out: dict[str, Any] = {"version": RECORD_VERSION}
        out |= {item.name: getattr(self, item.name) for item in fields(self)}
        out["command"] = list(self.command)
        out["versions"] = dict(self.versions)
        out["environment"] = dict(self.environment)
        out["git"] = None if self.git is None else _as_dict(self.git)
        out["job"] = None if self.job is None else {**_as_dict(self.job), "flags": dict(self.job.flags)}
        out["nodes"] = [{**_as_dict(node), "accelerators": dict(node.accelerators)} for node in self.nodes]
        out["groups"] = [
            {**_as_dict(group), "world_size": group.world_size, "phases": dict(group.phases)} for group in self.groups
        ]
        out["restarts"] = [_as_dict(restart) for restart in self.restarts]
        out["outcome"] = _as_dict(self.outcome)
        return out

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what `to_json` wrote; ConfigError where it is something else."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {shorten(str(error), 200)}") from None
        if not isinstance(data, dict) or "version" not in data or "outcome" not in data:
            raise ConfigError("this is no record of a run: it lacks 'version' or 'outcome'")
        if data["version"] != RECORD_VERSION:
            raise ConfigError(
                f"the record has version {shorten(repr(data['version']))}, and this Roost reads {RECORD_VERSION}",
                hint="read it with the Roost that wrote it",
            )
        try:
            return _read_record(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"this record cannot be read: {type(error).__name__}: {shorten(str(error), 200)}"
            ) from None


def what_of(command: Sequence[str]) -> str:
    """What a command of Python runs, in a word: `RunRecord.what` has an example."""
    rest = list(command[1:])
    while rest:
        word = rest.pop(0)
        if word == "-m" and rest:
            return _with_command(rest.pop(0), rest)
        if word == "-c":
            return "python -c"
        if word in ("-X", "-W") and rest:
            rest.pop(0)
        elif word == "-" or not word.startswith("-"):
            return _with_command(PurePath(word).name, rest) if word != "-" else "standard input"
    return "python"


def _with_command(name: str, rest: Sequence[str]) -> str:
    """`roost demo` says more than `roost`."""
    return f"{name} {rest[0]}" if name == "roost" and rest else name


def outcome_of(error: BaseException | None) -> RunOutcome:
    """What the exception that ended a run says of it; without one it went well."""
    if error is None or isinstance(error, GeneratorExit):
        return RunOutcome(status=Status.FINISHED)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return RunOutcome(status=Status.FINISHED)
    failures: Sequence[Any] = getattr(error, "worker_failures", ())
    first = failures[0] if failures else None
    lines = _message_of(error).splitlines()
    more = [f"… and {plural(len(lines) - _ERROR_LINES, 'more line')}"] if len(lines) > _ERROR_LINES else []
    return RunOutcome(
        status=Status.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED,
        error=type(error).__name__,
        message="\n".join(shorten(line, 500) for line in [*lines[:_ERROR_LINES], *more]),
        worker=getattr(first, "address", ""),
        log=getattr(first, "log_path", ""),
    )


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # The user's own class: that it cannot be shown is no reason to take the run for a good one.
        return "(its text cannot be made)"


def text_hash(text: str) -> str:
    """What tells whether the text of a job is another one."""
    return hashlib.sha256(text.encode()).hexdigest()


def files_of_others(folder: Path) -> set[str]:
    """The names that a record is kept under of which the folder has a file that is none of an earlier run's.

    The folder may be any that the user chose, also the one with the job and with plans that were saved.
    """
    there = {name for name in (RECORD_FILE, PLAN_FILE, *JOB_FILES) if os.path.lexists(folder / name)}
    if not os.path.isfile(folder / RECORD_FILE):
        return there
    try:
        earlier = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return there
    # Of whatever version.
    if not isinstance(earlier, dict) or not {"version", "outcome"} <= set(earlier):
        return there
    ours = {RECORD_FILE}
    if earlier.get("plan") is not None or _is_private(folder / PLAN_FILE):
        ours.add(PLAN_FILE)
    job = earlier.get("job")
    if isinstance(job, dict):
        its_own = os.path.join(str(earlier.get("cwd", "")), str(job.get("file", "")))
        ours |= {name for name in JOB_FILES if os.path.realpath(its_own) != os.path.realpath(folder / name)}
    return there - ours


def _is_private(path: Path) -> bool:
    """Whether a file is closed to others, as those of a record are."""
    try:
        return not path.lstat().st_mode & 0o077
    except OSError:
        return False


def read_record(folder: Path) -> RunRecord:
    """The record of the run in a folder; ConfigError where there is none that can be read."""
    path = folder / RECORD_FILE
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LIMIT:
            # A pipe would be waited for.
            raise ConfigError(f"{path} is no file, or too large to be the record of a run")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "it was made with Cluster(record=False), by an older Roost, or is no run's folder"
        raise ConfigError(f"there is no {RECORD_FILE} in {folder}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return RunRecord.from_json(text)
    except ConfigError as error:
        raise ConfigError([replace(item, message=f"{path}: {item.message}") for item in error.problems]) from None


def started_at(text: str) -> datetime:
    """A time of a record."""
    return datetime.fromisoformat(text)


def _as_dict(value: Any) -> dict[str, Any]:
    return {item.name.removesuffix("_name"): getattr(value, item.name) for item in fields(value)}


def _read_record(data: Mapping[str, Any]) -> RunRecord:
    git, job = data["git"], data["job"]
    return RunRecord(
        id=_text(data["id"]),
        began=_time(data["began"]),
        ended=None if data["ended"] is None else _time(data["ended"]),
        seconds=_number(data["seconds"]),
        command=tuple(map(_text, data["command"])),
        cwd=_text(data["cwd"]),
        user=_text(data["user"]),
        host=_text(data["host"]),
        pid=_pid(data["pid"]),
        pid_began=float(data["pid_began"]),
        address=_text(data["address"]),
        namespace=_text(data["namespace"]),
        versions={_text(name): _text(value) for name, value in data["versions"].items()},
        environment={
            _text(name): None if value is None else _text(value) for name, value in data["environment"].items()
        },
        git=None if git is None else _read_git(git),
        job=None if job is None else _read_job(job),
        nodes=tuple(_read_node(item) for item in data["nodes"]),
        plan=None if data["plan"] is None else _text(data["plan"]),
        groups=tuple(_read_group(item) for item in data["groups"]),
        restarts=tuple(_read_restart(item) for item in data["restarts"]),
        outcome=_read_outcome(data["outcome"]),
    )


def _read_git(data: Mapping[str, Any]) -> GitState:
    changed = data["changed"]
    if not isinstance(changed, bool | None):
        raise TypeError(f"{shorten(repr(changed))} is neither true nor false")
    return GitState(commit=_text(data["commit"]), branch=_text(data["branch"]), changed=changed)


def _read_job(data: Mapping[str, Any]) -> RunJob:
    flags = {_text(name): value if isinstance(value, bool) else _text(value) for name, value in data["flags"].items()}
    return RunJob(
        file=_text(data["file"]),
        hash=_text(data["hash"]),
        flags=tuple(flags.items()),
        rerun_of=_text(data["rerun_of"]),
    )


def _read_node(data: Mapping[str, Any]) -> RunNode:
    accelerators = tuple((_text(model), int(count)) for model, count in data["accelerators"].items())
    return RunNode(
        rank=int(data["rank"]), name=_text(data["name"]), address=_text(data["address"]), accelerators=accelerators
    )


def _read_group(data: Mapping[str, Any]) -> RunGroup:
    return RunGroup(
        name=_text(data["name"]),
        class_name=_text(data["class"]),
        began=_time(data["began"]),
        placements=tuple(map(_text, data["placements"])),
        seconds=_number(data["seconds"]),
        phases=tuple((_text(name), float(seconds)) for name, seconds in data["phases"].items()),
        error=_text(data["error"]),
    )


def _read_restart(data: Mapping[str, Any]) -> RunRestart:
    return RunRestart(
        worker=_text(data["worker"]),
        when=_time(data["when"]),
        reason=_text(data["reason"]),
        seconds=float(data["seconds"]),
        error=_text(data["error"]),
    )


def _read_outcome(data: Mapping[str, Any]) -> RunOutcome:
    texts = {name: _text(data[name]) for name in ("error", "message", "worker", "log")}
    return RunOutcome(status=Status(data["status"]), **texts)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shorten(repr(value))} is no text")
    return value


def _time(value: object) -> str:
    text = _text(value)
    found = started_at(text)
    if found.tzinfo is None:
        raise ValueError(f"{shorten(text)} has no time zone")
    # It is shown in the reader's own time zone, where the first and the last days of all may be out of range.
    found.astimezone()
    return text


def _pid(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{shorten(repr(value))} is no process id")
    return value


def _number(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise TypeError(f"{shorten(repr(value))} is no number")
