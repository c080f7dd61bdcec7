"""Reductions and gathering around a ring: the least bytes, over one connection each way.

Source: the ring algorithms of Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", 2005, and Patarasuk, Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009; cut into segments.

A slice starts at the rank behind its owner, and every rank that it passes adds its part: so the
operands of slice s stand in the order s + 1, s + 2, …, s. That is another order than that of the
ranks, and another one for each slice. So the operator has to commute; results are still the same
bits on all ranks and in every run, for each unit is reduced on one path. Then the slices, complete,
go around once more.

Why the scratch is bounded: frames go around as one stream. A frame is granted when that `window`
before it has been taken in, and it is written before the last grant is known to have come: so a
place among `window` + 1 can be used again. A block has `depth` segments of each slice, which follow
each other closely, so that the wire is busy while a rank reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from aiodist.schedules.cuts import Cut, even_bounds, pieces
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X

DEPTH = 2
"""Segments of each slice that are on their way at the same time."""

Row = Sequence[Cut]
"""One segment of each slice, by owner. All rows together are the array."""


def all_reduce(rank: int, size: int, length: int, segment: int, depth: int = DEPTH) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Bulk.

    The operator has to commute. X may be OUT; otherwise it is not altered. Partial results lie in
    TMP and travel from there, so TMP may hold a wider type than X and OUT. No rank completes before
    all have entered.

    Rounds: 2 (P - 1), pipelined by segments. On the wire per rank: 2 (P - 1) / P of `length`, which
    is the least possible. Connections: 2. Scratch: 4 `depth` + 1 segments.
    """
    rows: list[Row] = []
    for start, stop in pieces(0, length, segment * size) or [(0, 0)]:
        bounds = [start + at for at in even_bounds(stop - start, size)]
        rows.append(list(pairwise(bounds)))
    return _around("ring.all_reduce", rank, size, rows, depth, 0, gather=True)


def reduce_scatter(
    rank: int, size: int, bounds: Sequence[int], segment: int, depth: int = DEPTH
) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Bulk.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. The operator has to commute. X must not be OUT, and is not altered.
    Partial results lie in TMP and travel from there. No rank completes before all have entered.

    Rounds: P - 1, pipelined by segments. On the wire per rank: X without the own slice.
    Connections: 2. Scratch: 4 `depth` + 1 segments.
    """
    rows = _rows(bounds, segment)
    return _around("ring.reduce_scatter", rank, size, rows, depth, bounds[rank], gather=False)


def _rows(bounds: Sequence[int], segment: int) -> list[Row]:
    slices = list(pairwise(bounds))
    cuts = [pieces(*cut, segment) for cut in slices]
    return [
        [
            cut[k] if k < len(cut) else (stop, stop)
            for cut, (_, stop) in zip(cuts, slices, strict=True)
        ]
        for k in range(max(1, *map(len, cuts)))
    ]


def _around(
    name: str, rank: int, size: int, rows: Sequence[Row], depth: int, origin: int, *, gather: bool
) -> Plan:
    """The plan that reduces all rows, and with `gather` shows the results to all. In OUT they have
    the place that they have in X, less `origin`."""
    if depth < 1:
        raise ValueError(f"at least one segment is on its way, not {depth}")
    if size == 1:
        steps = [Reduce(Span(OUT, *row[0]), (Span(X, *row[0]),)) for row in rows]
        return Plan(name, rank, size, tuple(steps), eager=False)
    stream = _Stream(rank, size, depth, max(b - a for row in rows for a, b in row))
    for at in range(0, len(rows), depth):
        stream.reduce(rows[at : at + depth], origin)
        if gather:
            stream.gather(rows[at : at + depth])
    scratch = stream.scratch
    return Plan(name, rank, size, (*stream.granted(),), eager=False, scratch=scratch)


class _Stream:
    """All frames that come to a rank, and all that go, in their order."""

    def __init__(self, rank: int, size: int, depth: int, width: int) -> None:
        self.rank = rank
        self.size = size
        self.width = width
        self.window = 2 * depth  # frames that may be on their way to a rank
        self.scratch = (2 * self.window + 1) * width
        self.steps: list[Step] = []
        self._coming = 0  # how many partial results have come: each to the next place
        self._going = 0

    def reduce(self, rows: Sequence[Row], origin: int) -> None:
        """Each slice once around, to its owner. It is reduced into OUT there."""
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
        """Each result once around, from its owner."""
        self.steps += [self._send(Span(OUT, *row[self.rank])) for row in rows]
        for behind in range(1, self.size):
            for row in rows:
                span = Span(OUT, *row[self.rank - behind])
                self.steps.append(Recv((self.rank - 1) % self.size, (span,)))
                if behind < self.size - 1:
                    self.steps.append(self._send(span))

    def granted(self) -> Iterator[Step]:
        """The steps, with grants: `window` frames at first, then half as many at a time, once as
        many have been used up. With a batch of more all would wait for each other's grants."""
        total = sum(isinstance(step, Recv) for step in self.steps)
        batch = self.window // 2
        before = (self.rank - 1) % self.size
        allowed = min(self.window, total)
        yield Grant(before, allowed)
        used, fresh = 0, False
        for step in self.steps:
            # What comes is used up by the step after its Recv, if not by the Recv itself.
            if fresh and isinstance(step, Recv | Send):
                fresh = False
                if used % batch == 0 and allowed < total:
                    count = min(batch, total - allowed)
                    allowed += count
                    yield Grant(before, count)
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
