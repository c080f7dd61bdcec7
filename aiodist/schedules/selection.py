"""Which algorithm, and how long its segments are: pure functions of what all ranks agree on."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Final, Literal

from aiodist.schedules import cost
from aiodist.schedules.cost import ONE_HOST_TCP, Network
from aiodist.wire.frames import MAX_PAYLOAD

EAGER_LIMIT: Final = 64 * 1024
"""Most bytes of a value that travels whole in an eager plan. Also in an accumulator of four times
its width (float8 in float32) it fits into a frame."""

SEGMENT_LIMIT: Final = MAX_PAYLOAD
"""Most bytes of a segment: one frame. Larger ones leave the cache before they are reduced."""

SEGMENT_LEAST: Final = 16 * 1024
"""Bytes of a segment under which its own overhead is more than what it carries."""

AllReduce = Literal["recursive_doubling", "reduce_scatter_all_gather", "whole"]
Reduce = Literal["recursive_doubling", "scatter_gather", "whole"]
Scan = Literal["gather", "chain"]


@lru_cache(maxsize=1024)
def choose_all_reduce(
    nbytes: int, size: int, sliceable: bool, network: Network = ONE_HOST_TCP
) -> AllReduce:
    """The all-reduce over `size` ranks of an array whose partial results have `nbytes`.

    "recursive_doubling" is `recursive_doubling.all_reduce`; "reduce_scatter_all_gather" the
    function `all_reduce` of that module, for operators that may be given slices (`sliceable`);
    "whole" is `recursive_doubling.all_reduce_whole`, for large arrays and operators that may not.
    """
    if nbytes > EAGER_LIMIT:
        return "reduce_scatter_all_gather" if sliceable else "whole"
    small = cost.recursive_doubling(nbytes, size, network)
    if sliceable and nbytes and cost.reduce_scatter_all_gather(nbytes, size, network) < small:
        return "reduce_scatter_all_gather"
    return "recursive_doubling"


@lru_cache(maxsize=1024)
def choose_reduce(
    nbytes: int, size: int, sliceable: bool, network: Network = ONE_HOST_TCP
) -> Reduce:
    """The reduce to one rank, over `size` ranks, of an array whose partial results have `nbytes`.

    "scatter_gather" is `reduce.scatter_gather`. The others are all-reduces, as of
    `choose_all_reduce`, whose result only the root keeps.
    """
    choice = choose_all_reduce(nbytes, size, sliceable, network)
    return "scatter_gather" if choice == "reduce_scatter_all_gather" else choice


def choose_scan(nbytes: int, size: int) -> Scan:
    """The scan over `size` ranks of an array of `nbytes`.

    "gather": everyone gets all inputs by `dissemination.all_gather` and reduces what it needs: no
    rounds but those that synchronise, as long as all inputs together are small. "chain":
    `chain.scan`, after a synchronisation.
    """
    return "gather" if nbytes * size <= EAGER_LIMIT else "chain"


@lru_cache(maxsize=1024)
def segment_for(nbytes: int, itemsize: int, network: Network = ONE_HOST_TCP) -> int:
    """Units of `itemsize` bytes in a segment of a stream of `nbytes`: what one rank sends to one
    peer in all (of an all-reduce a slice, of a broadcast the whole).

    A pipeline of s-byte segments fills in ``s * beta`` and has an overhead of ``frame * nbytes /
    s``: the sum is least at ``sqrt(nbytes * frame / beta)``. Taken to the nearest power of two, and
    at most SEGMENT_LIMIT bytes. All ranks must cut alike, so `nbytes` has to be a number that all
    know. Raises ValueError for units that no frame can hold.
    """
    if not 1 <= itemsize <= SEGMENT_LIMIT:
        raise ValueError(
            f"units have 1 to {SEGMENT_LIMIT} bytes, not {itemsize}: no frame could hold one"
        )
    best = isqrt(2 * int(nbytes * network.frame / network.beta))  # one bit is for rounding
    nearest = 1 << max(0, best.bit_length() - 1)
    return max(1, min(max(nearest, SEGMENT_LEAST), SEGMENT_LIMIT) // itemsize)
