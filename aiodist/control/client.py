"""The member's side of the control plane: one membership, and the connection to the coordinator.

When the connection breaks, a member looks for the coordinator at the same address and says there
who it is; what it had asked meanwhile, and before, is answered then. Who is no member yet asks to
join once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import ssl as tls
from collections.abc import Callable
from typing import Any, Protocol

from aiodist.control.connection import ControlSocket
from aiodist.control.dial import ATTEMPT_SECONDS, Greeted, dial
from aiodist.control.events import ControlEvent, CoordinatorBack, CoordinatorGone, error_of
from aiodist.control.lease import Lease
from aiodist.control.requests import OnReply, Requests
from aiodist.control.standing import Standing, check_successor
from aiodist.errors import (
    AiodistError,
    CoordinatorLostError,
    GroupClosedError,
    JoinError,
    JoinTimeoutError,
    ProtocolError,
)
from aiodist.transports.surroundings import chooser_on, closed_on_error
from aiodist.wire.activity import Activity, Inquire
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Frame
from aiodist.wire.limits import MAX_REPLY, MAX_TEXT
from aiodist.wire.messages import (
    Abort,
    Draining,
    Evicted,
    Failed,
    Goodbye,
    JoinRequest,
    Leave,
    MemberLeft,
    MemberLost,
    Message,
    Status,
    StatusRequest,
    StoreWatch,
    View,
    Withdraw,
    Withdrawn,
)
from aiodist.wire.recovery import NextView, WatchWaiting
from aiodist.wire.returning import Later, Rejoined, ViewWanted

log = logging.getLogger("aiodist.control")

WITHDRAW_SECONDS = 2.0
"""How long a join that ran out of time waits to be told how far the group had come."""

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5
"""Seconds between attempts to find the coordinator again: at most, and half of it at least."""

SHORTEST_ATTEMPT = 1.0
"""Seconds. An attempt that began while the network was cut hears of its end late: where the lease
is short, another one has to be made in time."""

REJOIN_SECONDS = 30.0
"""How long a coordinator that was found may take to let this member in."""


class Doings(Protocol):
    """Whoever can be asked what this member is doing."""

    def now(self) -> Activity:
        """From the thread of its loop."""
        ...

    def busy(self, seconds: float, ident: int) -> Activity:
        """From another thread, where the loop, in thread `ident`, has not turned for `seconds`."""
        ...


class ControlClient:
    """A connection to the coordinator. Made by `open`; belongs to the loop that made it.

    `on_event` gets what the coordinator tells unasked; set it before `join`, since events may come
    right behind the view. `local_host` is this end of the first connection ("127.0.0.1" for unix
    and inproc), `seen_host` where the coordinator saw it come from.
    """

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
        self.on_event: Callable[[ControlEvent], None] = lambda event: None
        self.doings: Doings | None = None
        """What this member does: for the coordinator, who may ask."""
        self._token = token
        self._ssl = ssl
        # All but what is named `from_thread` or `from_anywhere` is called from it.
        self._loop = asyncio.get_running_loop()
        # Random pauses, so that members do not all come back at once.
        self._chooser = chooser_on(self._loop)
        self._group: str | None = None  # the name of the group asked for, and not left
        # How it asked to join; None: it did not, or gave up, or has left.
        self._ask: JoinRequest | None = None
        self._standing: Standing | None = None  # what it is as a member; None: it is none
        # What waits for an answer, whatever becomes of connections.
        self._requests = Requests(self._loop)
        self._ended: AiodistError | None = None  # why it is over for good; None: it is not
        # Why the coordinator goes, or is away: its last word, or the last try.
        self._gone = CoordinatorGone("")
        self._coming_back: asyncio.Task[None] | None = None  # looks for it; None: it is there
        self._lease: Lease | None = None  # from the first join on
        self._sock = greeted.sock  # the present connection, or the last one
        self._welcome = greeted.welcome  # what the coordinator said of itself on it
        self._listen_to(greeted.sock)
        self._requests.send = self._sock.send

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        token: str | bytes | None = None,
        ssl: tls.SSLContext | None = None,
        timeout: float = 30.0,
        retry: bool = True,
    ) -> ControlClient:
        """Connect to the coordinator, trying again until `timeout` seconds are over.

        Raises JoinTimeoutError (with `retry=False` JoinError, at the first failure);
        ForeignServiceError (a JoinError) at once when something else answers there;
        AuthenticationError; ValueError for a bad address.
        """
        greeted = await dial(address, token=token, ssl=ssl, timeout=timeout, retry=retry)
        return cls(address, greeted, token, ssl)

    @property
    def group(self) -> str | None:
        """The name of the group that it has asked to join and not left."""
        return self._group

    @property
    def is_open(self) -> bool:
        """Whether there is a coordinator, or one is looked for."""
        return self._ended is None

    @property
    def is_away(self) -> bool:
        """Whether the coordinator is away, and is looked for."""
        return self._coming_back is not None

    async def join(self, ask: JoinRequest, timeout: float) -> View:
        """Become a member; returns once the group is complete.

        Raises JoinTimeoutError naming how many have joined and who is missing; RankTakenError,
        SizeMismatchError, GroupCompleteError, JoinError; CoordinatorLostError if the coordinator
        goes away for good meanwhile; ValueError for a request over the documented limits. The
        connection stays open then. Cancelling withdraws and closes it.
        """
        self._check_open()
        self._ask = ask
        number, joined = self._requests.start(ask)
        self._group = ask.group
        self._sock.give_up_after(ask.lease)
        # From here on, not from the view on: a group may take long to be complete, and whoever
        # waits for that has a lease, too. It is renewed after a third of it, so that one sign may
        # be late, or lost.
        if self._lease is None:
            self._lease = Lease(self, self._loop, ask.lease / 3)
        try:
            await asyncio.wait({joined}, timeout=timeout)
            if not joined.done():
                await self._withdraw(joined, ask, timeout)
            reply = joined.result()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._requests.drop(number)
            if self._standing is None:
                self._ask = None
        if not isinstance(reply, View):
            raise self.unexpected(reply)
        return reply

    async def request(self, message: Message, timeout: float | None) -> Message:
        """Send a request and return the reply. While the coordinator is away, it waits.

        Raises TimeoutError after `timeout` seconds (None: never), what a Failed reply stands for,
        GroupClosedError after `close`, CoordinatorLostError when the coordinator is gone for good,
        or came back without the store that the request is about, ValueError for a message over the
        documented limits.
        """
        self._check_open()
        return await self._requests.ask(message, timeout)

    def begin(self, message: Message) -> asyncio.Future[Message]:
        """Send a request now, or once the coordinator is back: its reply, which fails as `request`
        does."""
        self._check_open()
        return self._requests.begin(message)

    async def status(
        self, timeout: float | None = 10.0, *, ask_members: bool = False
    ) -> dict[str, Any]:
        """What the coordinator knows, as plain data: see `Coordinator.status`; with `ask_members`
        also what each member is doing, see `aiodist.membership.survey`. Raises as `request`
        does."""
        reply = await self.request(StatusRequest(ask_members), timeout)
        if not isinstance(reply, Status):
            raise self.unexpected(reply)
        return dict(reply.status)

    def subscribe(self, message: StoreWatch | WatchWaiting, on_reply: OnReply) -> int:
        """Send a request that has many replies; the last one is an error, if there is an end."""
        self._check_open()
        return self._requests.watch(message, on_reply)

    def tell(self, message: Message) -> None:
        """Send a message that has no reply, now or once the coordinator is back; nothing happens
        when it is gone for good."""
        if self.is_open:
            self._requests.tell(message)

    def unsubscribe(self, number: int) -> None:
        """End a subscription. Idempotent."""
        self._requests.unwatch(number)

    def unsubscribe_from_anywhere(self, number: int) -> None:
        """End a subscription from any thread; it is over a moment later. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.unsubscribe, number)

    async def leave(self, timeout: float, *, aborts: str | None = None) -> bool:
        """Leave the group in order. False: the coordinator did not confirm it within `timeout`
        seconds, or is gone, or has ruled this member lost meanwhile.

        `aborts`: leave out of order, for this reason: the others see this member as lost, and who
        looks after the coordinator sees no crash. A coordinator that is away is not waited for.
        """
        if self._group is None or not self.is_open or (aborts is not None and self.is_away):
            return False
        self._group = None
        try:
            await self.request(Leave() if aborts is None else _abort(aborts), timeout)
        except (TimeoutError, CoordinatorLostError, GroupClosedError):  # the last: evicted
            return False
        self._standing = self._ask = None
        return True

    def close(self) -> None:
        """Leave the group if need be, and close the connection. Does not wait. Idempotent."""
        self._say_at_last(Leave())
        self._end(GroupClosedError("the connection to the coordinator was closed here"))

    def abort(self, reason: str | None = None) -> None:
        """Close the connection without leaving in order: the others see this member as lost, for
        this `reason` if the coordinator reads it before it sees the end. None: as by a crash."""
        if reason is not None:
            self._say_at_last(_abort(reason))
        self._end(GroupClosedError("the connection to the coordinator was aborted here"))

    async def closed(self) -> None:
        """Wait until nothing of it is under way after `close` or `abort`."""
        if self._coming_back is not None:
            await asyncio.wait({self._coming_back})

    def close_fds_after_fork(self) -> None:
        """To be called in a forked child: gives up the child's copy of the socket, without a trace
        for the parent. Later calls raise GroupClosedError."""
        self._ended = GroupClosedError("the group belongs to the parent of this forked process")
        self._requests = Requests(self._loop)
        self._sock.detach_after_fork()

    def unexpected(self, reply: Message) -> ProtocolError:
        """The error for a reply of a type that does not belong to the request."""
        return ProtocolError(
            f"the coordinator at {self.address} replied with {type(reply).__name__}, which "
            "answers no such request"
        )

    # Inside.

    def _say_at_last(self, message: Message) -> None:
        """Tell the coordinator how this member goes, if it is one and the coordinator is there."""
        if self.is_open and self._group is not None and not self.is_away:
            self._sock.send(encode_message(message))

    def _check_open(self) -> None:
        if self._ended is not None:
            # A copy for each: whoever raises an error adds its traceback to it, and it would grow
            # with every call, and show those of others.
            raise copy.copy(self._ended)

    def _listen_to(self, sock: ControlSocket) -> None:
        sock.on_frame = self._on_frame
        sock.on_closed = self._on_closed
        if not sock.is_open:  # between the greeting and now
            gone = ConnectionResetError("the coordinator closed the connection")
            self._loop.call_soon(self._on_closed, gone)

    async def _withdraw(
        self, joined: asyncio.Future[Message], ask: JoinRequest, timeout: float
    ) -> None:
        """The time is over. Returns if the view was on its way, else raises JoinTimeoutError."""
        # The view may be on its way: then this is a member, and to leave without a word would be a
        # loss for the others. So it says that it gives up, and whichever comes first counts.
        text = f"the coordinator at {self.address} is away ({self._gone.reason})"
        missing: tuple[int, ...] = ()
        if not self.is_away:
            number, withdrawn = self._requests.start(Withdraw())
            try:
                await asyncio.wait(
                    {joined, withdrawn},
                    timeout=WITHDRAW_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                self._requests.drop(number)
            if joined.done():
                withdrawn.cancel()
                return
            text = f"the coordinator does not say why, nor anything for {WITHDRAW_SECONDS:g} s"
            if withdrawn.done():
                reply = withdrawn.result()
                if not isinstance(reply, Withdrawn):
                    raise self.unexpected(reply)
                text, missing = reply.text, reply.missing
        raise JoinTimeoutError(
            f"gave up joining after {timeout:g} s: {text}", missing=missing, group=ask.group
        )

    def _on_frame(self, frame: Frame) -> None:
        number, message = decode_message(frame)
        if number == 0:
            self._on_told(message)
            return
        # At once: the connection may break before whoever waits for it has a turn.
        if isinstance(message, NextView) and self._standing is not None:
            message = self._standing.after(message)
        if isinstance(message, View) and self._ask is not None:
            if self._standing is None:
                self._standing = Standing(self._ask, message)
            else:
                self._standing.take(message)
        elif self._standing is not None:
            self._standing.hears(self._requests.of(number), message)
        answer = error_of(message, self._group) if isinstance(message, Failed) else message
        self._requests.answer(number, answer)

    def _on_told(self, message: Message) -> None:
        match message:
            case MemberLost(epoch, ranks):
                self._tell(MemberLost(epoch, self._news(message, ranks), message.reason))
            case MemberLeft(epoch, ranks):
                self._tell(MemberLeft(epoch, self._news(message, ranks)))
            case Draining():
                self._tell(message)
            case Inquire():
                if self.doings is not None:
                    self._sock.send(encode_message(self.doings.now()))
            case Goodbye():
                self._gone = CoordinatorGone("it was shut down", orderly=True)
            case Evicted(reason):
                text = f"it ruled this rank lost: {reason}"
                self._gone = CoordinatorGone(text, evicted=True, final=True)
            case _:
                raise ProtocolError(f"{type(message).__name__} is no message to be told unasked")

    def _tell(self, event: ControlEvent) -> None:
        if isinstance(event, (MemberLost, MemberLeft)) and not event.ranks:
            return
        try:
            self.on_event(event)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"on_event failed with {event!r}", "exception": error}
            )

    def _news(self, told: MemberLost | MemberLeft, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `ranks` that were not known to be gone."""
        if self._standing is None:
            return ranks
        return self._standing.news(told.epoch, ranks, lost=isinstance(told, MemberLost))

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
        """A sign of life, from the lease thread."""
        self._sock.send_from_thread(frame)

    def busy_from_thread(self, seconds: float, ident: int) -> bytes | None:
        """A sign of life that says what keeps the loop, in thread `ident`, from turning."""
        return encode_message(self.doings.busy(seconds, ident)) if self.doings else None

    def abandon_from_thread(self) -> None:
        """The loop is closed, and nobody can use this membership: let the others know."""
        self._sock.abandon()

    # The coordinator is away.

    def _on_closed(self, error: Exception) -> None:
        self._requests.send = None
        gone, self._gone = self._gone, CoordinatorGone("")
        reason = gone.reason or str(error) or type(error).__name__
        joined = self._standing is not None or self._ask is not None
        final = gone.evicted or not (self._welcome.returns and joined)
        if self._ended is None and not final:
            self._gone = CoordinatorGone(reason)
            # If it looks already, this connection was found and lost in the same moment: `_is_back`
            # goes on from there, and nobody is told twice.
            if self._coming_back is None:
                self._coming_back = self._loop.create_task(
                    self._come_back(), name="aiodist come back"
                )
                self._coming_back.add_done_callback(self._is_back)
                self._tell(CoordinatorGone(reason, gone.orderly))
            return
        lost = GroupClosedError if gone.evicted else CoordinatorLostError
        text = f"the coordinator at {self.address} is gone: {reason}"
        self._end(lost(text, group=self._group))
        self._tell(CoordinatorGone(reason, gone.orderly, gone.evicted, final))

    def _is_back(self, task: asyncio.Task[None]) -> None:
        self._coming_back = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(CoordinatorLostError(f"looking for the coordinator failed: {error!r}"))
            raise error
        if self._ended is None and not self._sock.is_open:
            # It broke again, in the very moment that it was there.
            self._on_closed(ConnectionResetError("the coordinator closed the connection"))

    async def _come_back(self) -> None:
        """Look for the coordinator until it is there; then be what this was, there."""
        pause = FIRST_PAUSE
        said = ""
        # An attempt that hangs must not cost the lease: the coordinator that is back counts it.
        lease = self._ask.lease if self._ask is not None else math.inf
        patience = min(ATTEMPT_SECONDS, max(SHORTEST_ATTEMPT, lease / 2))
        while True:
            # Not all at once: there may be thousands.
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
            except (AiodistError, OSError, TimeoutError) as error:
                why = str(error)
                self._gone = CoordinatorGone(why)
                if type(error) is not JoinError and why != said:  # that one: nobody is there
                    log.warning("not back at the coordinator: %s", why)
                said = why

    async def _register(self, greeted: Greeted) -> None:
        """Become what this was, at a coordinator that was found. Raises OSError, TimeoutError,
        AiodistError where another attempt may help."""
        # In this order: it is a member again before what was asked is said once more, for only
        # members may ask; and what failed with the store fails before anything new is asked of it.
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
                "started without its state file): the store is empty now"
            )
            self._requests.fail(CoordinatorLostError(text, group=self._group), only_store=True)
        self._requests.send = sock.send
        self._requests.say_again()
        if self._standing is not None:
            self._tell(CoordinatorBack(kept))

    async def _rejoin(self, standing: Standing, sock: ControlSocket) -> Rejoined:
        """Be a member again. Raises OSError, TimeoutError, AiodistError; CancelledError where it
        is no member any more, and has ended."""
        broken: asyncio.Future[Message] = self._loop.create_future()
        # Frames are taken as ever from here on: right behind its answer the coordinator may say who
        # else is gone. But if the connection ends, the loop of `_come_back` is what tries again, so
        # that is told here, and not `_on_closed`.
        sock.on_frame = self._on_frame
        sock.on_closed = lambda error: self._broke_off(error, broken)
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
                    # come back with the same view, which may be large: so it is sent by the one
                    # that is asked for it, and the others are told `Later`.
                    with_view = True
                else:
                    raise self.unexpected(message)

    def _broke_off(self, error: Exception, broken: asyncio.Future[Message]) -> None:
        """A connection ended before it was known whether this is still a member."""
        if self._gone.evicted:
            self._on_closed(error)
        elif not broken.done():
            broken.set_exception(ConnectionResetError(f"it broke off: {error}"))
            broken.exception()  # seen: nobody may wait for it any more


def _abort(reason: str) -> Abort:
    return Abort(reason[:MAX_TEXT])
