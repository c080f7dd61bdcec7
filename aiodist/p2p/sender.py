"""The sending half of point to point: credit, queues of this rank, and transfers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiodist.buffers.encoding import Encoded
from aiodist.devices.values import Sources
from aiodist.errors import AiodistError, MessageTooLargeError, ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import (
    EAGER,
    CorePushes,
    Limits,
    MessageTag,
    SenderCredit,
    cost,
    limits_for,
)
from aiodist.p2p.device_sections import Departure
from aiodist.p2p.mailbox import NumberedQueue
from aiodist.p2p.pieces import behind, cut
from aiodist.p2p.shared import MessageMemory, ReadOffer
from aiodist.transports.base import STEADY
from aiodist.transports.remote import MemoryProof
from aiodist.work import Work

BURST: Final = 1024 * 1024
"""The most bytes of transfers to one rank that a link holds, or that one turn of the loop sends. So
small messages and collectives get in between."""

NOTHING: Final = -1
"""A value of `Sending.next_part`, besides `METADATA` and `BODY`: all parts have been pulled."""


@dataclass(eq=False, slots=True)
class Sending:
    """A message whose Work is pending."""

    number: int  # in the order of the calls
    work: Work[None]
    dst: int
    tag: MessageTag
    encoded: Encoded  # metadata, and views of the arrays
    price: int  # what it costs of the receiver's credit
    is_eager: bool  # it goes as one frame, even without a receive
    is_synchronous: bool  # a receive has to match it first
    is_steady: bool  # its memory is not written again
    sources: Sources | None
    """Its arrays on a device."""
    words: bytes = b""
    """How the receiver can read these."""
    departure: Departure | None = None
    """Brings them to the host, if needed."""
    sid: int | None = None  # None: it waits here, and nothing was sent
    next_part: int = NOTHING  # what the receiver pulls next
    # Of the current part: the pieces that are not in the link yet.
    pieces: Iterator[list[memoryview]] = field(default_factory=lambda: iter(()))
    ahead: list[memoryview] | None = None  # the next piece
    in_link: int = 0  # its bytes that the link holds
    shown: bool = False  # the receiver can read all of it in this memory
    proof: MemoryProof | None = None  # shows that it was right
    pushed: bool = False  # its data goes without a pull
    front: int = 0  # bytes that go without a pull, if the rest is pulled
    may_go: int = 0  # bytes of the current part that may go to the link
    gone: bool = False  # it has ended: pieces that leave do not count


@dataclass(eq=False)
class Destination(CorePushes):
    """One receiver."""

    credit: SenderCredit  # what it allows this rank to send
    # Messages without credit.
    waiting: dict[MessageTag, NumberedQueue[Sending]] = field(default_factory=dict)
    announced: dict[int, Sending] = field(default_factory=dict)  # by id: messages that it may pull
    moving: deque[Sending] = field(default_factory=deque)  # those with a piece to send, in turn
    in_link: int = 0  # bytes of all messages that the link holds
    woken: bool = False  # `_resume` will be called

    def __post_init__(self) -> None:
        self.sid, self.may_push = wire.FIRST_SID - 1, False

    @property
    def idle(self) -> bool:
        """Whether nothing is pending and no state is kept for any tag."""
        return self.credit.idle and not self.waiting and not self.announced


class Sender:
    """Sends to all ranks. `ended` is called with a Work that this side completed."""

    def __init__(
        self,
        out: wire.Wire,
        channel: wire.Channel,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Work[Any]], None],
        limits: Limits | None = None,
        shared: MessageMemory | None = None,
    ) -> None:
        self._shared = shared  # memory that other ranks read; None: there is none
        self._wire = out  # takes frames for receivers
        self._channel = channel
        self._loop = loop
        self._ended = ended
        # What is known of each receiver, by rank.
        self._limits = limits or limits_for(0)
        self._peers = [Destination(SenderCredit(self._limits)) for _ in range(channel.size)]
        self._number = 0  # of the last message that was not done at once

    @property
    def idle(self) -> bool:
        return all(peer.idle for peer in self._peers)

    def books(self, dst: int) -> tuple[Any, ...]:
        """Return the credit of `dst`, its parts, and its waiting, pushed and announced messages,
        for the compiled part."""
        peer = self._peers[dst]
        return peer.credit, *peer.credit.books, peer.waiting, peer, peer.announced

    # -- from the user ----------------------------------------------------------------------------

    def send(
        self,
        work: Work[None],
        dst: int,
        tag: MessageTag,
        encoded: Encoded,
        sources: Sources | None = None,
        *,
        synchronous: bool = False,
        steady: bool = False,
    ) -> Sending | None:
        """Send a message. `sources` has its arrays on a device. None: `work` is complete.

        A `synchronous` message is always announced. Then the pull shows that a receive has matched
        it, which its sender waits for.
        """
        peer = self._peers[dst]
        meta = len(encoded.meta)
        nbytes = meta + encoded.nbytes
        eager = nbytes <= EAGER and sources is None and not synchronous
        price = cost(tag, nbytes if eager else meta if meta <= wire.INLINE else 0)
        # If others of its tag wait, it goes behind them, even if there is credit, because messages
        # of a tag are matched in the order they were sent.
        wanted = None if tag in peer.waiting else peer.credit.admit(tag, price)
        if wanted is not None and eager:
            self._send_eager(dst, tag, wanted, encoded)
            work.finish(None)
            return None
        self._number += 1
        sending = Sending(
            self._number, work, dst, tag, encoded, price, eager, synchronous, steady, sources
        )
        if wanted is not None:
            self._announce(peer, sending, wanted)
        else:
            line = peer.waiting.get(tag)
            if line is None:
                line = peer.waiting[tag] = NumberedQueue()
            line.insert(sending.number, sending)
        return None if work.done() else sending

    def pay(self, dst: int, tag: MessageTag, price: int) -> bool:
        """Pay for an eager message that is sent at once. False: it has to go by `send`."""
        peer = self._peers[dst]
        return tag not in peer.waiting and peer.credit.pay(tag, price)

    def repay(self, dst: int, tag: MessageTag, price: int) -> None:
        """Take back what was paid, because the message was not sent."""
        self._peers[dst].credit.refund(tag, price)

    def push(self, dst: int, tag: MessageTag, price: int) -> int | None:
        """Pay for a whole message that is pushed at once, and return its id. None: it has to go by
        `send`."""
        peer = self._peers[dst]
        if not (peer.may_push and self.pay(dst, tag, price)):
            return None
        peer.may_push = False
        peer.sid += 1
        return peer.sid

    def unpush(self, dst: int, tag: MessageTag, price: int) -> None:
        """Take back what was paid, because the message was not sent."""
        peer = self._peers[dst]
        peer.may_push = True
        peer.sid -= 1
        self.repay(dst, tag, price)

    def withdraw(self, sending: Sending) -> None:
        """Let go of the buffers of a pending message. No receive completes with it."""
        peer = self._peers[sending.dst]
        sending.gone = True
        if sending.sid is None:
            self._unqueue(peer, sending)
            # The message behind it may be small enough for the credit that is left.
            self._drain(peer, (sending.tag,))
            self._let_go(sending)
            return
        del peer.announced[sending.sid]
        self._stop(peer, sending)
        # Not urgent: it must not overtake the announcement, or pieces in flight.
        self._wire.send(sending.dst, (wire.WITHDRAW, sending.sid))
        self._wake(peer)

    def lose(self, dst: int) -> list[Work[Any]]:
        """Release everything of `dst`, which is gone. Return the Works that fail."""
        peer, self._peers[dst] = self._peers[dst], Destination(SenderCredit(self._limits))
        pending = [sending for line in peer.waiting.values() for sending in line.values()]
        pending += peer.announced.values()
        for sending in pending:
            sending.gone = True
            self._stop(peer, sending)
        peer.moving.clear()
        return [sending.work for sending in pending]

    # -- frames from the receiver -----------------------------------------------------------------

    def pulled(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        sid, part, start = wire.read_pull(fields, nbytes)
        peer = self._peers[src]
        sending = self._find(peer, sid)
        if part == wire.LEAVE:
            # A pushed message gets no other pull, and it may be gone by now.
            peer.may_push, part = True, wire.BODY
        if sending is None or sending.pushed:
            return
        if sending.shown and part in {wire.READ, wire.TAKEN} and sending.next_part == wire.BODY:
            assert self._shared is not None
            self._shared.sent(sending.encoded.nbytes)
            sending.next_part = NOTHING
            self._all_left(peer, sending, proved=part == wire.TAKEN)
            return
        if part == wire.REST and sending.shown and start < sending.encoded.nbytes:
            assert self._shared is not None
            self._shared.sent(start)
            part = wire.BODY
        due = wire.METADATA if part == wire.METADATA else wire.BODY
        if due != sending.next_part or part > wire.WHOLE:
            raise ProtocolError(
                f"rank {src} pulled part {part} of message {sid}, which was not due"
            )
        if part == wire.METADATA:
            sending.next_part = wire.BODY
            self._move(peer, sending, [memoryview(sending.encoded.meta)])
            return
        sending.next_part = NOTHING
        if sending.proof is not None and self._shared is not None and not start:
            self._shared.pulled(src)
        sources = sending.sources
        if sources is None or (part == wire.BODY and sending.words):
            if sources is not None:
                sources.device_memory.handles.told(sending.words, src)
            if sending.front:
                self._go_on(peer, sending)
            else:
                self._move(peer, sending, behind(sending.encoded.buffers, start))
            return
        try:
            sending.departure = Departure(sources, sending.encoded)
        except Exception as error:
            self._device_failed(sending, error)
        else:
            self._send_section(peer, sending, sending.departure)

    def _send_section(self, peer: Destination, sending: Sending, departure: Departure) -> None:
        """Send the next section when it is on the host."""
        then = partial(self._copied, peer, sending, departure)
        departure.when_there(then, partial(self._device_failed, sending))

    def _copied(
        self,
        peer: Destination,
        sending: Sending,
        departure: Departure,
        section: Sequence[memoryview],
    ) -> None:
        """Send a section that is on the host now."""
        if sending.gone:
            return
        try:
            # First, so that the device copies the next section while this one is sent.
            departure.fetch()
        except Exception as error:
            self._device_failed(sending, error)
        else:
            self._move(peer, sending, section)
            self._wire.flush()

    def _device_failed(self, sending: Sending, error: Exception) -> None:
        """Fail a message whose arrays cannot be copied to the host."""
        if not sending.gone:
            self.withdraw(sending)
            self._ended(sending.work)
            sending.work.fail(error)
            self._wire.flush()

    def _move(
        self,
        peer: Destination,
        sending: Sending,
        buffers: Sequence[memoryview],
        most: int = wire.MAX_INT,
    ) -> None:
        """Send the part that was pulled, or the `most` bytes that go ahead."""
        sending.pieces = cut(buffers)
        sending.ahead = next(sending.pieces, None)
        sending.may_go = most
        if sending.ahead is None:
            self._all_left(peer, sending)
        else:
            peer.moving.append(sending)
            self._pump(peer)

    def _go_on(self, peer: Destination, sending: Sending) -> None:
        """Send the rest of a message whose front has gone, or is about to go."""
        if not sending.may_go:
            peer.moving.append(sending)
        sending.may_go = wire.MAX_INT
        self._pump(peer)

    def refused(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        sid, why = wire.read_counts(fields, 2, nbytes)
        peer = self._peers[src]
        sending = self._find(peer, sid)
        if sending is None:
            return
        if sending.next_part == NOTHING and not sending.pushed:
            raise ProtocolError(f"rank {src} refused message {sid} after it had pulled it")
        del peer.announced[sid]
        self._stop(peer, sending)
        self._wake(peer)
        if sending.pushed or sending.front:
            # It waits for the rest, so tell it that there is none, as after every message that ends
            # early.
            self._wire.send(src, (wire.WITHDRAW, sid))
        cls: type[AiodistError] = ProtocolError
        text = (
            f"rank {src} refused the message: it could not read it (see the error of its receive);"
            " all ranks need the same version and allow_pickle"
        )
        if why == wire.TOO_LARGE:
            cls = MessageTooLargeError
            size = len(sending.encoded.meta) + sending.encoded.nbytes + sending.encoded.elsewhere
            text = (
                f"rank {src} refused a message of {size} bytes: it is over the max_message_bytes it"
                " connected with; raise that there, or send less at once"
            )
        work = sending.work
        self._ended(work)
        work.fail(self._channel.error(cls, text, op=work.op, tag=sending.tag))

    def refunded(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        peer = self._peers[src]
        credits = wire.read_credits(fields, nbytes)
        for tag, amount in credits:
            peer.credit.refund(tag, amount)
        if peer.waiting:
            self._drain(peer, [tag for tag, _ in credits])

    def wanted(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        peer = self._peers[src]
        tag = wire.read_tag(fields, nbytes)
        peer.credit.want(tag)
        if tag in peer.waiting:
            self._drain(peer, (tag,))

    def unwanted(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        tag = wire.read_tag(fields, nbytes)
        if self._peers[src].credit.unwant(tag):
            self._wire.send(src, (wire.NOWANT, tag))

    def _find(self, peer: Destination, sid: int) -> Sending | None:
        """Return the message with the id. None: it was withdrawn while the frame was in flight."""
        if not wire.FIRST_SID <= sid <= peer.sid:
            raise ProtocolError(f"a frame is for message {sid}, which was never announced")
        return peer.announced.get(sid)

    # -- messages whose turn it is ----------------------------------------------------------------

    def _send_eager(self, dst: int, tag: MessageTag, wanted: bool, encoded: Encoded) -> None:
        # Copy it, so that the send is complete. Credit limits what is queued in the link.
        meta = encoded.meta
        data = b"".join((meta, *encoded.buffers))
        self._wire.send(dst, (wire.EAGER, tag, wanted, len(meta)), (memoryview(data),))

    def _announce(self, peer: Destination, sending: Sending, wanted: bool) -> None:
        meta = sending.encoded.meta
        peer.sid += 1
        sid = sending.sid = peer.sid
        peer.announced[sid] = sending
        inline = len(meta) <= wire.INLINE
        sending.next_part = wire.BODY if inline else wire.METADATA
        nbytes = sending.encoded.nbytes + sending.encoded.elsewhere
        sending.pushed = self._pushes(peer, sending)
        offer = None if sending.pushed else self._offer(sending)
        if not (sending.pushed or wanted) and offer is None and inline:
            sending.front = self._front(peer, sending)
        about = (sending.tag, wanted, sid, len(meta), nbytes)
        fields: tuple[Any, ...] = (wire.RTS, *about)
        if sending.pushed:
            fields = (wire.PUSH, *about)
        elif sending.front:
            fields = (wire.AHEAD, *about, sending.front)
        elif sending.sources is not None:
            words = sending.sources.words(sending.dst)
            if 0 < len(words) <= wire.MAX_WORDS:
                sending.words = words
                fields += (words,)
        elif offer is not None:
            where, sending.proof = offer
            sending.shown = True
            fields += (where,)
        self._wire.send(
            sending.dst,
            fields,
            (memoryview(meta),) if inline else (),
        )
        if sending.pushed:
            peer.may_push = False
            sending.next_part = NOTHING
            self._move(peer, sending, sending.encoded.buffers)
        elif sending.front:
            self._move(peer, sending, sending.encoded.buffers, sending.front)

    def _front(self, peer: Destination, sending: Sending) -> int:
        """Pay for what goes ahead of the pull, and return its bytes: whole pieces, but not the
        whole message."""
        if sending.sources is not None or sending.dst == self._wire.rank:
            return 0
        most = min(self._limits.ahead, peer.credit.spare(sending.tag), sending.encoded.nbytes - 1)
        front = 0
        for piece in cut(sending.encoded.buffers):
            nbytes = sum([view.nbytes for view in piece])
            if front + nbytes > most:
                break
            front += nbytes
        if front:
            peer.credit.pay(sending.tag, front)
        return front

    def _offer(self, sending: Sending) -> ReadOffer | None:
        """Return the place at which the receiver may read the data, or None."""
        if self._shared is None or sending.sources is not None or sending.dst == self._wire.rank:
            return None
        return self._shared.where(sending.dst, sending.encoded.buffers)

    def _pushes(self, peer: Destination, sending: Sending) -> bool:
        """Return whether the data directly follows the announcement."""
        return (
            peer.may_push
            and 0 < sending.encoded.nbytes <= max(wire.MOST_PUSHED, self._limits.ahead)
            and len(sending.encoded.meta) <= wire.INLINE
            and sending.sources is None
            and not sending.is_synchronous
        )

    def _drain(self, peer: Destination, tags: Sequence[MessageTag]) -> None:
        """Send messages that waited and may go now: of `tags`, then of the tags that the total held
        back."""
        for tag in tags:
            self._advance(peer, tag)
        first = peer.credit.first_stalled()
        while first is not None:
            self._advance(peer, first)
            tried, first = first, peer.credit.first_stalled()
            if first == tried:  # the total does not allow it yet
                break

    def _advance(self, peer: Destination, tag: MessageTag) -> None:
        while (line := peer.waiting.get(tag)) is not None:
            sending = line.head
            wanted = peer.credit.admit(tag, sending.price)
            if wanted is None:
                return
            self._unqueue(peer, sending)
            if sending.is_eager:
                self._send_eager(sending.dst, tag, wanted, sending.encoded)
                self._ended(sending.work)
                sending.work.finish(None)
            else:
                self._announce(peer, sending, wanted)

    def _unqueue(self, peer: Destination, sending: Sending) -> None:
        line = peer.waiting[sending.tag]
        del line[sending.number]
        if not line:
            del peer.waiting[sending.tag]
            peer.credit.forget(sending.tag)

    # -- transfers --------------------------------------------------------------------------------

    def _pump(self, peer: Destination) -> None:
        """Give pieces to the link, from all transfers in turn."""
        moved = 0
        while peer.moving and moved < BURST and peer.in_link < BURST:
            sending = peer.moving.popleft()
            piece = sending.ahead
            assert piece is not None
            sending.ahead = next(sending.pieces, None)
            nbytes = sum([view.nbytes for view in piece])
            sending.may_go -= nbytes
            if sending.ahead is not None and sending.may_go:
                peer.moving.append(sending)
            moved += nbytes
            sending.in_link += nbytes
            peer.in_link += nbytes
            self._wire.send(
                sending.dst,
                (wire.DATA, sending.sid),
                piece,
                done=partial(self._left, peer, sending, nbytes),
                token=self._token(sending),
            )

    @staticmethod
    def _token(sending: Sending) -> object:
        """Return the token by which its pieces can be taken back."""
        # Metadata belongs to aiodist, so it may leave even after a withdrawal. It must, because the
        # receiver reads it as it comes, and must never get zeros instead. The same holds for memory
        # that will not be written.
        if sending.next_part != NOTHING and not sending.front:
            return None
        return STEADY if sending.is_steady else sending

    def _left(self, peer: Destination, sending: Sending, nbytes: int) -> None:
        if sending.gone:
            return
        sending.in_link -= nbytes
        peer.in_link -= nbytes
        if sending.ahead is None and not sending.in_link:
            self._all_left(peer, sending)
        self._wake(peer)

    def _all_left(self, peer: Destination, sending: Sending, *, proved: bool = False) -> None:
        """Go on after the current part, or a section of it, has left. `proved`: the receiver knows
        that it is right."""
        if sending.next_part != NOTHING:
            return
        departure = sending.departure
        if departure is not None and departure.more:
            self._send_section(peer, sending, departure)
            return
        assert sending.sid is not None
        del peer.announced[sending.sid]
        # The message is incomplete for the receiver until this frame. A withdrawal sends zeros for
        # the rest of a piece, and these must not be taken for data.
        if not proved:
            self._wire.send(sending.dst, (wire.FIN, sending.sid))
        self._wire.settle(sending.dst, sending)
        _end_offer(sending)
        if sending.sources is not None:
            sending.sources.finished()
        self._ended(sending.work)
        sending.work.finish(None)

    def _stop(self, peer: Destination, sending: Sending) -> None:
        """Send no further pieces, and take back those that the link holds."""
        sending.gone = True
        _end_offer(sending)
        if sending.ahead is not None:
            sending.ahead = None
            if sending.may_go:
                peer.moving.remove(sending)
        if sending.in_link:
            peer.in_link -= sending.in_link
            sending.in_link = 0
            self._wire.discard(sending.dst, sending)
        self._let_go(sending)

    def _let_go(self, sending: Sending) -> None:
        """Release its arrays on a device, but keep them while the receiver may read them."""
        if sending.sources is not None:
            sending.sources.abandon((sending.dst,) if sending.words else ())

    def _wake(self, peer: Destination) -> None:
        if peer.moving and not peer.woken:
            peer.woken = True
            # Later, because a link with room would take piece after piece. So small messages and
            # collectives get their turn in between.
            self._loop.call_soon(self._resume, peer)

    def _resume(self, peer: Destination) -> None:
        peer.woken = False
        self._pump(peer)
        self._wire.flush()
        if peer.in_link < BURST:
            self._wake(peer)


def _end_offer(sending: Sending) -> None:
    """Give the memory back to the user."""
    if sending.proof is not None:
        sending.proof.withdraw()
        sending.proof = None
