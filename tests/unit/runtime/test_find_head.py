"""One question to Ray's head over plain sockets: what answers, what does not, and what is no head."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from roost.errors import ClusterError
from roost.runtime.connect.find_head import takes_token
from sockets import free_port

# As a server of gRPC refuses a call: settings, then one frame of headers.
REFUSAL = b"\0\0\0\4\0\0\0\0\0" + b"\0\0\x16\1\5\0\0\0\1\x88\0\x0bgrpc-status\x0216"


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve one connection after the other, and return the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_process_that_accepts_and_is_silent_is_told_from_one_that_is_not_there():
    def be_silent(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass

    with server(be_silent) as address, pytest.raises(ClusterError, match=f"{address} accepts connections and does not"):
        takes_token(address, "", 0.2)
    with pytest.raises(ClusterError, match=r"nothing answers at 127\.0\.0\.1:"):
        takes_token(f"127.0.0.1:{free_port()}", "", 5)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_what_speaks_another_language_is_not_a_head(said):
    def speak(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(said)

    with server(speak) as address, pytest.raises(ClusterError, match=f"what listens at {address} is not Ray's head"):
        takes_token(address, "", 30)


@pytest.mark.parametrize("size", [1, 126, 127, 128, 254, 255, 400, 5000])
def test_a_token_of_any_length_arrives_and_an_answer_in_pieces_is_read(size):
    token = "t" * size
    got: list[bytes] = []

    def refuse(connection: socket.socket) -> None:
        data = b""
        while not data.endswith(b"\0\0\5\0\1\0\0\0\1" + bytes(5)):
            data += connection.recv(65536)
        got.append(data)
        for byte in REFUSAL:
            connection.sendall(bytes([byte]))

    with server(refuse) as address:
        assert takes_token(address, token, 30) is False
    value = b"Bearer " + token.encode()
    before, found, _ = got[0].partition(value)
    assert found == value
    assert _length_at_end(before) == len(value)


def _length_at_end(data: bytes) -> int:
    """The length of the value that follows the name `authorization`, as HTTP/2 writes it."""
    first, *rest = data.rpartition(b"authorization")[2]
    return first + sum((byte & 127) << 7 * place for place, byte in enumerate(rest))
