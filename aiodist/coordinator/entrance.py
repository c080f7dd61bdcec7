"""The listening socket of the coordinator, and connections that have not proved their identity."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl as tls
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from aiodist.coordinator.connection import HANDSHAKE_SECONDS, Connection, ConnectionOwner, turn_away
from aiodist.coordinator.listening import bind_tcp, bind_unix
from aiodist.transports import inproc_names
from aiodist.transports.certificates import TLS_BROKEN
from aiodist.transports.sockets import Acceptor
from aiodist.transports.unproven import UnprovenConnections
from aiodist.wire.address import Address

logger = logging.getLogger("aiodist.coordinator")

MOMENT_SECONDS = 1.0
"""The seconds that each new connection surely has for its greeting, however many come at once."""


class Entrance:
    """Listen, and make a `Connection` of each new socket.

    The `owner` hears of connections that have a transport. `ssl`: the context of a listener that
    speaks TLS.
    """

    def __init__(
        self, owner: ConnectionOwner, ssl: tls.SSLContext | None, numbers: Iterator[int]
    ) -> None:
        """`numbers`: the numbers for new connections."""
        self._owner = owner
        self._ssl = ssl
        self._numbers = numbers
        # All of this runs on this loop; inproc connections come from other threads.
        self._loop = asyncio.get_running_loop()
        self._at: Address | None = None  # the listening address; None: closed
        self._acceptor: Acceptor | None = None  # None if it does not listen, or for inproc
        self._file: os.stat_result | None = None  # the socket file of a unix address
        # A connection is first a task in `_adopting`, until it has a transport (and TLS, which
        # takes a while). Then it belongs to the owner, which hears of its end. Until its identity
        # is proved it is also in `_unproven`, which has a limit and may drop it for a newer one.
        self._unproven: UnprovenConnections[Connection] = UnprovenConnections(
            logger, moment=MOMENT_SECONDS
        )
        # Those without a transport yet, with their sockets.
        self._adopting: dict[asyncio.Task[None], tuple[Connection, socket.socket]] = {}

    async def open(self, wanted: Address) -> Address:
        """Listen, and return the address with its port. Raises OSError."""
        if wanted.scheme == "inproc":
            inproc_names.register(wanted.host, self._take_from_anywhere)
            self._at = wanted
            return wanted
        sock = bind_unix(wanted.path) if wanted.scheme == "unix" else await bind_tcp(wanted)
        address = wanted
        if wanted.scheme == "unix":
            self._file = os.stat(wanted.path)
        else:
            address = Address(wanted.scheme, wanted.host, sock.getsockname()[1])
        self._at = address
        self._acceptor = Acceptor(self._loop, sock, str(address), self._take)
        return address

    def shut(self) -> None:
        """Accept no more connections. Existing ones stay. Idempotent."""
        address, self._at = self._at, None
        if address is not None and address.scheme == "inproc":
            inproc_names.unregister(address.host)
        if address is not None and self._file is not None:
            # Another coordinator may have replaced the file. While the socket is open, no other
            # file has its number.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(address.path), self._file):
                    os.unlink(address.path)
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    async def clear(self) -> None:
        """Drop all connections that have no transport yet, and wait until there are none."""
        for connection, _ in self._adopting.values():
            if connection.adopting is not None:  # else it is about to end by itself
                connection.drop()
        await asyncio.gather(*self._adopting, return_exceptions=True)

    def let_in(self, connection: Connection) -> None:
        """The connection has proved its identity, or is gone. Idempotent."""
        self._unproven.discard(connection)

    def close_in_child(self, null: int) -> None:
        """In a forked child, close its copy of the socket that listens.

        The null device replaces those of connections without a transport.
        """
        for _, sock in self._adopting.values():
            if sock.fileno() >= 0:
                os.dup2(null, sock.fileno())
        if self._acceptor is not None:
            self._acceptor.close_in_child()

    def _take_from_anywhere(self, sock: socket.socket) -> None:
        """Take a connection of this process, perhaps from another thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, sock)
        except RuntimeError as error:  # the loop was closed without stopping the coordinator
            sock.close()
            raise ConnectionRefusedError(f"the coordinator's loop is closed: {error}") from None

    def _take(self, sock: socket.socket) -> None:
        """Take a new connection. Raises OSError if the peer has closed it already."""
        if self._at is None:
            sock.close()
            return
        sock.setblocking(False)
        connection = Connection(self._owner, next(self._numbers), sock)
        if not self._unproven.add(connection, self._loop.time()):
            self._owner.totals.refused["crowded"] += 1
            turn_away(sock, encrypted=self._ssl is not None)
            return
        task = self._loop.create_task(self._adopt(connection, sock), name="aiodist adopt")
        connection.adopting = task
        self._adopting[task] = connection, sock
        task.add_done_callback(partial(self._adopted, connection, sock))

    async def _adopt(self, connection: Connection, sock: socket.socket) -> None:
        limit = None if self._ssl is None else HANDSHAKE_SECONDS
        await self._loop.connect_accepted_socket(
            lambda: connection, sock, ssl=self._ssl, ssl_handshake_timeout=limit
        )

    def _adopted(
        self, connection: Connection, sock: socket.socket, task: asyncio.Task[None]
    ) -> None:
        del self._adopting[task]
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and error is None:
            return
        self._unproven.discard(connection)
        sock.close()
        if isinstance(error, tls.SSLError) and not isinstance(error, TLS_BROKEN):
            # The peer may not hear why, because asyncio does not send TLS alerts.
            self._owner.sparing.warning(
                "of TLS",
                "refused the connection from %s, because its TLS handshake failed: %s",
                connection.peer,
                error,
                extra={"event": "TLS failed", "peer": connection.peer, "reason": str(error)},
            )
        elif isinstance(error, OSError):
            logger.debug("no connection with %s: %s", connection.peer, error)
        elif error is not None:
            raise error  # unexpected: the loop logs it
        elif connection.adopting is None:
            # It was dropped at the moment when it got a transport. uvloop closes the transport,
            # too, but calls nothing.
            connection.connection_lost(None)
