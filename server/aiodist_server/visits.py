"""Connections to what is served over HTTP: few, and none for long without a request.

Whoever gets there needs no token, so nothing that it does may take from the coordinator what
members need: these connections have a small share of the files, and the oldest goes for a new one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from aiodist.transports.unproven import UnprovenConnections, most_connections

logger = logging.getLogger("aiodist.daemon")

REQUEST_SECONDS = 10.0
"""How long a connection may take to bring a whole request, and after an answer to read it and bring
the next one."""

MOST = 256
FILES_SHARE = 16
"""Of the files that the process may open, this part may be such connections: at most MOST. No host
has more than half of them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def most_visits() -> int:
    """How many connections this process can afford."""
    return most_connections(MOST, FILES_SHARE)


class Visits:
    """All connections. `attend` is the middleware that tells which of them have brought a request,
    `serve` is to be called before the first of them is taken in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room: UnprovenConnections[Visit] = UnprovenConnections(logger, most_visits())
        self._by_handler: dict[asyncio.BaseProtocol, Visit] = {}
        self._adopting: set[asyncio.Task[None]] = set()
        self._make: Callable[[], asyncio.Protocol]

    def serve(self, make: Callable[[], asyncio.Protocol]) -> None:
        """`make` makes who speaks HTTP with one connection."""
        self._make = make

    def take(self, sock: socket.socket) -> None:
        """A connection has come. Raises OSError where it is gone already."""
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
    """One connection: passes all on to `handler`, and ends it when its time is over."""

    def __init__(self, visits: Visits, handler: asyncio.Protocol, host: str, port: int) -> None:
        self.host = host
        self.peer = f"{host}:{port}"  # who it is, for the log
        self.handler = handler
        self._visits = visits
        self._transport: asyncio.Transport | None = None  # the connection; None: not made yet
        self._timer: asyncio.TimerHandle | None = None  # ends it, unless a request comes
        self._dropped = False  # its handler hears nothing more

    def has_asked(self) -> None:
        """It has brought a request: how long the answer takes is not up to it."""
        if self._timer is not None:
            self._timer.cancel()

    def may_ask(self) -> None:
        """It has its answer: now it has to bring the next request."""
        self.has_asked()
        if self._transport is not None:
            self._timer = self._visits._loop.call_later(REQUEST_SECONDS, self.drop)

    def drop(self) -> None:
        """Close at once, without a word."""
        self._dropped = True
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.handler.connection_made(transport)
        self.may_ask()
        if self._dropped:
            self.drop()

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received()

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_asked()
        self._transport = None
        self._visits.gone(self)
        self.handler.connection_lost(exc)
