"""The receiving half of point to point: which receive takes which message, and their credit.

`delivery` has what follows a match, `credit` and `flow` the rules of flow control, and `mailbox`
the lines of waiting messages and receives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from aiodist.devices.memory import DeviceMemory
from aiodist.devices.work import DeviceWork
from aiodist.errors import AiodistError, ProtocolError, despite_errors
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import Key, Limits, MessageTag, Source, cost, limits_for
from aiodist.p2p.delivery import Delivery
from aiodist.p2p.flow import Flow
from aiodist.p2p.mailbox import Mailbox, PendingReceives
from aiodist.p2p.messages import (
    REMEMBERED,
    ComingMessage,
    Envelope,
    Origin,
    PendingReceive,
    Probing,
)
from aiodist.p2p.pieces import Pieces
from aiodist.p2p.shared import MessageMemory
from aiodist.transports.base import Landing
from aiodist.work import Work


class MessageReceiver:
    """Receives from all ranks.

    `ended` is called with a Work that this side completed. `lost` gets the source of an operation,
    its name and its tag, and returns the error if that needs a lost rank, or None.
    """

    def __init__(
        self,
        out: wire.Wire,
        channel: wire.Channel,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Work[Any]], None],
        lost: Callable[[Source, str, Key], AiodistError | None],
        device_memory: DeviceMemory | None = None,
        limits: Limits | None = None,
        shared: MessageMemory | None = None,
    ) -> None:
        self._shared = shared  # memory of other ranks; None: there is none to read
        self._wire = out  # takes frames for senders
        self._channel = channel
        self._asked: set[int] = set()  # ranks that say when they leave, and have not left
        self._max_message_bytes = channel.max_message_bytes
        self._ended = ended
        self._lost = lost
        # What is known of each sender, by rank.
        self._origins = [Origin() for _ in range(channel.size)]
        self._ahead = (limits or limits_for(0)).ahead
        self._mailbox: Mailbox[ComingMessage] = Mailbox()
        self._receives: PendingReceives[PendingReceive] = (
            PendingReceives()
        )  # those without a message
        self._probes: PendingReceives[Probing] = PendingReceives()
        self._waiting: tuple[PendingReceives[Any], ...] = (self._receives, self._probes)
        self._flow = Flow(out, loop, channel.size, self._waiting, limits or limits_for(0))
        self.took = self._flow.passed  # for an eager message that went straight to its receive
        self._delivery = Delivery(
            out, channel, ended, self._arrived, self._consumed, self._offer, device_memory, loop
        )
        self._number = 0  # of the last message or receive, in the order in which they came

    @property
    def idle(self) -> bool:
        """Whether nothing is pending and no state is kept for any tag."""
        waiting = self._mailbox or self._receives or self._probes
        under_way = any(origin.announced or origin.stray for origin in self._origins)
        return not waiting and not under_way and self._flow.idle

    # -- from the short way -----------------------------------------------------------------------

    @property
    def waiting(self) -> tuple[dict[int, Any], dict[Any, Any], set[int], Flow]:
        """Messages and receives that wait, senders to which credit is owed, and what returns that,
        for the compiled part. All remain the same objects."""
        return self._mailbox.boxes, self._receives.lines, self._flow.owed, self._flow

    def books(self, src: int) -> tuple[Any, ...] | None:
        """Return the credit of `src`, its parts, and what it pushes, for the compiled part. None:
        it is lost."""
        books = self._flow.books(src)
        return None if books is None else (*books, self._origins[src])

    def last(self, src: int) -> tuple[MessageTag, bytes]:
        """Return the tag and metadata of the last message of `src` that took the ordinary way."""
        return self._origins[src].last

    def is_free(self, src: int, tag: MessageTag, key: Key) -> bool:
        """Return whether a receive of `key` may take the next message of `src` and `tag`."""
        return self._mailbox.find(src, key) is None and self._receives.first(src, tag) is None

    def next_pushed(self, src: int) -> int | None:
        """Return the id of the next message of `src`, if it may push that. None: it may not."""
        origin = self._origins[src]
        return origin.sid + 1 if origin.may_push else None

    def took_pushed(self, src: int, tag: MessageTag, price: int) -> None:
        """Count a pushed message that went straight to its receive. Raises ProtocolError as `took`
        does."""
        origin = self._origins[src]
        self.took(src, tag, price)
        origin.sid += 1
        # It has used its leave and gets a new one, so `may_push` stays.
        self._wire.hold(src, (wire.PULL, origin.sid, wire.LEAVE))

    @property
    def has_several(self) -> bool:
        """Whether more than one receive waits for a match."""
        return self._receives.has_several

    # -- from the user ----------------------------------------------------------------------------

    def receive(
        self,
        work: Work[Any],
        source: Source,
        tag: Key,
        out: object,
        device_work: DeviceWork | None = None,
        *,
        partial: bool = False,
    ) -> PendingReceive:
        """Post a receive, which may be complete at once. `device_work`: given if `out` is on a
        device."""
        self._number += 1
        receiving = PendingReceive(self._number, work, source, tag, out, partial, device_work)
        self._post(receiving)
        return receiving

    def prepare(self, receiving: PendingReceive) -> None:
        """Make the target for a message like the last one of its source, while the receive
        waits."""
        source = receiving.source
        if type(source) is not int or receiving.out is None or receiving.partial:
            return
        _, meta = self._origins[source].last
        if meta and receiving.message is None:
            self._delivery.prepare(receiving, meta)

    def probe(self, work: Work[Any], source: Source, tag: Key) -> Probing:
        """Post a probe, which may be complete at once."""
        self._number += 1
        probing = Probing(self._number, work, source, tag, None)
        message = self._mailbox.find(source, tag)
        if message is not None:
            self._seen(probing, message)
        elif (error := self._lost(source, work.op, tag)) is not None:
            self._delivery.fail(probing, error)
        else:
            self._probes.add(probing)
            self._flow.review(source, tag)
            self._watch(source)
        return probing

    def peek(self, source: Source, tag: Key) -> Envelope | None:
        """Return what `probe` would give at once, or None. Raises the error that it would fail
        with."""
        message = self._mailbox.find(source, tag)
        if message is not None:
            return Envelope.of(message)
        if (error := self._lost(source, "iprobe", tag)) is not None:
            raise error
        self._flow.question(source, tag)
        self._watch(source)
        return None

    def withdraw(self, receiving: PendingReceive) -> None:
        """Let go of `out`. A matched message goes back to the head of its queue."""
        message = receiving.message
        if message is not None:
            self._delivery.release(message)
            if message.lost is not None and not message.complete:
                assert message.sid is not None and message.pieces is not None
                message.pieces.memory = None  # data under way is written nowhere
                self._origins[message.source].skipped.add(message.sid)
                self._arrived(message)
            # It goes back to the place of its number, so that no later message is received before
            # it.
            self._offer(message)
            return
        if isinstance(receiving, Probing):
            self._probes.remove(receiving)
        else:
            self._receives.remove(receiving)
        self._flow.review(receiving.source, receiving.tag)

    def lose(self, src: int) -> list[PendingReceive]:
        """Return the receives and probes that fail, because `src` is gone.

        Complete messages stay, unless a message before them in their line is lost and no receive
        reports that.
        """
        # Frames of that rank that are still coming find a new record (`came`), and are dropped.
        origin, self._origins[src] = self._origins[src], Origin(gone=True)
        self._flow.lose(src)
        self._asked.discard(src)
        failing: list[PendingReceive] = []
        for message in origin.announced.values():
            if message.receiving is not None:
                failing.append(message.receiving)
            elif not message.gone:
                # No receive waits for it, so none would report that it is lost. The messages behind
                # it must go, too, because a program that sees the third message believes that it
                # has read the second.
                for later in self._mailbox.cut(message):
                    later.gone = True
            message.gone = True
            if message.pieces is not None:
                message.pieces.memory = None  # data under way is written nowhere
        for waiting in self._waiting:
            for receiving in waiting.concerning(src):
                if self._lost(receiving.source, receiving.work.op, receiving.tag) is not None:
                    waiting.remove(receiving)
                    failing.append(receiving)
        for receiving in failing:
            self._flow.review(receiving.source, receiving.tag)
        for waiting in self._waiting:
            for receiving in waiting.concerning(src):
                self._watch(receiving.source)
        return failing

    def _watch(self, source: Source) -> None:
        """Make sure to hear when all ranks have left that a receive of `source` waits for."""
        # A rank that closes a group tells only the ranks that it has links to. So this rank asks
        # one source, and the next source when that one has left. Links to all of them could be too
        # many. A rank that aborts tells all others, even if they have not asked.
        if source is None:
            if self._asked:
                return
            # Each rank begins with the next one, so that not all ask the same.
            own, size = self._wire.rank, self._channel.size
            ranks: Iterable[int] = [(own + after) % size for after in range(1, size)]
        else:
            ranks = [source] if isinstance(source, int) else source
            if not self._asked.isdisjoint(ranks):
                return
        lost = self._channel.lost()
        for rank in ranks:
            if rank != self._wire.rank and rank not in lost:
                self._asked.add(rank)
                self._channel.ask(rank)
                return

    def ask_again(self) -> None:
        """Ask the sources again: the coordinator, which told of those that leave, is gone."""
        for rank in [*self._asked]:  # who cannot be reached is lost
            self._channel.ask(rank)

    def close(self) -> None:
        for waiting in self._waiting:
            for receiving in waiting:
                waiting.remove(receiving)
        self._delivery.is_closed = True
        despite_errors(
            *(partial(self.lose, src) for src in range(len(self._origins))),
            self._flow.close,
            self._mailbox.clear,
        )

    # -- frames from senders ----------------------------------------------------------------------

    def frame(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing | None:
        """Return the landing of an EAGER, RTS, PUSH, AHEAD or DATA frame."""
        origin = self._origins[src]
        kind = fields[0]
        if kind == wire.DATA:
            return self._piece(origin, fields, nbytes)
        if kind == wire.EAGER:
            tag, wanted, meta = wire.read_eager(fields, nbytes)
            price = cost(tag, nbytes)
            message = ComingMessage(self.came, src, tag, price, wanted, meta, nbytes - meta, None)
        else:
            tag, wanted, sid, meta, data, words, front = wire.read_rts(fields, nbytes)
            if sid <= origin.sid:
                raise ProtocolError(f"rank {src} announced message {sid} after {origin.sid}")
            price = cost(tag, nbytes + front)
            message = ComingMessage(self.came, src, tag, price, wanted, meta, data, sid)
            message.front = front
            if isinstance(words, bytes):
                message.words = words
            elif self._shared is not None:
                message.reading = self._shared.open(src, words, data)
            if kind == wire.PUSH:
                if data > self._most_pushed:
                    raise wire.malformed(fields)
                if not origin.may_push:
                    raise ProtocolError(f"rank {src} pushed message {sid} without leave")
                origin.may_push, message.pushed = False, True
        # Before it gets memory: a sender without credit gets none.
        self._flow.charge(src, tag, price, wanted)
        if message.sid is not None:
            origin.sid = message.sid
        message.memory = memoryview(bytearray(nbytes))
        return message

    def came(self, message: ComingMessage) -> None:
        """Take the complete first frame of `message`."""
        src = message.source
        origin = self._origins[src]
        if origin.gone:
            return
        self._number += 1
        message.number = self._number
        if message.sid is None:
            message.meta = message.memory[: message.meta_nbytes]
            message.complete = True
        else:
            origin.announced[message.sid] = message
            message.meta = message.memory if message.memory.nbytes else None
        if message.meta is not None and message.meta_nbytes <= REMEMBERED:
            origin.last = message.tag, bytes(message.meta)
        self._offer(message)
        if message.pushed and not (message.fetched or message.gone):
            self._take_in(origin, message)
        elif message.front and not message.gone:
            message.pieces = Pieces([memoryview(bytearray(message.front))])
        self._flow.arrived(src, message.wanted)
        self._wire.flush()

    def _gives_leave(
        self, origin: Origin, message: ComingMessage, receiving: PendingReceive
    ) -> bool:
        """Return whether the sender of `message` may push the next one."""
        return (
            not (origin.may_push or origin.gone or message.sid is None or message.fetched)
            # What is mapped here is read there, unless a receive waits for it.
            and (message.reading is None or receiving.number < message.number)
            and origin.stray is None
            and 0 < message.nbytes <= self._most_pushed
            and message.meta is not None
            and not message.words
            # So a pushed message is never too large to take.
            and self._max_message_bytes >= wire.INLINE + self._most_pushed
        )

    @property
    def _most_pushed(self) -> int:
        """The most bytes of data of a pushed message."""
        return max(wire.MOST_PUSHED, self._ahead)

    def _take_in(self, origin: Origin, message: ComingMessage) -> None:
        """Make memory for a pushed message that no receive waited for."""
        assert message.meta is not None
        # From here on it is like an eager one, but some of its bytes are still to come.
        message.memory = memoryview(bytearray(message.meta_nbytes + message.nbytes))
        message.memory[: message.meta_nbytes] = message.meta
        message.pieces = Pieces([message.memory[message.meta_nbytes :]])
        message.fetched = True
        origin.stray = message

    def _piece(self, origin: Origin, fields: Sequence[Any], nbytes: int) -> Landing | None:
        (sid,) = wire.read_counts(fields, 1)
        if sid in origin.skipped:
            return None
        message = origin.announced.get(sid)
        pieces = None if message is None else message.pieces
        if pieces is None or not 0 < nbytes <= pieces.left:
            raise ProtocolError(f"{nbytes} bytes came for message {sid}, which were not pulled")
        pieces.place(nbytes)
        return pieces

    def finished(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        (sid,) = wire.read_counts(fields, 1, nbytes)
        origin = self._origins[src]
        if sid in origin.skipped:
            origin.skipped.remove(sid)
            return
        message = origin.announced.get(sid)
        if message is None or message.pieces is None or not message.fetched:
            raise ProtocolError(f"rank {src} finished message {sid}, which was not pulled")
        if message.pieces.left:
            raise ProtocolError(f"rank {src} finished message {sid} before all data was here")
        self._arrived(message)

    def _arrived(self, message: ComingMessage) -> None:
        """Deliver an announced message: all of it is here, and right."""
        assert message.sid is not None
        del self._origins[message.source].announced[message.sid]
        message.complete = True
        message.pieces = None
        if message.receiving is not None:
            self._delivery.deliver(message, message.receiving)

    def withdrawn(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        (sid,) = wire.read_counts(fields, 1, nbytes)
        origin = self._origins[src]
        if sid > origin.sid:
            raise ProtocolError(f"rank {src} withdrew message {sid}, which was not announced")
        message = origin.announced.get(sid)
        if message is None:  # refused here while the frame was in flight
            origin.skipped.discard(sid)
            return
        # The receive that had it waits again in its old place, because of its number. The user got
        # nothing of the message, though bytes of it may have come to `out`.
        receiving = message.receiving
        if receiving is None:
            self._mailbox.remove(message)
        self._consumed(message)
        origin.skipped.discard(sid)
        if receiving is not None:
            receiving.let_go()
            receiving.message = receiving.target = None
            self._post(receiving)

    def denied(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        self._flow.denied(src, wire.read_tag(fields, nbytes))

    # -- matching ---------------------------------------------------------------------------------

    def _post(self, receiving: PendingReceive) -> None:
        """Match a receive with a message, or let it wait."""
        message = self._mailbox.find(receiving.source, receiving.tag)
        if message is not None:
            self._mailbox.remove(message)
            if type(receiving.source) is not int:
                self._mailbox.served(message.source)
            if not self._bind(message, receiving) and not message.gone:
                self._mailbox.put(message)
        elif (error := self._lost(receiving.source, receiving.work.op, receiving.tag)) is not None:
            self._delivery.fail(receiving, error)
        else:
            self._receives.add(receiving)
            self._flow.review(receiving.source, receiving.tag)
            self._watch(receiving.source)

    def _offer(self, message: ComingMessage) -> None:
        """Match a message with a receive, or let it wait."""
        receives = self._receives
        while (receiving := receives.first(message.source, message.tag)) is not None:
            receives.remove(receiving)
            bound = self._bind(message, receiving)
            self._flow.review(receiving.source, receiving.tag)
            if bound or message.gone:
                return
        self._mailbox.put(message)
        while (probing := self._probes.first(message.source, message.tag)) is not None:
            self._probes.remove(probing)
            self._seen(probing, message)
            self._flow.review(probing.source, probing.tag)

    def _bind(self, message: ComingMessage, receiving: PendingReceive) -> bool:
        """Give `message` to `receiving`. False: see `Delivery.begin`."""
        origin = self._origins[message.source]
        gives_leave = self._gives_leave(origin, message, receiving)
        if gives_leave:
            message.part = wire.LEAVE
        bound = self._delivery.begin(message, receiving)
        if gives_leave:
            origin.may_push = message.fetched
            message.part = wire.BODY
        if bound and message.front:
            # What came ahead is now in the memory of the receive, and uses none of the engine's.
            self._flow.consumed(message.source, message.tag, message.front)
            message.price -= message.front
            message.front = 0
        return bound

    # -- ends of receives -------------------------------------------------------------------------

    def _seen(self, probing: PendingReceive, message: ComingMessage) -> None:
        self._ended(probing.work)
        probing.work.source = message.source
        probing.work.tag = message.tag
        probing.work.nbytes = message.nbytes
        probing.work.finish(Envelope.of(message))

    def _consumed(self, message: ComingMessage) -> None:
        message.gone = True
        if message.sid is not None:
            origin = self._origins[message.source]
            origin.announced.pop(message.sid, None)
            if origin.stray is message:
                origin.stray = None
            if (message.pushed or message.front) and not message.complete:
                origin.skipped.add(message.sid)
        if message.price:
            self._flow.consumed(message.source, message.tag, message.price)
