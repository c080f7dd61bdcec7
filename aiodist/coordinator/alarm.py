"""The coordinator's timer, which grants time after it was late itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LATE_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""A timer that fires LATE_SECONDS too late shows that this loop was busy, so that signs of life may
lie unread: leases are judged GRACE_SECONDS later."""


class Alarm:
    """Calls `ring` in time. One that rings too early does no harm, so it is never put off."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def ring_by(self, when: float) -> None:
        """Ring at the time `when` of the loop, or before."""
        if self._timer is None or when < self._due:
            self.cancel()
            self._due = when
            self._timer = self._loop.call_at(when, self._on_timer)

    def cancel(self) -> None:
        """Do not ring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        # A lease that is over by the clock may have been renewed: the sign of life lies in a socket
        # that this loop has had no time to read. So one that was late itself reads first, for a
        # second, and judges then. Members would be ruled lost in crowds otherwise, whenever the
        # machine stood still.
        now = self._loop.time()
        if now - self._due > LATE_SECONDS:
            self.ring_by(now + GRACE_SECONDS)
        else:
            self._ring()
