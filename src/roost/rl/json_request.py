"""Requests to a server of the job from code that may wait: JSON both ways, with the secret and a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any

from roost.errors import CallTimedOut, ClusterError

_MOST_TEXT = 2000


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

    CallTimedOut or ClusterError name `who`, and say what it answered.
    """
    sent = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json", **(headers or {})}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        with contextlib.closing(connection):
            if body is None:
                connection.request("GET", path, headers=sent)
            else:
                connection.request("POST", path, json.dumps(body), sent)
            answer = connection.getresponse()
            content = answer.read()
        if 200 <= answer.status < 300:
            return json.loads(content) if content else {}
    except TimeoutError:
        raise CallTimedOut(f"{who} has not answered in {timeout:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"{who} cannot be reached: {error}", hint=hint) from None
    except ValueError as error:
        raise ClusterError(f"the answer of {who} is not JSON: {error}") from None
    kind = CallTimedOut if answer.status == http.HTTPStatus.GATEWAY_TIMEOUT else ClusterError
    raise kind(f"{who} answered {answer.status}: {content.decode(errors='replace')[:_MOST_TEXT]}")
