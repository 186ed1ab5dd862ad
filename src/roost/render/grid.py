"""The picture model: what every drawing of a plan shows, before it is drawn.

A plan becomes rows, one for each node; runs of equal nodes fold into one row. A row has strips, one for each kind of
hardware on the node; a strip has cells, the pieces of hardware. Workers are blocks over cells, in as many lanes as they
need so that no two overlap: a shared cell shows blocks above each other, and a worker with several cells is one block,
joined where its cells are apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from roost.config.hardware import ACCELERATOR, BARE_NODE
from roost.config.node_groups import CLUSTER, RESERVED
from roost.config.ranks import format_ranks, runs_of
from roost.config.topology import Node
from roost.placement.placement import Piece
from roost.placement.plan import ComponentPlan, Plan
from roost.text import plural

# Okabe and Ito's colours, which people with any colour vision can tell apart; text always accompanies them.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_FOLD_FROM_NODES = 9
_FOLD_RUN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Workers of one component on the same cells of a strip; nearly always one worker."""

    component: int
    ranks: tuple[int, ...]
    cells: tuple[int, ...]
    goes_on: tuple[bool, bool] = (False, False)
    """Whether what is one, such as an engine, goes on at a node before this one, and at a node after it."""

    @property
    def ranks_text(self) -> str:
        """The ranks, abbreviated: `3`, `0-15`, or `0,8,16 +5`."""
        text = format_ranks(self.ranks)
        if text.count(",") < 3:
            return text
        return ",".join(map(str, self.ranks[:3])) + f" +{len(self.ranks) - 3}"

    def pieces(self, within: range) -> list[tuple[int, int]]:
        """Return the runs of neighbouring cells within a line of the picture, as (first, last)."""
        shown = [cell for cell in self.cells if cell in within]
        return [(run.first, run.last) for run in runs_of(shown)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The hardware of one kind on a node, and the workers on it, in lanes."""

    kind: str
    title: str
    cells: int
    lanes: tuple[tuple[Block, ...], ...]
    others: tuple[int, ...] = ()
    """Cells used only by components that are not shown."""
    taken: tuple[int, ...] = ()
    """Cells that another job has now."""
    notes: tuple[tuple[str, ...], ...] = ()
    """Lines of text below the blocks, each with a word for every cell."""
    ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The hardware ranks of the cells as a job writes them, by the node groups that they are counted over."""

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all lanes."""
        return [block for lane in self.lanes for block in lane]

    @property
    def ranks_texts(self) -> list[str]:
        """The hardware ranks in words: `ranks 8-15`, or `ranks 0-7 of a800` where a node group counts them."""
        return [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
            + ("" if label == CLUSTER else f" of {label}")
            for label, ranks in self.ranks
        ]

    def label(self, cell: int) -> str:
        """Return the number of a cell, with a mark if it is taken."""
        return f"{cell} !" if cell in self.taken else str(cell)

    def empty(self) -> dict[int, str]:
        """Return the cells with no block over them, each with a word for its state."""
        used = {cell for block in self.blocks for cell in block.cells}
        said = dict.fromkeys(range(self.cells), "idle") | dict.fromkeys(self.taken, "taken")
        said |= dict.fromkeys(self.others, "other")
        return {cell: text for cell, text in said.items() if cell not in used}

    def shape(self) -> object:
        """Return what two strips must have in common to look alike: everything but the ranks."""
        lanes = tuple(tuple((b.component, b.cells, len(b.ranks), b.goes_on) for b in lane) for lane in self.lanes)
        labels = tuple(label for label, _ in self.ranks)
        return self.kind, self.title, self.cells, self.others, self.taken, self.notes, labels, lanes


class Run(NamedTuple):
    """Neighbouring cells that are alike in something: a domain, or how full their memory is."""

    first: int
    last: int
    text: str
    part: float | None = None
    """How full a bar is; above 1, it overflows. None for a domain."""


Line = tuple[str, tuple[Run, ...]]
"""A name, and runs of the cells of a row's first strip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node, or a run of equal nodes; the strips are those of the first."""

    first: int
    last: int
    name: str
    strips: tuple[Strip, ...]
    lines: tuple[Line, ...] = ()
    """Domains and bars below the strips."""
    folded: str = ""
    """For a run of nodes: how many they are, and the ranks of each component on all of them."""

    @property
    def count(self) -> int:
        """How many nodes the row represents."""
        return self.last - self.first + 1

    @property
    def title(self) -> str:
        """`node 3`, or `nodes 0-62`."""
        return f"node {self.first}" if self.count == 1 else f"nodes {self.first}-{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the legend; components that are not shown have one too, with `shown` false."""

    name: str
    colour: str
    summary: str
    shown: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The whole picture."""

    title: str
    summary: str
    rows: tuple[Row, ...]
    legend: tuple[Entry, ...]
    mark: str = ""
    """Remarks that a reader needs before believing the picture."""


def make_grid(
    plan: Plan,
    *,
    title: str = "",
    fold: bool = True,
    only: Iterable[str] | None = None,
    taken: Iterable[Piece] = (),
    notes: Sequence[Mapping[Piece, str]] = (),
    lines: Mapping[int, Sequence[Line]] | None = None,
    assumed: str = "",
    remarks: Sequence[str] = (),
) -> Grid:
    """Make the picture of a plan, or of some of its components.

    `fold=False` gives every node its own row; `taken` is the hardware that other jobs have now; each of `notes` is a
    line of words below the pieces of hardware that it names; `lines` are domains and bars by node rank. `assumed` is
    hardware that nobody described, in shorthand: the picture says so, and `remarks` below it.
    """
    held = set(taken)
    shown = set((plan if only is None else plan.only(only)).names)
    blocks = _blocks_by_node(plan)
    hidden = {index for index, component in enumerate(plan.components) if component.name not in shown}
    rows = [
        Row(
            first=rank,
            last=rank,
            name=node.name or node.address or "",
            strips=tuple(_strips(plan, rank, node, blocks.get(rank, {}), hidden, held, notes)),
            lines=tuple((lines or {}).get(rank, ())),
        )
        for rank, node in enumerate(plan.topology.nodes)
    ]
    if fold and len(rows) >= _FOLD_FROM_NODES:
        rows = _fold(rows, plan.names)
    parts = [plural(plan.topology.num_nodes, "node"), plural(plan.topology.num_accelerators, "accelerator")]
    if plan.components:
        workers = sum(component.world_size for component in plan.components if component.name in shown)
        parts += [plural(workers, "worker"), plan.mode.value, f"plan {plan.hash[:8]}"]
    if held:
        parts.append(f"! {len(held)} taken by others")
    legend = tuple(
        Entry(
            name=component.name,
            colour=PALETTE[index % len(PALETTE)],
            summary=_summary(component),
            shown=component.name in shown,
        )
        for index, component in enumerate(plan.components)
    )
    marks = [f"! assumed hardware: {assumed}; the job may get other nodes"] if assumed else []
    if any(component.by_count for component in plan.components):
        marks.append("by count: Ray chooses which GPUs; drawn as on an empty cluster")
    mark = " · ".join([*marks, *remarks])
    return Grid(title=title, summary=" · ".join(parts), rows=tuple(rows), legend=legend, mark=mark)


def ink(colour: str) -> str:
    """Return black or white, whichever reads better on the colour."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    # The WCAG contrasts with white and with black are equal where (1.05 / (l + .05)) = ((l + .05) / .05).
    return "#000000" if light > 0.179 else "#FFFFFF"


def short_names(names: Sequence[str], length: int) -> list[str]:
    """Return a distinct key of about `length` letters for each name: itself, its beginning, its initials, or a number.

    A beginning ends in an ellipsis, or is a single letter: it must not look like another name, or a typing mistake.

    >>> short_names(["rollout", "reward_model", "reward_rule", "env1", "env2"], 4)
    ['rol…', 'rm', 'rr', 'env1', 'env2']
    >>> short_names(["rollout", "actor", "env1", "env2"], 3)
    ['ro…', 'ac…', 'e#2', 'e#3']
    """
    cuts = [name if len(name) <= length else name[:1] if length == 1 else f"{name[: length - 1]}…" for name in names]
    initials = ["".join(part[:1] for part in re.split(r"[_.-]+", name))[:length] for name in names]
    cut_counts, initial_counts = Counter(cuts), Counter(initials)
    keys: list[str] = []
    for index, name in enumerate(names):
        if cut_counts[cuts[index]] == 1:
            keys.append(cuts[index])
        elif len(initials[index]) > 1 and initial_counts[initials[index]] == 1 and initials[index] not in cut_counts:
            keys.append(initials[index])
        else:
            keys.append(numbered(name, index))
    return keys


def numbered(name: str, index: int) -> str:
    """Return a key that no name can be, and no beginning of one."""
    return f"{name[:1]}#{index}"


def cells_per_line(cells: int, most: int) -> int:
    """Return how many cells to put in a line where `most` fit, so that lines are equal if possible."""
    most = max(1, most)
    even = [size for size in range(1, most + 1) if cells % size == 0]
    lines = -(-cells // most)
    balanced = -(-cells // lines)
    return even[-1] if even[-1] * 2 > balanced else balanced


_NodeBlocks = dict[str, list[Block]]


def _blocks_by_node(plan: Plan) -> dict[int, _NodeBlocks]:
    """Return the blocks of each node and kind of hardware, in order of components and cells."""
    found: dict[int, _NodeBlocks] = {}

    def add(node_rank: int, kind: str, block: Block) -> None:
        found.setdefault(node_rank, {}).setdefault(kind, []).append(block)

    for index, component in enumerate(plan.components):
        if component.together > 1:
            # A block for each node of what works as one, such as an engine.
            for start in range(0, component.world_size, component.together):
                members = component.placements[start : start + component.together]
                nodes = list(dict.fromkeys(item.cluster_node_rank for item in members))
                for node_rank in nodes:
                    own = [item for item in members if item.cluster_node_rank == node_rank]
                    own_cells = sorted({cell for item in own for cell in item.local_hardware_ranks})
                    block = Block(
                        component=index,
                        ranks=tuple(item.rank for item in own),
                        cells=tuple(own_cells) or (0,),
                        goes_on=(node_rank != nodes[0], node_rank != nodes[-1]),
                    )
                    add(node_rank, own[0].hardware_type if own_cells else BARE_NODE, block)
            continue
        together: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
        for placement in component.placements:
            cells = placement.local_hardware_ranks or (0,)
            kind = placement.hardware_type if placement.local_hardware_ranks else BARE_NODE
            together.setdefault((placement.cluster_node_rank, kind, cells), []).append(placement.rank)
        for (node_rank, kind, cells), ranks in together.items():
            add(node_rank, kind, Block(component=index, ranks=tuple(ranks), cells=cells))
    return found


def _strips(
    plan: Plan,
    rank: int,
    node: Node,
    blocks: _NodeBlocks,
    hidden: set[int],
    held: set[Piece],
    notes: Sequence[Mapping[Piece, str]],
) -> Iterable[Strip]:
    def strip(kind: str, title: str, cells: int) -> Strip:
        found = blocks.get(kind, [])
        others = {cell for block in found if block.component in hidden for cell in block.cells}
        lanes = _lanes([block for block in found if block.component not in hidden])
        taken = tuple(cell for cell in range(cells) if held and Piece(rank, kind, cell) in held)
        pieces = [Piece(rank, kind, -1 if kind == BARE_NODE else cell) for cell in range(cells)]
        said = tuple(tuple(words.get(piece, "") for piece in pieces) for words in notes)
        return Strip(
            kind=kind,
            title=title,
            cells=cells,
            lanes=lanes,
            others=tuple(sorted(others)),
            taken=taken,
            notes=tuple(line for line in said if any(line)),
            ranks=tuple(_ranks(plan, rank, kind, cells, [block.component for block in found])),
        )

    if node.accelerators:
        models = dict.fromkeys(item.model or item.type for item in node.accelerators)
        yield strip(ACCELERATOR, f"{len(node.accelerators)} x {'/'.join(models)}", len(node.accelerators))
    declared = plan.topology.declared_on(rank)
    for kind, count in declared.items():
        yield strip(kind, f"{count} x {kind}", count)
    if BARE_NODE in blocks or not (node.accelerators or declared):
        title = "the node itself" if node.accelerators or declared else "no accelerators"
        yield strip(BARE_NODE, title, 1)


def _ranks(
    plan: Plan, node_rank: int, kind: str, cells: int, components: Sequence[int]
) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Yield the ranks of a node's cells, over the node groups of the components on it, or else over the cluster."""
    used = {plan.components[index].node_groups or (CLUSTER,): None for index in components}
    if not used and kind == ACCELERATOR:
        used = {(CLUSTER,): None}
    for labels in used:
        # A bare node's rank in the whole cluster is its node rank, which its row has already.
        if kind != BARE_NODE or not set(labels) <= set(RESERVED):
            first = plan.topology.space(labels).rank_of(node_rank, 0, kind)
            yield ",".join(labels), tuple(range(first, first + cells))


def _lanes(blocks: Sequence[Block]) -> tuple[tuple[Block, ...], ...]:
    """Put blocks into the first lane that has room; the blocks of one component stay together."""
    lanes = _Lanes()
    for _, own in groupby(blocks, key=lambda block: block.component):
        together = _Lanes()
        for block in sorted(own, key=lambda block: block.cells):
            together.put([block])
        for part in together.lanes:
            lanes.put(part)
    return tuple(tuple(sorted(lane, key=lambda block: block.cells)) for lane in lanes.lanes)


class _Lanes:
    """Lanes that are filled, with a bit for each cell that is taken."""

    def __init__(self) -> None:
        self.lanes: list[list[Block]] = []
        self._taken: list[int] = []
        self._first: dict[int, int] = {}
        """By the bits of a part: the first lane that may have room. Lanes only get fuller."""

    def put(self, part: list[Block]) -> None:
        """Add blocks to the first lane without an overlap, or to a new one."""
        bits = 0
        for block in part:
            first, last = block.cells[0], block.cells[-1]
            bits |= ((1 << (last - first + 1)) - 1) << first
        at = self._first.get(bits, 0)
        while at < len(self.lanes) and self._taken[at] & bits:
            at += 1
        self._first[bits] = at
        if at == len(self.lanes):
            self.lanes.append([])
            self._taken.append(0)
        self.lanes[at].extend(part)
        self._taken[at] |= bits


def _fold(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    folded: list[Row] = []
    for _, run in groupby(rows, key=lambda row: (row.lines, *(strip.shape() for strip in row.strips))):
        same = list(run)
        if len(same) < _FOLD_RUN:
            folded += same
            continue
        ranks: dict[int, list[int]] = {}
        for block in (block for row in same for strip in row.strips for block in strip.blocks):
            ranks.setdefault(block.component, []).extend(block.ranks)
        # The strips of the first node, with the ranks of all.
        alike = []
        for strips in zip(*(row.strips for row in same), strict=True):
            own = [
                (label, tuple(sorted({rank for strip in strips for rank in strip.ranks[index][1]})))
                for index, (label, _) in enumerate(strips[0].ranks)
            ]
            alike.append(replace(strips[0], ranks=tuple(own)))
        said = " · ".join(
            f"{names[index]} {format_ranks(sorted(set(found)))}" for index, found in sorted(ranks.items())
        )
        folded.append(
            Row(
                first=same[0].first,
                last=same[-1].last,
                name="" if not same[0].name else f"{same[0].name} … {same[-1].name}",
                strips=tuple(alike),
                lines=same[0].lines,
                folded=f"{len(same)} nodes alike: {said or 'idle'}",
            )
        )
    return folded


def _summary(component: ComponentPlan) -> str:
    workers = plural(component.world_size, "worker")
    sizes = sorted({len(placement.local_hardware_ranks) for placement in component.placements})
    kind = component.placements[0].hardware_type
    shared = component.world_size > len(component.hardware_ranks)
    if sizes == [0]:
        what = f"on {plural(len(component.hardware_ranks), 'node')}"
    elif shared:
        what = f"on {plural(len(component.hardware_ranks), kind)}"
    elif len(sizes) == 1:
        what = f"{plural(sizes[0], kind)} each"
    else:
        what = f"{sizes[0]}-{sizes[-1]} {kind}s each"
    stride = f", stride {component.stride}" if component.stride > 1 else ""
    where = f" of {', '.join(component.node_groups)}" if component.node_groups else ""
    word = "node" if sizes == [0] else "rank"
    unit = word if len(component.hardware_ranks) == 1 else f"{word}s"
    shape = f"; {component.shape}" if component.shape else ""
    return f"{workers}, {what}{stride}; {unit} {format_ranks(component.hardware_ranks)}{where}{shape}"
