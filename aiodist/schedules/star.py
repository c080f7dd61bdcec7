"""All-gather of small blobs by way of one rank, which is a barrier as well.

Each rank sends its blob to rank 0, which sends all of them to all. The source of the two halves is
the linear gather and broadcast, e.g. Pješivac-Grbović et al., "Performance analysis of MPI
collective operations", 2005.

No plan that synchronises P ranks has fewer frames, because each other rank has to send one and to
receive one. Each of them waits only once. So it takes the least processor time if ranks share
cores, or have other work. With 8 ranks it has 14 frames; `dissemination.all_gather` has 24, and its
ranks may be woken three times. Many ranks take that plan, because here rank 0 has to handle P - 1
frames each way one by one.

The hub is rank 0 for all, and for example not the root of a broadcast. If ranks did not agree on
the root, they would all wait for one another. Then no rank could be told that they have called
different things.
"""

from __future__ import annotations

from aiodist.schedules.plan import OUT, Plan, Recv, Send, Span, Step

HUB = 0
"""The rank that all blobs go through."""

ALL_GATHER = "star.all_gather"
"""The name of the plan."""


def all_gather(rank: int, size: int) -> Plan:
    """Gather one blob a rank on every rank. Eager.

    Units and OUT are those of `dissemination.all_gather`. Rank 0 sends the same frame to all, so a
    rank gets its own blob back, too.

    Rounds: 2. On the wire: from rank 0 all blobs P - 1 times, from others the own one. Scratch:
    none. No rank completes before all have entered.
    """
    own, every = Span(OUT, rank, rank + 1), Span(OUT, 0, size)
    others = range(1, size)
    if rank != HUB:
        steps: list[Step] = [Send(HUB, (own,)), Recv(HUB, (every,))]
    else:
        steps = [Recv(peer, (Span(OUT, peer, peer + 1),)) for peer in others]
        steps += [Send(peer, (every,)) for peer in others]
    return Plan(ALL_GATHER, rank, size, tuple(steps), eager=True)
