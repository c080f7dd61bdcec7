"""Reductions by recursive halving, and results by recursive doubling: few frames to few ranks.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004, with vector halving
and distance doubling. If P is no power of two, neighbours are folded as in `recursive_doubling`. In
step k partners that are 2^k apart swap halves of what they still reduce. So a partial result covers
consecutive ranks, operands stand in rank order, and operators need not commute. Results are
bit-identical on all ranks, because each unit is reduced at one place. Then the same partners swap
results, in the opposite order.

Scratch holds partial results of half of the array, a quarter, and so on. So an array that is longer
than a block is reduced block by block, in order that scratch does not grow with it. No extra
message says that a frame has come: a rank that has a result of its partner knows that the partner
had its partial result before. That is when the next block's frames are granted::

    reduce   p0 → p1 → p2, then results   p2 → p1 → p0
                                grants for   p2   p1   p0   of the next block

The memory that p(k) fills is read until the partner p(k + 1) has received half of it, which its
result shows. So the grant is there before the next block is, and the wire never idles for it. If
results go to one rank only, empty frames take the place of results.
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

    X may be OUT; otherwise it is not altered. TMP may hold a wider type than X and OUT, because
    partial results lie in TMP and are sent from there. No rank completes before all have entered.

    Rounds: 2 log2 P for each block of `block` units, and at most two more if P is no power of two.
    On the wire per rank: 2 (P - 1) / P of `length`, and up to `length` more each way if P is no
    power of two. Connections: log2 P, or one more. Scratch: at most two blocks, and a unit a round.
    """
    return _in_blocks("halving_doubling.all_reduce", rank, size, None, length, segment, block)


def reduce(rank: int, size: int, root: int, length: int, segment: int, block: int) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of `root`. Bulk.

    At `root` X may be OUT; elsewhere OUT is not used and X not altered. Partial results, and
    results on their way to `root`, lie in TMP and are sent from there. `root` cannot complete
    before all have entered; other ranks can.

    Rounds: 2 log2 P for each block, and at most two more if P is no power of two. On the wire per
    rank: less than 2 times `length`, and `length` more if P is no power of two. Connections: log2
    P, or one more. Scratch: at most three blocks, and a unit a round.
    """
    return _in_blocks("halving_doubling.reduce", rank, size, root, length, segment, block)


def reduce_scatter(rank: int, size: int, bounds: Sequence[int], segment: int) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Bulk.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. X must not be OUT, and is not altered. Partial results lie in TMP and
    are sent from there. No rank completes before all have entered.

    Halving with the nearest partner first keeps the order of the ranks, but leaves slices at ranks
    that do not own them. One more frame takes each slice to its owner.

    Rounds: log2 P and one more, two more if P is no power of two. On the wire per rank: less than X
    and a slice, and X once more if P is no power of two. Connections: log2 P + 2, or one more.
    Scratch: X, the own slice, and what halving leaves: twice X in all if slices are even.
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

    # Cached because each block is used for its own steps, and for the grants of the block before.
    @cache
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
    """Offsets that cut `length` units into `parts`, so that two halves of any run of parts are
    equal within a unit, even if there are fewer units than parts."""
    return [length * part // parts for part in range(parts + 1)]


class _Part(NamedTuple):
    """Steps, and the peers whose frames of the next block have a free place when these are done."""

    steps: Iterable[Step]
    frees: tuple[int, ...] = ()


class _Held(NamedTuple):
    """What a rank swaps with a partner: units of the block, counted from its first unit."""

    partner: int
    given: Cut
    kept: Cut


class _Block:
    """The steps of one rank for one block: the partial results. Subclasses add the steps for the
    results.

    Memory is named by a span whose first unit is unit 0 of the block, even if only some units of
    the block are there. All blocks use the same places in scratch, those of the longest block, of
    `width` units.
    """

    def __init__(self, rank: int, size: int, cut: Cut, segment: int, width: int) -> None:
        self.rank = rank
        self.size = size
        self.segment = segment
        self.role = role_of(rank, size)
        self.whole: Cut = (0, cut[1] - cut[0])
        self.x, self.out = Span(X, *cut), Span(OUT, *cut)
        # What is given away: a copy, or the sum with a neighbour's array.
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
        """Units `part` of the block in segments. There is at least one, even if empty, because its
        frame says that all steps before are done."""
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
        """The steps that send units of X to a peer. They go through scratch because partial results
        may have a wider type."""
        pairs = zip(self.cut(self.loaded, part), self.cut(self.x, part), strict=True)
        return [(Copy(copy, source), Send(to, (copy,))) for copy, source in pairs]

    def store(self, into: Span, source: Span, part: Cut) -> list[Step]:
        """The steps that make results of the complete partial results in `source`."""
        pairs = zip(self.cut(into, part), self.cut(source, part), strict=True)
        return [Reduce(result, (total,)) for result, total in pairs]

    def halve(self, edges: Sequence[int], results: Span | None) -> Span:
        """Reduce by halves with each partner. `edges` cut the block into as many parts as there are
        ranks that reduce. The part that is left at the end is reduced over all ranks, into
        `results` or, if that is None, scratch."""
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
    """Results go to one rank. In step k on the way back, only ranks that agree with `root` in all
    steps beyond k take part. Those that differ from it in step k send, and are then done."""

    def __init__(
        self, rank: int, size: int, cut: Cut, segment: int, width: int, root: int, *, last: bool
    ) -> None:
        super().__init__(rank, size, cut, segment, width)
        self._root = root
        # The signal for the next block says that all that was sent has come. After the last block
        # there is none.
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
        """The steps of a rank whose neighbour does the work."""
        steps = [step for pair in self.load(to, self.whole) for step in pair]
        if self._root == self.rank:
            steps += [Recv(to, (part,)) for part in self.cut(self.loaded, self.whole)]
            steps += self.store(self.out, self.loaded, self.whole)
        else:
            steps += [Recv(to, frame) for frame in self._signal]
        self.parts.append(_Part(steps, (to,)))

    def _collect(self, goal: int, results: Span) -> None:
        """Collect the results at rank number `goal`, counted among the ranks that reduce."""
        here = self.role.block
        for k, (partner, given, kept) in reversed([*enumerate(self.held)]):
            mine = theirs = self._signal
            receives = here >> k == goal >> k
            if receives:
                theirs = alone(self.cut(results, given))
            elif here >> (k + 1) == goal >> (k + 1):
                mine = alone(self.cut(results, kept))
            # The signal comes when all frames have, so they are all sent before it is received.
            outgoing = [] if receives else sends(partner, mine)
            steps = swap(partner, outgoing, partner, theirs, ahead=len(outgoing))
            if receives:  # The empty frame says that all frames have come, so it is sent last.
                steps += [Send(partner, frame) for frame in mine]
            self.parts.append(_Part(steps, tuple(held.partner for held in self.held[k - 1 : k])))

    def _let_go(self, results: Span) -> None:
        """Let go of the results at the end: at `root`, or at its neighbour, which hands them
        over."""
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
    """Results go to the ranks that own them. There is one block only."""

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
            # The own slices are last, because other ranks wait for theirs.
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
        """The number of the owners of the slices that `block` is left with: the bits of `block` in
        the opposite order. The order is opposite because the first partner, the nearest, gets half
        of all slices."""
        bits = self._blocks.bit_length() - 1
        return int(f"{block:0{bits}b}"[::-1], 2)

    def _finished(self, place: Span, slots: Cut) -> list[Step]:
        return self.store(Span(OUT, -slots[0], 0), place, slots)
