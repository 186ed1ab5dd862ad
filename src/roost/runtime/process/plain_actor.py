"""An actor of any class, whose environment is set before the class is loaded in its process.

The actor is a generated class with the same methods that carries the user's class, pickled: it sets the environment,
and only then unpickles the class and constructs the object. Callers see an ordinary Ray actor. `actor.py` does the same
for the workers of a group, which know and report more.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import ray

from roost.machine.processes import die_with_parent
from roost.runtime.process.packing import Packed, make_object

WORKER_MANAGER = "WorkerManager"


def make_plain_actor_class(cls: type) -> type:
    """Make a class with the methods of `cls` that constructs and calls an object of `cls` in its own process."""
    body: dict[str, Any] = {"__init__": _start, "__doc__": cls.__doc__, "__module__": __name__}
    for name, member in inspect.getmembers(cls, callable):
        if not name.startswith("__") or name == "__call__":
            body[name] = _forward(name, member)
    return type(cls.__name__, (), body)


def _start(self: Any, packed: Packed, variables: dict[str, str]) -> None:
    # The parent is the raylet; Ray alone would take up to a second to notice that it ended.
    die_with_parent()
    os.environ.update(variables)
    self._roost_object = make_object(packed)
    context = ray.get_runtime_context()
    # Without waiting; a missing manager is reported elsewhere.
    with contextlib.suppress(ValueError):
        manager = ray.get_actor(WORKER_MANAGER, namespace=context.namespace)
        manager.set_ready.remote({context.get_actor_name(): os.getpid()})


def _forward(name: str, member: Any) -> Callable[..., Any]:
    """Make a method that calls the object's and is of the same kind: plain or generator, perhaps async."""
    forward: Callable[..., Any]
    if inspect.isasyncgenfunction(member):

        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            async for item in getattr(self._roost_object, name)(*args, **kwargs):
                yield item

    elif inspect.iscoroutinefunction(member):

        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self._roost_object, name)(*args, **kwargs)

    elif inspect.isgeneratorfunction(member):

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Ray sends values into a generator, which `yield from` would pass on to the user's.
            for item in getattr(self._roost_object, name)(*args, **kwargs):  # noqa: UP028
                yield item

    else:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._roost_object, name)(*args, **kwargs)

    forward.__name__ = forward.__qualname__ = name
    # Keep what @ray.method set, such as num_returns, and nothing that would pull in the user's module.
    for key, value in vars(member).items() if hasattr(member, "__dict__") else ():
        if key.startswith("__ray_") and isinstance(value, int | str | bool | float | None):
            setattr(forward, key, value)
    return forward
