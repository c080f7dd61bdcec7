"""The coordinator's timer, which grants time after it was late itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

LATE_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""A timer that fires LATE_SECONDS too late shows that this loop was busy, so that signs of life may
lie unread: leases are judged GRACE_SECONDS later."""

GRACES = (GRACE_SECONDS, 0.0)
"""What a timer is granted that is late, and late again: the second time it is enough to read what
has come. After that it rings, or a loop that is always late would never judge anybody."""


class Alarm:
    """Calls `ring` in time, or up to GRACE_SECONDS later. One that rings too early does no harm."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._graces = 0  # so many were granted since it rang
        self._granted = -math.inf  # it does not ring before

    def ring_by(self, when: float) -> None:
        """Ring at the time `when` of the loop, or before, or when what was granted is over."""
        # With each message the coordinator says when it wants to judge: a time that is over, while
        # time is granted. Taken at its word, it would be late again each time, and never ring.
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
        # A lease that is over by the clock may have been renewed: the sign of life lies in a socket
        # that this loop has had no time to read. So one that was late itself reads first, for a
        # second, and judges then. Members would be ruled lost in crowds otherwise, whenever the
        # machine stood still.
        now = self._loop.time()
        if now - self._due > LATE_SECONDS and self._graces < len(GRACES):
            self._granted = now + GRACES[self._graces]
            self._graces += 1
            self.ring_by(self._granted)
        else:
            self._graces, self._granted = 0, -math.inf
            self._ring()
