"""The workers and groups of a job, as plain state: no Ray, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from roost.errors import ClusterError, NameTaken
from roost.runtime.process.identity import WorkerIdentity
from roost.text import join_words, plural

if TYPE_CHECKING:
    from roost.runtime.process.spec import Report


class WorkerState(StrEnum):
    """How far a worker is."""

    REQUESTED = "requested"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One worker: its name, its place, its state."""

    address: str
    """The worker's name, unique in the job."""
    node_rank: int
    rank: int = 0
    group: str = ""
    accelerators: tuple[int, ...] = ()
    """The local ranks of its accelerators."""
    state: WorkerState = WorkerState.REQUESTED
    since: float = 0.0
    """When it entered this state, in seconds since 1970."""
    pid: int | None = None
    log: str = ""
    """Its log on its own node, if that is not the run's folder."""
    instance: str = ""
    """Ray's id of the actor that is ready: an actor of this name with another id is not, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group that was launched: enough to call it from another process."""

    name: str
    identities: tuple[WorkerIdentity, ...]
    methods: tuple[tuple[str, str], ...]
    """The methods that can be called, and the kind of each."""
    launch: str = ""
    """Tells this launch from another one under the same name."""
    owner: str | None = None
    """The process that launched it, if it can end before the job does."""
    restarts_left: tuple[int, ...] = ()
    """By rank: how often a dead worker will still be restarted in its place."""


class RollCall:
    """Which of the known processes have died: only one that was seen alive can be missing.

    >>> roll = RollCall()
    >>> roll.missing({"a", "b"}, alive={"a"}), roll.missing({"a", "b"}, alive={"b"})
    (set(), {'a'})
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def has_seen(self, name: str) -> bool:
        """Whether a process was seen alive, so that its death would be noticed."""
        return name in self._seen

    def expect(self, names: Iterable[str]) -> None:
        """Count these as seen alive."""
        self._seen.update(names)

    def missing(self, known: set[str], alive: set[str]) -> set[str]:
        """Return the names in `known` that were alive once and no longer are; `known` was taken before `alive`."""
        self._seen |= alive & known
        gone = (self._seen & known) - alive
        self._seen -= gone
        return gone


class WorkerLedger:
    """Every worker of the job by its address."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerRecord] = {}
        # A worker may report before the registration by its launcher arrives.
        self._ready_early: dict[str, int | None] = {}
        self._groups: dict[str, GroupRecord] = {}

    def register(self, workers: Iterable[WorkerRecord], now: float, *, are_actors: bool = False) -> None:
        """Add workers, all or none; a dead one may be registered again.

        Ray guarantees that names of actors are unique: an earlier actor of that name is dead, noticed or not.
        """
        new = {worker.address: replace(worker, since=worker.since or now) for worker in workers}
        living = set() if are_actors else self.living
        taken = [address for address in new if address in living]
        if taken:
            count = plural(len(taken), "worker is", "workers are")
            raise NameTaken(
                f"{count} registered under that name already: {join_words(taken)}",
                hint="names are unique in a job: close() the group that has it, or choose another",
            )
        self._workers |= new
        early = {address: self._ready_early.pop(address) for address in new if address in self._ready_early}
        self.update(WorkerState.READY, early, now)

    def update(self, state: WorkerState, pids: Mapping[str, int | None], now: float) -> list[str]:
        """Put workers into a state, with their process if it is known; return the workers that are new in it."""
        changed = []
        for address, pid in pids.items():
            worker = self._workers.get(address)
            if worker is None and state is WorkerState.READY:
                self._ready_early[address] = pid
            # The dead stay dead: a report of a worker may arrive after its end.
            if worker is None or worker.state in (state, WorkerState.DEAD):
                continue
            self._workers[address] = replace(worker, state=state, since=now, pid=pid if pid is not None else worker.pid)
            changed.append(address)
        return changed

    def add_group(self, group: GroupRecord, started: Mapping[str, Report], now: float) -> None:
        """Add a group that is ready, or whose workers were restarted, with their processes."""
        self._groups[group.name] = group
        self.update(WorkerState.READY, {address: item.pid for address, item in started.items()}, now)
        for address, item in started.items():
            if address in self._workers:
                log = "" if item.log.is_shared else item.log.path
                self._workers[address] = replace(self._workers[address], log=log, instance=item.instance)

    def remove_group(self, name: str) -> None:
        """Remove a group that was closed: its workers have ended."""
        self._groups.pop(name, None)
        for address, worker in self._workers.items():
            if worker.group == name and worker.state is not WorkerState.DEAD:
                self._workers[address] = replace(worker, state=WorkerState.DEAD)

    def get_group(self, name: str) -> GroupRecord:
        """Return a group by its name."""
        found = self._groups.get(name)
        if found is None:
            there = join_words([repr(item) for item in self._groups]) or "none"
            raise ClusterError(f"the job has no group {name!r}", hint=f"it has {there}")
        return found

    def get_groups(self) -> list[GroupRecord]:
        """Return all groups, in the order in which they were launched."""
        return list(self._groups.values())

    def will_not_come(self, address: str) -> bool:
        """Whether a worker is dead and will not be restarted; one that is not registered may still be launched.

        What a worker starts ends with it.
        """
        worker = self._workers.get(address)
        if worker is None:
            parent = address.rpartition(":")[0]
            return bool(parent) and self.will_not_come(parent)
        if worker.state is not WorkerState.DEAD:
            return False
        group = self._groups.get(worker.group)
        return group is None or not group.restarts_left or not group.restarts_left[worker.rank]

    @property
    def living(self) -> set[str]:
        """The addresses of the workers that are not dead."""
        return {item.address for item in self._workers.values() if item.state is not WorkerState.DEAD}

    def get(self, addresses: Iterable[str] | None = None) -> list[WorkerRecord]:
        """Return the records of these workers in this order, or of all."""
        if addresses is None:
            return list(self._workers.values())
        wanted = list(addresses)
        if unknown := [address for address in wanted if address not in self._workers]:
            raise ClusterError(f"no worker is registered as {join_words(unknown, last='or')}")
        return [self._workers[address] for address in wanted]
