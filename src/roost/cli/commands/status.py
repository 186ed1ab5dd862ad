"""`roost status`: the jobs on the live cluster, and who holds which accelerator; or the channels of the jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from roost.cli.commands.nodes import sick_text
from roost.cli.limits import TIMEOUT_SECONDS
from roost.cli.live_cluster import STATUS, ask
from roost.cli.options import Address, TextForm, Timeout
from roost.cli.terminal import aligned, print_answer
from roost.config.ranks import format_ranks
from roost.errors import ConfigError
from roost.placement.plan import Piece
from roost.runtime.reserve.occupancy import pieces_on
from roost.text import join_words, plural, printable, size_text

if TYPE_CHECKING:
    from roost.comm.channels.status import ChannelStatus
    from roost.runtime.status import ClusterStatus


def status(
    form: TextForm = "text",
    channels: Annotated[
        bool, typer.Option("--channels", help="Show the channels of the jobs: depth, rates, bytes and who waits.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="With --channels: who uses shared memory, and who a network."),
    ] = False,
    address: Address = None,
    timeout: Timeout = TIMEOUT_SECONDS,
) -> None:
    if channels:
        found = ask("roost.comm.channels.status.get_channels", timeout, address=address)
        print_answer(form, [item.to_dict() for item in found], lambda: _channels_text(found, verbose))
    elif verbose:
        raise ConfigError("--verbose is for --channels", hint="roost status --channels --verbose shows the routes")
    else:
        seen = ask(f"{STATUS}.get_status", timeout, address=address)
        print_answer(form, seen.to_dict(), lambda: _status_text(seen))


def _status_text(status: ClusterStatus) -> Text:
    """Describe the jobs on a cluster, its accelerators, and processes left over from earlier jobs."""
    accelerators, holdings = sum(node.num_accelerators for node in status.nodes), status.holdings
    has = f"{plural(len(status.nodes) + len(status.sick), 'node')}, {plural(accelerators, 'accelerator')}"
    text = Text.assemble((f"Ray at {status.address}", "bold"), f"  {has}\n", sick_text(status.sick))
    if not status.jobs:
        text.append("no job of Roost\n")
    for item in status.jobs:
        job, name, driver = item.job, item.namespace, "its NodeManager does not answer"
        if job is not None:
            # The namespace is Ray's name for it, the run's the one that its user knows.
            name += f", run {job.run_dir.id}"
            age = max(0, int(time.time() - job.since))
            driver = f"pid {job.pid} on {job.host}, by {job.user}, for {age} s: {job.command}"
        text.append(f"job {printable(name)}", style="bold")
        text.append(f"  {driver}\n")
        workers = ", ".join(f"{count} {state}" for state, count in item.workers) or "none"
        text.append(f"  workers   {printable(workers)}\n")
        for who, what in item.waits:
            text.append(f"  {printable(who)} waits for {printable(what)}\n", style="yellow")
        text.append(f"  managers  {join_words(item.managers) or 'none'}\n")
        if item.missing_managers:
            missing = join_words(item.missing_managers)
            text.append(f"  {missing} died: close the job's Cluster and start it again\n", style="red")

    def holders(piece: Piece) -> str:
        held = holdings.of(piece)
        return join_words([f"{item}{f': {join_words(item.users)}' if item.users else ''}" for item in held]) or "free"

    if accelerators:
        text.append("accelerators\n", style="bold")
    for node in status.nodes:
        pieces = pieces_on(node)
        if pieces:
            text.append(f"  {node}\n")
        # One line for neighbours with the same holder.
        for who, same in groupby(pieces, holders):
            ranks = format_ranks([piece.local_rank for piece in same])
            text.append(f"    {ranks:<6} {who}\n", style="dim" if who == "free" else "")
        for part in holdings.somewhere.get(node.rank, ()):
            text.append(f"    of these {part.amount:g} {part.holder}\n", style="yellow")
    if status.leftovers:
        text.append(f"left over from jobs that have ended ({len(status.leftovers)})\n", style="bold yellow")
        for left in status.leftovers:
            text.append(f"  pid {left.pid} on {left.node}, of {printable(left.job)}: {left.command[:80]}\n")
        text.append("  `roost clean` ends them\n", style="dim")
    text.rstrip()
    return text


def _channels_text(channels: Sequence[ChannelStatus], verbose: bool) -> Text:
    """Make a table of the keys of each channel."""
    text = Text() if channels else Text("no job has a channel")
    namespace = None
    for channel in channels:
        if channel.namespace != namespace:
            namespace = channel.namespace
            text.append(f"job {printable(namespace)}\n", style="bold")
        homes = channel.homes
        stats = [home.stats for home in homes if home.stats is not None]
        said = [f"on {homes[0].node if len(homes) == 1 else plural(len(homes), 'node')}"]
        if stats:
            first = stats[0]
            said += ["closed"] if all(found["is_closed"] for found in stats) else []
            rates = [f"{sum(found[f'{what}_per_second'] for found in stats):.1f} {what}/s" for what in ("puts", "gets")]
            said += [" and ".join(rates), f"{size_text(sum(found['bytes'] for found in stats))} held"]
            said += [f"at most {plural(first['maxsize'], 'item')} a key"] if first["maxsize"] else []
            said += [f"{size_text(first['max_bytes'])} a home"] if first["max_bytes"] else []
        text.append(f"  {printable(channel.name)}", style="bold").append(f"  {', '.join(said)}\n")
        for home in homes:
            if home.problem:
                text.append(f"    {printable(home.address)} on {printable(home.node)}: {home.problem}\n", style="red")
        rows: list[tuple[str, ...]] = [
            ("    KEY", "DEPTH", "LEASED", "BYTES", "PUTS", "GETS", "WAIT TO GET", "WAIT TO PUT")
        ]
        for found in stats:
            for key, line in found["keys"].items():
                counts = [str(line[what]) for what in ("depth", "leased", "puts", "gets")]
                counts.insert(2, size_text(line["bytes"]))
                waits = []
                for side in ("getters", "putters"):
                    names = [name if count == 1 else f"{name} ({count})" for name, count in line[side].items()]
                    waits.append(join_words(names) or "-")
                rows.append((f"    {printable(key)}", *counts, *waits))
        if len(rows) > 1:
            text.append_text(aligned(rows)).append("\n")
        elif stats:
            text.append("    empty, and no process waits\n", style="dim")
        for found in stats if verbose else ():
            for client, route in found["routes"].items():
                text.append(f"    {printable(client)} to {printable(found['home'])}: {route}\n", style="dim")
    text.rstrip()
    return text
