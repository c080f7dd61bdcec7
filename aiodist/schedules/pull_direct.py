"""Collectives of arrays that all ranks see: nothing is staged.

Source: as `pull_slices`. Here ``SHARED + r`` is the array of rank r itself.

An array is its user's again when the plan has ended, so all of these end with a wait for all. Where
long arrays are read at one go, plans await nothing between their pieces: there they may pause.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Reduce, Span, Step
from aiodist.schedules.pull import joined, others


def all_reduce(rank: int, size: int, length: int, piece: int) -> Plan:
    """Reduce SHARED + r [0:length] of all ranks r, element by element, in place. Pull.

    It is input and result.

    Each rank reduces a slice of each block of P times `piece` units in its own array, and takes the
    others' slices from theirs. It is done when all are, so that its array is its own again.

    Rounds: one for each block, and two. Copied per rank: `length` without the own slices; reduced:
    `length`.
    """
    peers = others(rank, size)
    blocks: list[tuple[int, ...]] = []
    for start, stop in pieces(0, length, size * piece):
        blocks.append(tuple(start + at for at in even_bounds(stop - start, size)))

    def slice_of(owner: int, block: tuple[int, ...], q: int) -> Span:
        return Span(SHARED + owner, block[q], block[q + 1])

    def collect(block: tuple[int, ...]) -> tuple[Step, ...]:
        return joined(Copy(slice_of(rank, block, q), slice_of(q, block, q)) for q in peers)

    # The n-th Publish says that n - 1 blocks are reduced; the last one, that all is collected.
    steps: list[Step] = [Publish()]
    for k, block in enumerate(blocks):
        # All have entered, or reduced the block before.
        steps.append(Await(peers, k + 1))
        into = slice_of(rank, block, rank)
        if into.length:
            operands = tuple(slice_of(q, block, rank) for q in range(size))
            steps.append(Reduce(into, operands))
        steps.append(Publish())
        if k:
            steps += collect(blocks[k - 1])
    if blocks:
        steps += [Await(peers, len(blocks) + 1), *collect(blocks[-1])]
    steps += [Publish(), Await(peers, len(blocks) + 2)]
    return Plan(
        "pull_direct.all_reduce", rank, size, tuple(steps), False,
        shared=length, publishes=len(blocks) + 2,
    )  # fmt: skip


def reduce_scatter(rank: int, size: int, bounds: Sequence[int], piece: int) -> Plan:
    """Reduce SHARED + r [bounds[s]:bounds[s + 1]] of all ranks r, element by element, into OUT of
    rank s. Pull.

    Slices may be empty. OUT must be no part of what is shared, which is not altered.

    Rounds: 1. Copied per rank: nothing; reduced: P times the own slice.
    """
    start = bounds[rank]
    reductions: list[Step] = [
        Reduce(Span(OUT, a - start, b - start), tuple(Span(SHARED + q, a, b) for q in range(size)))
        for a, b in pieces(start, bounds[rank + 1], piece)
    ]
    return _reading("pull_direct.reduce_scatter", rank, size, reductions, bounds[-1])


def take(
    rank: int,
    size: int,
    starts: Sequence[int],
    receives: Sequence[int],
    shared: int,
    piece: int,
) -> Plan:
    """Copy SHARED + q [starts[q]:…] of the other ranks q to OUT[receives[q]:receives[q + 1]]. Pull.

    So ``receives[q + 1] - receives[q]`` units of rank q; of the own rank none are taken. `shared`:
    the units of the longest array. OUT must be no part of what is shared, which is not altered.

    Rounds: 1. Copied per rank: OUT.
    """
    copies: list[Step] = []
    for q in others(rank, size):
        shift = starts[q] - receives[q]
        copies += [
            Copy(Span(OUT, a, b), Span(SHARED + q, a + shift, b + shift))
            for a, b in pieces(receives[q], receives[q + 1], piece)
        ]
    return _reading("pull_direct.take", rank, size, copies, shared)


def _reading(name: str, rank: int, size: int, reads: Sequence[Step], shared: int) -> Plan:
    """A plan of `reads`, between any two of which it may pause."""
    steps = [step for read in reads for step in (read, Await((), 1))][:-1]
    ends: list[Step] = [Publish(), Await(others(rank, size), 1)]
    return Plan(name, rank, size, (*steps, *ends), False, shared=shared, publishes=1)
