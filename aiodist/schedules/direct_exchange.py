"""Everyone sends to everyone directly: all-to-all, and gather and scatter as cases of it.

Source: the pairwise exchange of Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", 2005, without its barriers between the steps: in step d rank r
sends to r + d and receives from r - d, so that no rank is everybody's first target.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.cuts import AHEAD, pieces
from aiodist.schedules.plan import OUT, Copy, Grant, Plan, Recv, Send, Span, Step, X


def exchange(
    rank: int, size: int, outgoing: Sequence[Sequence[Span]], incoming: Sequence[Sequence[Span]]
) -> list[Step]:
    """The steps that send ``outgoing[p]``, a frame a span, to each rank p, and receive
    ``incoming[p]`` from it. What is `outgoing` and `incoming` at `rank` itself is copied.

    All that comes is granted at once: the memory of `incoming` must be free from the start.
    """
    steps: list[Step] = []
    distances = range(1, size)
    for distance in distances:
        source = (rank - distance) % size
        if incoming[source]:
            steps.append(Grant(source, len(incoming[source])))
    longest = max(map(len, (*outgoing, *incoming)))
    # Segment by segment to all, not message by message: so all links are busy from the start, and
    # no peer waits until those before it have everything. Segment k is waited for only once segment
    # k + AHEAD was sent, so that both ways of a link are busy.
    for k in range(longest + AHEAD):
        for distance in distances:
            target = (rank + distance) % size
            if k < len(outgoing[target]):
                steps.append(Send(target, (outgoing[target][k],)))
        if k < len(outgoing[rank]):
            steps.append(Copy(incoming[rank][k], outgoing[rank][k]))
        for distance in distances:
            source = (rank - distance) % size
            if 0 <= k - AHEAD < len(incoming[source]):
                steps.append(Recv(source, (incoming[source][k - AHEAD],)))
    return steps


def spans(buffer: int, start: int, stop: int, segment: int) -> list[Span]:
    """Units `start` to `stop` of `buffer`, in segments."""
    return [Span(buffer, *cut) for cut in pieces(start, stop, segment)]


def all_to_all(
    rank: int, size: int, send_bounds: Sequence[int], recv_bounds: Sequence[int], segment: int
) -> Plan:
    """Send a message to each rank and receive one from each. Bulk.

    Also gather, scatter and all_gather, where some messages are empty, or are the same.

    X[send_bounds[p]:send_bounds[p + 1]] goes to rank p, and what comes from it to
    OUT[recv_bounds[p]:recv_bounds[p + 1]]; the own message is copied. Lengths may differ, also be
    zero (then nothing is sent), but must be known at both ends. X must not be OUT.

    Rounds: 1, of at most P - 1 messages. On the wire per rank: its messages to others. Scratch:
    none.
    """
    outgoing = [spans(X, send_bounds[p], send_bounds[p + 1], segment) for p in range(size)]
    incoming = [spans(OUT, recv_bounds[p], recv_bounds[p + 1], segment) for p in range(size)]
    steps = exchange(rank, size, outgoing, incoming)
    return Plan("direct_exchange.all_to_all", rank, size, tuple(steps), eager=False)
