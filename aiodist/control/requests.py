"""The unanswered requests of a member.

Requests outlive a connection. They are sent again over the next one, in their order and under their
numbers, so that the coordinator can tell which it has carried out already.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiodist.errors import AiodistError
from aiodist.wire.codec import encode_message
from aiodist.wire.limits import MAX_BODY, MAX_WRITES
from aiodist.wire.messages import (
    Message,
    StoreCancel,
    StoreRequest,
    StoreWait,
    StoreWatch,
    StoreWrite,
)
from aiodist.wire.recovery import Vote, WatchWaiting

OnReply = Callable[[Message | AiodistError], None]


@dataclass(slots=True)
class _Request:
    """A request.

    `sent`: over this connection or an earlier one. A sent write keeps its place among those under
    way until its answer comes, even if its caller has given up. `since`: when it was made, by the
    clock of the loop. `is_in_line`: it waits for a free place, or behind a write that does.
    """

    message: Message
    data: bytes
    reply: asyncio.Future[Message]
    since: float
    sent: bool = False
    has_deadline: bool = False
    is_in_line: bool = False


@dataclass(frozen=True, slots=True)
class _Watch:
    message: StoreWatch | WatchWaiting
    on_reply: OnReply


class Requests:
    """Requests and subscriptions by number. `send(data)` sends a frame, and is set while
    connected."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.send: Callable[[bytes], None] | None = None  # None: not connected
        self._loop = loop
        self._numbers = itertools.count(1)  # of requests and subscriptions; 0 means: no reply
        self._requests: dict[int, _Request] = {}  # by number; writes stay even if no caller waits
        self._watches: dict[int, _Watch] = {}  # subscriptions, by number
        self._told: list[bytes] = []  # messages without a reply, while not connected
        self._writes = 0  # writes to the store that are under way
        # Numbers of store requests that wait for a place. Reads wait, too, because they must find
        # what was written before them.
        self._line: deque[int] = deque()

    def start(
        self,
        message: Message,
        *,
        send: Callable[[bytes], None] | None = None,
        max_body: int = MAX_BODY,
    ) -> tuple[int, asyncio.Future[Message]]:
        """Send a request, now or once connected. Returns its number, and the reply.

        A write to the store waits until few enough writes are under way. Raises as `encode_message`
        does.
        """
        number = next(self._numbers)
        data = encode_message(message, number, max_body=max_body)
        request = _Request(message, data, self._loop.create_future(), self._loop.time())
        self._requests[number] = request
        if isinstance(message, StoreRequest):
            request.is_in_line = True
            self._line.append(number)
            self._admit()
        else:
            self._send(request, send or self.send)
        return number, request.reply

    def _admit(self) -> None:
        """Send the requests in line that need not wait any more."""
        while self._line:
            request = self._requests.get(self._line[0])
            if request is not None:
                if isinstance(request.message, StoreWrite):
                    if self._writes == MAX_WRITES:
                        return
                    self._writes += 1
                request.is_in_line = False
                self._send(request, self.send)
            self._line.popleft()

    def _send(self, request: _Request, send: Callable[[bytes], None] | None) -> None:
        if send is not None:
            request.sent = True
            send(request.data)

    async def ask(self, message: Message, timeout: float | None) -> Message:
        """Send a request and return the reply.

        Raises TimeoutError, the error of the reply, and what `encode_message` raises.
        """
        number, reply = self.start(message)
        self._requests[number].has_deadline = timeout is not None
        try:
            # No asyncio.timeout, because this may begin within a task of the user
            # (`aiodist.composing.started`).
            await asyncio.wait({reply}, timeout=timeout)
        finally:
            if reply.cancel():  # it has not come
                self._give_up(number)
        if reply.cancelled():
            raise TimeoutError
        return reply.result()

    def begin(self, message: Message) -> asyncio.Future[Message]:
        """Send a request. Returns its reply, which you need not await."""
        number, reply = self.start(message)
        reply.add_done_callback(lambda _: self.drop(number))
        return reply

    def amend(self, message: Message, other: Message) -> None:
        """Ask `other` instead of `message`, whose caller has gone. No effect if it is answered.

        It keeps its number, so that only `other` is sent over a later connection.
        """
        for number, request in self._requests.items():
            if request.message is message:
                request.message, request.data = other, encode_message(other, number)
                request.since = math.inf  # no call waits for it any more
                self._send(request, self.send)

    def tell(self, message: Message) -> None:
        """Send a message without a reply, now or once connected."""
        data = encode_message(message)
        if self.send is not None:
            self.send(data)
        else:
            self._told.append(data)

    def of(self, number: int) -> Message | None:
        """Return the request of that number, if its reply is awaited."""
        request = self._requests.get(number)
        return None if request is None else request.message

    def older_than(self, seconds: float) -> dict[int, Message]:
        """Return the requests that have waited this long, by number: votes, and store requests with
        a deadline."""
        before = self._loop.time() - seconds
        return {
            number: request.message
            for number, request in self._requests.items()
            if request.since <= before
            and (
                isinstance(request.message, Vote)
                or (request.has_deadline and isinstance(request.message, StoreRequest))
            )
            and not request.reply.done()
        }

    def drop(self, number: int) -> None:
        """Forget a request whose reply is no longer awaited."""
        request = self._requests.pop(number, None)
        if request is not None and isinstance(request.message, StoreWrite):
            if not request.is_in_line:
                self._writes -= 1
            self._admit()

    def watch(self, message: StoreWatch | WatchWaiting, on_reply: OnReply) -> int:
        """Send a request that has many replies, the last maybe an error. Returns its number."""
        number = next(self._numbers)
        data = encode_message(message, number)
        self._watches[number] = _Watch(message, on_reply)
        if self.send is not None:
            self.send(data)
        return number

    def unwatch(self, number: int) -> None:
        """End a subscription. Idempotent."""
        if self._watches.pop(number, None) is not None and self.send is not None:
            self.send(encode_message(StoreCancel(number)))

    def answer(self, number: int, reply: Message | AiodistError) -> None:
        """Take in a reply."""
        watch = self._watches.get(number)
        if watch is not None:
            if isinstance(reply, AiodistError):
                del self._watches[number]
            watch.on_reply(reply)
            return
        request = self._requests.get(number)
        if request is None:
            return  # the caller does not wait any more
        self.drop(number)
        if request.reply.done():
            return
        if isinstance(reply, AiodistError):
            request.reply.set_exception(reply)
        else:
            request.reply.set_result(reply)

    def say_again(self) -> None:
        """Send all unanswered requests again, over a new connection."""
        assert self.send is not None
        # In their order, so that a program that sets a key and then reads it finds the value, even
        # if the connection broke in between. Under their old numbers, so that the coordinator
        # recognises writes that it has carried out already. Requests without a waiting caller are
        # dropped. Watches begin anew, and are told what they may have missed.
        send, self.send = self.send, None  # writes that get a place by that are sent below
        for number, request in list(self._requests.items()):
            if request.reply.done():
                self.drop(number)
        self.send = send
        for request in self._requests.values():
            if not request.is_in_line:
                self._send(request, send)
        for number, watch in self._watches.items():
            message = watch.message
            if isinstance(message, StoreWatch):
                message = replace(message, again=True)
            send(encode_message(message, number))
        # After the requests, because these messages may be about them.
        told, self._told = self._told, []
        for data in told:
            send(data)

    def fail(self, error: AiodistError, *, only_store: bool = False) -> None:
        """Fail all requests; with `only_store` those to the store, because its content is lost."""
        which = StoreRequest if only_store else Message
        self._line.clear()  # writes are among them
        for number, request in list(self._requests.items()):
            if isinstance(request.message, which):
                self.drop(number)
                if not request.reply.done():
                    request.reply.set_exception(copy.copy(error))
                    # marks it as retrieved, because there may be no waiter
                    request.reply.exception()
        for number, watch in list(self._watches.items()):
            if isinstance(watch.message, which):
                del self._watches[number]
                watch.on_reply(copy.copy(error))

    def _give_up(self, number: int) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        if isinstance(request.message, StoreWait) and request.sent and self.send is not None:
            self.send(encode_message(StoreCancel(number)))
        # A write that was sent may be carried out. The coordinator remembers its answer only while
        # few enough writes are under way, so the write keeps its place until the answer comes.
        if not (request.sent and isinstance(request.message, StoreWrite)):
            self.drop(number)
