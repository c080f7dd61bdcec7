"""Links that outlive their connection.

A link that was given a keeper (`keep`) keeps what it has sent until the peer has it. If its
connection breaks, it is *severed*: nothing moves any more, all that it has to send waits, and the
keeper is told. Another link goes on where it stopped (`adopt`), or it is closed.

Frames are counted on both sides, so whoever makes a new connection can say what has come, and the
rest is sent again, from the start of a frame on. The payload of a frame that had begun to come goes
where it went before::

    sender    acknowledged │ kept: sent, perhaps lost │ begun │ queued, urgent │ queued, bulk
    frames    0 … 39       │ 40   41   42   43   44   │ 45    │ (no numbers yet)
    receiver  0 … 41 have come, and a part of 42 ─┐
                           │         ▲
    says: 42 have come ────┼─────────┘   so 40 and 41 are acknowledged by that, and over the new
                           │             connection go 42, 43, 44, 45 from its start, and the rest

**Nothing is lost.** A frame is kept from its last byte written until the peer's count shows that it
has come. The count is of frames that came whole, over all connections, and it is final when it is
said: whoever says it takes nothing more from the connection before (`sever` first reads what is
there). What the peer's system has acknowledged, below us, is no count: its process may not have
read that yet. Only how long lent memory is needed rests on it, see `kept`.

**Nothing comes twice.** The sender goes on with exactly the frame whose number is the count, so the
receiver never sees a frame again that it has given to its `Receiver`, which knows nothing of all
this. The frame that had begun to come is the one exception: its header was given away, and a
landing found, which may be in the midst of an operation. It comes again as a whole, the first of
all, and is not announced again: it has to have the same header and size, and its bytes go to the
same landing, over those that are there already (`_again`). What its owner has changed there
meanwhile stays so.

**Nothing changes places.** What was sent before keeps its order, and goes before all that was only
queued. That had no order yet but that of its queue, which it keeps.

**The link's own frames** (how many have come? so many) are neither counted nor kept, as they are of
one connection: whoever waits for an answer asks again. Nor are those of the greeting, which come
before `keep`, on both sides: so frame 0 is the same one for both.

**Where it cannot go on.** A count is possible from the last one that was acknowledged to all that
were sent, but for frames that were *spent*: their memory was given back to its owner (see `kept`).
With any other count the link is closed, and the coordinator rules who is lost: so a frame may be
lost with its link, but never out of the midst of a stream.

Who dials, and which connection counts where both do, is in `aiodist.links.peer`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable

from aiodist.transports.base import Done, Receiver
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

Keeper = Callable[["LastingLink", BaseException], None]
"""Told of a link that is severed, and why; by the loop."""


class LastingLink(FramedLink):
    """A link whose connection may be replaced. Without a keeper it is like any other."""

    __slots__ = ("_answer", "_keeper", "_lasts", "_severed")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: str, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        self._keeper: Keeper | None = None
        self._lasts = False
        self._severed = False
        self._answer: Outgoing | None = None  # an ACK that is queued

    def keep(self, keeper: Keeper, copies: Copies | None = None) -> None:
        """Keep what is sent from now on, until the peer has it. `keeper` is told when the
        connection breaks; `copies` makes what has to be copied. What came before this call does not
        count."""
        self._keeper = keeper
        self._lasts = True
        self._kept = RetransmissionBuffer(copies)
        self._came = 0
        self._outbox.mark(OWN)

    @property
    def is_severed(self) -> bool:
        """Whether its connection is gone, and it was not closed."""
        return self._severed

    @property
    def came(self) -> int:
        """How many frames have come, over all connections."""
        return self._came

    @property
    def held(self) -> int:
        """How many bytes were sent, or are about to be, that may not have come to the peer's
        system; where it does not say what it has, to the peer."""
        left, kept = self._outbox.backlog, self._kept
        if self._closed or kept is None or not kept.frames:
            return left
        underway = None if self._severed else self._on_the_way()
        return left + (kept.nbytes if underway is None else underway)

    @property
    def unheard(self) -> int:
        """How many frames were sent, or are about to be, of which the peer has not said that they
        came; of those that are queued, only the urgent ones."""
        return self._outbox.urgent + (0 if self._kept is None else len(self._kept.frames))

    def can_go_on(self, came: int) -> bool:
        """Whether a peer to whom `came` frames have come can be sent the next one."""
        return self._kept is not None and self._kept.can_go_on(came)

    def sever(self) -> None:
        """Give up this connection, for there is another one: nothing more moves, the keeper is not
        told."""
        if not (self._closed or self._severed):
            # What has come over this connection counts: the peer is told how many frames have come,
            # and sends no more than the others again.
            while self._receive():
                pass
            if not self._closed:
                self._unplug()

    def break_off(self, error: BaseException) -> None:
        """The connection is of no use any more."""
        self._lost(error)

    def _lost(self, error: BaseException) -> None:
        """The connection is gone."""
        if self._severed or self._closed:
            return
        # Severed, and not closed: the receiver hears nothing, operations go on waiting, and what
        # they send is queued. Only who has no keeper has nobody that would make another connection;
        # and who is finishing needs none, since all that is left is to end.
        if self._keeper is None or self._finishing:
            self.close(error)
            return
        self._unplug()
        self._loop.call_soon(self._say_severed, self._keeper, error)

    def _say_severed(self, keeper: Keeper, error: BaseException) -> None:
        if self._severed and not self._closed:
            keeper(self, error)

    def _unplug(self) -> None:
        """Let go of the connection, and of nothing else."""
        self._severed = self._peer_ended = True
        self._direct = False
        self._broken = self._broken or ConnectionResetError("the connection is broken")
        self._disconnect()

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the connection. Idempotent."""

    def adopt(self, old: LastingLink, came: int) -> None:
        """Go on in place of `old`, which is severed, of whose frames `came` have come to the peer:
        see `can_go_on`. `old` is as good as closed then; its receiver is not told."""
        assert old._severed and self._keeper is not None and old._kept is not None
        kept = self._kept = old._kept
        # By the loop, as all that is told of a link: those who are told may send, and the order of
        # what is queued is not yet made.
        for done in kept.acknowledge(came):
            self._loop.call_soon(done)
        self._outbox.adopt(old._outbox, kept.again(), OWN)
        self._came = old._came
        self._received_bytes = self.received_bytes + old.received_bytes
        # The peer sends the frame that was cut off again from its start. It is the same frame, and
        # its landing was given already, so that is kept, and the receiver is not asked twice.
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
            self._outbox.detach(token)  # what is to be sent again, over another connection
        if kept.has_lent:
            kept.settle(token, None if self._severed else self._underway())
            if not kept.limit:
                self._ask()

    @abstractmethod
    def _underway(self) -> int | None:
        """How many of the bytes that were sent the peer's system may not have yet; None where
        nobody knows."""

    def _on_the_way(self) -> int | None:
        """How many of the bytes that were sent may not be on the peer's system yet, supposing that
        nobody forwards between the two; None where nobody knows."""
        return self._underway()

    def deliver(self, done: Done) -> bool:
        """Whether all that was sent has come to the peer. If not, `done` will be called."""
        kept = self._kept
        if kept is None or self._closed or not (kept.frames or self._outbox.backlog):
            return True
        # By number and not by time: what is sent after this call is not waited for, or a rank that
        # never stops sending could never leave.
        kept.wait(self._outbox.count(but=OWN), done)
        self._ask()
        return False

    # ---- what the link itself says ----

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
        """The peer's link has said something."""
        kept = self._kept
        if kept is None:
            if not self._lasts:
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
