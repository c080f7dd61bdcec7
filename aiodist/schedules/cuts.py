"""How lengths are cut: a whole into slices by rank, a slice into segments; how many at a time."""

from __future__ import annotations

Cut = tuple[int, int]
"""Units `start` to `stop`."""

WINDOW = 4
"""Segments of scratch for each peer, where nothing else is said."""

AHEAD = 4
"""Segments sent to a peer before the first that comes from it is waited for, where all of them go
straight to their place."""


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
