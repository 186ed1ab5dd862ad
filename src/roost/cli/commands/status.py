"""`roost status`: the jobs on the live cluster, and who holds which accelerator; or the channels of the jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.live_cluster import STATUS, ask
from roost.cli.options import Address, TextForm, Timeout
from roost.cli.terminal import print_answer
from roost.cli.text.status import channels_text, status_text
from roost.errors import ConfigError


def status(
    form: TextForm = "text",
    channels: Annotated[
        bool, typer.Option("--channels", help="Show the channels of the jobs: depth, rates, bytes and who waits.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="With --channels: who uses shared memory, and who a network."),
    ] = False,
    address: Address = None,
    timeout: Timeout = TIMEOUT_SECONDS,
) -> None:
    if channels:
        found = ask("roost.comm.channels.status.get_channels", timeout, address=address)
        print_answer(form, [item.to_dict() for item in found], lambda: channels_text(found, verbose=verbose))
    elif verbose:
        raise ConfigError("--verbose is for --channels", hint="roost status --channels --verbose shows the routes")
    else:
        seen = ask(f"{STATUS}.get_status", timeout, address=address)
        print_answer(form, seen.to_dict(), lambda: status_text(seen))
