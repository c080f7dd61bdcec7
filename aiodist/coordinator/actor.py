"""The coordinator actor: the membership state machine behind a listening socket.

It carries control messages only; bulk data goes straight between members. One loop owns it, and
nothing in here is called from elsewhere.
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
    Send,
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
"""How long `stop` waits for members to read the goodbye."""

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
    """Keeps track of who is a member of which group. An async context manager.

    `address`: where to listen: ``tcp://host:port`` (port 0 picks a free one), ``tls://``,
    ``unix:///path``, ``inproc://name``. `token`: what members have to prove to have (None:
    AIODIST_TOKEN, if it is set, as in `connect`; it is never sent). `ssl`: a server-side context;
    makes ``tcp://`` the same as ``tls://``.

    `state`: a file (made if need be, for this user only) that keeps groups, epochs and stores over
    restarts: what a member was told is on disk before it is told. Two coordinators cannot share
    one. Without it, a coordinator that takes the place of this one learns of the groups from their
    members; what was in their stores is lost. `force`: start also where the last writes in that
    file, which were acknowledged, are lost.

    `returns`: whether members are to look for another coordinator at the same address when this
    one goes away. `recovery`: seconds after the start in which no group forms, so that members of
    groups that were served here before can come back first.

    Bad bytes, a wrong token, a client that does not read: that connection is closed and logged to
    the logger ``aiodist.coordinator``; the others do not notice.

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
        # The same over restarts with one state file, where it is kept.
        self.name = secrets.token_hex(16)
        self.incarnation = 1  # which start with that state file this is
        self._recovery = recovery
        self._journal: Journal | None = None  # writes the state file; None: there is none
        self._failure: asyncio.Future[OSError]  # done, with the error, once that cannot be written
        self._stopping = False  # events are not told to the machine any more
        self.totals = totals = Totals()  # since it was made, for who watches it over time
        self.sparing = Sparing(logger)  # warns of what strangers do, but not each time
        # They hear what is worth a line in a log.
        self.observers: list[Callable[[Note], None]] = [self._log, totals.note]
        self._machine: Membership  # decides all; this and the next three are made by `start`
        self._loop: asyncio.AbstractEventLoop  # the loop of `start`, on which all is done
        self._entrance: Entrance  # listens
        self._alarm: Alarm  # rings when the machine has something due
        self.stops_ranks = False
        """Whether a launcher stops the ranks just now: then losses are logged at DEBUG, because
        they are no news to it."""
        # Whether the launcher that serves it is stopping its ranks: their loss is no news then.
        self.is_run_over = False
        self._connections: dict[int, Connection] = {}  # by number; those with a transport
        # By the number of the connection that each pretends to be.
        self._surveys: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        # Of connections and surveys alike, so that no two are the same.
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()  # set after every event: `stop` looks again

    @property
    def address(self) -> str:
        """Where it listens, with the port it got. Raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the coordinator does not listen: call start() first")
        return str(self._address)

    async def start(self) -> None:
        """Listen. Raises OSError (EADDRINUSE, EWOULDBLOCK for a state file that another coordinator
        has), ValueError for a state file that is none, or damaged."""
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
        """Take up what the coordinator before has written down."""
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
        """Wait until this coordinator cannot serve any more, for what it must keep cannot be
        written: then it has closed all connections, and is to be stopped."""
        return await asyncio.shield(self._failure)

    async def emptied(self) -> None:
        """Wait until there is no group, or this coordinator has stopped. For who serves one as long
        as it is used."""
        # Not longer where what the groups do cannot be written any more.
        while not (self._address is None or self._stopping or self._machine.is_empty):
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, drain: float = 0.0) -> None:
        """Take no more joins, wait until all groups have ended but at most `drain` seconds, say
        goodbye and close. Idempotent; a second call while one waits does not wait."""
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
        if address is None:  # a second call was faster
            return
        # The end, in this order, so that nobody hears less than was decided::
        #
        #     nobody new comes in
        #     what waits for the disk is written, and then carried out
        #     all are told Goodbye; their connections end, or are ended after a second
        #     the state file is let go of
        #
        # A coordinator that starts on the same file meanwhile is refused until the last step
        # (`_locked`), so there are never two that tell members something.
        # From here on nobody new comes, so what is left can be counted.
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
        """Groups with their epochs, members and who waits, as plain data.

        Keys: "address", "draining"; "groups", a list of dicts with "name", "run_id", "wanted"
        (size), "epoch", "size", "members", "waiting", "lost", "left", "absent", "store",
        "channel", "averager"; "channels", see `aiodist.membership.channels.status`; and
        "averagers", see `aiodist.membership.averagers.Room.status`.
        """
        return {"address": self.address, **self._machine.status()}

    async def survey(self, *, counts: bool = False) -> dict[str, Any]:
        """What `status` tells, and what the members are doing: each has a second to answer.

        Every member has "silent" and "doing", and every group "findings", as in ``aiodist status
        --json``. `counts`: have them say as well what they have counted, for `totals`, and measure
        their operations from the first such time on. Raises CoordinatorLostError where the
        coordinator stops meanwhile.
        """
        if self._address is None or self._stopping:
            raise CoordinatorLostError("the coordinator does not listen: nobody can be asked")
        # To the state machine this is one more connection that asks, and then goes: the limits of
        # others are its limits, and it is forgotten as they are.
        if counts:
            # Before they are asked what they do: so who has said that has said this, too.
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
        """Seconds since the state file was written last, and how often it could not be made
        shorter for want of files; None: there is none. (Where it cannot be written: `failed`.)"""
        if self._journal is None:
            return None
        return max(0.0, self._loop.time() - self._journal.written_at), self._journal.failures

    def close_fds_after_fork(self) -> None:
        """To be called in a forked child: gives up the child's copies of all sockets, so that
        neither the port nor a connection outlives the parent."""
        null = os.open(os.devnull, os.O_RDWR)
        for connection in self._connections.values():
            connection.detach_after_fork(null)
        os.close(null)
        self._entrance.close_in_child()
        if self._journal is not None:
            self._journal.close_after_fork()

    # What connections call.

    def opened(self, connection: Connection) -> None:
        connection.adopting = None
        self._connections[connection.number] = connection

    def welcomed(self, connection: Connection) -> None:
        self._entrance.let_in(connection)

    def received(self, connection: Connection, request: int, message: Message) -> None:
        if isinstance(message, ClockRequest):  # the time is no state, nor does it wait for the disk
            connection.send(encode_message(Clock(exact_time(self._loop)), request))
            return
        if isinstance(message, Counts):
            self.totals.heard(connection.number, message)
            return
        if isinstance(message, Rejoin):
            self.totals.returns(connection.number)
        self._step(Received(connection.number, request, message))

    def closed(self, connection: Connection, reason: str) -> None:
        # The loop and the `Entrance` may both say that it has ended: the machine hears it once.
        if self._connections.pop(connection.number, None) is None:
            return
        self._entrance.let_in(connection)
        self.totals.gone(connection.number)
        self._step(Disconnected(connection.number, reason))

    # Inside.

    def _step(self, event: Event) -> None:
        if self._stopping:
            self._changed.set()
            return  # who goes now comes back to the next coordinator
        effects = self._machine.step(event, self._loop.time())
        if self._journal is None:
            self._carry_out(effects)
        else:
            self._journal.submit(effects)
        self._arm()
        self._changed.set()

    def _cannot_write(self, error: OSError) -> None:
        """What is not on disk must not be told: all that is left is to end."""
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
        # What the machine has decided is its state already: an effect that is left out would be a
        # member that was not told. So who cannot be sent to is closed (`Connection.send`), and the
        # end of that connection is the next event.
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
                # Nobody is there any more; or it is the connection that a survey pretends to be.
                answer = self._surveys.get(effect.conn)
                match effect:
                    case Send(message=Status(status)) if answer is not None and not answer.done():
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
            # Participants of a channel meet and part all the time, in groups that are no program's.
            # But one that is lost is worth a line.
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
        """See to it that a tick comes in time. One that comes too early does no harm."""
        when = self._machine.deadline()
        if when is not None and self._address is not None:
            self._alarm.ring_by(when)

    async def _close_connections(self) -> None:
        await self._entrance.clear()
        if self._journal is not None:
            await self._journal.idle()
        self._stopping = True
        self._end_surveys("the coordinator stopped")
        # Effects that wait for the disk were waited for: a goodbye is never ahead of an answer.
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
