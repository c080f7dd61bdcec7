"""Reductions by slices: each rank reduces one slice of the array, for all ranks, and sends the
reduced segments to the ranks that want them. This is the core of reduce-scatter, all-reduce and
reduce.

A slice is cut into segments. In iteration k a rank receives segment k of its slice from every peer,
reduces them in rank order, and sends the result to the readers. It also sends every peer a segment
that the peer will need `ahead` iterations later. Frames from p to r stand in this order::

    p's own segments 0 … ahead - 1 of slice r
    for each k:  segment k of slice p, reduced (if r reads);  p's own segment k + ahead of slice r

Rank r receives the k-th pair in its iteration k + ahead. A peer may send the frames of the next
`window` iterations, so that it can run some iterations ahead before it has to wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm

from aiodist.schedules.cuts import Cut, pieces
from aiodist.schedules.plan import OUT, TMP, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.schedules.script import Script


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
    around: bool = False,
) -> Plan:
    """The plan in which rank s reduces X[bounds[s]:bounds[s + 1]] of all ranks, in rank order, or
    with `around` in the order s + 1, s + 2, …, s.

    `readers` get every reduced segment, in OUT at the place that it has in X. The own reduced slice
    goes to OUT, at its place in X less `origin`. If `origin` is None it passes through scratch, and
    another rank must be a reader.
    """
    if window < 1:
        raise ValueError(f"the window has at least one segment, not {window}")
    cuts = [pieces(bounds[s], bounds[s + 1], segment) for s in range(size)]
    peers = [(rank + distance) % size for distance in range(1, size)]
    # One grant covers `batch` iterations. With ahead + batch - 1 > window all ranks would wait for
    # grants that stand behind their own sends.
    ahead = batch = max(1, window // 2)
    slices = _SliceCuts(rank, cuts, peers, window, ahead, origin, around)
    targets = [peer for peer in peers if peer in readers]
    reading = rank in readers

    def grants(first: int, stop: int) -> list[Step]:
        due = {peer: slices.due(first, stop, peer, reading) for peer in peers}
        return [Grant(peer, count) for peer, count in due.items() if count]

    def iteration(k: int) -> list[Step]:
        steps: list[Step] = []
        results: list[Step] = []
        if reading and k >= ahead:
            steps += slices.collect(k - ahead)
        if k < len(cuts[rank]):
            *reduction, result = slices.reduce(k)
            steps += [*reduction, result]
            results = [Send(peer, (result.into,)) for peer in targets]
        if (k + 1) % batch == 0:
            steps += grants(k + 1 + window - batch, k + 1 + window)
        return [*steps, *results, *slices.contribute(k + ahead)]

    steps = Script(grants(0, window))
    for k in range(ahead):
        steps += slices.contribute(k)
    lengths = [len(cut) for cut in cuts]
    count = max(lengths) + (ahead if readers else 0)
    # A place in scratch is used again after `window` iterations, or 2 * `ahead`.
    steps.repeat(count, iteration, lengths, window + 1, lcm(window, 2 * ahead, batch))
    return Plan(name, rank, size, steps.steps(), eager=False, scratch=slices.scratch)


class _SliceCuts:
    """The slices of all ranks, and the places of what this rank needs for its own slice."""

    def __init__(
        self,
        rank: int,
        cuts: Sequence[Sequence[Cut]],
        peers: Sequence[int],
        window: int,
        ahead: int,
        origin: int | None,
        around: bool,
    ) -> None:
        self._order = [*peers, rank] if around else range(len(cuts))
        self._rank, self._cuts, self._peers = rank, cuts, peers
        self._ahead, self._origin = ahead, origin
        mine = cuts[rank]
        self._width = mine[0][1] - mine[0][0] if mine else 0
        self._slots = min(window, len(mine))  # Places for segments of each peer.
        # A reader sends its own segment m after it has received result m - 2 * ahead. So the place
        # of that result is free when m is reduced.
        self._outbox_slots = min(2 * ahead, len(mine)) if origin is None else 0
        self._outbox = len(peers) * self._slots
        self.scratch = (self._outbox + self._outbox_slots) * self._width

    def due(self, first: int, stop: int, peer: int, reading: bool) -> int:
        """Frames that come from `peer` for iterations `first` to `stop`."""
        count = max(0, min(stop, len(self._cuts[self._rank])) - first)
        if reading:
            last = min(stop - self._ahead, len(self._cuts[peer]))
            count += max(0, last - max(first - self._ahead, 0))
        return count

    def contribute(self, k: int) -> list[Step]:
        """Send segment k of each slice to the rank that reduces it."""
        there = [(peer, self._cuts[peer]) for peer in self._peers]
        return [Send(peer, (Span(X, *cuts[k]),)) for peer, cuts in there if k < len(cuts)]

    def collect(self, k: int) -> list[Step]:
        """Receive segment k of each slice, reduced."""
        there = [(peer, self._cuts[peer]) for peer in self._peers]
        return [Recv(peer, (Span(OUT, *cuts[k]),)) for peer, cuts in there if k < len(cuts)]

    def reduce(self, k: int) -> tuple[*tuple[Recv, ...], Reduce]:
        """Receive segment k of the own slice from all peers, and reduce it."""
        start, stop = self._cuts[self._rank][k]
        operands = {
            peer: self._cell(at * self._slots + k % self._slots, stop - start)
            for at, peer in enumerate(self._peers)
        }
        received = [Recv(peer, (span,)) for peer, span in operands.items()]
        operands[self._rank] = Span(X, start, stop)
        if self._origin is None:
            into = self._cell(self._outbox + k % self._outbox_slots, stop - start)
        else:
            into = Span(OUT, start - self._origin, stop - self._origin)
        return (*received, Reduce(into, tuple(operands[s] for s in self._order)))

    def _cell(self, at: int, length: int) -> Span:
        return Span(TMP, at * self._width, at * self._width + length)
