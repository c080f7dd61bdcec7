"""Memory of devices that a rank lends to others.

The owner keeps it until every other rank has said that its last view is gone (RELEASED), or is
lost. A rank that leaves the group with such views says KEPT. Then the owner keeps the memory until
its process ends, because the end of the views cannot be reported any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.devices import device_of
from aiodist.devices.base import Event
from aiodist.errors import ProtocolError

RELEASED, KEPT, HELD = 3, 4, 5
"""Messages, with the number of a loan. HELD asks whether a rank has the loan; only a rank without
it answers."""

log = logging.getLogger("aiodist.group")

_for_good: list[Any] = []
"""Loans that others may use until this process ends."""


class Holder:
    """What all views of one loan keep alive."""

    __slots__ = ("__weakref__",)


class Shares:
    """The loans by and to one rank.

    `tell` sends a message: (peer, word, number). `when_done` calls its second argument when the
    device has reached the events of its first argument. `failed` gets what `when_done` would have
    called if the device fails, and the error.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[int, int, int], None],
        when_done: Callable[[Sequence[Event], Callable[[], None]], None],
        failed: Callable[[Callable[[], None], Exception], None],
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._when_done = when_done
        self._failed = failed
        self._pid = os.getpid()
        # The life of a loan, between its owner and one borrower::
        #
        #     lend ──── the operation tells its number ────> borrow
        #     kept                                           views, and views of views
        #                                                    the last of them is gone
        #     <───────────────────────── RELEASED ────────── work that was queued on it is done
        #     free, once all borrowers have said so, or are lost
        #
        # If the operation fails on the way, the owner cannot know whether the number has arrived.
        # It asks (HELD), and a rank without the loan answers.
        self._numbers = itertools.count()  # of loans of this rank
        # By number: the memory, and the ranks that may have views.
        self._lent: dict[int, tuple[Any, set[int]]] = {}
        # By (peer, number): what the views keep.
        self._borrowed: dict[tuple[int, int], weakref.ref[Holder]] = {}

    def lend(self, kept: Any, peers: set[int]) -> int:
        """Keep memory for `peers`, and return the number of the loan."""
        number = next(self._numbers)
        if peers:
            self._lent[number] = kept, peers
        return number

    def ask(self, number: int) -> None:
        """After a failed operation, ask the ranks without a view to say so."""
        for peer in list(self._lent.get(number, ((), ()))[1]):
            self._tell(peer, HELD, number)

    def borrow(self, peer: int, number: int, arrays: Sequence[Any]) -> Holder:
        """Note a loan of `peer`. All views of it must keep the result. `arrays` keep the memory
        open, and not the result."""
        holder = Holder()
        self._borrowed[peer, number] = weakref.ref(holder)
        weakref.finalize(holder, self._dropped, peer, number, arrays).atexit = False
        return holder

    def _dropped(self, peer: int, number: int, arrays: Sequence[Any]) -> None:
        """The last view is gone; called in the thread that dropped it."""
        if self._loop.is_closed() or os.getpid() != self._pid:  # in a forked child
            return
        give_back = partial(self._give_back, peer, number, arrays)
        # Work that this thread has queued may still use the memory.
        events = []
        try:
            for device in {id(device): device for device in map(device_of, arrays)}.values():
                assert device is not None
                events.append(device.event())
                device.current().record(events[-1])
        except Exception as error:
            self._loop.call_soon_threadsafe(self._failed, give_back, error)
        else:
            self._loop.call_soon_threadsafe(self._when_done, events, give_back)

    def _give_back(self, peer: int, number: int, arrays: Sequence[Any]) -> None:
        """Return a loan. Until then, `arrays` have kept its memory open."""
        if self._borrowed.pop((peer, number), None) is not None:
            self._tell(peer, RELEASED, number)

    def heard(self, peer: int, word: int, number: int) -> None:
        """Handle a message of `peer`. Raises ProtocolError."""
        if word == RELEASED:
            self._released(peer, number)
        elif word == KEPT:
            if number in self._lent:
                _for_good.append(self._lent[number][0])
        elif word == HELD:
            # The loan never arrived because the operation failed. Answer, or the owner would wait
            # for its return for ever.
            if (peer, number) not in self._borrowed:
                self._tell(peer, RELEASED, number)
        else:
            raise ProtocolError(f"rank {peer} says {word} about memory of devices")

    def _released(self, peer: int, number: int) -> None:
        if number in self._lent:
            _, missing = self._lent[number]
            missing.discard(peer)
            if not missing:
                del self._lent[number]

    def rank_lost(self, peer: int) -> None:
        """Rank `peer` is lost and has no views any more, unless it has said KEPT."""
        for number in list(self._lent):
            self._released(peer, number)
        for key in [key for key in self._borrowed if key[0] == peer]:
            del self._borrowed[key]

    def close(self) -> None:
        # Views may be used after the end of the group, and their end cannot be reported then. So
        # the owners keep that memory until their processes end, and so does this rank.
        for peer, number in self._borrowed:
            self._tell(peer, KEPT, number)
        if self._lent:
            log.info("%d tensors that were lent stay until the process ends", len(self._lent))
        _for_good.extend(kept for kept, _ in self._lent.values())
        self._borrowed.clear()
        self._lent.clear()
