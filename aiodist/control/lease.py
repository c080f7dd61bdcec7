"""Renewing the lease of a member: a sign of life now and then, however busy its loop is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Protocol

from aiodist.transports.surroundings import call_in_thread, is_virtual
from aiodist.wire.messages import Renew, encode_message

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


def renew(
    member: Member, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    """Renew every `interval` seconds, until `stop`: from a thread, for a loop that computes is not
    dead; by timers where the time of `loop` is virtual."""
    if is_virtual(loop):
        call_in_thread(loop, interval, _renew_once, member, loop, stop, interval)
        return
    threading.Thread(
        target=_renew_for_ever,
        args=(member, loop, stop, interval, Pulse(loop)),
        name="aiodist-lease",
        daemon=True,
    ).start()


def _renew_for_ever(
    member: Member,
    loop: asyncio.AbstractEventLoop,
    stop: threading.Event,
    interval: float,
    pulse: Pulse,
) -> None:
    patience = PATIENCE * interval
    while not stop.wait(interval - patience):
        # The loop is asked for a turn a moment before the lease is due: whether it has had one by
        # then is what the sign of life says.
        pulse.ask()
        if stop.wait(patience):
            return
        # A program may end its loop and not close the group: it must not seem to be alive for ever.
        if loop.is_closed():
            member.abandon_from_thread()
            return
        frame: bytes | None = None
        if (waiting := pulse.waiting) is not None:
            # A sign of life matters more than what it says.
            with contextlib.suppress(Exception):
                frame = member.busy_from_thread(waiting, pulse.ident)
        member.renew_from_thread(frame or _FRAME)


def _renew_once(
    member: Member, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    if not stop.is_set():
        member.renew_from_thread(_FRAME)
        call_in_thread(loop, interval, _renew_once, member, loop, stop, interval)
