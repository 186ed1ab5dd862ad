"""Commands that meet a live Ray cluster: its nodes, its jobs, and a practice cluster on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from roost.cli.show import aligned
from roost.config.hardware import ACCELERATOR
from roost.config.ranks import format_ranks
from roost.config.topology import Topology
from roost.errors import ClusterError, ConfigError
from roost.placement.plan import Piece, Plan
from roost.text import join_words, plural

if TYPE_CHECKING:
    from roost.runtime.connect.local_cluster import PracticeCluster
    from roost.runtime.nodes.info import AcceleratorInfo, NodeInfo
    from roost.runtime.reserve.occupancy import Holdings
    from roost.runtime.status import ClusterStatus, JobStatus

_STOP_SECONDS = 30.0
_MOST_LINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHardware:
    """The live cluster as a job would get it, and who has what of it now."""

    topology: Topology
    nodes: tuple[NodeInfo, ...]
    holdings: Holdings
    note: str = ""

    @property
    def taken(self) -> list[Piece]:
        """The accelerators that somebody has, wholly or in part."""
        return sorted(self.holdings.by_piece)


def live_hardware(num_nodes: int | None, address: str | None) -> LiveHardware:
    """The hardware of the live cluster as a job with `num_nodes` would get it."""
    from roost.runtime.nodes.discover import first_nodes, make_topology
    from roost.runtime.status import look_at_holdings

    nodes, holdings = look_at_holdings(address)
    if num_nodes is not None and len(nodes) < num_nodes:
        raise ClusterError(
            f"num_nodes is {num_nodes}, but the cluster has {plural(len(nodes), 'node')} now: "
            f"{join_words([str(node) for node in nodes])}",
            hint="wait for the others, or plan on --cluster or --inventory",
        )
    used, notice = first_nodes(nodes, num_nodes)
    note = f"note: {notice}" if notice else ""
    return LiveHardware(topology=make_topology(used), nodes=used, holdings=holdings, note=note)


def start_check(plan: Plan, live: LiveHardware) -> Text:
    """Whether a plan would start now, and who is in its way."""
    from roost.placement.fit import nearest_fit

    wanted = sorted(piece for piece in plan.occupants() if piece.kind == ACCELERATOR)
    text = Text()
    in_the_way = [piece for piece in wanted if live.holdings.of(piece)]
    unsure = sorted({piece.node_rank for piece in wanted} & set(live.holdings.somewhere))
    if not in_the_way and not unsure:
        text.append("this plan would start now: its accelerators are free", style="green")
        return text
    if in_the_way:
        text.append(f"this plan would not start now: {plural(len(in_the_way), 'accelerator')} of it taken\n", "red")
    else:
        text.append("this plan may not start now\n", style="yellow")
    for piece in in_the_way[:_MOST_LINES]:
        text.append(f"  {piece}  {join_words(live.holdings.of(piece))}\n")
    if len(in_the_way) > _MOST_LINES:
        text.append(f"  and {len(in_the_way) - _MOST_LINES} more\n")
    for rank in unsure:
        held = join_words([f"{item.amount:g} {item.holder}" for item in live.holdings.somewhere[rank]])
        text.append(f"  node {rank}: {held}; which is not known\n")
    components = {component.name: component.placements for component in plan.components}
    fit = nearest_fit(plan.topology, components, live.holdings.free_pieces(live.nodes))
    if fit:
        text.append("  this would fit now: " + ", ".join(f"{name}: {ranks}" for name, ranks in fit.items()))
    text.rstrip()
    return text


def nodes_table(nodes: Sequence[NodeInfo]) -> Text:
    """One line for each node."""
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
    return aligned(rows)


def status_text(status: ClusterStatus) -> Text:
    """What is on the cluster, for people."""
    accelerators = sum(node.num_accelerators for node in status.nodes)
    text = Text()
    text.append(f"Ray at {status.address}", style="bold")
    text.append(f"  {plural(len(status.nodes), 'node')}, {plural(accelerators, 'accelerator')}\n")
    if not status.jobs:
        text.append("no job of Roost\n")
    for item in status.jobs:
        text.append(f"job {item.namespace}", style="bold")
        text.append(f"  {_driver(item)}\n")
        workers = ", ".join(f"{count} {state}" for state, count in item.workers) or "none"
        text.append(f"  workers   {workers}\n")
        text.append(f"  managers  {join_words(item.managers) or 'none'}\n")
        if item.missing_managers:
            text.append(
                f"  {join_words(item.missing_managers)} died: close the job's Cluster and start it anew\n", style="red"
            )
    if accelerators:
        text.append("accelerators\n", style="bold")
    for node in status.nodes:
        text.append(_holdings_text(node, status.holdings))
    if status.leftovers:
        text.append(f"left over from jobs that have ended ({len(status.leftovers)})\n", style="bold yellow")
        for left in status.leftovers:
            text.append(f"  pid {left.pid} on {left.node}, of {left.job}: {left.command[:80]}\n")
        text.append("  end them with kill, on their node\n", style="dim")
    text.rstrip()
    return text


def _holdings_text(node: NodeInfo, holdings: Holdings) -> Text:
    """Who has the accelerators of a node, those in a row with the same holder on one line."""
    from roost.runtime.reserve.occupancy import pieces_on

    text = Text()
    lines: list[tuple[list[int], str]] = []
    for piece in pieces_on(node):
        held = holdings.of(piece)
        who = join_words([f"{item}{f': {join_words(item.users)}' if item.users else ''}" for item in held]) or "free"
        if lines and lines[-1][1] == who:
            lines[-1][0].append(piece.local_rank)
        else:
            lines.append(([piece.local_rank], who))
    if lines:
        text.append(f"  {node}\n")
    for ranks, who in lines:
        text.append(f"    {format_ranks(ranks):<6} {who}\n", style="" if who != "free" else "dim")
    for item in holdings.somewhere.get(node.rank, ()):
        text.append(f"    of these {item.amount:g} {item.holder}\n", style="yellow")
    return text


def start_practice(spec: str, cpus: int) -> Text:
    """Start a practice cluster that stays."""
    from roost.runtime.connect.local_cluster import keep_practice, one_at_a_time, read_practice
    from roost.testing.local import LocalCluster, local_nodes

    local = LocalCluster(local_nodes(spec, cpus=cpus), stays=True)
    with one_at_a_time():
        before = read_practice()
        if before is not None:
            hint = "roost down ends it"
            raise ConfigError(f"a practice cluster {before.spec} is up already, at {before.address}", hint=hint)
        local.start()
        try:
            practice = keep_practice(spec, local.address, local.environment, local.keeper_pid)
            local.leave_running()
        except BaseException:
            local.stop()
            raise
    return _practice_text(practice, len(local.nodes))


def stop_practice() -> Text:
    """Stop the practice cluster and wait until it is gone."""
    from roost.runtime.connect.local_cluster import end_practice, one_at_a_time

    with one_at_a_time():
        practice = end_practice(_STOP_SECONDS)
    return Text("no practice cluster is up" if practice is None else f"the practice cluster {practice.spec} is down")


def _practice_text(practice: PracticeCluster, num_nodes: int) -> Text:
    text = Text()
    text.append(f"practice cluster {practice.spec} is up at {practice.address}\n", style="bold")
    text.append(
        f"  Cluster(num_nodes={num_nodes}) on this machine joins it; so do roost nodes, status and plan --live\n"
    )
    text.append("  other programs that use Ray join it with\n")
    for name, value in practice.environment.items():
        text.append(f"    export {name}={value}\n")
    text.append("  roost down ends it")
    return text


def _driver(item: JobStatus) -> str:
    if item.job is None:
        return "its NodeManager does not answer"
    age = max(0, int(time.time() - item.job.since))
    return f"pid {item.job.pid} on {item.job.host}, by {item.job.user}, for {age} s: {item.job.command}"


def _accelerators(accelerators: Sequence[AcceleratorInfo]) -> str:
    if not accelerators:
        return "-"
    models = dict.fromkeys(item.model or str(item.type) for item in accelerators)
    memory = accelerators[0].memory
    devices = [item.device for item in accelerators]
    out = f"{len(accelerators)} x {'/'.join(models)}"
    if memory:
        out += f" {_size(memory)}"
    if devices != [str(index) for index in range(len(devices))]:
        out += f" (devices {','.join(devices)})"
    return out


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB"
