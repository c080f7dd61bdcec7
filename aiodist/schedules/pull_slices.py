"""Reductions of large arrays in shared memory: each rank reduces a slice of each block, for all.

A round works on a block, which has a slice for each rank. A rank stages the slices that others
reduce, reduces its own in rank order, and takes the results of others from their memory.

Source: the reduce-scatter and all-gather of Rabenseifner, "Optimization of collective reduction
operations", 2004. That blocks go through memory that stays in cache is from Graham, Shipman, "MPI
support for multi-core architectures: optimized shared memory collectives", 2008.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from aiodist.schedules.cuts import Cut, Series, blocks_of, even_bounds, rounds_of
from aiodist.schedules.plan import OUT, SHARED, Copy, Plan, Reduce, Span, Step, X
from aiodist.schedules.pull import others, pipeline


def all_reduce(rank: int, size: int, length: int, piece: int, depth: int) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Pull.

    A round takes a block of P times `piece` units. X may be OUT; otherwise it is not altered.
    Results are the same on all ranks, because every unit is reduced by one rank.

    Rounds: one for each block, and one. Copied per rank: `length` without the own slices when
    staged, and `length` when collected; reduced: `length`. Shared: `depth` blocks (at least two).
    """
    blocks = blocks_of(length, size * piece, lambda units: even_bounds(units, size))
    return _slices("pull_slices.all_reduce", rank, size, blocks, depth, range(size), 0)


def reduce(rank: int, size: int, root: int, length: int, piece: int, depth: int) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of `root`. Pull.

    As `all_reduce`, but `root` alone collects the results. At the other ranks OUT is not used.
    """
    blocks = blocks_of(length, size * piece, lambda units: even_bounds(units, size))
    return _slices("pull_slices.reduce", rank, size, blocks, depth, (root,), 0)


def reduce_scatter(rank: int, size: int, bounds: Sequence[int], piece: int, depth: int) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Pull.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. A round takes `piece` units of each slice. X must not be OUT, and is
    not altered.

    Rounds: one for each piece of the longest slice. Copied per rank: X without the own slice;
    reduced: P times the own slice. Shared: `depth` times P - 1 pieces (at least two).
    """
    blocks = rounds_of(bounds, piece)
    return _slices("pull_slices.reduce_scatter", rank, size, blocks, depth, (), bounds[rank])


def _slices(
    name: str,
    rank: int,
    size: int,
    blocks: Series[list[Cut]],
    depth: int,
    readers: Collection[int],
    origin: int,
) -> Plan:
    """The plan in which rank s reduces ``blocks[k][s]``, units of X, in round k.

    `readers` collect all results; without readers every rank keeps its own. Results have the place
    in OUT that they have in X, less `origin`.
    """
    peers = others(rank, size)
    slot = max(stop - start for start, stop in blocks[0]) if blocks else 0
    kept = slot if readers else 0
    buffer = (size - 1) * slot + kept
    keeps = rank in readers or not readers
    shows = any(reader != rank for reader in readers)

    def place(owner: int, k: int, q: int) -> Span:
        """The place of slice q of block k in the memory of `owner`. The own slice has the same
        place in all blocks, however short the slices are; the others stand before and after it
        without gaps."""
        edge = [*accumulate((b - a for a, b in blocks[k]), initial=0)]
        at = (k % depth) * buffer + owner * slot
        if q < owner:
            at -= edge[owner] - edge[q]
        elif q > owner:
            at += kept + edge[q] - edge[owner + 1]
        return Span(SHARED + owner, at, at + edge[q + 1] - edge[q])

    def result(k: int, q: int) -> Span:
        start, stop = blocks[k][q]
        return Span(OUT, start - origin, stop - origin)

    def stage(k: int) -> list[Step]:
        slices = enumerate(blocks[k])
        return [Copy(place(rank, k, q), Span(X, *cut)) for q, cut in slices if q != rank]

    def use(k: int) -> list[Step]:
        own = Span(X, *blocks[k][rank])
        operands = tuple(own if q == rank else place(q, k, rank) for q in range(size))
        if not keeps:
            return [Reduce(place(rank, k, rank), operands)]
        reduced = Reduce(result(k, rank), operands)
        return [reduced, Copy(place(rank, k, rank), reduced.into)] if shows else [reduced]

    def collect(k: int) -> list[Step]:
        return [Copy(result(k, q), place(q, k, q)) for q in peers if rank in readers]

    return pipeline(
        name, rank, size, len(blocks), buffer, depth,
        stage=stage, use=use, collect=collect if readers else None, edges=blocks.edges,
    )  # fmt: skip
