"""A manager of a job: one class, whose state lives in a named actor on node 0 and whose calls work from any process.

    proxy = WorkerManager.get_proxy()
    proxy.get_workers()

A method marked `@served` is written once, as a coroutine that runs in the actor. Called on a proxy it is an ordinary
function: it waits with a deadline, raises the error that the manager raised, and raises `ManagerDied` if the manager is
gone.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roost.errors import ClusterError, ManagerDied, RoostError
from roost.machine.processes import die_with_parent
from roost.runtime.managers.ledgers.workers import RollCall
from roost.runtime.nodes.ray_state import living

CALL_SECONDS = 60.0
_WATCH_SECONDS = 0.5

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

    def __init__(self, handle: ActorHandle[Any], namespace: str) -> None:
        self.handle: ActorHandle[Any] = handle
        self._namespace = namespace
        self._seconds = CALL_SECONDS

    @classmethod
    def start(cls, namespace: str, node: str, *arguments: Any) -> Self:
        """Start the actor on a node (by Ray's id); raises ValueError where the name is in use."""
        body = {name: member.served for name, member in vars(cls).items() if hasattr(member, "served")}
        remote: Any = ray.remote(type(f"{cls.NAME}Actor", (cls,), {**body, "__init__": _begin}))
        handle = remote.options(
            name=cls.NAME,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=10_000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote(*arguments)
        return cls(handle, namespace)

    @classmethod
    def get_proxy(cls, namespace: str | None = None) -> Self:
        """Return the proxy to this manager, by default the one of this process's job."""
        if not ray.is_initialized():
            raise ClusterError(f"there is no {cls.NAME}: this process has no Cluster", hint="make one: Cluster()")
        found = namespace or ray.get_runtime_context().namespace
        try:
            return cls(ray.get_actor(cls.NAME, namespace=found), found)
        except ValueError:
            raise ManagerDied(
                f"there is no {cls.NAME} in namespace {found!r}",
                hint="the job has ended, or its manager died: `roost status` shows the jobs that are running",
            ) from None

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
        try:
            return ray.get(getattr(self.handle, method).remote(*args, **kwargs), timeout=self._seconds)
        except AttributeError:
            raise ClusterError(f"the actor {self.NAME!r} of {self._namespace!r} is not a manager of Roost") from None
        except RayTaskError as error:
            if isinstance(error.cause, RoostError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise self.died(error) from None
        except GetTimeoutError:
            raise ClusterError(
                f"the {self.NAME} of {self._namespace!r} did not answer {method!r} in {self._seconds:.0f} s"
            ) from None

    # What follows runs in the actor.

    def _begin(self, *arguments: Any) -> None:
        """Set up the state of the actor."""
        raise NotImplementedError

    async def until_death(self) -> None:
        """Never return: the owner sees the actor die by this call."""
        await asyncio.Event().wait()

    async def _watch(self, roll: RollCall, known: Callable[[], set[str]], bury: Callable[[set[str]], object]) -> None:
        """Tell `bury` which of the actors and drivers that `known` names have died, while the job runs."""
        while True:
            # In this order, so that one that registers in between is not taken for missing.
            before = known()
            missing = roll.missing(before, await asyncio.to_thread(living, before))
            if missing:
                bury(missing)
            await asyncio.sleep(_WATCH_SECONDS)


def _begin(self: Manager, *arguments: Any) -> None:
    die_with_parent()
    self._begin(*arguments)
