"""Plain output: to standard output, to a file, or a remark to standard error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import typer

from roost.errors import ConfigError
from roost.text import printable_lines


def write_text(text: str, out: Path | None = None) -> None:
    """Write text unchanged, to a file or to standard output."""
    if out is None:
        try:
            # JSON, SVG and HTML are UTF-8 whatever the terminal's encoding; a file's name may not be valid text.
            sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader closed the pipe, as in `roost plan … | head`.
            drop_output()
            raise typer.Exit(141) from None
        return
    try:
        out.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror or error}") from None
    tell(f"wrote {out}")


def as_json(answer: object) -> str:
    """Format an answer as JSON text."""
    return json.dumps(answer, indent=2) + "\n"


def tell(text: str) -> None:
    """Print a remark that is not part of the answer."""
    print(printable_lines(text), file=sys.stderr)


def drop_output() -> None:
    """Discard what the interpreter flushes when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
