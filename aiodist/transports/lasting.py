"""Links that outlive their connection.

A link with a keeper (`keep`) keeps what it has sent until the peer has it. If its connection
breaks, it is *severed*: nothing moves any more, data to send waits, and the keeper is told. Then
another link takes its place (`adopt`), or it is closed.

Both sides count frames. Over a new connection each side says how many have come, and the rest is
sent again from the start of a frame on. The payload of a frame that had begun to come goes to its
old landing::

    sender    acknowledged │ kept: sent, perhaps lost │ begun │ queued, urgent │ queued, bulk
    frames    0 … 39       │ 40   41   42   43   44   │ 45    │ (no numbers yet)
    receiver  0 … 41 have come, and a part of 42 ─┐
                           │         ▲
    says: 42 have come ────┼─────────┘   so 40 and 41 are acknowledged by that, and over the new
                           │             connection go 42, 43, 44, 45 from its start, and the rest

**Nothing is lost.** A frame is kept until the peer's count shows that it has come. The count is of
whole frames, over all connections. It is final, because a side that says it reads nothing more from
the old connection (`sever` first reads what is there). Acknowledgements of the peer's system do not
count, because its process may not have read the data yet. They only decide how long lent memory is
needed.

**Nothing comes twice.** The sender goes on with the frame whose number is the count, so the
`Receiver` never sees a frame again. The one exception is the frame that had begun to come: its
header was given away, and its landing may be in the middle of an operation. It comes again as a
whole, first of all, and is not announced again. It must have the same header and size, and its
bytes go to the same landing (`_again`).

**Nothing changes places.** Sent frames keep their order, and come before queued ones, which keep
theirs.

**Frames of the link itself** (ASK, ACK) are neither counted nor kept, because they belong to one
connection: a side that waits for an answer asks again. Frames of the greeting are not counted
either, because they come before `keep` on both sides. So frame 0 is the same for both.

**The limit.** A link can go on for any count from the last acknowledged frame to all sent ones.
*Spent* frames are the exception: their memory was given back to its owner (see `retransmission`).
With any other count the link is closed, and the coordinator rules which rank is lost. So a frame
may be lost together with its link, but never from the middle of a stream.

`aiodist.links.peer` explains which side dials, and which connection counts if both do.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from aiodist.transports.base import Done, Link, Receiver, Severed
from aiodist.transports.copies import Copies
from aiodist.transports.framed import FramedLink
from aiodist.transports.outbox import Outgoing
from aiodist.transports.retransmission import (
    ACK,
    ASK,
    OWN,
    OWN_SIZE,
    RetransmissionBuffer,
    own_frame,
)


class LastingLink(FramedLink):
    """A link whose connection may be replaced. Without a keeper it is like any other."""

    __slots__ = ("_answer", "_keeper", "_severed", "_was_kept")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: str, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        self._keeper: Severed | None = None
        self._was_kept = False
        self._severed = False
        self._answer: Outgoing | None = None  # an ACK that is queued

    def keep(self, severed: Severed, copies: Copies | None = None) -> None:
        self._keeper = severed
        self._was_kept = True
        self._kept = RetransmissionBuffer(copies)
        self._came = 0
        self._outbox.mark(OWN)

    @property
    def lasts(self) -> bool:
        return True

    @property
    def is_severed(self) -> bool:
        return self._severed

    @property
    def came(self) -> int:
        return self._came

    @property
    def taken(self) -> int:
        return 0 if self._kept is None else self._kept.acknowledged

    @property
    def held(self) -> int:
        # If the system does not say, these are the bytes that the peer may not have.
        left, kept = self._outbox.backlog, self._kept
        if self._closed or kept is None or not kept.frames:
            return left
        underway = None if self._severed else self._on_the_way()
        return left + (kept.nbytes if underway is None else underway)

    @property
    def unheard(self) -> int:
        # Of queued frames, only urgent ones.
        return self._outbox.urgent + (0 if self._kept is None else len(self._kept.frames))

    def can_go_on(self, came: int) -> bool:
        return self._kept is not None and self._kept.can_go_on(came)

    def sever(self) -> None:
        if not (self._closed or self._severed):
            # What has come over this connection counts: the peer hears how many frames have come,
            # and sends only the others again.
            while self._receive():
                pass
            if not self._closed:
                self._unplug()

    def break_off(self, error: BaseException) -> None:
        self._lost(error)

    def _lost(self, error: BaseException) -> None:
        """Handle the loss of the connection."""
        if self._severed or self._closed:
            return
        # Severed instead of closed: the receiver hears nothing, operations go on waiting, and what
        # they send is queued. Without a keeper nothing would make another connection. A link that
        # is finishing needs none, because only the end is left.
        if self._keeper is None or self._finishing:
            self.close(error)
            return
        self._unplug()
        self._loop.call_soon(self._say_severed, self._keeper, error)

    def _say_severed(self, keeper: Severed, error: BaseException) -> None:
        if self._severed and not self._closed:
            keeper(self, error)

    def _unplug(self) -> None:
        """Drop the connection, and nothing else."""
        self._severed = self._peer_ended = True
        self._direct = False
        self._broken = self._broken or ConnectionResetError("the connection is broken")
        self._disconnect()

    @abstractmethod
    def _disconnect(self) -> None:
        """Drop the connection. Idempotent."""

    def adopt(self, old: Link, came: int) -> None:
        # `old` counts as closed afterwards, and its receiver is not told.
        assert isinstance(old, LastingLink)
        assert old._severed and self._keeper is not None and old._kept is not None
        kept = self._kept = old._kept
        # By the loop, because the callees may send, and the order of the queue is not made yet.
        for done in kept.acknowledge(came):
            self._loop.call_soon(done)
        self._outbox.adopt(old._outbox, kept.again(), OWN)
        self._came = old._came
        self._received_bytes = self.received_bytes + old.received_bytes
        # The peer sends the interrupted frame again from its start. Its landing is kept, so that
        # the receiver is not asked twice.
        if old._to_come:
            self._again = (old._header, old._arrived + old._to_come, old._landing)
        else:
            self._again = old._again
        old._kept = old._keeper = None
        old._closed = old._told = True
        old._forget()
        self._direct = False
        self._flush()
        if kept.is_awaited:
            self._ask()

    def _stop_keeping(self) -> None:
        kept, self._kept, self._keeper = self._kept, None, None
        if kept is not None and not self._loop.is_closed():
            for done in kept.end():
                self._loop.call_soon(done)

    def _send_bye(self) -> None:
        self._stop_keeping()
        if self._severed:
            self.close(ConnectionResetError(f"the connection to {self._peer_name} is broken"))
        else:
            super()._send_bye()

    # ---- memory that is lent ----

    def discard(self, token: object) -> None:
        super().discard(token)
        if token is not None:
            self.settle(token)

    def settle(self, token: object) -> None:
        kept = self._kept
        if kept is None or self._closed:
            return
        if self._outbox.backlog:
            self._outbox.detach(token)  # frames to be sent again over another connection
        if kept.has_lent:
            kept.settle(token, None if self._severed else self._underway())
            if not kept.limit:
                self._ask()

    @abstractmethod
    def _underway(self) -> int | None:
        """Return how many sent bytes the peer's system may not have; None if that is unknown."""

    def _on_the_way(self) -> int | None:
        """Return how many sent bytes may not be on the peer's system, if no proxy is in between.

        None if that is unknown.
        """
        return self._underway()

    def deliver(self, done: Done) -> bool:
        kept = self._kept
        if kept is None or self._closed or not (kept.frames or self._outbox.backlog):
            return True
        # By number, because a rank that never stops sending could never leave otherwise.
        kept.wait(self._outbox.count(but=OWN), done)
        self._ask()
        return False

    # ---- frames of the link itself ----

    def _ask(self) -> None:
        """Ask the peer what has come."""
        if self._kept is not None:
            self._kept.asking()
        self._say(Outgoing(own_frame(ASK), (), 0, None, OWN))

    def _say(self, frame: Outgoing) -> None:
        if not self._direct:
            if self._accepts:
                self._outbox.push(frame, urgent=True)
                if not self._busy:
                    self._flush()
            return
        sent = 0
        try:
            sent = self._write((frame.head,))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._cannot_send(error)
        if sent == len(frame.head):
            if frame.done is not None:
                frame.done()
        elif self._accepts:
            self._queue_rest(frame, sent, urgent=True)

    def _own(self, code: int, number: int) -> None:
        """Handle a frame of the peer's link itself."""
        kept = self._kept
        if kept is None:
            if not self._was_kept:
                super()._own(code, number)  # else this side has ended it
        elif code == ASK:
            answer = self._answer
            head = own_frame(ACK, self._came)
            if answer is not None and answer.left == OWN_SIZE:
                answer.head = head
            else:
                self._answer = Outgoing(head, (), 0, self._answered, OWN)
                self._say(self._answer)
        elif code == ACK:
            for done in kept.acknowledge(number):
                done()
            if kept.is_awaited:
                self._ask()
        else:
            super()._own(code, number)

    def _answered(self) -> None:
        self._answer = None
