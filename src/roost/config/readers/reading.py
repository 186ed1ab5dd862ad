"""Find out which framework a file is for, and read the settings that decide its placement."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

from roost.config.readers.compose import read_toml, read_yaml
from roost.config.readers.files import Folder
from roost.config.readers.framework import Framework, Gpus, Remark, Role, Setting, Settings
from roost.config.readers.marks import Command, Script, ScriptFile, Token, has_mark
from roost.config.readers.script import walk_script
from roost.errors import ConfigError, Problem
from roost.text import did_you_mean, join_words, shorten

FRAMEWORKS: tuple[str, ...] = (
    *("verl", "slime", "miles", "openrlhf", "nemo-rl", "areal", "skyrl", "roll", "prime-rl"),
)
_KNOWN = f"Roost reads {join_words(FRAMEWORKS)}; --from NAME chooses one"
_COMMAND_LINE = "command line"
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_DELETION = re.compile(r"~([A-Za-z_][\w.]*)")
_SCRIPT = re.compile(r"#!.*\b(ba|z|k|da)?sh\b")


class VariablesMissing(ConfigError):  # noqa: N818 - what happened
    """The placement depends on what only the environment of the job knows."""


class SettingsUnknown(ConfigError):  # noqa: N818 - what happened
    """Words on the command line that the job has no use for; `words` are these."""

    def __init__(self, problems: Iterable[Problem], words: Sequence[str] = ()) -> None:
        super().__init__(problems)
        self.words = tuple(words)


def framework(name: str) -> Framework:
    """Return the table of a framework."""
    if name not in FRAMEWORKS:
        close = did_you_mean(name, FRAMEWORKS)
        hint = f"did you mean {close!r}?" if close else f"Roost reads {join_words(FRAMEWORKS)}"
        raise ConfigError(f"there is no reader for {shorten(repr(name))}", hint=hint)
    own = name.replace("-", "_")
    module = import_module(f"roost.config.readers.{'slime' if name == 'miles' else own}")
    found: Framework = getattr(module, own.upper())
    return found


@dataclass(frozen=True)
class ForeignJob:
    """A job of another framework: its settings, and the roles that they make."""

    name: str
    settings: Settings
    launches: int = 1

    @property
    def framework(self) -> Framework:
        """The framework that the job is for."""
        return self.settings.framework

    @cached_property
    def size(self) -> tuple[int, int]:
        """How many nodes of how many GPUs the job is for."""
        found = self.framework.size(self.settings)
        self._raise_missing()
        nodes, gpus = found
        if not (1 <= nodes <= 100_000 and 0 <= gpus <= 1024) or nodes * gpus > 2_000_000:
            raise ConfigError(f"{self.name}: it asks for {nodes} nodes of {gpus} GPUs")
        return found

    def lay_out(self, sizes: Sequence[int]) -> tuple[Role, ...]:
        """Place the roles on nodes with so many GPUs as the framework does on an empty cluster."""
        roles = tuple(role for role in self.framework.lay_out(self.settings, Gpus(sizes)) if role and role.processes)
        self._raise_missing()
        self.settings.note_unknown_keys()
        if not roles:
            raise ConfigError(f"{self.name}: it places nothing on GPUs")
        return roles

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """The remarks on the job; complete once it is laid out."""
        order = {"error": 0, "warning": 1, "info": 2}
        return tuple(sorted(self.settings.remarks, key=lambda item: order[item.level]))

    def _raise_missing(self) -> None:
        """Ask for the variables that the placement depends on, each once."""
        problems: dict[tuple[str, ...], Problem] = {}
        for key, setting in self.settings.missing.items():
            names = setting.names
            if names in problems:
                continue
            default = self.framework.defaults.get(key)
            otherwise = (
                f", or add --assume to take {self.framework.name}'s default"
                if default is not None
                else ", or add --assume"
            )
            numbered = [name for name in names if not name.isdecimal() and name != "?"]
            if numbered:
                choices = self.settings.literals.get(numbered[0], ())
                example = choices[0] if choices and not choices[0].isdecimal() else _example(key, default)
                known = f" (the script knows {join_words(choices, last='or')})" if len(choices) > 1 else ""
                message = f"{numbered[0]}=? : {key} depends on it{known}"
                hint = f"give {numbered[0]}={example} on the command line{otherwise}"
            elif names and names[0].isdecimal():
                message = f"{key} depends on an argument of the script"
                hint = f"give the arguments after --{otherwise}"
            else:
                message = f"{key} is {setting.unknown}, which only a run can tell"
                hint = f"give {key}=… on the command line{otherwise}"
            problems[names] = Problem(message=message, hint=hint, where=setting.where)
        if problems:
            raise VariablesMissing(problems.values())


def _example(key: str, default: object) -> str:
    return (
        str(default)
        if isinstance(default, int) and not isinstance(default, bool) and default > 0
        else "4"
        if "node" in key
        else "…"
    )


def is_script(name: str, text: str) -> bool:
    """Tell whether a file is a shell script."""
    return name.endswith((".sh", ".bash", ".slurm", ".sbatch")) or bool(_SCRIPT.match(text[:100]))


def read_foreign(
    name: str, text: str, extra: Sequence[str] = (), *, chosen: str | None = None, assume: bool = False
) -> ForeignJob | None:
    """Read a job of another framework; None if the file is not one, or a job of Roost and RLinf.

    `extra` is from the command line: `NAME=value` for the variables of a script, and arguments for it or settings for
    the job. `chosen` is the framework to read it for.
    """
    wanted = [framework(chosen)] if chosen else None
    if is_script(name, text):
        return _read_script(name, text, extra, wanted, assume)
    suffix = ".toml" if name.endswith(".toml") else ".yaml"
    tables = wanted or [item for item in map(framework, FRAMEWORKS) if item.suffix == suffix]
    folder = Folder.of(name)
    if suffix == ".toml":
        given = read_toml(name, text)
    elif wanted or _may_be_foreign(text, tables):
        given = read_yaml(folder, name, text)
    else:
        return None
    found = next((item for item in tables if _holds(item, given)), wanted[0] if wanted else None)
    if found is None:
        if suffix == ".toml":
            raise ConfigError(f"{name}: not a config of a framework that Roost reads", hint=_KNOWN)
        return None
    _check_settings(extra, found, given, name)
    settings = _overrides(
        [Token(item, ScriptFile(_COMMAND_LINE, " ".join(extra)), 0, 0) for item in extra], Script(), found, given
    )
    job = Settings(found, settings, assume)
    _note_missing(folder, job)
    return ForeignJob(name, job)


def _note_missing(folder: Folder, job: Settings) -> None:
    """Note the files that a config builds on and that are not there, where the framework has no copy of its own."""
    for target, where in dict.fromkeys(folder.missing) if job.framework.in_config else ():
        if where is not None:
            message = f"it builds on {shorten(target, 60)}, which is not there: what that file says is not known"
            job.remarks.append(
                Remark(
                    code="no-such-file",
                    level="warning",
                    message=message,
                    hint="put the file beside it; until then, defaults stand in for it",
                    where=where,
                )
            )


def _may_be_foreign(text: str, tables: Sequence[Framework]) -> bool:
    """Tell from the text alone whether a YAML file may be for one of these."""
    if "component_placement" in text:
        return False
    return "defaults" in text or any(mark.split(".")[0] in text for table in tables for mark in table.marks)


def _holds(table: Framework, given: Mapping[str, Setting]) -> bool:
    return any(
        key == mark or key.startswith(f"{mark}." if mark[-1:].isalnum() else mark)
        for mark in table.marks
        for key in given
    )


def _read_script(
    name: str, text: str, extra: Sequence[str], wanted: list[Framework] | None, assume: bool
) -> ForeignJob:
    line = ScriptFile(_COMMAND_LINE, " ".join(extra))
    variables = {found[1]: found[2] for item in extra if (found := _VARIABLE.fullmatch(item))}
    arguments = [item for item in extra if not _VARIABLE.fullmatch(item)]
    folder = Folder.of(name)
    script = walk_script(text, folder, variables, arguments, argument_file=line)
    # A name that no variable of the script has is a setting of the framework.
    settings = [item for item in extra if (found := _VARIABLE.fullmatch(item)) and found[1] not in script.used]
    if settings:
        arguments = [item for item in extra if item in settings or item in arguments]
        script = walk_script(
            text, folder, {k: v for k, v in variables.items() if k in script.used}, arguments, argument_file=line
        )
    launches = _launches(script, wanted or [framework(item) for item in FRAMEWORKS], folder, bool(wanted))
    if not launches:
        what = wanted[0].name if wanted else "a framework that Roost reads"
        raise ConfigError(f"{name}: it starts no program of {what}", hint="choose another --from" if wanted else _KNOWN)
    table, command, at = next((item for item in launches if not item[1].maybe), launches[0])
    # Of frameworks with the same flags, it is the one that the script speaks of.
    alike = [item for item in wanted or map(framework, FRAMEWORKS) if item.lay_out is table.lay_out]
    table = max(alike, key=lambda item: text.count(item.name))
    tokens = list(command.words[at + 1 :])
    if arguments and not script.passes_arguments:
        tokens += [Token(item, line, 0, 0) for item in arguments]
    given = _configs(folder, script, command, at, table)
    if table.switches:
        # On the command line, a setting may be written as it is for the other frameworks.
        known = {*table.defaults, *table.older}
        tokens = [
            item._replace(text=f"--{item.text}")
            if item.file is line and item.text.partition("=")[0] in known and "=" in item.text
            else item
            for item in tokens
        ]
        given |= _flags(tokens, script, table)
    else:
        given = _overrides(tokens, script, table, given)
    if any(
        re.search(r"(^|/)(torchrun|deepspeed|accelerate)$|^torch\.distributed\.", word.text)
        for word in command.words[:at]
    ):
        before = _flags(command.words[:at], script, table)
        given |= {key: before[key] for key in before if key in table.defaults}
    for key in table.files:
        given |= _file_of(given.get(key), script, folder, key, command)
    given["program"] = Setting(key="program", text=command.words[at].text, where=command.words[at].where("program"))
    job = Settings(table, given, assume, literals=script.literals)
    _note_missing(folder, job)
    _check_lines(script, command, table, job)
    for key, value in script.ignored.items():
        job.inform(
            "given-in-vain", f"{key}={variables[key]} changes nothing: the script sets {key}={script.shown(value)}", ""
        )
    _check_unused(extra, script, table, name)
    return ForeignJob(name, job, len(launches))


def _check_unused(extra: Sequence[str], script: Script, table: Framework, name: str) -> None:
    """Refuse a name on the command line that is neither a variable of the script nor a setting."""
    # What flags and dots say, a script may hand on to programs of which Roost knows a part.
    parsed = [found for item in extra if (found := (_OVERRIDE if table.switches else _VARIABLE).fullmatch(item))]
    own = {found[0]: found[2] if table.switches else found[1] for found in parsed}
    if script.passes_arguments:
        own = {item: key for item, key in own.items() if _VARIABLE.fullmatch(item)}
    known = {*table.defaults, *table.older}
    unknown = {item: key for item, key in own.items() if key not in known and key not in script.used}
    hint = "give a variable that the script reads, or a setting of the job"
    _refuse(unknown, lambda key: f"{name} has no variable {shorten(key)}", known, hint)


def _check_settings(extra: Sequence[str], table: Framework, given: Mapping[str, Setting], name: str) -> None:
    """Refuse what follows a config on the command line and is none of its settings; `+` adds one, as in Hydra."""
    known = {*table.defaults, *table.older, *given}
    sections = {key[:at] for key in given for at, sign in enumerate(key) if sign == "."}
    words: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for item in extra:
        found = _OVERRIDE.fullmatch(item.removeprefix("--"))
        gone = _DELETION.fullmatch(item)
        if found is None and gone is None:
            words[item] = item
        elif found is None or not found[1]:
            key = gone[1] if gone else found[2] if found else ""
            unknown |= {item: key} if key not in known and key not in sections else {}
    _refuse(words, lambda key: f"{shorten(key)} is no setting of {name}", (), "a setting is written key=value")
    hint = "give a setting that the config has, or add one with +key=value"
    _refuse(unknown, lambda key: f"{name} has no setting {shorten(key)}", known, hint)


def _refuse(unknown: Mapping[str, str], message: Callable[[str], str], known: Iterable[str], hint: str) -> None:
    """Refuse words of the command line, each with the known name that is nearest to its key."""
    problems = []
    for key in unknown.values():
        close = did_you_mean(key, known)
        problems.append(Problem(message=message(key), hint=f"did you mean {close!r}?" if close else hint))
    if problems:
        raise SettingsUnknown(problems, tuple(unknown))


def _check_lines(script: Script, command: Command, table: Framework, found: Settings) -> None:
    """Note arguments that are a command of their own, for want of a backslash at the end of the line before."""
    after = script.commands[script.commands.index(command) + 1 :]
    for lost in after:
        word = lost.words[0]
        key = word.text.lstrip("+~").removeprefix("--").partition("=")[0]
        if word.text.startswith("--") or (key in table.defaults and "=" in word.text):
            found.remarks.append(
                Remark(
                    code="lost-line",
                    level="error",
                    message=f"the command ends before this line: {shorten(word.text, 40)} is not one of its arguments",
                    hint="end the line before it with a backslash, and put no comment between the lines",
                    where=lost.start.where(key),
                )
            )


def _launches(
    script: Script, tables: Sequence[Framework], folder: Folder, chosen: bool
) -> list[tuple[Framework, Command, int]]:
    """Return the commands that start a framework's program, and which of their words is that program."""
    found = []
    for command in script.commands:
        for table in tables:
            at = _program(command, table, folder, chosen)
            if at is not None:
                found.append((table, command, at))
                break
        else:
            by_config = _by_config(command, [item for item in tables if item.in_config], folder, chosen)
            found += [by_config] if by_config else []
    return found


def _program(command: Command, table: Framework, folder: Folder, chosen: bool) -> int | None:
    """Return which word is the framework's program; without one of its names, what stands before its arguments."""
    words = [word.text for word in command.words]
    marked = [index for index, word in enumerate(words) if table.marks and word.lstrip("+~").startswith(table.marks)]
    settings = {word.lstrip("+").partition("=")[0] for word in words if "=" in word}
    told = marked or any("." in key and key in table.defaults for key in settings)
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        is_run = before in ("-m", "--module", "run") or "python" in before or (bool(before) and word.endswith(".py"))
        is_run = is_run or re.fullmatch(r"\w+(\.\w+){2,}", word) is not None
        if not table.command.search(word):
            continue
        is_own = told or not table.common.search(word)
        if marked and not table.in_config:
            return index
        if is_run and (is_own or _has_config(command, index, table, folder, chosen)):
            return index
    return max(0, marked[0] - 1) if marked and not table.in_config else None


def _has_config(command: Command, at: int, table: Framework, folder: Folder, chosen: bool) -> bool:
    """Tell whether a program takes a config of the framework, or one that nobody knows yet."""
    if not table.in_config or chosen:
        return table.in_config
    names = _config_names(command, at) or _own_config(command, at, table)
    if table.suffix == ".toml" or any(has_mark(name.text) for name in names):
        # Nobody else names a config as `@ FILE`.
        return bool(names)
    opened = [folder.open(name.text, None, _SUFFIXES) for name in names]
    return any(_holds(table, _read(folder, *found)) for found in opened if found)


def _by_config(
    command: Command, tables: Sequence[Framework], folder: Folder, chosen: bool
) -> tuple[Framework, Command, int] | None:
    """Find the framework of a Python program by the config that it is given; it may have any name."""
    words = [word.text for word in command.words]
    at = next((index for index, word in enumerate(words) if word.endswith(".py") or words[index - 1] == "-m"), None)
    names = [] if at is None or not tables else _config_names(command, at)
    if at is None or not names:
        return None
    opened = [folder.open(_bare(name.text), None, _SUFFIXES) for name in names]
    given = {key: item for found in opened if found for key, item in _read(folder, *found).items()}
    table = next((item for item in tables if _holds(item, given)), tables[0] if chosen else None)
    return (table, command, at) if table else None


def _read(folder: Folder, name: str, text: str) -> dict[str, Setting]:
    return read_toml(name, text) if name.endswith(".toml") else read_yaml(folder, name, text)


def _bare(target: str) -> str:
    """Return the known end of a path, such as that of `$PROJECT/configs/a.yaml`: it is looked for in the project."""
    return re.sub("\ue000\\d+\ue001", "", target).lstrip("/") if has_mark(target) else target


_FOLDERS = frozenset({"--config-path", "--config_path", "--config-dir", "-cp"})
_NAMES = frozenset({"--config-name", "--config_name", "--config", "-cn"})
_SUFFIXES = ("", ".yaml", ".yml", ".toml")


def _config_names(command: Command, at: int) -> list[Token]:
    """Return the configs that a program is given, each with its path: by an option, or as `@ FILE`."""
    words = command.words[at:]
    path, found = "", []
    for index, word in enumerate(words):
        option, sign, value = word.text.partition("=")
        rest = words[index + 1] if index + 1 < len(words) else word._replace(text="")
        rest = word._replace(text=value) if sign else rest
        if option in _FOLDERS:
            path = rest.text
        elif option in _NAMES or option == "@":
            found.append(rest)
        elif option.startswith("@"):
            found.append(word._replace(text=word.text[1:]))
    return [name._replace(text=f"{path}/{name.text}" if path else name.text) for name in found if name.text]


def _own_config(command: Command, at: int, table: Framework) -> list[Token]:
    """Return the config that a program takes if it is given none."""
    program = command.words[at]
    for pattern, path in table.configs.items():
        if found := re.search(pattern, program.text):
            return [program._replace(text=os.path.join(os.path.dirname(program.text), found.expand(path)))]
    return []


def _configs(folder: Folder, script: Script, command: Command, at: int, table: Framework) -> dict[str, Setting]:
    """Read the configs that a command names, or the one that its program takes without, if they are in the project."""
    program = command.words[at]
    names = _config_names(command, at) or _own_config(command, at, table)
    given: dict[str, Setting] = {}
    for name in names:
        opened = folder.open(_bare(name.text), None, _SUFFIXES)
        if opened is not None:
            given |= _read(folder, *opened)
        elif table.in_config and has_mark(name.text):
            named = script.names_in(name.text)
            message = (
                f"{named[0]}=? : which config it is depends on it" if named else "which config it is, is not known"
            )
            hint = f"give {named[0]}=… on the command line" if named else "give the config itself to roost plan"
            raise VariablesMissing(Problem(message=message, hint=hint, where=name.where("config")))
        elif table.in_config:
            message = f"its config {shorten(name.text, 80)} is not in this project"
            raise ConfigError(message, hint="put it there, or give it to roost plan itself", where=name.where("config"))
    if table.in_config and not names:
        hint = f"give a {table.suffix} file to roost plan"
        raise ConfigError("it names no config, which has the placement", hint=hint, where=program.where("config"))
    if names:
        text = script.shown(names[-1].text)
        given["config"] = Setting(key="config", text=os.path.basename(text))
    return given


def _file_of(setting: Setting | None, script: Script, folder: Folder, key: str, command: Command) -> dict[str, Setting]:
    """Read the YAML file that a setting names: written by the script itself, or beside it."""
    words = [word.text for word in command.words]
    flag = f"--{key}"
    if setting is None or flag not in words[:-1]:
        return {}
    target = words[words.index(flag) + 1]
    known = {key: Setting(key=key, text=script.shown(target), where=setting.where)}
    if target in script.documents:
        return read_yaml(folder, folder.name, script.documents[target]) | known
    opened = None if has_mark(target) else folder.open(target)
    return read_yaml(folder, *opened) | known if opened else known


def _setting(token: Token, key: str, value: str, script: Script, before: Setting | None, table: Framework) -> Setting:
    where = token.where(key) if token.file.text else None
    names = script.names_in(value)
    if has_mark(value):
        whys = [item.why for item in script.unknowns_in(value)]
        return Setting(key=key, text=None, where=where, names=names, unknown=whys[0])
    if token.maybe:
        default = table.defaults.get(key)
        known = before.text if before is not None and before.is_known else None if default is None else str(default)
        if before is None or before.is_known:
            if known != value:
                return Setting(key=key, text=None, where=where, names=token.maybe, unknown="what a condition decides")
        else:
            return before
    return Setting(key=key, text=value, where=where)


def _overrides(
    tokens: Sequence[Token], script: Script, table: Framework, given: Mapping[str, Setting]
) -> dict[str, Setting]:
    """Read settings such as `trainer.nnodes=2`, over those that are given."""
    found = dict(given)
    for token in tokens:
        if match := _OVERRIDE.fullmatch(token.text.removeprefix("--")):
            key, value = match[2], match[3]
            quoted = re.fullmatch(r"'([^']*)'|\"([^\"]*)\"", value)
            value = (quoted[1] or quoted[2] or "") if quoted else value
            for old in [old for old in found if old.startswith(f"{key}.") or old == table.older.get(key)]:
                del found[old]
            found[key] = _setting(token, key, value, script, found.get(key), table)
        elif match := _DELETION.fullmatch(token.text):
            found = {key: item for key, item in found.items() if not f"{key}.".startswith(f"{match[1]}.")}
    return found


def _flags(tokens: Sequence[Token], script: Script, table: Framework) -> dict[str, Setting]:
    """Read flags such as `--actor-num-nodes 2`."""
    found: dict[str, Setting] = {}
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if not token.text.startswith("--"):
            continue
        key, sign, value = token.text[2:].partition("=")
        if key not in table.defaults and (plain := key.replace("-", "_")) in table.defaults:
            key = plain
        # What comes last counts, whichever of its names it has.
        found.pop(table.older.get(key, ""), None)
        if sign:
            found[key] = _setting(token, key, value, script, found.get(key), table)
        elif key in table.switches or index >= len(tokens) or tokens[index].text.startswith("--"):
            found[key] = _setting(token, key, "true", script, found.get(key), table)
        else:
            following = tokens[index]
            index += 1
            maybe = token.maybe or following.maybe
            spot = token._replace(
                maybe=maybe, stop=max(token.stop, following.stop) if token.file is following.file else token.stop
            )
            found[key] = _setting(spot, key, following.text, script, found.get(key), table)
    return found
