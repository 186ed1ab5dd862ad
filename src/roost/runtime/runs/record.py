"""The record of a run: what ran, where, with which versions, how long it took and how it ended.

The driver keeps it as `run.json` in the run folder. A record is data: reading one runs nothing, and `roost rerun` shows
the command before it runs it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from roost.errors import ConfigError
from roost.machine.folders import open_regular
from roost.text import join_words, message_of, plural, shorten

RECORD_VERSION = 1
RECORD_FILE = "run.json"
PLAN_FILE = "plan.json"
JOB_FILES = ("job.yaml", "job.json")
_LIMIT = 256 * 2**20
_LATER = {"waits", "waiting", "failures"}
"""Fields that the records of 0.1.0 lack."""
_ERROR_LINES = 12


def _check_time(text: str) -> str:
    found = started_at(text)
    if found.tzinfo is None:
        raise ValueError(f"{shorten(text)} has no time zone")
    # Readers show it in their own time zone, where the first and the last days of the calendar may be out of range.
    found.astimezone()
    return text


def _check_pid(number: int) -> int:
    if number < 1:
        raise ValueError(f"{number} is not a process id")
    return number


Time = Annotated[str, _check_time]
"""An ISO time with its time zone."""


class Status(StrEnum):
    """Whether a run is still running, or how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The user pressed Ctrl-C, or a signal ended it."""
    ENDED = "ended"
    """The script ended without closing its Cluster: whether it succeeded is not known."""
    DIED = "died"
    """The driver is gone and wrote no outcome. Never written: only a reader can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended, with the error and the worker that raised it."""

    status: Status
    error: str = ""
    """The name of the exception's class."""
    message: str = ""
    """The first lines of its message."""
    worker: str = ""
    log: str = ""

    def __str__(self) -> str:
        if not self.error or self.error == KeyboardInterrupt.__name__:
            return str(self.status)
        return f"{self.status}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNode:
    """A node of the run's cluster."""

    rank: int
    name: str
    address: str
    accelerators: tuple[tuple[str, int], ...]
    """Each model with its count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """A group that the driver launched."""

    name: str
    class_name: str = field(metadata={"key": "class"})
    began: Time
    placements: tuple[str, ...]
    """A short description of each rank's place; the plan has the details."""
    seconds: float | None = None
    """How long the launch took; None while it runs."""
    phases: tuple[tuple[str, float], ...] = ()
    """Each phase with the seconds until the last worker reached it."""
    error: str = ""
    """The class of the exception that ended the launch, if one did."""

    @property
    def world_size(self) -> int:
        """How many workers it has."""
        return len(self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRestart:
    """A restart of one rank in its place."""

    worker: str
    when: Time
    reason: str
    seconds: float
    error: str = ""
    """Why the restart failed, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """An exception of a worker's method, whether or not the driver looked at the result."""

    worker: str
    when: Time
    method: str
    what: str
    more: int = 0
    """How many like it came shortly before it, and are not in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The job file of `roost run`, and the flags that say how it runs."""

    file: str
    hash: str
    """Of the file's text."""
    flags: tuple[tuple[str, str | bool], ...] = ()
    rerun_of: str = ""
    """The id of the run that this one repeats."""

    @property
    def stored(self) -> str:
        """The name of the copy in the run folder."""
        return "job.json" if self.file.endswith(".json") else "job.yaml"

    @property
    def arguments(self) -> list[str]:
        """The flags as a user types them."""
        return [part for name, value in self.flags for part in ([name] if value is True else [name, str(value)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The git checkout that the driver was started in."""

    commit: str
    branch: str = ""
    changed: bool | None = None
    """Whether tracked files differed from the commit; None if git did not say."""

    def __str__(self) -> str:
        branch = f" ({self.branch})" if self.branch else ""
        return f"{self.commit[:12]}{branch}{', with changes' if self.changed else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that Roost keeps about a run."""

    id: str
    began: Time
    command: tuple[str, ...]
    cwd: str
    user: str
    host: str
    pid: Annotated[int, _check_pid]
    pid_began: float
    """When the driver's process began, in seconds after the boot: the system reuses process ids."""
    address: str
    """The address of Ray."""
    namespace: str
    ended: Time | None = None
    seconds: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    git: GitState | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """The variables that matter, with None for a value that looks like a secret."""
    job: RunJob | None = None
    nodes: tuple[RunNode, ...] = ()
    plan: str | None = None
    """The hash of the plan."""
    groups: tuple[RunGroup, ...] = ()
    restarts: tuple[RunRestart, ...] = ()
    failures: tuple[RunFailure, ...] = ()
    """The last ones."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """Which groups wait for which accelerators now."""
    waiting: str = ""
    """The wait of its driver that has lasted for more than half a minute, if there is one."""
    outcome: RunOutcome = RunOutcome(status=Status.RUNNING)

    @property
    def state(self) -> str:
        """How it ended, or what it does."""
        if self.outcome.status is Status.RUNNING and self.waits:
            return "waiting for " + join_words([f"{what} ({group})" for group, what in self.waits.items()], most=3)
        return str(self.outcome)

    @property
    def what(self) -> str:
        """A short name of what ran: the job file or the script."""
        return PurePath(self.job.file).name if self.job is not None else what_of(self.command)

    @property
    def title(self) -> str:
        """Which run it is and what ran, as pages and pictures begin: `first: job.yaml`."""
        return f"{self.id}: {self.what}"

    @property
    def note(self) -> str:
        """The user's note about it."""
        return str(dict(self.job.flags).get("--note", "")) if self.job is not None else ""

    @property
    def project(self) -> str:
        """The folder that it belongs to: that of its job's file, or the one that its script was started in."""
        return os.path.dirname(os.path.join(self.cwd, self.job.file)) if self.job is not None else self.cwd

    @property
    def num_workers(self) -> int:
        """How many workers the groups had, each name counted once."""
        return sum({group.name: group.world_size for group in self.groups}.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the record as `run.json` has it; `docs/guides/runs.md` describes the keys."""
        out: dict[str, Any] = {"version": RECORD_VERSION, **_write(RunRecord, self)}
        for group, written in zip(self.groups, out["groups"], strict=True):
            written["world_size"] = group.world_size
        return out

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what `to_json` wrote; raise ConfigError for anything else."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {shorten(str(error), 200)}") from None
        if not isinstance(data, dict) or "version" not in data or "outcome" not in data:
            raise ConfigError("this is not the record of a run: it lacks 'version' or 'outcome'")
        if data["version"] != RECORD_VERSION:
            raise ConfigError(
                f"the record has version {shorten(repr(data['version']))}, and this Roost reads {RECORD_VERSION}",
                hint="read it with the Roost that wrote it",
            )
        try:
            record: RunRecord = _read(RunRecord, data)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {shorten(str(error), 200)}"
            raise ConfigError(f"this record cannot be read: {why}") from None
        return record


@functools.cache
def _table(cls: type) -> tuple[tuple[str, str, Any], ...]:
    """List the fields of a class: the name, the key in JSON, the declared type."""
    kinds = get_type_hints(cls, include_extras=True)
    return tuple((item.name, item.metadata.get("key", item.name), kinds[item.name]) for item in fields(cls))


def _write(kind: Any, value: Any) -> Any:
    """Turn a value of a declared type into what JSON has; pairs become a map."""
    if hasattr(value, "__dataclass_fields__"):
        return {key: _write(inner, getattr(value, name)) for name, key, inner in _table(value.__class__)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        inner = get_args(kind)[0]
        return dict(value) if get_origin(inner) is tuple else [_write(inner, item) for item in value]
    return value


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a map"}


def _read(kind: Any, value: Any) -> Any:
    """Turn what JSON has into a value of a declared type; raise TypeError or ValueError if it does not fit."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return inner[1](_read(inner[0], value))
    if origin in (Union, types.UnionType):
        return value if type(value) in inner else _read(inner[0], value)
    if origin is Mapping:
        return {name: _read(inner[1], item) for name, item in _checked(dict, value).items()}
    if origin is tuple and get_origin(inner[0]) is tuple:
        _, second = get_args(inner[0])
        return tuple((name, _read(second, item)) for name, item in _checked(dict, value).items())
    if origin is tuple:
        return tuple(_read(inner[0], item) for item in _checked(list, value))
    if hasattr(kind, "__dataclass_fields__"):
        data = _checked(dict, value)
        known = {name for name, key, _ in _table(kind) if key in data or name not in _LATER}
        return kind(**{name: _read(item, data[key]) for name, key, item in _table(kind) if name in known})
    if issubclass(kind, StrEnum):
        return kind(value)
    return _checked(kind, float(value) if kind is float and type(value) is int else value)


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{shorten(repr(value))} is not {_WORDS[kind]}")
    return value


def what_of(command: Sequence[str]) -> str:
    """Return a short name of what a Python command runs.

    >>> what_of(["python", "-u", "/home/me/train.py", "--lr", "1"]), what_of(["python", "/usr/bin/roost", "demo"])
    ('train.py', 'roost demo')
    """
    rest = list(command[1:])
    while rest:
        word = rest.pop(0)
        if word in ("-c", "-"):
            return "python -c" if word == "-c" else "standard input"
        if word in ("-X", "-W"):
            del rest[:1]
        elif not word.startswith("-") or (word == "-m" and rest):
            name = rest.pop(0) if word == "-m" else PurePath(word).name
            # `roost demo` says more than `roost`.
            return f"{name} {rest[0]}" if name == "roost" and rest else name
    return "python"


def outcome_of(error: BaseException | None) -> RunOutcome:
    """Return the outcome of a run that this exception ended, or that ended without one."""
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return RunOutcome(status=Status.FINISHED)
    first = next(iter(getattr(error, "worker_failures", ())), None)
    # The class is the user's. That it cannot be shown does not make the run a success.
    lines = message_of(error).splitlines()
    more = [f"… and {plural(len(lines) - _ERROR_LINES, 'more line')}"] if len(lines) > _ERROR_LINES else []
    return RunOutcome(
        status=Status.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED,
        error=type(error).__name__,
        message="\n".join(shorten(line, 500) for line in [*lines[:_ERROR_LINES], *more]),
        worker=getattr(first, "address", ""),
        log=getattr(first, "log_path", ""),
    )


def text_hash(text: str) -> str:
    """Return a hash that tells whether the text of a job changed."""
    return hashlib.sha256(text.encode()).hexdigest()


def files_of_others(folder: Path) -> set[str]:
    """Return the names among a record's files that the folder has, but not from an earlier run.

    The user may choose any folder for a run, also the one with the job and with saved plans.
    """
    there = {name for name in (RECORD_FILE, PLAN_FILE, *JOB_FILES) if os.path.lexists(folder / name)}
    earlier = None
    with (
        contextlib.suppress(OSError, ValueError, RecursionError),
        open(folder / RECORD_FILE, encoding="utf-8", opener=open_regular) as file,
    ):
        earlier = json.load(file)
    # Of any version.
    if not isinstance(earlier, dict) or not {"version", "outcome"} <= set(earlier):
        return there
    ours = {RECORD_FILE}
    # Other users cannot read the files of a record.
    if earlier.get("plan") is not None or (PLAN_FILE in there and not (folder / PLAN_FILE).lstat().st_mode & 0o077):
        ours.add(PLAN_FILE)
    job = earlier.get("job")
    if isinstance(job, dict):
        source = os.path.join(str(earlier.get("cwd", "")), str(job.get("file", "")))
        ours |= {name for name in JOB_FILES if os.path.realpath(source) != os.path.realpath(folder / name)}
    # A record's files are never links.
    return {name for name in there if name not in ours or os.path.islink(folder / name)}


def read_record(folder: Path) -> RunRecord:
    """Read the record in a run folder; raise ConfigError if there is none or it cannot be read."""
    path = folder / RECORD_FILE
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LIMIT:
            # Reading a pipe would block.
            raise ConfigError("not a file, or too large for the record of a run")
        return RunRecord.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "the run used Cluster(record=False) or an older Roost, or this is not the folder of a run"
        raise ConfigError(f"there is no {RECORD_FILE} in {folder}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except ConfigError as error:
        raise ConfigError([replace(item, message=f"{path}: {item.message}") for item in error.problems]) from None


def started_at(text: str) -> datetime:
    """Parse a time of a record."""
    return datetime.fromisoformat(text)
