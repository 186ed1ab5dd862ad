"""The command line: parsing, exit codes, and the one place where a RoostError becomes text.

Exit codes: 0 all is well, 1 two plans differ, lint was told to be strict, doctor found a problem or the demo did not
learn, 2 a mistake by the user, 3 a failure of the world, such as no Ray cluster.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from roost import __version__
from roost.cli import clusters, demo, doctor, planning, running, runs, starting
from roost.cli.completion import complete_in_bash
from roost.cli.help import Command, Group, epilog
from roost.cli.out import drop_output
from roost.errors import ClusterError, RoostError

app: typer.Typer = typer.Typer(
    name="roost",
    cls=Group,
    help="Say which worker process sits on which hardware, and see it before you pay for it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PANELS = {
    "Start here": (demo.demo, starting.new, starting.schema),
    "Plan, with no cluster": (planning.plan, planning.diff, planning.where, planning.who, planning.lint),
    "Run": (running.run, running.logs, runs.runs, runs.show, runs.rerun),
    "Look at the cluster": (clusters.nodes, clusters.status, doctor.doctor, clusters.up, clusters.down),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _name = _command.__name__
        app.command(_name, cls=Command, epilog=epilog(_name), rich_help_panel=_panel)(_command)


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


def main() -> NoReturn:
    """Run the command line."""
    if sys.stdout is None:
        # Closed, as by `>&-`: nobody wants to see it.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as this process lives
    try:
        complete_in_bash(app)
        app()
    except ClusterError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    except RoostError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        from roost.cli.users_error import users_report

        report = users_report(error)
        if report is not None:
            print(report, end="", file=sys.stderr)
            sys.exit(1)
        if not isinstance(error, OSError):
            raise
        # A full disk behind `> FILE`.
        print(f"the answer could not be written: {error.strerror or error}", file=sys.stderr)
        drop_output()
        sys.exit(2)
    sys.exit(0)
