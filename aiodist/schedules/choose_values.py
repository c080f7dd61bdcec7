"""The choice of plans that move values: broadcast, all_gather, gather, scatter and all_to_all over
links.

Each function says what the plans for one operation cost, and takes the cheapest. Units are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from aiodist.schedules import bruck, chain, direct_exchange, dissemination, spread, star, tree
from aiodist.schedules.costs import ONE_HOST_TCP, Costs, Tally
from aiodist.schedules.plan import Plan
from aiodist.schedules.selection import (
    FRAME_LIMIT,
    RELAY_MARGIN,
    SCRATCH_LIMIT,
    Choice,
    ahead_for,
    cheapest,
    doublings,
    frames_of,
    segment_for,
)
from aiodist.wire.frames import PIECE

FEW = 16
"""Most ranks that all talk to each other in order to save a round, if they are far from each
other."""

HOP = 8 << 20
"""Bytes of a broadcast for which a hop along a chain is worth its time, among ranks that are far
from each other. Sending to many ranks at once takes TCP a fifth longer, because the streams
overflow each other's queues."""

WORDS = 64
"""About how many bytes a rank has to say of itself."""


@lru_cache(maxsize=1024)
def choose_share(size: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan to share small blobs, at most one of which is more than a few words. Through one
    rank it takes 2 (P - 1) frames of all ranks, by dissemination P log2 P. If ranks are far from
    each other, a round costs more than frames, so few ranks send to each other directly."""
    others, rounds = size - 1, doublings(size)
    partners = _partners(size) if others else 0
    doubled = Tally(rounds, rounds, 0, partners, others * WORDS)
    choices = [Choice(dissemination.all_gather, (), doubled)]
    if costs.trip:
        if size <= FEW:
            at_once = Tally(min(1, others), others, 0, others, others * WORDS)
            choices = [Choice(direct_exchange.share, (), at_once)]
    # With two ranks both plans have two frames, so it is better to send both at once.
    elif size > 2:
        by_one = Tally(2, others, 0, others, size * others * WORDS)
        choices.insert(0, Choice(star.all_gather, (), by_one))
    return cheapest(choices, costs, RELAY_MARGIN)


@lru_cache(maxsize=1024)
def choose_broadcast(nbytes: int, size: int, root: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the broadcast of `nbytes` bytes that do not fit into what is shared beforehand.
    Few ranks that are far from each other take the plan of two hops, unless there is so much data
    that a chain is faster."""
    if size == 1:
        return Choice(chain.broadcast, (root, nbytes, FRAME_LIMIT), Tally(0, 0, 0, 0, 0))
    others, rounds = size - 1, doublings(size)
    if costs.trip and 2 < size <= FEW and nbytes <= (size - 2) * HOP:
        share = -(-nbytes // others)
        segment = segment_for(share, 1, costs, PIECE)
        frames = others * frames_of(share, segment)
        args = (root, nbytes, segment)
        return Choice(spread.straight, args, Tally(2, frames, others, others, nbytes))
    # Each hop along a chain waits for a segment, which takes long if ranks are far from each other.
    segment = segment_for(nbytes, 1, costs, PIECE if costs.trip and size > 2 else FRAME_LIMIT)
    frames = frames_of(nbytes, segment)
    first = min(segment, nbytes)
    slices = sum(frames_of(-(-nbytes // (2 << k)), segment) for k in range(rounds))
    hops = Tally(others, frames, 1, min(2, others), nbytes + (others - 1) * first)
    # The root of a tree is busy all the time, however the array is cut. So it is cut as little as
    # possible.
    whole = frames_of(nbytes, FRAME_LIMIT)
    down = Tally(rounds, rounds * whole, int(whole > 1), rounds, rounds * nbytes)
    halves = Tally(2 * rounds, 2 * slices, 1 + rounds, _partners(size), 2 * nbytes * others / size)
    args = (root, nbytes, segment)
    return cheapest(
        [
            Choice(tree.broadcast, (root, nbytes, FRAME_LIMIT), down),
            Choice(chain.broadcast, args, hops),
            Choice(spread.tree, args, halves),
        ],
        costs,
    )


@lru_cache(maxsize=1024)
def choose_all_gather(lengths: tuple[int, ...], costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the all_gather of parts of `lengths` bytes."""
    size, total = len(lengths), sum(lengths)
    others, rounds = size - 1, doublings(size)
    received = total - min(lengths)
    pieces = [-(-n // FRAME_LIMIT) for n in lengths]
    frames = max(sum(pieces) - min(pieces), others * max(pieces))
    direct = Tally(min(1, others), frames, others, others, received)
    ahead = ahead_for(FRAME_LIMIT, costs)
    bundles = _bundles(size, max(lengths))
    doubled = Tally(rounds, bundles, rounds, _partners(size), received)
    return cheapest(
        [
            Choice(direct_exchange.all_gather, (lengths, FRAME_LIMIT, ahead), direct),
            Choice(bruck.all_gather, (lengths, FRAME_LIMIT), doubled),
        ],
        costs,
    )


@lru_cache(maxsize=1024)
def choose_gather(lengths: tuple[int, ...], root: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the gather of parts of `lengths` bytes at `root`."""
    return _to_or_from(direct_exchange.gather, tree.gather, lengths, root, True, costs)


@lru_cache(maxsize=1024)
def choose_scatter(lengths: tuple[int, ...], root: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the scatter of parts of `lengths` bytes from `root`."""
    return _to_or_from(direct_exchange.scatter, tree.scatter, lengths, root, False, costs)


def _to_or_from(
    straight: Callable[..., Plan],
    climbing: Callable[..., Plan],
    lengths: tuple[int, ...],
    root: int,
    to_root: bool,
    costs: Costs,
) -> Choice:
    size, total = len(lengths), sum(lengths)
    others, rounds = size - 1, doublings(size)
    pieces = sum(frames_of(n, FRAME_LIMIT) for n in lengths if n)
    # A root that receives sends a grant to every other rank; a root that sends gets one from each.
    direct = Tally(min(1, others), pieces, others if to_root else 1, others, total)
    # The largest subtree has half of the ranks, and may have all the data. They are counted twice,
    # because a rank sends its parts on only when all of them have come.
    held = min(total, max(lengths) * (1 << max(0, rounds - 1)))
    frames = _bundles(size, max(lengths))
    climbed = Tally(rounds, frames, rounds if to_root else 1, rounds, total + held, 0, held)
    args = (root, lengths, FRAME_LIMIT)
    choices = [Choice(straight, args, direct)]
    if held <= SCRATCH_LIMIT:
        choices.append(Choice(climbing, args, climbed))
    return cheapest(choices, costs, RELAY_MARGIN)


@lru_cache(maxsize=1024)
def choose_all_to_all(nbytes: int, size: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the all_to_all of messages that all have `nbytes` bytes."""
    others, rounds = size - 1, doublings(size)
    frames = others * frames_of(nbytes, FRAME_LIMIT)
    direct = Tally(min(1, others), frames, others, others, others * nbytes)
    ahead = ahead_for(FRAME_LIMIT, costs)
    half = size // 2 * nbytes
    held = rounds * half
    steps = rounds * frames_of(half, FRAME_LIMIT)
    doubled = Tally(rounds, steps, rounds, _partners(size), rounds * half, 0, held)
    choices = [Choice(direct_exchange.uniform, (nbytes, FRAME_LIMIT, ahead), direct)]
    if held <= SCRATCH_LIMIT:
        choices.append(Choice(bruck.all_to_all, (nbytes, FRAME_LIMIT), doubled))
    return cheapest(choices, costs, RELAY_MARGIN)


def _bundles(size: int, longest: int) -> int:
    """Frames of bundles of 1, 2, 4, … parts of at most `longest` bytes, of all ranks but one."""
    sizes = (min(1 << k, size - (1 << k)) for k in range(doublings(size)))
    return sum(frames_of(parts * longest, FRAME_LIMIT) for parts in sizes)


def _partners(size: int) -> int:
    """How many ranks are a power of two away, either way. Half way around, both ways lead to one
    rank, so it counts once."""
    return 2 * doublings(size) - (size & (size - 1) == 0)
