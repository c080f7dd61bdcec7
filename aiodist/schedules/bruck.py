"""Exchanges in ceil(log2 P) rounds, for many ranks that have little data for each other.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997. Nothing is rotated, because the spans of a frame say whose
parts it carries: the parts for this rank go to their places at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.frames import granted, packed, sends, swap
from aiodist.schedules.parts import parts_of
from aiodist.schedules.plan import OUT, TMP, Plan, Span, X
from aiodist.schedules.script import Script


def all_gather(rank: int, size: int, lengths: Sequence[int], segment: int) -> Plan:
    """Gather a part of each rank on every rank. Bulk.

    Part r has ``lengths[r]`` units (it may be empty). The own part is X; the parts of the other
    ranks go to OUT, in rank order, without gaps. X must not be OUT.

    Rounds: ceil(log2 P). On the wire per rank: all parts but one. Connections: 2 ceil(log2 P).
    Scratch: none.
    """
    parts = parts_of(rank, lengths, OUT, own=X)
    steps = Script()
    have = 1
    while have < size:
        count = min(have, size - have)
        outgoing = packed(parts.around(rank, count), segment)
        incoming = packed(parts.around(rank + have, count), segment)
        to, source = (rank - have) % size, (rank + have) % size
        steps += swap(to, sends(to, outgoing), source, incoming)
        have += count
    return Plan("bruck.all_gather", rank, size, granted(steps).steps(), eager=False)


def all_to_all(rank: int, size: int, length: int, segment: int) -> Plan:
    """Send `length` units to each other rank, and receive as many from each. Bulk.

    X holds the messages for the other ranks, in rank order, without a gap for the own rank; OUT
    receives their messages in the same layout. X must not be OUT. A message for the rank at
    distance d goes by the powers of two that d is the sum of, so it is sent up to log2 P times.

    Rounds: ceil(log2 P). On the wire per rank: at most P / 2 messages a round. Connections: 2
    ceil(log2 P). Scratch: less than P / 2 messages a round, because no place in it is written
    twice.
    """
    lengths = (length,) * size
    going, coming = parts_of(rank, lengths, X), parts_of(rank, lengths, OUT)
    # The places of messages, by the distance to their target. After a round another rank's message
    # with the same distance is there.
    held = {d: going.around(rank + d, 1) for d in range(1, size)}
    steps = Script()
    scratch = 0
    bit = 1
    while bit < size:
        moved = [d for d in range(1, size) if d & bit]
        outgoing = packed([span for d in moved for span in held[d]], segment)
        for d in moved:
            if d < 2 * bit:
                held[d] = coming.around(rank - d, 1)
            else:
                held[d] = [Span(TMP, scratch, scratch + length)]
                scratch += length
        incoming = packed([span for d in moved for span in held[d]], segment)
        to, source = (rank + bit) % size, (rank - bit) % size
        steps += swap(to, sends(to, outgoing), source, incoming)
        bit *= 2
    plan = granted(steps).steps()
    return Plan("bruck.all_to_all", rank, size, plan, eager=False, scratch=scratch)
