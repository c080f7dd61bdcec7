"""How the loop finds that a device has reached an event: it polls, and never blocks."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence

from aiodist.devices.base import Event
from aiodist.engine.operation import Pause

CLOSELY = 3e-3
"""Seconds for which every turn of the loop polls the device."""
LOOK = 1e-3
"""Seconds between two polls after that."""


class Looks:
    """Poll events until the device has reached them, or fails. Then call `then`, which looks again.

    At first every turn of the loop polls, because no timer is as fine as that; then a timer does.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, events: Sequence[Event], then: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._events = events
        self._then: Callable[[], None] | None = then
        self._began = loop.time()
        self._next: asyncio.Handle | None = None
        self._error: Exception | None = None  # the device has failed

    def look(self) -> bool:
        """Whether the device has reached them. If not, `then` is called later.

        Raises the error of a device that has failed.
        """
        self.stop()
        # At the end, a cycle would keep an operation and its result, such as a loan.
        then, self._then = self._then, None
        if self._error is not None:
            raise self._error
        if all(event.done() for event in self._events):
            return True
        self._then = then
        if self._loop.time() - self._began < CLOSELY:
            if sys.platform == "linux":
                os.sched_yield()  # the peer that is waited for may need the core
            self._next = self._loop.call_soon(self._again)
        else:
            self._next = self._loop.call_later(LOOK, self._again)
        return False

    def _again(self) -> None:
        then = self._then
        try:
            over = self.look()
        except Exception as error:
            # The loop would only log it. The next look raises it where the operation can fail.
            self._error, over = error, True
        if over and then is not None:
            then()

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None


class Settled(Pause):
    """A pause until the device has reached an event."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, event: Event, *, alone: bool = False
    ) -> None:
        self.alone = alone
        self._looks = Looks(loop, [event], self._resume)

    def _resume(self) -> None:
        self.resume()

    def run(self) -> bool:
        return self._looks.look()

    def close(self) -> None:
        self._looks.stop()
