"""Memory of devices between the ranks of a host: what is told once, and how it is let go of.

Each rank reads the others' arrays where they lie, on a stream of aiodist's own. Events that all can
open order the streams; the ranks only tell each other that an event *was recorded*, or that work is
complete, and never wait for the device in the loop.

**Who may read, and until when.** A rank reads others' arrays between two words: that they may be
read, and that its reads are *complete*. A rank whose operation ended in between gives its memory
back only when every other one has said that what it had queued till then is complete (FLUSH,
answered by FLUSHED). Until then its `DeviceMemory` keeps the arrays.

**What is open.** An allocation of another rank stays open here until its owner has noticed that it
was freed, and says so (DROP), or the rank is lost, or the group ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack

from aiodist import devices
from aiodist.devices.base import Device, Event, Stream
from aiodist.devices.shares import Shares
from aiodist.engine.operation import Pause
from aiodist.errors import AiodistError, ProtocolError
from aiodist.wire import kinds

FLUSH, FLUSHED, DROP = range(3)
"""Words between ranks, with a number each. Higher ones are of `aiodist.devices.shares`."""

CLOSELY = 3e-3
"""Seconds for which every turn of the loop has a look whether the device is done."""
LOOK = 1e-3
"""Seconds between two looks after that."""

REVIEW = 2.0
"""Seconds between two looks whether allocations that others have opened were freed."""

LINGER = 10.0
"""Seconds for which arrays are kept that others may still read when the group ends, and nobody can
say any more whether they do."""

READY, RECORDED, DONE, CALLED = range(4)
"""The events of an operation: arrays may be read; the first half was queued; all was; and what was
queued on the user's stream when it was called."""
EVENTS = 4

SECTION = 8 << 20
"""Bytes of a section of what goes by way of the host. Not measured on a GPU: enough for copies and
links to be at their speed."""

log = logging.getLogger("aiodist.group")


class Reading(Protocol):
    """Says whether this rank may read the devices of others, and they its own."""

    reads_devices: bool


class DeviceGroup(Protocol):
    """The group whose ranks read each other's devices. `group` names it in the log; `ended` is what
    has ended it here, if anything did."""

    rank: int
    size: int
    group: str
    loop: asyncio.AbstractEventLoop
    ended: AiodistError | None

    @property
    def endpoint(self) -> Reading: ...

    def lost(self) -> Mapping[int, str]:
        """Returns the ranks that are lost, and why."""
        ...

    def has_lost(self, peer: int) -> bool:
        """Says whether `peer` is lost."""
        ...

    def tell(self, peer: int, kind: int, *fields: Any) -> None:
        """Sends `peer` a frame of that kind, which belongs to no operation."""
        ...


class Found(NamedTuple):
    """What a rank has for an operation: its events, from READY on, and its arrays (flat)."""

    events: Sequence[Event]
    arrays: list[Any]


class Mark:
    """Whether an operation has queued anything that is not known to be complete."""

    busy = False


class DeviceWork:
    """What one operation has of its rank's device: a stream, and events by their numbers.

    It is made when the operation is called: what is queued on the current stream by then is what
    the operation comes after. Dropping it gives the events back, and what it kept, once what was
    queued is complete here.
    """

    def __init__(self, device_memory: DeviceMemory, device: Device) -> None:
        self.device = device
        self.stream = device_memory.stream(device)
        self.events = device_memory.events(device)
        self.kept: list[Any] = []
        """Arrays that work on the device reads and writes."""
        self.mark = Mark()
        self._user = device.current()
        self._user.record(self.events[CALLED][1])
        self._user.record(self.events[READY][1])
        weakref.finalize(
            self, device_memory.dropped, device, self.events, self.kept, self.mark
        ).atexit = False

    def follow(self) -> None:
        """What is queued from here on comes after what was when the operation was called."""
        self.stream.wait(self.events[CALLED][1])

    def shown_later(self) -> None:
        """The arrays that others may read are made by what is queued by now."""
        self.mark.busy = True
        self.stream.record(self.events[READY][1])

    def flat(self, array: Any) -> Any:
        """The array, flat: itself where it is contiguous, else a copy, which is queued."""
        device = self.device
        self.kept.append(array)
        flat = device.flat(array)
        if flat is None:
            copy = device.empty(self.stream, *device.describe(array))
            self.follow()
            device.copy(self.stream, copy, array)
            self.shown_later()
            flat = device.flat(copy)
        self.kept.append(flat)
        return flat

    def let_go(self) -> None:
        """What the user queues from here on comes after all that is queued here: on the stream that
        was current when the operation was called, and on the one that is now."""
        if self.mark.busy:
            done = self.done()
            self._user.wait(done)
            self.device.current().wait(done)

    def done(self) -> Event:
        """The event of all that is queued by now."""
        _, done = self.events[DONE]
        self.stream.record(done)
        return done


class DeviceMemory:
    """The devices of one group, as seen by one rank."""

    def __init__(self, context: DeviceGroup) -> None:
        self._context = context
        self._used: dict[str, Device] = {}
        self._streams: dict[int, tuple[Device, Stream]] = {}
        self._free: dict[int, list[list[tuple[int, Event]]]] = {}
        self._numbers = itertools.count()
        self._told: set[tuple[str, int, int | None]] = set()
        self._shown: dict[int, Device] = {}
        self._reviewing: asyncio.TimerHandle | None = None
        self._opened: dict[tuple[int, int], Any] = {}
        self._heard: dict[tuple[int, int], Event] = {}
        self._limbo: dict[int, tuple[DeviceWork, set[int]]] = {}
        self._closed = False
        self._mixed = False
        self.shares = Shares(context.loop, self._tell)
        self.problem = "" if context.endpoint.reads_devices else "transports= leaves it out"
        """Why the ranks do not read each other's devices, if that has turned out."""

    # -- of one's own -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._context.rank

    def device(self, kind: str | None = None) -> Device | None:
        """This rank's device of that kind (None: of any): the one that it used last, or torch's
        current one."""
        if kind is None:
            kind = next(reversed(self._used), "cuda")
        return self._used.get(kind) or devices.default(kind)

    def use(self, device: Device) -> None:
        """Arrays that come from others' devices go to that one, where nothing says where."""
        self._used.pop(device.kind, None)
        self._used[device.kind] = device

    def stream(self, device: Device) -> Stream:
        """The stream for aiodist's work on `device`. Whatever it waits for was recorded before the
        wait was queued, so that no two ranks' streams can wait for each other."""
        if id(device) not in self._streams:
            self._streams[id(device)] = device, device.stream()
        self.use(device)
        return self._streams[id(device)][1]

    def events(self, device: Device) -> list[tuple[int, Event]]:
        """A set of events that no other operation has."""
        free = self._free.setdefault(id(device), [])
        if free:
            return free.pop()
        return [(next(self._numbers), device.event()) for _ in range(EVENTS)]

    def dropped(
        self, device: Device, events: list[tuple[int, Event]], kept: list[Any], mark: Mark
    ) -> None:
        """A `DeviceWork` is gone; called by whichever thread has let go of it."""

        def drained() -> None:
            kept.clear()
            if id(device) in self._free:  # not after the end of the group
                self._free[id(device)].append(events)

        if not mark.busy:
            drained()
            return
        loop = self._context.loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.when_drained, drained)

    # -- what is told of arrays and events --------------------------------------------------------

    def describe(
        self,
        device_work: DeviceWork,
        arrays: Sequence[Any],
        events: int = EVENTS,
        peer: int | None = None,
    ) -> bytes:
        """What `peer` needs to read flat arrays (None: what all others do), and the first so many
        events of an operation. Raises OSError where other processes cannot see them."""
        known = self._told

        def new(what: str, number: int, handle: bytes) -> bytes:
            told = (what, number, None) in known or (what, number, peer) in known
            return b"" if told else handle

        own = [[n, new("event", n, event.handle)] for n, event in device_work.events[:events]]
        places = []
        for array in arrays:
            name, (length,) = device_work.device.describe(array)
            number, handle, offset = device_work.device.locate(array)
            if number not in self._shown:
                self._shown[number] = device_work.device
                self._review()
            places.append([number, new("memory", number, handle), offset, name, length])
        packed: bytes = msgpack.packb([device_work.device.kind, own, places])
        return packed

    @staticmethod
    def is_news(words: bytes) -> bool:
        """Whether there is anything in what a rank described that others do not know."""
        _, events, places = msgpack.unpackb(words)
        return any(event[1] for event in events) or any(place[1] for place in places)

    def told(self, words: bytes, peer: int | None = None) -> None:
        """`peer`, or all others, have opened what `describe` gave."""
        _, events, places = msgpack.unpackb(words)
        self._told.update(("event", event[0], peer) for event in events)
        self._told.update(("memory", place[0], peer) for place in places if place[0] in self._shown)

    def open(self, peer: int, words: bytes, owner: object | None = None) -> Found:
        """What `peer` described; its arrays and their views keep `owner` alive. Raises
        ProtocolError, and OSError where it cannot be had."""
        try:
            kind, events, places = msgpack.unpackb(words)
            device = self.device(kind)
            if device is None:
                raise OSError(f"there is no device of the kind {kind!r} here")
            return Found(
                [self._event(device, peer, *event) for event in events],
                [self._array(device, peer, owner, *place) for place in places],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(
                f"malformed words of rank {peer} about devices: {error!r}"
            ) from None

    def _event(self, device: Device, peer: int, number: int, handle: bytes) -> Event:
        if handle and (peer, number) not in self._heard:
            self._heard[peer, number] = device.open_event(handle)
        return self._heard[peer, number]

    def _array(
        self,
        device: Device,
        peer: int,
        owner: object | None,
        number: int,
        handle: bytes,
        offset: int,
        name: str,
        length: int,
    ) -> Any:
        if handle and (peer, number) not in self._opened:
            self._opened[peer, number] = device.open(handle)
        return device.at(self._opened[peer, number], offset, name, length, owner)

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

    def mixed(self) -> None:
        """Other ranks have given arrays of the host for the same reduction."""
        if not self._mixed:
            self._mixed = True
            log.warning(
                "group %r: rank %d: tensors on devices are reduced by way of host memory where "
                "other ranks give tensors of the host",
                self._context.group,
                self._context.rank,
            )

    def _review_again(self) -> None:
        self._reviewing = None
        self._review()

    def _review(self) -> None:
        """Tell the others of allocations that are gone: they need not have them open."""
        if self._context.ended is not None:
            return
        gone = [number for number, device in self._shown.items() if not device.holds(number)]
        for number in gone:
            del self._shown[number]
            self._told = {told for told in self._told if told[:2] != ("memory", number)}
            for peer in range(self._context.size):
                self._tell(peer, DROP, number)
        if self._shown and self._reviewing is None:
            self._reviewing = self._context.loop.call_later(REVIEW, self._review_again)

    # -- the end of an operation ------------------------------------------------------------------

    def finished(self, device_work: DeviceWork) -> None:
        """All reads of all ranks are complete."""
        device_work.mark.busy = False
        device_work.kept.clear()

    def abandon(self, device_work: DeviceWork, peers: Iterable[int] | None = None) -> None:
        """The operation has failed: what it queued may be under way, here and on `peers` (None: all
        others). What the user queues from here on comes after what is queued here."""
        device_work.let_go()
        context = self._context
        if self._closed:
            self._linger(device_work, peers is None or any(peer != context.rank for peer in peers))
            return
        number = next(self._numbers)
        asked = set(range(context.size) if peers is None else peers) | {context.rank}
        self._limbo[number] = device_work, asked
        # Not before the verdict on the operation, with which the others stop queueing.
        context.loop.call_soon(self._ask, number)

    def _ask(self, number: int) -> None:
        context = self._context
        lost = context.lost()
        if number not in self._limbo or context.ended is not None:
            return
        for peer in list(self._limbo[number][1]):
            if peer == context.rank:
                self.when_drained(lambda: self._flushed(context.rank, number))
            elif peer in lost:
                self._flushed(peer, number)
            else:
                self._tell(peer, FLUSH, number)

    def heard(self, peer: int, fields: Sequence[Any]) -> None:
        """A word of `peer`. Raises ProtocolError."""
        match fields:
            case [_, _, 0, int(number)]:
                self.when_drained(lambda: self._tell(peer, FLUSHED, number))
            case [_, _, 1, int(number)]:
                self._flushed(peer, number)
            case [_, _, 2, int(number)]:
                self._opened.pop((peer, number), None)
            case [_, _, int(word), int(number)]:
                self.shares.heard(peer, word, number)
            case _:
                raise ProtocolError("malformed words about devices")

    def when_drained(self, then: Callable[[], None]) -> None:
        """Call `then` when all that is queued here by now is complete."""
        tails = []
        for device, stream in self._streams.values():
            tail = device.event()
            stream.record(tail)
            tails.append(tail)
        self.when_done(tails, then)

    def when_done(self, events: Sequence[Event], then: Callable[[], None]) -> None:
        """Call `then` when the device has come to `events`: now, or later from the loop."""
        if Looks(self._context.loop, events, then).look():
            then()

    def _tell(self, peer: int, word: int, number: int) -> None:
        context = self._context
        if peer != context.rank and context.ended is None and not context.has_lost(peer):
            context.tell(peer, kinds.DEVICE, word, number)

    def _flushed(self, peer: int, number: int) -> None:
        if number not in self._limbo:
            return
        device_work, missing = self._limbo[number]
        missing.discard(peer)
        if not missing:
            del self._limbo[number]
            self.finished(device_work)

    def rank_lost(self, peer: int) -> None:
        """It reads nothing any more."""
        for number in list(self._limbo):
            self._flushed(peer, number)
        self.shares.rank_lost(peer)
        for key in [key for key in self._opened if key[0] == peer]:
            del self._opened[key]
        for key in [key for key in self._heard if key[0] == peer]:
            del self._heard[key]

    def close(self) -> None:
        """The group ends: nothing is let go of that work under way may still need."""
        self.shares.close()
        self._opened.clear()
        self._heard.clear()
        self._free.clear()
        if self._reviewing is not None:
            self._reviewing.cancel()
        self._closed = True
        for device_work, missing in self._limbo.values():
            self._linger(device_work, bool(missing - {self._context.rank}))
        self._limbo.clear()

    def _linger(self, device_work: DeviceWork, read: bool) -> None:
        """Keep the arrays for a while if others may `read` them: these cannot say so any more.
        What this rank does with them is waited for when its `DeviceWork` is dropped."""
        if read:
            self._context.loop.call_later(LINGER, list(device_work.kept).clear)


class Looks:
    """Looks at events until the device has come to them: every turn of the loop at first, since no
    timer is as fine as that, then by a timer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, events: Sequence[Event], then: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._events = events
        self._then = then
        self._began = loop.time()
        self._next: asyncio.Handle | None = None

    def look(self) -> bool:
        """Whether it has. If not, `then` is called when it has."""
        self.stop()
        if all(event.done() for event in self._events):
            return True
        if self._loop.time() - self._began < CLOSELY:
            if sys.platform == "linux":
                os.sched_yield()  # the peer that is waited for may need the core
            self._next = self._loop.call_soon(self._again)
        else:
            self._next = self._loop.call_later(LOOK, self._again)
        return False

    def _again(self) -> None:
        if self.look():
            self._then()

    def stop(self) -> None:
        """Never call `then`."""
        if self._next is not None:
            self._next.cancel()
            self._next = None


class Settled(Pause):
    """Until the device has come to an event."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, event: Event, *, last: bool = False
    ) -> None:
        self.last = last
        self._looks = Looks(loop, [event], self._resume)

    def _resume(self) -> None:
        self.resume()

    def run(self) -> bool:
        return self._looks.look()

    def close(self) -> None:
        self._looks.stop()
