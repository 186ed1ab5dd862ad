"""Communication of many: one object to all members of several groups, and process groups of torch."""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from roost.comm.mailbox import addresses_of
from roost.comm.messages import Messages
from roost.comm.move.nccl import new_group
from roost.comm.options import CollectiveGroupOptions, check_options
from roost.comm.wire.loop import Handle, all_of, check_timeout
from roost.errors import CallTimedOut, ConfigError
from roost.runtime.events.waits import record_waits_of_torch, waiting
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.process.addresses import WorkerAddress
from roost.text import join_words

if TYPE_CHECKING:
    from roost.runtime.managers.control import JobControl

COLLECTIVE_SECONDS = 600.0
_POLL_SECONDS = 0.05
_MADE: Counter[tuple[str, ...]] = Counter()
"""By backend, name and members: how many process groups this process has asked for."""

Groups = Sequence[tuple[str, Any]]


def broadcast(
    messages: Messages,
    own: str,
    thing: Any,
    groups: Groups,
    src: tuple[str, int] | None,
    async_op: bool,
    options: CollectiveGroupOptions | None,
    timeout: float | None,
) -> Any:
    """Send an object from one member to all; returns it in each, or a handle.

    The source sends to each of the others, so that the death of one does not keep the rest waiting.
    """
    check_options(options)
    listed = members_of(groups)
    if src is not None and (not isinstance(src, tuple) or len(src) != 2):
        raise ConfigError(f"src is {src!r}: it is the name of a group and a rank")
    source = listed[0] if src is None else addresses_of(*src)[0]
    for name, what in ((source, "the source"), (own, "this worker")):
        if name not in listed:
            raise ConfigError(f"{name}, {what}, is not one of the members: {join_words(listed)}")
    # Messages of one source have an order, and members of another broadcast have another tag.
    tag = "broadcast", tuple(sorted(listed))
    if own != source:
        return messages.recv(source, tag, None, async_op, timeout)
    handles = [messages.send(thing, member, tag) for member in listed if member != own]
    handle: Handle[Any] = all_of(messages.endpoint.loop, handles, thing, "not every rank has taken a message")
    return handle if async_op else handle.wait(timeout)


def members_of(groups: Groups) -> list[str]:
    """Return the addresses of the members of some groups, in the order in which they are listed."""
    try:
        found = [address for name, ranks in groups for address in addresses_of(name, ranks)]
    except (TypeError, ValueError):
        raise ConfigError(
            f"groups is {groups!r}", hint='write [("actor", [0, 1]), ("rollout", 0)]: names of groups, and ranks'
        ) from None
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"groups is {groups!r}: name each member once")
    return found


def make_process_group(
    context: JobControl,
    own: str,
    group_name: str,
    ranks: Sequence[int] | None,
    backend: str | None,
    name: str | None,
    options: CollectiveGroupOptions | None,
    timeout: float | None,
) -> Any:
    """Make a process group of torch over workers, all of which call this; CallTimedOut names those that did not."""
    check_options(options)
    deadline = time.monotonic() + (check_timeout(timeout) or COLLECTIVE_SECONDS)
    if ranks is None:
        ranks = range(len(context.worker_manager.get_group(group_name).identities))
    members = tuple(addresses_of(group_name, ranks))
    if own not in members:
        raise ConfigError(f"{own} is not one of the members: {join_words(members)}")
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    record_waits_of_torch()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    key = backend, name or "", *members
    _MADE[key] += 1
    label = f"{':'.join(key[:2])}:{','.join(members)}:{_MADE[key]}"
    listener = context.worker_manager.get_workers([members[0]])[0]
    place = context.collective_manager.create_group(label, members, listener.node_rank)
    rank = members.index(own)
    left = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        store = distributed.TCPStore(place.address, place.port, len(members), rank == 0, left, wait_for_workers=False)
        with waiting(lambda: "the other members of a process group"):
            store.set(f"here/{rank}", str(os.getpid()))
            missing = list(range(len(members)))
            while missing := [one for one in missing if not store.check([f"here/{one}"])]:
                if time.monotonic() > deadline:
                    raise with_meanwhile(_late(members, rank, missing))
                time.sleep(_POLL_SECONDS)
    except distributed.DistError as error:
        if rank == 0:
            raise
        # The first member has not come: all meet at its store.
        raise _late(members, rank, [0]) from error
    return new_group(backend, store, rank, len(members), label, options)


def _late(members: Sequence[str], rank: int, missing: Sequence[int]) -> CallTimedOut:
    names = join_words([WorkerAddress(members[one]) for one in missing])
    return CallTimedOut(
        f"{members[rank]} waits in a collective of {len(members)} workers for {names}",
        hint="every member calls collective() with the same arguments, and as often",
    )


def plan_routes(n_senders: int, n_receivers: int, batch: int | Sequence[int]) -> list[tuple[int, int, slice]]:
    """Say how a batch that is split over some ranks goes to the ranks of another group: contiguous and balanced.

    Returns `(sender, receiver, part of the batch)`, in order. Both sides split the batch as evenly as it goes, the
    first ranks taking one more; a list as `batch` says how much each sender has.

    >>> plan_routes(2, 3, 6)
    [(0, 0, slice(0, 2, None)), (0, 1, slice(2, 3, None)), (1, 1, slice(3, 4, None)), (1, 2, slice(4, 6, None))]
    """
    rows = [batch] if isinstance(batch, int) else list(batch)
    if not isinstance(batch, int) and len(rows) != n_senders:
        raise ConfigError(f"batch has {len(rows)} numbers for {n_senders!r} senders")
    for name, value, least in (
        ("n_senders", n_senders, 1),
        ("n_receivers", n_receivers, 1),
        *(("batch", count, 0) for count in rows),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}: it is {least} or more")
    routes = []
    for sender, held in enumerate(_split(batch, n_senders) if isinstance(batch, int) else _ranges(rows)):
        for receiver, wanted in enumerate(_split(sum(rows), n_receivers)):
            start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
            if start < stop:
                routes.append((sender, receiver, slice(start, stop)))
    return routes


def _split(count: int, parts: int) -> list[range]:
    return _ranges([count // parts + (place < count % parts) for place in range(parts)])


def _ranges(counts: Sequence[int]) -> list[range]:
    ends = list(itertools.accumulate(counts))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
