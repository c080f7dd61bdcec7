"""Binomial trees: broadcast, gather and scatter in log2 P rounds over log2 P connections.

Source: the binomial trees of Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005. Ranks are counted from the root on. The parent of v is v without its
lowest bit, and the subtree of v has the ranks from v up to v + that bit. So a subtree is a run of
ranks, and its parts lie in memory without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.frames import granted, packed, received, sent
from aiodist.schedules.parts import parts_of
from aiodist.schedules.plan import OUT, TMP, Plan, Recv, Send, Span, Step, X
from aiodist.schedules.script import Script


def below(v: int, size: int) -> int:
    """How many ranks are in the subtree of `v`, itself included."""
    return size if v == 0 else min(v & -v, size - v)


def children(v: int, size: int) -> list[int]:
    """The children of `v`, from the largest subtree to the smallest."""
    bits = (below(v, size) - 1).bit_length()
    return [v + (1 << k) for k in reversed(range(bits)) if v + (1 << k) < size]


def parent(v: int) -> int:
    return v & (v - 1)


def broadcast(rank: int, size: int, root: int, length: int, segment: int) -> Plan:
    """Send X[0:length] of `root` to OUT[0:length] of the others. Bulk, but eager if all fits into
    one frame, because a rank that has entered can keep one frame aside.

    At `root` OUT is not used. X may be OUT. A segment is passed on as soon as it is here.

    Rounds: log2 P, pipelined by segments. On the wire per rank: at most log2 P times `length`.
    Connections: at most log2 P. Scratch: none.
    """
    v = (rank - root) % size
    frames = packed([Span(OUT if v else X, 0, length)], segment)
    below_v = children(v, size)

    def pass_on(k: int) -> list[Step]:
        frame = frames[k]
        received: list[Step] = [Recv((parent(v) + root) % size, frame)] if v else []
        return [*received, *(Send((child + root) % size, frame) for child in below_v)]

    steps = Script()
    steps.repeat(len(frames), pass_on)
    eager = len(frames) == 1
    done = (steps if eager else granted(steps)).steps()
    return Plan("tree.broadcast", rank, size, done, eager=eager)


def gather(rank: int, size: int, root: int, lengths: Sequence[int], segment: int) -> Plan:
    """Gather a part of each rank at `root`. Bulk.

    Part r has ``lengths[r]`` units and is X of rank r. At `root` the parts of the others go to OUT,
    in rank order, without gaps and without the own part; elsewhere OUT is not used. X must not be
    OUT.

    Rounds: log2 P. On the wire per rank: the parts of its subtree. Connections: at most log2 P.
    Scratch: these parts, without the own one.
    """
    subtree = _Subtree(rank, size, root, lengths, X, OUT)
    steps = Script()
    for child in reversed(children(subtree.v, size)):
        frames = packed(subtree.spans(child, below(child, size)), segment)
        steps += received((child + root) % size, frames)
    if rank != root:
        up = (parent(subtree.v) + root) % size
        own = subtree.spans(subtree.v, below(subtree.v, size))
        steps += sent(up, packed(own, segment))
    return subtree.plan("tree.gather", steps)


def scatter(rank: int, size: int, root: int, lengths: Sequence[int], segment: int) -> Plan:
    """Send a part to each rank from `root`. Bulk.

    Part r has ``lengths[r]`` units and goes to OUT of rank r. At `root` X has the parts of the
    others, in rank order, without gaps and without the own part, and OUT is not used. X must not be
    OUT.

    Rounds, connections, bytes on the wire and scratch are those of `gather`.
    """
    subtree = _Subtree(rank, size, root, lengths, OUT, X)
    steps = Script()
    if rank != root:
        up = (parent(subtree.v) + root) % size
        own = subtree.spans(subtree.v, below(subtree.v, size))
        steps += received(up, packed(own, segment))
    for child in children(subtree.v, size):
        frames = packed(subtree.spans(child, below(child, size)), segment)
        steps += sent((child + root) % size, frames)
    return subtree.plan("tree.scatter", steps)


class _Subtree:
    """The places of the parts of a rank's subtree. At `root` all are in one buffer; elsewhere the
    own part is apart and the others are in scratch."""

    def __init__(
        self, rank: int, size: int, root: int, lengths: Sequence[int], own: int, at_root: int
    ) -> None:
        self.rank, self.size, self.root = rank, size, root
        self.v = (rank - root) % size
        self._own = own
        self._all = parts_of(rank, lengths, at_root) if rank == root else None
        self._ends = [0]  # The ends, in scratch, of the parts from `v` + 1 on.
        for v in range(self.v + 1, self.v + below(self.v, size)):
            self._ends.append(self._ends[-1] + lengths[(v + root) % size])
        self._length = lengths[rank]

    def spans(self, first: int, count: int) -> list[Span]:
        """The parts of `count` ranks from `first` on, counted from the root."""
        if self._all is not None:
            return self._all.around(first + self.root, count)
        skipped = first == self.v
        start = first - self.v - (not skipped)
        others = Span(TMP, self._ends[start], self._ends[start + count - skipped])
        return [Span(self._own, 0, self._length), others] if skipped else [others]

    def plan(self, name: str, steps: Script) -> Plan:
        scratch = 0 if self._all is not None else self._ends[-1]
        done = granted(steps).steps()
        return Plan(name, self.rank, self.size, done, eager=False, scratch=scratch)
