"""From a message that was matched with a receive to the value: its target, the transfer, its end.

`receiver` decides which receive takes which message. What becomes of the two is decided here. Where
the message ends or is free again, that is told back, since it is the matching half that keeps the
lines of messages and their credit.

**Where bytes go.** An eager message came with all its data in one frame, in memory of this engine:
it is copied into the target when the receive is there. An announced one is pulled straight into
the target. So a cancelled receive is the hard case: the user may reuse `out` as soon as the cancel
has returned, and the data of the message is on its way to that very memory, with no way to call it
back. It then goes on in memory of its own (`Pieces.move`), and the next receive that is matched
with the message has it copied from there.

::

    message.body    memory that the data was pulled into, of whichever receive was first
    receiving.target    memory of the receive that has the message now: copied into from `body`
                        where that is another one
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from aiodist.buffers.values import Incoming, describe, fill, parse
from aiodist.devices.memory import DeviceMemory
from aiodist.devices.values import Places, Sources
from aiodist.devices.work import DeviceWork
from aiodist.errors import AiodistError, MessageTooLargeError, MismatchError, ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.device_sections import Arrival
from aiodist.p2p.messages import Message, Receiving
from aiodist.p2p.pieces import Pieces
from aiodist.p2p.shared import Reading
from aiodist.work import Work

log = logging.getLogger("aiodist.group")


class Delivery:
    """Brings matched messages to their receives. `ended` is called with a Work that is complete,
    `arrived` with a message of which that is known here, `consumed` with one that is gone, `freed`
    with one that its receive did not take."""

    def __init__(
        self,
        out: wire.Wire,
        channel: wire.Channel,
        ended: Callable[[Work[Any]], None],
        arrived: Callable[[Message], None],
        consumed: Callable[[Message], None],
        freed: Callable[[Message], None],
        device_memory: DeviceMemory | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._loop = loop
        self._wire = out  # takes PULL and REFUSE for senders
        self._channel = channel
        self._ended = ended
        self._arrived = arrived
        self._consumed = consumed
        self._freed = freed
        self._device_memory = device_memory  # of arrays on devices; None: there are none here

    # -- from the matching half -------------------------------------------------------------------

    def begin(self, message: Message, receiving: Receiving) -> bool:
        """Give `message` to `receiving`. False: the receive failed, and the message is free, or
        gone."""
        channel = self._channel
        # By what the sender says, before any memory is set aside: its word costs it nothing.
        size = message.meta_nbytes + message.nbytes
        if size > channel.max_message_bytes:
            text = (
                f"a message of {size} bytes from rank {message.source} is over max_message_bytes="
                f"{channel.max_message_bytes} and was dropped: raise it, or send less at once"
            )
            self._refuse(message, wire.TOO_LARGE)
            self._fail(receiving, message, MessageTooLargeError, text)
            return False
        # Where there is no metadata yet, nothing is known but the size: the two are a pair all the
        # same, since later receives and messages must not come in between, and it is pulled.
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

    def release(self, message: Message) -> None:
        """Take the message from its receive, and its data out of the memory given by it."""
        receiving = message.receiving
        assert receiving is not None
        message.receiving = receiving.message = None
        target, receiving.target = receiving.target, None
        if target is None:
            return
        if target is message.body and receiving.out is not None:
            # What was read on the sender's device lies on the device of `out`, which is the user's
            # again: nothing was pulled yet, so reading begins anew with the next receive. So it
            # does in shared memory.
            if (message.words or message.reading) and not message.fetched:
                message.body = message.pieces = None
            else:
                self._make_private(message, target)
        if receiving.out is not None and target.foreign is not None:
            target.foreign.let_go()

    def deliver(self, message: Message, receiving: Receiving) -> None:
        """All of the message is here: bring it to where its receive wants it, and end that."""
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
        # The copies to the device are only queued by now, and until they are done the receive can
        # be cancelled: the message counts as consumed after that.
        places.queue(reads=False)
        places.when_done(partial(self._landed, message, receiving, target))

    def fail(self, receiving: Receiving, error: BaseException) -> None:
        """End a receive that has no message."""
        self._ended(receiving.work)
        receiving.work.fail(error)

    def prepare(self, receiving: Receiving, meta: bytes) -> None:
        """While a receive waits, make the target for a message of such metadata."""
        try:
            # There is time for it while nothing has come; afterwards the sender, and who waits
            # for the value, would wait for this as well.
            target = parse(meta, allow_pickle=self._channel.allow_pickle)
            target.allocate(receiving.out)
        except Exception:  # such a message would not fit
            return
        receiving.ready = memoryview(meta), target

    # -- where the data goes ----------------------------------------------------------------------

    def _aim(self, message: Message, receiving: Receiving) -> bool:
        """Make `receiving.target`. False: the receive failed. Raises MemoryError."""
        # It was matched before with a receive that has been withdrawn since. Its data is here, or
        # on its way, in memory that is nobody else's.
        if message.body is not None and receiving.out is None:
            receiving.target = message.body
            return True
        # A target that `prepare` has made is for just these bytes of metadata, and for the host.
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
        except MemoryError:
            raise
        except Exception as error:  # these bytes are whatever the sender wanted them to be
            self._refuse(message, wire.UNREADABLE)
            self._unreadable(message, receiving, error)
            return False
        try:
            target.allocate(_front(target, receiving), foreign=foreign)
        except MemoryError:
            raise
        except Exception as error:
            # With `out`, it is the receiver's mistake, and the message waits for a better one.
            # Without, it is a message that nobody here can take, as a pickle where none is allowed:
            # were it kept, every later receive of this tag would fail by it.
            if receiving.out is None:
                self._refuse(message, wire.UNREADABLE)
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
        # Without the words all is pulled, and the sender copies to the host: slower, but it works
        # where this rank cannot read the sender's device.
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

    # -- pulling ----------------------------------------------------------------------------------

    def _pull(self, message: Message, receiving: Receiving) -> None:
        assert message.sid is not None
        if message.meta is None:
            part = wire.METADATA
            message.pieces = Pieces([message.memory], partial(self._meta_here, message))
        else:
            target = receiving.target
            assert target is not None
            message.body = target
            places: Places | None = target.foreign
            if message.pieces is not None:
                message.pieces.move(target.buffers)  # its front is here, or on its way
            elif places is None:
                message.pieces = Pieces(target.buffers)
            else:
                message.pieces = Arrival(target, places)
            if places is not None and places.reads:
                places.queue(reads=True)
                places.when_done(partial(self._fetched, message, target))
                return
            # Who may push from now on waits for nobody, which saves more than a copy of so little.
            if message.reading is not None and message.part != wire.LEAVE:
                self._read(message, message.reading, target)
                return
            message.fetched = True
            if message.pushed and message.part == wire.BODY:
                return
            if target.has_foreign:
                message.part = wire.WHOLE
            part = message.part
        if part == wire.LEAVE and message.pushed:  # which its sender does not wait for
            self._wire.hold(message.source, (wire.PULL, message.sid, part))
            return
        # Urgent: the sender of much data waits for this word alone, and it is not to stand in line
        # behind data that goes the other way.
        self._wire.send(message.source, (wire.PULL, message.sid, part), urgent=True)

    def _meta_here(self, message: Message) -> None:
        message.meta = message.memory
        message.pieces = None
        receiving = message.receiving
        if receiving is None:
            return
        message.receiving = receiving.message = None
        # Matched anew, now that it is known what the message is: it gets a target, or does not fit,
        # and is offered to the next receive that waits.
        if not self.begin(message, receiving) and not message.gone:
            self._freed(message)
        self._wire.flush()

    def _read(self, message: Message, reading: Reading, target: Incoming) -> None:
        """Copy data from where it lies, some in each turn of the loop."""
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

    def _fetched(self, message: Message, target: Incoming) -> None:
        """All was read that lay on the sender's device."""
        if message.body is target and not message.gone:
            message.fetched = True
            pull = (wire.PULL, message.sid, wire.BODY)
            self._wire.send(message.source, pull, urgent=True)
            self._wire.flush()

    # -- the end ----------------------------------------------------------------------------------

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
        # The two hold each other no longer, and so the arrays of the user: what only the cyclic
        # garbage collector frees may be there for long.
        message.receiving = receiving.message = None
        # Before the value is made: its credit is the sender's again, whatever unpickling may raise.
        self._consumed(message)
        try:
            value = target.finish()
        except Exception as error:  # what unpickling raises
            self._unreadable(message, receiving, error)
            return
        self._ended(receiving.work)
        work = receiving.work
        work.source = message.source
        work.tag = message.tag
        work.nbytes = message.nbytes
        if work.record is not None:
            work.record.carries(target.specs)
        work.finish(value)

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
        self._fail(receiving, message, MismatchError, text, error, calls=calls)

    def _unreadable(self, message: Message, receiving: Receiving, error: Exception) -> None:
        text = f"a message of rank {message.source} could not be read and was dropped: {error}"
        self._fail(receiving, message, ProtocolError, text, error)

    def _fail(
        self, receiving: Receiving, message: Message, cls: type[AiodistError], text: str,
        cause: Exception | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Fail a receive for what is wrong with its message."""
        error = self._channel.error(cls, text, op=receiving.work.op, tag=message.tag, **fields)
        error.__cause__ = cause
        self.fail(receiving, error)

    def _refuse(self, message: Message, why: int) -> None:
        """Drop a message that its sender may still hold."""
        if not message.complete:
            assert message.sid is not None
            self._wire.send(message.source, (wire.REFUSE, message.sid, why), urgent=True)
        self._consumed(message)


def _front(target: Incoming, receiving: Receiving) -> Any:
    """The `out` of a receive; of one that takes less, as much of its front as the message has."""
    out, spec = receiving.out, target.array
    if not receiving.partial or spec is None or not spec.shape or spec.shape[0] > len(out):
        return out  # a message that does not fit is refused as any other
    return out[: spec.shape[0]]
