"""Arrays of a device that go to the host in sections, so that copies and transfers overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiodist.buffers.dtypes import carrier
from aiodist.devices.base import Event
from aiodist.devices.work import DONE, RECORDED, DeviceWork

SECTION = 8 << 20
"""Bytes of a section, enough for copies and links to reach their speed. Not measured on a GPU."""


class Cut(NamedTuple):
    """A part of an array: the number of the array, and its first and last element."""

    array: int
    start: int
    stop: int


def cuts(lengths: Sequence[int], sizes: Sequence[int], most: int) -> deque[list[Cut]]:
    """Cut arrays of these lengths and element sizes into sections of at most `most` bytes.

    A larger element gets a section of its own. There is at least one section.
    """
    made: deque[list[Cut]] = deque([[]])
    room = most
    for array, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        start = 0
        while start < length:
            if room < size and made[-1]:
                made.append([])
                room = most
            stop = min(length, start + max(1, room // size))
            made[-1].append(Cut(array, start, stop))
            room -= (stop - start) * size
            start = stop
    return made


class Section(NamedTuple):
    """Parts of arrays, their copies on the host, and the event when these are complete."""

    cuts: list[Cut]
    copies: list[Any]
    there: Event


class Sections:
    """Flat arrays of a device, in sections. The last `kept` copies are kept.

    There are two events, so fetch a section only when the device is done with the one before the
    last.
    """

    def __init__(self, work: DeviceWork, flats: Sequence[Any], kept: int) -> None:
        described = [work.device.describe(flat) for flat in flats]
        self._work = work
        self._flats = flats
        self._left = cuts(
            [length for _, (length,) in described],
            [carrier(name).itemsize for name, _ in described],
            SECTION,
        )
        self._copies: deque[list[Any]] = deque(maxlen=kept)
        self._events = deque([work.events[RECORDED], work.events[DONE]])
        work.kept += [flats, self._copies]
        work.begin()

    @property
    def is_last(self) -> bool:
        return not self._left

    def fetch(self) -> Section | None:
        """Queue the copies of the next section, if there is one."""
        if not self._left:
            return None
        section = self._left.popleft()
        copies: list[Any] = []
        self._copies.append(copies)
        for array, start, stop in section:
            copies.append(self._work.to_host(self._flats[array][start:stop]))
        self._events.rotate()
        self._work.stream.record(self._events[0])
        return Section(section, copies, self._events[0])
