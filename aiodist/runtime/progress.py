"""Inline progress: a short, bounded poll before an operation leaves it to the event loop.

A wake-up by the event loop costs tens of microseconds; an answer of a peer that is working on the
same operation is often sooner here than that. How long polling goes on adapts to how often it
pays. The loop still gets a turn at least every `TURN` seconds, however fast operations complete.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.transports.base import Link

TURN = 0.001
"""Seconds after which the loop is due before anything else is polled for."""
LONGEST = 100e-6
"""Most seconds that one poll waits while nothing comes."""
SHORTEST = 5e-6
OTHERS = 10e-6
"""A yield of the core that took longer let somebody else work: it was no waiting."""
HOGGED = 2e-3
"""A yield that took longer than this was a whole time slice of somebody: stop polling."""


def _no_yield() -> None:
    """Where the system has no `sched_yield`, poll without it."""


_yield: Callable[[], None] = getattr(os, "sched_yield", _no_yield)


class Progress:
    """The polling budget of one endpoint."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._budget = LONGEST
        self._since: float | None = None

    def _turned(self) -> None:
        self._since = None

    def inline(self, is_done: Callable[[], bool], link_of: Callable[[], Link | None]) -> None:
        """Poll `link_of()`, the link that is waited for (None: there is nothing to poll), until
        `is_done()` or the budget is used up."""
        clock = time.perf_counter
        start = now = clock()
        if self._since is None:
            self._since = start
            self._loop.call_soon(self._turned)
        turn = self._since + TURN
        limit = start + self._budget
        while now < turn:
            link = link_of()
            if link is None:
                return
            if link.poll():
                if is_done():
                    self._budget = min(LONGEST, self._budget * 2)
                    return
                now = clock()
                limit = now + self._budget
                continue
            if link.kind == "inproc":
                return  # the peer runs in this loop: it needs a turn
            _yield()
            before, now = now, clock()
            away = now - before
            if away > OTHERS:
                limit += away
            if now > limit or away > HOGGED:
                self._budget = max(SHORTEST, self._budget / 2)
                return
