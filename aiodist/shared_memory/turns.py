"""Turns run the calls of a lane one after the other, in the order of their numbers.

A turn begins when the one before it has ended here. It cannot begin earlier, because a rank has one
stamp, which cannot show the progress of two operations. So later calls wait in a queue::

    called ──> queued ──> current: resumed, again and again ──> ended ──> the next one's turn
                  │          │
                  └──────────┴── given up before it has entered: a `SkippedCall` in its place

The event loop begins each turn, never the end of the turn before. That end may lie within a call of
the user, and this call should not carry out everything that is queued behind it. Operations that
are ready run in one turn of the loop, until other tasks are due (then `Lane.enter` gives way).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Rider(Protocol):
    """An operation on a lane."""

    seq: int
    place: int
    """The location of its array, see `Board.announce`."""

    @property
    def call(self) -> bytes: ...

    def resume(self) -> None:
        """Go on as far as possible, because it has the turn. The lane calls this again after each
        event that may help."""
        ...


class SkippedCall:
    """A call that was given up before its turn. The others must hear that it is passed over."""

    def __init__(self, pass_over: Callable[[int], object], seq: int) -> None:
        self.seq = seq
        self._pass_over = pass_over

    def resume(self) -> None:
        self._pass_over(self.seq)


class Turns:
    """The calls on one lane that have not ended."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, resumed: Callable[[], None] = lambda: None
    ) -> None:
        """`resumed` is called each time before the loop resumes the current call."""
        self.current: Rider | SkippedCall | None = None  # has the turn
        self.queue: deque[Rider | SkippedCall] = deque()  # the calls behind it, in order
        self._loop = loop
        self._resumed = resumed
        self._resuming = False  # whether the loop will call `_resume`

    def add(self, rider: Rider | SkippedCall) -> None:
        """Run `rider` when its turn comes, perhaps at once. If a call with its number is there
        already, replace that call."""
        queue = self.queue
        if self.current is not None and self.current.seq == rider.seq:
            self.current = rider
        elif queue and rider.seq <= queue[-1].seq:
            queue[rider.seq - queue[0].seq] = rider  # the numbers have no gaps
        elif self.current is None and not queue:
            self.current = rider
            rider.resume()
        else:
            queue.append(rider)

    def replace(self, rider: Rider, skipped: SkippedCall | None) -> None:
        """Take `rider` out, because it was given up. If `skipped` is given, it takes the turn."""
        if rider is self.current:
            self.current = skipped
            self.resume_soon()
        elif skipped is None:
            return
        elif rider in self.queue:
            self.queue[self.queue.index(rider)] = skipped
        else:
            self.add(skipped)

    def next(self) -> None:
        """End the current turn."""
        self.current = None
        # The loop begins the next turn, because this one may have ended within the user's call.
        if self.queue:
            self.resume_soon()

    def resume_soon(self) -> None:
        """Go on in the next turn of the loop."""
        if not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._resumed()
        while self.resume() and (self.queue or self.current):
            pass  # the others may be ready for the next call already

    def resume(self) -> bool:
        """Go on with the current turn, and return whether it has ended."""
        if self.current is None and self.queue:
            self.current = self.queue.popleft()
        before = self.current
        if before is not None:
            before.resume()
        return self.current is not before

    def clear(self) -> None:
        """Drop everything that is queued, and the current call if it is to be passed over."""
        self.queue.clear()
        if isinstance(self.current, SkippedCall):
            self.current = None
