"""Reduce of large arrays to one rank.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004: reduce as
reduce-scatter and gather; both by direct exchange, pipelined by segments.
"""

from __future__ import annotations

from aiodist.schedules.cuts import WINDOW, even_bounds
from aiodist.schedules.plan import Plan
from aiodist.schedules.sliced import reduce_slices


def scatter_gather(
    rank: int, size: int, root: int, length: int, segment: int, window: int = WINDOW
) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of `root`. Bulk.

    Each rank reduces an even slice in rank order (operators need not commute) and sends it to
    `root`. At `root` X may be OUT; elsewhere OUT is not used and X not altered.

    Rounds: 2, pipelined by segments. On the wire per rank: `length` at most, at `root` (P - 1) / P
    of it. Scratch: (P - 1) `window` segments and, except at `root`, `window` more (at least 2).
    These hold reduced segments until `root` has them.
    """
    return reduce_slices(
        "reduce.scatter_gather",
        rank,
        size,
        even_bounds(length, size),
        segment,
        window,
        readers=(root,),
        origin=0 if rank == root else None,
    )
