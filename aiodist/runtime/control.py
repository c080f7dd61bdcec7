"""The member's side of the control plane: one connection to the coordinator, one membership."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import ssl as tls
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiodist.errors import (
    AiodistError,
    AuthenticationError,
    CoordinatorLostError,
    GroupClosedError,
    GroupCompleteError,
    JoinError,
    JoinTimeoutError,
    MessageTooLargeError,
    ProtocolError,
    RankTakenError,
    SizeMismatchError,
)
from aiodist.runtime.control_dial import ForeignServiceError, Greeted, dial
from aiodist.runtime.control_socket import ControlSocket
from aiodist.wire.frames import Frame
from aiodist.wire.messages import (
    Draining,
    Evicted,
    Failed,
    Failure,
    Goodbye,
    JoinRequest,
    Leave,
    MemberLeft,
    MemberLost,
    Message,
    Renew,
    Status,
    StatusRequest,
    StoreCancel,
    StoreWait,
    View,
    Withdraw,
    Withdrawn,
    decode_message,
    encode_message,
)

__all__ = [
    "ControlClient",
    "ControlEvent",
    "CoordinatorGone",
    "ForeignServiceError",
    "JoinRequest",
    "View",
]

WITHDRAW_SECONDS = 2.0
"""How long a join that ran out of time waits to be told how far the group had come."""


@dataclass(frozen=True, slots=True)
class CoordinatorGone:
    """The connection to the coordinator ended, not by this side. `orderly`: it said goodbye.
    `evicted`: it ruled this member lost, and told the others so."""

    reason: str
    orderly: bool = False
    evicted: bool = False


ControlEvent = MemberLost | MemberLeft | Draining | CoordinatorGone


class StoreValueError(AiodistError, ValueError):
    """`add` met a value that is no decimal number of at most 64 bits."""


_ERRORS: dict[Failure, type[AiodistError]] = {
    Failure.RANK_TAKEN: RankTakenError,
    Failure.SIZE_MISMATCH: SizeMismatchError,
    Failure.COMPLETE: GroupCompleteError,
    Failure.DRAINING: JoinError,
    Failure.INVALID: JoinError,
    Failure.VERSION: JoinError,
    Failure.AUTHENTICATION: AuthenticationError,
    Failure.NOT_A_MEMBER: GroupClosedError,
    Failure.TOO_LARGE: MessageTooLargeError,
    Failure.NOT_AN_INTEGER: StoreValueError,
}


class ControlClient:
    """A connection to the coordinator. Made by `open`; belongs to the loop that made it.

    `on_event` gets what the coordinator tells unasked; set it before `join`, since events may come
    right behind the view. `local_host` is this end of the connection ("127.0.0.1" for unix and
    inproc), `seen_host` where the coordinator sees it come from.
    """

    def __init__(self, address: str, greeted: Greeted) -> None:
        self.address = address
        self.local_host = greeted.local_host
        self.seen_host = greeted.seen_host
        self.on_event: Callable[[ControlEvent], None] = lambda event: None
        self._loop = asyncio.get_running_loop()
        self._group: str | None = None
        self._requests = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._subscribers: dict[int, Callable[[Message | AiodistError], None]] = {}
        self._ended: AiodistError | None = None
        self._gone = CoordinatorGone("")
        self._renewing = False
        self._stop_renewing = threading.Event()
        self._sock = greeted.sock
        self._sock.on_frame = self._on_frame
        self._sock.on_closed = self._on_closed
        if not self._sock.is_open:  # between the greeting and now
            self._on_closed(ConnectionResetError("the coordinator closed the connection"))

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
        ForeignServiceError (a JoinError) at once when something else listens there;
        AuthenticationError; ValueError for a bad address.
        """
        greeted = await dial(address, token=token, ssl=ssl, timeout=timeout, retry=retry)
        return cls(address, greeted)

    @property
    def group(self) -> str | None:
        """The name of the group that it has asked to join and not left."""
        return self._group

    @property
    def is_open(self) -> bool:
        return self._ended is None

    async def join(self, ask: JoinRequest, timeout: float) -> View:
        """Become a member; returns once the group is complete.

        Raises JoinTimeoutError naming how many have joined and who is missing; RankTakenError,
        SizeMismatchError, GroupCompleteError, JoinError; CoordinatorLostError if the connection
        ends meanwhile; ValueError for a request over the documented limits. The connection stays
        open then. Cancelling withdraws and closes it.
        """
        number, joined = self._start(ask)
        self._group = ask.group
        self._sock.give_up_after(ask.lease)
        self._renew_lease(ask.lease)
        try:
            await asyncio.wait({joined}, timeout=timeout)
            if not joined.done():
                await self._withdraw(joined, ask, timeout)
            reply = joined.result()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._pending.pop(number, None)
        if not isinstance(reply, View):
            raise self.unexpected(reply)
        return reply

    async def request(self, message: Message, timeout: float | None) -> Message:
        """Send a request and return the reply.

        Raises TimeoutError after `timeout` seconds (None: never), what a Failed reply stands for,
        GroupClosedError after `close`, CoordinatorLostError when the connection ends, ValueError
        for a message over the documented limits.
        """
        number, reply = self._start(message)
        try:
            async with asyncio.timeout(timeout):
                return await reply
        finally:
            self._pending.pop(number, None)
            if isinstance(message, StoreWait) and reply.cancelled():
                self._send(StoreCancel(number))

    def begin(self, message: Message) -> asyncio.Future[Message]:
        """Send a request now: its reply, which fails as `request` does."""
        number, reply = self._start(message)
        reply.add_done_callback(lambda _: self._pending.pop(number, None))
        return reply

    async def status(self, timeout: float | None = 10.0) -> dict[str, Any]:
        """What the coordinator knows, as plain data: see `Coordinator.status`. Raises as `request`
        does."""
        reply = await self.request(StatusRequest(), timeout)
        if not isinstance(reply, Status):
            raise self.unexpected(reply)
        return dict(reply.status)

    def subscribe(
        self, message: Message, on_reply: Callable[[Message | AiodistError], None]
    ) -> int:
        """Send a request that has many replies; the last one is an error, if there is an end."""
        self._check_open()
        number = next(self._requests)
        data = encode_message(message, number)
        self._subscribers[number] = on_reply
        self._sock.send(data)
        return number

    def tell(self, message: Message) -> None:
        """Send a message that has no reply; nothing happens when the connection has ended."""
        if self.is_open:
            self._send(message)

    def unsubscribe(self, number: int) -> None:
        """End a subscription. Idempotent."""
        if self._subscribers.pop(number, None) is not None:
            self._send(StoreCancel(number))

    def unsubscribe_from_anywhere(self, number: int) -> None:
        """The same, from any thread, a moment later."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.unsubscribe, number)

    async def leave(self, timeout: float) -> bool:
        """Leave the group in order. False: the coordinator did not confirm it within `timeout`
        seconds, or is gone."""
        if self._group is None or not self.is_open:
            return False
        self._group = None
        try:
            await self.request(Leave(), timeout)
        except (TimeoutError, CoordinatorLostError):
            return False
        return True

    def close(self) -> None:
        """Leave the group if need be, and close the connection. Does not wait. Idempotent."""
        if self.is_open and self._group is not None:
            self._send(Leave())
        self._end(GroupClosedError("the connection to the coordinator was closed here"))

    def abort(self) -> None:
        """Close the connection without leaving: the others see this member as lost."""
        self._end(GroupClosedError("the connection to the coordinator was aborted here"))

    def close_fds_after_fork(self) -> None:
        """To be called in a forked child: gives up the child's copy of the socket, without a trace
        for the parent. Later calls raise GroupClosedError."""
        self._ended = GroupClosedError("the group belongs to the parent of this forked process")
        self._pending.clear()
        self._subscribers.clear()
        self._sock.detach_after_fork()

    def unexpected(self, reply: Message) -> ProtocolError:
        """The error for a reply of a type that does not belong to the request."""
        return ProtocolError(
            f"the coordinator at {self.address} replied with {type(reply).__name__}, which "
            "answers no such request"
        )

    # Inside.

    def _check_open(self) -> None:
        if self._ended is not None:
            raise copy.copy(self._ended)

    def _send(self, message: Message) -> None:
        self._sock.send(encode_message(message))

    def _start(self, message: Message) -> tuple[int, asyncio.Future[Message]]:
        self._check_open()
        number = next(self._requests)
        data = encode_message(message, number)
        reply: asyncio.Future[Message] = self._loop.create_future()
        self._pending[number] = reply
        self._sock.send(data)
        return number, reply

    async def _withdraw(
        self, joined: asyncio.Future[Message], ask: JoinRequest, timeout: float
    ) -> None:
        """The time is over. Returns if the view was on its way, else raises JoinTimeoutError."""
        number, withdrawn = self._start(Withdraw())
        try:
            await asyncio.wait(
                {joined, withdrawn},
                timeout=WITHDRAW_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._pending.pop(number, None)
        if joined.done():
            withdrawn.cancel()
            return
        text = f"the coordinator does not say why, nor anything for {WITHDRAW_SECONDS:g} s"
        if withdrawn.done():
            reply = withdrawn.result()
            if not isinstance(reply, Withdrawn):
                raise self.unexpected(reply)
            text = reply.text
        raise JoinTimeoutError(f"gave up joining after {timeout:g} s: {text}", group=ask.group)

    def _renew_lease(self, lease: float) -> None:
        """Start the lease thread, for the first join."""
        if self._renewing:
            return
        self._renewing = True
        threading.Thread(
            target=_renew,
            args=(self._sock, self._loop, self._stop_renewing, lease / 3),
            name="aiodist-lease",
            daemon=True,
        ).start()

    def _on_frame(self, frame: Frame) -> None:
        number, message = decode_message(frame)
        if number == 0:
            self._on_told(message)
            return
        subscriber = self._subscribers.get(number)
        if subscriber is not None:
            if isinstance(message, Failed):
                del self._subscribers[number]
                subscriber(self._error(message))
            else:
                subscriber(message)
            return
        reply = self._pending.get(number)
        if reply is None or reply.done():
            return  # the caller waits no more
        if isinstance(message, Failed):
            reply.set_exception(self._error(message))
        else:
            reply.set_result(message)

    def _on_told(self, message: Message) -> None:
        match message:
            case MemberLost() | MemberLeft() | Draining():
                self._tell(message)
            case Goodbye():
                self._gone = CoordinatorGone("it was shut down", orderly=True)
            case Evicted(reason):
                text = f"it ruled this rank lost: {reason}"
                self._gone = CoordinatorGone(text, evicted=True)
            case _:
                raise ProtocolError(f"{type(message).__name__} is no message to be told unasked")

    def _on_closed(self, error: Exception) -> None:
        gone = self._gone
        if not gone.reason:
            gone = CoordinatorGone(str(error) or type(error).__name__)
        text = f"the coordinator at {self.address} is gone: {gone.reason}"
        lost = GroupClosedError if gone.evicted else CoordinatorLostError
        self._end(lost(text, group=self._group))
        self._tell(gone)

    def _tell(self, event: ControlEvent) -> None:
        try:
            self.on_event(event)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"on_event failed with {event!r}", "exception": error}
            )

    def _end(self, error: AiodistError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self._stop_renewing.set()
        self._sock.close()
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            if not reply.done():
                reply.set_exception(copy.copy(error))
                reply.exception()  # seen: whoever waits gets it, nobody else has to
        subscribers, self._subscribers = self._subscribers, {}
        for subscriber in subscribers.values():
            subscriber(copy.copy(error))

    def _error(self, failed: Failed) -> AiodistError:
        return _ERRORS[failed.kind](failed.text, group=self._group)


def _renew(
    sock: ControlSocket, loop: asyncio.AbstractEventLoop, stop: threading.Event, interval: float
) -> None:
    """The lease thread: a sign of life every `interval` seconds, however busy the loop is."""
    frame = encode_message(Renew())
    while not stop.wait(interval):
        if loop.is_closed():
            # Nobody can use this membership any more: let the others know.
            sock.abandon()
            return
        if not sock.send_from_thread(frame):
            return
