"""Process groups of torch: who is missing."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from roost import CallTimedOut
from roost.comm.collectives import make_process_group


@pytest.mark.heavy
def test_a_first_member_that_does_not_come_is_named():
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = SimpleNamespace(address="127.0.0.1", port=taken.getsockname()[1])
    context = SimpleNamespace(
        worker_manager=SimpleNamespace(get_workers=lambda _: [SimpleNamespace(node_rank=0)]),
        collective_manager=SimpleNamespace(create_group=lambda *_: place),
    )
    with pytest.raises(CallTimedOut, match="actor:1 waits in a collective of 2 workers for actor:0"):
        make_process_group(context, "actor:1", "actor", [0, 1], "gloo", None, None, 0.1)
