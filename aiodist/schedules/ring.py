"""Reductions and gathering around a ring: the least bytes, over one connection each way.

Source: the ring algorithms of Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", 2005, and Patarasuk, Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009; cut into segments.

A slice starts at the rank behind its owner, and every rank that it passes adds its part. So the
operands of slice s stand in the order s + 1, s + 2, …, s, which differs from slice to slice. The
operator has to commute, because that is not the order of the ranks. Results still have the same
bits on all ranks and in every run, because each unit is reduced on one path. Then the complete
slices go around once more.

Scratch is bounded because frames go around as one stream. A frame is granted when the frame
`window` before it has been used. It is written before the rank knows of the last grant. So a place
among `window` + 1 can be used again. A block has `depth` segments of each slice, which follow each
other closely, so that the wire is busy while a rank reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd

from aiodist.schedules.cuts import Cut, Series, even_bounds, pieces
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.schedules.script import Script

DEPTH = 2
"""Segments of each slice that are on their way at the same time."""

Row = Sequence[Cut]
"""One segment of each slice, by owner. All rows together are the array."""


def all_reduce(rank: int, size: int, length: int, segment: int, depth: int = DEPTH) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Bulk.

    The operator has to commute. X may be OUT; otherwise it is not altered. TMP may hold a wider
    type than X and OUT, because partial results lie in TMP and are sent from there. No rank
    completes before all have entered.

    Rounds: 2 (P - 1), pipelined by segments. On the wire per rank: 2 (P - 1) / P of `length`, which
    is the least possible. Connections: 2. Scratch: 4 `depth` + 1 segments.
    """
    rows = _rows(even_bounds(length, size), segment)
    return _around("ring.all_reduce", rank, size, rows, depth, 0, gather=True)


def reduce_scatter(
    rank: int, size: int, bounds: Sequence[int], segment: int, depth: int = DEPTH
) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Bulk.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. The operator has to commute. X must not be OUT, and is not altered.
    Partial results lie in TMP and are sent from there. No rank completes before all have entered.

    Rounds: P - 1, pipelined by segments. On the wire per rank: X without the own slice.
    Connections: 2. Scratch: 4 `depth` + 1 segments.
    """
    rows = _rows(bounds, segment)
    return _around("ring.reduce_scatter", rank, size, rows, depth, bounds[rank], gather=False)


def _rows(bounds: Sequence[int], segment: int) -> Series[Row]:
    slices = list(pairwise(bounds))
    cuts = [pieces(*cut, segment) for cut in slices]
    lengths = [len(cut) for cut in cuts]

    def row(k: int) -> Row:
        return [
            cut[k] if k < len(cut) else (stop, stop)
            for cut, (_, stop) in zip(cuts, slices, strict=True)
        ]

    return Series(max(1, *lengths), row, lengths)


def _around(
    name: str, rank: int, size: int, rows: Series[Row], depth: int, origin: int, *, gather: bool
) -> Plan:
    """The plan that reduces all rows, and with `gather` shows the results to all. Results have the
    place in OUT that they have in X, less `origin`."""
    if depth < 1:
        raise ValueError(f"at least one segment is on its way, not {depth}")
    steps = Script()
    if size == 1:
        for ((start, stop),) in rows:
            steps.append(Reduce(Span(OUT, start, stop), (Span(X, start, stop),)))
        return Plan(name, rank, size, steps.steps(), eager=False)
    width = max(b - a for a, b in rows[0])
    blocks = -(-len(rows) // depth)
    reduced = depth * (size - 1)  # Partial results that a rank receives, and sends, for a block.
    frames = 1 + gather  # With `gather` a rank receives a result for each partial result.
    window = 2 * depth

    def block(k: int) -> Iterator[Step]:
        here = rows[k * depth : (k + 1) * depth]
        stream = _Stream(rank, size, depth, width, k * reduced)
        stream.reduce(here, origin)
        if gather:
            stream.gather(here)
        return stream.granted(k * reduced * frames, len(rows) * (size - 1) * frames)

    # After that many partial results each place in scratch is used as before.
    places = window * (window + 1)
    period = places // gcd(places, reduced)
    steps.append(Grant((rank - 1) % size, min(window, len(rows) * (size - 1) * frames)))
    steps.repeat(blocks, block, (edge // depth for edge in rows.edges), 3, period)
    scratch = (2 * window + 1) * width
    done = steps.steps()
    return Plan(name, rank, size, done, eager=False, scratch=scratch, pushes=window)


class _Stream:
    """The frames of a block that come to a rank and go from it, in their order."""

    def __init__(self, rank: int, size: int, depth: int, width: int, before: int) -> None:
        """`before`: how many partial results came, and went, for the blocks before."""
        self.rank = rank
        self.size = size
        self.width = width
        self.window = 2 * depth  # Frames that may be on their way to a rank.
        self.steps: list[Step] = []
        self._coming = before  # How many partial results have come; each goes to the next place.
        self._going = before

    def reduce(self, rows: Sequence[Row], origin: int) -> None:
        """Send each slice once around, to its owner, which reduces it into OUT."""
        for row in rows:
            cut = row[self.rank - 1]
            going = self._next_out(cut)
            self.steps += [Copy(going, Span(X, *cut)), self._send(going)]
        for behind in range(2, self.size + 1):
            for row in rows:
                start, stop = row[self.rank - behind]
                operands = (self._next_in(stop - start), Span(X, start, stop))
                self.steps.append(Recv((self.rank - 1) % self.size, operands[:1]))
                if behind == self.size:
                    result = Span(OUT, start - origin, stop - origin)
                    self.steps.append(Reduce(result, operands))
                else:
                    going = self._next_out((start, stop))
                    self.steps += [Reduce(going, operands, final=False), self._send(going)]

    def gather(self, rows: Sequence[Row]) -> None:
        """Send each result once around, from its owner."""
        self.steps += [self._send(Span(OUT, *row[self.rank])) for row in rows]
        for behind in range(1, self.size):
            for row in rows:
                span = Span(OUT, *row[self.rank - behind])
                self.steps.append(Recv((self.rank - 1) % self.size, (span,)))
                if behind < self.size - 1:
                    self.steps.append(self._send(span))

    def granted(self, used: int, total: int) -> Iterator[Step]:
        """The steps, with grants for half of `window` frames at a time. Each grant follows when as
        many of the frames that were granted at first have been used. With more frames a grant all
        ranks would wait for each other's grants. `used`: frames of the blocks before, out of
        `total`."""
        batch = self.window // 2
        fresh = used > 0
        for step in self.steps:
            # A frame is used by the step after its Recv, if not by the Recv itself.
            if fresh and isinstance(step, Recv | Send):
                fresh = False
                allowed = used + self.window - batch
                if used % batch == 0 and allowed < total:
                    yield Grant((self.rank - 1) % self.size, min(batch, total - allowed))
            yield step
            if isinstance(step, Recv):
                used, fresh = used + 1, True

    def _send(self, span: Span) -> Send:
        return Send((self.rank + 1) % self.size, (span,))

    def _next_in(self, length: int) -> Span:
        at = self._coming % self.window * self.width
        self._coming += 1
        return Span(TMP, at, at + length)

    def _next_out(self, cut: Cut) -> Span:
        at = (self.window + self._going % (self.window + 1)) * self.width
        self._going += 1
        return Span(TMP, at, at + cut[1] - cut[0])
