"""The bandwidth-optimal all-reduce of large arrays.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004: all-reduce as
reduce-scatter and all-gather. Both parts are done by direct exchange, and pipelined by segments:
segment k is sent to all while segment k + 1 is being reduced.
"""

from __future__ import annotations

from aiodist.schedules.cuts import WINDOW, even_bounds
from aiodist.schedules.plan import Plan
from aiodist.schedules.sliced import reduce_slices


def all_reduce(
    rank: int, size: int, length: int, segment: int, window: int = WINDOW, around: bool = False
) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Bulk.

    Each rank reduces an even slice in rank order (operators need not commute) and sends it to all.
    So results are bit-identical on all ranks. X may be OUT; otherwise it is not altered. With
    `around` operands stand in the order of `ring.all_reduce`, so that results have the same bits as
    there.

    Rounds: 2, pipelined by segments. On the wire per rank: 2 (P - 1) / P of `length`, which is the
    least possible. Scratch: (P - 1) `window` segments at most.
    """
    return reduce_slices(
        "reduce_scatter_all_gather.all_reduce",
        rank,
        size,
        even_bounds(length, size),
        segment,
        window,
        readers=range(size),
        origin=0,
        around=around,
    )
