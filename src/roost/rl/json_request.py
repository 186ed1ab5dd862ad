"""Requests to a server of the job from code that may wait: JSON both ways, after its proof, and with a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any

from roost.deadline import Deadline
from roost.errors import CallTimedOut, ClusterError
from roost.rl.engines.inside import roost_proof

_MOST_TEXT = 2000
_PIECE = 1 << 16
_LEAST_WAIT = 0.001


def ask(
    url: str,
    path: str,
    body: Any = None,
    *,
    secret: str,
    timeout: float,
    who: str,
    headers: Mapping[str, str] | None = None,
    hint: str = "",
) -> Any:
    """Send a POST with a JSON body, or a GET without one, and return the JSON of the answer; {} if it has none.

    The server proves first that it knows the secret. CallTimedOut or ClusterError name `who`, and say what it answered.
    """
    deadline, nonce = Deadline.after(timeout), roost_proof.new_nonce()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)

    def exchange(
        method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request over the open connection; return the answer and all of its body."""
        line, content = connection.sock, bytearray()
        line.settimeout(max(_LEAST_WAIT, deadline.left))
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        # A server that sends a little now and then would otherwise never be late.
        while piece := answer.read1(_PIECE):
            content += piece
            line.settimeout(max(_LEAST_WAIT, deadline.left))
        # Without this the connection takes no further request.
        answer.close()
        return answer, bytes(content)

    try:
        with contextlib.closing(connection):
            connection.connect()
            # A new connection would have to prove itself again.
            connection.auto_open = 0
            answer, content = exchange("GET", roost_proof.PATH, None, {roost_proof.NONCE: nonce})
            try:
                shown = roost_proof.check_proof(secret, nonce, answer.status, content)
            except ValueError as error:
                raise ClusterError(f"{who} is not who listens at {url}: {error}", hint=hint) from None
            if connection.sock is None:
                raise ClusterError(f"{who} cannot be asked: {roost_proof.CLOSES}")
            sent = {"Authorization": shown, "Content-Type": "application/json", **(headers or {})}
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
            answer, content = exchange(method, path, data, sent)
        if 200 <= answer.status < 300:
            return json.loads(content) if content else {}
    except TimeoutError:
        raise CallTimedOut(f"{who} has not answered in {timeout:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"{who} cannot be reached: {error}", hint=hint) from None
    except ValueError as error:
        raise ClusterError(f"the answer of {who} is not JSON: {error}") from None
    kind = CallTimedOut if answer.status == http.HTTPStatus.GATEWAY_TIMEOUT else ClusterError
    raise kind(f"{who} answered {answer.status}: {read_error(content)}")


def read_error(content: bytes) -> str:
    """Return what an error says, with what it says of each engine, or else the whole answer."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(content)["error"]
        if isinstance(error, str):
            return error
        return "; ".join([error["message"], *(f"{one['url']}: {one['why']}" for one in error.get("engines", ()))])
    return content.decode(errors="replace")[:_MOST_TEXT]
