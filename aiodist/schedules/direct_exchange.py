"""Every rank sends to every other directly: all-to-all, with gather and scatter as special cases.
In the all-reduce and the sharing of small values each rank shows its value to all.

Source: the pairwise exchange of Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", 2005, without its barriers between the steps. In step d rank r
sends to r + d and receives from r - d, so that all ranks have different targets at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.schedules.cuts import AHEAD, mapped, pieces
from aiodist.schedules.parts import parts_of
from aiodist.schedules.plan import OUT, TMP, Copy, Grant, Plan, Recv, Reduce, Send, Span, Step, X
from aiodist.schedules.script import Script

ALL_REDUCE = "direct_exchange.all_reduce"
SHARE = "direct_exchange.share"
"""The names of the plans that begin by showing a value to all ranks: these values may be posted in
shared memory."""


def exchange(
    rank: int,
    size: int,
    outgoing: Sequence[Sequence[Span]],
    incoming: Sequence[Sequence[Span]],
    ahead: int = AHEAD,
) -> Script:
    """The steps that send ``outgoing[p]``, one frame a span, to each rank p, and receive
    ``incoming[p]`` from it. At `rank` itself ``outgoing`` is copied to ``incoming``.

    All frames are granted at once, so the memory of `incoming` must be free from the start.
    """
    distances = range(1, size)
    longest = max(map(len, (*outgoing, *incoming)))

    # Each segment goes to all peers before the next segment, so that all links are busy from the
    # start, and no peer waits until others have everything. Segment k is waited for only after
    # segment k + ahead was sent, so that both directions of a link are busy.
    ahead = min(ahead, longest)

    def turn(k: int) -> list[Step]:
        steps: list[Step] = []
        for distance in distances:
            target = (rank + distance) % size
            if k < len(outgoing[target]):
                steps.append(Send(target, (outgoing[target][k],)))
        if k < len(outgoing[rank]):
            steps.append(Copy(incoming[rank][k], outgoing[rank][k]))
        for distance in distances:
            source = (rank - distance) % size
            if 0 <= k - ahead < len(incoming[source]):
                steps.append(Recv(source, (incoming[source][k - ahead],)))
        return steps

    script = Script()
    for distance in distances:
        source = (rank - distance) % size
        if incoming[source]:
            script.append(Grant(source, len(incoming[source])))
    edges = [len(message) for message in outgoing]
    edges += [len(message) + ahead for message in ((), *incoming)]
    script.repeat(longest + ahead, turn, edges)
    return script


def spans(buffer: int, start: int, stop: int, segment: int) -> Sequence[Span]:
    """Units `start` to `stop` of `buffer`, in segments."""
    return mapped(pieces(start, stop, segment), lambda cut: Span(buffer, *cut))


def all_reduce(rank: int, size: int) -> Plan:
    """Reduce one whole value a rank; the result is on every rank. Eager.

    Unit: the whole value; X, OUT and TMP are those of `recursive_doubling.all_reduce`. Each rank
    sends the same frame to all others, so it may be posted in shared memory instead: see
    `aiodist.shared_memory.posts`. Results are the same on all ranks, because all reduce in rank
    order.

    Rounds: 1, of P - 1 messages. On the wire per rank: the own value to all others. Scratch: P + 1
    values, of two ranks 2. No rank completes before all have entered.
    """
    name = ALL_REDUCE
    whole, result = Span(X, 0, 1), Span(OUT, 0, 1)
    if size == 1:
        return Plan(name, rank, size, (Reduce(result, (whole,)),), eager=True)
    values = [Span(TMP, src, src + 1) for src in range(size)]
    others = [(rank + distance) % size for distance in range(1, size)]
    steps: list[Step] = [Copy(values[rank], whole)]
    steps += [Send(peer, (values[rank],)) for peer in others]
    steps += [Recv(peer, (values[peer],)) for peer in others]
    total = Span(TMP, size, size + 1)
    for src in range(1, size):
        last = src == size - 1
        operands = (values[0] if src == 1 else total, values[src])
        steps.append(Reduce(result if last else total, operands, last))
    return Plan(name, rank, size, tuple(steps), eager=True, scratch=size + (size > 2))


def share(rank: int, size: int) -> Plan:
    """Gather one blob a rank on every rank. Eager.

    Units and OUT are those of `dissemination.all_gather`. Each rank sends the same frame to all
    others, as in `all_reduce`.

    Rounds: 1, of P - 1 messages. On the wire per rank: the own blob to all others. Scratch: none.
    No rank completes before all have entered.
    """
    own = (Span(OUT, rank, rank + 1),)
    others = [(rank + distance) % size for distance in range(1, size)]
    steps: list[Step] = [Send(peer, own) for peer in others]
    steps += [Recv(peer, (Span(OUT, peer, peer + 1),)) for peer in others]
    return Plan(SHARE, rank, size, tuple(steps), eager=True)


def all_to_all(
    rank: int,
    size: int,
    send_bounds: Sequence[int],
    recv_bounds: Sequence[int],
    segment: int,
    ahead: int = AHEAD,
) -> Plan:
    """Send a message to each rank and receive one from each. Bulk.

    X[send_bounds[p]:send_bounds[p + 1]] goes to rank p, and the message of rank p comes to
    OUT[recv_bounds[p]:recv_bounds[p + 1]]; the own message is copied. Lengths may differ and may be
    zero (then no frame is sent), but both ends must know them. X must not be OUT.

    Rounds: 1, of at most P - 1 messages. On the wire per rank: its messages to others. Scratch:
    none.
    """
    outgoing = [spans(X, send_bounds[p], send_bounds[p + 1], segment) for p in range(size)]
    incoming = [spans(OUT, recv_bounds[p], recv_bounds[p + 1], segment) for p in range(size)]
    steps = exchange(rank, size, outgoing, incoming, ahead).steps()
    return Plan("direct_exchange.all_to_all", rank, size, steps, eager=False)


def all_gather(
    rank: int, size: int, lengths: Sequence[int], segment: int, ahead: int = AHEAD
) -> Plan:
    """Gather a part of each rank on every rank. Bulk.

    X and OUT are those of `bruck.all_gather`.

    Rounds: 1, of P - 1 messages. On the wire per rank: the own part to all others. Connections: P
    - 1. Scratch: none.
    """
    outgoing = [_cut([Span(X, 0, lengths[rank])], segment) for _ in range(size)]
    parts = parts_of(rank, lengths, OUT)
    incoming = [_cut(parts.around(p, 1), segment) for p in range(size)]
    return _plan("direct_exchange.all_gather", rank, size, outgoing, incoming, ahead)


def gather(rank: int, size: int, root: int, lengths: Sequence[int], segment: int) -> Plan:
    """Gather a part of each rank at `root`. Bulk.

    X and OUT are those of `tree.gather`.

    Rounds: 1, of P - 1 messages to `root`. Connections: there P - 1. Scratch: none.
    """
    return _with_root(rank, size, root, lengths, segment, gathers=True)


def scatter(rank: int, size: int, root: int, lengths: Sequence[int], segment: int) -> Plan:
    """Send a part to each rank from `root`. Bulk.

    X and OUT are those of `tree.scatter`.

    Rounds: 1, of P - 1 messages of `root`. Connections: there P - 1. Scratch: none.
    """
    return _with_root(rank, size, root, lengths, segment, gathers=False)


def uniform(rank: int, size: int, length: int, segment: int, ahead: int = AHEAD) -> Plan:
    """Send `length` units to each other rank, and receive as many from each. Bulk.

    X and OUT are those of `bruck.all_to_all`.

    Rounds: 1, of P - 1 messages. On the wire per rank: its messages. Connections: P - 1. Scratch:
    none.
    """
    going, coming = (parts_of(rank, (length,) * size, buffer) for buffer in (X, OUT))
    outgoing = [_cut(going.around(p, 1), segment) for p in range(size)]
    incoming = [_cut(coming.around(p, 1), segment) for p in range(size)]
    return _plan("direct_exchange.uniform", rank, size, outgoing, incoming, ahead)


def _with_root(
    rank: int, size: int, root: int, lengths: Sequence[int], segment: int, *, gathers: bool
) -> Plan:
    """A part of each rank goes to `root`, or comes from there: gather and scatter differ only in
    direction."""
    name, whole, part = ("gather", OUT, X) if gathers else ("scatter", X, OUT)
    none: list[Sequence[Span]] = [() for _ in range(size)]
    ours = [*none]
    if rank == root:
        parts = parts_of(rank, lengths, whole)
        ours = [_cut(parts.around(p, 1), segment) for p in range(size)]
    else:
        ours[root] = _cut([Span(part, 0, lengths[rank])], segment)
    outgoing, incoming = (none, ours) if gathers == (rank == root) else (ours, none)
    return _plan(f"direct_exchange.{name}", rank, size, outgoing, incoming)


def _cut(parts: Sequence[Span], segment: int) -> Sequence[Span]:
    """The part of one rank, which is one span, or empty, in segments."""
    return spans(*parts[0], segment) if parts else ()


def _plan(
    name: str,
    rank: int,
    size: int,
    outgoing: list[Sequence[Span]],
    incoming: list[Sequence[Span]],
    ahead: int = AHEAD,
) -> Plan:
    """An exchange in which a rank copies no message to itself."""
    outgoing[rank] = incoming[rank] = ()
    steps = exchange(rank, size, outgoing, incoming, ahead).steps()
    return Plan(name, rank, size, steps, eager=False)
