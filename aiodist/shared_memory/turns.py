"""Whose turn it is on a lane: one call after the other, in the order of their numbers.

A turn begins when the one before it has ended here, not before: a rank has one stamp, which cannot
say of two operations how far they are. So what is called meanwhile waits in a queue::

    called ──> queued ──> current: resumed, again and again ──> ended ──> the next one's turn
                  │          │
                  └──────────┴── given up before it has entered: a `SkippedCall` in its place

Turns begin from the event loop, never from within the turn before: that may have ended inside of a
call, which is not to carry out all that is queued behind it. What is ready goes on in one turn of
the loop, until other tasks are due (`Lane.enter` gives way then).
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
    """Where its array lies, see `Board.announce`."""

    @property
    def digest(self) -> int: ...

    @property
    def call(self) -> bytes: ...

    def resume(self) -> None:
        """It is its turn: go on as far as can be. Called again whenever what it waited for may be
        there."""
        ...


class SkippedCall:
    """A call that was given up before its turn: the others have to hear that it is passed over."""

    def __init__(self, pass_over: Callable[[int], object], seq: int) -> None:
        self.seq = seq
        self._pass_over = pass_over

    def resume(self) -> None:
        self._pass_over(self.seq)


class Turns:
    """The calls on one lane that have not ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.current: Rider | SkippedCall | None = None  # whose turn it is
        self.queue: deque[Rider | SkippedCall] = deque()  # what comes after it, in order
        self._loop = loop
        self._resuming = False  # the loop will call `_resume`

    def add(self, rider: Rider | SkippedCall) -> None:
        """Run `rider` once it is its turn, perhaps at once; or let it take the place of what has
        its number."""
        queue = self.queue
        if self.current is not None and self.current.seq == rider.seq:
            self.current = rider
        elif queue and rider.seq <= queue[-1].seq:
            queue[rider.seq - queue[0].seq] = rider  # there is no gap in the numbers
        elif self.current is None and not queue:
            self.current = rider
            rider.resume()
        else:
            queue.append(rider)

    def replace(self, rider: Rider, skipped: SkippedCall | None) -> None:
        """`rider` was given up; `skipped` takes its turn, if anything has to."""
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
        """The current one has ended."""
        self.current = None
        # By the loop: the one that has ended may have done so inside of the user's call.
        if self.queue:
            self.resume_soon()

    def resume_soon(self) -> None:
        """Go on with the next turn of the loop."""
        if not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        while self.resume() and (self.queue or self.current):
            pass  # the next one may find the others there already

    def resume(self) -> bool:
        """Go on with whose turn it is: whether that one has ended."""
        if self.current is None and self.queue:
            self.current = self.queue.popleft()
        before = self.current
        if before is not None:
            before.resume()
        return self.current is not before

    def clear(self) -> None:
        """Nothing that is queued will have its turn; nor what is to be passed over now."""
        self.queue.clear()
        if isinstance(self.current, SkippedCall):
            self.current = None
