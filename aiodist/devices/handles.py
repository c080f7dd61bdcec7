"""What ranks tell each other of their devices, once: the handles of allocations and of events.

A rank names its allocations and events by numbers that it never gives twice. As long as it does not
know that the others have one open, it adds the handle with which they can; from then on the number
is enough. It knows that (`told`) of a collective when all have said what they could not open, and
of a message when its receiver, who has read what lay on the device, asks for the rest.

An allocation of another rank stays open here until its owner has noticed that it was freed, and
says so, or the rank is lost, or the group ends. An owner looks for that whenever it speaks of a new
one, and now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgpack

from aiodist.devices.base import Device, Event
from aiodist.devices.work import TOLD, DeviceWork
from aiodist.errors import ProtocolError

REVIEW = 2.0
"""Seconds between two looks whether allocations that others have opened were freed."""

NEWS: Final = b"+"
KNOWN: Final = b"="
"""How the words of a rank begin: there is something in them that others have not opened, or not."""

T = TypeVar("T")
Number = tuple[int, int]
"""A rank, and a number of it."""


class Found(NamedTuple):
    """What a rank has for an operation: its events READY and RECORDED, and its arrays (flat)."""

    events: Sequence[Event]
    arrays: list[Any]


class Handles:
    """The handles of one rank, and those of others that are open here. `freed` tells all others
    that an allocation is gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, freed: Callable[[int], None]) -> None:
        self._loop = loop
        self._freed = freed
        self._told: set[tuple[str, int, int | None]] = set()  # what who has open (None: all others)
        self._shown: dict[int, Device] = {}  # the allocations that others were told of
        self._timer: asyncio.TimerHandle | None = None  # until the next review of these
        self._memories: dict[Number, Any] = {}  # allocations of others that are open here
        self._events: dict[Number, Event] = {}  # events of others that are

    def describe(self, work: DeviceWork, arrays: Sequence[Any], peer: int | None = None) -> bytes:
        """What `peer` needs to read flat arrays (None: what all others do). Raises OSError where
        other processes cannot see them."""

        def new(what: str, number: int, handle: bytes) -> bytes:
            told = (what, number, None) in self._told or (what, number, peer) in self._told
            return b"" if told else handle

        events = [[n, new("event", n, event.handle)] for n, event in work.numbered[:TOLD]]
        places = []
        # A handle opens a whole allocation, not an array: torch cuts many tensors from one of some
        # MiB, so a few handles are enough for all arrays of a program. Between processes that is
        #
        #     locate(array)                              -->   open(handle), once
        #     = number of the allocation, handle, offset       at(offset) in what is open by number
        #
        # The number stays the name of the allocation when the handle is left out. The driver never
        # gives it twice, which cannot be said of the address: freed memory is handed out again.
        for array in arrays:
            name, (length,) = work.device.describe(array)
            number, handle, offset = work.device.locate(array)
            if number not in self._shown:
                self._shown[number] = work.device
                self.review()
            places.append([number, new("memory", number, handle), offset, name, length])
        news = any(handle for _, handle, *_ in (*events, *places))
        packed: bytes = msgpack.packb([work.device.kind, events, places])
        return (NEWS if news else KNOWN) + packed

    def told(self, words: bytes, peer: int | None = None) -> None:
        """`peer`, or all others, have opened what `describe` gave."""
        _, events, places = msgpack.unpackb(words[1:])
        self._told.update(("event", event[0], peer) for event in events)
        self._told.update(("memory", place[0], peer) for place in places if place[0] in self._shown)

    def open(
        self, find: Callable[[str], Device | None], peer: int, words: bytes, owner: object
    ) -> Found:
        """What `peer` described, on the device that `find` gives for its kind; the arrays and their
        views keep `owner` alive. Raises ProtocolError, and OSError where it cannot be had."""
        try:
            kind, events, places = msgpack.unpackb(words[1:])
            device = find(kind)
            if device is None:
                raise OSError(f"there is no device of the kind {kind!r} here")
            if len(events) != TOLD:
                raise ValueError(f"{TOLD} events were due")
            return Found(
                [
                    _known(self._events, (peer, number), handle, device.open_event)
                    for number, handle in events
                ],
                [
                    device.at(
                        _known(self._memories, (peer, number), handle, device.open),
                        offset,
                        name,
                        length,
                        owner,
                    )
                    for number, handle, offset, name, length in places
                ],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(
                f"malformed words of rank {peer} about devices: {error!r}"
            ) from None

    def review(self) -> None:
        """Tell the others of allocations that are gone: they need not have them open."""
        # Memory that another process has open may not be given back by the driver when its owner
        # frees it. So a program that trains model after model would run out of memory that nobody
        # uses, if the others were not told. Nobody calls us when memory is freed: it is found by
        # looking.
        gone = [number for number, device in self._shown.items() if not device.holds(number)]
        for number in gone:
            del self._shown[number]
            self._told = {told for told in self._told if told[:2] != ("memory", number)}
            self._freed(number)
        if self._shown and self._timer is None:
            self._timer = self._loop.call_later(REVIEW, self._again)

    def _again(self) -> None:
        self._timer = None
        self.review()

    def drop(self, peer: int, number: int) -> None:
        """An allocation of `peer` is gone."""
        self._memories.pop((peer, number), None)

    def rank_lost(self, peer: int) -> None:
        for kept in (self._memories, self._events):
            for key in [key for key in kept if key[0] == peer]:
                del kept[key]

    def close(self) -> None:
        """The group ends."""
        self._memories.clear()
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()


def _known(kept: dict[Number, T], key: Number, handle: bytes, open: Callable[[bytes], T]) -> T:
    if handle and key not in kept:
        kept[key] = open(handle)
    return kept[key]
