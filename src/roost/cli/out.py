"""How an answer leaves: to the terminal with colours, to a pipe without, to a file."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from roost.errors import ConfigError
from roost.text import plural

if TYPE_CHECKING:
    from rich.text import Text

    from roost.placement.plan import Plan
    from roost.render.grid import Grid


def draw_map(grid: Grid, out: Path | None) -> None:
    """Draw a map on the terminal, or for one into a file."""
    from roost.render.terminal import draw_terminal

    width = 120 if out is not None else shutil.get_terminal_size().columns
    print_text(draw_terminal(grid, width=width, basic_colours=_has_basic_colours()), out)


def print_warnings(plan: Plan) -> None:
    """Say beside the map what lint warns of."""
    from roost.cli.load import tell
    from roost.placement.lint import lint

    found = [item for item in lint(plan) if item.level == "warning"]
    for item in found[:3]:
        tell(f"{item}")
    if len(found) > 3:
        tell(f"and {plural(len(found) - 3, 'more warning')}: see roost lint")


def print_text(text: Text, out: Path | None = None) -> None:
    """Print styled text: colours on a terminal unless NO_COLOR is set, none into a pipe or a file."""
    from roost.render.terminal import to_ascii

    if out is not None:
        write_text(text.plain + "\n", out)
        return
    shown = to_ascii(text) if _ascii() else text
    if not _is_coloured():
        # A pipe gets plain text, and the half of rich that knows terminals is not loaded for it.
        write_text(shown.plain + "\n", None)
        return
    from rich.console import Console

    Console(highlight=False).print(shown, soft_wrap=True)


def _is_coloured() -> bool:
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def _has_basic_colours() -> bool:
    """Whether the terminal has only 16 colours."""
    if not _is_coloured():
        return False
    from rich.console import Console

    return Console().color_system == "standard"


def _ascii() -> bool:
    return "utf" not in (getattr(sys.stdout, "encoding", "") or "").lower()


def speak_ascii() -> None:
    """Let standard output have ASCII for what it cannot encode, for those who write there by themselves."""
    if _ascii() and isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("roost", _in_ascii)
        sys.stdout.reconfigure(errors="roost")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    from roost.render.terminal import ascii_of

    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(ascii_of, error.object[error.start : error.end])), error.end


def write_text(text: str, out: Path | None) -> None:
    """Write text as it is: to a file, or to standard output."""
    if out is None:
        try:
            # JSON, SVG and HTML are UTF-8 whatever the terminal speaks; a file's name may be no text at all.
            sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader went away, as in `roost plan … | head`: nothing to say, and nobody to say it to.
            drop_output()
            raise typer.Exit(141) from None
        return
    try:
        out.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror or error}") from None
    print(f"wrote {out}", file=sys.stderr)


def drop_output() -> None:
    """Let the interpreter flush what is left into nothing when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
