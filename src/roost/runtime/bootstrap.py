"""An actor whose environment is in force before the user's class is loaded in its process.

Ray can set an actor's environment with a `runtime_env`, which takes nearly twice as long for every actor and shows
the values in its state API. Here the actor is a class of ours with the same methods, which carries the user's class,
pickled: it sets the environment, and only then unpickles the class and makes the object.

Some variables are read before any Python code runs. Those, and another interpreter, do need a `runtime_env`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from roost.runtime.processes import die_with_parent

_EARLY = ("LD_PRELOAD", "LD_LIBRARY_PATH")
_EARLY_STARTS = ("PYTHON", "MALLOC_")
WORKER_MANAGER = "WorkerManager"


def split_environment(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Those that can be set in the process, and those that must be there when it begins.

    >>> split_environment({"RANK": "0", "PYTHONPATH": "/opt"})
    ({'RANK': '0'}, {'PYTHONPATH': '/opt'})
    """
    early = {name: value for name, value in variables.items() if name in _EARLY or name.startswith(_EARLY_STARTS)}
    return {name: value for name, value in variables.items() if name not in early}, early


def pack(cls: type, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[bytes, list[ray.ObjectRef[Any]]]:
    """The class and its arguments as bytes, so that nothing of them is loaded before its time.

    References among them travel beside the bytes, where Ray sees them and keeps what they stand for.
    """
    refs: list[ray.ObjectRef[Any]] = []
    out = io.BytesIO()
    packer: Any = _Packer(out, refs)
    packer.dump((cls, tuple(arguments), dict(keywords)))
    return out.getvalue(), refs


class _Packer(cloudpickle.CloudPickler):
    def __init__(self, out: io.BytesIO, refs: list[ray.ObjectRef[Any]]) -> None:
        super().__init__(out)  # type: ignore[no-untyped-call]
        self._refs = refs

    def persistent_id(self, thing: object) -> int | None:
        if not isinstance(thing, ray.ObjectRef):
            return None
        self._refs.append(thing)
        return len(self._refs) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, refs: list[ray.ObjectRef[Any]]) -> None:
        super().__init__(io.BytesIO(data))
        self._refs = refs

    def persistent_load(self, place: int) -> ray.ObjectRef[Any]:
        return self._refs[place]


def make_shell(cls: type) -> type:
    """A class with the public methods of `cls` that makes and calls an object of `cls` in its own process."""
    body: dict[str, Any] = {"__init__": _start, "__doc__": cls.__doc__, "__module__": __name__}
    for name, member in inspect.getmembers(cls, callable):
        if not name.startswith("__") or name == "__call__":
            body[name] = _forward(name, member)
    return type(cls.__name__, (), body)


def _start(self: Any, data: bytes, refs: list[ray.ObjectRef[Any]], variables: dict[str, str]) -> None:
    # The worker's parent is its raylet: by itself it would notice the raylet's end within a second.
    die_with_parent()
    os.environ.update(variables)
    cls, arguments, keywords = _Unpacker(data, refs).load()

    def fetch(value: Any) -> Any:
        # As Ray does it: an argument that is a reference is fetched, one inside an argument is not.
        return ray.get(value) if isinstance(value, ray.ObjectRef) else value

    self._roost_object = cls(
        *(fetch(value) for value in arguments), **{name: fetch(value) for name, value in keywords.items()}
    )
    _report_ready()


def _forward(name: str, member: Any) -> Callable[..., Any]:
    """A method that calls the object's, of the same kind: plain, generator, or either of them async."""
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
            # Ray sends things into a generator, which the user's own `yield from` might not take.
            for item in getattr(self._roost_object, name)(*args, **kwargs):  # noqa: UP028
                yield item

    else:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._roost_object, name)(*args, **kwargs)

    forward.__name__ = name
    forward.__qualname__ = name
    # What @ray.method set, such as num_returns, and nothing that would pull the user's module in.
    for key, value in vars(member).items() if hasattr(member, "__dict__") else ():
        if key.startswith("__ray_") and isinstance(value, int | str | bool | float | None):
            setattr(forward, key, value)
    return forward


def _report_ready() -> None:
    """Let the worker manager know, without waiting; a job whose manager is gone is told so elsewhere."""
    context = ray.get_runtime_context()
    with contextlib.suppress(ValueError):
        manager = ray.get_actor(WORKER_MANAGER, namespace=context.namespace)
        manager.set_ready.remote({context.get_actor_name(): os.getpid()})
