"""Moving values through shared memory: each rank shows what it has, piece by piece, and takes what
is for it.

Source: the double-buffered copy-in, copy-out of shared-memory transports; e.g. Graham, Shipman,
"MPI support for multi-core architectures: optimized shared memory collectives", 2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from aiodist.schedules.cuts import pieces
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Span, Step, X
from aiodist.schedules.pull import others, pipeline
from aiodist.schedules.script import Script


def broadcast(rank: int, size: int, root: int, length: int, piece: int, depth: int) -> Plan:
    """Copy X[0:length] of `root` to OUT[0:length] of the others. Pull.

    At `root` OUT is not used; elsewhere X is not. `root` stages up to `depth` pieces (at least one)
    ahead of the slowest reader.

    Rounds: one for each piece, of which `depth` overlap. Copied per rank: `length`. Shared: `depth`
    pieces.
    """
    if depth < 1:
        raise ValueError(f"a broadcast has at least one buffer, not {depth}")
    cuts = pieces(0, length, piece)
    publishes = max(1, len(cuts))
    peers = others(rank, size)
    width = cuts[0][1] if cuts else 0

    def turn(k: int) -> list[Step]:
        steps: list[Step] = []
        start, stop = cuts[k]
        at = (k % depth) * width
        staged = Span(SHARED + root, at, at + stop - start)
        if rank != root:
            steps += [Await((root,), k + 1), Copy(Span(OUT, start, stop), staged)]
        else:
            if k >= depth:
                steps.append(Await(peers, k - depth + 2))
            steps.append(Copy(staged, Span(X, start, stop)))
        if rank == root or k + 1 < publishes:
            steps.append(Publish())
        return steps

    # The n-th Publish says, at the root, that n pieces are staged; at others, that n - 1 are read.
    steps = Script([] if rank == root else [Publish()])
    steps.repeat(len(cuts), turn, (), depth + 1, depth)
    if rank == root and not cuts:
        steps.append(Publish())
    # With more pieces the root has waited for all others, and they have then waited for the root.
    if len(cuts) <= depth:
        steps.append(Await(peers, 1))
    shared = min(depth, len(cuts)) * width
    return Plan(
        "pull_values.broadcast",
        rank,
        size,
        steps.steps(),
        eager=False,
        shared=shared,
        publishes=publishes,
    )


def all_gather(rank: int, size: int, lengths: Sequence[int], piece: int, depth: int) -> Plan:
    """Copy X[0:lengths[q]] of every rank q to all others. Pull.

    OUT holds what comes from the other ranks, in rank order, without gaps and without the own part.
    X must not be OUT.

    Rounds: one for each piece of the longest part. Copied per rank: all parts. Shared: `depth`
    pieces (at least two).
    """
    cuts = [pieces(0, length, piece) for length in lengths]
    starts = tuple(accumulate((0 if q == rank else n for q, n in enumerate(lengths)), initial=0))
    width = min(piece, max(lengths))

    def staged(q: int, k: int) -> Span:
        start, stop = cuts[q][k]
        at = (k % depth) * width
        return Span(SHARED + q, at, at + stop - start)

    def stage(k: int) -> list[Step]:
        return [Copy(staged(rank, k), Span(X, *cuts[rank][k]))] if k < len(cuts[rank]) else []

    def use(k: int) -> list[Step]:
        return [
            Copy(Span(OUT, starts[q] + cuts[q][k][0], starts[q] + cuts[q][k][1]), staged(q, k))
            for q in others(rank, size)
            if k < len(cuts[q])
        ]

    rounds = max(map(len, cuts))
    return pipeline(
        "pull_values.all_gather", rank, size, rounds, width, depth,
        stage=stage, use=use, edges=map(len, cuts),
    )  # fmt: skip


def exchange(
    rank: int,
    size: int,
    sends: Sequence[int],
    receives: Sequence[int],
    rounds: int,
    piece: int,
    depth: int,
) -> Plan:
    """Copy a message to each rank and one from each. Pull.

    With some empty messages this is also gather and scatter.

    X[sends[p]:sends[p + 1]] goes to rank p, and the message of rank p comes to
    OUT[receives[p]:receives[p + 1]]; the own message is copied. Lengths may differ and may be zero,
    but both ends must know them. `rounds` is the number of pieces of the longest message between
    any two ranks; all must pass the same number. X must not be OUT.

    Rounds: `rounds`. Copied per rank: its messages to others, and from all. Shared: `depth` times P
    - 1 pieces (at least two).
    """
    outgoing = [pieces(sends[q], sends[q + 1], piece) for q in range(size)]
    incoming = [pieces(receives[q], receives[q + 1], piece) for q in range(size)]
    peers = others(rank, size)
    longest = max(len(cut) for q in peers for cut in (outgoing[q], incoming[q])) if peers else 0
    if longest > rounds:
        raise ValueError(f"a message of rank {rank} has {longest} pieces, over {rounds} rounds")
    buffer = (size - 1) * piece

    def staged(source: int, target: int, k: int, length: int) -> Span:
        slot = target if target < source else target - 1
        at = (k % depth) * buffer + slot * piece
        return Span(SHARED + source, at, at + length)

    def stage(k: int) -> list[Step]:
        going = [(q, outgoing[q][k]) for q in range(size) if q != rank and k < len(outgoing[q])]
        return [
            Copy(staged(rank, q, k, stop - start), Span(X, start, stop))
            for q, (start, stop) in going
        ]

    def use(k: int) -> list[Step]:
        coming = [(q, incoming[q][k]) for q in peers if k < len(incoming[q])]
        return [
            Copy(Span(OUT, start, stop), staged(q, rank, k, stop - start))
            for q, (start, stop) in coming
        ]

    own = Copy(Span(OUT, receives[rank], receives[rank + 1]), Span(X, sends[rank], sends[rank + 1]))
    return pipeline(
        "pull_values.exchange", rank, size, rounds, buffer, depth,
        stage=stage, use=use, edges=map(len, (*outgoing, *incoming)), then=(own,),
    )  # fmt: skip
