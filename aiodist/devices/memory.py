"""Memory of devices between the ranks of a host: who may read it, and until when it is kept.

Each rank reads the others' arrays where they lie, on a stream of aiodist's own. Events that all can
open order the streams; the ranks only tell each other that an event *was recorded*, or that work is
complete, and never wait for the device in the loop. What is told once is in `handles`.

A rank reads others' arrays between two words: that they may be read, and that its reads are
*complete*. A rank whose operation ended in between gives its memory back only when every other one
has said that what it had queued till then is complete (FLUSH, answered by FLUSHED). Until then its
`DeviceMemory` keeps the arrays::

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
"""Words between ranks, with a number each. Higher ones are of `aiodist.devices.shares`."""

LINGER = 10.0
"""Seconds for which arrays are kept that others may still read when the group ends, and nobody can
say any more whether they do."""

log = logging.getLogger("aiodist.group")


class DeviceMemory:
    """The devices of one group, as seen by one rank."""

    # Why a rank that gives up may not just free its arrays. The streams of other ranks read them,
    # and a stream cannot be called back: what is queued will be done, however its operation ends.
    # So there are three stages, and an array is let go of at the end of the last one.
    #
    #     pending    the operation goes on; `DeviceWork.kept` has the arrays
    #     in limbo   it has failed. Every rank hears the verdict, and queues nothing more for it.
    #                What it had queued by then is under way, and only that rank can tell when it
    #                is done: it is asked (FLUSH), and answers (FLUSHED) when its stream is drained
    #     lingering  the group has ended, and with it all words. Nobody can be asked any more
    #
    # FLUSH is told behind the verdict (`call_soon` in `abandon`), on the same link. So whoever
    # answers it has heard the verdict, and "what was queued till now" is all there will ever be. A
    # rank that is lost reads nothing: its process is gone, and its context on the device with it.
    #
    # This costs nothing where operations end well: then each rank says that its reads are complete
    # as a part of the operation itself, and nothing gets into limbo.

    def __init__(self, context: Party) -> None:
        self._context = context
        self._used: dict[str, Device] = {}  # of each kind, the one that was used last
        self._streams: dict[int, tuple[Device, Stream]] = {}  # aiodist's own, by `id` of the device
        # By `id` of the device, sets of events that no operation has.
        self._free: dict[int, list[Sequence[tuple[int, Event]]]] = {}
        self._numbers = itertools.count()  # of events, and of what is in limbo
        # By number, operations that failed, and who has not said yet that it reads nothing.
        self._limbo: dict[int, tuple[DeviceWork, set[int]]] = {}
        self._closed = False  # the group has ended
        self._mixed = False  # it was said that other ranks give arrays of the host
        self.handles = Handles(context.loop, self._freed)  # what was told, and what is open
        self.shares = Shares(context.loop, self._tell)  # what is lent, and by whom
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

    def begin(self, device: Device) -> DeviceWork:
        """What an operation has of `device` that is called now. Dropping it gives the events back,
        and what it kept, once what was queued is complete here."""
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
        """A `DeviceWork` is gone; called by whichever thread has let go of it."""
        # It may be gone by garbage collection, amid anything and in any thread. So nothing is done
        # here but to hand over to the loop. And this must not refer to the `DeviceWork` itself,
        # or it would never be gone: it has the parts that are needed, and `mark` in a box of its
        # own because it changes after this was set up.

        def drained() -> None:
            kept.clear()
            if id(device) in self._free:  # not after the end of the group
                self._free[id(device)].append(numbered)

        if not mark.busy:
            drained()
        elif not self._context.loop.is_closed():
            self._context.loop.call_soon_threadsafe(self.when_drained, drained)

    # -- of others --------------------------------------------------------------------------------

    def open(self, peer: int, words: bytes, owner: object | None = None) -> Found:
        """What `peer` described, see `Handles.open`."""
        return self.handles.open(self.device, peer, words, owner)

    def refuse(self, problem: str) -> None:
        """The ranks do not read each other's devices from here on."""
        if not self.problem:
            self.problem = problem
            self._say("tensors on devices go through host memory: %s", problem)

    def mixed(self) -> None:
        """Other ranks have given arrays of the host for the same reduction."""
        if not self._mixed:
            self._mixed = True
            self._say(
                "tensors on devices are reduced by way of host memory where %s",
                "other ranks give tensors of the host",
            )

    def _say(self, text: str, why: str) -> None:
        context = self._context
        log.warning(f"group %r: rank %d: {text}", context.group, context.rank, why)

    # -- the end of an operation ------------------------------------------------------------------

    def abandon(self, work: DeviceWork, peers: Iterable[int] | None = None) -> None:
        """The operation has failed: what it queued may be under way, here and on `peers` (None: all
        others). What the user queues from here on comes after what is queued here."""
        work.let_go()
        context = self._context
        asked = set(range(context.size) if peers is None else peers) | {context.rank}
        if self._closed:
            self._linger(work, asked)
            return
        number = next(self._numbers)
        self._limbo[number] = work, asked
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

    def _flushed(self, peer: int, number: int) -> None:
        if number not in self._limbo:
            return
        work, missing = self._limbo[number]
        missing.discard(peer)
        if not missing:
            del self._limbo[number]
            work.finished()

    def when_drained(self, then: Callable[[], None]) -> None:
        """Call `then` when all that is queued here by now is complete."""
        # New events, not those of operations: to record an event again would move the point that
        # others wait for.
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

    # -- words ------------------------------------------------------------------------------------

    def heard(self, peer: int, fields: Sequence[Any]) -> None:
        """A word of `peer`. Raises ProtocolError."""
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
                raise ProtocolError("malformed words about devices")

    def _tell(self, peer: int, word: int, number: int) -> None:
        context = self._context
        if peer != context.rank and context.ended is None and not context.has_lost(peer):
            context.tell(peer, kinds.DEVICE, word, number)

    def _freed(self, number: int) -> None:
        for peer in range(self._context.size):
            self._tell(peer, DROP, number)

    def rank_lost(self, peer: int) -> None:
        """Rank `peer` is lost: it reads nothing any more, so what was kept for it is free."""
        for number in list(self._limbo):
            self._flushed(peer, number)
        self.shares.rank_lost(peer)
        self.handles.rank_lost(peer)

    def close(self) -> None:
        """The group ends: nothing is let go of that work under way may still need."""
        self.shares.close()
        self.handles.close()
        self._free.clear()
        self._closed = True
        for work, missing in self._limbo.values():
            self._linger(work, missing)
        self._limbo.clear()

    def _linger(self, work: DeviceWork, readers: set[int]) -> None:
        """Keep the arrays for a while if others may read them: these cannot say so any more.
        What this rank does with them is waited for when its `DeviceWork` is dropped."""
        if readers - {self._context.rank}:
            self._context.loop.call_later(LINGER, list(work.kept).clear)
