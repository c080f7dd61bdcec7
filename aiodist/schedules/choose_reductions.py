"""The choice of plans that reduce: all_reduce, reduce, reduce_scatter and scan over links.

Each function says what the plans for one operation cost, and takes the cheapest.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from aiodist.schedules import (
    chain,
    halving_doubling,
    prefixes,
    recursive_doubling,
    reduce,
    reduce_scatter,
    reduce_scatter_all_gather,
    ring,
)
from aiodist.schedules.costs import ONE_HOST_TCP, Costs, Tally
from aiodist.schedules.cuts import WINDOW
from aiodist.schedules.selection import (
    BLOCK,
    EAGER_LIMIT,
    FRAME_LIMIT,
    RELAY_MARGIN,
    SCRATCH_LIMIT,
    SEGMENT_LIMIT,
    Choice,
    ahead_for,
    cheapest,
    doublings,
    frames_of,
    segment_for,
    shared_segment,
    window_for,
)

RING_FRAME_COST: Final = 6
"""The cost of a frame in a ring, in frames of an exchange of all ranks with all. It costs more
because each rank is woken for it in turn, and another rank has just used the caches."""

FEW: Final = 16
"""Most ranks for which a ring is taken although other plans are expected to take as long. With more
ranks it is not, because each of the 2 (P - 1) rounds waits for the slowest rank."""


class Shape(NamedTuple):
    """An array that is reduced."""

    length: int
    itemsize: int
    """Bytes of an element."""
    wide: int
    """Bytes of an element of a partial result."""
    sliceable: bool = True
    """Whether the operator may be applied to slices."""
    commutative: bool = True
    ordered: bool = False
    """Whether only plans are considered that combine the operands one by one, in rank order, as
    the plans in shared memory do."""


@lru_cache(maxsize=1024)
def goes_whole(nbytes: int, size: int, sliceable: bool, costs: Costs = ONE_HOST_TCP) -> bool:
    """Whether an all_reduce, or reduce, of `nbytes` of partial results is done by
    `recursive_doubling.all_reduce`. That is the only plan whose frames need no grants."""
    if nbytes > EAGER_LIMIT:
        return False
    if not sliceable or not nbytes:
        return True
    rounds = _doubling_rounds(size)
    whole = Tally(rounds, rounds, 0, rounds, rounds * nbytes, rounds * nbytes)
    near = costs._replace(trip=0.0)  # see `choose_all_reduce`
    other = choose_all_reduce(Shape(nbytes, 1, 1), size, near)
    return whole.seconds(near) <= other.tally.seconds(near)


def _doubling_rounds(size: int) -> int:
    """Rounds of `recursive_doubling.all_reduce`: two more if neighbours are folded."""
    return size.bit_length() - 1 + 2 * _folded(size)


def _folded(size: int) -> bool:
    return size & (size - 1) != 0


@lru_cache(maxsize=1024)
def choose_all_reduce(x: Shape, size: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the all_reduce of an array that does not go whole in one frame."""
    if not x.sliceable or size == 1:
        return _whole(x, size, costs)
    # The distance between ranks is measured anew in each run. So the results must not depend on it.
    near = costs._replace(trip=0.0)
    choices = [_direct(x, size, None, near)]
    if not x.ordered:
        choices.append(_halving(x, size, None, near))
    if x.commutative and not x.ordered:
        # For large slices of few ranks the ring is first, because it has the fewest frames, and
        # data are still in the caches when they are reduced. It took 0.6 to 0.9 of the processor
        # time of a direct exchange, with 2 to 8 ranks on two cores.
        share = -(-x.length // size) * x.wide
        is_large = share >= SEGMENT_LIMIT and size <= FEW
        choices.insert(0 if is_large else len(choices), _ring(x, size, near))
    chosen = cheapest(choices, near)
    if not costs.way or chosen.algorithm is halving_doubling.all_reduce:
        return chosen
    # A ring would cross the distance in each of its many rounds. So ranks that are far from each
    # other compute the same bits in two rounds.
    return _direct(x, size, None, costs, around=chosen.algorithm is ring.all_reduce)


@lru_cache(maxsize=1024)
def choose_reduce(x: Shape, size: int, root: int, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the reduce of an array that does not go whole in one frame. If the operator must
    see it whole, the plan is an all_reduce whose result only `root` keeps."""
    if not x.sliceable or size == 1:
        return _whole(x, size, costs)
    near = costs._replace(trip=0.0)  # see `choose_all_reduce`
    choices = [_direct(x, size, root, near)]
    if not x.ordered:
        choices.append(_halving(x, size, root, near))
    chosen = cheapest(choices, near)
    return chosen if chosen.partials else _direct(x, size, root, costs)


@lru_cache(maxsize=1024)
def choose_reduce_scatter(x: Shape, bounds: tuple[int, ...], costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the reduce_scatter of an array with slices at `bounds`."""
    if not x.sliceable:
        return _direct_slices(x, bounds, costs)
    near = costs._replace(trip=0.0)  # see `choose_all_reduce`
    choices = [_direct_slices(x, bounds, near)]
    if len(bounds) > 2 and not x.ordered:
        choices.append(_halving_slices(x, bounds, near))
        if x.commutative:
            choices.append(_ring_slices(x, bounds, near))
    fitting = [choice for choice in choices if choice.tally.scratch <= SCRATCH_LIMIT]
    chosen = cheapest(fitting, near)
    return chosen if chosen.partials else _direct_slices(x, bounds, costs)


def _whole(x: Shape, size: int, costs: Costs) -> Choice:
    nbytes = x.length * x.itemsize
    segment = segment_for(nbytes // size, x.itemsize, costs)
    rounds = _doubling_rounds(size)
    tally = Tally(
        rounds=2 * rounds,
        frames=rounds * (frames_of(x.length, segment) + 1),
        grants=rounds,
        connections=rounds,
        nbytes=rounds * nbytes,
        reduced=rounds * nbytes,
        scratch=nbytes if size > 1 else 0,
    )
    args = (x.length, segment, ahead_for(segment * x.itemsize, costs))
    return Choice(recursive_doubling.all_reduce_whole, args, tally)


def _batches(iterations: int, window: int) -> int:
    """Grants to a peer in so many iterations of `sliced.reduce_slices`."""
    return 1 + max(0, -(-(iterations - window) // (window // 2)))


def _direct(x: Shape, size: int, root: int | None, costs: Costs, around: bool = False) -> Choice:
    """All ranks exchange slices directly; then each sends its result to all, or to a root, which
    receives as much again. `around`: operands stand in the order of `ring`."""
    others, share = size - 1, -(-x.length // size)
    segment = shared_segment(share * x.itemsize, x.itemsize, size, costs)
    pieces = frames_of(share, segment)
    nbytes = others * share * x.itemsize
    width = min(segment, share) * x.itemsize
    streams = others + (root is not None)
    window = window_for(width, streams, costs)
    scratch = streams * min(window, pieces) * width
    tally = Tally(
        rounds=2,
        frames=2 * others * pieces,
        grants=others * _batches(pieces + window // 2, window),
        connections=others,
        nbytes=2 * nbytes,
        reduced=nbytes,
        scratch=scratch,
    )
    # A rank with an empty slice receives no frames.
    before = 0 if x.length >= size else doublings(size)
    if root is None:
        algorithm = reduce_scatter_all_gather.all_reduce
        return Choice(algorithm, (x.length, segment, window, around), tally, before=before)
    return Choice(reduce.scatter_gather, (root, x.length, segment, window), tally, before=before)


def _lengths(bounds: tuple[int, ...]) -> list[int]:
    """The lengths of the slices at `bounds`."""
    return [b - a for a, b in pairwise(bounds)]


def _direct_slices(x: Shape, bounds: tuple[int, ...], costs: Costs) -> Choice:
    """All ranks exchange slices directly: segments of them, or whole ones if the operator must see
    these."""
    size, lengths = len(bounds) - 1, _lengths(bounds)
    others, longest = size - 1, max(lengths)
    own = longest * x.itemsize
    segment = shared_segment(own, x.itemsize, size, costs)
    pieces = frames_of(longest, segment)
    nbytes = others * own
    width = min(segment, longest) * x.itemsize
    window = window_for(width, others, costs)
    scratch = others * min(window, pieces) * width
    frames, grants = others * pieces, others * _batches(pieces, window)
    tally = Tally(1, frames, grants, others, nbytes, nbytes, scratch)
    # A rank with an empty slice receives no frames, so it must learn otherwise that all have
    # entered.
    before = doublings(size) if 0 in lengths else 0
    if x.sliceable:
        args = (bounds, segment, window)
        return Choice(reduce_scatter.direct, args, tally, before=before)
    segment = segment_for(own, x.itemsize, costs)
    args = (bounds, segment, ahead_for(segment * x.itemsize, costs))
    whole = tally._replace(scratch=others * own)
    return Choice(reduce_scatter.whole, args, whole, before=before)


def _halving(x: Shape, size: int, root: int | None, costs: Costs) -> Choice:
    block = max(1, min(x.length, BLOCK // x.wide))
    segment = segment_for(block * x.wide // 2, x.wide, costs)
    blocks = frames_of(x.length, block)
    partners = size.bit_length() - 1
    folded = _folded(size)
    halves = sum(frames_of(-(-block // (2 << k)), segment) for k in range(partners))
    moved = x.length * ((1 << partners) - 1) / (1 << partners) + x.length * folded
    tally = Tally(
        rounds=blocks * 2 * (partners + folded),
        frames=blocks * 2 * (halves + folded * frames_of(block, segment)),
        grants=blocks * (partners + folded),
        connections=partners + folded,
        nbytes=moved * (x.wide + (x.itemsize if root is None else x.wide)),
        reduced=moved * x.wide,
        scratch=(2 if root is None else 3) * block * x.wide,
    )
    args = (x.length, segment, block)
    if root is None:
        algorithm = halving_doubling.all_reduce
        return Choice(algorithm, args, tally, partials=True)
    return Choice(
        halving_doubling.reduce, (root, *args), tally, partials=True, before=doublings(size)
    )


def _halving_slices(x: Shape, bounds: tuple[int, ...], costs: Costs) -> Choice:
    size, longest = len(bounds) - 1, max(_lengths(bounds))
    segment = segment_for(x.length * x.wide // 2, x.wide, costs)
    partners, folded = size.bit_length() - 1, _folded(size)
    # In each step half of the ranks remain; if slices are uneven, these may have more than half of
    # the array.
    halves = [min(x.length, longest * ((1 + folded) << k)) for k in range(partners)]
    frames = sum(frames_of(half, segment) for half in halves)
    # At the end of the halving two ranks have each other's slices, or every rank its own.
    frames += folded * frames_of(x.length, segment) + (1 + folded) * frames_of(longest, segment)
    moved = sum(halves) + x.length * folded + longest
    tally = Tally(
        rounds=partners + 1 + 2 * folded,
        frames=frames,
        grants=partners + 1 + folded,
        connections=partners + 1 + 2 * folded,
        nbytes=moved * x.wide,
        reduced=moved * x.wide,
        scratch=(x.length + sum(halves) + longest) * x.wide,
    )
    args = (bounds, segment)
    return Choice(halving_doubling.reduce_scatter, args, tally, partials=True)


def _around(times: int, size: int, rows: int, row: int, wide: int) -> Tally:
    """So many times around a ring, with `rows` rows of slices of `row` units."""
    depth, rounds = ring.DEPTH, times * (size - 1)
    frames = rounds * rows
    return Tally(
        rounds=rounds * -(-rows // depth),
        frames=frames,
        grants=1 + max(0, frames - 2 * depth) // depth,
        connections=min(2, size - 1),
        nbytes=frames * row * wide,
        reduced=frames * row * wide / 2,
        scratch=(4 * depth + 1) * row * wide,
    )


def _ring(x: Shape, size: int, costs: Costs) -> Choice:
    share = -(-x.length // size)
    prices = costs._replace(frame=RING_FRAME_COST * costs.frame)
    segment = segment_for(share * x.wide, x.wide, prices, FRAME_LIMIT)
    rows = frames_of(share, segment)
    tally = _around(2, size, rows, min(segment, share), x.wide)
    return Choice(ring.all_reduce, (x.length, segment), tally, partials=True)


def _ring_slices(x: Shape, bounds: tuple[int, ...], costs: Costs) -> Choice:
    longest = max(_lengths(bounds))
    segment = segment_for(longest * x.wide, x.wide, costs)
    tally = _around(1, len(bounds) - 1, frames_of(longest, segment), min(segment, longest), x.wide)
    return Choice(ring.reduce_scatter, (bounds, segment), tally, partials=True)


def is_gathered(nbytes: int, size: int) -> bool:
    """Whether a scan of `nbytes` gives all inputs to every rank, by `dissemination.all_gather`, and
    each rank reduces what it needs. For small inputs this is best, because it takes only the rounds
    that synchronise the ranks."""
    return nbytes * size <= EAGER_LIMIT


@lru_cache(maxsize=1024)
def choose_scan(x: Shape, size: int, exclusive: bool, costs: Costs = ONE_HOST_TCP) -> Choice:
    """The plan for the scan of an array whose inputs are not gathered."""
    wide, rounds = x.length * x.wide, doublings(size)
    segment = segment_for(wide, x.wide, costs)
    frames = frames_of(x.length, segment)
    scratch = (3 * rounds + 1) * wide
    doubling = Tally(
        rounds=rounds,
        frames=rounds * frames,
        grants=rounds,
        connections=max(0, 2 * rounds - 1),
        nbytes=rounds * wide,
        reduced=rounds * wide,
        scratch=scratch,
    )
    # A segment, or the whole array, has to pass all hops of the chain before the last rank has
    # work.
    filling = min(segment * x.wide, wide) if x.sliceable else wide

    def chained(costs: Costs) -> Choice:
        window = window_for(segment * x.wide, 3, costs) if x.sliceable else WINDOW
        tally = Tally(
            rounds=size - 1,
            frames=frames,
            grants=1 + max(0, frames - window) * x.sliceable,
            connections=min(2, size - 1),
            nbytes=wide + max(0, size - 2) * filling,
            reduced=wide + max(0, size - 2) * filling,
            scratch=(2 * window + 1) * segment * x.wide if x.sliceable else 2 * wide,
        )
        args = (x.length, segment, exclusive, not x.sliceable, window)
        return Choice(chain.scan, args, tally, partials=True, before=rounds)

    near = costs._replace(trip=0.0)  # see `choose_all_reduce`
    choices = [chained(near)]
    if scratch <= SCRATCH_LIMIT and not x.ordered:
        args = (x.length, segment, exclusive)
        choices.append(Choice(prefixes.scan, args, doubling, partials=True, before=rounds))
    chosen = cheapest(choices, near, RELAY_MARGIN)
    return chained(costs) if chosen.algorithm is chain.scan else chosen
