"""`roost channels`: the channels of live jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli.options import TIMEOUT_SECONDS, Address, TextForm, Timeout
from roost.cli.terminal import print_answer
from roost.cli.text.channels import channels_text
from roost.cli.visit import visit_channels


def channels(
    form: TextForm = "text",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the routes too: who comes through shared memory or a network.")
    ] = False,
    address: Address = None,
    timeout: Timeout = TIMEOUT_SECONDS,
) -> None:
    found = visit_channels(address, timeout)
    print_answer(form, [item.to_dict() for item in found], lambda: channels_text(found, verbose=verbose))
