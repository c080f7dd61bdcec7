"""Connections to what is served over HTTP: few, and none for long without a request.

They need no token, so they must not take from the coordinator what members need. They have a small
share of the files, and the oldest is closed for a new one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from math import inf
from typing import cast

from aiohttp import web

from aiodist.transports.unproven import UnprovenConnections, most_connections

logger = logging.getLogger("aiodist.daemon")

REQUEST_SECONDS = 10.0
"""Seconds for a connection to bring a whole request, to read on in a long answer, and after the
answer to bring the next request."""

SEND_BYTES = 1 << 17
"""Bytes of an answer that are with the system."""

MOST = 256
FILES_SHARE = 16
"""The part of the process's files that may be such connections, at most MOST. One host has at most
half of them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def most_visits() -> int:
    """Return how many connections this process can afford."""
    return most_connections(MOST, FILES_SHARE)


class Visits:
    """All connections.

    `attend` is the middleware that notes which of them have brought a request. Call `serve` first.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room: UnprovenConnections[Visit] = UnprovenConnections(
            logger, most_visits(), what="are open for HTTP"
        )
        self._by_handler: dict[asyncio.BaseProtocol, Visit] = {}
        self._adopting: set[asyncio.Task[None]] = set()
        self._make: Callable[[], asyncio.Protocol]

    def serve(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Set the function that makes the HTTP protocol of one connection."""
        self._make = make

    def take(self, sock: socket.socket) -> None:
        """Take in a connection. Raises OSError if it is gone already."""
        visit = Visit(self, self._make(), *sock.getpeername()[:2])
        self._by_handler[visit.handler] = visit
        self._room.add(visit, self._loop.time())
        task = self._loop.create_task(self._adopt(visit, sock), name="aiodist visit")
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _adopt(self, visit: Visit, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: visit, sock)
        except OSError as error:
            logger.debug("no connection with %s: %s", visit.peer, error)
            self.gone(visit)
            sock.close()

    def gone(self, visit: Visit) -> None:
        self._room.discard(visit)
        self._by_handler.pop(visit.handler, None)

    @web.middleware
    async def attend(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        visit = self._by_handler.get(request.protocol)
        if visit is None:  # it was closed meanwhile
            return await handler(request)
        visit.has_asked()
        try:
            return await handler(request)
        finally:
            visit.may_ask()

    async def end(self) -> None:
        """Wait until nothing is under way any more."""
        await asyncio.gather(*self._adopting, return_exceptions=True)


class Visit(asyncio.Protocol):
    """One connection: passes everything on to `handler`, and ends it when its time is over."""

    def __init__(self, visits: Visits, handler: asyncio.Protocol, host: str, port: int) -> None:
        self.host = host
        self.peer = f"{host}:{port}"  # for the log
        self.handler = handler
        self._visits = visits
        self._transport: asyncio.Transport | None = None  # the connection; None: not made yet
        self._timer: asyncio.TimerHandle | None = None  # None: it need do nothing now
        self._dropped = False  # its handler hears nothing more

    def has_asked(self) -> None:
        """Stop the clock, because it has brought a request, and the answer is our task."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def may_ask(self) -> None:
        """Start the clock, because it gets its answer, and the next request is its task."""
        self.has_asked()
        if self._transport is not None:
            self._timer = self._visits._loop.call_later(REQUEST_SECONDS, self.drop)

    def _reads(self, before: float) -> None:
        """Drop it if it has not read on since `before` bytes of the answer were left."""
        assert self._transport is not None
        left = self._transport.get_write_buffer_size()
        if left < before:
            self.has_asked()
            self._timer = self._visits._loop.call_later(REQUEST_SECONDS, self._reads, left)
        else:
            self.drop()

    def drop(self) -> None:
        """Close at once, without a word."""
        self._dropped = True
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        # A socket takes more once a third of its buffer is free. With a large buffer, that takes
        # long if the other end reads slowly, and looks as if it did not read.
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self.handler.connection_made(transport)
        self.may_ask()
        if self._dropped:
            self.drop()

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received()

    def pause_writing(self) -> None:
        if self._timer is not None:  # else its handler sees to that
            self._reads(inf)
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        if self._timer is not None:
            self.may_ask()
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_asked()
        self._transport = None
        self._visits.gone(self)
        self.handler.connection_lost(exc)
