"""Inline progress: a short, bounded poll before an operation leaves it to the event loop.

A wake-up by the event loop costs tens of microseconds; an answer of a peer that is working on the
same operation is often sooner here than that. How long polling goes on adapts to how often it
pays. The loop still gets a turn at least every `TURN` seconds, however fast operations complete.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiodist.transports.surroundings import is_virtual

if TYPE_CHECKING:
    from aiodist.runtime.board import Board
    from aiodist.transports.base import Link
    from aiodist.transports.stream import StreamLink

TURN = 0.0007
"""Seconds after which the loop is due before anything else is polled for."""
LONGEST = 100e-6
"""Most seconds that one poll waits while nothing comes."""
SHORTEST = 5e-6
AGAIN = 8
"""Polls in vain after which one is as long as can be: what they are too short for now may come
sooner than it seems, since whoever does not poll is late himself."""
OTHERS = 10e-6
"""A yield of the core that took longer let somebody else work: it was no waiting."""
HOGGED = 2e-3
"""A yield that took longer than this was a whole time slice of somebody: stop polling."""

SPINS = 8
"""Looks at shared memory between two looks at the clock."""


def _no_yield() -> None:
    """Where the system has no `sched_yield`, poll without it."""


_yield: Callable[[], None] = getattr(os, "sched_yield", _no_yield)
_clock = time.perf_counter


class Progress:
    """The polling budget of one endpoint."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._polls = not is_virtual(loop)
        self._budget = LONGEST
        self._in_vain = 0  # polls, one after the other
        self._due = math.inf  # when the loop is due for a turn; inf: nothing since the last one

    def _turned(self) -> None:
        self._due = math.inf

    def is_due(self) -> bool:
        """Whether the loop is due for a turn. Time counts from the first call after the last."""
        if not self._polls:
            return False
        now = _clock()
        if self._due == math.inf:
            self._due = now + TURN
            self._loop.call_soon(self._turned)
            return False
        return now >= self._due

    def _patience(self) -> float:
        """How long to poll now, in seconds."""
        return LONGEST if self._in_vain >= AGAIN else self._budget

    def _paid(self) -> None:
        """What was polled for has come."""
        self._budget = LONGEST if self._in_vain >= AGAIN else min(LONGEST, self._budget * 2)
        self._in_vain = 0

    def _failed(self) -> None:
        """It has not."""
        self._budget = max(SHORTEST, self._budget / 2)
        self._in_vain = 0 if self._in_vain >= AGAIN else self._in_vain + 1

    def inline(self, is_done: Callable[[], bool], link_of: Callable[[], Link | None]) -> None:
        """Poll `link_of()`, the link that is waited for (None: there is nothing to poll), until
        `is_done()` or the budget is used up."""
        if self.is_due():
            return
        now = _clock()
        limit = now + self._patience()
        while now < self._due:
            link = link_of()
            if link is None:
                return
            if link.poll():
                if is_done():
                    self._paid()
                    return
                now = _clock()
                limit = now + self._patience()
                continue
            if link.kind == "inproc" or not self._polls:
                return  # the peer runs in this loop: it needs a turn
            _yield()
            before, now = now, _clock()
            away = now - before
            if away > OTHERS:
                limit += away
            if now > limit or away > HOGGED:
                self._failed()
                return

    def look(self, link: StreamLink, prefix: bytes, into: memoryview, crowded: bool) -> bool:
        """Look for the frame with this prefix on `link` until it is `into`: True; until something
        else comes, or the budget is used up: False. `crowded` as in `watch`."""
        found = link.look_for(prefix, into)
        if found is not None:
            return found
        if not self._polls:
            return False
        now = _clock()
        limit = now + self._patience()
        while now < self._due:
            if crowded:
                _yield()
            found = link.look_for(prefix, into)
            if found is not None:
                self._paid()
                return found
            before, now = now, _clock()
            away = now - before
            if away > OTHERS:
                limit += away
            if now > limit or away > HOGGED:
                self._failed()
                break
        return False

    def watch(self, board: Board, peers: Sequence[int], stamp: int, *, crowded: bool) -> bool:
        """Poll until all of `peers` have reached `stamp`: True; or the budget is used up: False.

        `crowded`: there are more ranks than cores, so who waits had better let others run.
        """
        if self.is_due():
            return False
        reached = board.reached
        spins = range(1 if crowded else SPINS)
        now = _clock()
        limit = now + self._patience()
        while now < self._due:
            if crowded:
                _yield()
            for _ in spins:
                if reached(peers, stamp):
                    self._paid()
                    return True
            before, now = now, _clock()
            away = now - before
            if away > OTHERS:
                limit += away
            if now > limit or away > HOGGED:
                self._failed()
                break
        return False
