"""The command line: the table of commands, exit codes, and the one place where a RoostError becomes text.

A command is the function in `commands/` with the name of its file. The table has all that `roost --help` and the
shells need, so that Roost imports only the command that runs.

Exit codes: 0 success; 1 two plans differ, check --strict has a warning, doctor found a problem, clean ended
nothing or the demo did not learn; 2 a mistake by the user; 3 a failure of the world, such as no Ray cluster.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from roost import __version__
from roost.cli.completion import complete_in_bash
from roost.cli.out import drop_output
from roost.cli.report import plain_words, tell_error, user_report, wants_json
from roost.errors import ClusterError, ConfigError, RoostError
from roost.extras import missing_extra

_COMMANDS = {
    "Start here": {
        "demo": ("Train a policy on a cluster started on this machine, and watch it.", "--mode colocate"),
        "new": ("Create a folder with a small working job and its test.", "my-job"),
        "schema": ("Print the JSON Schema that an editor checks a job with.", "--out job.schema.json"),
    },
    "Plan, with no cluster": {
        "plan": ("Show which worker sits on which hardware.", "job.yaml --cluster 2x8"),
        "diff": (
            "Compare two plans or two runs: exit 0 if the plans are the same, 1 if they differ.",
            "job.yaml other.yaml --cluster 2x8",
        ),
        "where": (
            "Show where a worker sits and which environment it gets, or who sits on a piece of hardware.",
            "job.yaml actor:3 --cluster 2x8",
        ),
        "weights": ("Show which bytes of the weights go from which worker to which.", "job.yaml --cluster 2x8"),
        "search": (
            "Find the best placement of a job from measured times, prove it, or check a proof.",
            "job.yaml --cluster 8x8:H100 --profile profile.yaml",
        ),
        "check": ("Find the mistakes of a job, and what may be one, before it runs.", "job.yaml --cluster 2x8"),
    },
    "Run": {
        "run": ("Place a job, launch its workers and call its entry point.", "job.yaml"),
        "compat": ("Run a program of slime and the like, with Roost below it.", "slime -- python train.py"),
        "top": ("Show a run on the terminal while it runs: who does what, metrics, events.", "latest"),
        "watch": ("Show a run on a local web page while it runs, and afterwards.", "latest --open"),
        "stack": ("Show where all threads of a worker are, without stopping it.", "latest actor:3"),
        "logs": ("Show what the workers of a run printed, or list the logs.", "latest actor:3 --follow"),
        "runs": ("List your runs on this machine, newest first.", ""),
        "show": ("Show all that is known about a run, or write what its workers did as a trace.", "20261115-2242"),
        "metrics": (
            "Show the metrics of a run, or write them as CSV, for TensorBoard or W&B.",
            "latest --csv --out m.csv",
        ),
        "profile": ("Make a profile for `roost search` from the times that runs recorded.", "latest --out p.yaml"),
        "stop": ("Stop a run that is running, as Ctrl-C would.", "20261115-2242"),
        "rerun": ("Run the job or the script of an earlier run again.", "20261115-2242 --dry-run"),
    },
    "Inspect the cluster": {
        "nodes": ("Show the nodes of the live cluster with their ranks.", "--format inventory --out live.yaml"),
        "status": ("Show the jobs on the live cluster, who holds which accelerator, or the channels.", "--channels"),
        "xray": ("Show who is where on any Ray cluster, what its jobs wait for, and why.", "--stacks"),
        "doctor": ("Check this machine and the cluster for problems, and say how to fix them.", "--run-dir /shared"),
        "up": ("Start a local cluster: real Ray nodes on this machine, fake accelerators.", "2x4"),
        "down": ("Stop the local cluster.", ""),
        "clean": ("End what your jobs left behind when they died, after showing it.", "--yes"),
    },
}
"""By panel of the help and by name: the summary, and the arguments of an example."""
_MOVED = {
    "lint": "check JOB.yaml",
    "check-proof": "search --check PROOF.json",
    "who": "where JOB.yaml HARDWARE",
    "channels": "status --channels",
    "trace": "show RUN --trace",
}
"""Commands of earlier versions, and what does the same now."""

_UsageError: Any = typer.BadParameter.__mro__[1]
"""Typer's own class, which it has no public name for."""


def _process_value(param: Any, ctx: Any, value: Any) -> Any:
    """Take texts, paths and choices as they are, and leave the rest to Typer.

    Typer converts with pydantic, which takes longer to load than all that `roost plan` needs of Roost.
    """
    kind, several = param.type_descriptor.annotation, param.multiple or param.nargs == -1
    found: Any = None
    if several and kind == list[str] and (value or not param.required):
        found = [*(value or ())]
    elif isinstance(value, str) and (kind in (str, Path) or value in (param.type_descriptor.choices or ())):
        found = Path(value) if kind is Path else value
    elif several or param.required or value is not None:
        return type(param).process_value(param, ctx, value)
    return found if param.callback is None else param.callback(ctx, param, found)


class _Lean:
    """A command that loads little, and whose help shows no type for flags and one value's type for several values."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            # Older versions of Typer have no descriptors, and no use for pydantic.
            if hasattr(param, "type_descriptor"):
                param.process_value = partial(_process_value, param)
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.nargs == -1:
                param.display_type = lambda _: "<str>"
        return params


class _Command(_Lean, TyperCommand):
    """A command whose usage names the arguments as users type them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class _LazyGroup(_Lean, TyperGroup):
    """The commands as `--help` lists them; the one on the command line is imported."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        if args[0] in _MOVED:
            raise ConfigError(f"`roost {args[0]}` is now `roost {_MOVED[args[0]]}`")
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed and load_command(str(name)), rest


app: typer.Typer = typer.Typer(
    name="roost",
    cls=_LazyGroup,
    help="Say which worker process sits on which hardware, and see it before you pay for it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _entries in _COMMANDS.items():
    for _name, (_summary, _example) in _entries.items():
        app.command(_name, help=_summary, rich_help_panel=_panel)(lambda: None)


def load_command(name: str) -> Any:
    """Import a command."""
    summary, example = next(entries[name] for entries in _COMMANDS.values() if name in entries)
    alone = typer.Typer(add_completion=False)
    epilog = f"For example: roost {name} {example}" if example else None
    function = getattr(import_module(f"roost.cli.commands.{name}"), name)
    alone.command(name, cls=_Command, help=summary, epilog=epilog)(function)
    return typer.main.get_command(alone)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def _spelt_out(arguments: list[str]) -> list[str]:
    """Return the arguments with `version` and `help CMD` as the flags that they stand for.

    >>> _spelt_out(["help", "plan"]), _spelt_out(["help"]), _spelt_out(["version"])
    (['plan', '--help'], ['--help'], ['--version'])
    """
    if arguments[:1] == ["version"]:
        return ["--version", *arguments[1:]]
    return [*arguments[1:2], "--help"] if arguments[:1] == ["help"] else arguments


def main() -> NoReturn:
    """Run the command line."""
    if sys.stdout is None:
        # Closed, as by `>&-`.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as this process lives
    arguments, code = sys.argv[1:], 0
    try:
        complete_in_bash(app)
        code = int(app(args=_spelt_out(arguments), prog_name="roost", standalone_mode=False) or 0)
    except RoostError as error:
        tell_error(error, as_data=wants_json(arguments))
        code = 3 if isinstance(error, ClusterError) else 2
    except _UsageError as error:
        if not arguments:
            # It is the help, which is what someone who types only `roost` wants.
            error.show()
            code = int(error.exit_code)
        else:
            path = getattr(error.ctx, "command_path", "roost")
            message = plain_words(error.format_message()).removesuffix(".")
            tell_error(ConfigError(f"{path}: {message}", hint=f"see {path} --help"), as_data=wants_json(arguments))
            code = 2
    except typer.Abort:
        print("aborted", file=sys.stderr)
        code = 1
    except Exception as error:
        if report := user_report(error):
            print(report, end="", file=sys.stderr)
            code = 1
        elif isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
            what, how = missing
            tell_error(ConfigError(f"roost {arguments[0]} {what}", hint=how), as_data=wants_json(arguments))
            code = 2
        elif isinstance(error, OSError):
            # A full disk behind `> FILE`.
            print(f"the answer could not be written: {error.strerror or error}", file=sys.stderr)
            drop_output()
            code = 2
        else:
            raise
    sys.exit(code)
