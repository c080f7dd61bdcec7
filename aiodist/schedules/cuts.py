"""How lengths are cut: an array into slices by rank, a slice into segments; and how many segments
are under way at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar, overload

T = TypeVar("T")
U = TypeVar("U")

Cut = tuple[int, int]
"""Units `start` to `stop`."""

WINDOW = 4
"""Segments that have a place in scratch for each peer, if ranks are near each other."""

AHEAD = 4
"""Segments that are sent to a peer before the first one from it is waited for. This is for plans
that receive everything at its final place, on ranks that are near each other."""


class Series(Sequence[T]):
    """``item(k)`` for each k below `length`. Items are made only when they are asked for, because a
    huge array has more pieces than are needed at once.

    The difference from each item to the next is the same, except at `edges` and at the end.
    """

    def __init__(self, length: int, item: Callable[[int], T], edges: Iterable[int] = ()) -> None:
        self._numbers = range(length)
        self._item = item
        self.edges = (*edges, length)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        numbers = self._numbers[index]
        return self._item(numbers) if isinstance(numbers, int) else [*map(self._item, numbers)]


def edges_of(items: Sequence[object]) -> Iterable[int]:
    """The numbers of the items at which the differences in `items` may change. Of a list they are
    unknown, so all numbers are returned."""
    return items.edges if isinstance(items, Series) else range(len(items) + 1)


def mapped(items: Sequence[U], make: Callable[[U], T]) -> Series[T]:
    """What `make` returns for each item."""
    return Series(len(items), lambda k: make(items[k]), edges_of(items))


def even_bounds(length: int, size: int) -> tuple[int, ...]:
    """`size + 1` offsets that cut `length` units as `numpy.array_split` does: the first ``length %
    size`` slices are one unit longer."""
    base, longer = divmod(length, size)
    return tuple(rank * base + min(rank, longer) for rank in range(size + 1))


def pieces(start: int, stop: int, segment: int) -> Series[Cut]:
    """Cut units `start` to `stop` into pieces of `segment` units; the last may be shorter."""
    if segment < 1:
        raise ValueError(f"a segment has at least one unit, not {segment}")
    starts = range(start, stop, segment)
    return Series(len(starts), lambda k: (starts[k], min(starts[k] + segment, stop)))


def blocks_of(length: int, block: int, cut: Callable[[int], Iterable[int]]) -> Series[list[Cut]]:
    """The slices of each block of `block` units, by rank; the last block may be shorter. `cut`
    returns the offsets that cut a block of so many units."""
    blocks = pieces(0, length, block)

    def slices(k: int) -> list[Cut]:
        start, stop = blocks[k]
        return [(start + low, start + high) for low, high in pairwise(cut(stop - start))]

    return Series(len(blocks), slices)


def rounds_of(bounds: Sequence[int], piece: int) -> Series[list[Cut]]:
    """The next `piece` units of each slice, by rank, round by round until the longest slice is
    done."""
    slices = list(pairwise(bounds))
    lengths = [stop - start for start, stop in slices]
    rounds = pieces(0, max(lengths), piece)

    def row(k: int) -> list[Cut]:
        low, high = rounds[k]
        return [(min(start + low, stop), min(start + high, stop)) for start, stop in slices]

    return Series(len(rounds), row, (length // piece for length in lengths))
