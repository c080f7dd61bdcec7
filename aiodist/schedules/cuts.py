"""How lengths are cut: a whole into slices by rank, a slice into segments; how many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

Cut = tuple[int, int]
"""Units `start` to `stop`."""

WINDOW = 4
"""Segments of scratch for each peer, where ranks are near each other."""

AHEAD = 4
"""Segments sent to a peer before the first that comes from it is waited for, where all of them go
straight to their place, and ranks are near each other."""


def even_bounds(length: int, size: int) -> tuple[int, ...]:
    """`size + 1` offsets that cut `length` units as `numpy.array_split` does: the first
    ``length % size`` slices are one unit longer."""
    base, longer = divmod(length, size)
    return tuple(rank * base + min(rank, longer) for rank in range(size + 1))


def pieces(start: int, stop: int, segment: int) -> list[Cut]:
    """Cut units `start` to `stop` into pieces of `segment` units; the last may be shorter."""
    if segment < 1:
        raise ValueError(f"a segment has at least one unit, not {segment}")
    return [(at, min(at + segment, stop)) for at in range(start, stop, segment)]


def blocks_of(length: int, block: int, cut: Callable[[int], Iterable[int]]) -> list[list[Cut]]:
    """The slices of each block of `block` units, by rank; the last block may be shorter. `cut`
    gives the offsets that cut a block of so many units."""
    return [
        [(start + low, start + high) for low, high in pairwise(cut(stop - start))]
        for start, stop in pieces(0, length, block)
    ]


def rounds_of(bounds: Sequence[int], piece: int) -> list[list[Cut]]:
    """The next `piece` units of each slice, by rank, round by round until the longest is done."""
    slices = list(pairwise(bounds))
    longest = max(stop - start for start, stop in slices)
    return [
        [(min(start + low, stop), min(start + high, stop)) for start, stop in slices]
        for low, high in pieces(0, longest, piece)
    ]
