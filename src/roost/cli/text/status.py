"""The live cluster as text: its nodes, and who holds which accelerator."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from roost.cli.terminal import aligned
from roost.config.ranks import format_ranks
from roost.placement.plan import Piece
from roost.runtime.nodes.info import AcceleratorInfo, NodeInfo, SickNode
from roost.runtime.reserve.occupancy import Holdings, pieces_on
from roost.text import join_words, plural, printable, size_text

if TYPE_CHECKING:
    from roost.comm.channels.status import ChannelStatus
    from roost.runtime.status import ClusterStatus, JobStatus


def nodes_table(nodes: Sequence[NodeInfo], sick: Sequence[SickNode] = ()) -> Text:
    """Make one line for each node, and name the problem of each node that does not answer."""
    rows = [("NODE", "ADDRESS", "NAME", "ACCELERATORS", "CPUS", "MEMORY", "PYTHON", "RAY", "RAY ID")]
    rows += [
        (
            f"{node.rank}{' (head)' if node.is_head else ''}",
            node.address,
            node.name,
            _accelerators(node.accelerators),
            str(node.cpus),
            _size(node.memory),
            node.python,
            node.ray,
            node.ray_id[:12],
        )
        for node in nodes
    ]
    text = aligned(rows).append("\n")
    _append_sick(text, sick)
    text.rstrip()
    return text


def status_text(status: ClusterStatus) -> Text:
    """Describe the jobs on a cluster, its accelerators, and processes left over from earlier jobs."""
    accelerators = sum(node.num_accelerators for node in status.nodes)
    has = f"{plural(len(status.nodes) + len(status.sick), 'node')}, {plural(accelerators, 'accelerator')}"
    text = Text.assemble((f"Ray at {status.address}", "bold"), f"  {has}\n")
    _append_sick(text, status.sick)
    if not status.jobs:
        text.append("no job of Roost\n")
    for item in status.jobs:
        # The namespace is Ray's name for it, the run's the one that its user knows.
        run = "" if item.job is None else f", run {item.job.run_dir.id}"
        text.append(f"job {printable(item.namespace + run)}", style="bold")
        text.append(f"  {_driver(item)}\n")
        workers = ", ".join(f"{count} {state}" for state, count in item.workers) or "none"
        text.append(f"  workers   {printable(workers)}\n")
        for who, what in item.waits:
            text.append(f"  {printable(who)} waits for {printable(what)}\n", style="yellow")
        text.append(f"  managers  {join_words(item.managers) or 'none'}\n")
        if item.missing_managers:
            missing = join_words(item.missing_managers)
            text.append(f"  {missing} died: close the job's Cluster and start it again\n", style="red")
    if accelerators:
        text.append("accelerators\n", style="bold")
    for node in status.nodes:
        _append_holders(text, node, status.holdings)
    if status.leftovers:
        text.append(f"left over from jobs that have ended ({len(status.leftovers)})\n", style="bold yellow")
        for left in status.leftovers:
            text.append(f"  pid {left.pid} on {left.node}, of {printable(left.job)}: {left.command[:80]}\n")
        text.append("  `roost clean` ends them\n", style="dim")
    text.rstrip()
    return text


def _append_sick(text: Text, nodes: Sequence[SickNode]) -> None:
    for node in nodes:
        which = "a node" if node.rank is None else f"node {node.rank}"
        text.append(f"{which} is sick: {printable(node.problem)}\n", style="red")
        if node.hint:
            text.append(f"  hint: {node.hint}\n", style="dim")


def _append_holders(text: Text, node: NodeInfo, holdings: Holdings) -> None:
    """Add who holds the accelerators of a node: one line for neighbours with the same holder."""

    def holders(piece: Piece) -> str:
        held = holdings.of(piece)
        return join_words([f"{item}{f': {join_words(item.users)}' if item.users else ''}" for item in held]) or "free"

    pieces = pieces_on(node)
    if pieces:
        text.append(f"  {node}\n")
    for who, held in groupby(pieces, holders):
        ranks = format_ranks([piece.local_rank for piece in held])
        text.append(f"    {ranks:<6} {who}\n", style="dim" if who == "free" else "")
    for item in holdings.somewhere.get(node.rank, ()):
        text.append(f"    of these {item.amount:g} {item.holder}\n", style="yellow")


def _driver(item: JobStatus) -> str:
    if item.job is None:
        return "its NodeManager does not answer"
    age = max(0, int(time.time() - item.job.since))
    return f"pid {item.job.pid} on {item.job.host}, by {item.job.user}, for {age} s: {item.job.command}"


def _accelerators(accelerators: Sequence[AcceleratorInfo]) -> str:
    if not accelerators:
        return "-"
    models = "/".join(dict.fromkeys(item.model or str(item.type) for item in accelerators))
    memory = f" {_size(accelerators[0].memory)}" if accelerators[0].memory else ""
    devices = [item.device for item in accelerators]
    are_in_order = devices == [str(index) for index in range(len(devices))]
    return f"{len(accelerators)} x {models}{memory}" + ("" if are_in_order else f" (devices {','.join(devices)})")


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB"


def channels_text(channels: Sequence[ChannelStatus], *, verbose: bool) -> Text:
    """Make a table of the keys of each channel."""
    if not channels:
        return Text("no job has a channel")
    text = Text()
    for namespace, some in groupby(channels, lambda channel: channel.namespace):
        text.append(f"job {printable(namespace)}\n", style="bold")
        for channel in some:
            _append(text, channel, verbose=verbose)
    text.rstrip()
    return text


def _append(text: Text, channel: ChannelStatus, *, verbose: bool) -> None:
    stats = [home.stats for home in channel.homes if home.stats is not None]
    text.append(f"  {printable(channel.name)}", style="bold")
    homes = channel.homes
    text.append(f"  on {homes[0].node if len(homes) == 1 else plural(len(homes), 'node')}")
    if stats:
        text.append(f", {_summary(stats)}")
    text.append("\n")
    for home in channel.homes:
        if home.problem:
            text.append(f"    {printable(home.address)} on {printable(home.node)}: {home.problem}\n", style="red")
    rows = [("    KEY", "DEPTH", "LEASED", "BYTES", "PUTS", "GETS", "WAIT TO GET", "WAIT TO PUT")]
    rows += [
        (
            f"    {printable(key)}",
            str(line["depth"]),
            str(line["leased"]),
            size_text(line["bytes"]),
            str(line["puts"]),
            str(line["gets"]),
            _who(line["getters"]),
            _who(line["putters"]),
        )
        for found in stats
        for key, line in found["keys"].items()
    ]
    if len(rows) > 1:
        text.append_text(aligned(rows)).append("\n")
    elif stats:
        text.append("    empty, and no process waits\n", style="dim")
    if verbose:
        for found in stats:
            for client, route in found["routes"].items():
                text.append(f"    {printable(client)} to {printable(found['home'])}: {route}\n", style="dim")


def _summary(stats: Sequence[Mapping[str, Any]]) -> str:
    first = stats[0]
    limits = [f"at most {plural(first['maxsize'], 'item')} a key"] if first["maxsize"] else []
    limits += [f"{size_text(first['max_bytes'])} a home"] if first["max_bytes"] else []
    rates = " and ".join(
        f"{sum(found[f'{what}_per_second'] for found in stats):.1f} {what}/s" for what in ("puts", "gets")
    )
    closed = ["closed"] if all(found["is_closed"] for found in stats) else []
    held = f"{size_text(sum(found['bytes'] for found in stats))} held"
    return ", ".join([*closed, rates, held, *limits])


def _who(waiting: Mapping[str, int]) -> str:
    return join_words([name if count == 1 else f"{name} ({count})" for name, count in waiting.items()]) or "-"
