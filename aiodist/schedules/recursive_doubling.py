"""All-reduce of whole values in about log2 P rounds, for small values and for operators that must
see whole arrays.

Source: recursive doubling after Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", 2005. If P is no power of two, neighbours are folded first. Of
the first P - 2^k pairs (2i, 2i+1), the odd rank gives its value to the even one and gets the result
at the end. So every partial result covers consecutive ranks, operands stand in rank order, and
operators need not commute. Results are bit-identical, because all ranks evaluate the same
expression.

Of 6 ranks two pairs are folded, so that 2^k = 4 partial results meet, in two rounds::

    fold        0 <- 1        2 <- 3        4         5
    has         01            23            4         5
    round 0     0 <-> 2: 0123               4 <-> 5: 45
    round 1     0 <-> 4: 012345             2 <-> 5: 012345
    unfold      0 -> 1        2 -> 3

The other way, with all ranks folded to one and a broadcast after it, takes twice the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aiodist.schedules.cuts import AHEAD, Cut, mapped, pieces
from aiodist.schedules.frames import Frame, received, sends, sent, swap
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.schedules.script import Script


class Role(NamedTuple):
    """The role of a rank, if neighbours are folded."""

    block: int
    """Its number among the ranks that are left, or that of the neighbour that stands in for it."""
    gives_to: int | None
    """The neighbour that stands in for this rank."""
    takes_from: int | None
    """The neighbour that this rank stands in for."""
    partners: tuple[int, ...]
    """The ranks that partial results are exchanged with, by round."""


def role_of(rank: int, size: int) -> Role:
    """The role of `rank` among `size`."""
    rounds = size.bit_length() - 1
    pairs = size - (1 << rounds)
    if rank < 2 * pairs:
        if rank % 2:
            return Role(rank // 2, rank - 1, None, ())
        block, takes_from = rank // 2, rank + 1
    else:
        block, takes_from = rank - pairs, None
    others = [block ^ (1 << k) for k in range(rounds)]
    partners = tuple(2 * other if other < pairs else other + pairs for other in others)
    return Role(block, None, takes_from, partners)


def ranks_of(block: int, size: int) -> tuple[int, ...]:
    """The ranks that share number `block` among those that are left: one, or two neighbours. The
    first does the work."""
    pairs = size - (1 << (size.bit_length() - 1))
    return (2 * block, 2 * block + 1) if block < pairs else (block + pairs,)


def all_reduce(rank: int, size: int) -> Plan:
    """Reduce one whole value a rank; the result is on every rank. Eager.

    Unit: the whole value. X[0:1] is the input, OUT[0:1] the result. X may be OUT; otherwise it is
    not altered. TMP may hold a wider type than X and OUT, because partial results lie in TMP and
    are sent from there; only the result is sent from OUT.

    Rounds: log2 P, and at most two more if P is no power of two; one frame each. On the wire per
    rank: floor(log2 P) values, and one more if P is no power of two. Scratch: at most 2 + log2 P
    values. What was sent is not overwritten, because no message says when it has arrived. No rank
    completes before all have entered.
    """
    whole, result = Span(X, 0, 1), Span(OUT, 0, 1)
    steps: list[Step] = []
    name = "recursive_doubling.all_reduce"
    if size == 1:
        return Plan(name, rank, size, (Reduce(result, (whole,)),), eager=True)
    role = role_of(rank, size)
    partial = Span(TMP, 0, 1)
    steps.append(Copy(partial, whole))
    if role.gives_to is not None:
        steps += [Send(role.gives_to, (partial,)), Recv(role.gives_to, (result,))]
        return Plan(name, rank, size, tuple(steps), eager=True, scratch=1)
    slot = 1
    if role.takes_from is not None:
        other = Span(TMP, 1, 2)
        steps += [Recv(role.takes_from, (other,)), Reduce(other, (partial, other), final=False)]
        partial, slot = other, 2
    for partner in role.partners:
        other = Span(TMP, slot, slot + 1)
        slot += 1
        last = partner == role.partners[-1]
        # The lower rank's half stands first at both ends, so that both evaluate the same
        # expression, bit by bit, and operators need not commute.
        operands = (partial, other) if rank < partner else (other, partial)
        steps += [
            Send(partner, (partial,)),
            Recv(partner, (other,)),
            Reduce(result if last else other, operands, last),
        ]
        partial = other
    if role.takes_from is not None:
        steps.append(Send(role.takes_from, (result,)))
    return Plan(name, rank, size, tuple(steps), eager=True, scratch=slot)


def all_reduce_whole(rank: int, size: int, length: int, segment: int, ahead: int = AHEAD) -> Plan:
    """Reduce arrays of `length` units as wholes; the result is on every rank. Bulk.

    This is for large arrays and operators that may not be given pieces. X[0:length] is the input;
    OUT[0:length] holds the partial result and at the end the result. X may be OUT; otherwise it is
    not altered. Arrays travel in frames of `segment` units, but each Reduce covers the whole
    length. An empty frame either way ends each exchange: it says that the partial result has
    arrived and may be overwritten.

    Rounds: two for each of log2 P exchanges, and at most two more if P is no power of two. On the
    wire per rank: `length` for each exchange, and once more to a neighbour. Scratch: `length`.
    """
    name = "recursive_doubling.all_reduce_whole"
    result, other = Span(OUT, 0, length), Span(TMP, 0, length)
    if size == 1:
        return Plan(name, rank, size, (Reduce(result, (Span(X, 0, length),)),), eager=False)
    cuts = pieces(0, length, segment)
    own, results, others = (_frames(buffer, cuts) for buffer in (X, OUT, TMP))
    role = role_of(rank, size)
    steps = Script()
    if role.gives_to is not None:
        to = role.gives_to
        steps += _grants(to, len(cuts))
        steps += sent(to, own)
        steps += received(to, results)
        return Plan(name, rank, size, steps.steps(), eager=False)
    if role.takes_from is not None:
        steps += _grants(role.takes_from, len(cuts))
    steps.repeat(len(cuts), lambda k: (Copy(*results[k], *own[k]),))
    if role.takes_from is not None:
        steps += received(role.takes_from, others)
        steps.append(Reduce(result, (result, other), final=False))
    ahead = min(ahead, len(cuts))
    for partner in role.partners:
        steps.append(Grant(partner, len(cuts) + 1))
        steps += swap(partner, sends(partner, results), partner, others, ahead=ahead)
        operands = (result, other) if rank < partner else (other, result)
        steps += [
            Send(partner, ()),
            Recv(partner, ()),
            Reduce(result, operands, final=partner == role.partners[-1]),
        ]
    if role.takes_from is not None:
        steps += sent(role.takes_from, results)
    return Plan(name, rank, size, steps.steps(), eager=False, scratch=length)


def _frames(buffer: int, cuts: Sequence[Cut]) -> Sequence[Frame]:
    return mapped(cuts, lambda cut: (Span(buffer, *cut),))


def _grants(peer: int, count: int) -> list[Step]:
    return [Grant(peer, count)] if count else []
