"""Running several functions at the same time, within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from roost.deadline import Deadline
from roost.doctor.facts import Unknown
from roost.doctor.limits import SAY_SECONDS
from roost.errors import RoostError
from roost.text import error_text


def gather(
    functions: Mapping[str, Callable[[], Any]], seconds: float, waiting: Callable[[list[str]], None] = lambda _: None
) -> dict[str, Any]:
    """Run functions at the same time; a function that raises, or is not back in time, gives `Unknown`.

    `waiting` is called every few seconds with the names of the functions that are not back.
    """
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        try:
            found[name] = functions[name]()
        except RoostError as error:
            found[name] = Unknown(why=error.problems[0].message, do=error.problems[0].hint)
        except Exception as error:
            found[name] = Unknown(why=error_text(error))

    # Not a pool: Python waits for its threads at exit, and a thread that hangs in a dead file system never ends.
    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in functions}
    for thread in threads.values():
        thread.start()
    deadline, say = Deadline.after(seconds), Deadline.after(SAY_SECONDS)
    while not deadline.is_over and (out := [name for name, thread in threads.items() if thread.is_alive()]):
        if say.is_over:
            say = Deadline.after(SAY_SECONDS)
            waiting(out)
        threads[out[0]].join(min(deadline, say).left)
    late = Unknown(why=f"no answer in {seconds:g} s")
    return {name: found.get(name, late) for name in functions}
