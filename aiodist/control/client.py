"""The member's side of the control plane: what one membership asks of the coordinator.

How the answers come, and what becomes of all this where the connection breaks, is in
`aiodist.control.line`.
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
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import (
    Abort,
    JoinRequest,
    Leave,
    Message,
    Status,
    StatusRequest,
    StoreWatch,
    View,
    Withdraw,
    Withdrawn,
)
from aiodist.wire.recovery import WatchWaiting

WITHDRAW_SECONDS = 2.0
"""How long a join that ran out of time waits to be told how far the group had come."""


class ControlClient(Line):
    """A connection to the coordinator. Made by `open`; belongs to the loop that made it.

    `on_event` gets what the coordinator tells unasked; set it before `join`, since events may come
    right behind the view. `local_host` is this end of the first connection ("127.0.0.1" for unix
    and inproc), `seen_host` where the coordinator saw it come from, `trip` the seconds to there
    and back.
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
        """Connect to the coordinator, trying again until `timeout` seconds are over. `caller`: see
        `dial`.

        Raises JoinTimeoutError (with `retry=False` JoinError, at the first failure);
        ForeignServiceError (a JoinError) at once when something else answers there;
        AuthenticationError; ValueError for a bad address.
        """
        greeted = await dial(
            address, token=token, ssl=ssl, timeout=timeout, retry=retry, caller=caller
        )
        return cls(address, greeted, token, ssl)

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

    def older_than(self, seconds: float) -> dict[int, Message]:
        """Votes, and requests to the store that have a deadline, which have waited for so long."""
        return self._requests.older_than(seconds)

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
        if self.doings is not None and not self.is_away:  # the last that is heard of them
            self._sock.send(encode_message(self.doings.counts(measure=False)))
        try:
            await self.request(Leave() if aborts is None else Abort(aborts[:MAX_TEXT]), timeout)
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
            self._say_at_last(Abort(reason[:MAX_TEXT]))
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

    def _say_at_last(self, message: Message) -> None:
        """Tell the coordinator how this member goes, if it is one and the coordinator is there."""
        if self.is_open and self._group is not None and not self.is_away:
            self._sock.send(encode_message(message))

    def _check_open(self) -> None:
        if self._ended is not None:
            # A copy for each: whoever raises an error adds its traceback to it, and it would grow
            # with every call, and show those of others.
            raise copy.copy(self._ended)

    async def _withdraw(
        self, joined: asyncio.Future[Message], ask: JoinRequest, timeout: float
    ) -> None:
        """The time is over. Returns if the view was on its way, else raises JoinTimeoutError."""
        # The view may be on its way: then this is a member, and to leave without a word would be a
        # loss for the others. So it says that it gives up, and whichever comes first counts.
        text = f"the coordinator at {self.address} is away ({self._gone.reason})"
        missing: tuple[int, ...] = ()
        if not self.is_away:
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
            f"gave up joining after {round(timeout, 2):g} s: {text}",
            missing=missing,
            group=ask.group,
        )
