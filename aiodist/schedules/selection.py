"""What the choice of an algorithm depends on: limits, costs, and the length of segments.

`choose_reductions` and `choose_values` have a function for each operation. All ranks choose alike,
because these functions are pure and use only what all ranks agree on.

A plan of links has at most SCRATCH_LIMIT bytes of scratch, however many ranks there are and however
large the array is. A plan that would need more is cut smaller, or not considered. Only plans for
operators that must see whole arrays may need more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isqrt
from typing import Any, Final, NamedTuple

from aiodist.schedules.costs import ONE_HOST_TCP, Costs, Tally
from aiodist.schedules.cuts import AHEAD, WINDOW
from aiodist.schedules.plan import Plan
from aiodist.wire.frames import MAX_PAYLOAD, PIECE

EAGER_LIMIT: Final = 64 * 1024
"""Most bytes of a value that travels whole in an eager plan. It fits into a frame even if its
accumulator is four times as wide (float8 in float32)."""

SEGMENT_LIMIT: Final = 2 * PIECE
"""Most bytes of a segment that is reduced, because larger ones leave the cache before they are
reduced."""

FRAME_LIMIT: Final = MAX_PAYLOAD
"""Most bytes of a segment that is only passed on: one frame. With frames of a quarter of that, half
of the processor time of large values was spent on frames."""

SEGMENT_LEAST: Final = 16 * 1024
"""Bytes of a segment below which its own overhead is more than the time for its bytes."""

SCRATCH_LIMIT: Final = 16 * 1024 * 1024
"""Most bytes of scratch of one plan."""

BLOCK: Final = SCRATCH_LIMIT // 4
"""Bytes of a block of `halving_doubling`, which takes up to three of them, and a unit a round."""

MARGIN: Final = 1.3
"""How many times cheaper than the first a plan has to be, to be chosen. Plans that were cheaper by
less took more processor time than the first, with 4 and 8 ranks on two cores."""

RELAY_MARGIN: Final = 3
"""The same for plans whose ranks pass on data for others, so that data travel log2 P times instead
of once. With 8 and 16 ranks scans of this kind took 1.2 to 1.6 times the processor time, and
gathers up to 1.1 times."""


class Choice(NamedTuple):
    """A plan, ``algorithm(rank, size, *args)``, and what it costs."""

    algorithm: Callable[..., Plan]
    args: tuple[Any, ...]
    tally: Tally
    partials: bool = False
    """Whether partial results lie in TMP and are sent from there."""
    before: int = 0
    """Rounds in which all ranks say that they have entered, because the plan itself does not tell
    all of them. It is 0 for plans that move values, because these are chosen after what is offered
    has been shared."""

    def seconds(self, costs: Costs) -> float:
        """The time that the plan is expected to take."""
        return self.tally.seconds(costs) + self.before * costs.alpha

    @property
    def name(self) -> str:
        """The name of the algorithm in docs/algorithms.md."""
        return f"{self.algorithm.__module__.rpartition('.')[2]}.{self.algorithm.__name__}"


def cheapest(choices: Sequence[Choice], costs: Costs, margin: float = MARGIN) -> Choice:
    """The plan that costs least. Any plan but the first has to be cheaper by `margin`. The model
    does not know that the first takes the least processor time of all ranks, or that its segments
    overlap most."""
    first, *others = choices
    best = min(others, key=lambda choice: choice.seconds(costs), default=first)
    return best if best.seconds(costs) * margin < first.seconds(costs) else first


def doublings(size: int) -> int:
    """Rounds in which what is known doubles until it is all."""
    return (size - 1).bit_length()


def frames_of(length: int, segment: int) -> int:
    """Frames of a message that is sent even if it is empty."""
    return max(1, -(-length // segment))


@lru_cache(maxsize=1024)
def segment_for(
    nbytes: int, itemsize: int, costs: Costs = ONE_HOST_TCP, most: int = SEGMENT_LIMIT
) -> int:
    """Units of `itemsize` bytes in a segment of a stream of `nbytes`. A stream is what one rank
    sends to one peer in all: in an all-reduce a slice, in a broadcast everything.

    A pipeline of s-byte segments fills in ``s * beta`` and has an overhead of ``frame * nbytes /
    s``: the sum is least at ``sqrt(nbytes * frame / beta)``. It is rounded to the nearest power of
    two, and at most `most` bytes. All ranks must know `nbytes`, because all must cut alike. Raises
    ValueError for units that no frame can hold.
    """
    if not 1 <= itemsize <= most:
        raise ValueError(f"units have 1 to {most} bytes, not {itemsize}: no frame could hold one")
    best = isqrt(2 * int(nbytes * costs.frame / costs.beta))  # One bit is for rounding.
    nearest = 1 << max(0, best.bit_length() - 1)
    return max(1, min(max(nearest, SEGMENT_LEAST), most) // itemsize)


def shared_segment(nbytes: int, itemsize: int, size: int, costs: Costs = ONE_HOST_TCP) -> int:
    """Units in a segment of streams of `nbytes` that come from all other ranks at once. WINDOW
    segments of each stream have a place in scratch."""
    room = SCRATCH_LIMIT // (WINDOW * max(1, size)) // itemsize
    return max(1, min(segment_for(nbytes, itemsize, costs), room))


def window_for(width: int, streams: int, costs: Costs = ONE_HOST_TCP) -> int:
    """Segments of `width` bytes that have a place in scratch, for each of so many `streams` at
    once. They fill the way to a rank and back, but take no more than SCRATCH_LIMIT in all.

    The answer to a segment is a grant, or the next segment that may be sent. Without enough places,
    a rank that is far away has sent all that it may when the first answer comes, and waits.
    """
    places = max(1, streams) * max(1, width)
    return max(WINDOW, min(-(-costs.way // places), SCRATCH_LIMIT // places))


def ahead_for(width: int, costs: Costs = ONE_HOST_TCP) -> int:
    """Segments of `width` bytes that are sent to each peer before the first Recv, if all of them
    have a place. They are so many that the wire is busy from the start, however far the ranks
    are."""
    return max(AHEAD, -(-costs.way // max(1, width)))
