"""Renew the lease of a member: a sign of life now and then, however busy its loop is.

One thread does this for all members of a process, because a loop that computes is not dead. Each
lease takes two steps in turn: it asks the loop for a turn, and later sends the sign of life. That
tells the coordinator if the loop has had no turn by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
from typing import Protocol

from aiodist.transports.surroundings import call_in_thread, is_virtual
from aiodist.wire.codec import encode_message
from aiodist.wire.messages import Renew

log = logging.getLogger("aiodist.control")

_FRAME = encode_message(Renew())

PATIENCE = 0.25
"""A loop counts as busy if it has not turned for this part of the interval.

The coordinator is then told what keeps it busy, because it would get no answer if it asked.
"""


class LeaseOwner(Protocol):
    """The owner of a lease. Called from any thread."""

    def renew_from_thread(self, frame: bytes) -> None:
        """Send a sign of life if there is a connection now."""

    def busy_from_thread(self, seconds: float, ident: int) -> bytes | None:
        """Return a sign of life that says what keeps the loop, in thread `ident`, busy."""

    def abandon_from_thread(self) -> None:
        """Tell the others that the loop is closed."""


class Pulse:
    """Tells from another thread whether a loop turns. Make it in the thread of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ident = threading.get_ident()
        self._loop = loop
        self._asked: float | None = None

    def ask(self) -> None:
        """Ask the loop for a turn, unless it was asked already."""
        if self._asked is None:
            self._asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._asked = None

    @property
    def waiting(self) -> float | None:
        """How many seconds the loop has not had the turn it was asked for; None: it had it."""
        asked = self._asked
        return None if asked is None else time.monotonic() - asked


class Lease:
    """The lease of one member, renewed every `interval` seconds until `stop`.

    The thread renews it, or timers if the time of `loop` is virtual.
    """

    def __init__(
        self, member: LeaseOwner, loop: asyncio.AbstractEventLoop, interval: float
    ) -> None:
        self.is_over = False  # set by the loop, read by the thread
        self._member = member
        self._loop = loop
        self._interval = interval
        self._pulse = Pulse(loop)  # whether the loop turns
        self._asked = False  # the pulse was asked, so a sign of life is next
        if is_virtual(loop):
            self._renew_later()
        else:
            _renewals.add(self, (1 - PATIENCE) * interval)

    def _renew_later(self) -> None:
        call_in_thread(self._loop, self._interval, self._renew)

    def _renew(self) -> None:
        if not self.is_over:
            self._member.renew_from_thread(_FRAME)
            self._renew_later()

    def stop(self) -> None:
        """Stop renewing it."""
        self.is_over = True
        if not is_virtual(self._loop):
            _renewals.drop(self)

    def step(self) -> float | None:
        """Do what is due. Returns the seconds until the next step; None: never."""
        # One interval is a third of the lease. It has two steps::
        #
        #     ask the loop for a turn ──── a quarter ────> has it had one?  yes: Renew
        #         ▲                                              │          no: Activity, "busy"
        #         └──────────────── three quarters ──────────────┘
        #
        # Both messages are a sign of life. A loop that does not turn cannot answer what it is
        # doing, so the thread looks at its stack and says it unasked. `aiodist status` shows that
        # for a hang. The question comes a moment before the lease is due, so that the sign of life
        # can carry the answer.
        self._asked = not self._asked
        if self._asked:
            self._pulse.ask()
            return PATIENCE * self._interval
        # A program may end its loop without closing the group. It must not seem alive for ever.
        if self._loop.is_closed():
            self._member.abandon_from_thread()
            return None
        frame: bytes | None = None
        if (waiting := self._pulse.waiting) is not None:
            # Errors are ignored, because a sign of life matters more than what it says.
            with contextlib.suppress(Exception):
                frame = self._member.busy_from_thread(waiting, self._pulse.ident)
        self._member.renew_from_thread(frame or _FRAME)
        return (1 - PATIENCE) * self._interval


class _Renewals:
    """The leases of this process, and the thread that renews them while there are any."""

    def __init__(self) -> None:
        self._numbers = itertools.count()  # so that no two leases are compared
        self.clear()

    def clear(self) -> None:
        """Start without leases and without a thread."""
        # A new lock, because in a forked child a thread that does not exist there may hold the old
        # one.
        # Taken as itself, and not by the condition. An interrupt between two lines of the code of a
        # condition would leave it taken, and no lease would be renewed any more.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, Lease]] = []  # a heap: when the next step of each is due
        self._runs = False

    def add(self, lease: Lease, seconds: float) -> None:
        """Schedule a step of `lease` in so many seconds, unless it is over."""
        with self._lock:
            if lease.is_over:
                return
            if not self._runs:
                # The new thread waits for this lock. If no thread can be made, that is raised, and
                # the next lease tries again, so `_runs` must not be set before.
                threading.Thread(target=self._run, name="aiodist-lease", daemon=True).start()
                self._runs = True
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), lease))
            self._changed.notify()

    def drop(self, lease: Lease) -> None:
        """Drop all steps of `lease`."""
        with self._lock:
            self._due = [one for one in self._due if one[2] is not lease]
            heapq.heapify(self._due)
            self._changed.notify()

    def _run(self) -> None:
        while (lease := self._next()) is not None:
            try:
                seconds = lease.step()
            except Exception:  # this member is in trouble; the others live
                log.exception("a lease could not be renewed")
                seconds = None
            if seconds is not None:
                self.add(lease, seconds)

    def _next(self) -> Lease | None:
        """Wait until a step is due. Returns None if there are no leases."""
        with self._lock:
            while self._due:
                seconds = self._due[0][0] - time.monotonic()
                if seconds <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(seconds)
            self._runs = False
            return None


_renewals = _Renewals()

if hasattr(os, "register_at_fork"):
    # In a child, because the thread and its leases belong to the parent.
    os.register_at_fork(after_in_child=_renewals.clear)
