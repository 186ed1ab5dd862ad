"""A manager of a job: one class, whose state lives in a named actor on node 0 and whose calls work from any process.

    proxy = WorkerManager.get_proxy()
    proxy.get_workers()

A method marked `@served` is written once, as a coroutine that runs in the actor. Called on a proxy it is an ordinary
function: it waits with a deadline, raises the error that the manager raised, and raises `ManagerDied` if the manager is
gone.

Ray restarts a manager whose process dies. What it knew comes back from another manager of the job, to which it sends a
copy of its state after each change; calls wait meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import pickle
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, cast

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from roost.deadline import Deadline
from roost.errors import ClusterError, ManagerDied, RoostError
from roost.machine.processes import die_with_parent
from roost.runtime.connect.calls import check_not_fork, get, on_node
from roost.runtime.connect.head import Head, check_not_lost, within
from roost.runtime.limits import (
    ASK_SECONDS,
    CALL_SECONDS,
    COPIES_SECONDS,
    DEATHS_EVERY_SECONDS,
    MANAGER_RETRY_SECONDS,
    RESTORE_SECONDS,
)
from roost.runtime.managers.ledgers.workers import RollCall

_MAX_RESTARTS = 100
# A copy that took a millisecond to make is followed by the next one after ten: a large state costs little.
_SAVE_PAUSE = 10
_READERS = ("get_", "count_", "ask_")
"""How the names of calls begin that change nothing."""

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


def served(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Answer]],
) -> Callable[Concatenate[Any, Parameters], Answer]:
    """Run a coroutine in the manager's actor, whichever process calls it; the caller waits for the answer."""

    def call(self: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        answer: Answer = self._call(method.__name__, args, kwargs)
        return answer

    call.served = method  # type: ignore[attr-defined]
    return cast(Callable[Concatenate[Any, Parameters], Answer], functools.wraps(method)(call))


class Manager:
    """A proxy to one of the job's managers; inside the actor, the manager itself."""

    NAME: ClassVar[str]
    STATE: ClassVar[tuple[str, ...]]
    """The attributes of the actor that make up what it knows."""
    KEEPER: ClassVar[str]
    """The manager that keeps a copy of it."""
    WARDS: ClassVar[tuple[str, ...]] = ()
    """The managers that this one keeps copies of."""

    def __init__(self, handle: ActorHandle[Any], namespace: str) -> None:
        self.handle: ActorHandle[Any] = handle
        self._namespace = namespace
        self._seconds = CALL_SECONDS
        self._is_rest = False
        """Whether that is what a caller's deadline has left."""

    @classmethod
    def start(cls, namespace: str, node: str, *arguments: Any) -> Self:
        """Start the actor on a node (by Ray's id); raises ValueError where the name is in use."""
        body = {name: _kept(member.served) for name, member in vars(cls).items() if hasattr(member, "served")}
        remote: Any = ray.remote(type(f"{cls.NAME}Actor", (cls,), {**body, "__init__": _begin}))
        handle = remote.options(
            name=cls.NAME,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=10_000,
            max_restarts=_MAX_RESTARTS,
            scheduling_strategy=on_node(node),
        ).remote(*arguments)
        return cls(handle, namespace)

    @classmethod
    def get_proxy(cls, namespace: str | None = None) -> Self:
        """Return the proxy to this manager, by default the one of this process's job."""
        check_not_fork()
        if not ray.is_initialized():
            raise ClusterError(f"there is no {cls.NAME}: this process has no Cluster", hint="make one: Cluster()")
        found = namespace or ray.get_runtime_context().namespace
        find = functools.partial(ray.get_actor, cls.NAME, namespace=found)
        try:
            # While a worker unpickles an argument, Ray answers no other thread of it.
            return cls(find() if Head.current is None else within(ASK_SECONDS, find, "find an actor"), found)
        except ValueError:
            raise ManagerDied(
                f"there is no {cls.NAME} in namespace {found!r}",
                hint="the job has ended, or its manager died: `roost status` shows the jobs that are running",
            ) from None

    def until(self, deadline: Deadline) -> Self:
        """Return the same proxy, whose calls end at a deadline, if that is earlier than they would end anyway."""
        left = max(0.1, deadline.left)
        proxy = self.within(min(self._seconds, left))
        proxy._is_rest = self._is_rest or left < self._seconds
        return proxy

    def within(self, seconds: float) -> Self:
        """Return the same proxy with another deadline for its calls."""
        proxy = copy.copy(self)
        proxy._seconds = seconds
        return proxy

    def died(self, error: RayActorError) -> ManagerDied:
        """Make the error that says that this manager is gone."""
        why = " ".join(str(error).split())
        return ManagerDied(
            f"the {self.NAME} of {self._namespace!r} is gone: {why[:500]}",
            hint="what it knew is lost: close the Cluster and make a new one",
        )

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_not_fork()
        deadline = Deadline.after(self._seconds)
        while True:
            check_not_lost()
            left = deadline.left
            try:
                return get(getattr(self.handle, method).remote(*args, **kwargs), left)
            except AttributeError:
                raise ClusterError(
                    f"the actor {self.NAME!r} of {self._namespace!r} is not a manager of Roost"
                ) from None
            except RayTaskError as error:
                if isinstance(error.cause, RoostError):
                    raise error.cause from None
                raise
            except ActorUnavailableError as error:
                # It is being restarted, and will have forgotten a call that had begun.
                if not left:
                    raise self.died(error) from None
                time.sleep(min(MANAGER_RETRY_SECONDS, left))
            except RayActorError as error:
                raise self.died(error) from None
            except GetTimeoutError:
                rest = ", which its caller had left" if self._is_rest else ""
                raise ClusterError(
                    f"the {self.NAME} of {self._namespace!r} did not answer {method!r} in "
                    f"{round(self._seconds, 1):g} s{rest}"
                ) from None

    # What follows runs in the actor.

    _copies: dict[str, bytes]
    _saving: asyncio.Task[None] | None
    _is_changed: bool
    _pause: float
    _keeper: ActorHandle[Any] | None
    _restoring: asyncio.Lock
    _is_restored: bool
    _roll: RollCall
    _watching: asyncio.Task[None] | None

    def _begin(self, *arguments: Any) -> None:
        """Set up the state of the actor."""
        raise NotImplementedError

    def _known(self) -> set[str]:
        """Return the names of the actors and drivers whose death matters."""
        return set()

    def _bury(self, missing: set[str]) -> None:
        """End what some of them had, which have died."""

    async def until_death(self) -> None:
        """Never return: the owner sees the actor die by this call."""
        await self.until_restored()
        await asyncio.Event().wait()

    async def keep(self, name: str, state: bytes) -> None:
        """Keep the state of another manager."""
        self._copies[name] = state

    async def get_copy(self, name: str) -> bytes | None:
        """Return the state of another manager."""
        return self._copies.get(name)

    async def save_again(self) -> None:
        """Send a copy of the state to a keeper that has lost it."""
        self._save_soon()
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def until_restored(self) -> None:
        """Get the state back, in a process that Ray restarted, and the copies for others."""
        async with self._restoring:
            if not self._is_restored:
                # A keeper that is gone too has nothing to give: Ray restarted both, and the job starts from nothing.
                with contextlib.suppress(ValueError, RayActorError, TimeoutError):
                    keeper = ray.get_actor(self.KEEPER)
                    state: bytes | None = await asyncio.wait_for(keeper.get_copy.remote(self.NAME), RESTORE_SECONDS)
                    if state is not None:
                        vars(self).update(pickle.loads(state))  # noqa: S301 - from a manager of this job
                        if known := self._known():
                            self._roll.expect(known)
                            self._watch_soon()
                self._is_restored = True
                for name in self.WARDS:
                    with contextlib.suppress(ValueError, RayActorError, TimeoutError):
                        await asyncio.wait_for(ray.get_actor(name).save_again.remote(), COPIES_SECONDS)

    def _save_soon(self) -> None:
        self._is_changed = True
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())

    async def _save(self) -> None:
        """Send copies of the state to the keeper until there is no change that it does not have."""
        while self._is_changed:
            await asyncio.sleep(self._pause)
            began, self._is_changed = time.perf_counter(), False
            known = {name: getattr(self, name) for name in self.STATE}
            state = cloudpickle.dumps(known)  # type: ignore[no-untyped-call]
            self._pause = _SAVE_PAUSE * (time.perf_counter() - began)
            with contextlib.suppress(ValueError, RayActorError, TimeoutError):
                # Kept, since looking it up asks the head; Ray restarts it under the same handle.
                self._keeper = self._keeper or ray.get_actor(self.KEEPER)
                await asyncio.wait_for(self._keeper.keep.remote(self.NAME, state), RESTORE_SECONDS)

    def _watch_soon(self) -> None:
        """Begin to look who has died, unless that has begun; Python keeps no reference to a task that runs."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        from roost.runtime.nodes.ray_state import living  # only the actor needs it

        while True:
            # Ray may be silent for a while: processes that died meanwhile are found afterwards.
            with contextlib.suppress(Exception):
                # In this order, so that one that registers in between is not taken for missing.
                before = self._known()
                missing = self._roll.missing(before, await asyncio.to_thread(living, before))
                if missing:
                    self._bury(missing)
                    self._save_soon()
            await asyncio.sleep(DEATHS_EVERY_SECONDS)


def _begin(self: Manager, *arguments: Any) -> None:
    die_with_parent()
    self._copies = {}
    self._saving = None
    self._is_changed = False
    self._pause = 0.0
    self._keeper = None
    self._restoring = asyncio.Lock()
    self._roll = RollCall()
    self._watching = None
    with warnings.catch_warnings():
        # Of a property of Ray's that this one of Ray's asks.
        warnings.simplefilter("ignore", DeprecationWarning)
        self._is_restored = not ray.get_runtime_context().was_current_actor_reconstructed
    self._begin(*arguments)


def _kept(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make a call of the actor wait until its state is back, and let a copy be made of what it changed."""

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_restored:
            await self.until_restored()
        try:
            return await method(self, *args, **kwargs)
        finally:
            if not method.__name__.startswith(_READERS):
                self._save_soon()

    return call
