"""All-gather of small blobs in ceil(log2 P) rounds, which is a barrier as well.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997; as a barrier: Hensgen, Finkel, Manber, "Two algorithms for
barrier synchronization", 1988.

Each round doubles the blobs that a rank has, because its source has as many by then. With 5 ranks,
rank 0 has these blobs after each round (every other rank has the same, shifted by its number)::

    at the start   0
    round 0        0 1             from rank 1, which had 1
    round 1        0 1 2 3         from rank 2, which has 2 and 3 by then
    round 2        0 1 2 3 4       from rank 4, which sends only the one that is missing

Direct exchange would take one round, but P - 1 frames of each rank, and small blobs cost frames.
There is no root here that all ranks wait for, and that would have to handle P - 1 frames.
"""

from __future__ import annotations

from aiodist.schedules.plan import OUT, Plan, Recv, Send, Span, Step


def all_gather(rank: int, size: int) -> Plan:
    """Gather one blob a rank on every rank. Eager.

    Units are blobs, one a rank, of any lengths: OUT[0:size]. The own blob stands in OUT[rank]
    before; X is not used. After round k a rank holds the blobs of the 2^(k+1) ranks from its own
    on, cyclically. The spans of a frame say whose blobs it carries.

    Rounds: ceil(log2 P), one frame each. On the wire per rank: P - 1 blobs. Scratch: none.
    No rank completes before all have entered.
    """
    steps: list[Step] = []
    have = 1
    while have < size:
        count = min(have, size - have)
        steps.append(Send((rank - have) % size, _blobs(rank, count, size)))
        source = (rank + have) % size
        steps.append(Recv(source, _blobs(source, count, size)))
        have += count
    return Plan("dissemination.all_gather", rank, size, tuple(steps), eager=True)


def _blobs(first: int, count: int, size: int) -> tuple[Span, ...]:
    """The blobs of `count` ranks from `first` on, cyclically."""
    stop = first + count
    if stop <= size:
        return (Span(OUT, first, stop),)
    return (Span(OUT, first, size), Span(OUT, 0, stop - size))
