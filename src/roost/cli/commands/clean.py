"""`roost clean`: end what jobs of this user left behind when they died, after showing it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from roost.cli.options import Address, TextForm
from roost.cli.out import tell
from roost.cli.terminal import print_answer
from roost.errors import ClusterError
from roost.runtime.leftovers import end_remnants, find_remnants
from roost.text import plural


def clean(
    form: TextForm = "text",
    address: Address = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="End them without asking.")] = False,
) -> None:
    found, why_no_cluster = find_remnants(address)
    if why_no_cluster:
        tell(f"only this machine was searched: {why_no_cluster}")
    listed = "\n".join(map(str, found)) or "nothing is left over"
    print_answer(form, [item.to_dict() for item in found], lambda: Text(listed))
    if not found:
        return
    number = plural(len(found), "thing")
    if not yes and not (form == "text" and sys.stdin.isatty() and typer.confirm(f"end {number}?", err=True)):
        tell("nothing was ended: --yes ends them")
        raise typer.Exit(1)
    left = end_remnants(found, address)
    if left:
        names = "\n".join(f"  {item}" for item in left)
        raise ClusterError(f"{len(left)} of {number} could not be ended:\n{names}")
    tell(f"ended {number}")
