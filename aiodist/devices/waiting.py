"""How the loop finds that a device has come to an event: it looks, and never waits."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence

from aiodist.devices.base import Event
from aiodist.engine.operation import Pause

CLOSELY = 3e-3
"""Seconds for which every turn of the loop has a look whether the device is done."""
LOOK = 1e-3
"""Seconds between two looks after that."""


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
