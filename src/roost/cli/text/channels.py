"""The channels of live jobs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from roost.cli.text.layout import aligned
from roost.text import join_words, plural, printable, size_text

if TYPE_CHECKING:
    from roost.comm.channels.status import ChannelStatus, HomeStatus


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
    text.append(f"  {_where(channel.homes)}")
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


def _where(homes: Sequence[HomeStatus]) -> str:
    return f"on {homes[0].node}" if len(homes) == 1 else f"on {plural(len(homes), 'node')}"


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
