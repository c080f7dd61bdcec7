"""Renewing the lease of a member: a sign of life now and then, however busy its loop is.

One thread does so for all members of a process, since a loop that computes is not dead. Each lease
takes two steps in turn: the loop is asked for a turn, and somewhat later the sign of life is sent,
which says so if the loop has had none by then.
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
"""A loop that has not turned for this part of the interval is busy: the coordinator is told with
what, since it gets no answer if it asks."""


class Member(Protocol):
    """Whose lease it is. Called from any thread."""

    def renew_from_thread(self, frame: bytes) -> None:
        """Send a sign of life, if there is a connection just now."""

    def busy_from_thread(self, seconds: float, ident: int) -> bytes | None:
        """A sign of life that says what keeps the loop, in thread `ident`, from turning."""

    def abandon_from_thread(self) -> None:
        """The loop is closed: let the others know."""


class Pulse:
    """Whether a loop turns, as seen from another thread. To be made in the thread of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ident = threading.get_ident()
        self._loop = loop
        self._asked: float | None = None

    def ask(self) -> None:
        """Ask the loop for a turn, unless it was asked already."""
        if self._asked is None:
            self._asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._asked = None

    @property
    def waiting(self) -> float | None:
        """For how many seconds it has not had that turn; None: it has."""
        asked = self._asked
        return None if asked is None else time.monotonic() - asked


class Lease:
    """The lease of one member, renewed every `interval` seconds until it is `stop`ped: by the
    thread, or by timers where the time of `loop` is virtual."""

    def __init__(self, member: Member, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self.is_over = False  # set from the loop, looked at by the thread
        self._member = member
        self._loop = loop
        self._interval = interval
        self._pulse = Pulse(loop)  # whether the loop turns
        self._asked = False  # the pulse: then a sign of life is next
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
        """Renew it no more."""
        self.is_over = True
        if not is_virtual(self._loop):
            _renewals.drop(self)

    def step(self) -> float | None:
        """Do what is due. Returns in how many seconds there is more to do; None: never."""
        # One interval, which is a third of the lease, in two steps::
        #
        #     ask the loop for a turn ──── a quarter ────> has it had one?  yes: Renew
        #         ▲                                              │          no: Activity, "busy"
        #         └──────────────── three quarters ──────────────┘
        #
        # Both are a sign of life. But nobody can ask a loop that does not turn what it is doing, so
        # the thread looks at its stack and says it unasked: that is what `aiodist status` shows of
        # a hang.
        # The loop is asked for a turn a moment before the lease is due: whether it has had one by
        # then is what the sign of life says.
        self._asked = not self._asked
        if self._asked:
            self._pulse.ask()
            return PATIENCE * self._interval
        # A program may end its loop and not close the group: it must not seem to be alive for ever.
        if self._loop.is_closed():
            self._member.abandon_from_thread()
            return None
        frame: bytes | None = None
        if (waiting := self._pulse.waiting) is not None:
            # A sign of life matters more than what it says.
            with contextlib.suppress(Exception):
                frame = self._member.busy_from_thread(waiting, self._pulse.ident)
        self._member.renew_from_thread(frame or _FRAME)
        return (1 - PATIENCE) * self._interval


class _Renewals:
    """The leases of this process, and the thread that renews them, as long as there are any."""

    def __init__(self) -> None:
        self._numbers = itertools.count()  # so that no two leases are compared
        self.clear()

    def clear(self) -> None:
        """There are no leases, and there is no thread."""
        # A new one: in a forked child the old one may be held by a thread that does not exist
        # there.
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Lease]] = []  # a heap: when the next step of each is due
        self._runs = False

    def add(self, lease: Lease, seconds: float) -> None:
        """A step of `lease` is due in so many seconds, unless it is over."""
        with self._changed:
            if lease.is_over:
                return
            if not self._runs:
                # It waits for this lock. Where none is to be had, that is raised, and the next
                # lease tries again: it must not find that there is one.
                threading.Thread(target=self._run, name="aiodist-lease", daemon=True).start()
                self._runs = True
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), lease))
            self._changed.notify()

    def drop(self, lease: Lease) -> None:
        """Nothing is due for `lease` any more."""
        with self._changed:
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
        """Wait until a step is due. None: there are no leases."""
        with self._changed:
            while self._due:
                seconds = self._due[0][0] - time.monotonic()
                if seconds <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(seconds)
            self._runs = False
            return None


_renewals = _Renewals()

if hasattr(os, "register_at_fork"):
    # In the child: the thread is the parent's, and so are its leases.
    os.register_at_fork(after_in_child=_renewals.clear)
