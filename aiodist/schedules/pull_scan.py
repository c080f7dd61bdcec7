"""Scan of large arrays in shared memory: a pipeline of prefixes along the ranks.

Source: the linear pipelined scan of Sanders, Träff, "Parallel prefix (scan) algorithms for MPI",
2006.
"""

from __future__ import annotations

from aiodist.schedules.cuts import pieces
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Reduce, Span, Step, X
from aiodist.schedules.pull import others
from aiodist.schedules.script import Script


def scan(rank: int, size: int, length: int, exclusive: bool, piece: int, depth: int) -> Plan:
    """Reduce X[0:length] of ranks 0 … `rank`, element by element, into OUT[0:length]. Pull.

    With `exclusive`, reduce those of ranks 0 … `rank` - 1; at rank 0 OUT is then X, unreduced. X
    may be OUT; otherwise it is not altered. Each rank takes the prefix of a piece from the rank
    before, and leaves its own for the rank after. It may be up to `depth` pieces (at least one)
    ahead of the rank after. The plan is for operators that need no wider accumulators, because
    partial results lie in shared memory of the type of X and OUT.

    Rounds: P - 1, pipelined: the time of `length` and P - 2 pieces, on every rank. Copied per rank:
    nothing, at the first rank `length`; reduced: twice `length`. Shared: `depth` pieces.
    """
    if depth < 1:
        raise ValueError(f"a scan has at least one buffer, not {depth}")
    cuts = pieces(0, length, piece)
    width = cuts[0][1] if cuts else 0
    first, last = rank == 0, rank == size - 1

    def turn(k: int) -> list[Step]:
        steps: list[Step] = []
        start, stop = cuts[k]
        own, result = Span(X, start, stop), Span(OUT, start, stop)
        at = (k % depth) * width
        going = Span(SHARED + rank, at, at + stop - start)
        prefix: tuple[Span, ...] = ()
        if not first:
            steps.append(Await((rank - 1,), k + 2))
            prefix = (going._replace(buffer=SHARED + rank - 1),)
        total = (*prefix, own)
        if not last:
            if k >= depth:
                steps.append(Await((rank + 1,), k - depth + 2))
            steps.append(Copy(going, own) if first else Reduce(going, total, final=False))
            total = (going,)
        if not exclusive:
            steps.append(Reduce(result, total))
        else:
            steps.append(Copy(result, own) if first else Reduce(result, prefix))
        return [*steps, Publish()]

    # The n-th Publish says that n - 1 prefixes are here, and that as many of the rank before are
    # read.
    steps = Script([Publish()])
    steps.repeat(len(cuts), turn, (), depth + 1, depth)
    publishes = 1 + len(cuts)
    # A rank that is done may leave the group. A rank that then still waited for another would fail,
    # so all wait for all.
    steps.append(Await(others(rank, size), publishes))
    shared = min(depth, len(cuts)) * width
    done = steps.steps()
    return Plan("pull_scan.scan", rank, size, done, False, shared=shared, publishes=publishes)
