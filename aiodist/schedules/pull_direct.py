"""Reductions of arrays that all ranks see: nothing is staged.

Source: as `pull_slices`. Here ``SHARED + r`` is the array of rank r itself, input and result.
"""

from __future__ import annotations

from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.plan import SHARED, Await, Copy, Plan, Publish, Reduce, Span, Step
from aiodist.schedules.pull import joined, others


def all_reduce(rank: int, size: int, length: int, piece: int) -> Plan:
    """Reduce SHARED + r [0:length] of all ranks r, element by element, in place. Pull.

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
