"""A batch that is split over the ranks of one group goes to the ranks of another: `send_to` and `recv_from`.

The senders tell each other how many rows they have, so that all of them plan the same routes. Then each sends one
message to each receiver, also where no row goes: a receiver has one from every sender, and knows that it has all.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from roost.comm.collectives import plan_routes
from roost.comm.mailbox import addresses_of
from roost.comm.messages import Messages
from roost.comm.process import job_context
from roost.comm.wire.loop import Handle, all_of, check_timeout
from roost.deadline import Deadline
from roost.errors import CallTimedOut, ConfigError
from roost.runtime.failures.meanwhile import with_meanwhile
from roost.runtime.process.identity import WorkerIdentity
from roost.text import join_words, shorten

_KINDS = "rows are a list, a tuple, an array, a tensor, or a dict of these with as many rows each"


def send_to(
    messages: Messages,
    own: WorkerIdentity,
    rows: Any,
    group: str,
    world_size: int | None,
    tag: Hashable,
    timeout: float | None,
) -> None:
    """Send the rows of this rank to the ranks of a group that they belong to."""
    deadline = Deadline.after(check_timeout(timeout))
    count, receivers = count_rows(rows), members(group, world_size)
    mates = addresses_of(own.group_name, range(own.world_size))
    counts = _tell_counts(messages, own, mates, count, ("roost counts", group, *_parts(tag)), deadline)
    parts: list[slice] = [slice(0)] * len(receivers)
    first = sum(counts[: own.rank])
    for sender, receiver, part in plan_routes(len(counts), len(receivers), counts):
        if sender == own.rank:
            parts[receiver] = slice(part.start - first, part.stop - first)
    label = "roost rows", own.group_name, *_parts(tag)
    sent = [messages.send(take_rows(rows, part), to, label) for to, part in zip(receivers, parts, strict=True)]
    messages.ended(sent, False, deadline.timeout)


def recv_from(
    messages: Messages, own: str, group: str, world_size: int | None, tag: Hashable, timeout: float | None
) -> Any:
    """Receive the rows of this rank from all ranks of a group; what has arrived when it fails is for the next call."""
    seconds = check_timeout(timeout)
    label = "roost rows", group, *_parts(tag)
    handles = [messages.receive(sender, label) for sender in members(group, world_size)]
    return join_rows(_all(messages, own, handles, Deadline.after(seconds), "rows"))


def members(group: str, world_size: int | None) -> list[str]:
    """Return the addresses of all ranks of a group."""
    if world_size is None:
        context = job_context()
        if context is None:
            raise ConfigError(
                f"how many ranks {group!r} has is not known in a process without Ray", hint="give world_size"
            )
        world_size = len(context.worker_manager.get_group(group).identities)
    if type(world_size) is not int or world_size < 1:
        raise ConfigError(f"world_size is {world_size!r}: it is the number of ranks of {group!r}")
    return addresses_of(group, range(world_size))


def _tell_counts(
    messages: Messages,
    own: WorkerIdentity,
    mates: Sequence[str],
    count: int,
    label: tuple[Any, ...],
    deadline: Deadline,
) -> list[int]:
    """Tell the other ranks of this group how many rows there are, and return how many each has."""
    # A call that is made again, because it was too early, says the same again: its number tells that to the others.
    number, told = messages.rows.setdefault(label, (secrets.token_bytes(8), count))
    if told != count:
        raise ConfigError(
            f"{own.address} has told the others of {told} rows, in a call that timed out, and now has {count}",
            hint="make the same call again, or use another tag",
        )
    others = [mate for mate in mates if mate != own.address]
    for other in others:
        messages.send((number, count), other, label)
    counts = {own.address: count}
    while missing := [other for other in others if other not in counts]:
        handles = [messages.receive(other, label) for other in missing]
        for other, (theirs, rows) in zip(
            missing, _all(messages, own.address, handles, deadline, "counts"), strict=True
        ):
            if messages.rows.get((other, label)) != (theirs, rows):
                messages.rows[other, label] = theirs, rows
                counts[other] = rows
    del messages.rows[label]
    return [counts[mate] for mate in mates]


def _all(messages: Messages, own: str, handles: Sequence[Handle[Any]], deadline: Deadline, what: str) -> list[Any]:
    """Return what all receives have got, or raise as soon as one fails; then the next receives get what has arrived."""
    whole = all_of(messages.endpoint.loop, handles, None, f"{own} has not got all {what}")
    try:
        if not whole.within(deadline.timeout):
            late = join_words([handle.waits_for() for handle in handles if not handle.is_done], most=4)
            raise with_meanwhile(
                CallTimedOut(
                    f"{own} has got no {what} from {late} in time",
                    hint="every rank of the one group calls send_to, and every rank of the other recv_from",
                )
            )
        whole.wait()
    except BaseException:
        for handle in handles:
            handle.give_up()  # type: ignore[attr-defined]
        raise
    found, errors = [], []
    for handle in handles:
        # All are taken, also behind one that cannot be read: they are of one batch.
        try:
            found.append(handle.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def _parts(tag: Hashable) -> tuple[Hashable, ...]:
    return tag if type(tag) is tuple else (tag,)


def count_rows(rows: Any) -> int:
    """Return how many rows there are; ConfigError if that is not clear."""
    if isinstance(rows, Mapping):
        if not rows:
            raise ConfigError(f"an empty {type(rows).__name__} has no rows", hint=_KINDS)
        counts = {name: count_rows(value) for name, value in rows.items()}
        if len(set(counts.values())) != 1:
            raise ConfigError(f"the values have different numbers of rows: {shorten(repr(counts), 300)}", hint=_KINDS)
        return next(iter(counts.values()))
    if not isinstance(rows, list | tuple) and not _is_array(rows):
        raise ConfigError(f"rows of type {type(rows).__name__} cannot be counted", hint=_KINDS)
    if _is_array(rows) and not len(rows.shape):
        raise ConfigError("an array without dimensions has no rows", hint=_KINDS)
    return len(rows)


def take_rows(rows: Any, part: slice) -> Any:
    """Return some of the rows."""
    if isinstance(rows, Mapping):
        return {name: take_rows(value, part) for name, value in rows.items()}
    return rows[part]


def join_rows(parts: Sequence[Any]) -> Any:
    """Join rows that several ranks have sent, in their order."""
    first = parts[0]
    # The order of a dict does not matter, and its keys may not have one among each other.
    kinds = {(type(part).__name__, *(sorted(map(repr, part)) if isinstance(part, Mapping) else ())) for part in parts}
    if len(kinds) > 1:
        raise ConfigError(f"the ranks have sent different kinds of rows: {shorten(repr(sorted(kinds)), 300)}")
    if isinstance(first, Mapping):
        return {name: join_rows([part[name] for part in parts]) for name in first}
    full = [part for part in parts if len(part)] or [first]
    if len(full) == 1:
        return full[0]
    if not _is_array(first):
        return type(first)(row for part in full for row in part)
    shapes = {tuple(part.shape[1:]) for part in full}
    if len(shapes) > 1:
        raise ConfigError(f"the ranks have sent rows of different shapes: {join_words(list(map(str, shapes)))}")
    module = importlib.import_module(type(first).__module__.partition(".")[0])
    return module.cat(full) if hasattr(module, "cat") else module.concatenate(full)


def _is_array(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(thing, "shape")
