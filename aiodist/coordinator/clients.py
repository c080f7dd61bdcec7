"""The connections of a coordinator, from the socket that listens to their goodbye."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import ssl as tls
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiodist.coordinator.connection import Connection
from aiodist.coordinator.encoding import Encoder
from aiodist.coordinator.entrance import Entrance
from aiodist.coordinator.totals import Totals
from aiodist.errors import CoordinatorLostError, MessageTooLargeError, in_words
from aiodist.membership.effects import Close, Disconnected, Event, Received, SendMessage
from aiodist.transports.sparing import Sparing
from aiodist.transports.surroundings import exact_time
from aiodist.wire.address import Address
from aiodist.wire.codec import encode_message
from aiodist.wire.counts import Counts, CountsRequest
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Clock,
    ClockRequest,
    Failed,
    Failure,
    Goodbye,
    Message,
    Status,
    StatusRequest,
)
from aiodist.wire.returning import Rejoin, ViewWanted

log = logging.getLogger("aiodist.coordinator")

GOODBYE_SECONDS = 1.0
"""Seconds that members have to read the goodbye when the coordinator stops."""

_COUNTS_REQUEST = encode_message(CountsRequest())


class Clients:
    """All connections of a coordinator, and its surveys, which stand for connections.

    `hear` gets requests and ends of connections as events.
    """

    def __init__(
        self,
        address: Address,
        ssl: tls.SSLContext | None,
        token: bytes | None,
        returns: bool,
        hear: Callable[[Event], None],
    ) -> None:
        self._wanted = address  # where to listen
        self._ssl = ssl
        self.token = token
        self.returns = returns
        self._hear = hear
        # The state file keeps the name over restarts; `begin` makes these and `_none_left`.
        self.name: str
        self.incarnation: int  # the number of starts with that state file
        self.totals = Totals()
        self.sparing = Sparing(log)  # warns of strangers
        self._entrance: Entrance  # from `open` on
        self._connections: dict[int, Connection] = {}  # by number; those with a transport
        self._surveys: dict[int, asyncio.Future[Mapping[str, Any]]] = {}  # by number, too
        self._numbers = itertools.count(1)  # for connections and surveys
        self._none_left: asyncio.Event  # set if there is no connection

    def begin(self) -> None:
        """Take a new name, because what an earlier start knew is gone without a state file."""
        self.name = secrets.token_hex(16)
        self.incarnation = 1
        self._none_left = asyncio.Event()
        self._none_left.set()

    async def open(self) -> Address:
        """Listen, and return the address with its port. Raises OSError."""
        self._entrance = Entrance(self, self._ssl, self._numbers)
        return await self._entrance.open(self._wanted)

    async def shut(self) -> None:
        """Take no more connections, and wait until each one has a transport or is gone."""
        self._entrance.shut()
        await self._entrance.clear()

    async def dismiss(self) -> None:
        """Say goodbye, and close all connections. Call `shut` first, so that none comes in."""
        self._end_surveys("the coordinator stopped")
        goodbye = encode_message(Goodbye())
        for connection in list(self._connections.values()):
            connection.send(goodbye)
            connection.close("the coordinator stopped")
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._none_left.wait()
        self.abort("the coordinator stopped")
        await self._none_left.wait()

    def abort(self, reason: str) -> None:
        """Take no more connections, and close all at once. Surveys fail with `reason`."""
        self._end_surveys(reason)
        self._entrance.shut()
        for connection in list(self._connections.values()):
            connection.abort()

    def close_fds_after_fork(self) -> None:
        """Close all sockets that a forked child inherited."""
        null = os.open(os.devnull, os.O_RDWR)
        for connection in self._connections.values():
            connection.detach_after_fork(null)
        self._entrance.close_in_child(null)
        os.close(null)

    async def survey(self, *, counts: bool) -> Mapping[str, Any]:
        """Ask all members what they are doing. See `Coordinator.survey`."""
        # For the state machine this is one more connection that asks and then closes, so the same
        # limits apply to it.
        if counts:
            # Ask for counts first, so that a member that has answered the survey has sent its
            # counts, too.
            for connection in list(self._connections.values()):
                if connection.is_welcome:
                    connection.send(_COUNTS_REQUEST)
        number = next(self._numbers)
        self._surveys[number] = asyncio.get_running_loop().create_future()
        try:
            self._hear(Received(number, 1, StatusRequest(ask_members=True)))
            return await self._surveys[number]
        finally:
            del self._surveys[number]
            self._hear(Disconnected(number, "it has its answer"))

    def carry_out(self, effect: SendMessage | Close, encoder: Encoder) -> None:
        # If a connection is closed because of a message, its end is the next event.
        connection = self._connections.get(effect.conn)
        if connection is None:
            # The connection is gone, or it stands for a survey.
            answer = self._surveys.get(effect.conn)
            match effect:
                case SendMessage(message=Status(status)) if answer and not answer.done():
                    answer.set_result(status)
        elif isinstance(effect, Close):
            connection.close(effect.reason)
        else:
            if isinstance(effect.message, ViewWanted):
                connection.expect_view()
            try:
                frame = encoder.frame(effect.message, effect.request)
            except Exception as error:
                # The effects behind this one are still carried out, because other members would not
                # hear of them.
                kind = Failure.TOO_LARGE  # for example, there are too many groups for one status
                if not effect.request or not isinstance(error, MessageTooLargeError):
                    kind = Failure.INVALID
                    log.exception("a %s message cannot be sent", type(effect.message).__name__)
                if not effect.request:
                    connection.close(f"a message to it cannot be sent: {in_words(error)}")
                    return
                # Not closed, because it would ask again over its next connection.
                frame = encode_message(Failed(kind, str(error)[:MAX_TEXT]), effect.request)
            connection.send(frame)

    def _end_surveys(self, reason: str) -> None:
        for answer in self._surveys.values():
            if not answer.done():
                answer.set_exception(CoordinatorLostError(reason))

    # Called by connections.

    def opened(self, connection: Connection) -> None:
        connection.adopting = None
        self._connections[connection.number] = connection
        self._none_left.clear()

    def welcomed(self, connection: Connection) -> None:
        self._entrance.let_in(connection)

    def received(self, connection: Connection, request: int, message: Message) -> None:
        if isinstance(message, ClockRequest):  # the time is no state and does not wait for the disk
            now = exact_time(asyncio.get_running_loop())
            connection.send(encode_message(Clock(now), request))
            return
        if isinstance(message, Counts):
            self.totals.heard(connection.number, message)
            return
        if isinstance(message, Rejoin):
            self.totals.returns(connection.number)
        self._hear(Received(connection.number, request, message))

    def closed(self, connection: Connection, reason: str) -> None:
        # The loop and the `Entrance` may both report the end. The machine must hear it once.
        if self._connections.pop(connection.number, None) is None:
            return
        if not self._connections:
            self._none_left.set()
        self._entrance.let_in(connection)
        self.totals.gone(connection.number)
        self._hear(Disconnected(connection.number, reason))
