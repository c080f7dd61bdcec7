"""How the result of a prepared call with values is made from what all ranks have shown.

`lane_values` has the calls themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from aiodist.collectives import fitting
from aiodist.collectives.templates import Data, Place, Reading, Template
from aiodist.phases.memories import Blobs
from aiodist.prepared.express import Flat, written
from aiodist.prepared.plain import CONTAINERS
from aiodist.schedules.plan import Copy


class Given(NamedTuple):
    """The arguments of one call, and the memory of its arrays.

    `result` is a list that gets the result. `own` is the template of what this rank shows. `place`
    is the argument for the result, if there is one. `shown` has all that this rank shows, if that
    is little.
    """

    args: tuple[Any, ...]
    flats: Sequence[Flat]
    result: list[Any]
    own: Template
    place: Any = None
    shown: bytes | None = None


Views = Sequence[memoryview]
Move = tuple[Place | int, int, int]
"""Where a value goes.

This is its place, or the number of the array of the call that has it. Then comes the number of the
array that gets it, and from which of its bytes on.
"""
Take = Callable[[Given], Any]
"""Makes the result of a call.

It raises OverflowError if the ordinary way does, which then happens on all ranks.
"""
Collect = Callable[[Given], bool | None]
"""Makes the result from the blobs of all ranks.

It returns None if the data is not in the blobs, because it travels apart. It returns False if the
call has to take the ordinary way.
"""


def fit(readings: Sequence[Reading], sources: Sequence[int]) -> bool:
    """Say whether what `sources` give is what every rank takes that says so: see
    `fitting.all_fit`."""
    first = readings[sources[0]]
    for reading in readings:
        if reading.want and (reading.want != first.given or reading.want == fitting.LOOK):
            return False
        if reading.want:
            # If metadata differs, even if only because another library has made an array, it is
            # unknown whether the values fit. Then no rank says that they do.
            for src in sources:
                if readings[src].given != first.given or readings[src].meta != first.meta:
                    return False
    return True


def kept(value: Any) -> Any:
    """Copy the lists and dicts in `value`, because the program may change them."""
    kind = type(value)
    if kind not in CONTAINERS:
        return value
    if CONTAINERS.isdisjoint(map(type, value.values() if kind is dict else value)):
        return kind(value)
    if kind is dict:
        return {key: kept(each) for key, each in value.items()}
    return kind(map(kept, value))


def give(take: Take | None, call: Given) -> bool:
    """Make the result of a call. False: take the ordinary way."""
    if take is None:
        return False
    # Write only now, because if the values do not fit on one rank, no rank may write any.
    try:
        call.result.append(take(call))
    except OverflowError:
        return False
    return True


def in_order(data: Sequence[Data], own: int | None) -> list[tuple[int, Data, slice]]:
    """Return the number of each value, its data, and where that goes in an array for all values.

    The value number `own` comes first, because it may lie in the place of another value.
    """
    bounds = [0, *accumulate([len(each.flat) for each in data])]
    parts = [
        (at, each, slice(*part))
        for at, (each, part) in enumerate(zip(data, itertools.pairwise(bounds), strict=True))
    ]
    return sorted(parts, key=lambda part: part[0] != own)


def filling(data: Sequence[Data], before: int, own: int | None) -> Take:
    """Return what writes `data` to the place of the result.

    There is one array for each value, or one array for all, one value behind the other. The call
    has `before` other arrays in front of these. The array number `own` of them goes straight to the
    place with this number.
    """
    parts = in_order(data, own)

    def take(call: Given) -> Any:
        flats = call.flats
        places = flats[before:]
        is_one = len(places) != len(data)
        for at, each, part in parts:
            place = places[0][part] if is_one else places[at]
            place[:] = flats[at] if at == own else each.flat
        return written(call.place) if data else call.place

    return take


class AwaitedBlobs(Blobs):
    """The blobs of a call that waits.

    They are copied only if `collect` cannot make the result while they are in shared memory. `made`
    is what `collect` has returned.
    """

    def __init__(self, rank: int, size: int, collect: Callable[[], bool | None]) -> None:
        super().__init__(rank, size, b"")
        self._collect: Callable[[], bool | None] | None = collect
        self.made: bool | None = False

    def copy(self, step: Copy) -> None:
        if self._collect is not None:
            self.made = self._collect()
            self._collect = None
        if self.made is False:
            super().copy(step)
