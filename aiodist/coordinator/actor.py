"""The coordinator actor: the membership state machine behind a listening socket.

It carries control messages only, because bulk data goes straight between members. One event loop
owns it, and nothing in here is called from another thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import ssl as tls
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiodist.coordinator.alarm import Alarm
from aiodist.coordinator.connection import Connection
from aiodist.coordinator.encoding import Encoder
from aiodist.coordinator.entrance import Entrance
from aiodist.coordinator.journal import Journal
from aiodist.coordinator.state_file import StateFile
from aiodist.coordinator.totals import Totals
from aiodist.environment import token_in
from aiodist.errors import CoordinatorLostError
from aiodist.membership.effects import (
    Close,
    Disconnected,
    Drain,
    Effect,
    Event,
    Keep,
    Note,
    Received,
    SendMessage,
    Tick,
)
from aiodist.membership.machine import Membership
from aiodist.transports.sparing import Sparing
from aiodist.transports.surroundings import closed_on_error, exact_time
from aiodist.wire.address import Address, parse_address
from aiodist.wire.averaging import averager_of
from aiodist.wire.channels import channel_of, participant_in
from aiodist.wire.codec import encode_message
from aiodist.wire.counts import Counts, CountsRequest
from aiodist.wire.messages import Clock, ClockRequest, Goodbye, Message, Status, StatusRequest
from aiodist.wire.proof import secret_of
from aiodist.wire.returning import Rejoin, ViewWanted

logger = logging.getLogger("aiodist.coordinator")

GOODBYE_SECONDS = 1.0
"""Seconds that `stop` waits for members to read the goodbye."""

_COUNTS_REQUEST = encode_message(CountsRequest())

_BELOW_DEBUG = logging.DEBUG - 5

_LEVELS = {
    "lost": logging.WARNING,
    "silent": logging.WARNING,
    "join refused": logging.WARNING,
    "return refused": logging.WARNING,
    "stalled": logging.WARNING,
    "stall over": logging.WARNING,  # as loud as its beginning
    "aborted": logging.INFO,
    "formed": logging.INFO,
    "restored": logging.INFO,
}


class Coordinator:
    """Keep track of the members of all groups. Use it as an async context manager.

    Args:
        address: where to listen: ``tcp://host:port`` (port 0 picks a free one), ``tls://``,
            ``unix:///path``, ``inproc://name``.
        token: the secret that members have to prove (None: AIODIST_TOKEN if set, as in `connect`).
            It is never sent.
        ssl: a server-side context; makes ``tcp://`` the same as ``tls://``.
        state: a file that keeps groups, epochs and stores over restarts, because everything is on
            disk before a member is told. The file is made if it does not exist, readable for this
            user only. Two coordinators cannot share one. Without it, the next coordinator learns
            of groups from their members, but their stores are lost.
        force: start even if the last acknowledged writes in that file are lost.
        returns: whether members look for another coordinator at the same address when this one goes
            away.
        recovery: seconds after the start in which no group forms, so that members of earlier groups
            can come back first.

    A connection is closed and logged to ``aiodist.coordinator`` if it sends bad bytes or a wrong
    token, or does not read. Other connections do not notice.

    For example::

        async with aiodist.Coordinator("tcp://127.0.0.1:0", token="secret") as coordinator:
            group = await aiodist.connect(coordinator.address, size=1, token="secret")
            await group.close()
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        ssl: tls.SSLContext | None = None,
        state: str | os.PathLike[str] | None = None,
        force: bool = False,
        returns: bool = True,
        recovery: float = 0.0,
    ) -> None:
        wanted = parse_address(address)
        if wanted.scheme == "tls" and ssl is None:
            raise ValueError(f"{address} needs ssl=, a server-side ssl.SSLContext")
        if ssl is not None:
            if wanted.scheme not in ("tcp", "tls"):
                raise ValueError(f"ssl= is for tcp:// and tls:// addresses, not for {address}")
            wanted = Address("tls", wanted.host, wanted.port)
        self.token = secret_of(token_in(os.environ) if token is None else token)
        self._wanted = wanted  # where to listen; `_address` has the port that it got
        self._address: Address | None = None
        self._ssl = ssl
        self._state = None if state is None else Path(state)
        self._force = force
        self.returns = returns
        # The state file keeps the name over restarts.
        self.name = secrets.token_hex(16)
        self.incarnation = 1  # the number of starts with that state file
        self._recovery = recovery
        self._journal: Journal | None = None  # writes the state file, if there is one
        # done, with the error, if the state file cannot be written
        self._failure: asyncio.Future[OSError]
        self._stopping = False  # the machine gets no more events
        self.totals = totals = Totals()  # counts since this object was made
        self.sparing = Sparing(logger)  # warns of strangers, but not each time
        # They get each event that may be logged.
        self.observers: list[Callable[[Note], None]] = [self._log, totals.note]
        self._machine: Membership  # decides everything; `start` makes this and the next three
        self._loop: asyncio.AbstractEventLoop  # the loop of `start`, on which everything runs
        self._entrance: Entrance
        self._alarm: Alarm  # rings when the machine has something due
        self.stops_ranks = False
        """Whether a launcher stops the ranks now: then losses are logged at DEBUG, because the
        launcher expects them."""
        # Whether the launcher is stopping its ranks: then it expects their loss.
        self.is_run_over = False
        self._connections: dict[int, Connection] = {}  # by number; those with a transport
        # By the number of the connection that each stands for.
        self._surveys: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        # Connections and surveys take their numbers from one sequence.
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()  # set after every event, so that `stop` looks again

    @property
    def address(self) -> str:
        """The listening address, with the port. Raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the coordinator does not listen: call start() first")
        return str(self._address)

    async def start(self) -> None:
        """Listen.

        Raises OSError (EADDRINUSE; EWOULDBLOCK if another coordinator has the state file), and
        ValueError if the state file is damaged or no state file.
        """
        if self._address is not None:
            raise RuntimeError(f"the coordinator listens already, on {self._address}")
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._stopping = False
        self._entrance = Entrance(self, self._ssl, self._numbers)
        self._alarm = Alarm(self._loop, lambda: self._step(Tick()))
        now = self._loop.time()
        self._machine = Membership(
            wall_offset=time.time() - now,
            keep=self._state is not None,
            form_after=now + self._recovery,
        )
        if self._state is not None:
            self._recall(StateFile(self._state, force=self._force), now)
        try:
            self._address = await self._entrance.open(self._wanted)
        except BaseException:
            if self._journal is not None:
                await self._journal.close()
            raise
        self._arm()
        logger.info(
            "listening on %s",
            self._address,
            extra={"event": "listening", "address": str(self._address)},
        )

    def _recall(self, file: StateFile, now: float) -> None:
        """Read what an earlier coordinator has written."""
        with closed_on_error(file):
            if file.saved is not None:
                self.name = file.saved.coordinator
                self.incarnation = file.saved.incarnation + 1
                self._machine.restore(file.saved.records, now)
            self._journal = Journal(
                file,
                self.name,
                self.incarnation,
                records=self._machine.records,
                carry_out=self._carry_out,
                failed=self._cannot_write,
            )

    async def failed(self) -> OSError:
        """Wait until the state cannot be written, and return the error.

        By then this coordinator has closed all connections. Stop it.
        """
        return await asyncio.shield(self._failure)

    async def emptied(self) -> None:
        """Wait until there is no group, or until this coordinator has stopped."""
        # If the state cannot be written, groups do not end here any more.
        while not (self._address is None or self._stopping or self._machine.is_empty):
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, drain: float = 0.0) -> None:
        """Take no more joins, wait at most `drain` seconds for all groups to end, say goodbye, and
        close.

        Idempotent. A second call while the first waits returns at once.
        """
        if self._address is None:
            return
        if drain > 0 and not self._stopping:
            self._step(Drain())
            try:
                async with asyncio.timeout(drain):
                    await self.emptied()
            except TimeoutError:
                pass
        address, self._address = self._address, None
        if address is None:  # another call was faster
            return
        # The order matters, so that every member hears what was decided::
        #
        #     no new connection comes in
        #     what waits for the disk is written, and then carried out
        #     all are told Goodbye; their connections end, or are ended after a second
        #     the state file is let go of
        #
        # A coordinator that starts with the same file is refused until the last step (`_locked`),
        # so there are never two that tell members something. No new connection comes from here on,
        # so what is left can be counted.
        self._entrance.shut()
        self._alarm.cancel()
        await self._close_connections()
        if self._journal is not None:
            await self._journal.close()
            self._journal = None
        self._changed.set()
        logger.info(
            "stopped listening on %s",
            address,
            extra={"event": "stopped", "address": str(address)},
        )

    async def __aenter__(self) -> Coordinator:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def status(self) -> dict[str, Any]:
        """Describe groups with their epochs and members, in plain data.

        Keys: "address", "draining"; "groups", a list of dicts with "name", "run_id", "wanted"
        (size), "epoch", "size", "members", "waiting", "lost", "left", "absent", "store", "channel",
        "averager". For "channels", see `aiodist.membership.channels.status`, and for "averagers",
        see `aiodist.membership.averagers.Room.status`.
        """
        return {"address": self.address, **self._machine.status()}

    async def survey(self, *, counts: bool = False) -> dict[str, Any]:
        """Return what `status` does, and what the members are doing.

        Each member has a second to answer. Members have "silent" and "doing", and groups have
        "findings", as in ``aiodist status --json``. `counts`: also ask members for their counts,
        for `totals`, and let them measure their operations from the first such call on. Raises
        CoordinatorLostError if the coordinator stops meanwhile.
        """
        if self._address is None or self._stopping:
            raise CoordinatorLostError("the coordinator does not listen: call start() first")
        # For the state machine this is one more connection that asks and then closes, so the same
        # limits apply to it.
        if counts:
            # Ask for counts first, so that a member that has answered the survey has sent its
            # counts, too.
            for connection in list(self._connections.values()):
                if connection.is_welcome:
                    connection.send(_COUNTS_REQUEST)
        number = next(self._numbers)
        answer = self._surveys[number] = self._loop.create_future()
        try:
            self._step(Received(number, 1, StatusRequest(ask_members=True)))
            return {"address": self.address, **await answer}
        finally:
            del self._surveys[number]
            self._step(Disconnected(number, "it has its answer"))

    @property
    def state_health(self) -> tuple[float, int] | None:
        """Seconds since the last write of the state file, and how often it could not be made
        shorter.

        None if there is no state file. If the file cannot be written, see `failed`.
        """
        if self._journal is None:
            return None
        return max(0.0, self._loop.time() - self._journal.written_at), self._journal.failures

    def close_fds_after_fork(self) -> None:
        """Close all sockets that a forked child inherited. Call it in the child.

        Else the port and the connections would outlive the parent.
        """
        null = os.open(os.devnull, os.O_RDWR)
        for connection in self._connections.values():
            connection.detach_after_fork(null)
        os.close(null)
        self._entrance.close_in_child()
        if self._journal is not None:
            self._journal.close_after_fork()

    # Called by connections.

    def opened(self, connection: Connection) -> None:
        connection.adopting = None
        self._connections[connection.number] = connection

    def welcomed(self, connection: Connection) -> None:
        self._entrance.let_in(connection)

    def received(self, connection: Connection, request: int, message: Message) -> None:
        if isinstance(message, ClockRequest):  # the time is no state and does not wait for the disk
            connection.send(encode_message(Clock(exact_time(self._loop)), request))
            return
        if isinstance(message, Counts):
            self.totals.heard(connection.number, message)
            return
        if isinstance(message, Rejoin):
            self.totals.returns(connection.number)
        self._step(Received(connection.number, request, message))

    def closed(self, connection: Connection, reason: str) -> None:
        # The loop and the `Entrance` may both report the end. The machine must hear it once.
        if self._connections.pop(connection.number, None) is None:
            return
        self._entrance.let_in(connection)
        self.totals.gone(connection.number)
        self._step(Disconnected(connection.number, reason))

    # Helpers.

    def _step(self, event: Event) -> None:
        if self._stopping:
            self._changed.set()
            return  # a member that goes now comes back to the next coordinator
        effects = self._machine.step(event, self._loop.time())
        if self._journal is None:
            self._carry_out(effects)
        else:
            self._journal.submit(effects)
        self._arm()
        self._changed.set()

    def _cannot_write(self, error: OSError) -> None:
        """Close all connections, because no member may be told what is not on disk."""
        logger.critical(
            "cannot write %s: %s; closing all connections",
            self._state,
            error,
            extra={"event": "state not written", "error": str(error)},
        )
        self._stopping = True
        self._changed.set()
        self._end_surveys(f"the coordinator cannot write its state: {error}")
        self._entrance.shut()
        for connection in list(self._connections.values()):
            connection.abort()
        if not self._failure.done():
            self._failure.set_result(error)

    def _carry_out(self, effects: list[Effect]) -> None:
        # The machine's state already contains these effects, so a skipped message would be a member
        # that was not told. If a message cannot be sent, `Connection.send` closes the connection,
        # and its end is the next event.
        encoder = Encoder()
        for effect in effects:
            if isinstance(effect, Note):
                for observe in self.observers:
                    observe(effect)
                continue
            if isinstance(effect, Keep):
                continue
            connection = self._connections.get(effect.conn)
            if connection is None:
                # The connection is gone, or it stands for a survey.
                answer = self._surveys.get(effect.conn)
                match effect:
                    case SendMessage(message=Status(status)) if (
                        answer is not None and not answer.done()
                    ):
                        answer.set_result(status)
                continue
            if isinstance(effect, Close):
                connection.close(effect.reason)
            else:
                if isinstance(effect.message, ViewWanted):
                    connection.expect_view()
                connection.send(encoder.frame(effect.message, effect.request))

    def _log(self, note: Note) -> None:
        level = _LEVELS.get(note.event, logging.DEBUG)
        name = note.fields.get("group", "")
        if note.event == "lost" and self.is_run_over:
            level = logging.DEBUG
        elif averager_of(name) and level < logging.WARNING:
            level = min(level, logging.DEBUG)  # each member of an averager is a group of one
        elif channel_of(name) and not (participant_in(name) and level >= logging.WARNING):
            # Participants of a channel connect and leave all the time, in small groups of our own.
            # But the loss of one is worth a line.
            level = _BELOW_DEBUG
        if logger.isEnabledFor(level):
            said = ", ".join(f"{key}={value}" for key, value in note.fields.items())
            extra = {"event": note.event, **note.fields}
            logger.log(level, "%s: %s", note.event, said, extra=extra)

    def _end_surveys(self, reason: str) -> None:
        for answer in self._surveys.values():
            if not answer.done():
                answer.set_exception(CoordinatorLostError(reason))

    def _arm(self) -> None:
        """Set the timer for the next tick. A tick that comes too early does no harm."""
        when = self._machine.deadline()
        if when is not None and self._address is not None:
            self._alarm.ring_by(when)

    async def _close_connections(self) -> None:
        await self._entrance.clear()
        if self._journal is not None:
            await self._journal.idle()
        self._stopping = True
        self._end_surveys("the coordinator stopped")
        # A goodbye must not overtake an answer, so effects that wait for the disk come first.
        goodbye = encode_message(Goodbye())
        for connection in list(self._connections.values()):
            connection.send(goodbye)
            connection.close("the coordinator stopped")
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._until_no_connections()
        except TimeoutError:
            for connection in list(self._connections.values()):
                connection.abort()
            await self._until_no_connections()

    async def _until_no_connections(self) -> None:
        while self._connections:
            self._changed.clear()
            await self._changed.wait()
