"""Arrays in shared memory that each rank shows whole, and of which each takes what it needs.

Results are the same on all ranks, because each rank reduces for itself, in rank order. Most plans
here are for small arrays and have one round. They are barriers as well: no rank completes before
all have entered.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.cuts import pieces
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Reduce, Span, Step, X
from aiodist.schedules.pull import joined, others, pipeline


def all_reduce(rank: int, size: int, length: int) -> Plan:
    """Reduce X[0:length] of all ranks into OUT[0:length] of all. Pull.

    Any operator will do, because one Reduce covers whole arrays. X may be OUT; otherwise it is not
    altered.

    Rounds: 1. Copied per rank: `length`; reduced: P times `length`. Shared: `length`.
    """
    return _reduction("pull_whole.all_reduce", rank, size, length, range(size))


def all_reduce_in_pieces(rank: int, size: int, length: int, piece: int, depth: int) -> Plan:
    """`all_reduce` of large arrays, piece by piece. Pull.

    With two ranks this moves no more data than if each reduces a half. No rank waits for results,
    because each rank reduces all of them itself.

    Rounds: one for each piece. Copied per rank: `length`; reduced: P times `length`. Shared:
    `depth` pieces (at least two).
    """
    cuts = pieces(0, length, piece)
    width = min(piece, length)

    def place(owner: int, k: int) -> Span:
        start, stop = cuts[k]
        at = (k % depth) * width
        return Span(SHARED + owner, at, at + stop - start)

    def use(k: int) -> list[Step]:
        own = Span(X, *cuts[k])
        operands = tuple(own if q == rank else place(q, k) for q in range(size))
        return [Reduce(Span(OUT, *cuts[k]), operands)]

    return pipeline(
        "pull_whole.all_reduce_in_pieces", rank, size, len(cuts), width, depth,
        stage=lambda k: [Copy(place(rank, k), Span(X, *cuts[k]))], use=use,
    )  # fmt: skip


def reduce(rank: int, size: int, root: int, length: int) -> Plan:
    """Reduce X[0:length] of all ranks into OUT[0:length] of `root`. Pull.

    As `all_reduce`; at the other ranks OUT is not used.
    """
    ranks = range(size) if rank == root else range(0)
    return _reduction("pull_whole.reduce", rank, size, length, ranks, shown=rank != root)


def reduce_scatter(rank: int, size: int, bounds: Sequence[int]) -> Plan:
    """Reduce slice s of all ranks, X[bounds[s]:bounds[s + 1]], into OUT at rank s. Pull.

    Each rank shows all slices, even its own, which no other rank reads, because one copy is cheaper
    than several. X must not be OUT, and is not altered.

    Rounds: 1. Copied per rank: X; reduced: P times the own slice. Shared: X.
    """
    start, stop = bounds[rank : rank + 2]
    operands = tuple(Span(X if q == rank else SHARED + q, start, stop) for q in range(size))
    reduction = Reduce(Span(OUT, 0, stop - start), operands)
    return _after_showing("pull_whole.reduce_scatter", rank, size, bounds[-1], [reduction])


def scan(rank: int, size: int, length: int, exclusive: bool) -> Plan:
    """Reduce X[0:length] of ranks 0 … `rank` into OUT[0:length]. Pull.

    With `exclusive`, reduce those of ranks 0 … `rank` - 1; at rank 0 OUT is then X, unreduced. Any
    operator will do, because one Reduce covers whole arrays. X may be OUT; otherwise it is not
    altered.

    Rounds: 1. Copied per rank: `length`; reduced: up to P times `length`. Shared: `length`.
    """
    ranks = range(rank if exclusive else rank + 1)
    plan = _reduction("pull_whole.scan", rank, size, length, ranks, shown=rank < size - 1)
    if ranks:
        return plan
    unreduced = Copy(Span(OUT, 0, length), Span(X, 0, length))
    return plan._replace(steps=joined((*plan.steps, unreduced)))


def share(rank: int, size: int, cell: int) -> Plan:
    """Copy X[0:cell] of every rank q to OUT[q * cell:(q + 1) * cell] of all. Pull.

    This is for blobs that fit a cell. X must not be OUT. Without units it is a barrier.

    Rounds: 1. Copied per rank: P + 1 cells. Shared: `cell`.
    """
    taken = [
        Copy(Span(OUT, q * cell, (q + 1) * cell), Span(SHARED + q, 0, cell)) for q in range(size)
    ]
    return _after_showing("pull_whole.share", rank, size, cell, taken)


def _reduction(
    name: str, rank: int, size: int, length: int, ranks: range, *, shown: bool = True
) -> Plan:
    """The plan in which this rank reduces the arrays of `ranks`. `shown`: other ranks reduce its
    array."""
    operands = tuple([Span(X if q == rank else SHARED + q, 0, length) for q in ranks])
    reduction = [Reduce(Span(OUT, 0, length), operands)] if ranks else []
    return _after_showing(name, rank, size, length, reduction, shown=shown)


def _after_showing(
    name: str, rank: int, size: int, length: int, steps: Sequence[Step], *, shown: bool = True
) -> Plan:
    """The plan of `steps`, once every rank that is `shown` has its X[0:length] in shared memory."""
    mine = [Copy(Span(SHARED + rank, 0, length), Span(X, 0, length))] if shown else []
    synchronised = joined((*mine, Publish(), Await(others(rank, size), 1), *steps))
    return Plan(name, rank, size, synchronised, eager=False, shared=length, publishes=1)
