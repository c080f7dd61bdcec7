"""`Grid`: ranks by coordinates (MPI's Cartesian topology)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aiodist.phases.base import as_int, as_rank
from aiodist.topologies.neighbors import Collective, Edge, Neighbors


class Grid(Neighbors):
    """The ranks of `group` as a grid: ``Grid(group, (2, 3))``, ``Grid(group, (0, 0))``.

    `dims` is the number of ranks along each axis. Each 0 is replaced so that the numbers are as
    equal as the size of the group allows, the larger first. `periodic` says whether the last rank
    along an axis is a neighbour of the first: one bool for all axes, or one for each.

    Ranks are numbered in C order, as numpy numbers elements: the last coordinate runs fastest. The
    neighbours of a rank are the one before it and the one behind it, axis by axis. All ranks
    compute the same grid, and nothing is sent.

    Raises ValueError if `dims` do not multiply to the size of the group, and TypeError if they are
    not ints, or if `periodic` has anything but bools (or 0 and 1).

    For example::

        grid = aiodist.Grid(group, (0, 1), periodic=True)
        before, behind = grid.shift(0)  # ranks; without periodic=, None at an end
        values = await grid.neighbor_all_gather(group.rank)
    """

    def __init__(
        self, group: Collective, dims: Sequence[int], *, periodic: bool | Sequence[bool] = False
    ) -> None:
        self.dims = chosen_dims(group.size, dims)
        wraps = [*periodic] if isinstance(periodic, Iterable) else [periodic] * len(self.dims)
        if any(type(wrap) is float or wrap not in (0, 1) for wrap in wraps):  # ints, as in MPI
            raise TypeError(f"periodic is a bool, or a bool for each of dims, not {periodic!r}")
        self.periodic = tuple(map(bool, wraps))
        if len(self.periodic) != len(self.dims):
            raise ValueError(f"periodic has {len(self.periodic)} items for {len(self.dims)} dims")
        self._rank = group.rank
        sources: list[Edge | None] = []
        destinations: list[Edge | None] = []
        for axis in range(len(self.dims)):
            before, behind = self.shift(axis)
            # Both ends know an edge by its place at the receiver: a value for the rank before this
            # one arrives there from behind. This matters because on an axis of two ranks both are
            # the same rank.
            places = ((before, 2 * axis), (behind, 2 * axis + 1))
            for rank, place in places:
                sources.append(None if rank is None else (rank, place))
                destinations.append(None if rank is None else (rank, place ^ 1))
        super().__init__(group, sources, destinations)

    @property
    def coords(self) -> tuple[int, ...]:
        """The coordinates of this rank."""
        return self.coords_of(self._rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank. Raises ValueError if there is no such rank."""
        rank = as_rank(rank, math.prod(self.dims), "rank")
        coords: list[int] = []
        for count in reversed(self.dims):
            rank, coord = divmod(rank, count)
            coords.append(coord)
        return tuple(reversed(coords))

    def rank_of(self, coords: Sequence[int]) -> int | None:
        """Return the rank at `coords`; None if they lie outside, along an axis that is not
        periodic."""
        found = _ints(coords, "coords")
        if len(found) != len(self.dims):
            raise ValueError(f"{len(found)} coordinates in a grid of {len(self.dims)} axes")
        rank = 0
        for coord, count, wraps in zip(found, self.dims, self.periodic, strict=True):
            if not wraps and not 0 <= coord < count:
                return None
            rank = rank * count + coord % count
        return rank

    def shift(self, axis: int, by: int = 1) -> tuple[int | None, int | None]:
        """Return the ranks `by` places before and behind this one along an axis.

        In a shift you receive from the first and send to the second.
        """
        axis, by = as_int(axis, "axis is an int"), as_int(by, "by is a number of places, an int")
        if not -len(self.dims) <= axis < len(self.dims):
            raise ValueError(f"axis={axis} in a grid of {len(self.dims)} axes")
        coords = list(self.coords)
        found: list[int | None] = []
        for step in (-by, by):
            moved = [*coords]
            moved[axis] += step
            found.append(self.rank_of(moved))
        return found[0], found[1]


def chosen_dims(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Return `dims` with each 0 replaced, so that they multiply to `size`.

    The numbers are as equal as possible, the larger first. Raises ValueError if no numbers fit.
    """
    found = _ints(dims, "dims")
    if any(count < 0 for count in found):
        raise ValueError(f"dims {tuple(found)}: a grid has 1 or more ranks along an axis, or 0")
    free = [axis for axis, count in enumerate(found) if not count]
    left, rest = divmod(size, math.prod(count for count in found if count))
    if rest or not left or (left > 1 and not free):
        raise ValueError(f"dims {tuple(found)} do not make a grid of {size} ranks")
    for number, count in zip(free, next(_factored(left, len(free), left)), strict=True):
        found[number] = count
    return tuple(found)


def _ints(values: Any, name: str) -> list[int]:
    """Return a sequence of integers of any type as plain ints. Raises TypeError for others."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} is a sequence of ints, such as ({values!r},), not {values!r}")
    return [as_int(value, f"each of {name} is an int") for value in values]


def _factored(size: int, count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `size` as `count` factors of at most `most`, the larger first.

    Those with the smallest factors come first, so the first way has the most equal ones.
    """
    if not count and size == 1:
        yield ()
    for factor in range(1, min(size, most) + 1) if count else ():
        # The others are not larger. So together with them a smaller one cannot reach `size`.
        if size % factor == 0 and factor**count >= size:
            for others in _factored(size // factor, count - 1, factor):
                yield factor, *others
