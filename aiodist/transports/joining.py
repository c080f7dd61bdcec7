"""How the connections of a bundle find each other.

Who dials makes them, and says over each which bundle it is a part of, and its index there. Who
listens reads that before anything else, and answers by one byte once all are there: until then
nothing is sent. Where it does not answer, an ordinary connection is made instead, so either side
may find that there are too many bundles already. A name is of random bytes: nobody else can add a
part to a bundle, or keep one of its places::

    dialer     connects 8 times, PART name 0, PART name 1, …  ────>  listener: all are there
    dialer     sends over all of them        <──────────────  JOINED
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Sequence

from aiodist.transports.base import Link
from aiodist.transports.bundle import Bundle
from aiodist.transports.framed import FramedLink
from aiodist.transports.sockets import SocketListener, give, log
from aiodist.transports.unproven import UnprovenConnections, most_connections

PARTS = 8
"""Connections of a bundle. With 0.1 % lost and 20 ms there and back, one of CUBIC takes a fifth of
a line of 50 MB/s, four take two thirds, and eight nearly all of it."""

FILES_SHARE = 4
"""Bundles may have this part of the files that the process may open."""

MAGIC = b"bundle1\n"
"""The first bytes of a part. No frame and no TLS connection begins so."""

JOINED = b"\1"

_PART = struct.Struct(">8s16sB")

PATIENCE = 10.0
"""Seconds within which who has connected says the first bytes, and the other parts come."""

_bundles: weakref.WeakSet[Bundle] = weakref.WeakSet()
"""The bundles of this process: each takes `PARTS` of its files."""


def has_room() -> bool:
    """Whether this process can afford the files of one bundle more."""
    there = sum(not bundle.is_closed for bundle in _bundles)
    return (there + 1) * PARTS <= most_connections(files_share=FILES_SHARE)


def new_bundle(loop: asyncio.AbstractEventLoop, socks: Sequence[socket.socket]) -> Bundle:
    """A bundle of connections, which counts until it is closed."""
    bundle = Bundle(loop, socks)
    _bundles.add(bundle)
    return bundle


async def join(loop: asyncio.AbstractEventLoop, socks: Sequence[socket.socket]) -> Bundle:
    """Make one of connections that were just made to the same listener. Raises OSError."""
    name = secrets.token_bytes(16)
    for index, sock in enumerate(socks):
        await loop.sock_sendall(sock, _PART.pack(MAGIC, name, index))
    if await loop.sock_recv(socks[0], 1) != JOINED:
        raise ConnectionResetError("who listens takes no bundle of connections")
    return new_bundle(loop, socks)


class Arrival:
    """A connection that has not said whether it is a part, or whose other parts have not come."""

    def __init__(self, listener: BundleListener, sock: socket.socket) -> None:
        where = sock.getpeername()
        self.host = str(where[0])
        self.peer = f"{self.host}:{where[1]}"
        self.sock = sock
        self.bundle: tuple[str, bytes] | None = None  # that it is a part of
        self._listener = listener
        self._said = b""
        self._timer = listener.loop.call_later(PATIENCE, self._late)
        listener.loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            # What an ordinary connection says stays where its link reads it.
            first = self._said or self.sock.recv(1, socket.MSG_PEEK)
            if first and first[:1] != MAGIC[:1]:
                self.release()
                self._listener.take_link(self.sock)
                return
            data = self.sock.recv(_PART.size - len(self._said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._said += data
        if not data:
            self.drop()
        elif len(self._said) == _PART.size:
            magic, name, index = _PART.unpack(self._said)
            if magic == MAGIC and index < PARTS:
                self.bundle = self.host, name
                self._listener.loop.remove_reader(self.sock.fileno())
                self._listener.take_part(self, index)
            else:
                self.drop()

    def _late(self) -> None:
        if self.bundle is None:
            self._readable()  # where it was this loop that did not turn, its words lie there
        if self._listener.awaits(self):
            self.drop()

    def release(self) -> None:
        """Its socket is the caller's from now on."""
        self._timer.cancel()
        if not self._listener.loop.is_closed():
            self._listener.loop.remove_reader(self.sock.fileno())
        self._listener.forget(self)

    def drop(self) -> None:
        """Close it, and the other parts of its bundle."""
        self.release()
        self.sock.close()
        self._listener.break_up(self)


class BundleListener(SocketListener):
    """Makes links of connections, and of bundles of them.

    `is_far(sock)` says whether a connection may be a part: then it waits for the first bytes.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        address: str,
        admit: Callable[[socket.socket | Bundle], FramedLink],
        accept: Callable[[Link], None],
        is_far: Callable[[socket.socket], bool],
    ) -> None:
        super().__init__(loop, sock, address, admit, accept)
        self.loop = loop
        self._link_over = admit
        self._is_far = is_far
        # Nobody of them is known: they are bounded as those are that have not greeted.
        self._arrivals: UnprovenConnections[Arrival] = UnprovenConnections(log)
        self._awaited: dict[Arrival, None] = {}
        self._parts: dict[tuple[str, bytes], dict[int, Arrival]] = {}  # of incomplete bundles

    def _admitted(self, sock: socket.socket) -> None:
        if self._is_far(sock):
            arrival = Arrival(self, sock)
            self._awaited[arrival] = None
            self._arrivals.add(arrival, self.loop.time())
        else:
            super()._admitted(sock)

    def take_link(self, sock: socket.socket) -> None:
        """Make a link of a connection that is not a part of a bundle."""
        try:
            super()._admitted(sock)
        except OSError as error:  # gone again before we looked
            log.debug("%s lost a new connection: %s", self.address, error)
            sock.close()

    def take_part(self, arrival: Arrival, index: int) -> None:
        """Take a connection as the part `index` of its bundle. With the last part that is made."""
        assert arrival.bundle is not None
        parts = self._parts.setdefault(arrival.bundle, {})
        if index in parts:
            arrival.drop()
            return
        parts[index] = arrival
        if len(parts) < PARTS:
            return
        if not has_room():
            arrival.drop()
            return
        del self._parts[arrival.bundle]
        for part in parts.values():
            part.release()
        socks = [parts[index].sock for index in range(PARTS)]
        bundle = new_bundle(self.loop, socks)
        try:
            socks[0].send(JOINED)
            link = self._link_over(bundle)
        except OSError as error:
            log.debug("%s lost a new bundle: %s", self.address, error)
            bundle.close()
            return
        give(link, self._accept, self.address)

    def awaits(self, arrival: Arrival) -> bool:
        """Whether a connection has not said yet what it is, or its other parts have not come."""
        return arrival in self._awaited

    def forget(self, arrival: Arrival) -> None:
        """Wait for a connection no more: it is a part or a link now, or it is gone."""
        self._awaited.pop(arrival, None)
        self._arrivals.discard(arrival)

    def break_up(self, arrival: Arrival) -> None:
        """A part is closed: close the others that have come."""
        parts = self._parts.pop(arrival.bundle, {}) if arrival.bundle is not None else {}
        for part in parts.values():
            if part is not arrival:
                part.drop()

    def close(self) -> None:
        super().close()
        for arrival in list(self._awaited):
            arrival.drop()

    def close_in_child(self) -> None:
        super().close_in_child()
        for arrival in self._awaited:
            arrival.sock.close()
