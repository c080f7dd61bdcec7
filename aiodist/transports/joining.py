"""How the connections of a bundle find each other.

The dialer makes them, and sends over each the name of its bundle and its index. The listener reads
that first, and answers with one byte once all have come. Nothing else is sent before. If the
listener does not answer, the dialer makes an ordinary connection instead, so either side may decide
that there are too many bundles. A name is of random bytes, so that no stranger can join a bundle::

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
"""Connections of a bundle. With 0.1 % lost and a round trip of 20 ms on a line of 50 MB/s, one
connection with CUBIC uses a fifth of it. Four use two thirds, and eight nearly all."""

FILES_SHARE = 4
"""The part of the process's files that bundles may take."""

MAGIC = b"bundle1\n"
"""The first bytes of a part. Neither frames nor TLS connections begin with them."""

JOINED = b"\1"

_PART = struct.Struct(">8s16sB")

PATIENCE = 10.0
"""Seconds for a caller to say the first bytes, and for the other parts to come."""

_bundles: weakref.WeakSet[Bundle] = weakref.WeakSet()
"""The bundles of this process. Each takes `PARTS` of its files."""


def has_room() -> bool:
    """Tell whether this process can afford the files of one more bundle."""
    there = sum(not bundle.is_closed for bundle in _bundles)
    return (there + 1) * PARTS <= most_connections(files_share=FILES_SHARE)


def new_bundle(loop: asyncio.AbstractEventLoop, socks: Sequence[socket.socket]) -> Bundle:
    """Make a bundle of connections, which counts until it is closed."""
    bundle = Bundle(loop, socks)
    _bundles.add(bundle)
    return bundle


async def join(loop: asyncio.AbstractEventLoop, socks: Sequence[socket.socket]) -> Bundle:
    """Make a bundle of new connections to the same listener. Raises OSError."""
    name = secrets.token_bytes(16)
    for index, sock in enumerate(socks):
        await loop.sock_sendall(sock, _PART.pack(MAGIC, name, index))
    if await loop.sock_recv(socks[0], 1) != JOINED:
        raise ConnectionResetError("the listener does not accept bundles of connections")
    return new_bundle(loop, socks)


class Arrival:
    """A connection that may be a part, or whose other parts have not come."""

    def __init__(self, listener: BundleListener, sock: socket.socket) -> None:
        where = sock.getpeername()
        self.host = str(where[0])
        self.peer = f"{self.host}:{where[1]}"
        self.sock = sock
        self.bundle: tuple[str, bytes] | None = None  # the bundle that it is a part of
        self._listener = listener
        self._said = b""
        self._timer = listener.loop.call_later(PATIENCE, self._late)
        listener.loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            # The bytes of an ordinary connection stay in the socket for its link.
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
            self._readable()  # if this loop did not turn, the bytes may lie there
        if self._listener.awaits(self):
            self.drop()

    def release(self) -> None:
        """Give its socket to the caller."""
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

    `is_far(sock)` says whether a connection may be a part. Such a connection waits for the first
    bytes.
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
        # They are strangers, so they are bounded as those that have not greeted.
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
        """Take a connection as the part `index` of its bundle. The last part completes it."""
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
        """Tell whether a connection has not said yet what it is, or its other parts have not
        come."""
        return arrival in self._awaited

    def forget(self, arrival: Arrival) -> None:
        """Stop waiting for a connection, because it is a part or a link now, or is gone."""
        self._awaited.pop(arrival, None)
        self._arrivals.discard(arrival)

    def break_up(self, arrival: Arrival) -> None:
        """Close the other parts of a bundle, because a part is closed."""
        parts = self._parts.pop(arrival.bundle, {}) if arrival.bundle is not None else {}
        for part in parts.values():
            if part is not arrival:
                part.drop()

    def close(self) -> None:
        super().close()
        while self._awaited:  # one that is dropped takes the other parts of its bundle along
            next(iter(self._awaited)).drop()

    def close_in_child(self) -> None:
        super().close_in_child()
        for arrival in self._awaited:
            arrival.sock.close()
