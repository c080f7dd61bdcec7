"""All-gather of small blobs by way of one rank, which is a barrier as well.

Everyone shows its blob to rank 0, which shows all of them to everyone. The source of the two halves
is the linear gather and broadcast, e.g. Pješivac-Grbović et al., "Performance analysis of MPI
collective operations", 2005.

No plan that synchronises P ranks has fewer frames: each other rank has to be heard once, and to
hear once that all have been. And each of them has one thing to wait for. So where ranks share
cores, or have other things to do, it takes the least of them: 14 frames of 8 ranks, where
`dissemination.all_gather` has 24 and its ranks may be woken three times. Rank 0 has to handle P - 1
frames each way one by one, which is why many ranks go the other way.

It is rank 0 for all, not the root of a broadcast, say: ranks that take each other for the root
would all wait for one another, and nobody would hear that they have called different things.
"""

from __future__ import annotations

from aiodist.schedules.plan import OUT, Plan, Recv, Send, Span, Step

HUB = 0
"""The rank by way of which all blobs go."""

ALL_GATHER = "star.all_gather"
"""The name of the plan."""


def all_gather(rank: int, size: int) -> Plan:
    """Gather one blob a rank on every rank. Eager.

    Units and OUT are those of `dissemination.all_gather`. What rank 0 sends is one frame for all:
    so a rank gets its own blob, too, as it is.

    Rounds: 2. On the wire: of rank 0 all blobs P - 1 times, of others the own one. Scratch: none.
    No rank completes before all have entered.
    """
    own, every = Span(OUT, rank, rank + 1), Span(OUT, 0, size)
    others = range(1, size)
    if rank != HUB:
        steps: list[Step] = [Send(HUB, (own,)), Recv(HUB, (every,))]
    else:
        steps = [Recv(peer, (Span(OUT, peer, peer + 1),)) for peer in others]
        steps += [Send(peer, (every,)) for peer in others]
    return Plan(ALL_GATHER, rank, size, tuple(steps), eager=True)
