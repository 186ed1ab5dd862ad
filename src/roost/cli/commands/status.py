"""`roost status`: the jobs on the live cluster, and who holds which accelerator."""

from __future__ import annotations

from roost.cli.options import TIMEOUT_SECONDS, Address, TextForm, Timeout
from roost.cli.terminal import print_answer
from roost.cli.text.status import status_text
from roost.cli.visit import visit_status


def status(form: TextForm = "text", address: Address = None, timeout: Timeout = TIMEOUT_SECONDS) -> None:
    found = visit_status(address, timeout)
    print_answer(form, found.to_dict(), lambda: status_text(found))
