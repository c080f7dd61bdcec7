"""Links over several connections: as those over one, except for questions to the system."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from typing import cast

from aiodist.transports.base import Receiver
from aiodist.transports.bundle import Bundle
from aiodist.transports.stream import StreamLink
from aiodist.transports.tls import TlsContexts, TlsLink


class BundledLink(StreamLink):
    """A link whose socket is a `Bundle`."""

    __slots__ = ()

    _socket: Bundle  # type: ignore[assignment]

    def start(self) -> None:
        self._socket.tell(self._writable, self._cannot_send)
        if not self._closed:
            self._socket.watch(self._receive)
            self._reading = True

    def poll(self) -> bool:
        if not (self._polling or self._busy or self._severed or self._closed):
            self._socket.push()
        return super().poll()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._socket.arm(self._writable)

    def _disarm(self) -> None:
        self._armed = False
        self._socket.disarm()

    @property
    def _is_out(self) -> bool:
        return super()._is_out and not self._socket.has_rest

    def _underway(self) -> int | None:
        return self._socket.unacknowledged()

    def open_process(self) -> io.FileIO | None:
        return None

    def listen_for(self, seconds: float) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.listen_for(seconds)

    def is_unanswered(self, seconds: float) -> bool:
        return not (self._closed or self._severed) and self._socket.is_unanswered(seconds)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._socket.unwatch()

    def _disconnect(self) -> None:
        if not self._loop.is_closed():
            self._socket.forget()
        self._reading = self._armed = False
        self._socket.close()


class BundledTlsLink(TlsLink, BundledLink):
    """A link over several connections, encrypted: one stream of TLS over all of them."""

    __slots__ = ()


def link_over(
    loop: asyncio.AbstractEventLoop,
    sock: object,
    tls: TlsContexts | None,
    *,
    peer_name: str,
    receiver: Receiver | None,
    host: str | None,
) -> StreamLink:
    """Make a link over a TCP socket or a bundle to `host` (None: that has connected to us)."""
    bundled = isinstance(sock, Bundle)
    over = cast("socket.socket", sock)
    if tls is None:
        kind = BundledLink if bundled else StreamLink
        return kind(loop, over, kind="tcp", peer_name=peer_name, receiver=receiver)
    encrypted = BundledTlsLink if bundled else TlsLink
    context = tls.server if host is None else tls.client
    return encrypted(
        loop, over, context, peer_name=peer_name, receiver=receiver, server_hostname=host
    )
