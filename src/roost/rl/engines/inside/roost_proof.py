"""How a client learns that a server knows a secret, before the server is asked or told anything.

The client sends a number that it has just drawn, and the server answers with a code that only the secret makes of it.
A server that also sends a number of its own gets such a code instead of the secret. It is the connection that is
proven: on a new one both prove again.

It also runs inside inference servers, whose Python need not have Roost: so it imports nothing but the standard library.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from typing import Any

PATH = "/roost/proof"
NONCE = "X-Roost-Nonce"
SECRET = "ROOST_ENGINE_SECRET"  # noqa: S105 - the name of the variable
MOST_BYTES = 4096
"""The longest answer that can be a proof."""
CLOSES = "it closes connections after the proof that it is the job's: it has to keep them, as HTTP/1.1 does"
"""Why a server cannot be asked that proves itself and then ends the connection."""

_NONCE = re.compile("[0-9a-f]{32,128}")


def new_nonce() -> str:
    """Draw a number that is used once."""
    return secrets.token_hex(16)


def code_of(secret: str, who: str, *nonces: str) -> str:
    """Return the code that `server` or `client` proves itself with."""
    return hmac.digest(secret.encode(), " ".join(("roost", who, *nonces)).encode(), "sha256").hex()


def prove(secret: str, nonce: str, own: str = "") -> dict[str, str]:
    """Return what a server answers to a client's nonce, as JSON; `own` is its nonce for this connection, if it has one.

    ValueError if that is no nonce.
    """
    if not _NONCE.fullmatch(nonce):
        raise ValueError(f"{NONCE} is 32 to 128 hexadecimal digits")
    return {"proof": code_of(secret, "server", nonce, own), "nonce": own}


def check_proof(secret: str, nonce: str, status: int, body: bytes) -> str:
    """Return what a client may show as Authorization on this connection; ValueError if the server proved nothing."""
    try:
        answer = json.loads(body) if status == 200 else {}
        proof, own = str(answer["proof"]), str(answer["nonce"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"it did not prove that it is the job's: it answered {status} to GET {PATH}") from None
    if not hmac.compare_digest(proof.encode(), code_of(secret, "server", nonce, own).encode()):
        raise ValueError("it did not prove that it is the job's: its proof is of another secret")
    return f"Roost {code_of(secret, 'client', own, nonce)}" if own else f"Bearer {secret}"


class Proof:
    """ASGI middleware that proves the server's secret to a client that asks."""

    is_locked = False
    """Whether no request without the secret is answered."""

    def __init__(self, app: Any, secret: str = "") -> None:
        self._app = app
        self._secret = secret or os.environ[SECRET]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a client that asks for the proof, and pass other requests on."""
        kind, headers = scope["type"], dict(scope.get("headers", ()))
        is_member = hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._secret}".encode())
        if kind == "http" and scope["path"] == PATH:
            try:
                await _answer(send, 200, prove(self._secret, headers.get(NONCE.lower().encode(), b"").decode()))
            except ValueError as error:
                await _answer(send, 400, {"error": {"message": str(error)}})
        elif not self.is_locked or kind == "lifespan" or (kind == "http" and is_member):
            await self._app(scope, receive, send)
        elif kind == "http":
            await _answer(send, 401, {"error": {"message": "the request lacks the secret"}})
        else:
            await send({"type": "websocket.close", "code": 1008})


class Lock(Proof):
    """A `Proof` that also answers no request without the secret: vLLM's own key protects some of its routes only."""

    is_locked = True


async def _answer(send: Any, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
