"""Memory of devices that a rank lends the others: who has it, and until when.

The owner keeps what it lends until every other rank has said that its last view of it is gone
(RELEASED), or is lost. A rank that leaves the group and has such views says so (KEPT): then the
owner keeps the memory for as long as its process lives, for nobody can tell any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from aiodist.errors import ProtocolError

RELEASED, KEPT, HELD = 3, 4, 5
"""Words, with the number of a loan. HELD asks whether it is, and is answered if it is not."""

log = logging.getLogger("aiodist.group")

_for_good: list[Any] = []
"""What this process lent, and others may use for as long as they like."""


class Holder:
    """What all views of one loan keep alive."""

    __slots__ = ("__weakref__",)


class Shares:
    """The loans of one rank, and those to it. `tell` sends a word: (peer, word, number)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tell: Callable[[int, int, int], None]
    ) -> None:
        self._loop = loop
        self._tell = tell
        # The life of a loan, between its owner and one borrower:
        #
        #     lend ──── the operation tells its number ────> borrow
        #     kept                                           views, and views of views
        #     <───────────────────────── RELEASED ────────── the last of them is gone
        #     free, once all borrowers have said so, or are lost
        #
        # If the operation fails on the way, the owner cannot know whether the number has arrived:
        # it asks (HELD), and only those answer who have nothing.
        self._numbers = itertools.count()  # of loans of this rank
        # By number: the memory, and who may have views of it.
        self._lent: dict[int, tuple[Any, set[int]]] = {}
        # By (peer, number): what the views keep.
        self._borrowed: dict[tuple[int, int], weakref.ref[Holder]] = {}
        self._closed = False  # nothing is said any more

    def lend(self, kept: Any, peers: set[int]) -> int:
        """Keep memory that `peers` will have views of: the number of the loan."""
        number = next(self._numbers)
        if peers:
            self._lent[number] = kept, peers
        return number

    def ask(self, number: int) -> None:
        """The operation has failed: those who have no view of it are to say so."""
        for peer in list(self._lent.get(number, ((), ()))[1]):
            self._tell(peer, HELD, number)

    def borrow(self, peer: int, number: int) -> Holder:
        """A loan of `peer` is here: to be kept by all views of it."""
        holder = Holder()
        self._borrowed[peer, number] = weakref.ref(holder)
        weakref.finalize(holder, self._dropped, peer, number).atexit = False
        return holder

    def _dropped(self, peer: int, number: int) -> None:
        """The last view is gone; called by whichever thread has let go of it."""
        if not (self._closed or self._loop.is_closed()):
            self._loop.call_soon_threadsafe(self._give_back, peer, number)

    def _give_back(self, peer: int, number: int) -> None:
        if self._borrowed.pop((peer, number), None) is not None:
            self._tell(peer, RELEASED, number)

    def heard(self, peer: int, word: int, number: int) -> None:
        """A word of `peer`. Raises ProtocolError."""
        if word == RELEASED:
            self._released(peer, number)
        elif word == KEPT:
            if number in self._lent:
                _for_good.append(self._lent[number][0])
        elif word == HELD:
            # The loan never arrived here, as the operation failed on the way: the lender would wait
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
        """Rank `peer` is lost: it has views of nothing any more, unless it has said KEPT."""
        for number in list(self._lent):
            self._released(peer, number)
        for key in [key for key in self._borrowed if key[0] == peer]:
            del self._borrowed[key]

    def close(self) -> None:
        """The group has ended here."""
        # Views here may be used after the group has ended, and then nobody can be told when they
        # go. So the lenders are to keep that memory for as long as they live; and what was lent
        # from here is kept as long, for nobody hears of its return any more.
        for peer, number in self._borrowed:
            self._tell(peer, KEPT, number)
        if self._lent:
            log.info("%d tensors that were lent stay until the process ends", len(self._lent))
        _for_good.extend(kept for kept, _ in self._lent.values())
        self._closed = True
        self._borrowed.clear()
        self._lent.clear()
