"""What ranks tell each other about their devices, once: handles of allocations and of events.

A rank numbers its allocations and events, and never uses a number twice. It adds the handle to the
number until it knows that the others have opened it. It knows that (`told`) after a collective in
which all ranks have said what they could not open. For a message, it knows that when the receiver
has read from the device and asks for the rest.

Each device of a rank that uses several opens an allocation for itself, so their handles are kept.
An allocation of another rank stays open here until its owner reports that it was freed, or the
owner is lost, or the group ends. An owner checks for freed allocations at each new one, and from
time to time.
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
"""Seconds between two checks whether shown allocations were freed."""

NEWS: Final = b"+"
KNOWN: Final = b"="
"""The first byte of a description: whether it contains handles that others have not opened."""

T = TypeVar("T")
Number = tuple[int, int]
"""A rank, and a number of it."""
Opened = dict[Number, tuple[bytes, dict[Device, T]]]
"""Handles of other ranks, and what devices of this rank have opened with them."""


class Found(NamedTuple):
    """What a rank shows for an operation: its events READY and RECORDED, and its flat arrays."""

    events: Sequence[Event]
    arrays: list[Any]


class Handles:
    """The handles of one `rank`, and those of others that are open here.

    `freed` tells all other ranks that an allocation is gone.
    """

    def __init__(
        self, rank: int, loop: asyncio.AbstractEventLoop, freed: Callable[[int], None]
    ) -> None:
        self._rank = rank
        self._loop = loop
        self._freed = freed
        # what each rank has open (None: all others)
        self._told: set[tuple[str, int, int | None]] = set()
        self._shown: dict[int, Device] = {}  # the allocations that others know
        self._timer: asyncio.TimerHandle | None = None  # until the next check of these
        self._memories: Opened[Any] = {}
        self._events: Opened[Event] = {}

    def describe(self, work: DeviceWork, arrays: Sequence[Any], peer: int | None = None) -> bytes:
        """What `peer` (None: all others) needs to read flat arrays.

        Raises OSError if other processes cannot see them.
        """

        def new(what: str, number: int, handle: bytes) -> bytes:
            # A rank opens its own memory for messages to itself alone. Collectives do not tell it.
            told = (what, number, peer) in self._told
            told |= peer != self._rank and (what, number, None) in self._told
            return b"" if told else handle

        events = [[n, new("event", n, event.handle)] for n, event in work.numbered[:TOLD]]
        places = []
        # A handle opens a whole allocation. torch cuts many tensors from one allocation of some
        # MiB, so a few handles are enough for all arrays of a program. Between processes that is
        #
        #   locate(array)                                 -->   open(handle), once
        #   = number of the allocation, handle, offset          at(offset) in what is open by number
        #
        # Later descriptions leave the handle out. The driver never gives a number twice. An address
        # would not do, because freed memory is used again.
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
        """Note that `peer`, or all others, have opened what `describe` returned."""
        _, events, places = msgpack.unpackb(words[1:])
        self._told.update(("event", event[0], peer) for event in events)
        self._told.update(("memory", place[0], peer) for place in places if place[0] in self._shown)

    def open(
        self, find: Callable[[str], Device | None], peer: int, words: bytes, owner: object
    ) -> Found:
        """Open what `peer` described, on the device that `find` returns for its kind.

        The arrays and their views keep `owner` alive. Raises ProtocolError, and OSError if it
        cannot be opened.
        """
        try:
            kind, events, places = msgpack.unpackb(words[1:])
            device = find(kind)
            if device is None:
                raise OSError(f"there is no device of the kind {kind!r} here")
            if len(events) != TOLD:
                raise ValueError(f"{TOLD} events were due")
            return Found(
                [
                    _known(self._events, (peer, number), handle, device, device.open_event)
                    for number, handle in events
                ],
                [
                    device.at(
                        _known(self._memories, (peer, number), handle, device, device.open),
                        offset,
                        name,
                        length,
                        owner,
                    )
                    for number, handle, offset, name, length in places
                ],
            )
        except (ValueError, TypeError, LookupError) as error:
            raise ProtocolError(
                f"malformed message of rank {peer} about devices: {error!r}"
            ) from None

    def review(self) -> None:
        """Tell other ranks of allocations that were freed, so that they close them."""
        # The driver may keep freed memory while another process has it open. A program that trains
        # one model after another would then run out of memory. No callback reports that memory was
        # freed, so we check.
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
        """Close an allocation that `peer` has freed."""
        self._memories.pop((peer, number), None)

    def rank_lost(self, peer: int) -> None:
        for kept in (self._memories, self._events):
            for key in [key for key in kept if key[0] == peer]:
                del kept[key]

    def close(self) -> None:
        self._memories.clear()
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()


def _known(
    kept: Opened[T], key: Number, handle: bytes, device: Device, open: Callable[[bytes], T]
) -> T:
    if handle and key not in kept:
        kept[key] = handle, {}
    handle, opened = kept[key]
    if device not in opened:
        try:
            opened[device] = open(handle)
        except OSError:
            # The owner knows that this rank has it open, so what another device has opened is used.
            if not opened:
                raise
            opened[device] = next(iter(opened.values()))
    return opened[device]
