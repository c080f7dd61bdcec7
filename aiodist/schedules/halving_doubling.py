"""Reductions by recursive halving, and results by recursive doubling: few frames to few ranks.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004, with vector halving
and distance doubling; where P is no power of two, neighbours are folded as in
`recursive_doubling`. In step k partners that are 2^k apart swap halves of what they still reduce,
so a partial result covers consecutive ranks: operands stand in rank order, and operators need not
commute. Each unit is reduced at one place, so the results are bit-identical on all ranks. Then the
same partners swap results, in the opposite order.

Why blocks: partial results stand in scratch, half of the array, a quarter, and so on. An array that
is longer than a block is reduced block by block, so that scratch does not grow with it. Nobody says
"your frame has come" for that: whoever has a result of its partner knows that the partner had its
partial result before. That is when the next block's frames are granted::

    reduce   p0 → p1 → p2, then results   p2 → p1 → p0
                                grants for   p2   p1   p0   of the next block

The memory that p(k) fills is read until the partner p(k + 1) has taken half of it in, which shows
in that one's result. So the grant is there before the next block is, and the wire never idles for
it. Where results go to one rank alone, empty frames say what results say else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from aiodist.schedules.cuts import Cut, pieces
from aiodist.schedules.frames import Frame, alone, granted, sends, swap
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.schedules.recursive_doubling import ranks_of, role_of
from aiodist.schedules.script import Script


def all_reduce(rank: int, size: int, length: int, segment: int, block: int) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Bulk.

    X may be OUT; otherwise it is not altered. Partial results lie in TMP and travel from there, so
    TMP may hold a wider type than X and OUT. No rank completes before all have entered.

    Rounds: 2 log2 P for each block of `block` units, and at most two more where P is no power of
    two. On the wire per rank: 2 (P - 1) / P of `length`; where P is no power of two, up to
    `length` more each way. Connections: log2 P, or one more. Scratch: at most two blocks, and a
    unit a round.
    """
    return _in_blocks("halving_doubling.all_reduce", rank, size, None, length, segment, block)


def reduce(rank: int, size: int, root: int, length: int, segment: int, block: int) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of `root`. Bulk.

    At `root` X may be OUT; elsewhere OUT is not used and X not altered. Partial results, and
    results on their way to `root`, lie in TMP and travel from there. `root` hears from all, the
    others do not.

    Rounds: 2 log2 P for each block, and at most two more where P is no power of two. On the wire
    per rank: less than 2 times `length`, and `length` more where P is no power of two.
    Connections: log2 P, or one more. Scratch: at most three blocks, and a unit a round.
    """
    return _in_blocks("halving_doubling.reduce", rank, size, root, length, segment, block)


def reduce_scatter(rank: int, size: int, bounds: Sequence[int], segment: int) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Bulk.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. X must not be OUT, and is not altered. Partial results lie in TMP and
    travel from there. No rank completes before all have entered.

    Halving with the nearest partner first keeps the order of the ranks, but leaves slices with
    others than their owners. One more frame takes each to its own.

    Rounds: log2 P and one more, two more where P is no power of two. On the wire per rank: less
    than X and a slice; where P is no power of two, X once more. Connections: log2 P + 2, or one
    more. Scratch: X, the own slice, and what halving leaves: twice X in all where slices are even.
    """
    name = "halving_doubling.reduce_scatter"
    if size == 1:
        return _alone(name, bounds[-1])
    block = _Slices(rank, size, bounds, segment)
    steps = granted(Script(step for part in block.parts for step in part.steps))
    return Plan(name, rank, size, steps.steps(), eager=False, scratch=block.scratch)


def _alone(name: str, length: int) -> Plan:
    whole = Reduce(Span(OUT, 0, length), (Span(X, 0, length),))
    return Plan(name, 0, 1, (whole,), eager=False)


def _in_blocks(
    name: str, rank: int, size: int, root: int | None, length: int, segment: int, block: int
) -> Plan:
    if size == 1:
        return _alone(name, length)
    cuts = pieces(0, length, block) or [(0, 0)]
    width, last = cuts[0][1], len(cuts) - 1

    @cache  # each is looked at for its own steps, and for the grants of the one before
    def block_of(k: int) -> _Block:
        if root is None:
            return _Everywhere(rank, size, cuts[k], segment, width)
        return _ToRoot(rank, size, cuts[k], segment, width, root, last=k == last)

    def reduction(k: int) -> list[Step]:
        steps: list[Step] = []
        due = block_of(k + 1).due() if k < last else {}
        for part in block_of(k).parts:
            steps += part.steps
            steps += [Grant(peer, due[peer]) for peer in part.frees if peer in due]
        return steps

    first = block_of(0)
    script = Script(Grant(peer, count) for peer, count in first.due().items())
    script.repeat(len(cuts), reduction, margin=2)
    return Plan(name, rank, size, script.steps(), eager=False, scratch=first.scratch)


def _edges(length: int, parts: int) -> list[int]:
    """Offsets that cut `length` units so that halves are halves also where there are fewer units
    than parts."""
    return [length * part // parts for part in range(parts + 1)]


class _Part(NamedTuple):
    """Steps, and the peers whose frames of the next block have a place once these are done."""

    steps: Iterable[Step]
    frees: tuple[int, ...] = ()


class _Held(NamedTuple):
    """What a rank swaps with a partner: units of the block, counted from its first."""

    partner: int
    given: Cut
    kept: Cut


class _Block:
    """The steps of one rank for one block: the partial results. Subclasses say where results go.

    Memory is named by a span whose first unit is unit 0 of the block, also where only some units of
    the block are there. All blocks have their places in scratch where the longest one, of `width`
    units, has them.
    """

    def __init__(self, rank: int, size: int, cut: Cut, segment: int, width: int) -> None:
        self.rank = rank
        self.size = size
        self.segment = segment
        self.role = role_of(rank, size)
        self.whole: Cut = (0, cut[1] - cut[0])
        self.x, self.out = Span(X, *cut), Span(OUT, *cut)
        # What is given away: a copy, or what a neighbour has added to.
        self.width = width
        self.loaded = Span(TMP, 0, width)
        self.scratch = width
        self.parts: list[_Part] = []
        self.held: list[_Held] = []

    def due(self) -> dict[int, int]:
        """How many frames come from each peer."""
        found: dict[int, int] = {}
        for part in self.parts:
            for step in part.steps:
                if isinstance(step, Recv):
                    found[step.peer] = found.get(step.peer, 0) + 1
        return found

    def cut(self, base: Span, part: Cut) -> list[Span]:
        """Units `part` of the block in segments. At least one, if empty: its frame says that all
        steps before are done."""
        return [
            Span(base.buffer, base.start + start, base.start + stop)
            for start, stop in pieces(*part, self.segment) or [(part[0], part[0])]
        ]

    def room(self, first: int, count: int) -> Span:
        """Scratch for at most `count` units of the block, from unit `first` on."""
        base = self.scratch - first
        self.scratch += count
        return Span(TMP, base, self.scratch)

    def load(self, to: int, part: Cut) -> Sequence[Sequence[Step]]:
        """Units of X to a peer, through scratch: what travels are partial results."""
        pairs = zip(self.cut(self.loaded, part), self.cut(self.x, part), strict=True)
        return [(Copy(copy, source), Send(to, (copy,))) for copy, source in pairs]

    def store(self, into: Span, source: Span, part: Cut) -> list[Step]:
        """Complete partial results of `source` are the results."""
        pairs = zip(self.cut(into, part), self.cut(source, part), strict=True)
        return [Reduce(result, (total,)) for result, total in pairs]

    def halve(self, edges: Sequence[int], results: Span | None) -> Span:
        """Reduce: half with each partner. `edges` cut the block into as many parts as there are
        ranks that reduce. What is left at the end is reduced over all ranks, in `results` or (None)
        scratch."""
        partial = self.x
        if self.role.takes_from is not None:
            partial = self._take_in(self.role.takes_from)
        first, stop = 0, len(edges) - 1
        for partner in self.role.partners:
            middle = (first + stop) // 2
            lower, upper = (edges[first], edges[middle]), (edges[middle], edges[stop])
            below = self.rank < partner
            kept, given = (lower, upper) if below else (upper, lower)
            first, stop = (first, middle) if below else (middle, stop)
            self.held.append(_Held(partner, given, kept))
            last = partner == self.role.partners[-1]
            even = -(-self.width * (stop - first) // (len(edges) - 1))
            coming = self.room(kept[0], max(even, kept[1] - kept[0]))
            into = results if last and results is not None else coming
            steps = self._swapped(self.held[-1], partial, coming, into)
            self.parts.append(_Part(steps, (partner,) if last else ()))
            partial = into
        return partial

    def _take_in(self, neighbour: int) -> Span:
        """Reduce the array of `neighbour` with the own one, into scratch."""
        own, others = self.cut(self.x, self.whole), self.cut(self.loaded, self.whole)
        steps: list[Step] = []
        for x, other in zip(own, others, strict=True):
            steps += [Recv(neighbour, (other,)), Reduce(other, (x, other), final=False)]
        self.parts.append(_Part(steps))
        return self.loaded

    def _swapped(self, held: _Held, partial: Span, coming: Span, into: Span) -> Script:
        """Swap halves of a partial result with a partner, and reduce."""
        partner, given, kept = held
        if partial.buffer == X:
            outgoing = self.load(partner, given)
        else:
            outgoing = sends(partner, alone(self.cut(partial, given)))
        arrivals, own = self.cut(coming, kept), self.cut(partial, kept)
        results = self.cut(into, kept)

        def reduced(k: int) -> list[Step]:
            operands = (own[k], arrivals[k])
            ordered = operands if self.rank < partner else operands[::-1]
            return [Reduce(results[k], ordered, final=into.buffer == OUT)]

        return swap(partner, outgoing, partner, alone(arrivals), reduced)


class _Everywhere(_Block):
    """Results go to all ranks."""

    def __init__(self, rank: int, size: int, cut: Cut, segment: int, width: int) -> None:
        super().__init__(rank, size, cut, segment, width)
        role, everything = self.role, alone(self.cut(self.out, self.whole))
        if role.gives_to is not None:
            steps = [step for pair in self.load(role.gives_to, self.whole) for step in pair]
            steps += [Recv(role.gives_to, frame) for frame in everything]
            self.parts.append(_Part(steps, (role.gives_to,)))
            return
        parts = 1 << len(role.partners)
        self.halve(_edges(self.whole[1], parts), self.out)
        partners = [held.partner for held in self.held]
        for k, (partner, given, kept) in reversed([*enumerate(self.held)]):
            outgoing = sends(partner, alone(self.cut(self.out, kept)))
            swapped = swap(partner, outgoing, partner, alone(self.cut(self.out, given)))
            self.parts.append(_Part(swapped, tuple(partners[k - 1 : k])))
        if role.takes_from is not None:
            steps = [Send(role.takes_from, frame) for frame in everything]
            self.parts.append(_Part(steps, (role.takes_from,)))


class _ToRoot(_Block):
    """Results go to one rank. In step k back, those ranks take part that agree with `root` in all
    steps beyond k; they send if they differ from it in step k, and have then done their share."""

    def __init__(
        self, rank: int, size: int, cut: Cut, segment: int, width: int, root: int, *, last: bool
    ) -> None:
        super().__init__(rank, size, cut, segment, width)
        self._root = root
        # For the block that follows: all that was sent has come. Nothing follows the last one.
        self._signal: Sequence[Frame] = [] if last else [()]
        role = self.role
        if role.gives_to is not None:
            self._stand_aside(role.gives_to)
            return
        results = self.room(0, width)
        parts = 1 << len(role.partners)
        self.halve(_edges(self.whole[1], parts), results)
        self._collect(role_of(root, size).block, results)
        self._let_go(results)

    def _stand_aside(self, to: int) -> None:
        """A neighbour does the work."""
        steps = [step for pair in self.load(to, self.whole) for step in pair]
        if self._root == self.rank:
            steps += [Recv(to, (part,)) for part in self.cut(self.loaded, self.whole)]
            steps += self.store(self.out, self.loaded, self.whole)
        else:
            steps += [Recv(to, frame) for frame in self._signal]
        self.parts.append(_Part(steps, (to,)))

    def _collect(self, goal: int, results: Span) -> None:
        """`goal`: the number of the rank that gets them, among those that reduce."""
        here = self.role.block
        for k, (partner, given, kept) in reversed([*enumerate(self.held)]):
            mine = theirs = self._signal
            receives = here >> k == goal >> k
            if receives:
                theirs = alone(self.cut(results, given))
            elif here >> (k + 1) == goal >> (k + 1):
                mine = alone(self.cut(results, kept))
            steps = swap(partner, [] if receives else sends(partner, mine), partner, theirs)
            if receives:  # the empty frame says that what came has come, so it goes last
                steps += [Send(partner, frame) for frame in mine]
            self.parts.append(_Part(steps, tuple(held.partner for held in self.held[k - 1 : k])))

    def _let_go(self, results: Span) -> None:
        """Of what is at the end: at `root`, or with its neighbour, which hands it over."""
        steps: list[Step] = []
        if self._root == self.rank:
            steps += self.store(self.out, results, self.whole)
        neighbour = self.role.takes_from
        if neighbour is not None:
            wanted = neighbour == self._root
            frames = alone(self.cut(results, self.whole)) if wanted else self._signal
            steps += [Send(neighbour, frame) for frame in frames]
        self.parts.append(_Part(steps, () if neighbour is None else (neighbour,)))


class _Slices(_Block):
    """Results go to the ranks that they belong to. There is one block only."""

    def __init__(self, rank: int, size: int, bounds: Sequence[int], segment: int) -> None:
        super().__init__(rank, size, (0, bounds[-1]), segment, bounds[-1])
        self._bounds = bounds
        self._blocks = 1 << (size.bit_length() - 1)
        steps: list[Step] = []
        if self.role.gives_to is not None:
            steps += [step for pair in self.load(self.role.gives_to, self.whole) for step in pair]
        else:
            firsts = [ranks_of(block, size)[0] for block in range(self._blocks)]
            edges = [*(bounds[first] for first in firsts), bounds[-1]]
            results = self.halve(edges, None)
            owners = ranks_of(self._turned(self.role.block), size)
            # The own ones last: they wait for nobody.
            for owner in sorted(owners, key=lambda owner: owner == rank):
                slots = (bounds[owner], bounds[owner + 1])
                if owner == rank:
                    steps += self._finished(results, slots)
                else:
                    steps += [Send(owner, frame) for frame in alone(self.cut(results, slots))]
        holder = ranks_of(self._turned(self.role.block), size)[0]
        if holder != rank:
            slots = (bounds[rank], bounds[rank + 1])
            place = self.room(slots[0], slots[1] - slots[0])
            steps += [Recv(holder, frame) for frame in alone(self.cut(place, slots))]
            steps += self._finished(place, slots)
        self.parts.append(_Part(steps))

    def _turned(self, block: int) -> int:
        """Whose slices `block` is left with: its bits in the opposite order, for the first partner,
        the nearest, gets the other half of all."""
        bits = self._blocks.bit_length() - 1
        return int(f"{block:0{bits}b}"[::-1], 2)

    def _finished(self, place: Span, slots: Cut) -> list[Step]:
        return self.store(Span(OUT, -slots[0], 0), place, slots)
