"""A listening socket that strangers cannot fill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator

from roost.machine.strangers import Listener


class Echo(asyncio.Protocol):
    """Says `ok` to each line, and tells the listener of clients that say `secret`."""

    def __init__(self, listener: Listener, made: list) -> None:
        self.listener, self.made = listener, made

    def connection_made(self, transport):
        self.transport = transport
        self.made.append(transport)

    def data_received(self, data):
        if data == b"secret\n":
            self.listener.heard(self.transport.get_extra_info("peername"))
        self.transport.write(b"ok\n")


@contextlib.contextmanager
def serving(most: int) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, most=most, backlog=16)
    reports, made, ending = [], [], asyncio.Event()
    loop = asyncio.SelectorEventLoop()

    async def serve():
        loop.set_exception_handler(lambda _, context: reports.append(context))
        async with await loop.create_server(lambda: Echo(listener, made), sock=listener, backlog=16):
            await ending.wait()
            for transport in made:
                transport.abort()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield listener.getsockname()
        assert reports == []
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(60)
        listener.close()
        loop.close()


def connect(address, said=b""):
    made = socket.create_connection(address, timeout=60)
    made.sendall(said)
    return made


def answer(made) -> bytes:
    """What the server says; nothing if it has ended the connection."""
    with contextlib.suppress(ConnectionError):
        made.sendall(b"again\n")
        return made.recv(100)
    return b""


def test_the_oldest_silent_connection_makes_way_and_members_stay():
    with serving(most=4) as address, contextlib.ExitStack() as open_:
        member = open_.enter_context(connect(address, b"secret\n"))
        assert member.recv(100) == b"ok\n"
        silent = []
        for _ in range(30):
            silent.append(open_.enter_context(connect(address, b"x")))
            # Each is served before the next one comes: it has not said who it is.
            assert silent[-1].recv(100) == b"ok\n"
        assert [answer(made) for made in silent[-3:]] == [b"ok\n"] * 3
        assert {answer(made) for made in silent[:-3]} == {b""}
        assert answer(member) == b"ok\n"


def test_where_all_are_members_a_new_connection_is_refused():
    with serving(most=3) as address, contextlib.ExitStack() as open_:
        members = [open_.enter_context(connect(address, b"secret\n")) for _ in range(3)]
        assert [made.recv(100) for made in members] == [b"ok\n"] * 3
        late = open_.enter_context(connect(address))
        assert late.recv(100) == b""
        members.pop().close()
        assert [answer(made) for made in members] == [b"ok\n"] * 2
        again = open_.enter_context(connect(address, b"secret\n"))
        assert again.recv(100) in (b"ok\n", b"")


def test_a_process_without_descriptors_reports_nothing_and_serves_again():
    with serving(most=1000) as address, contextlib.ExitStack() as open_:
        member = open_.enter_context(connect(address, b"secret\n"))
        assert member.recv(100) == b"ok\n"
        client = open_.enter_context(socket.socket())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            client.settimeout(60)
            client.connect(address)
            assert client.recv(100) == b"", "it is refused at once"
            assert answer(member) == b"ok\n"
        finally:
            for number in taken:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with connect(address, b"x") as made:
            assert made.recv(100) == b"ok\n"
