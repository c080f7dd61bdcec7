"""From a matched message to its value: the target, the transfer, and the end.

`receiver` decides which receive takes which message. This module does the rest. If a message ends
or becomes free again, it tells the receiver, because that has the queues of messages and their
credit.

**The memory for the data.** An eager message came in one frame, to memory of this engine. It is
copied to the target when a receive takes it. An announced message is pulled directly to the target.
A cancelled receive is the hard case: the user may use `out` again as soon as the cancel returns,
and the data in flight to that memory cannot be stopped. So it continues to memory of its own
(`Pieces.move`). The next receive that gets the message has it copied from there.

::

    message.body        the memory that data is pulled to, of the receive that was first
    receiving.target    the memory of the receive that has the message now; filled from `body`
                        if these two are not the same
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from aiodist.buffers.values import Incoming, describe, fill, parse
from aiodist.devices.memory import DeviceMemory
from aiodist.devices.values import DevicePlaces, Sources
from aiodist.devices.work import DeviceWork
from aiodist.errors import AiodistError, MessageTooLargeError, MismatchError, ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.device_sections import DevicePieces
from aiodist.p2p.messages import ComingMessage, PendingReceive
from aiodist.p2p.pieces import Pieces
from aiodist.p2p.shared import SharedReading
from aiodist.work import Work

log = logging.getLogger("aiodist.group")


class Delivery:
    """Brings matched messages to their receives.

    `ended` is called with a Work that is complete. `arrived` gets a message that this side knows to
    be complete, `consumed` one that is gone, and `freed` one that its receive did not take.
    """

    def __init__(
        self,
        out: wire.Wire,
        channel: wire.Channel,
        ended: Callable[[Work[Any]], None],
        arrived: Callable[[ComingMessage], None],
        consumed: Callable[[ComingMessage], None],
        freed: Callable[[ComingMessage], None],
        device_memory: DeviceMemory | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.is_closed = False
        self._loop = loop
        self._wire = out  # takes PULL and REFUSE for senders
        self._channel = channel
        self._ended = ended
        self._arrived = arrived
        self._consumed = consumed
        self._freed = freed
        self._device_memory = device_memory  # of arrays on devices; None: there are none

    # -- from the matching half -------------------------------------------------------------------

    def begin(self, message: ComingMessage, receiving: PendingReceive) -> bool:
        """Give `message` to `receiving`.

        False: the receive failed, and the message is free or gone.
        """
        channel = self._channel
        if message.lost is not None:
            self._consumed(message)
            if not isinstance(message.lost, MemoryError):
                self._unreadable(message, receiving, message.lost)
                return False
            text = (
                f"a message of {message.nbytes} bytes of rank {message.source} is lost: its receive"
                " was cancelled, and there was no memory for data that was on its way to out="
            )
            self.fail(receiving, MemoryError(text))
            return False
        # Check the size that the sender claims before any memory is set aside, because a claim
        # costs the sender nothing.
        size = message.meta_nbytes + message.nbytes
        if size > channel.max_message_bytes:
            text = (
                f"a message of {size} bytes from rank {message.source} is over max_message_bytes="
                f"{channel.max_message_bytes} and was dropped: raise it, or send less at once"
            )
            self._refuse(message, wire.TOO_LARGE)
            self._fail(receiving, message, MessageTooLargeError, text)
            return False
        # Without metadata only the size is known. The two are a pair all the same, so that no later
        # receive or message comes in between. The metadata is pulled.
        pulls = not message.complete and (message.pieces is None or message.front > 0)
        try:
            if message.meta is None and pulls:
                message.memory = memoryview(bytearray(message.meta_nbytes))
            elif message.meta is not None and not self._aim(message, receiving):
                return False
        except MemoryError as error:
            text = (
                f"no memory for a message of {size} bytes from rank {message.source}: {error}. The "
                "message stays queued: receive it with an out, or once there is memory"
            )
            failure = MemoryError(text)
            failure.__cause__ = error
            self.fail(receiving, failure)
            return False
        message.receiving = receiving
        receiving.message = message
        if message.complete:
            self.deliver(message, receiving)
        elif pulls:
            self._pull(message, receiving)
        return True

    def release(self, message: ComingMessage) -> None:
        """Take the message from its receive, and its data out of the memory of that receive."""
        receiving = message.receiving
        assert receiving is not None
        message.receiving = receiving.message = None
        target, receiving.target = receiving.target, None
        if target is None:
            return
        if target is message.body and receiving.out is not None:
            # The user gets `out` back, so data that was read on the sender's device cannot stay
            # there. Nothing was pulled yet, so the next receive reads it again. The same holds in
            # shared memory.
            if (message.words or message.reading) and not message.fetched:
                message.body = message.pieces = None
            else:
                self._make_private(message, target)
        if receiving.out is not None and target.foreign is not None:
            target.foreign.let_go()

    def deliver(self, message: ComingMessage, receiving: PendingReceive) -> None:
        """Bring a complete message to the target of its receive, and end the receive."""
        target = receiving.target
        assert target is not None
        places: DevicePlaces | None = target.foreign
        if message.body is None:
            fill(target.buffers, message.memory[message.meta_nbytes :])
        elif target is not message.body:
            for into, data in zip(target.buffers, message.body.buffers, strict=True):
                into[:] = data
        if places is None:
            self._hand_over(message, receiving, target)
            return

        def queue() -> None:
            if message.body is not None and message.body is not target:
                places.take_over(message.body.foreign)
            places.queue(reads=False)

        # Copies to the device are only queued now, and the receive can still be cancelled. So the
        # message counts as consumed when they are done.
        landed = partial(self._landed, message, receiving, target)
        places.when_done(queue, landed, partial(self._not_landed, message, receiving, target))

    def fail(self, receiving: PendingReceive, error: BaseException) -> None:
        """End a receive that has no message."""
        self._ended(receiving.work)
        receiving.work.fail(error)

    def prepare(self, receiving: PendingReceive, meta: bytes) -> None:
        """Make the target for a message with such metadata while a receive waits."""
        try:
            # There is time for this while nothing has come. Later, both sides would wait for it.
            target = parse(meta, allow_pickle=self._channel.allow_pickle)
            target.allocate(receiving.out)
        except Exception:  # such a message would not fit
            return
        receiving.ready = memoryview(meta), target

    # -- where the data goes ----------------------------------------------------------------------

    def _aim(self, message: ComingMessage, receiving: PendingReceive) -> bool:
        """Make `receiving.target`. False: the receive failed. Raises MemoryError."""
        # It was matched before with a receive that was withdrawn. Its data is in private memory, or
        # on the way there.
        if message.body is not None and receiving.out is None:
            receiving.target = message.body
            return True
        # A target of `prepare` is for exactly these bytes of metadata, and for the host.
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
                    f"metadata is for {target.nbytes} bytes, but there are {message.nbytes}"
                )
            foreign = self._places(message, target, receiving.device_work)
        except MemoryError:
            raise
        except Exception as error:  # the sender may have sent any bytes
            self._refuse(message, wire.UNREADABLE)
            self._unreadable(message, receiving, error)
            return False
        try:
            target.allocate(_front(target, receiving), foreign=foreign)
        except MemoryError:
            raise
        except Exception as error:
            # With `out`, the receiver made the mistake, and the message waits for a better receive.
            # Without `out`, this rank can never take the message, for example because pickles are
            # not allowed. If it stayed, every later receive of this tag would fail by it.
            if receiving.out is None:
                self._refuse(message, wire.UNREADABLE)
                self._unreadable(message, receiving, error)
            else:
                self._mismatch(message, receiving, target, error)
            return False
        receiving.target = target
        return True

    def _places(
        self, message: ComingMessage, target: Incoming, device_work: DeviceWork | None
    ) -> DevicePlaces | None:
        """Return the places of those arrays of a message that are on a device on either side."""
        if self._device_memory is None or (device_work is None and not target.has_foreign):
            return None
        found = None
        # Without the words everything is pulled, and the sender copies to the host. That is slower,
        # but it works even if this rank cannot read the sender's device.
        if self._device_memory.problem and message.body is None:
            message.words = b""
        if message.words:
            try:
                device = None if device_work is None else device_work.device
                found = self._device_memory.open(message.source, message.words, device)
            except OSError as error:
                self._device_memory.refuse(f"rank {self._channel.rank}: {error}")
                message.words = b""
        holder = Sources(self._device_memory)
        holder.device_work = device_work
        return DevicePlaces(self._device_memory, holder, found)

    def _make_private(self, message: ComingMessage, target: Incoming) -> None:
        """Move the data that came, and that is still to come, from the user's memory to private
        memory. If there is none, or the device fails, the message is lost."""
        try:
            message.body = self._moved(message, target)
        except Exception as error:
            error.__context__ = None  # this and the frames would keep the user's memory
            message.body, message.lost = None, error.with_traceback(None)

    def _moved(self, message: ComingMessage, target: Incoming) -> Incoming:
        """Return private memory with the data of `message`. Raises MemoryError."""
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
        return private

    # -- pulling ----------------------------------------------------------------------------------

    def _pull(self, message: ComingMessage, receiving: PendingReceive) -> None:
        assert message.sid is not None
        if message.meta is None:
            part = wire.METADATA
            message.pieces = Pieces([message.memory], partial(self._meta_here, message))
        else:
            target = receiving.target
            assert target is not None
            message.body = target
            places: DevicePlaces | None = target.foreign
            if message.pieces is not None:
                message.pieces.move(target.buffers)  # its front is here, or on its way
            elif places is None:
                message.pieces = Pieces(target.buffers)
            else:
                message.pieces = DevicePieces(target, places)
            if places is not None and places.reads:
                fetched = partial(self._fetched, message, target)
                failed = partial(self._not_fetched, message, target)
                places.when_done(partial(places.queue, reads=True), fetched, failed)
                return
            # To let the sender push from now on saves more than one copy of so little.
            if message.reading is not None and message.part != wire.LEAVE:
                self._read(message, message.reading, target)
                return
            message.fetched = True
            if message.pushed and message.part == wire.BODY:
                return
            if target.has_foreign:
                message.part = wire.WHOLE
            part = message.part
        if part == wire.LEAVE and message.pushed:  # its sender does not wait for it
            self._wire.hold(message.source, (wire.PULL, message.sid, part))
            return
        # Urgent, because a sender of much data waits for this frame alone. It must not queue behind
        # data in the other direction.
        self._wire.send(message.source, (wire.PULL, message.sid, part), urgent=True)

    def _meta_here(self, message: ComingMessage) -> None:
        message.meta = message.memory
        message.pieces = None
        receiving = message.receiving
        if receiving is None:
            return
        message.receiving = receiving.message = None
        # Match it again, because now it is known what the message is. It gets a target, or does not
        # fit and is offered to the next receive.
        if not self.begin(message, receiving) and not message.gone:
            self._freed(message)
        self._wire.flush()

    def _read(self, message: ComingMessage, reading: SharedReading, target: Incoming) -> None:
        """Copy data from the sender's memory, some in each turn of the loop."""
        pieces = message.pieces
        if message.body is not target or message.gone or pieces is None:
            return
        part = wire.TAKEN if reading.proves else wire.READ
        try:
            reading.copy(pieces)
        except OSError as error:
            log.debug("rank %d: %s: its messages are pulled", message.source, error)
            message.reading, message.pieces = None, Pieces(target.buffers)
            part = wire.BODY
        else:
            if pieces.left and reading.is_better_sent:
                message.fetched = True
                read = message.nbytes - pieces.left
                self._wire.send(
                    message.source, (wire.PULL, message.sid, wire.REST, read), urgent=True
                )
                return
            if pieces.left:
                self._loop.call_soon(self._read, message, reading, target)
                return
        message.fetched = True
        self._wire.send(message.source, (wire.PULL, message.sid, part), urgent=True)
        if part == wire.TAKEN:
            self._arrived(message)

    def _fetched(self, message: ComingMessage, target: Incoming) -> None:
        """Pull the rest, because all arrays on the sender's device were read."""
        if message.body is target and not message.gone:
            message.fetched = True
            pull = (wire.PULL, message.sid, wire.BODY)
            self._wire.send(message.source, pull, urgent=True)
            self._wire.flush()

    def _not_fetched(self, message: ComingMessage, target: Incoming, error: Exception) -> None:
        """Refuse a message, because the device cannot read its arrays."""
        if message.body is not target or message.gone:
            return
        if message.receiving is None:
            message.body = message.pieces = None  # the next receive reads it again
        else:
            self._device_failed(message, message.receiving, error)

    # -- the end ----------------------------------------------------------------------------------

    def _landed(self, message: ComingMessage, receiving: PendingReceive, target: Incoming) -> None:
        """Finish a message, because the device has finished its copies."""
        # While the device was copying, the receive may have been cancelled, and the message matched
        # with another one.
        if self._waits(message, receiving, target):
            target.foreign.finished()
            receiving.device_work = None
            self._hand_over(message, receiving, target)
            self._wire.flush()

    def _not_landed(
        self, message: ComingMessage, receiving: PendingReceive, target: Incoming, error: Exception
    ) -> None:
        """Drop a message, because the device cannot copy it."""
        if self._waits(message, receiving, target):
            self._device_failed(message, receiving, error)

    @staticmethod
    def _waits(message: ComingMessage, receiving: PendingReceive, target: Incoming) -> bool:
        waits = receiving.message is message and receiving.target is target
        return waits and not receiving.work.done()

    def _device_failed(
        self, message: ComingMessage, receiving: PendingReceive, error: Exception
    ) -> None:
        message.receiving = receiving.message = None
        receiving.let_go()
        self._refuse(message, wire.UNREADABLE)
        self._unreadable(message, receiving, error)
        self._wire.flush()

    def _hand_over(
        self, message: ComingMessage, receiving: PendingReceive, target: Incoming
    ) -> None:
        # Break the cycle between the two, which also holds the user's arrays. Otherwise they might
        # stay until the garbage collector runs.
        message.receiving = receiving.message = None
        # First, because the sender gets its credit back even if unpickling raises.
        self._consumed(message)
        try:
            value = target.finish()
        except Exception as error:  # unpickling may raise anything
            self._unreadable(message, receiving, error)
            return
        self._ended(receiving.work)
        work = receiving.work
        work.source = message.source
        work.tag = message.tag
        work.nbytes = message.nbytes
        if work.record is not None:
            work.record.carries(target.specs)
        if target.foreign is None and work.may_give_back:
            work.offer_back(partial(self._take_back, message, target))
        work.finish(value)

    def _take_back(self, message: ComingMessage, target: Incoming) -> None:
        """Let another receive have a message whose receive has ended unseen."""
        if self.is_closed:
            return
        message.gone, message.price = False, 0
        self._make_private(message, target)
        self._freed(message)
        self._wire.flush()

    def _mismatch(
        self, message: ComingMessage, receiving: PendingReceive, target: Incoming, error: Exception
    ) -> None:
        calls = {
            self._channel.rank: f"{receiving.work.op}(out={describe(receiving.out)})",
            message.source: f"send({target.describe()})",
        }
        text = (
            f"out= does not fit the message of rank {message.source}: {error}. The message stays"
            " queued: receive it with an out that fits, or without"
        )
        self._fail(receiving, message, MismatchError, text, error, calls=calls)

    def _unreadable(
        self, message: ComingMessage, receiving: PendingReceive, error: Exception
    ) -> None:
        text = f"a message of rank {message.source} could not be read and was dropped: {error}"
        self._fail(receiving, message, ProtocolError, text, error)

    def _fail(
        self, receiving: PendingReceive, message: ComingMessage, cls: type[AiodistError], text: str,
        cause: Exception | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Fail a receive because of its message."""
        error = self._channel.error(cls, text, op=receiving.work.op, tag=message.tag, **fields)
        error.__cause__ = cause
        self.fail(receiving, error)

    def _refuse(self, message: ComingMessage, why: int) -> None:
        """Drop a message that its sender may still hold."""
        if not message.complete:
            assert message.sid is not None
            self._wire.send(message.source, (wire.REFUSE, message.sid, why), urgent=True)
        self._consumed(message)


def _front(target: Incoming, receiving: PendingReceive) -> Any:
    """Return the `out` of a receive. If the receive may be partial, return as much of its front as
    the message has."""
    out, spec = receiving.out, target.array
    if not receiving.partial or spec is None or not spec.shape or spec.shape[0] > len(out):
        return out  # a message that does not fit is refused as usual
    return out[: spec.shape[0]]
