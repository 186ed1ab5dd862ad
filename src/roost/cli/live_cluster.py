"""Questions of commands to a live cluster, in a child process with a deadline: Ray's own calls may hang for minutes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from roost.cli.limits import SPARE_SECONDS
from roost.errors import ClusterError, RoostError
from roost.machine.child import Child, Say, answer, last_line

STATUS = "roost.runtime.status"


def ask(function: str, timeout: float, classes: str = "", **arguments: Any) -> Any:
    """Call a function, by its module and name, in a child process; each node has `timeout` seconds to answer.

    `classes` is the module of the answer's classes, if that is another one.
    """
    module, _, name = function.rpartition(".")
    answers: list[Any] = []

    def hear(said: Any) -> bool:
        if said is not None:
            answers.append(said)
        return said is not None

    task = {"module": module, "function": name, "arguments": {**arguments, "timeout": timeout}}
    with Child(__name__, task, hear) as child:
        # The answer is made of its classes. It loads Ray, which the child does at the same time.
        import_module(classes or module)
        is_late = not child.wait(timeout + SPARE_SECONDS)
    if answers and isinstance(answers[0], RoostError):
        raise answers[0]
    if answers:
        return answers[0]
    last = last_line(child.last_words)
    what = f"did not answer in {timeout + SPARE_SECONDS:.0f} s" if is_late else "could not be asked"
    raise ClusterError(
        f"the Ray cluster {what}{f': {last}' if last else ''}",
        hint="Ray's head may hang, or have died just now: roost doctor says more",
    )


def work(module: str, function: str, arguments: dict[str, Any], say: Say) -> None:
    """Answer with what the function returns, or with the error that it raises."""
    call = getattr(import_module(module), function)
    say(None)
    try:
        say(call(**arguments))
    except RoostError as error:
        say(error)


if __name__ == "__main__":
    answer(work)
