"""What one membership asks of the coordinator.

`aiodist.control.line` handles the answers and broken connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ssl as tls
from typing import Any

from aiodist.control.dial import dial
from aiodist.control.lease import Lease
from aiodist.control.line import Line
from aiodist.control.requests import OnReply, Requests
from aiodist.errors import CoordinatorLostError, GroupClosedError, JoinTimeoutError
from aiodist.transports.surroundings import running_loop
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Abort,
    EpochView,
    JoinRequest,
    Leave,
    Message,
    Status,
    StatusRequest,
    StoreWatch,
    Withdraw,
    Withdrawn,
)
from aiodist.wire.recovery import WatchWaiting

WITHDRAW_SECONDS = 2.0
"""Seconds that a join, or a call of `Averager.average`, waits after its timeout for an answer: how
far the others had come."""


class ControlClient(Line):
    """A connection to the coordinator. Made by `open`, and belongs to the loop that made it.

    `on_event` gets what the coordinator says unasked. Set it before `join`, because events may come
    right behind the view. `local_host` is this end of the first connection ("127.0.0.1" for unix
    and inproc). `seen_host` is the host that the coordinator saw it come from. `trip` is the round
    trip in seconds.
    """

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        token: str | bytes | None = None,
        ssl: tls.SSLContext | None = None,
        timeout: float = 30.0,
        retry: bool = True,
        caller: str = "",
    ) -> ControlClient:
        """Connect to the coordinator, and try again until `timeout` seconds are over.

        `caller`: see `dial`.

        Raises JoinTimeoutError, or with `retry=False` JoinError at the first failure. Raises
        ForeignServiceError (a JoinError) at once if another service answers, AuthenticationError,
        and ValueError for a bad address.
        """
        greeted = await dial(
            address, token=token, ssl=ssl, timeout=timeout, retry=retry, caller=caller
        )
        return cls(address, greeted, token, ssl)

    async def join(self, ask: JoinRequest, left: float, timeout: float | None = None) -> EpochView:
        """Become a member. Returns once the group is complete.

        `left`: the seconds that are left. `timeout`: how many there were at first, which an error
        names (None: `left`).

        Raises JoinTimeoutError with the ranks that are missing, also if the rank that serves the
        coordinator gives up. Raises RankTakenError, SizeMismatchError, GroupCompleteError,
        JoinError, CoordinatorLostError if the coordinator goes away for good, and ValueError for a
        request over the limits. The connection stays open then. Cancelling
        withdraws the request and closes the connection.
        """
        self._check_open()
        if timeout is None:
            timeout = left
        if left < 0:
            raise JoinTimeoutError(
                f"gave up joining after {timeout:g} s: the coordinator at {self.address} was found,"
                " but no time was left to join: use a longer `timeout`",
                group=ask.group,
            )
        self._ask = ask
        number, joined = self._requests.start(ask)
        self.group, self._is_in = ask.group, True
        self._sock.give_up_after(ask.lease)
        # The lease begins here, and not with the view, because a rank that waits for its group has
        # a lease, too. It is renewed after a third of its time, so that one sign of life may be
        # late or lost.
        if self._lease is None:
            self._lease = Lease(self, self._loop, ask.lease / 3)
        try:
            await asyncio.wait({joined}, timeout=left)
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
        if isinstance(reply, Withdrawn):
            raise JoinTimeoutError(
                f"the rank that serves the coordinator gave up joining: {reply.text}",
                missing=reply.missing,
                group=ask.group,
            )
        if not isinstance(reply, EpochView):
            raise self.unexpected(reply)
        return reply

    async def request(self, message: Message, timeout: float | None) -> Message:
        """Send a request and return the reply. While the coordinator is away, this waits.

        Raises TimeoutError after `timeout` seconds (None: never), the error of a Failed reply,
        GroupClosedError after `close`, and ValueError for a message over the limits. Raises
        CoordinatorLostError if the coordinator is gone for good, or came back without the store.
        """
        self._check_open()
        return await self._requests.ask(message, timeout)

    def begin(self, message: Message) -> asyncio.Future[Message]:
        """Send a request now, or once the coordinator is back. The future fails as `request`
        does."""
        self._check_open()
        return self._requests.begin(message)

    def amend(self, message: Message, other: Message) -> None:
        """Ask `other` instead of a request that was begun. No effect if it is answered."""
        self._requests.amend(message, other)

    async def status(
        self, timeout: float | None = 10.0, *, ask_members: bool = False
    ) -> dict[str, Any]:
        """Return what the coordinator knows, as plain data: see `Coordinator.status`.

        With `ask_members` also what each member is doing: see `aiodist.membership.survey`. Raises
        as `request` does.
        """
        reply = await self.request(StatusRequest(ask_members), timeout)
        if not isinstance(reply, Status):
            raise self.unexpected(reply)
        return dict(reply.status)

    def older_than(self, seconds: float) -> dict[int, Message]:
        """Return the votes, and the store requests with a deadline, that have waited this long."""
        return self._requests.older_than(seconds)

    def subscribe(self, message: StoreWatch | WatchWaiting, on_reply: OnReply) -> int:
        """Send a request that has many replies. If they end, the last one is an error."""
        self._check_open()
        return self._requests.watch(message, on_reply)

    def tell(self, message: Message) -> None:
        """Send a message without a reply, now or once the coordinator is back.

        If the coordinator is gone for good, nothing happens.
        """
        if self.is_open:
            self._requests.tell(message)

    def unsubscribe(self, number: int) -> None:
        """End a subscription. Idempotent."""
        self._requests.unwatch(number)

    def unsubscribe_from_anywhere(self, number: int) -> None:
        """End a subscription from any thread, a moment later. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.unsubscribe, number)

    async def leave(self, timeout: float, *, aborts: str | None = None) -> bool:
        """Leave the group in order. Returns False if the coordinator did not confirm that.

        It may not have answered within `timeout` seconds, be gone, or have ruled this member lost.
        With `aborts`, leave out of order for this reason: the others see this member as lost, and
        the coordinator's log shows no crash. This does not wait for a coordinator that is away.
        """
        if not self._is_in or not self.is_open or (aborts is not None and self.is_away):
            return False
        self._is_in = False
        if self.doings is not None and not self.is_away:  # the last counts that are heard
            self._sock.send(encode_message(self.doings.counts(measure=False)))
        try:
            await self.request(Leave() if aborts is None else Abort(aborts[:MAX_TEXT]), timeout)
        # the last one means: evicted
        except (TimeoutError, CoordinatorLostError, GroupClosedError):
            return False
        self._standing = self._ask = None
        return True

    def close(self) -> None:
        """Leave the group if need be, and close the connection. Does not wait. Idempotent."""
        self._say_at_last(Leave())
        text = "the connection to the coordinator was closed here"
        self._end(GroupClosedError(text, group=self.group))

    def abort(self, reason: str | None = None) -> None:
        """Close the connection without leaving in order, so that the others see this member as
        lost.

        They see `reason` if the coordinator reads it before the end of the connection. None: as a
        crash.
        """
        if reason is not None:
            self._say_at_last(Abort(reason[:MAX_TEXT]))
        text = "the connection to the coordinator was aborted here"
        self._end(GroupClosedError(text, group=self.group))

    async def closed(self) -> None:
        """Wait until nothing is under way any more, after `close` or `abort`."""
        if self._coming_back is not None:
            await asyncio.wait({self._coming_back})

    def close_fds_after_fork(self) -> None:
        """Give up the socket in a forked child, without a trace for the parent.

        Later calls raise GroupClosedError.
        """
        text = "the group belongs to the parent of this forked process"
        self._ended = GroupClosedError(text, group=self.group)
        self._requests = Requests(self._loop)
        self._sock.detach_after_fork()

    def _say_at_last(self, message: Message) -> None:
        """Tell the coordinator how this member goes, if that is possible."""
        if self.is_open and self._is_in and not self.is_away:
            self._sock.send(encode_message(message))

    def _check_open(self) -> None:
        if self._ended is not None:
            # A copy each time, because raising an error adds a traceback to it. The traceback would
            # grow with every call, and show those of others.
            raise copy.copy(self._ended)
        self.check_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError in another event loop or thread, unless the connection has ended."""
        if self._ended is None and running_loop() is not self._loop:
            raise RuntimeError(
                f"the store of group {self.group!r} belongs to the event loop that made the "
                "group; each asyncio.run makes a new one: make the group in this loop. In other "
                "threads, use group.blocking().store"
            )

    async def _withdraw(
        self, joined: asyncio.Future[Message], ask: JoinRequest, timeout: float
    ) -> None:
        """Give up a join whose time is over. Returns if the view came, else raises
        JoinTimeoutError."""
        # The view may be on its way. This process is then a member, and leaving without a word
        # would look like a loss. So it says that it gives up, and the first of the two answers
        # counts.
        text = self.absence
        missing: tuple[int, ...] = ()
        if not text:
            withdrawn = self._requests.begin(Withdraw())
            await asyncio.wait(
                {joined, withdrawn},
                timeout=WITHDRAW_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
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
            f"gave up joining after {timeout:g} s: {text}",
            missing=missing,
            group=ask.group,
        )
