"""The coordinator's timer, which grants extra time if it fires late itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

LATE_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""If a timer fires LATE_SECONDS too late, this loop was busy, and signs of life may lie unread. So
leases are judged GRACE_SECONDS later."""

GRACES = (GRACE_SECONDS, 0.0)
"""The extra time for the first and the second late timer in a row. After the second, one turn of
the loop is enough to read what has come. Then it rings, because a loop that is always late must
judge at some time."""


class Alarm:
    """Calls `ring` in time, or up to GRACE_SECONDS later. A ring that comes too early does no
    harm."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._graces = 0  # the number of graces since it rang
        self._granted = -math.inf  # it does not ring before this time

    def ring_by(self, when: float) -> None:
        """Ring at the time `when` of the loop, or before; during a grace, at its end."""
        # During a grace, each message may ask for a time that has passed. Setting that time would
        # make the timer late again, and it would never ring.
        when = max(when, self._granted)
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
        # A lease that seems to be over may have been renewed by a message that this loop had no
        # time to read. So after a late timer the loop reads for a second and judges then. Else
        # members would be ruled lost in crowds whenever the machine stood still.
        now = self._loop.time()
        if now - self._due > LATE_SECONDS and self._graces < len(GRACES):
            self._granted = now + GRACES[self._graces]
            self._graces += 1
            self.ring_by(self._granted)
        else:
            self._graces, self._granted = 0, -math.inf
            self._ring()
