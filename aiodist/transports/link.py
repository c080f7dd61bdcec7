"""What all links share: their beginning, their end, and the report of the end.

**Why the loop reports the end.** `send` may find a link broken inside of a collective that holds
half of its state in local variables. If `Receiver.closed` were called there, the collective would
fail while it runs. So the link only notes the end, and reports it once, in a turn of the loop or in
a `poll`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod

from aiodist.errors import ProtocolError
from aiodist.transports.base import Landing, Link, Receiver
from aiodist.transports.outbox import Outbox
from aiodist.wire.frames import MAX_HEADER_BEFORE_HELLO

log = logging.getLogger("aiodist.transport")

POLL_BUDGET = 1024 * 1024
"""The most bytes that one `poll` or wake-up moves each way, so that the loop gets its turn."""

FRAME = 4096
"""Bytes that each frame counts in addition to its own, because many small ones take time, too."""


class Nobody:
    """The receiver of a link without one: any frame is an error."""

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        raise ProtocolError(f"{link.peer_name} sent a frame on a link that has no receiver")

    def closed(self, link: Link, error: BaseException | None) -> None: ...


class BaseLink(Link):
    """Life cycle of a link. Subclasses move the frames.

    `Receiver.closed` is called from `poll`, from `finish` or by the loop, and never inside `send`,
    `close` or `discard`.
    """

    __slots__ = (
        "_closed", "_error", "_finishing", "_loop", "_outbox", "_over", "_peer_ended",
        "_peer_name", "_polling", "_received_bytes", "_told", "kind", "max_header", "max_payload",
        "receiver",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: str, peer_name: str, receiver: Receiver | None
    ) -> None:
        self.kind = kind  # the name of its transport
        # Gets the frames. A `Nobody` after it was told of the end.
        self.receiver: Receiver = Nobody() if receiver is None else receiver
        # Low until the peer has shown that it is a member, so that a stranger gets little memory.
        self.max_header = MAX_HEADER_BEFORE_HELLO
        self.max_payload = MAX_HEADER_BEFORE_HELLO  # low as well
        self._received_bytes = 0  # of payloads, over all connections of the link
        self._loop = loop
        self._peer_name = peer_name
        self._outbox = Outbox()  # what is to be sent
        self._polling = False  # inside a callback, a poll does nothing
        self._peer_ended = False  # nothing more comes over this connection
        self._closed = False  # nothing moves any more
        self._told = False  # the receiver knows that
        self._finishing = False  # `finish` was called: nothing more is accepted
        self._error: BaseException | None = None  # why it was closed; None: it ended in order
        self._over = asyncio.Event()  # set with `_told`, for `finish`

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def peer_name(self) -> str:
        return self._peer_name

    @property
    def backlog(self) -> int:
        return self._outbox.backlog

    @property
    def sent_bytes(self) -> int:
        return self._outbox.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    def __repr__(self) -> str:
        state = "closed" if self._closed else "finishing" if self._finishing else "open"
        return f"<{type(self).__name__} {self.kind} to {self._peer_name} {state}>"

    @abstractmethod
    def _read(self) -> bool:
        """Read what has come, at most one turn's budget. Returns whether something happened."""

    @abstractmethod
    def _release(self) -> None:
        """Release everything, because the link was just closed."""

    @abstractmethod
    def _send_bye(self) -> None:
        """Send the end-of-stream marker behind all that is queued."""

    def discard(self, token: object) -> None:
        self._outbox.discard(token)

    def settle(self, token: object) -> None: ...

    def _receive(self) -> bool:
        """Read until nothing is left or a turn's budget is used up. Returns whether something
        happened."""
        moved = False
        if not (self._closed or self._peer_ended):
            self._polling = True
            try:
                moved = self._read()
            except BaseException as error:
                self._failed(error)
            finally:
                self._polling = False
        if self._closed and not self._told:
            self._tell()
            return True
        return moved

    def close(self, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._error = error
        self._release()
        if not self._loop.is_closed():  # else nothing can be called any more
            self._loop.call_soon(self._tell)

    async def finish(self, timeout: float) -> None:
        # The caller hears of the end by the return, and the receiver before that by `closed`, in
        # every case: an orderly end, a peer that never answers, a cancelled caller. So there are
        # three ways out of the wait, and all of them end here.
        if not self._closed and not self._finishing:
            self._finishing = True
            self._send_bye()
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                await self._over.wait()
        except TimeoutError:
            self.close(
                TimeoutError(f"{self._peer_name} did not end the connection within {timeout:g} s")
            )
        finally:
            self.close()
            self._tell()

    def _tell(self) -> None:
        """Report the end, once."""
        if self._told:
            return
        self._told = True
        self._over.set()
        receiver, self.receiver = self.receiver, Nobody()
        try:
            receiver.closed(self, self._error)
        except Exception:
            log.exception("the receiver of %r failed in closed()", self)

    def _failed(self, error: BaseException) -> None:
        """Log an error of a callback, or of the peer's protocol, and close.

        Passes on what is no Exception, for example a KeyboardInterrupt.
        """
        if not isinstance(error, Exception):
            # The position in the stream is lost. Left open, the link would be silent for ever.
            self.close(ConnectionAbortedError(f"a callback was interrupted: {error!r}"))
            raise error
        if isinstance(error, ProtocolError):
            told = getattr(self.receiver, "tells_why", False)  # then the receiver logs it
            level = logging.DEBUG if told else logging.WARNING
            log.log(level, "closing the link to %s: %s", self._peer_name, error)
        else:
            log.error("a callback of the link to %s failed", self._peer_name, exc_info=error)
        self.close(error)
