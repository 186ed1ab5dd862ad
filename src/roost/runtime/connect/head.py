"""Ray's head, as this process reaches it: the one place that decides whether it is there.

A network that fails for two seconds must not end a job, so a head counts as gone only after it has been silent for a
while. A head that accepts connections may still hang: `within` gives every call of Ray's a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from roost.errors import ClusterError
from roost.machine.ports import answers

BLIP_SECONDS = 5.0
"""A head that is silent for longer counts as gone, until it answers again."""
LOST_SECONDS = 20.0
"""A head that is silent for longer is given up: after 60 seconds Ray would end this process."""
_POLL_SECONDS = 0.1

Value = TypeVar("Value")


class Head:
    """Ray's head at an address. All threads of a process share what is known about it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_given_up = False
        """Whether this process disconnected from it because it was silent for too long."""
        self._silent_since: float | None = None

    @property
    def is_there(self) -> bool:
        """Whether it answered last time."""
        return self._silent_since is None

    @property
    def silent_seconds(self) -> float:
        """For how long it has not answered; 0 if it answered last time."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def answers(self) -> bool:
        """Return whether it answers now."""
        if answers(self.address):
            self._silent_since = None
            return True
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return False

    def wait(self) -> bool:
        """Wait until it answers; False once it has been silent for longer than a blip."""
        while not self.is_given_up and not self.answers():
            if self.silent_seconds > BLIP_SECONDS:
                return False
            time.sleep(_POLL_SECONDS)
        return not self.is_given_up

    def gone(self, doing: str = "") -> ClusterError:
        """Make the error that names it."""
        return ClusterError(
            f"Ray's head at {self.address} does not answer{doing}",
            hint="if it is only the network, try again; if the head has ended, so has every job on it",
        )


def within(seconds: float, call: Callable[[], Value], what: str) -> Value:
    """Make a call of Ray's that has no deadline of its own; ClusterError after `seconds`, and the call goes on."""
    answer: list[Value] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"roost-{what}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python 3.12 and later start no thread while the interpreter ends.
        return call()
    thread.join(max(0.0, seconds))
    if failure:
        raise failure[0]
    if not answer:
        raise ClusterError(
            f"Ray did not {what} in {seconds:.0f} s", hint="its head hangs or is overloaded: look at its machine"
        )
    return answer[0]
