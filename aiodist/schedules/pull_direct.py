"""Collectives of arrays that all ranks see: no array is staged.

Source: as `pull_slices`. Here ``SHARED + r`` is the array of rank r itself.

All of these plans end with a wait for all, because the user may alter the array when the plan has
ended. Between the pieces of long arrays plans await nothing, but they may pause there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiodist.schedules.cuts import Cut, Series, blocks_of, even_bounds, mapped, pieces
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Reduce, Span, Step
from aiodist.schedules.pull import joined, others
from aiodist.schedules.script import Script


def all_reduce(rank: int, size: int, length: int, piece: int) -> Plan:
    """Reduce SHARED + r [0:length] of all ranks r, element by element, in place. Pull.

    The array is input and result. Each rank reduces a slice of each block of P times `piece` units
    in its own array, and takes the other slices from the arrays of their ranks. It waits until all
    are done, because they read its array.

    Rounds: one for each block, and two. Copied per rank: `length` without the own slices; reduced:
    `length`.
    """
    peers = others(rank, size)
    blocks = blocks_of(length, size * piece, lambda units: even_bounds(units, size))

    def slice_of(owner: int, block: Sequence[Cut], q: int) -> Span:
        return Span(SHARED + owner, *block[q])

    def collect(block: Sequence[Cut]) -> tuple[Step, ...]:
        return joined(Copy(slice_of(rank, block, q), slice_of(q, block, q)) for q in peers)

    def turn(k: int) -> list[Step]:
        # Wait until all have entered, or have reduced the block before.
        steps: list[Step] = [Await(peers, k + 1)]
        into = slice_of(rank, blocks[k], rank)
        if into.length:
            operands = tuple(slice_of(q, blocks[k], rank) for q in range(size))
            steps.append(Reduce(into, operands))
        return [*steps, Publish(), *(collect(blocks[k - 1]) if k else ())]

    # The n-th Publish says that n - 1 blocks are reduced; the last one, that all is collected.
    steps = Script([Publish()])
    steps.repeat(len(blocks), turn)
    if blocks:
        steps += [Await(peers, len(blocks) + 1), *collect(blocks[-1])]
    steps += [Publish(), Await(peers, len(blocks) + 2)]
    return Plan(
        "pull_direct.all_reduce", rank, size, steps.steps(), False,
        shared=length, publishes=len(blocks) + 2,
    )  # fmt: skip


def reduce_scatter(rank: int, size: int, bounds: Sequence[int], piece: int) -> Plan:
    """Reduce SHARED + r [bounds[s]:bounds[s + 1]] of all ranks r, element by element, into OUT of
    rank s. Pull.

    Slices may be empty. OUT must not overlap the shared arrays, which are not altered.

    Rounds: 1. Copied per rank: nothing; reduced: P times the own slice.
    """
    start = bounds[rank]

    def reduction(cut: Cut) -> Step:
        into = Span(OUT, cut[0] - start, cut[1] - start)
        return Reduce(into, tuple(Span(SHARED + q, *cut) for q in range(size)))

    reductions = mapped(pieces(start, bounds[rank + 1], piece), reduction)
    return _reading("pull_direct.reduce_scatter", rank, size, [reductions], bounds[-1])


def take(
    rank: int,
    size: int,
    starts: Sequence[int],
    receives: Sequence[int],
    shared: int,
    piece: int,
) -> Plan:
    """Copy SHARED + q [starts[q]:…] of the other ranks q to OUT[receives[q]:receives[q + 1]]. Pull.

    These are ``receives[q + 1] - receives[q]`` units of rank q; no units of the own rank are taken.
    `shared`: the units of the longest array. OUT must not overlap the shared arrays, which are not
    altered.

    Rounds: 1. Copied per rank: OUT.
    """

    def copies_of(q: int) -> Series[Step]:
        shift = starts[q] - receives[q]
        return mapped(
            pieces(receives[q], receives[q + 1], piece),
            lambda cut: Copy(Span(OUT, *cut), Span(SHARED + q, cut[0] + shift, cut[1] + shift)),
        )

    copies = [copies_of(q) for q in others(rank, size)]
    return _reading("pull_direct.take", rank, size, copies, shared)


def _reading(name: str, rank: int, size: int, reads: Sequence[Series[Step]], shared: int) -> Plan:
    """A plan of all `reads`, between any two of which it may pause."""
    script = Script()
    last: Step | None = None
    for some in filter(len, reads):
        if last is not None:
            script += (last, Await((), 1))
        script.repeat(len(some) - 1, partial(_pausing, some))
        last = some[-1]
    script += [Publish()] if last is None else [last, Publish()]
    script.append(Await(others(rank, size), 1))
    return Plan(name, rank, size, script.steps(), False, shared=shared, publishes=1)


def _pausing(reads: Sequence[Step], k: int) -> tuple[Step, ...]:
    return (reads[k], Await((), 1))
