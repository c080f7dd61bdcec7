"""Renewing the lease of a member: a sign of life now and then, however busy its loop is."""

from __future__ import annotations

import asyncio
import threading

from aiodist.runtime.control_socket import ControlSocket
from aiodist.transports.surroundings import is_virtual
from aiodist.wire.messages import Renew, encode_message

_FRAME = encode_message(Renew())


def renew(
    sock: ControlSocket, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    """Renew every `interval` seconds, until `stop` or the end of `sock`: from a thread, for a loop
    that computes is not dead; by timers where the time of `loop` is virtual."""
    if is_virtual(loop):
        loop.call_later(interval, _renew_once, sock, loop, stop, interval)
        return
    threading.Thread(
        target=_renew_for_ever,
        args=(sock, loop, stop, interval),
        name="aiodist-lease",
        daemon=True,
    ).start()


def _renew_for_ever(
    sock: ControlSocket, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    while not stop.wait(interval):
        if loop.is_closed():
            # Nobody can use this membership any more: let the others know.
            sock.abandon()
            return
        if not sock.send_from_thread(_FRAME):
            return


def _renew_once(
    sock: ControlSocket, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    if not stop.is_set() and sock.send_from_thread(_FRAME):
        loop.call_later(interval, _renew_once, sock, loop, stop, interval)
