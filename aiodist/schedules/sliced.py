"""Reductions by slices: each rank reduces one slice of the array, for all ranks, and hands the
reduced segments to whoever wants them. The core of reduce-scatter, all-reduce and reduce.

A slice is cut into segments. In iteration k a rank receives segment k of its slice from every
peer, reduces them in rank order, sends the result to the readers, and sends every peer a segment
that this one will need `ahead` iterations later. Frames from p to r stand in this order::

    p's own segments 0 … ahead - 1 of slice r
    for each k:  segment k of slice p, reduced (if r reads);  p's own segment k + ahead of slice r

and r takes in the k-th pair in its iteration k + ahead. A peer may send what belongs to the next
`window` iterations, so it can run some iterations ahead before it has to wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiodist.schedules.cuts import pieces
from aiodist.schedules.plan import OUT, TMP, Grant, Plan, Recv, Reduce, Send, Span, Step, X


def reduce_slices(
    name: str,
    rank: int,
    size: int,
    bounds: Sequence[int],
    segment: int,
    window: int,
    *,
    readers: Collection[int],
    origin: int | None,
) -> Plan:
    """The plan in which rank s reduces X[bounds[s]:bounds[s + 1]] of all ranks.

    `readers` get every reduced segment, in OUT at the place that it has in X. The own reduced
    slice goes to OUT, at its place in X less `origin`; with None it passes through scratch, and
    somebody else must be a reader.
    """
    if window < 1:
        raise ValueError(f"the window has at least one segment, not {window}")
    cuts = [pieces(bounds[s], bounds[s + 1], segment) for s in range(size)]
    counts = [len(cut) for cut in cuts]
    mine = cuts[rank]
    peers = [(rank + distance) % size for distance in range(1, size)]
    targets = [peer for peer in peers if peer in readers]
    reading = rank in readers
    # One grant covers `batch` iterations. With ahead + batch - 1 > window all ranks would wait for
    # grants that stand behind their own sends.
    ahead = batch = max(1, window // 2)
    iterations = max(counts) + (ahead if readers else 0)

    width = mine[0][1] - mine[0][0] if mine else 0
    slots = min(window, len(mine))
    inbox = {peer: at * slots * width for at, peer in enumerate(peers)}
    outbox = len(peers) * slots * width
    # A reader sends its own segment m after it has received result m - 2 * ahead, so that result's
    # place is free when m is reduced.
    outbox_slots = min(2 * ahead, len(mine)) if origin is None else 0

    def due(first: int, stop: int, peer: int) -> int:
        """Frames that come from `peer` for iterations `first` to `stop`."""
        count = max(0, min(stop, counts[rank]) - first)
        if reading:
            count += max(0, min(stop - ahead, counts[peer]) - max(first - ahead, 0))
        return count

    steps: list[Step] = [Grant(p, count) for p in peers if (count := due(0, window, p))]
    for k in range(ahead):
        steps += [Send(p, (Span(X, *cuts[p][k]),)) for p in peers if k < counts[p]]
    for k in range(iterations):
        results: list[Step] = []
        if reading and k >= ahead:
            done = k - ahead
            steps += [Recv(p, (Span(OUT, *cuts[p][done]),)) for p in peers if done < counts[p]]
        if k < len(mine):
            start, stop = mine[k]
            at = (k % slots) * width
            operands = {
                peer: Span(TMP, box + at, box + at + stop - start) for peer, box in inbox.items()
            }
            steps += [Recv(peer, (span,)) for peer, span in operands.items()]
            operands[rank] = Span(X, start, stop)
            if origin is None:
                place = outbox + (k % outbox_slots) * width
                into = Span(TMP, place, place + stop - start)
            else:
                into = Span(OUT, start - origin, stop - origin)
            steps.append(Reduce(into, tuple(operands[s] for s in range(size))))
            results = [Send(peer, (into,)) for peer in targets]
        if (k + 1) % batch == 0:
            last = k + 1 + window
            steps += [Grant(p, count) for p in peers if (count := due(last - batch, last, p))]
        steps += results
        steps += [Send(p, (Span(X, *cuts[p][k + ahead]),)) for p in peers if k + ahead < counts[p]]
    scratch = outbox + outbox_slots * width
    return Plan(name, rank, size, tuple(steps), eager=False, scratch=scratch)
