"""`roost compat`: run a program of another framework with Roost's modules in the place of the framework's own."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.completion import offer
from roost.compat import check_framework, environment, frameworks
from roost.errors import ConfigError

_PYTHON = re.compile(r"python(\d+(\.\d+)*t?)?")
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
_HEAD = 2**16


def _complete_framework(incomplete: str) -> list[str]:
    return offer(frameworks, incomplete)


def compat(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The framework, such as slime.", autocompletion=_complete_framework),
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="The program, as you start it: -- python train.py --colocate."),
    ] = None,
) -> None:
    check_framework(name)
    words = list(command or ())
    if not words:
        raise ConfigError(
            "roost compat: there is no program", hint=f"for example roost compat {name} -- python train.py"
        )
    if shutil.which(words[0]) is None:
        hint = f"write python {words[0]}" if words[0].endswith(".py") else "write the program as you start it"
        raise ConfigError(f"there is no program {words[0]!r} that can be run", hint=hint)
    check_program(words, name)
    # The user's own program, as the shell would start it.
    os.execvpe(words[0], words, environment(name, os.environ))  # noqa: S606


def check_program(words: Sequence[str], name: str) -> None:
    """Raise ConfigError for a program in which Roost cannot take a framework's place."""
    if "UV_RUN_RECURSION_DEPTH" in os.environ or [Path(word).name for word in words[:2]] == ["uv", "run"]:
        # Ray gives its workers uv's environment then, and calls no hook.
        hint = "activate the virtual environment, and start the program without uv run"
        raise ConfigError("uv run keeps roost compat from the Ray workers", hint=hint)
    for index, word in enumerate(words):
        base, after = Path(word).name, words[index + 1 :]
        if base == "ray" and list(after[:2]) == ["job", "submit"]:
            hint = f"put it into the job: ray job submit ... -- roost compat {name} -- python train.py"
            raise ConfigError("ray job submit starts the program elsewhere, without roost compat", hint=hint)
        if _PYTHON.fullmatch(base):
            if option := _ignoring(after):
                why = f"{base} {option} does not read what roost compat sets: PYTHONPATH and sitecustomize"
                raise ConfigError(why, hint=f"leave out {option}")
            return
        if base in _SHELLS:
            return
        if head := _script(word):
            first, _, rest = head.partition("\n")
            if re.search(r"^[^#\n]*\bray job submit\b", rest, re.MULTILINE):
                check_program(["ray", "job", "submit"], name)
            if interpreter := [part for part in first.split() if part not in ("env", "/usr/bin/env", "-S")]:
                check_program(interpreter, name)
            return
    hint = "for example python, torchrun or a shell script"
    raise ConfigError(f"{' '.join(words[:3])}: there is no Python in it for roost compat to work in", hint=hint)


def _ignoring(options: Sequence[str]) -> str | None:
    """Return the option that keeps a Python from reading its path or `sitecustomize`.

    >>> _ignoring(["-X", "dev", "-uI", "train.py"]), _ignoring(["-Wignore", "-m", "train", "-I"])
    ('-I', None)
    """
    words = iter(options)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return None
        if word == "--check-hash-based-pycs":
            next(words, None)
        for place, letter in enumerate(word[1:]) if not word.startswith("--") else ():
            if letter in "ISE":
                return f"-{letter}"
            if letter in "cm":
                return None
            if letter in "WX":
                # The value is the rest of the word, or the next one.
                if place == len(word) - 2:
                    next(words, None)
                break
    return None


def _script(word: str) -> str:
    """Return how a script begins, without its `#!`; nothing if a word is no script."""
    found = shutil.which(word) or word
    try:
        with open(found, "rb") as file:
            text = file.read(_HEAD).decode(errors="replace")
    except OSError:
        return ""
    return text[2:] if text.startswith("#!") else ""
