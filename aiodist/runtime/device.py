"""Memory of devices between the ranks of a host: what is told once, and how it is let go of.

Each rank reads the others' arrays where they lie, on a stream of aiodist's own. Events that all can
open order the streams; the ranks only tell each other that an event *was recorded*, or that work is
complete, and never wait for the device in the loop.

**Who may read, and until when.** A rank reads others' arrays between two rounds of words: that all
have entered, and that all have *completed* their reads. A rank whose operation ended in between
gives its memory back only when every other one has said that what it had queued till then is
complete (FLUSH, answered by FLUSHED). Until then the plane keeps the arrays.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from aiodist.devices.base import Device, Event, Stream
from aiodist.errors import ProtocolError
from aiodist.runtime.operation import Pause
from aiodist.wire import kinds

if TYPE_CHECKING:
    from aiodist.runtime.context import Context

FLUSH = 0
FLUSHED = 1

FIRST_LOOK = 20e-6
LAST_LOOK = 500e-6
"""Seconds between two looks whether the device is done: each wait is half as long again."""

EVENTS = 4
"""Events that an operation has."""

log = logging.getLogger("aiodist.group")


class Found(NamedTuple):
    """What a rank has for an operation: its events, its arrays (flat), and the shapes of them."""

    events: list[Event]
    arrays: list[Any]
    shapes: list[tuple[int, ...]]


class Lease:
    """What one operation has of its rank's device: a stream, and events by their numbers."""

    def __init__(self, plane: Plane, device: Device) -> None:
        self.device = device
        self.stream = plane.stream(device)
        self.events = plane.events(device)
        self.kept: list[Any] = []
        """Arrays that work on the device reads and writes."""
        self.busy = False
        """Whether anything was queued that is not known to be complete."""


class Plane:
    """The devices of one group, as seen by one rank."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._streams: dict[int, tuple[Device, Stream]] = {}
        self._free: dict[int, list[list[tuple[int, Event]]]] = {}
        self._numbers = itertools.count()
        self._told: set[tuple[str, int]] = set()
        self._opened: dict[tuple[int, int], Any] = {}
        self._heard: dict[tuple[int, int], Event] = {}
        self._limbo: dict[int, tuple[Lease, set[int]]] = {}
        self.problem = ""
        """Why the ranks do not read each other's devices, if that has turned out."""

    # -- of one's own -----------------------------------------------------------------------------

    def stream(self, device: Device) -> Stream:
        """The stream for aiodist's work on `device`. Whatever it waits for was recorded before the
        wait was queued, so that no two ranks' streams can wait for each other."""
        if id(device) not in self._streams:
            self._streams[id(device)] = device, device.stream()
        return self._streams[id(device)][1]

    def events(self, device: Device) -> list[tuple[int, Event]]:
        """A set of events that no other operation has."""
        free = self._free.setdefault(id(device), [])
        if free:
            return free.pop()
        return [(next(self._numbers), device.event()) for _ in range(EVENTS)]

    # -- what is told of arrays and events --------------------------------------------------------

    def describe(
        self, lease: Lease, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> bytes:
        """What the others need to read flat arrays, of those `shapes`; b"" where they cannot."""
        if self.problem:
            return b""
        events = [
            [number, b"" if ("event", number) in self._told else event.handle]
            for number, event in lease.events
        ]
        places = []
        for array, shape in zip(arrays, shapes, strict=True):
            name, _ = lease.device.describe(array)
            try:
                number, handle, offset = lease.device.locate(array)
            except OSError as error:
                self.refuse(f"rank {self._context.rank}: {error}")
                return b""
            known = ("memory", number) in self._told
            places.append([number, b"" if known else handle, offset, name, shape])
        packed: bytes = msgpack.packb([lease.device.kind, events, places])
        return packed

    @staticmethod
    def is_news(blob: bytes) -> bool:
        """Whether there is anything in what a rank described that the others do not know."""
        _, events, places = msgpack.unpackb(blob)
        return any(event[1] for event in events) or any(place[1] for place in places)

    def told(self, blob: bytes) -> None:
        """All others have opened what `describe` gave."""
        _, events, places = msgpack.unpackb(blob)
        self._told.update(("event", number) for number, _ in events)
        self._told.update(("memory", place[0]) for place in places)

    def open(self, lease: Lease, peer: int, blob: bytes) -> Found:
        """What `peer` described. Raises ProtocolError, and OSError where it cannot be had."""
        try:
            _, events, places = msgpack.unpackb(blob)
            found = [self._event(lease, peer, *event) for event in events]
            arrays = [self._array(lease, peer, *place) for place in places]
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"malformed words of rank {peer} about devices: {error}") from None
        if len(found) != EVENTS:
            raise ProtocolError(f"rank {peer} names {len(found)} events, {EVENTS} were due")
        return Found(found, arrays, [tuple(place[-1]) for place in places])

    def _event(self, lease: Lease, peer: int, number: int, handle: bytes) -> Event:
        if handle:
            self._heard[peer, number] = lease.device.open_event(handle)
        return self._heard[peer, number]

    def _array(
        self,
        lease: Lease,
        peer: int,
        number: int,
        handle: bytes,
        offset: int,
        name: str,
        shape: Sequence[int],
    ) -> Any:
        if handle and (peer, number) not in self._opened:
            self._opened[peer, number] = lease.device.open(handle)
        return lease.device.at(self._opened[peer, number], offset, name, math.prod(shape))

    def refuse(self, problem: str) -> None:
        """The ranks do not read each other's devices from here on."""
        if not self.problem:
            self.problem = problem
            log.warning(
                "group %r: rank %d: tensors on devices go through host memory: %s",
                self._context.group,
                self._context.rank,
                problem,
            )

    # -- the end of an operation ------------------------------------------------------------------

    def finished(self, lease: Lease) -> None:
        """All reads of all ranks are complete."""
        self._free[id(lease.device)].append(lease.events)

    def abandon(self, lease: Lease) -> None:
        """The operation has failed: what it queued may be under way, here and elsewhere."""
        if lease.busy:
            (_, tail), *_ = lease.events
            lease.stream.record(tail)
            lease.device.current().wait(tail)
        context = self._context
        number = next(self._numbers)
        self._limbo[number] = lease, set(range(context.size))
        # Not before the verdict on the operation, with which the others stop queueing.
        context.loop.call_soon(self._ask, number)

    def _ask(self, number: int) -> None:
        context = self._context
        lost = context.lost()
        if number not in self._limbo or context.ended is not None:
            return
        for peer in list(self._limbo[number][1]):
            if peer == context.rank:
                self._flush(lambda: self._flushed(context.rank, number))
            elif peer in lost:
                self._flushed(peer, number)
            else:
                context.tell(peer, kinds.DEVICE, FLUSH, number)

    def heard(self, peer: int, fields: Sequence[Any]) -> None:
        """A word of `peer`. Raises ProtocolError."""
        match fields:
            case [_, _, 0, int(number)]:
                self._flush(lambda: self._answer(peer, number))
            case [_, _, 1, int(number)]:
                self._flushed(peer, number)
            case _:
                raise ProtocolError("malformed words about devices")

    def _flush(self, then: Callable[[], None]) -> None:
        """Call `then` when all that is queued here is complete."""
        tails = []
        for device, stream in self._streams.values():
            tail = device.event()
            stream.record(tail)
            tails.append(tail)
        self._look(tails, then, FIRST_LOOK)

    def _answer(self, peer: int, number: int) -> None:
        if self._context.ended is None and peer not in self._context.lost():
            self._context.tell(peer, kinds.DEVICE, FLUSHED, number)

    def _look(self, tails: list[Event], then: Callable[[], None], interval: float) -> None:
        if all(tail.done() for tail in tails):
            then()
        else:
            self._context.loop.call_later(
                interval, self._look, tails, then, min(LAST_LOOK, 1.5 * interval)
            )

    def _flushed(self, peer: int, number: int) -> None:
        if number not in self._limbo:
            return
        lease, missing = self._limbo[number]
        missing.discard(peer)
        if not missing:
            del self._limbo[number]
            self.finished(lease)

    def rank_lost(self, peer: int) -> None:
        """It reads nothing any more."""
        for number in list(self._limbo):
            self._flushed(peer, number)
        for key in [key for key in self._opened if key[0] == peer]:
            del self._opened[key]
        for key in [key for key in self._heard if key[0] == peer]:
            del self._heard[key]

    def close(self) -> None:
        """The group has ended: nothing is let go of that work under way here still needs."""
        self._opened.clear()
        self._heard.clear()
        if self._limbo:
            limbo = self._limbo
            self._limbo = {}
            self._flush(limbo.clear)


class Settled(Pause):
    """Until the device has come to an event: looked at by the loop's timer, ever less often."""

    def __init__(self, loop: asyncio.AbstractEventLoop, event: Event) -> None:
        self._loop = loop
        self._event = event
        self._interval = FIRST_LOOK
        self._timer: asyncio.TimerHandle | None = None

    def run(self) -> bool:
        self.close()
        if self._event.done():
            return True
        self._timer = self._loop.call_later(self._interval, self.resume)
        self._interval = min(LAST_LOOK, 1.5 * self._interval)
        return False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
