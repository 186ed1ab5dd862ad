"""Reserves exactly the accelerators of a plan: all or none, held by placement groups and identified by probing.

Ray hands out whichever accelerators of a node are free, lowest first. If a plan wants all of a node's accelerators, or
its first ones, the reserver asks for one placement group on that node and probes it. If Ray gave others, or the plan
wants others, it takes every free accelerator of the node with one placement group each, probes them, and immediately
releases the unplanned ones. It holds nothing while it waits: two jobs that want the same accelerators never
block each other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ray.util.placement_group import PlacementGroup

from roost.config.hardware import ACCELERATOR
from roost.deadline import NEVER, Deadline
from roost.errors import AcceleratorsTaken, ClusterError, ConfigError, ReservationLost
from roost.placement.fit import Components, nearest_fit
from roost.placement.plan import Piece, Plan
from roost.runtime.connect.head import until
from roost.runtime.events.emitter import emitter
from roost.runtime.limits import (
    HANG_SECONDS,
    HOLDERS_SECONDS,
    RESERVE_LEAST_SECONDS,
    RESERVE_NOTICE_SECONDS,
    RESERVE_PATIENCE_SECONDS,
    RESERVE_PAUSE_SECONDS,
    RESERVE_SAY_SECONDS,
    RESERVE_UNDO_SECONDS,
    SAY_EVERY_SECONDS,
)
from roost.runtime.managers.control import JobControl
from roost.runtime.managers.ledgers.reservations import Slot, check_shares, name_of
from roost.runtime.managers.node_manager import NodeManager
from roost.runtime.nodes.discover import live_nodes
from roost.runtime.nodes.info import NodeInfo
from roost.runtime.nodes.placement_groups import Ask, Bundle, probe, settle
from roost.runtime.reserve.occupancy import Holdings, OccupancyReader, pieces_on, resource_of
from roost.runtime.reserve.reservation import Reservation, check_share, check_timeout, describe_loss, lost_slots
from roost.text import join_words, plural

log: logging.Logger = logging.getLogger(__name__)

_MOST_SHOWN = 8
_MOST_PATIENCE = 4.0

Shares = Mapping[Piece, float | None]


class Reserver:
    """Reserves accelerators once for one user of a job: a group that is launched, or a plan.

    The job's node manager makes and removes the placement groups: they belong to the job, whichever process asked.
    """

    def __init__(self, context: JobControl, user: str, timeout: float) -> None:
        self._context = context
        self._user = user
        self._name = name_of(user)
        self._began = time.monotonic()
        self._deadline = Deadline.after(max(timeout, RESERVE_LEAST_SECONDS))
        # When a try that began before the deadline is over at the latest.
        self._until = Deadline(self._deadline.at + RESERVE_UNDO_SECONDS)
        # When Ray has had time to notice earlier releases.
        self._notice = Deadline.after(RESERVE_NOTICE_SECONDS)
        # Who does not wait gets an error at once, which says the same.
        self._say_next = Deadline.after(RESERVE_SAY_SECONDS) if timeout > RESERVE_LEAST_SECONDS else NEVER
        self._has_said = False
        self._apart: set[int] = set()
        """The nodes whose accelerators must be identified one by one."""
        self._occupancy = OccupancyReader(context.nodes)
        self._random = random.Random()  # noqa: S311 - only so that two jobs do not try in step

    @property
    def _manager(self) -> NodeManager:
        """The job's node manager, for a call that returns by the deadline even if the manager hangs."""
        left = max(RESERVE_UNDO_SECONDS, self._deadline.left)
        return self._context.node_manager.within(min(HANG_SECONDS, left))

    def reserve(self, shares: Shares, components: Components) -> list[Slot]:
        """Return slots for all of these accelerators, including those that the job has; else AcceleratorsTaken."""
        nodes, short = self._context.nodes, set[Piece]()
        with self.undone(), until(self._deadline):
            while True:
                there, missing = self._ask(shares)
                # A try briefly takes what others may want: skip it while it is known to fail.
                short = self._held(missing) if short else set()
                new, seen = list[Slot](), set[Piece]()
                if missing and not short:
                    new, short, seen = self._take(missing)
                if not short:
                    if not self._manager.take_slots(self._user, dict(shares), new):
                        if new:
                            emitter.note("reserved", self._name, plural(len(new), "accelerator"))
                        return [*there, *new]
                    if self._deadline.is_over:
                        # Slots of another part of the job were released between asking and taking, again and again.
                        raise ClusterError(f"the job's reservations keep changing: {self._name!r} gave up")
                    continue
                first, *others = sorted(short)
                if self._deadline.is_over:
                    holdings = self._holdings()
                    known = holdings.free_pieces(nodes, except_for=self._context.job.namespace) | seen
                    free = self._alive(known - short)
                    fit = nearest_fit(self._context.topology, components, free)
                    what = f"{plural(len(short), 'accelerator')} for {self._name!r}"
                    raise self._taken(what, "", [first, *others], holdings, free, fit)
                self._pause(
                    functools.partial(self._describe, first, None, f", and {len(others)} more" if others else "")
                )

    def reserve_any(self, count: int) -> list[Slot]:
        """Return slots in one placement group for `count` accelerators: the first of the cluster, else any free."""
        nodes = [node for node in self._context.nodes if node.accelerators]
        resource = resource_of(nodes[0])
        every = [piece for node in nodes if resource_of(node) == resource for piece in pieces_on(node)]
        if len(every) < count:
            raise ConfigError(f"the cluster has {plural(len(every), resource)}, and {count} are wanted")

        def choices() -> Iterator[list[Ask]]:
            found = [every]
            # Take others than the first only if those are held, and not just released.
            if self._notice.is_over or self._held(every[:count]):
                found.append(sorted(self._holdings().free_pieces(nodes) & set(every)))
            for pieces in found:
                if len(pieces) >= count:
                    ranks = tuple(piece.node_rank for piece in pieces[:count])
                    yield [Ask(resource=resource, node_ranks=ranks, cpus=1)]

        return self._reserve_free(choices, nodes, count)

    def reserve_on(self, counts: Mapping[int, int]) -> list[Slot]:
        """Return slots for as many accelerators of each node that nobody holds, in one placement group on each."""
        nodes = [self._context.nodes[rank] for rank in sorted(counts)]
        asks = [Ask(resource=resource_of(node), node_ranks=(node.rank,) * counts[node.rank], cpus=1) for node in nodes]

        def choices() -> list[list[Ask]]:
            self._check_alive(nodes)
            return [asks]

        return self._reserve_free(choices, nodes, sum(counts.values()))

    def _reserve_free(
        self, choices: Callable[[], Iterable[list[Ask]]], nodes: Sequence[NodeInfo], count: int
    ) -> list[Slot]:
        """Try the choices again and again until Ray can place all groups of one."""
        with self.undone(), until(self._deadline):
            while True:
                self._context.check_open()
                # If there is not a CPU for each, take the accelerators without.
                each = (1, 0) if self._notice.is_over else (1,)
                for asks, cpus in ((asks, cpus) for asks in choices() for cpus in each):
                    if slots := self._take_free([replace(ask, cpus=cpus) for ask in asks]):
                        emitter.note("reserved", self._name, plural(count, "accelerator"))
                        return slots
                if self._deadline.is_over:
                    holdings = self._holdings()
                    free = self._alive(holdings.free_pieces(nodes))
                    taken = [piece for node in nodes for piece in pieces_on(node) if piece not in free]
                    what, more = plural(count, "accelerator"), f", {len(free)} are free"
                    raise self._taken(what, more, taken, holdings, free)
                self._pause(lambda: plural(count, "free accelerator"))

    def _take_free(self, asks: Sequence[Ask]) -> list[Slot]:
        """Take whichever accelerators of the nodes are free, all or none."""
        groups = self._make(asks)
        placed = settle(groups, self._until)
        slots: list[Slot] = []
        if len(placed) == len(groups):
            resources = {bundle: ask.resource for group, ask in groups.items() for bundle in placed[group]}
            devices = probe(resources, self._context.nodes, self._until)
            for node in self._context.nodes:
                own = [bundle for bundle in resources if bundle.ray_id == node.ray_id]
                slots += sorted(self._slots(node, own, pieces_on(node), devices), key=lambda slot: slot.piece)
        if slots and not self._manager.take_slots(self._user, dict.fromkeys(slot.piece for slot in slots), slots):
            return slots
        self._manager.discard_groups(self._user, list(groups))
        return []

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Release everything if the block raises; afterwards nothing is waited for."""
        try:
            yield
        except BaseException:
            if self._context.is_connected:
                with contextlib.suppress(Exception):
                    self._manager.within(RESERVE_UNDO_SECONDS).release_slots(self._user)
            raise
        finally:
            if self._has_said:
                if self._context.is_connected:
                    with contextlib.suppress(Exception):
                        self._manager.within(RESERVE_UNDO_SECONDS).note_wait(self._user, "")
                self._context.recorder.note_wait(self._name, "")

    def _pause(self, what: Callable[[], str]) -> None:
        if self._say_next.is_over:
            self._say_next = Deadline.after(SAY_EVERY_SECONDS)
            text = what()
            self._context.console.notice(f"{self._name}: waiting for {text}")
            self._has_said = True
            self._manager.note_wait(self._user, text, self._context.owner)
            emitter.note("waits", self._name, f"for {text}")
            self._context.recorder.note_wait(self._name, text)
        # Who waits for minutes asks less often.
        patience = min(_MOST_PATIENCE, 1 + (time.monotonic() - self._began) / RESERVE_PATIENCE_SECONDS)
        time.sleep(self._random.uniform(*RESERVE_PAUSE_SECONDS) * patience)

    def _holdings(self) -> Holdings:
        """Ask who has what; what hangs holds it up for less than a second after the deadline."""
        return self._occupancy.read(min(HOLDERS_SECONDS, max(RESERVE_UNDO_SECONDS, self._deadline.left)))

    def _held(self, pieces: Sequence[Piece]) -> set[Piece]:
        """Return which of these others are known to hold."""
        holdings = self._holdings()
        return {piece for piece in pieces if holdings.of(piece, except_for=self._context.job.namespace)}

    def _ask(self, shares: Shares) -> tuple[list[Slot], list[Piece]]:
        """Return what the job has already, and what not; ClusterError if a node is gone."""
        # If the Cluster was closed in the meantime, Ray's calls would open a new connection.
        self._context.check_open()
        there, missing = self._manager.ask_slots(self._user, dict(shares))
        lost = lost_slots(there)
        if lost:
            self._manager.drop_slots([slot.piece for slot in lost])
            there, missing = self._manager.ask_slots(self._user, dict(shares))
        if missing:
            self._check_alive([self._context.nodes[rank] for rank in sorted({piece.node_rank for piece in missing})])
        return there, missing

    def _check_alive(self, nodes: Sequence[NodeInfo]) -> None:
        alive = {node.ray_id for node in live_nodes()}
        if gone := [str(node) for node in nodes if node.ray_id not in alive]:
            raise ClusterError(
                f"accelerators cannot be reserved on {join_words(gone)}: "
                f"{'it is' if len(gone) == 1 else 'they are'} gone",
                hint="plan on the nodes that are there: make a new Cluster",
            )

    def _take(self, pieces: Sequence[Piece]) -> tuple[list[Slot], set[Piece], set[Piece]]:
        """Try once; return the slots, or none with what is missing and what is known to be free."""
        nodes = self._context.nodes
        wanted: dict[int, list[Piece]] = {}
        for piece in sorted(pieces):
            wanted.setdefault(piece.node_rank, []).append(piece)
        self._apart |= {rank for rank, own in wanted.items() if own != pieces_on(nodes[rank])[: len(own)]}
        placed = self._place({rank: len(own) for rank, own in wanted.items()})
        found = {bundle: resource_of(nodes[rank]) for rank in wanted for bundle in placed[rank]}
        devices = probe(found, nodes, self._until)
        slots: list[Slot] = []
        missing: set[Piece] = set()
        seen: set[Piece] = set()
        unclear: set[int] = set()
        for rank, own in wanted.items():
            got = {slot.piece: slot for slot in self._slots(nodes[rank], placed[rank], own, devices)}
            lacking = set(own) - set(got)
            missing |= lacking
            slots += [got[piece] for piece in own if piece in got]
            if rank in self._apart:
                seen |= set(got)
            elif lacking:
                unclear.add(rank)
        if not missing:
            # The surplus is removed when the rest is taken.
            return slots, missing, seen
        self._manager.release_slots(self._user)
        if unclear:
            # Identify one by one which of them are taken.
            self._apart |= unclear
            return self._take(pieces)
        return [], missing, seen

    def _place(self, counts: Mapping[int, int]) -> dict[int, list[Bundle]]:
        """Ask on all nodes together: one placement group on each, or one for each accelerator to identify them."""
        asks: list[Ask] = []
        for rank, count in counts.items():
            node = self._context.nodes[rank]
            cpus = 1 if node.cpus >= node.num_accelerators else 0
            ranks = (rank,) if rank in self._apart else (rank,) * count
            ask = Ask(resource=resource_of(node), node_ranks=ranks, cpus=cpus)
            asks += [ask] * (node.num_accelerators if rank in self._apart else 1)
        groups = self._make(asks)
        placed = settle(groups, self._until)
        refused = [group for group in groups if group not in placed and groups[group].cpus]
        if refused and self._notice.is_over:
            # Without the CPU, which may be what is missing.
            again = [replace(groups[group], cpus=0) for group in refused]
            self._manager.discard_groups(self._user, refused)
            second = self._make(again)
            placed |= (without := settle(second, self._until))
            groups |= second
            for rank in {groups[group].node_ranks[0] for group in without}:
                log.info(
                    "%s has too few CPUs for its accelerators: tasks that workers start there need num_cpus=0",
                    self._context.nodes[rank],
                )
        out: dict[int, list[Bundle]] = {rank: [] for rank in counts}
        for group, bundles in placed.items():
            out[groups[group].node_ranks[0]] += bundles
        return out

    def _make(self, asks: Sequence[Ask]) -> dict[PlacementGroup, Ask]:
        groups = self._manager.make_groups(self._user, self._context.owner, asks)
        return dict(zip(groups, asks, strict=True))

    def _slots(
        self, node: NodeInfo, bundles: Sequence[Bundle], pieces: Sequence[Piece], devices: Mapping[Bundle, str | None]
    ) -> list[Slot]:
        """Identify the accelerator of each bundle; if Ray has no ids for them, assume the planned ones in order."""
        names = [item.device for item in node.accelerators]
        unknown = iter(pieces)
        out = []
        for bundle in bundles:
            device = devices[bundle]
            if device is None:
                log.warning(
                    "Ray has no ids for %s: as many as planned are reserved on %s, but not necessarily those",
                    resource_of(node),
                    node,
                )
                piece = next(unknown, None)
                if piece is None:
                    continue
                device = names[piece.local_rank]
            elif device in names:
                piece = pieces_on(node)[names.index(device)]
            else:
                raise ClusterError(
                    f"Ray gave accelerator {device!r} on {node}, which offers {join_words(names)}",
                    hint="the node was restarted with other devices: make a new Cluster",
                )
            out.append(Slot(piece=piece, device=device, ray_id=bundle.ray_id, group=bundle.group, bundle=bundle.index))
        return out

    def _describe(self, piece: Piece, holdings: Holdings | None = None, more: str = "") -> str:
        holdings = holdings or self._holdings()
        node = self._context.nodes[piece.node_rank]
        who = holdings.of(piece) or holdings.somewhere.get(piece.node_rank, [])
        return f"accelerator {piece.local_rank} of {node}, {join_words(who) or 'taken'}{more}"

    def _alive(self, pieces: Iterable[Piece]) -> set[Piece]:
        alive = {node.ray_id for node in live_nodes()}
        return {piece for piece in pieces if self._context.nodes[piece.node_rank].ray_id in alive}

    def _taken(
        self,
        what: str,
        more: str,
        pieces: Sequence[Piece],
        holdings: Holdings,
        free: set[Piece],
        fit: Mapping[str, str] | None = None,
    ) -> AcceleratorsTaken:
        """Make the error that says who has these pieces, and what to do instead."""
        lines = [self._describe(piece, holdings) for piece in pieces[:_MOST_SHOWN]]
        if len(pieces) > _MOST_SHOWN:
            lines.append(f"and {len(pieces) - _MOST_SHOWN} more")
        on_nodes = []
        for node in self._context.nodes:
            if ranks := sorted(piece.local_rank for piece in free if piece.node_rank == node.rank):
                on_nodes.append(f"{join_words(ranks, most=16)} of {node}")
        there = "; ".join(on_nodes) or "none"
        hint = f"free now is {there}: plan with fewer, or wait; `roost status` shows who has what"
        if fit:
            hint = "this would fit now: " + ", ".join(f"{name}: {text}" for name, text in fit.items())
        first = f"{what} could not be reserved in {time.monotonic() - self._began:.0f} s{more}:"
        return AcceleratorsTaken("\n  ".join([first, *lines]), hint=hint)


def reserve_accelerators(
    context: JobControl,
    name: str,
    shares: Shares,
    components: Components,
    *,
    timeout: float,
    seats: Sequence[Slot] = (),
) -> Reservation:
    """Reserve accelerators under a name, with the part of each that is used; `components` is for messages.

    With the `seats` of a pool, share what it has reserved, and only that: ReservationLost if some of it is lost.
    """
    user = f"{name}#{secrets.token_hex(4)}"
    if seats:
        with Reserver(context, user, timeout).undone():
            lost = describe_loss(context, seats)
            # Another thread may close the pool meanwhile.
            if lost or context.node_manager.take_slots(user, dict(shares), [], seats):
                why = lost or "its pool was closed"
                hint = "close the pool and reserve seats again"
                raise ReservationLost(f"{name!r} cannot be launched: {why}", hint=hint)
            return Reservation(context, user, seats)
    slots = Reserver(context, user, timeout).reserve(shares, components) if shares else []
    return Reservation(context, user, slots)


def reserve_plan(context: JobControl, plan: Plan, shares: Mapping[str, float], *, timeout: float) -> Reservation:
    """Reserve every accelerator of a plan, of which a worker of each component uses the share that is declared."""
    context.check_open()
    check_timeout(timeout)
    if not isinstance(plan, Plan):
        raise ConfigError(f"reserve takes a Plan, not a {type(plan).__name__}", hint="make_plan(config, cluster)")
    for component in plan.components:
        plan.get_strategy(component.name).get_placement(context.topology)
    if not isinstance(shares, Mapping):
        raise ConfigError(f"shares is {shares!r}", hint='it is a dict, as in {"actor": 0.8, "rollout": 0.2}')
    for name, share in shares.items():
        plan.component(name)
        if share is None:
            raise ConfigError(f"the share of {name!r} is None", hint="leave out components that declare none")
        check_share(share, f"the share of {name!r}")
    wanted = {piece: workers for piece, workers in plan.occupants().items() if piece.kind == ACCELERATOR}
    for piece, workers in wanted.items():
        declared: dict[str, float] = {}
        for worker in workers:
            declared[worker.component] = declared.get(worker.component, 0.0) + shares.get(worker.component, 0.0)
        check_shares(piece, list(declared.items()))
    components = {component.name: component.placements for component in plan.components}
    # Each group declares its share when it is launched.
    return reserve_accelerators(context, "plan", dict.fromkeys(wanted), components, timeout=timeout)
