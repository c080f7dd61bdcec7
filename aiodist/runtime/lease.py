"""Renewing the lease of a member: a sign of life now and then, however busy its loop is."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

from aiodist.transports.surroundings import is_virtual
from aiodist.wire.messages import Renew, encode_message

_FRAME = encode_message(Renew())


class Member(Protocol):
    """Whose lease it is. Called from any thread."""

    def renew_from_thread(self, frame: bytes) -> None:
        """Send a sign of life, if there is a connection just now."""

    def abandon_from_thread(self) -> None:
        """The loop is closed: let the others know."""


def renew(
    member: Member, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    """Renew every `interval` seconds, until `stop`: from a thread, for a loop that computes is not
    dead; by timers where the time of `loop` is virtual."""
    if is_virtual(loop):
        loop.call_later(interval, _renew_once, member, loop, stop, interval)
        return
    threading.Thread(
        target=_renew_for_ever,
        args=(member, loop, stop, interval),
        name="aiodist-lease",
        daemon=True,
    ).start()


def _renew_for_ever(
    member: Member, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    while not stop.wait(interval):
        if loop.is_closed():
            member.abandon_from_thread()
            return
        member.renew_from_thread(_FRAME)


def _renew_once(
    member: Member, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    if not stop.is_set():
        member.renew_from_thread(_FRAME)
        loop.call_later(interval, _renew_once, member, loop, stop, interval)
