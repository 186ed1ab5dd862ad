"""slime's arguments on Roost: a flag that no parser has is an error.

slime tells the parsers of Megatron and SGLang to pass over flags that they do not know, since each has only its own:
a misspelled flag changes nothing, and nobody says so.
"""

from __future__ import annotations

import functools
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from roost.compat import load_theirs
from roost.errors import ConfigError, Problem
from roost.text import did_you_mean


def __getattr__(name: str) -> Any:
    """Return what `slime.utils.arguments` has under the name, with a `parse_args` that looks at every flag."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_arguments(), name)


@functools.cache
def _arguments() -> Any:
    """Return a copy of `slime.utils.arguments` whose `parse_args` notes which flags its parsers have."""
    module = load_theirs("slime.utils.arguments", "parse_args", "slime_validate_args")
    parse, validate = module.parse_args, module.slime_validate_args

    def parse_args(*given: Any, **options: Any) -> Namespace:
        """Return slime's arguments; end the program for a flag that none of the parsers has."""
        known: set[str] = set()
        parse_known = ArgumentParser.parse_known_args

        def noting(parser: ArgumentParser, *words: Any, **more: Any) -> Any:
            # Python has no public way to the flags of a parser.
            known.update(parser._option_string_actions)
            return parse_known(parser, *words, **more)

        def checking(args: Namespace) -> Any:
            # Every parser has run, and slime would complain of what a misspelled flag did not say.
            try:
                check_flags(sys.argv[1:], known)
            except ConfigError as error:
                # As a parser ends the program that it was called wrongly for.
                ArgumentParser().exit(2, f"roost: {error}\n")
            return validate(args)

        ArgumentParser.parse_known_args, module.slime_validate_args = noting, checking  # type: ignore[assignment,method-assign]
        try:
            found: Namespace = parse(*given, **options)
        finally:
            ArgumentParser.parse_known_args = parse_known  # type: ignore[method-assign]
            module.slime_validate_args = validate
        return found

    module.parse_args = parse_args
    return module


def check_flags(words: Sequence[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the flags among the words of a command line that are not known, each with the nearest one.

    >>> check_flags(["--colocate", "--rollout-num-gpus=4"], ["--colocate", "--rollout-num-gpus", "--sglang-config"])
    """
    known = set(known)
    beginnings = [name for name in known if name.startswith("--sglang-")]
    problems = []
    for flag in (word.partition("=")[0] for word in takewhile("--".__ne__, words)):
        if not re.match(r"--?[A-Za-z]", flag) or flag in known:
            continue
        if flag.startswith("--sglang-") and any(name.startswith(flag) for name in beginnings):
            # SGLang's parser takes the beginning of a name for the name.
            continue
        if not beginnings and (flag.startswith(("--sglang-", "--router-")) or flag == "--prefill-num-servers"):
            # Without engines, slime does not run SGLang's parser.
            continue
        close = did_you_mean(flag, known)
        hint = f"did you mean {close}?" if close else "leave it out: slime passes over it"
        problems.append(Problem(message=f"slime has no flag {flag}, nor have its Megatron and its SGLang", hint=hint))
    if problems:
        raise ConfigError(problems)
