"""Memory of devices between the ranks of a host: which ranks may read it, and how long it is kept.

Each rank reads the others' arrays in place, on a stream of aiodist's own. Shared events order the
streams. Ranks only tell each other that an event *was recorded*, or that work is complete, and the
loop never blocks on the device. `handles` has what is told once.

A rank reads others' arrays between two messages: that they may be read, and that its reads are
*complete*. If an operation ends in between, its rank keeps the arrays until every other rank has
said that its queued reads are complete (FLUSH, answered by FLUSHED)::

    rank 0   array, READY ──────────── reads ─────────────── complete ──> all have said so: free
                  ╲ what lies where  ╱       ╲ complete  ╱
    rank 1   array, READY ──────────── reads ──── gives up: keeps its array ── FLUSH ─>
                                                              <─ FLUSHED ── free
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from aiodist import devices
from aiodist.devices.base import Device, Event, Stream
from aiodist.devices.handles import Found, Handles
from aiodist.devices.shares import Shares
from aiodist.devices.waiting import Looks
from aiodist.devices.work import EVENTS, DeviceWork, Mark
from aiodist.errors import ProtocolError
from aiodist.links.party import Party
from aiodist.wire import kinds

FLUSH, FLUSHED, DROP = range(3)
"""Kinds of messages between ranks, each with a number. Higher ones are of
`aiodist.devices.shares`."""

MOST_VAIN = 16
"""After so many reductions in a row whose arrays were joined in vain, because the memory has no
handle, none are joined any more."""

LINGER = 10.0
"""Seconds for which arrays are kept that others may still read when the group ends, because no rank
can tell any more."""

log = logging.getLogger("aiodist.group")


class DeviceMemory:
    """The devices of one group, as seen by one rank."""

    # A rank that gives up must not just free its arrays, because streams of other ranks may read
    # them, and queued work cannot be cancelled. So an array goes through three stages, and is freed
    # at the end of the last one::
    #
    #  pending    The operation goes on, and `DeviceWork.kept` has the arrays.
    #  in limbo   It has failed. Every rank hears the verdict, and queues no more work for it. Only
    #             the reader can tell when its queued work is done. It is asked (FLUSH), and answers
    #             (FLUSHED) when its stream is drained.
    #  lingering  The group has ended, and no rank can be asked any more.
    #
    # The rank that fails first tells all others the verdict, and its FLUSH follows on the same link
    # (`call_soon` in `abandon`). So a rank that answers has heard the verdict and queues no more.
    # The FLUSH of another rank may overtake the verdict, and its answer come too early. That does
    # no harm: memory that others have open stays mapped, others only read it, and no rank completes
    # the operation with what it reads. A lost rank reads nothing, because its context on the device
    # ended with its process.
    #
    # An operation that ends well costs nothing extra, because each rank reports that its reads are
    # complete as part of the operation.

    def __init__(self, context: Party) -> None:
        self._context = context
        self._used: dict[str, Device] = {}  # for each kind, the device that was used last
        # aiodist's own streams, by `id` of the device
        self._streams: dict[int, tuple[Device, Stream]] = {}
        # Sets of unused events, by `id` of the device.
        self._free: dict[int, list[Sequence[tuple[int, Event]]]] = {}
        self._numbers = itertools.count()  # for events and failed operations
        # Failed operations by number, with the ranks that may still read their arrays.
        self._limbo: dict[int, tuple[DeviceWork, set[int]]] = {}
        self._never: list[Callable[[], None]] = []  # what waits for work of a failed device
        self._closed = False  # the group has ended
        self._said: set[str] = set()  # what the log has
        self.vain = 0  # see `MOST_VAIN`
        self.handles = Handles(context.rank, context.loop, self._freed)
        # Loans and their borrowers.
        self.shares = Shares(context.loop, self._tell, self.when_done, self._device_failed)
        self.problem = "" if context.endpoint.reads_devices else "transports= leaves it out"
        """Why the ranks do not read each other's devices, if they cannot."""

    # Own devices.

    @property
    def rank(self) -> int:
        return self._context.rank

    def device(self, kind: str | None = None) -> Device | None:
        """This rank's device of a kind (None: of any): the last one it used, or torch's current
        one."""
        if kind is None:
            kind = next(reversed(self._used), "cuda")
        return self._used.get(kind) or devices.default(kind)

    def use(self, device: Device) -> None:
        """Note the last used device, which receives arrays if nothing else says where."""
        self._used.pop(device.kind, None)
        self._used[device.kind] = device

    def stream(self, device: Device) -> Stream:
        """The stream for aiodist's work on `device`.

        An event is recorded before any stream waits for it, so that no two ranks' streams wait for
        each other.
        """
        if id(device) not in self._streams:
            self._streams[id(device)] = device, device.stream()
        self.use(device)
        return self._streams[id(device)][1]

    def begin(self, device: Device) -> DeviceWork:
        """Begin an operation on `device`.

        When the result is dropped, its events and kept arrays are given back after its queued work
        is complete.
        """
        free = self._free.setdefault(id(device), [])
        if not free:
            free.append([(next(self._numbers), device.event()) for _ in range(EVENTS)])
        work = DeviceWork(device, self.stream(device), free.pop())
        weakref.finalize(
            work, self._dropped, device, work.numbered, work.kept, work.mark
        ).atexit = False
        return work

    def _dropped(
        self, device: Device, numbered: Sequence[tuple[int, Event]], kept: list[Any], mark: Mark
    ) -> None:
        """Give back a `DeviceWork`, in the thread that dropped it."""
        # Garbage collection may call this anywhere, in any thread. So it only hands over to the
        # loop. It must not refer to the `DeviceWork`, which would never be freed then. `mark` is an
        # object of its own because it changes later.

        def drained() -> None:
            kept.clear()
            if id(device) in self._free:  # not after the end of the group
                self._free[id(device)].append(numbered)

        if not mark.busy:
            drained()
        elif not self._context.loop.is_closed():
            self._context.loop.call_soon_threadsafe(self.when_drained, drained)

    # Other ranks.

    def others(self) -> set[int]:
        """The other ranks that are not lost."""
        context = self._context
        return set(range(context.size)) - {context.rank, *context.lost()}

    def open(
        self, peer: int, words: bytes, device: Device | None, owner: object | None = None
    ) -> Found:
        """Open what `peer` described on `device`, or on the last used one if that is None or of
        another kind; see `Handles.open`."""

        def find(kind: str) -> Device | None:
            return device if device is not None and device.kind == kind else self.device(kind)

        return self.handles.open(find, peer, words, owner)

    def refuse(self, problem: str) -> None:
        """Stop reading each other's devices, and log why."""
        if not self.problem:
            self.problem = problem
            self.say_once("tensors on devices go through host memory: %s", problem)

    def say_once(self, text: str, why: str) -> None:
        """Log `text` about this rank with the first `why`."""
        context = self._context
        if text not in self._said:
            self._said.add(text)
            log.warning(f"group %r: rank %d: {text}", context.group, context.rank, why)

    # The end of an operation.

    def abandon(self, work: DeviceWork, peers: Iterable[int] | None = None) -> None:
        """An operation has failed. Its queued work may go on, here and on `peers` (None: all
        others).

        The user's later work comes after what is queued here.
        """
        work.let_go()
        context = self._context
        asked = set(range(context.size) if peers is None else peers) | {context.rank}
        if self._closed:
            self._linger(work, asked)
            return
        number = next(self._numbers)
        self._limbo[number] = work, asked
        # After the verdict, because with that the others stop to queue.
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

    def _flushed(self, peer: int, number: int) -> None:
        if number not in self._limbo:
            return
        work, missing = self._limbo[number]
        missing.discard(peer)
        if not missing:
            del self._limbo[number]
            work.finished()

    def when_drained(self, then: Callable[[], None]) -> None:
        """Call `then` when all work that is queued here by now is complete."""
        # Use new events, because recording an operation's event again would move the point that
        # others wait for.
        tails = []
        try:
            for device, stream in self._streams.values():
                tail = device.event()
                stream.record(tail)
                tails.append(tail)
        except Exception as error:
            self._device_failed(then, error)
        else:
            self.when_done(tails, then)

    def _device_failed(self, then: Callable[[], None], error: Exception) -> None:
        # Keep what `then` would free, because the device may still use it.
        self.say_once(
            "memory that others may read is kept, because the device fails: %s", f"{error}"
        )
        self._never.append(then)

    def when_done(
        self,
        events: Sequence[Event],
        then: Callable[[], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Call `then` when the device has reached `events`: now, or later from the loop. If the
        device fails, call `failed` instead, if it is given."""

        def look() -> None:
            try:
                if not looks.look():
                    return
            except Exception as error:
                (failed or partial(self._device_failed, then))(error)
            else:
                then()

        looks = Looks(self._context.loop, events, look)
        look()

    # Messages.

    def heard(self, peer: int, fields: Sequence[Any]) -> None:
        """Handle a message of `peer`. Raises ProtocolError."""
        match fields:
            case [_, _, 0, int(number)]:
                self.when_drained(lambda: self._tell(peer, FLUSHED, number))
            case [_, _, 1, int(number)]:
                self._flushed(peer, number)
            case [_, _, 2, int(number)]:
                self.handles.drop(peer, number)
            case [_, _, int(word), int(number)]:
                self.shares.heard(peer, word, number)
            case _:
                raise ProtocolError("malformed message about devices")

    def _tell(self, peer: int, word: int, number: int) -> None:
        context = self._context
        if peer != context.rank and context.ended is None and not context.has_lost(peer):
            context.tell(peer, kinds.DEVICE, word, number)

    def _freed(self, number: int) -> None:
        self.handles.drop(self._context.rank, number)  # opened for messages to itself
        for peer in range(self._context.size):
            self._tell(peer, DROP, number)

    def rank_lost(self, peer: int) -> None:
        """Rank `peer` is lost and reads nothing any more, so free what was kept for it."""
        for number in list(self._limbo):
            self._flushed(peer, number)
        self.shares.rank_lost(peer)
        self.handles.rank_lost(peer)

    def close(self) -> None:
        """End the group, but free nothing that running work may need."""
        self.shares.close()
        self.handles.close()
        self._free.clear()
        self._closed = True
        for work, missing in self._limbo.values():
            self._linger(work, missing)
        self._limbo.clear()

    def _linger(self, work: DeviceWork, readers: set[int]) -> None:
        """Keep arrays for a while that others may read, because they cannot report that any more.

        The own work is waited for when its `DeviceWork` is dropped.
        """
        if readers - {self._context.rank}:
            self._context.loop.call_later(LINGER, list(work.kept).clear)
