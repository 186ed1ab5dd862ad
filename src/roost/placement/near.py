"""Choose accelerators for components that are placed by count, so that rules about domains hold.

The search is exact: it goes rank by rank, tries every choice that is not like one tried before, and gives up after
`MOST_STEPS`. A block of ranks that belong into one domain is begun only where there is room for the whole of it, so
where levels are nested it hardly ever goes back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

MOST_STEPS = 1_500_000
"""So many atoms are looked at, about a second and a half."""


class Demand(NamedTuple):
    """A component that wants accelerators, one for each rank of its mesh."""

    name: str
    sizes: tuple[int, ...]
    """The sizes of the mesh; neighbouring ranks differ in the last."""
    keeps: Mapping[str, frozenset[int]]
    """For each level, the axes in which ranks of one domain may differ."""
    spreads: tuple[tuple[str, int], ...]
    """Levels, and over how many of their domains it is spread at least."""
    allowed: frozenset[int]
    """The accelerators that it may have."""


class UndecidedError(Exception):
    """The search was given up."""


def solve(demands: Sequence[Demand], domains: Mapping[str, Sequence[str | None]]) -> dict[str, list[int]] | None:
    """Return the accelerator of each rank of each demand; None if there is no way; UndecidedError after many tries.

    `domains` has for each level the domain of every accelerator.

    >>> near = Demand("actor", (2, 2), {"nvlink": frozenset({1})}, (), frozenset(range(5)))
    >>> solve([near], {"nvlink": ["a", "b", "b", "a", "a"]})
    {'actor': [0, 3, 1, 2]}
    """
    if sum(math.prod(one.sizes) for one in demands) > len(frozenset[int]().union(*(one.allowed for one in demands))):
        return None  # before the ranks of a mesh that is far too large are listed
    return _Search(demands, domains).run()


class _Block(NamedTuple):
    """One level of a demand: the block of each rank, in the order in which ranks are placed, and its size."""

    level: int
    of: list[int]
    size: int
    later: list[int]
    """For each rank, how many blocks there are after its own."""
    openers: frozenset[int]
    """The first rank of each block."""


class _Turn(NamedTuple):
    """A rank when its turn comes."""

    demand: int
    at: int
    """Its place in the order of its demand."""
    rank: int


class _Search:
    def __init__(self, demands: Sequence[Demand], domains: Mapping[str, Sequence[str | None]]) -> None:
        used = {level for one in demands for level in (*one.keeps, *(level for level, _ in one.spreads))}
        levels = [level for level in domains if level in used]
        # Larger blocks first; what has no rule takes what is left.
        self.demands = sorted(demands, key=lambda one: (not (one.keeps or one.spreads), -_whole(one), len(one.allowed)))
        # Accelerators that are alike in all that matters are one atom.
        atoms: dict[tuple[object, ...], list[int]] = {}
        for device in sorted(frozenset().union(*(one.allowed for one in demands))):
            marks = tuple(domains[level][device] for level in levels)
            may = tuple(device in one.allowed for one in self.demands)
            atoms.setdefault((marks, may), []).append(device)
        self.devices = list(atoms.values())
        self.domain: list[tuple[str | None, ...]] = [key[0] for key in atoms]  # type: ignore[misc]
        self.may: list[tuple[bool, ...]] = [key[1] for key in atoms]  # type: ignore[misc]
        self.room = [len(own) for own in self.devices]
        self.wholes = [_whole(one) for one in self.demands]
        self.blocks: list[list[_Block]] = []
        self.spreads = [[(levels.index(level), least) for level, least in one.spreads] for one in self.demands]
        self.cells: list[dict[tuple[str | None, ...], list[int]]] = []
        """For each demand, the atoms in a domain of its widest level, in one of that and of the next, and so on."""
        self.is_chain: list[bool] = []
        """For each demand, whether its levels are nested."""
        self.turns: list[_Turn] = []
        for index, demand in enumerate(self.demands):
            self._prepare(index, demand, levels)
        self.touched = [[Counter[str]() for _ in own] for own in self.spreads]
        self.open: dict[tuple[int, int, int], str] = {}
        self.inside: dict[tuple[int, str | None], list[int]] = {}
        """The atoms of each domain of each level."""
        for atom, domain in enumerate(self.domain):
            for key in enumerate(domain):
                self.inside.setdefault(key, []).append(atom)
        self.parts = self._find_parts()
        self.part_at = {
            atom: (at, place) for at, (_, atoms) in enumerate(self.parts) for place, atom in enumerate(atoms)
        }
        self.steps = 0
        self.chosen: list[int] = []

    def _prepare(self, index: int, demand: Demand, levels: Sequence[str]) -> None:
        """Put the ranks of a demand in an order in which its blocks are runs, the widest first among the levels."""
        inner = Counter(axis for axes in demand.keeps.values() for axis in axes)
        axes = sorted(range(len(demand.sizes)), key=lambda axis: (inner[axis], axis))
        ranks = []
        for point in product(*(range(demand.sizes[axis]) for axis in axes)):
            place = dict(zip(axes, point, strict=True))
            rank = 0
            for axis, size in enumerate(demand.sizes):
                rank = rank * size + place[axis]
            ranks.append((rank, place))
        blocks = []
        for level, kept in sorted(demand.keeps.items(), key=lambda item: -math.prod(demand.sizes[a] for a in item[1])):
            numbers: dict[tuple[int, ...], int] = {}
            outside = [axis for axis in axes if axis not in kept]
            of = [numbers.setdefault(tuple(place[a] for a in outside), len(numbers)) for _, place in ranks]
            seen: set[int] = set()
            later = []
            for block in reversed(of):
                later.append(len(seen - {block}) if block not in seen else len(seen) - 1)
                seen.add(block)
            openers = frozenset({block: at for at, block in reversed([*enumerate(of)])}.values())
            blocks.append(_Block(levels.index(level), of, len(ranks) // len(numbers), later[::-1], openers))
        cells: dict[tuple[str | None, ...], list[int]] = {}
        for atom, domain in enumerate(self.domain):
            if self.may[atom][index]:
                own = tuple(domain[block.level] for block in blocks)
                for depth in range(len(own)):
                    cells.setdefault(own[: depth + 1], []).append(atom)
        self.cells.append(cells)
        kept_sets = sorted(demand.keeps.values(), key=len)
        self.is_chain.append(all(one <= other for one, other in pairwise(kept_sets)))
        self.blocks.append(blocks)
        self.turns += [_Turn(index, at, rank) for at, (rank, _) in enumerate(ranks)]

    def run(self) -> dict[str, list[int]] | None:
        """Go down and back until every rank has an atom."""
        failed: set[object] = set()
        stack: list[Iterator[int]] = []
        has_gone_back = False
        while len(self.chosen) < len(self.turns):
            if len(stack) == len(self.chosen):
                # Until something fails there is little to learn from looking ahead.
                is_due = self._is_boundary() and (has_gone_back or self.turns[len(stack)].at == 0)
                is_hopeless = is_due and (self._state() in failed or not self._later_have_room())
                stack.append(iter(()) if is_hopeless else self._choices())
            if self.steps > MOST_STEPS:
                raise UndecidedError
            atom = next(stack[-1], None)
            if atom is not None:
                self._take(atom)
                continue
            has_gone_back = True
            if self._is_boundary():
                failed.add(self._state())
            stack.pop()
            if not stack:
                return None
            self._give_back()
        return self._assign()

    def _is_boundary(self) -> bool:
        """Tell whether no block is open before the next rank."""
        turn = self.turns[len(self.chosen)]
        whole = self.wholes[turn.demand]
        return turn.at % whole == 0 if whole > 1 else turn.at == 0

    def _state(self) -> object:
        """Return what decides how it goes on where no block is open, the same for parts that are alike."""
        return len(self.chosen), frozenset(Counter(self._mark(at) for at in range(len(self.parts))).items())

    def _mark(self, at: int) -> object:
        """Return the shape of a part of the fabric, the room in it, and what is touched there."""
        shape, atoms = self.parts[at]
        self.steps += len(atoms)
        touched = tuple(
            tuple(self.domain[atom][level] in one for atom in atoms)
            for own, counts in zip(self.spreads, self.touched, strict=True)
            for (level, _), one in zip(own, counts, strict=True)
        )
        return shape, tuple(self.room[atom] for atom in atoms), touched

    def _find_parts(self) -> list[tuple[object, list[int]]]:
        """Split the atoms into parts that have no domain in common, each with its shape."""
        part_of: dict[tuple[int, str], list[int]] = {}
        for atom, domain in enumerate(self.domain):
            keys = [(level, one) for level, one in enumerate(domain) if one is not None]
            joined = {id(part_of[key]): part_of[key] for key in keys if key in part_of}
            whole = max(joined.values(), key=len, default=[])
            for other in joined.values():
                if other is not whole:
                    whole += other
            whole.append(atom)
            own = [key for other in joined.values() if other is not whole for one in other
                   for key in enumerate(self.domain[one])]  # fmt: skip
            part_of.update({(level, one): whole for level, one in own if one is not None})
            part_of.update(dict.fromkeys(keys, whole))
            if not keys:
                part_of[-1, str(atom)] = whole
        found: list[tuple[object, list[int]]] = []
        for atoms in {id(part): sorted(part) for part in part_of.values()}.values():
            names: dict[object, int] = {}
            shape = tuple(
                (self.may[atom], tuple(-1 if one is None else names.setdefault((level, one), len(names))
                                       for level, one in enumerate(self.domain[atom])))
                for atom in atoms
            )  # fmt: skip
            found.append((shape, atoms))
        return found

    def _later_have_room(self) -> bool:
        """Tell whether each demand that is not done finds room, if it were alone."""
        turn = self.turns[len(self.chosen)]
        for index in range(turn.demand, len(self.demands)):
            demand = self.demands[index]
            self.steps += len(self.room)
            left = math.prod(demand.sizes) - (turn.at if index == turn.demand else 0)
            mine = [atom for atom, may in enumerate(self.may) if may[index] and self.room[atom]]
            if sum(self.room[atom] for atom in mine) < left:
                return False
            if self.is_chain[index] and self.blocks[index]:
                widest = self.blocks[index][0]
                if self._fitting(index, 0, mine) * widest.size < left:
                    return False
            for (level, least), touched in zip(self.spreads[index], self.touched[index], strict=True):
                if len({*touched, *(self.domain[atom][level] for atom in mine)} - {None}) < least:
                    return False
        return True

    def _fitting(self, index: int, depth: int, atoms: Sequence[int]) -> int:
        """Return how many blocks of a level have room in these atoms, for levels that are nested."""
        blocks = self.blocks[index]
        block = blocks[depth]
        parts: dict[str, list[int]] = {}
        for atom in atoms:
            domain = self.domain[atom][block.level]
            if domain is not None:
                parts.setdefault(domain, []).append(atom)
        total = 0
        for own in parts.values():
            if depth + 1 < len(blocks):
                total += self._fitting(index, depth + 1, own) // (block.size // blocks[depth + 1].size)
            else:
                total += sum(self.room[atom] for atom in own) // block.size
        return total

    def _lowest(self, turn: _Turn) -> int:
        """Return the first atom that the rank may have: equal ranks, and equal blocks, come in the order of atoms."""
        if not turn.at:
            return 0
        start = len(self.chosen) - turn.at
        blocks = self.blocks[turn.demand]
        if not blocks or all(block.of[turn.at] == block.of[turn.at - 1] for block in blocks):
            return self.chosen[-1]
        if self._is_boundary() or not self.is_chain[turn.demand]:
            return 0  # of states that are alike, one is tried
        # The widest block that begins here follows another within the same one.
        wide = next(block for block in blocks if block.of[turn.at] != block.of[turn.at - 1])
        return self.chosen[start + turn.at - wide.size]

    def _choices(self) -> Iterator[int]:
        """Yield the atoms that the next rank may have."""
        turn = self.turns[len(self.chosen)]
        index, blocks = turn.demand, self.blocks[turn.demand]
        known = [self.open.get((index, at, block.of[turn.at])) for at, block in enumerate(blocks)]
        new = next((at for at, domain in enumerate(known) if domain is None), None)
        checked: dict[tuple[str | None, ...], bool] = {}
        alike: set[object] = set()
        is_boundary = self._is_boundary()
        begun = [self.inside[block.level, one] for block, one in zip(blocks, known, strict=True) if one is not None]
        lowest = self._lowest(turn)
        for atom in min(begun, key=len) if begun else range(lowest, len(self.room)):
            self.steps += 1
            if atom < lowest or not self.room[atom] or not self.may[atom][index]:
                continue
            own = tuple(self.domain[atom][block.level] for block in blocks)
            if None in own or any(one not in (None, mine) for one, mine in zip(known, own, strict=True)):
                continue
            if new is not None and self.is_chain[index]:
                cell = own[: new + 1]
                if cell not in checked:
                    checked[cell] = self._has_room(index, cell)
                if not checked[cell]:
                    continue
            if not self._can_spread(turn, atom):
                continue
            if is_boundary and blocks:
                at, place = self.part_at[atom]
                mark = (self._mark(at), place)
                if mark in alike:
                    continue
                alike.add(mark)
            yield atom

    def _has_room(self, index: int, cell: tuple[str | None, ...]) -> bool:
        """Tell whether a block can begin in these domains of its own level and of wider ones."""
        return self._fitting(index, len(cell) - 1, self.cells[index][cell]) > 0

    def _can_spread(self, turn: _Turn, atom: int) -> bool:
        """Tell whether the ranks after this one can still reach as many domains as they must."""
        for at, (level, least) in enumerate(self.spreads[turn.demand]):
            touched = self.touched[turn.demand][at]
            missing = least - len(touched) - (self.domain[atom][level] not in (None, *touched))
            if missing > 0 and missing > self._more_domains(turn, level):
                return False
        return True

    def _more_domains(self, turn: _Turn, level: int) -> int:
        """Return how many domains the ranks after this one can add at most: one for each block that is to come."""
        left = math.prod(self.demands[turn.demand].sizes) - turn.at - 1
        block = next((block for block in self.blocks[turn.demand] if block.level == level), None)
        return block.later[turn.at] if block is not None else left

    def _take(self, atom: int) -> None:
        turn = self.turns[len(self.chosen)]
        self.room[atom] -= 1
        for at, block in enumerate(self.blocks[turn.demand]):
            domain = self.domain[atom][block.level]
            if domain is not None:
                self.open.setdefault((turn.demand, at, block.of[turn.at]), domain)
        for (level, _), touched in zip(self.spreads[turn.demand], self.touched[turn.demand], strict=True):
            if (domain := self.domain[atom][level]) is not None:
                touched[domain] += 1
        self.chosen.append(atom)

    def _give_back(self) -> None:
        atom = self.chosen.pop()
        turn = self.turns[len(self.chosen)]
        self.room[atom] += 1
        for at, block in enumerate(self.blocks[turn.demand]):
            if turn.at in block.openers:
                del self.open[turn.demand, at, block.of[turn.at]]
        for (level, _), touched in zip(self.spreads[turn.demand], self.touched[turn.demand], strict=True):
            if (domain := self.domain[atom][level]) is not None:
                touched[domain] -= 1
                touched += Counter()  # forgets what is at zero

    def _assign(self) -> dict[str, list[int]]:
        """Give the accelerators of each atom in their order to the ranks of each demand in theirs."""
        by_atom: dict[int, list[tuple[int, int]]] = {}
        for turn, atom in zip(self.turns, self.chosen, strict=True):
            by_atom.setdefault(atom, []).append((turn.demand, turn.rank))
        found = {demand.name: [0] * math.prod(demand.sizes) for demand in self.demands}
        for atom, takers in by_atom.items():
            for (index, rank), device in zip(sorted(takers), self.devices[atom], strict=False):
                found[self.demands[index].name][rank] = device
        return found


def _whole(demand: Demand) -> int:
    """Return how many ranks hang together by rules of any level."""
    axes = frozenset[int]().union(*demand.keeps.values())
    return math.prod(demand.sizes[axis] for axis in axes)
