"""Reduce-scatter of large arrays by direct exchange.

Source: the pairwise-exchange reduce-scatter of Thakur, Rabenseifner, Gropp, "Optimization of
collective communication operations in MPICH", 2005, with all peers at once and cut into segments.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.cuts import AHEAD, WINDOW
from aiodist.schedules.direct_exchange import exchange, spans
from aiodist.schedules.plan import OUT, TMP, Plan, Reduce, Span, X
from aiodist.schedules.sliced import reduce_slices


def direct(rank: int, size: int, bounds: Sequence[int], segment: int, window: int = WINDOW) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Bulk.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction, in rank order, goes to
    OUT[0:bounds[s + 1] - bounds[s]] of rank s. X must not be OUT, and is not altered.

    Rounds: 1, pipelined by segments. On the wire per rank: X without the own slice, which
    is the least possible. Scratch: (P - 1) `window` segments at most.
    """
    return reduce_slices(
        "reduce_scatter.direct",
        rank,
        size,
        bounds,
        segment,
        window,
        readers=(),
        origin=bounds[rank],
    )


def whole(rank: int, size: int, bounds: Sequence[int], segment: int, ahead: int = AHEAD) -> Plan:
    """Reduce slice s of all ranks, by one Reduce, at rank s. Bulk.

    This is for operators that must see a slice whole. Slices, X, OUT and what is on the wire are
    those of `direct`. Scratch: (P - 1) times the own slice.
    """
    length = bounds[rank + 1] - bounds[rank]
    places = [(peer if peer < rank else peer - 1) * length for peer in range(size)]
    outgoing = [spans(X, bounds[p], bounds[p + 1], segment) for p in range(size)]
    incoming = [spans(TMP, at, at + length, segment) for at in places]
    outgoing[rank] = incoming[rank] = ()
    operands = [Span(TMP, at, at + length) for at in places]
    operands[rank] = Span(X, bounds[rank], bounds[rank + 1])
    reduction = Reduce(Span(OUT, 0, length), tuple(operands))
    steps = exchange(rank, size, outgoing, incoming, ahead)
    steps.append(reduction)
    scratch = (size - 1) * length
    return Plan("reduce_scatter.whole", rank, size, steps.steps(), eager=False, scratch=scratch)
