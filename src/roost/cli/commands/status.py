"""`roost status`: the jobs on the live cluster, and who holds which accelerator."""

from __future__ import annotations

from roost.cli.options import Address, TextForm
from roost.cli.terminal import print_answer
from roost.cli.text.status import status_text
from roost.runtime.status import get_status


def status(form: TextForm = "text", address: Address = None) -> None:
    found = get_status(address)
    print_answer(form, found.to_dict(), lambda: status_text(found))
