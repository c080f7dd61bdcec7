"""Broadcasts that first give each rank a slice, and then give all slices to all ranks.

Source: van de Geijn's broadcast, as scatter and all-gather: Barnett et al., "Interprocessor
collective communication library", 1994; Thakur, Rabenseifner, Gropp, 2005. No rank sends more than
about the array, while a tree's root sends it log2 P times. There are also fewer hops than the P - 1
of a chain. The second plan does both at once, straight from rank to rank: it is for few ranks that
are far from each other.
"""

from __future__ import annotations

from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.frames import granted, packed, received, sends, sent, swap
from aiodist.schedules.plan import OUT, Plan, Recv, Send, Span, Step, X
from aiodist.schedules.script import Script
from aiodist.schedules.tree import below, children, parent


def tree(rank: int, size: int, root: int, length: int, segment: int) -> Plan:
    """Send X[0:length] of `root` to OUT[0:length] of the others: slices down a binomial tree, then
    Bruck's all-gather. Bulk.

    At `root` OUT is not used. X may be OUT. Slices that a rank has received for its subtree are not
    sent to it again.

    Rounds: 2 log2 P. On the wire per rank: less than `length` for the tree, and as much for the
    rest. Connections: 2 log2 P. Scratch: none.
    """
    v = (rank - root) % size
    bounds = even_bounds(length, size)

    def slices(first: int, stop: int) -> list[Span]:
        """Slices, counted from the root on and cyclically."""
        turns = [(first, min(stop, size)), (max(first, size) - size, max(stop, size) - size)]
        runs = [(bounds[a], bounds[b]) for a, b in turns if a < b]
        return [Span(OUT if v else X, *run) for run in runs if run[0] < run[1]]

    steps = Script()
    if v:
        frames = packed(slices(v, v + below(v, size)), segment)
        steps += received((parent(v) + root) % size, frames)
    for child in children(v, size):
        frames = packed(slices(child, child + below(child, size)), segment)
        steps += sent((child + root) % size, frames)
    have = 1
    while have < size:
        count = min(have, size - have)
        target, source = (v - have) % size, (v + have) % size

        def fresh(w: int, have: int = have, count: int = count) -> list[Span]:
            """What rank `w`, counted from the root, has not received by then."""
            return slices(w + max(have, min(below(w, size), have + count)), w + have + count)

        to, start = (target + root) % size, (source + root) % size
        incoming = packed(fresh(v), segment)
        steps += swap(to, sends(to, packed(fresh(target), segment)), start, incoming)
        have += count
    return Plan("spread.tree", rank, size, granted(steps).steps(), eager=False)


def straight(rank: int, size: int, root: int, length: int, segment: int) -> Plan:
    """Send X[0:length] of `root` to OUT[0:length] of the others. Each of them gets a slice, and
    passes it on to the rest while it arrives. Bulk.

    At `root` OUT is not used. X may be OUT.

    Rounds: 2, pipelined by segments. On the wire per rank: `length` at the root, less elsewhere.
    Connections: P - 1. Scratch: none.
    """
    others = [(root + distance) % size for distance in range(1, size)]
    bounds = even_bounds(length, max(1, len(others)))
    cuts = {peer: pieces(bounds[at], bounds[at + 1], segment) for at, peer in enumerate(others)}
    lengths = [len(cut) for cut in cuts.values()]
    rest = [peer for peer in others if peer != rank]

    def give(k: int) -> list[Step]:
        return [Send(peer, (Span(X, *cuts[peer][k]),)) for peer in others if k < len(cuts[peer])]

    def pass_on(k: int) -> list[Step]:
        own = (Span(OUT, *cuts[rank][k]),)
        return [Recv(root, own), *(Send(peer, own) for peer in rest)]

    def take(k: int) -> list[Step]:
        return [Recv(peer, (Span(OUT, *cuts[peer][k]),)) for peer in rest if k < len(cuts[peer])]

    steps = Script()
    if rank == root:
        steps.repeat(max(lengths, default=0), give, lengths)
    else:
        # The other slices are received last. They go to their places without a step, so that no
        # segment is passed on later because this rank waited for them.
        steps.repeat(len(cuts[rank]), pass_on)
        steps.repeat(max(lengths), take, lengths)
    return Plan("spread.straight", rank, size, granted(steps).steps(), eager=False)
