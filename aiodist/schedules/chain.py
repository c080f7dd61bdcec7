"""Pipelines along the ranks: broadcast and scan of large arrays.

Source: the pipelined chain; e.g. Pješivac-Grbović et al., "Performance analysis of MPI collective
operations", 2005 (broadcast), and Sanders, Träff, "Parallel prefix (scan) algorithms for MPI", 2006
(the linear pipelined scan).

Large arrays cost the time that they take on the wire, and in a chain each link carries them once. A
rank passes a segment on while it receives the next one. With 4 ranks, the links carry these
segments over time::

    time     1    2    3    4    5
    0 to 1   s0   s1   s2
    1 to 2        s0   s1   s2
    2 to 3             s0   s1   s2

A tree has fewer rounds, but its inner ranks send everything twice.
"""

from __future__ import annotations

from math import lcm

from aiodist.schedules.cuts import WINDOW, Cut, mapped, pieces
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.schedules.script import Script


def broadcast(rank: int, size: int, root: int, length: int, segment: int) -> Plan:
    """Send X[0:length] of `root` to OUT[0:length] of the others. Bulk.

    The chain is root, root + 1, …, cyclically: each rank forwards a segment as soon as it has it.
    At `root` OUT is not used. X may be OUT.

    Rounds: P - 1, pipelined: the time of `length` and P - 2 segments. On the wire per rank:
    `length`, from the last rank nothing. Scratch: none.
    """
    cuts = pieces(0, length, segment)
    first, last = rank == root, (rank + 1) % size == root
    before, after = (rank - 1) % size, (rank + 1) % size

    def hop(k: int) -> list[Step]:
        spans = (Span(X if first else OUT, *cuts[k]),)
        received: list[Step] = [] if first else [Recv(before, spans)]
        return received if last else [*received, Send(after, spans)]

    steps = Script()
    if cuts and not first:
        steps.append(Grant(before, len(cuts)))
    steps.repeat(len(cuts), hop)
    return Plan("chain.broadcast", rank, size, steps.steps(), eager=False)


def scan(
    rank: int,
    size: int,
    length: int,
    segment: int,
    exclusive: bool,
    whole: bool = False,
    window: int = WINDOW,
) -> Plan:
    """Reduce X[0:length] of ranks 0 … `rank` into OUT[0:length]. Bulk.

    With `exclusive`, reduce those of ranks 0 … `rank` - 1; at rank 0 OUT is then X, unreduced. X
    may be OUT; otherwise it is not altered. The prefix of a segment goes from rank to rank. With
    `whole` the operator sees whole arrays, and `segment` is only the length of frames. TMP may hold
    a wider type than X and OUT, because prefixes lie in TMP and are sent from there.

    Rounds: P - 1, pipelined: the time of `length` and P - 2 segments (`whole`: of P - 1 times
    `length`). On the wire per rank: `length`, from the last rank nothing. Scratch: `window`
    segments to receive, and `window` + 1 to send (`whole`: two arrays).
    """
    if window < 1:
        raise ValueError(f"the window has at least one segment, not {window}")
    chunks = pieces(0, length, max(1, length) if whole else segment)
    frames = mapped(chunks, lambda chunk: pieces(0, chunk[1] - chunk[0], segment))
    width = chunks[0][1] if chunks else 0
    first, last = rank == 0, rank == size - 1
    slots = 0 if first else min(window, len(chunks))
    # Chunk m is granted after chunk m - window was received. But chunk m is written before it is
    # sent, and by then this rank knows only of the grant for m - 1. So it needs one slot more than
    # the window.
    out_slots = 0 if last else min(window + 1, len(chunks))

    def hop(k: int) -> Script:
        steps, (start, stop), parts = Script(), chunks[k], frames[k]
        own, result = Span(X, start, stop), Span(OUT, start, stop)
        prefix: tuple[Span, ...] = ()
        if not first:
            here = (k % slots) * width
            steps.repeat(len(parts), lambda at: [Recv(rank - 1, (_part(here, parts[at]),))])
            prefix = (Span(TMP, here, here + stop - start),)
        total = (*prefix, own)
        if not last:
            there = (slots + k % out_slots) * width
            going = Span(TMP, there, there + stop - start)
            steps.append(Copy(going, own) if first else Reduce(going, total, final=False))
            steps.repeat(len(parts), lambda at: [Send(rank + 1, (_part(there, parts[at]),))])
            total = (going,)
        if not exclusive:
            steps.append(Reduce(result, total))
        else:
            steps.append(Copy(result, own) if first else Reduce(result, prefix))
        if slots and k + slots < len(chunks):
            steps.append(Grant(rank - 1, len(frames[k + slots])))
        return steps

    steps = Script()
    if slots:
        steps.append(Grant(rank - 1, sum(map(len, frames[:slots]))))
    if whole:
        # With `whole` there is one chunk, of many frames.
        for k in range(len(chunks)):
            steps += hop(k)
    else:
        steps.repeat(len(chunks), hop, (), window + 1, lcm(max(1, slots), max(1, out_slots)))
    scratch = (slots + out_slots) * width
    pushes = sum(map(len, frames[:window]))  # what the next rank grants first
    done = steps.steps()
    return Plan("chain.scan", rank, size, done, eager=False, scratch=scratch, pushes=pushes)


def _part(at: int, cut: Cut) -> Span:
    return Span(TMP, at + cut[0], at + cut[1])
