"""All-gather of large arrays: everyone sends to everyone directly."""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.direct_exchange import exchange, spans
from aiodist.schedules.plan import OUT, Plan, Span


def direct(rank: int, size: int, bounds: Sequence[int], segment: int) -> Plan:
    """Send the own slice to all and receive theirs. Bulk.

    OUT[bounds[p]:bounds[p + 1]] is the slice of rank p; the own one stands there before. X is not
    used. The order is that of the pairwise exchange (see `direct_exchange`).

    Rounds: 1, of P - 1 messages. On the wire per rank: P - 1 times its slice, which is the least
    possible without a multicast. Scratch: none.
    """
    own = spans(OUT, bounds[rank], bounds[rank + 1], segment)
    outgoing: list[list[Span]] = [own] * size
    incoming = [spans(OUT, bounds[p], bounds[p + 1], segment) for p in range(size)]
    outgoing[rank] = incoming[rank] = []
    steps = exchange(rank, size, outgoing, incoming)
    return Plan("all_gather.direct", rank, size, tuple(steps), eager=False)
