"""The line from one member to the coordinator, over all of its connections.

A connection may break, and the coordinator may be killed, cut off, or restarted. The group does not
notice, because operations need no coordinator. The member looks for the coordinator, and then
resumes its membership there::

    connected ──── the connection ends ───> away: looks for it, again and again
        ▲                │                    │
        │                │                    │ a coordinator greets that may be its successor
        │                ▼                    ▼
        │           over for good <─────── `_register`: claims its membership (`_rejoin`),
        │      evicted; no successor is       │         or asks to join once more
        │      expected; closed here          │
        └─────────────────────────────────────┘  all unanswered requests are sent again

**Callers notice nothing but the delay.** Each unanswered request is kept under its number
(`requests`). A coordinator that comes back knows by the number what its predecessor had carried out
already.

**One connection counts**, `_sock`. It may not be registered yet: a coordinator is heard from the
moment that it is found, because right behind its answer it may tell which ranks are lost. But
requests go to it only after this member is registered (`Requests.send`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl as tls
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from aiodist.control.connection import ControlSocket
from aiodist.control.dial import ATTEMPT_SECONDS, Greeted, NoAnswerError, dial
from aiodist.control.events import ControlEvent, CoordinatorBack, CoordinatorGone, error_of
from aiodist.control.lease import Lease
from aiodist.control.requests import Requests
from aiodist.control.standing import Standing, check_successor
from aiodist.errors import (
    AiodistError,
    CoordinatorLostError,
    GroupClosedError,
    ProtocolError,
)
from aiodist.transports.surroundings import chooser_on, closed_on_error
from aiodist.wire.activity import Activity, Inquire
from aiodist.wire.averaging import (
    AverageDecision,
    AverageDone,
    AverageFetch,
    AverageGone,
    AverageRefused,
    AverageReopened,
    AverageServe,
    AveragingNews,
)
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.counts import Counts, CountsRequest
from aiodist.wire.frames import Frame
from aiodist.wire.limits import MAX_REPLY
from aiodist.wire.messages import (
    Draining,
    EpochView,
    Evicted,
    Failed,
    Goodbye,
    JoinRequest,
    Left,
    MemberLeft,
    MemberLost,
    Message,
)
from aiodist.wire.recovery import NextView
from aiodist.wire.returning import Later, Rejoined, ViewWanted

log = logging.getLogger("aiodist.control")

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5
"""The longest pause in seconds between attempts to find the coordinator; the shortest is half of
it."""

SHORTEST_ATTEMPT = 1.0
"""Seconds. An attempt that began while the network was cut ends late. If the lease is short,
another one has to be made in time."""

REJOIN_SECONDS = 30.0
"""Seconds that a coordinator may take to let this member in again."""


class Doings(Protocol):
    """Knows what this member is doing."""

    def now(self) -> Activity:
        """Return what this member is doing. From the thread of its loop."""
        ...

    def counts(self, *, measure: bool) -> Counts:
        """Return the counts. `measure`: time operations from now on. From the thread of its
        loop."""
        ...

    def busy(self, seconds: float, ident: int) -> Activity:
        """Return what keeps the loop, in thread `ident`, busy for `seconds`. From another
        thread."""
        ...


class Line:
    """A member's line to the coordinator, over all connections. Belongs to the loop that made
    it."""

    def __init__(
        self,
        address: str,
        greeted: Greeted,
        token: str | bytes | None,
        ssl: tls.SSLContext | None,
    ) -> None:
        self.address = address
        self.local_host = greeted.local_host
        self.seen_host = greeted.welcome.seen_host
        self.trip = greeted.trip
        self.on_event: Callable[[ControlEvent], None] = lambda event: None
        self.on_average: Callable[[AveragingNews], None] = lambda news: None
        """Gets what a member of an averager is told."""
        self.doings: Doings | None = None
        """What this member does, for the coordinator's questions."""
        self._token = token
        self._ssl = ssl
        # Calls everything here except `…from_thread` and `…from_anywhere`.
        self._loop = asyncio.get_running_loop()
        # Random pauses, so that members do not all come back at once.
        self._chooser = chooser_on(self._loop)
        self.group: str | None = None
        """The name of the group that this process has asked to join, also once it has left."""
        self._is_in = False  # this process has asked to join that group, and has not left
        # The request to join; None if there was none, it was given up, or this rank has left.
        self._ask: JoinRequest | None = None
        self._standing: Standing | None = None  # what this rank is as a member; None: it is not one
        # What waits for an answer, over all connections.
        self._requests = Requests(self._loop)
        self._ended: AiodistError | None = None  # why it is over for good; None: it is not
        # Why the coordinator goes or is away: its last word, or the last attempt.
        self._gone = CoordinatorGone("")
        # looks for the coordinator; None: it is there
        self._coming_back: asyncio.Task[None] | None = None
        self._lease: Lease | None = None  # from the first join on
        self._heard = self._loop.time()  # when the coordinator said something last
        self._sock = greeted.sock  # the present connection, or the last one
        self._welcome = greeted.welcome  # what the coordinator said of itself on it
        self._listen_to(greeted.sock)
        self._requests.send = self._sock.send

    @property
    def is_open(self) -> bool:
        """Whether there is a coordinator, or this member looks for one."""
        return self._ended is None

    @property
    def incarnation(self) -> int:
        """The number of starts of the coordinator with its state file."""
        return self._welcome.incarnation

    @property
    def start(self) -> tuple[str, int]:
        """The coordinator, and the number of its starts with its state file. Another one has
        forgotten what is in no state file."""
        return self._welcome.coordinator, self._welcome.incarnation

    @property
    def returns(self) -> bool:
        """Whether another coordinator may come to the address if this one ends. One that lives in a
        rank or launcher ends with it."""
        return self._welcome.returns

    @property
    def silence(self) -> float:
        """For how many seconds the coordinator has said nothing."""
        return self._loop.time() - self._heard

    @property
    def is_away(self) -> bool:
        """Whether the coordinator is away and this member looks for it."""
        return self._coming_back is not None

    @property
    def absence(self) -> str:
        """Say that the coordinator is away, and why this member is not back. "": it is there."""
        return f"the coordinator is away: {self._gone.reason}" if self.is_away else ""

    def _listen_to(self, sock: ControlSocket) -> None:
        sock.on_frame = self._on_frame
        sock.on_closed = self._on_closed
        if not sock.is_open:  # it closed between the greeting and now
            gone = ConnectionResetError("the coordinator closed the connection")
            self._loop.call_soon(self._on_closed, gone)

    def _on_frame(self, frame: Frame) -> None:
        self._heard = self._loop.time()
        number, message = decode_message(frame)
        if number == 0:
            self._on_told(message)
            return
        # At once, because the connection may break before the caller has a turn.
        if isinstance(message, NextView) and self._standing is not None:
            message = self._standing.after(message)
        if isinstance(message, Left):
            # This rank is no longer a member. The coordinator's own end may come next, and there is
            # no reason to look for a new one then.
            self._standing = self._ask = None
        elif isinstance(message, EpochView) and self._ask is not None:
            if self._standing is None:
                self._standing = Standing(self._ask, message)
            else:
                self._standing.take(message)
        elif self._standing is not None:
            self._standing.hears(self._requests.of(number), message)
        answer = error_of(message, self.group) if isinstance(message, Failed) else message
        self._requests.answer(number, answer)

    def _on_told(self, message: Message) -> None:
        match message:
            case MemberLost(epoch, ranks) | MemberLeft(epoch, ranks):
                if self._standing is not None:
                    is_lost = isinstance(message, MemberLost)
                    ranks = self._standing.news(epoch, ranks, lost=is_lost)
                if ranks:
                    self._tell(replace(message, ranks=ranks))
            case Draining():
                self._tell(message)
            case Inquire():
                if self.doings is not None:
                    self._sock.send(encode_message(self.doings.now()))
            case CountsRequest():
                if self.doings is not None:
                    self._sock.send(encode_message(self.doings.counts(measure=True)))
            case Goodbye():
                self._gone = CoordinatorGone("it was shut down", orderly=True)
            case Evicted(reason):
                text = f"it ruled this rank lost: {reason}"
                self._gone = CoordinatorGone(text, evicted=True, final=True)
            case (
                AverageDecision()
                | AverageDone()
                | AverageReopened()
                | AverageRefused()
                | AverageFetch()
                | AverageServe()
                | AverageGone()
            ):
                self.on_average(message)
            case _:
                raise ProtocolError(
                    f"a {type(message).__name__} message must not come without a request"
                )

    def _tell(self, event: ControlEvent) -> None:
        try:
            self.on_event(event)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"on_event failed with {event!r}", "exception": error}
            )

    def unexpected(self, reply: Message) -> ProtocolError:
        """Make the error for a reply that does not belong to its request."""
        return ProtocolError(
            f"the coordinator at {self.address} replied with {type(reply).__name__}, which "
            "answers no such request"
        )

    def _end(self, error: AiodistError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        if self._lease is not None:
            self._lease.stop()
        self._sock.close()
        self._requests.send = None
        if self._coming_back is not None:
            self._coming_back.cancel()
        self._requests.fail(error)

    def renew_from_thread(self, frame: bytes) -> None:
        """Send a sign of life, from the lease thread."""
        self._sock.send_from_thread(frame)

    def busy_from_thread(self, seconds: float, ident: int) -> bytes | None:
        """Return a sign of life that says what keeps the loop, in thread `ident`, busy."""
        return encode_message(self.doings.busy(seconds, ident)) if self.doings else None

    def abandon_from_thread(self) -> None:
        """Close the connection, because the loop is closed and this membership is unusable."""
        self._sock.abandon()

    def _on_closed(self, error: Exception) -> None:
        self._requests.send = None
        # We look for the coordinator if three things hold. It said in the greeting that another may
        # come to its address: a coordinator that lives in a rank or launcher ends with it. There is
        # something to resume: a membership, or a join that waits. And it has not ruled this member
        # lost, because that is final at any later coordinator.
        gone, self._gone = self._gone, CoordinatorGone("")
        reason = gone.reason or str(error) or type(error).__name__
        joined = self._standing is not None or self._ask is not None
        final = gone.evicted or not (self._welcome.returns and joined)
        if self._ended is None and not final:
            self._gone = CoordinatorGone(reason)
            # If we look already, this connection was found and lost at once. `_is_back` goes on
            # from there, and the event is not told twice.
            if self._coming_back is None:
                self._coming_back = self._loop.create_task(
                    self._come_back(), name="aiodist come back"
                )
                self._coming_back.add_done_callback(self._is_back)
                self._tell(CoordinatorGone(reason, gone.orderly))
            return
        event = CoordinatorGone(reason, gone.orderly, gone.evicted, final)
        if event.evicted:
            self._end(GroupClosedError(event.eviction(self.address), group=self.group))
        else:
            text = f"the coordinator at {self.address} is gone: {reason}"
            self._end(CoordinatorLostError(text, group=self.group))
        self._tell(event)

    def _is_back(self, task: asyncio.Task[None]) -> None:
        self._coming_back = None
        if task.cancelled():  # its line or its loop ends, or a program cancels all
            self._end(CoordinatorLostError("looking for the coordinator was cancelled"))
            return
        if (error := task.exception()) is not None:
            self._end(CoordinatorLostError(f"looking for the coordinator failed: {error!r}"))
            raise error
        if self._ended is None and not self._sock.is_open:
            # It broke again, just when it was there.
            self._on_closed(ConnectionResetError("the coordinator closed the connection"))

    async def _come_back(self) -> None:
        """Look for the coordinator until it is there, and resume the membership."""
        pause = FIRST_PAUSE
        said = ""
        # A hanging attempt must not cost the lease, which a coordinator counts from its return.
        lease = self._ask.lease if self._ask is not None else math.inf
        patience = min(ATTEMPT_SECONDS, max(SHORTEST_ATTEMPT, lease / 2))
        while True:
            # Spread in time, because there may be thousands of ranks.
            await asyncio.sleep(pause * self._chooser.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                greeted = await dial(
                    self.address,
                    token=self._token,
                    ssl=self._ssl,
                    timeout=patience,
                    retry=False,
                )
                with closed_on_error(greeted.sock):
                    await self._register(greeted)
                return
            except NoAnswerError as error:
                said = f"no coordinator answers at {self.address}: {error.last}"
                self._gone = CoordinatorGone(said)
            except (AiodistError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                self._gone = CoordinatorGone(why)
                if why != said:
                    log.warning("not back at the coordinator: %s", why)
                said = why

    async def _register(self, greeted: Greeted) -> None:
        """Resume the membership at a coordinator that was found.

        Raises OSError, TimeoutError or AiodistError if another attempt may help.
        """
        # The order matters. It is a member again before old requests are sent again, because only
        # members may ask. Requests to a lost store fail before anything new is asked of the store.
        kept = check_successor(self.address, self._welcome, greeted.welcome)
        self._sock = sock = greeted.sock
        if self._ask is not None:
            sock.give_up_after(self._ask.lease)
        if self._standing is not None:
            reply = await self._rejoin(self._standing, sock)
            epoch = self._standing.view.epoch
            self._on_told(MemberLost(epoch, reply.lost, "it was ruled lost meanwhile"))
            self._on_told(MemberLeft(epoch, reply.left))
        self._listen_to(sock)
        self._gone = CoordinatorGone("")
        self._welcome = greeted.welcome
        if not kept:
            text = (
                f"the coordinator at {self.address} came back without the group's store (it was "
                "started without its state file): the store is empty now. Check the path given as "
                "--state"
            )
            self._requests.fail(CoordinatorLostError(text, group=self.group), only_store=True)
        self._requests.send = sock.send
        self._requests.say_again()
        if self._standing is not None:
            self._tell(CoordinatorBack(kept))

    async def _rejoin(self, standing: Standing, sock: ControlSocket) -> Rejoined:
        """Be a member again. Raises OSError, TimeoutError, AiodistError.

        Raises CancelledError if this rank is no longer a member and the line has ended.
        """
        broken: asyncio.Future[Message] = self._loop.create_future()
        # Frames are handled from here on, because right behind its answer the coordinator may tell
        # which ranks are gone. But if the connection ends, `_come_back` tries again, so that end is
        # reported here, and not to `_on_closed`.
        sock.on_frame = self._on_frame
        sock.on_closed = lambda error: self._broke_off(error, broken)
        if not sock.is_open:  # it closed between the greeting and now
            self._broke_off(ConnectionResetError("the coordinator closed the connection"), broken)
        with_view = False
        async with asyncio.timeout(REJOIN_SECONDS):
            while True:
                claim = standing.claim(with_view=with_view)
                number, reply = self._requests.start(claim, send=sock.send, max_body=MAX_REPLY)
                try:
                    await asyncio.wait({reply, broken}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._requests.drop(number)
                message = reply.result() if reply.done() else broken.result()
                if isinstance(message, Rejoined):
                    return message
                if isinstance(message, Later):
                    await asyncio.sleep(FIRST_PAUSE * self._chooser.uniform(1.0, 3.0))
                elif isinstance(message, ViewWanted):
                    # This coordinator does not know the group, or not its newest epoch. All members
                    # have the same view, which may be large. So it asks one of them for it, and the
                    # others get `Later`.
                    with_view = True
                else:
                    raise self.unexpected(message)

    def _broke_off(self, error: Exception, broken: asyncio.Future[Message]) -> None:
        """Handle the end of a connection before it was known whether this rank is still a
        member."""
        if self._gone.evicted:
            self._on_closed(error)
        elif not broken.done():
            broken.set_exception(ConnectionResetError(f"it broke off: {error}"))
            broken.exception()  # marks it as retrieved, because there may be no waiter
