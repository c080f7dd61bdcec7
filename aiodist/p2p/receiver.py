"""The receiving half of point to point: matching, pulling, delivering, returning credit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.buffers.values import Incoming, describe, fill, parse
from aiodist.devices.memory import DeviceMemory
from aiodist.devices.values import Places, Sources
from aiodist.devices.work import DeviceWork
from aiodist.errors import AiodistError, MessageTooLargeError, MismatchError, ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import Key, MessageTag, cost
from aiodist.p2p.device_sections import Arrival
from aiodist.p2p.flow import Flow
from aiodist.p2p.mailbox import Mailbox, Posted
from aiodist.p2p.messages import (
    REMEMBERED,
    Envelope,
    Message,
    Origin,
    Probing,
    Receiving,
)
from aiodist.p2p.pieces import Pieces
from aiodist.transports.base import Landing
from aiodist.work import Work


class Receiver:
    """Receives from all ranks. `ended` is called with a Work that this side completed, `lost`
    gives the error for a receive that needs a lost rank (None: all are there)."""

    def __init__(
        self,
        out: wire.Wire,
        channel: wire.Channel,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Work[Any]], None],
        lost: Callable[[Receiving], AiodistError | None],
        device_memory: DeviceMemory | None = None,
    ) -> None:
        self._device_memory = device_memory
        self._wire = out  # takes frames for senders
        self._channel = channel
        self._loop = loop
        self._ended = ended
        self._lost = lost
        # What is known of each sender, by rank.
        self._origins = [Origin() for _ in range(channel.size)]
        # Messages that no receive has taken.
        self._mailbox: Mailbox[Message] = Mailbox(channel.size)
        self._receives: Posted[Receiving] = Posted()  # receives that wait for a message
        self._probes: Posted[Probing] = Posted()  # probes that wait for one
        # The credit of all senders.
        self._flow = Flow(out, loop, channel.size, (self._receives, self._probes))
        self._number = 0  # of the last message or receive, in the order in which they came to be

    @property
    def idle(self) -> bool:
        """Whether nothing is pending and no state is kept for any tag."""
        waiting = self._mailbox or self._receives or self._probes
        under_way = any(origin.announced for origin in self._origins)
        return not waiting and not under_way and self._flow.idle

    # -- from the short way -----------------------------------------------------------------------

    def last(self, src: int) -> tuple[MessageTag, bytes]:
        """Tag and metadata of the last message of `src` that went the ordinary way."""
        return self._origins[src].last

    def is_free(self, src: int, tag: MessageTag, key: Key) -> bool:
        """Whether the next message of `src` and `tag` is for who receives `key` now."""
        return self._mailbox.find(src, key) is None and self._receives.first(src, tag) is None

    def took(self, src: int, tag: MessageTag, price: int) -> None:
        """An eager message went straight to its receive."""
        self._flow.passed(src, tag, price)

    @property
    def has_several(self) -> bool:
        """Whether more than one receive waits to be matched."""
        return self._receives.has_several

    # -- from the user ----------------------------------------------------------------------------

    def receive(
        self,
        work: Work[Any],
        source: int | None,
        tag: Key,
        out: object,
        device_work: DeviceWork | None = None,
    ) -> Receiving:
        """Post a receive; it may be complete at once. `device_work`: where `out` is on a device."""
        self._number += 1
        receiving = Receiving(self._number, work, source, tag, out, device_work)
        self._post(receiving)
        return receiving

    def prepare(self, receiving: Receiving) -> None:
        """While a receive waits, make the target for a message like the last one of its source."""
        if receiving.source is None or receiving.out is None:
            return
        _, meta = self._origins[receiving.source].last
        if meta and receiving.message is None:
            try:
                # There is time for it while nothing has come; afterwards the sender, and who waits
                # for the value, would wait for this as well.
                target = parse(meta, allow_pickle=self._channel.allow_pickle)
                target.allocate(receiving.out)
            except Exception:  # such a message would not fit
                return
            receiving.ready = memoryview(meta), target

    def probe(self, work: Work[Any], source: int | None, tag: Key) -> Probing:
        """Post a probe; it may be complete at once."""
        self._number += 1
        probing = Probing(self._number, work, source, tag, None)
        message = self._mailbox.find(source, tag)
        if message is not None:
            self._seen(probing, message)
        elif (error := self._lost(probing)) is not None:
            self._fail(probing, error)
        else:
            self._probes.add(probing)
            self._flow.review(source, tag)
        return probing

    def peek(self, source: int | None, tag: Key) -> Envelope | None:
        """What `probe` would give at once."""
        message = self._mailbox.find(source, tag)
        if message is not None:
            return Envelope(message.source, message.tag, message.nbytes)
        self._flow.question(source, tag)
        return None

    def withdraw(self, receiving: Receiving) -> None:
        """Let go of `out`; a message that was matched goes back to the head of its queue."""
        message = receiving.message
        if message is not None:
            self._unbind(message)
            self._offer(message)
            return
        if isinstance(receiving, Probing):
            self._probes.remove(receiving)
        else:
            self._receives.remove(receiving)
        self._flow.review(receiving.source, receiving.tag)

    def lose(self, src: int) -> list[Receiving]:
        """`src` is gone: what is complete stays, unless a message before it in its line is lost
        without a receive that says so. Returns the receives and probes that fail."""
        # A new record takes its place: what is still under way of that rank finds it (`came`), and
        # is dropped.
        origin, self._origins[src] = self._origins[src], Origin(gone=True)
        self._flow.lose(src)
        failing: list[Receiving] = []
        for message in origin.announced.values():
            if message.receiving is not None:
                failing.append(message.receiving)
            elif not message.gone:
                for later in self._mailbox.cut(message):
                    later.gone = True
            message.gone = True
            if message.pieces is not None:
                message.pieces.memory = None  # what is under way is written nowhere
        for receiving in self._receives.concerning(src):
            self._receives.remove(receiving)
            failing.append(receiving)
        for probing in self._probes.concerning(src):
            self._probes.remove(probing)
            failing.append(probing)
        for receiving in failing:
            self._flow.review(receiving.source, receiving.tag)
        return failing

    def close(self) -> None:
        """Let go of everything."""
        for src in range(len(self._origins)):
            self.lose(src)
        self._flow.close()
        self._mailbox.clear()

    # -- frames from senders ----------------------------------------------------------------------

    def frame(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing:
        """A frame of kind EAGER, RTS or DATA: where its payload goes."""
        origin = self._origins[src]
        kind = fields[0]
        if kind == wire.DATA:
            return self._piece(origin, fields, nbytes)
        if kind == wire.EAGER:
            tag, wanted, meta = wire.read_eager(fields, nbytes)
            price = cost(tag, nbytes)
            message = Message(self, src, tag, price, wanted, meta, nbytes - meta, None)
        else:
            tag, wanted, sid, meta, data, words = wire.read_rts(fields, nbytes)
            if sid <= origin.last_sid:
                raise ProtocolError(f"rank {src} announced message {sid} after {origin.last_sid}")
            price = cost(tag, nbytes)
            message = Message(self, src, tag, price, wanted, meta, data, sid, words)
        # Before there is memory for it: whoever has no credit gets none.
        self._flow.charge(src, tag, price, wanted)
        if message.sid is not None:
            origin.last_sid = message.sid
        message.memory = memoryview(bytearray(nbytes))
        return message

    def came(self, message: Message) -> None:
        """The first frame of `message` is here, as a whole."""
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
        self._flow.arrived(src, message.wanted)
        self._wire.flush()

    def _piece(self, origin: Origin, fields: Sequence[Any], nbytes: int) -> Landing:
        (sid,) = wire.read_counts(fields, 1)
        message = origin.announced.get(sid)
        pieces = None if message is None else message.pieces
        if pieces is None or not 0 < nbytes <= pieces.left:
            raise ProtocolError(f"{nbytes} bytes of data for message {sid}: not pulled")
        pieces.place(nbytes)
        return pieces

    def finished(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        (sid,) = wire.read_counts(fields, 1, nbytes)
        message = self._origins[src].announced.get(sid)
        if message is None or message.pieces is None or not message.fetched:
            raise ProtocolError(f"rank {src} finished message {sid}: it was not pulled")
        if message.pieces.left:
            raise ProtocolError(f"rank {src} finished message {sid} before all data was there")
        del self._origins[src].announced[sid]
        message.complete = True
        message.pieces = None
        if message.receiving is not None:
            self._deliver(message, message.receiving)

    def withdrawn(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        (sid,) = wire.read_counts(fields, 1, nbytes)
        origin = self._origins[src]
        if sid > origin.last_sid:
            raise ProtocolError(f"rank {src} withdrew message {sid}: it was not announced")
        message = origin.announced.get(sid)
        if message is None:  # refused here while the frame travelled
            return
        receiving = message.receiving
        if receiving is None:
            self._mailbox.remove(message)
        self._consumed(message)
        if receiving is not None:
            receiving.let_go()
            receiving.message = receiving.target = None
            self._post(receiving)

    def denied(self, src: int, fields: Sequence[Any], nbytes: int) -> None:
        self._flow.denied(src, wire.read_tag(fields, nbytes))

    # -- matching ---------------------------------------------------------------------------------

    def _post(self, receiving: Receiving) -> None:
        """Match a receive with what is there, or let it wait."""
        message = self._mailbox.find(receiving.source, receiving.tag)
        if message is not None:
            self._mailbox.remove(message)
            if receiving.source is None:
                self._mailbox.served(message.source)
            if not self._bind(message, receiving) and not message.gone:
                self._mailbox.put(message)
        elif (error := self._lost(receiving)) is not None:
            self._fail(receiving, error)
        else:
            self._receives.add(receiving)
            self._flow.review(receiving.source, receiving.tag)

    def _offer(self, message: Message) -> None:
        """Match a message with who waits, or let it wait."""
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

    def _bind(self, message: Message, receiving: Receiving) -> bool:
        """Give `message` to `receiving`. False: the receive failed, and the message is free, or
        gone."""
        channel = self._channel
        size = message.meta_nbytes + message.nbytes
        if size > channel.max_message_bytes:
            text = (
                f"a message of {size} bytes from rank {message.source} is over max_message_bytes="
                f"{channel.max_message_bytes} and was dropped: raise it, or send less at once"
            )
            self._refuse(message, wire.TOO_LARGE)
            self._fail(receiving, self._error(MessageTooLargeError, text, receiving, message))
            return False
        if message.meta is not None and not self._aim(message, receiving):
            return False
        message.receiving = receiving
        receiving.message = message
        if message.complete:
            self._deliver(message, receiving)
        elif message.pieces is None:
            self._pull(message, receiving)
        return True

    def _aim(self, message: Message, receiving: Receiving) -> bool:
        """Make `receiving.target`. False: the receive failed."""
        # It was matched before with a receive that has been withdrawn since. Its data is here, or
        # on its way, in memory that is nobody else's.
        if message.body is not None and receiving.out is None:
            receiving.target = message.body
            return True
        ready = receiving.ready
        if (
            ready is not None
            and message.meta == ready[0]
            and message.nbytes == ready[1].nbytes
            and not message.words
        ):
            receiving.target, receiving.ready = ready[1], None
            return True
        channel = self._channel
        try:
            assert message.meta is not None
            target = parse(message.meta, allow_pickle=channel.allow_pickle)
            if target.nbytes != message.nbytes:
                raise ProtocolError(
                    f"metadata for {target.nbytes} bytes before {message.nbytes} bytes of data"
                )
            foreign = self._places(message, target, receiving.device_work)
        except Exception as error:  # these bytes are whatever the sender wanted them to be
            self._unreadable(message, receiving, error)
            return False
        try:
            target.allocate(receiving.out, foreign=foreign)
        except Exception as error:
            if receiving.out is None:
                self._unreadable(message, receiving, error)
            else:
                self._mismatch(message, receiving, target, error)
            return False
        receiving.target = target
        return True

    def _places(
        self, message: Message, target: Incoming, device_work: DeviceWork | None
    ) -> Places | None:
        """Where those arrays of a message go that are on a device on either side."""
        if self._device_memory is None or (device_work is None and not target.has_foreign):
            return None
        found = None
        if self._device_memory.problem and message.body is None:
            message.words = b""
        if message.words:
            try:
                found = self._device_memory.open(message.source, message.words)
            except OSError as error:
                self._device_memory.refuse(f"rank {self._channel.rank}: {error}")
                message.words = b""
        holder = Sources(self._device_memory)
        holder.device_work = device_work
        return Places(self._device_memory, holder, found)

    def _pull(self, message: Message, receiving: Receiving) -> None:
        assert message.sid is not None
        if message.meta is None:
            part = wire.METADATA
            message.memory = memoryview(bytearray(message.meta_nbytes))
            message.pieces = Pieces([message.memory], partial(self._meta_here, message))
        else:
            target = receiving.target
            assert target is not None
            message.body = target
            places: Places | None = target.foreign
            message.pieces = Pieces(target.buffers) if places is None else Arrival(target, places)
            if places is not None and places.reads:
                places.queue(reads=True)
                places.when_done(partial(self._fetched, message, target))
                return
            part = wire.WHOLE if target.has_foreign else wire.BODY
            message.fetched = True
        self._wire.send(message.source, (wire.PULL, message.sid, part), urgent=True)

    def _fetched(self, message: Message, target: Incoming) -> None:
        """All was read that lay on the sender's device."""
        if message.body is target and not message.gone:
            message.fetched = True
            pull = (wire.PULL, message.sid, wire.BODY)
            self._wire.send(message.source, pull, urgent=True)
            self._wire.flush()

    def _meta_here(self, message: Message) -> None:
        message.meta = message.memory
        message.pieces = None
        receiving = message.receiving
        if receiving is None:
            return
        message.receiving = receiving.message = None
        # Matched anew, now that it is known what the message is: it gets a target, or does not fit,
        # and is offered to the next receive that waits.
        if not self._bind(message, receiving) and not message.gone:
            self._offer(message)
        self._wire.flush()

    def _unbind(self, message: Message) -> None:
        """Take the message from its receive, and its data out of the memory given by it."""
        receiving = message.receiving
        assert receiving is not None
        message.receiving = receiving.message = None
        target, receiving.target = receiving.target, None
        if target is None:
            return
        if target is message.body and receiving.out is not None:
            if message.words and not message.fetched:
                message.body = message.pieces = None  # it is read anew
            else:
                self._make_private(message, target)
        if receiving.out is not None and target.foreign is not None:
            target.foreign.let_go()

    def _make_private(self, message: Message, target: Incoming) -> None:
        """Have what came, and comes, in memory of its own, no longer in a user's."""
        assert message.meta is not None
        private = parse(message.meta, allow_pickle=self._channel.allow_pickle)
        places = self._places(message, private, None)
        private.allocate(foreign=places)
        if places is not None:
            places.take_over(target.foreign)
        if message.pieces is None:  # it is complete
            for into, data in zip(private.buffers, target.buffers, strict=True):
                into[:] = data
        else:
            message.pieces.move(private.buffers)
        message.body = private

    # -- ends of receives -------------------------------------------------------------------------

    def _deliver(self, message: Message, receiving: Receiving) -> None:
        target = receiving.target
        assert target is not None
        places: Places | None = target.foreign
        if message.body is None:
            fill(target.buffers, message.memory[message.meta_nbytes :])
        elif target is not message.body:
            for into, data in zip(target.buffers, message.body.buffers, strict=True):
                into[:] = data
            if places is not None:
                places.take_over(message.body.foreign)
        if places is None:
            self._hand_over(message, receiving, target)
            return
        places.queue(reads=False)
        places.when_done(partial(self._landed, message, receiving, target))

    def _landed(self, message: Message, receiving: Receiving, target: Incoming) -> None:
        """The device is done, too."""
        # While the device was copying, the receive may have been cancelled, and the message matched
        # with another one.
        waits = receiving.message is message and receiving.target is target
        if waits and not receiving.work.done():
            target.foreign.finished()
            receiving.device_work = None
            self._hand_over(message, receiving, target)
            self._wire.flush()

    def _hand_over(self, message: Message, receiving: Receiving, target: Incoming) -> None:
        self._consumed(message)
        try:
            value = target.finish()
        except Exception as error:  # what unpickling raises
            self._fail(receiving, self._not_readable(message, receiving, error))
            return
        self._ended(receiving.work)
        work = receiving.work
        work.source = message.source
        work.tag = message.tag
        work.nbytes = message.nbytes
        work.finish(value)

    def _seen(self, probing: Receiving, message: Message) -> None:
        self._ended(probing.work)
        probing.work.source = message.source
        probing.work.tag = message.tag
        probing.work.nbytes = message.nbytes
        probing.work.finish(Envelope(message.source, message.tag, message.nbytes))

    def _fail(self, receiving: Receiving, error: BaseException) -> None:
        self._ended(receiving.work)
        receiving.work.fail(error)

    def _mismatch(
        self, message: Message, receiving: Receiving, target: Incoming, error: Exception
    ) -> None:
        calls = {
            self._channel.rank: f"{receiving.work.op}(out={describe(receiving.out)})",
            message.source: f"send({target.describe()})",
        }
        text = (
            f"out= does not fit the message of rank {message.source}: {error}. The message stays"
            " queued: receive it with an out of its kind, or without"
        )
        failure = self._error(MismatchError, text, receiving, message, calls=calls)
        failure.__cause__ = error
        self._fail(receiving, failure)

    def _unreadable(self, message: Message, receiving: Receiving, error: Exception) -> None:
        self._refuse(message, wire.UNREADABLE)
        self._fail(receiving, self._not_readable(message, receiving, error))

    def _not_readable(
        self, message: Message, receiving: Receiving, error: Exception
    ) -> AiodistError:
        text = f"a message of rank {message.source} could not be read and was dropped: {error}"
        failure = self._error(ProtocolError, text, receiving, message)
        failure.__cause__ = error
        return failure

    def _error(
        self,
        cls: type[AiodistError],
        text: str,
        receiving: Receiving,
        message: Message,
        **fields: Any,
    ) -> AiodistError:
        return self._channel.error(cls, text, op=receiving.work.op, tag=message.tag, **fields)

    def _refuse(self, message: Message, why: int) -> None:
        """Drop a message that its sender may still hold."""
        if not message.complete:
            assert message.sid is not None
            self._wire.send(message.source, (wire.REFUSE, message.sid, why), urgent=True)
        self._consumed(message)

    def _consumed(self, message: Message) -> None:
        message.gone = True
        if message.sid is not None:
            self._origins[message.source].announced.pop(message.sid, None)
        self._flow.consumed(message.source, message.tag, message.price)
