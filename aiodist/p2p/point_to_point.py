"""The point-to-point engine of one group: it matches messages with receives.

Calls of its group and links of its endpoint enter it synchronously, and it never waits. Its parts
are the sending half (`sender`), the receiving half (`receiver`, `delivery`, `flow`), the frames
(`frames`), and what is decided without I/O (`credit`, `mailbox`, `pieces`).

**How a message travels.** Up to 65 KiB (metadata and data), it is eager: one frame, copied by the
sender, whose Work is complete at once. A larger message is announced (RTS). When a receive has
matched it, the receiver pulls it. The data goes from the sender's memory directly to the
receiver's, in pieces of at most 256 KiB. At most 1 MiB is in a link, or sent in one turn of the
loop. Pieces of several transfers alternate. The Work of the sender is complete when all data has
left. A message to the own rank takes the same way, without a link.

If both ranks are on one host, the receiver may be able to copy the data itself (`shared`), and says
so in its pull. For more than 1 MiB, the system reads the sender's memory, and a proof shows that
the data was right, so no answer is needed. Once the sender's loop has answered a knock, the
receiver pulls the rest instead, because then two ranks copy at the same time, through the cache. If
the memory is mapped, a second thread copies half of it.

A sender may push a message if the receiver allows it. The receiver gives leave in its pull of the
last message, if that had at most 1 MiB, or 5 MiB if ranks are far apart. (If the data is mapped, it
gives leave only if a receive waited, because reading is as good.) The data of the pushed message
follows its announcement at once, which saves a round trip. If no receive waits for it, it goes to
memory of its own like an eager one. There is no more leave until it was received.

Messages with arrays on a device (`devices.values`) are always announced. The receiver reads these
arrays on the sender's device, and then pulls the rest, so FIN confirms these arrays, too. If it
cannot read them, it pulls everything, and the sender copies them to the host.

**Order.** Messages of one (source, tag) are matched in the order they were sent, and receives in
the order they were posted. A receive of any tag takes the oldest message of a source. A receive
from any source, or from several, takes one from the source that was served the longest ago, among
those that have one. A large message that was matched first may complete after a small one that was
matched later, as in MPI.

**Bounds** for each sender at each receiver. It is a ProtocolError if a sender exceeds them:

* Unconsumed messages cost at most 256 KiB for each tag, and 4 MiB in all. If ranks are far apart,
  it is up to 8 MiB and 16 MiB (`credit.limits_for`). A message costs 256 bytes, its tag, and what
  has been sent of it. In Python objects this is about five times as much in the worst case, empty
  messages with different tags.
* Beyond that total, there may be one message (at most 67 KiB) for every tag that a receive or probe
  names while it waits. So a tag without receives never blocks a tag with one.
* An announced message takes memory when a receive has matched it, and at most `max_message_bytes`
  with its metadata. Only a pushed one, and what goes ahead of a pull within the credit, takes
  memory before.

A sender has copied no more than that. Messages that may not be sent yet wait in order, in the
user's own memory. The state of a tag goes when its last message was consumed and the credit is
back, at most 20 ms later.

**Withdrawals.** A cancelled receive gives its message back to the head of the queue. Data in flight
continues to private memory, and what came is copied there. A receive that has matched a later
message keeps it. A cancelled send takes its message out of the line, or withdraws it. The receive
that had matched it waits again, in its old place.

A message that is too large, or cannot be read, is dropped. It fails the receive that took it, and
the send if that is pending.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from aiodist.buffers.encoding import encode
from aiodist.buffers.places import check_out
from aiodist.devices.memory import DeviceMemory
from aiodist.devices.values import Sources, device_among
from aiodist.errors import AiodistError, PeerLostError, despite_errors
from aiodist.links.peer import InOrder
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import MAX_TAG, Key, MessageTag, Source, limits_for
from aiodist.p2p.frames import Channel
from aiodist.p2p.mailbox import covers
from aiodist.p2p.messages import Envelope, PendingReceive
from aiodist.p2p.receiver import MessageReceiver
from aiodist.p2p.sender import NOTHING, Sender, Sending
from aiodist.p2p.shared import MessageMemory
from aiodist.phases.base import as_int, as_rank
from aiodist.recorder import Records
from aiodist.transports.base import Landing, deliver
from aiodist.types import ANY_SOURCE, ANY_TAG, AnyTag, Src
from aiodist.work import Work


class PointToPoint:
    """Sends, receives and probes of one rank in one group."""

    def __init__(
        self,
        channel: Channel,
        loop: asyncio.AbstractEventLoop,
        records: Records | None = None,
        device_memory: DeviceMemory | None = None,
        way: int = 0,
        shared: MessageMemory | None = None,
    ) -> None:
        """`way`: see `limits_for`. It must be the same on all ranks."""
        self._channel = channel
        self._records = records  # None: no operation is recorded
        self._device_memory = device_memory
        self._loop = loop
        self._size = channel.size
        self._closed: AiodistError | None = None  # what every call raises; None: the group is open
        # Operations that are not done, in the order of their calls.
        self._pending: dict[Work[Any], Sending | PendingReceive] = {}
        self._gone: set[int] = set()  # ranks whose frames are ignored
        self._acknowledged: set[int] = set()  # lost ranks that receives go on without
        # The short way (`express`) uses these parts, too. This one sends frames to all ranks.
        self.wire = wire.Wire(channel, self._loop_back, loop)
        self.limits = limits = limits_for(way)
        self.sender = Sender(self.wire, channel, loop, self._ended, limits, shared)
        self.receiver = MessageReceiver(
            self.wire, channel, loop, self._ended, self._lost_for, device_memory, limits, shared
        )
        # What takes frames without data, by their kind.
        self._control: dict[int, Callable[[int, Sequence[Any], int], None]] = {
            wire.PULL: self.sender.pulled,
            wire.FIN: self.receiver.finished,
            wire.WITHDRAW: self.receiver.withdrawn,
            wire.REFUSE: self.sender.refused,
            wire.CREDIT: self.sender.refunded,
            wire.WANT: self.sender.wanted,
            wire.UNWANT: self.sender.unwanted,
            wire.NOWANT: self.receiver.denied,
        }
        self._on_cancel = self._withdraw  # bound once, for all Works

    # -- from the group ---------------------------------------------------------------------------

    def send(
        self,
        value: object,
        dst: int,
        tag: MessageTag = 0,
        *,
        synchronous: bool = False,
        steady: bool = False,
        aside: bool = False,
    ) -> Work[None]:
        """Send a value to rank `dst`. The Work is complete when the memory of the value may be used
        again.

        Args:
            tag: a str of at most 1024 bytes in UTF-8, or an int of 64 bits.
            synchronous: the Work is not complete before a receive has taken the message.
            steady: the memory is never written again while there is a reference to it. So a link
                that may have to send it again keeps it instead of a copy.
            aside: copy the value first, because it may be written before it was sent.

        Raises TypeError or ValueError for bad arguments, and the error of `close` if the engine was
        closed.
        """
        if self._closed is not None:
            raise self._closed
        tag = as_tag(tag)
        dst = as_rank(dst, self._size, "dst")
        sources = None if self._device_memory is None else Sources(self._device_memory)
        encoded = encode(value, allow_pickle=self._channel.allow_pickle, foreign=sources)
        if sources is not None and sources.device_work is None:
            sources = None
        if aside:
            encoded.buffers = [memoryview(bytes(buffer)) for buffer in encoded.buffers]
            if sources is not None:
                sources.copy(sources.flats)
        nbytes = encoded.nbytes + encoded.elsewhere
        work: Work[None] = Work.begin(
            self._loop, "ssend" if synchronous else "send", tag, None, nbytes, self._on_cancel
        )
        if self._records is not None:
            self._records.begin(work, peer=dst)
        if work.record is not None:
            work.record.carries(encoded.specs)
        lost = self._channel.lost()
        if dst in lost:
            work.fail(self._peer_lost(work.op, tag, _loss_text(dst, lost[dst]), (dst,)))
            return work
        sending = self.sender.send(
            work, dst, tag, encoded, sources, synchronous=synchronous, steady=steady
        )
        if sending is not None:
            self._pending[work] = sending
        if self.wire.waiting:
            self.wire.flush()
        return work

    def recv(
        self,
        src: Src = ANY_SOURCE,
        tag: MessageTag | AnyTag = ANY_TAG,
        out: object = None,
        *,
        partial: bool = False,
        is_part: bool = False,
    ) -> Work[Any]:
        """Receive a value of rank `src`, into `out` if that is given.

        With `partial`, the value may be shorter than `out`, and the result is the front of `out`.
        With `is_part`, the Work is a part of another one, and can give its message back.

        When the Work is complete, it has the rank and the tag of the message, and the bytes of its
        arrays as `nbytes`. It fails with

        * MismatchError if the message does not fit `out`. The message stays queued.
        * MessageTooLargeError or ProtocolError if the message cannot be taken. It is dropped.
        * PeerLostError if nothing more can come from `src`. For several sources, that is as soon as
          one of them is lost and was not acknowledged, or once all of them are lost or have left.
        """
        if self._closed is not None:
            raise self._closed
        check_out(out)
        device_work = None
        if self._device_memory is not None and out is not None:
            device = device_among(out)
            device_work = None if device is None else self._device_memory.begin(device)
        work, source, key = self._wait("recv", src, tag)
        if is_part:
            work.take_back = None
        receiving = self.receiver.receive(work, source, key, out, device_work, partial=partial)
        if not work.done():
            self._pending[work] = receiving
        if self.wire.waiting:
            self.wire.flush()
        if not work.done():
            if self.wire.held:
                self.wire.let_all_go()
            self.receiver.prepare(receiving)
        return work

    def probe(self, src: Src = ANY_SOURCE, tag: MessageTag | AnyTag = ANY_TAG) -> Work[Envelope]:
        """Wait until a receive with these arguments would find a message, and describe it."""
        work, source, key = self._wait("probe", src, tag)
        probing = self.receiver.probe(work, source, key)
        if not work.done():
            self._pending[work] = probing
        if self.wire.waiting:
            self.wire.flush()
        return work

    def iprobe(self, src: Src = ANY_SOURCE, tag: MessageTag | AnyTag = ANY_TAG) -> Envelope | None:
        """Return the message that a receive with these arguments would take now, or None.

        Raises PeerLostError if `probe` would.
        """
        if self._closed is not None:
            raise self._closed
        key = None if tag is ANY_TAG else as_tag(tag)
        found = self.receiver.peek(as_source(src, self._size), key)
        self.wire.flush()
        return found

    def acknowledge_lost(self) -> tuple[int, ...]:
        """Let receives from several sources go on without the lost ranks, and return those.

        Ranks that have left in order need no acknowledgement.
        """
        lost = self._channel.lost().items()
        failed = sorted(rank for rank, why in lost if not isinstance(why, InOrder))
        self._acknowledged.update(failed)
        return tuple(failed)

    def fail(self, work: Work[Any], error: BaseException) -> None:
        """Withdraw a pending operation, exactly as a cancellation does, and fail it."""
        try:
            self._withdraw(work)
        finally:
            work.fail(error)

    @property
    def pending(self) -> list[Work[Any]]:
        """The Works that are not done, in the order of their calls."""
        return list(self._pending)

    def is_unmatched(self, work: Work[Any]) -> bool:
        """Return whether `work` sends a message that its receiver has not begun to take, or
        receives and has no message yet."""
        waiting = self._pending.get(work)
        if isinstance(waiting, Sending):
            return waiting.sid is None or waiting.next_part != NOTHING
        return waiting is not None and waiting.message is None

    def takes_long(self, work: Work[Any]) -> bool:
        """Return whether `work` receives a message so large that polling for its rest would only
        keep a core busy. Most of the time passes while it is sent."""
        waiting = self._pending.get(work)
        message = waiting.message if isinstance(waiting, PendingReceive) else None
        return message is not None and message.nbytes > wire.MOST_PUSHED

    @property
    def idle(self) -> bool:
        """Whether nothing is pending or queued, and no state is kept for any tag."""
        return not self._pending and self.sender.idle and self.receiver.idle

    # -- from the endpoint ------------------------------------------------------------------------

    def frame(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing | None:
        """Take a header of rank `src`. Return the landing of its payload of `nbytes` bytes. None:
        drop it.

        Raises ProtocolError for frames that no engine sends.
        """
        if self._closed is not None or src in self._gone:
            return None
        landing = self._frame(src, fields, nbytes)
        if self.wire.waiting:
            self.wire.flush()
        return landing

    def rank_lost(self, src: int, text: str) -> None:
        """Fail what needs `src`, which is gone. Complete messages can still be received.

        If a message is lost that no receive has matched, the messages of its tag behind it are
        dropped, too, because a receive must never skip one unnoticed.

        `text` is that of the errors, such as "rank 3 is lost: connection reset". `Channel.lost`
        already has the rank.
        """
        if self._closed is not None or src in self._gone:
            return
        self._gone.add(src)
        failing = {
            work: self._peer_lost(work.op, work.tag, text, (src,)) for work in self.sender.lose(src)
        }
        for receiving in self.receiver.lose(src):
            receiving.let_go()
            # A receive without a message may have waited for more ranks than this one.
            work, why = receiving.work, None
            if receiving.message is None:
                why = self._lost_for(receiving.source, work.op, receiving.tag)
            failing[work] = why or self._peer_lost(work.op, work.tag, text, (src,))
        for work, error in failing.items():
            self._pending.pop(work, None)
            work.fail(error)
        self.wire.flush()

    def close(self, error: AiodistError) -> None:
        """Release everything. Pending operations and later calls fail with `error`."""
        if self._closed is not None:
            return
        self._closed = error
        pending, self._pending = self._pending, {}

        def fail(work: Work[Any]) -> None:
            failure = copy.copy(error)
            failure.op, failure.tag = work.op, work.tag
            work.fail(failure)

        receives = [one for one in pending.values() if isinstance(one, PendingReceive)]
        despite_errors(
            *(partial(self.sender.lose, peer) for peer in range(self._size)),
            *(receive.let_go for receive in receives),
            self.receiver.close,
            self.wire.waiting.clear,
            self.wire.held.clear,
            *(partial(fail, work) for work in pending),
        )

    # -- inside -----------------------------------------------------------------------------------

    def _frame(self, src: int, fields: Sequence[Any], nbytes: int) -> Landing | None:
        kind = fields[0] if fields else None
        if type(kind) is int:
            if kind in _OF_RECEIVER:
                return self.receiver.frame(src, fields, nbytes)
            control = self._control.get(kind)
            if control is not None:
                control(src, fields, nbytes)
                return None
        raise wire.malformed(fields)

    def _loop_back(self, fields: tuple[Any, ...], payload: Sequence[memoryview]) -> None:
        nbytes = sum([view.nbytes for view in payload])
        deliver(self._frame(self.wire.rank, fields, nbytes), payload, nbytes)

    def _wait(self, op: str, src: Src, tag: MessageTag | AnyTag) -> tuple[Work[Any], Source, Key]:
        if self._closed is not None:
            raise self._closed
        source, key = as_source(src, self._size), None if tag is ANY_TAG else as_tag(tag)
        shown = ANY_TAG if key is None else key
        work: Work[Any] = Work.begin(self._loop, op, shown, None, 0, self._on_cancel)
        if self._records is not None:
            self._records.begin(work, peer=source if type(source) is int else None)
        return work, source, key

    def _withdraw(self, work: Work[Any]) -> None:
        operation = self._pending.pop(work, None)
        if operation is None:
            return
        if isinstance(operation, Sending):
            self.sender.withdraw(operation)
        else:
            self.receiver.withdraw(operation)
        self.wire.flush()

    def _ended(self, work: Work[Any]) -> None:
        self._pending.pop(work, None)

    def _lost_for(self, source: Source, op: str, key: Key) -> AiodistError | None:
        """Return the error of an operation if nothing can come for it any more."""
        text = ""
        lost = {rank: why for rank, why in self._channel.lost().items() if covers(source, rank)}
        if not isinstance(source, int):
            # What a lost rank would have sent is missing, and only this error says so. A rank that
            # left in order had no more to send, and the others may still send.
            failed = {
                rank: why
                for rank, why in lost.items()
                if not (rank in self._acknowledged or isinstance(why, InOrder))
            }
            # A receive from any source does not wait for this rank itself.
            named = self._size - 1 if source is None else len(source)
            if failed or len(lost) < named:
                lost = failed
            else:
                text = "no rank is left that could send: "
        if not lost:
            return None
        text += "; ".join(_loss_text(rank, reason) for rank, reason in lost.items())
        return self._peer_lost(op, ANY_TAG if key is None else key, text, lost)

    def _peer_lost(self, op: str, tag: object, text: str, ranks: Iterable[int]) -> AiodistError:
        return self._channel.error(PeerLostError, text, op=op, tag=tag, ranks=ranks)


_OF_RECEIVER = frozenset([wire.EAGER, wire.RTS, wire.PUSH, wire.AHEAD, wire.DATA])
"""The kinds of frames that bring messages."""


def as_source(src: Src, size: int) -> Source:
    """Return the ranks, of `size`, whose messages a receive takes. Raises TypeError and
    ValueError."""
    if src is ANY_SOURCE:
        return None
    if not isinstance(src, Sequence) or isinstance(src, str):
        return as_rank(src, size, "src")
    ranks = sorted({as_rank(rank, size, "each of src") for rank in src})
    if not ranks:
        raise ValueError("src is an empty list: give the ranks that may send")
    return tuple(ranks) if len(ranks) > 1 else ranks[0]


def as_tag(tag: Any) -> MessageTag:
    """Return a tag as a plain str or int, as it is sent. Raises TypeError and ValueError."""
    if type(tag) is int and wire.MIN_INT <= tag <= wire.MAX_INT:
        return tag
    # most are, and this is faster than below
    if type(tag) is str and tag.isascii() and len(tag) <= MAX_TAG:
        return tag
    if isinstance(tag, str):
        plain = str.__str__(tag)
        try:
            nbytes = len(plain.encode())
        except UnicodeEncodeError:
            raise ValueError(f"tag={plain!r:.200}: a tag is text that UTF-8 can encode") from None
        if nbytes > MAX_TAG:
            raise ValueError(
                f"a tag has {len(plain)} characters: at most {MAX_TAG} bytes in UTF-8 fit"
            )
        return plain
    number = as_int(tag, "a tag is a str or an int")
    if not wire.is_tag(number):
        raise ValueError(
            f"tag={number} is too large: an int tag has at most 64 bits, with its sign"
        )
    return number


def _loss_text(rank: int, reason: str) -> str:
    return f"rank {rank} is lost: {reason}"


__all__ = ["Channel", "Envelope", "MessageTag", "PointToPoint", "as_tag"]
