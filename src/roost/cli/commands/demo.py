"""`roost demo`: a training run to watch."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from roost.cli.out import drop_output
from roost.cli.terminal import speak_ascii
from roost.demo.show import DemoConsole, run_demo
from roost.demo.tasks import TASKS, Mode
from roost.errors import ConfigError


def demo(
    what: Annotated[
        Literal["cartpole", "llm"],
        typer.Argument(metavar="[WHAT]", help="cartpole, or llm: post-train a tiny language model with vLLM."),
    ] = "cartpole",
    mode: Annotated[
        Literal["colocate", "disagg", "both"],
        typer.Option("--mode", help="Share the accelerators in turns, split them, or one after the other."),
    ] = "both",
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="How long to train; default: until the return is high."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="The seed of all random numbers.")] = 0,
    runs_dir: Annotated[
        Path, typer.Option("--runs-dir", metavar="DIR", help="Where to create the folders of the runs.")
    ] = Path("runs"),
) -> None:
    if minutes is not None and not (minutes > 0 and math.isfinite(minutes)):
        raise ConfigError(f"--minutes is {minutes:g}: it is a number above 0")
    modes = tuple(Mode) if mode == "both" else (Mode(mode),)
    speak_ascii()
    # The stream itself: the demo filters what other code writes to standard output. FORCE_COLOR makes no terminal.
    console = DemoConsole(file=sys.stdout, highlight=False, force_interactive=None if sys.stdout.isatty() else False)
    try:
        task = TASKS[what]
        has_learned = run_demo(console, task, modes, minutes=minutes, seed=seed, runs_dir=runs_dir)
    except BrokenPipeError:
        drop_output()
        raise typer.Exit(141) from None
    if not has_learned:
        print(f"the {task.noun} did not double in every mode: train longer, or read the logs")
        raise typer.Exit(1)
