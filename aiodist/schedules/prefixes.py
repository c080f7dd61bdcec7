"""Scan in log2 P rounds, for arrays that take less time on the wire than P - 1 hops.

Source: Hillis, Steele, "Data parallel algorithms", 1986, as simultaneous recursive doubling in
Sanders, Träff, "Parallel prefix (scan) algorithms for MPI", 2006. After round k a rank has reduced
the arrays of the 2^(k + 1) ranks up to itself. Operators need not commute, because operands stand
in rank order.
"""

from __future__ import annotations

from aiodist.schedules.frames import granted, packed, sends, swap
from aiodist.schedules.plan import OUT, TMP, Copy, Plan, Reduce, Span, X
from aiodist.schedules.script import Script


def scan(rank: int, size: int, length: int, segment: int, exclusive: bool) -> Plan:
    """Reduce X[0:length] of ranks 0 … `rank` into OUT[0:length]. Bulk.

    With `exclusive`, reduce those of ranks 0 … `rank` - 1; at rank 0 OUT is then X, unreduced. X
    may be OUT; otherwise it is not altered. The operator sees whole arrays. TMP may hold a wider
    type than X and OUT, because partial results lie in TMP and are sent from there.

    Rounds: ceil(log2 P). On the wire per rank: at most ceil(log2 P) times `length`. Connections: 2
    ceil(log2 P). Scratch: 3 ceil(log2 P) + 1 times `length`. No place in it is written twice,
    because no message says when a frame has arrived.
    """
    places = [Span(TMP, at * length, (at + 1) * length) for at in range(3 * size.bit_length() + 1)]
    own, result = Span(X, 0, length), Span(OUT, 0, length)
    used = 1
    partial = places[0]  # The partial result with the own array.
    before: Span | None = None  # The partial result without the own array.
    steps = Script([Copy(partial, own)])
    distance = 1
    while distance < size:
        to, source = rank + distance, rank - distance
        outgoing = sends(to, packed([partial], segment)) if to < size else []
        if source < 0:
            steps += swap(to, outgoing, source, [])
        else:
            coming, lower, upper = places[used : used + 3]
            used += 3
            steps += swap(to, outgoing, source, packed([coming], segment))
            if exclusive and before is not None:
                steps.append(Reduce(lower, (coming, before), final=False))
            before = lower if before is not None else coming
            if not exclusive or rank + 2 * distance < size:
                steps.append(Reduce(upper, (coming, partial), final=False))
                partial = upper
        distance *= 2
    if not exclusive:
        steps.append(Reduce(result, (partial,)))
    else:
        steps.append(Copy(result, own) if before is None else Reduce(result, (before,)))
    plan = granted(steps).steps()
    return Plan("prefixes.scan", rank, size, plan, eager=False, scratch=used * length)
