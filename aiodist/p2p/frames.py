"""Frames of point to point: their fields, and the way out to all ranks, this one included.

After the kind and the context, the fields of a frame are

====== ==================== =====================================================================
EAGER  [0, tag, wanted, m]  a message; payload: `m` bytes of metadata, then its data
RTS    [1, tag, wanted, id, m, n]  announces a message of `m` + `n` bytes; payload: its metadata,
                            or nothing if that is over `INLINE` bytes. A last field, if there is
                            one, says how to read its arrays on a device, or where all of its
                            data can be read (`aiodist.p2p.shared`)
PULL   [2, id, part]        asks for its metadata (0); its data without the arrays that were read
                            on the sender's device (1); all its data (2); or as 1, and gives
                            leave to push one message (3). Or it asks for nothing: the receiver
                            has read the data in the sender's memory, and the sender has to
                            confirm it (4), or it is known to be right (5). With a last field,
                            it asks for the data from that byte on, because the bytes before it
                            were read (6)
DATA   [3, id]              payload: the next bytes of what was pulled
FIN    [4, id]              all data was sent, and is right; not after (5)
WITHDRAW [5, id]            the message is withdrawn, even if some of it came
REFUSE [6, id, why]         the receiver dropped the message: too large (0), not readable (1)
CREDIT [7, tag, amount, …]  messages that were consumed
WANT   [8, tag]             the receiver waits for this tag: see `aiodist.p2p.credit`
UNWANT [9, tag]             it does not wait any more
NOWANT [10, tag]            the want was taken back before it was answered
PUSH   [11, tag, wanted, id, m, n]  as RTS, with at most `MOST_PUSHED` bytes of data, which
                            follow without a pull. Needs leave (3), which is good for one such
                            message; if ranks are far apart, for as much as goes ahead
AHEAD  [12, tag, wanted, id, m, n, p]  as RTS; `p` bytes of its data, but not all, follow without
                            a pull, and the rest is pulled. Costs credit
====== ==================== =====================================================================

The sender of messages sends EAGER, RTS, PUSH, AHEAD, DATA, FIN, WITHDRAW and NOWANT, all in order.
The receiver sends the rest as urgent frames. These overtake its own messages, but not each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from aiodist.errors import AiodistError, ProtocolError
from aiodist.p2p.credit import EAGER as MAX_EAGER
from aiodist.p2p.credit import MAX_TAG, MessageTag
from aiodist.p2p.shared import Where, is_where
from aiodist.transports.base import Done

EAGER: Final = 0
RTS: Final = 1
PULL: Final = 2
DATA: Final = 3
FIN: Final = 4
WITHDRAW: Final = 5
REFUSE: Final = 6
CREDIT: Final = 7
WANT: Final = 8
UNWANT: Final = 9
NOWANT: Final = 10
PUSH: Final = 11
AHEAD: Final = 12

METADATA: Final = 0
BODY: Final = 1
WHOLE: Final = 2
LEAVE: Final = 3
READ: Final = 4
TAKEN: Final = 5
REST: Final = 6
"""What a receiver pulls of a message.

`LEAVE`: as `BODY`, with leave to push another one. `READ`: nothing, because it has read the data.
`TAKEN`: nothing, and no answer is needed. `REST`: the data from a byte on, because it has read what
comes before.
"""

FOUR_BYTES: Final = 0x10000
"""A number that msgpack writes as 0xce and 4 bytes, like all larger ones up to 4 GiB."""
FIRST_SID: Final = FOUR_BYTES
"""The first id of a message. So the frames of two messages differ in these bytes alone."""

MOST_PUSHED: Final = 1024 * 1024
"""The most bytes of data of a pushed message, if ranks are near."""

TOO_LARGE: Final = 0
UNREADABLE: Final = 1
"""Why a message was refused."""

INLINE: Final = 16 * 1024
"""The most bytes of metadata that go with an RTS."""
MAX_WORDS: Final = 32 * 1024
"""The most bytes about devices in an RTS."""

MIN_INT: Final = -(2**63)
MAX_INT: Final = 2**63 - 1
CREDITS: Final = 32
"""The most tags in a CREDIT frame, so that it stays below the 64 KiB of a header."""


class Channel(Protocol):
    """What the engine needs of its group."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def max_message_bytes(self) -> int: ...
    @property
    def allow_pickle(self) -> bool: ...

    def send(
        self,
        dst: int,
        fields: tuple[Any, ...],
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        """Sends one frame to another rank: see `Link.send`. Calls nothing back but `done`."""

    def ask(self, peer: int, /) -> None:
        """Has another rank say when it leaves the group, or that it has left."""

    def discard(self, dst: int, token: object) -> None:
        """See `Link.discard`."""

    def settle(self, dst: int, token: object) -> None:
        """See `Link.settle`."""

    def error(self, cls: type[AiodistError], message: str, **fields: Any) -> AiodistError:
        """Returns an error that names the group and the epoch."""
        ...

    def lost(self) -> Mapping[int, str]:
        """Returns the lost ranks, each with the reason, such as "connection reset"."""
        ...


class Wire:
    """Sends frames to other ranks through the channel, and to this rank through a queue.

    Frames to this rank are delivered by `flush`, never within `send`, so that the engine is not
    entered while it works.

    Credit and leave are held for the next frame to their rank (`hold`). On their own they would
    wake a peer that waits for something else, most likely for the answer to its message. They are
    sent at the latest when this rank waits in a receive, or in the second turn of the loop from
    now. The program answers in the first turn.
    """

    __slots__ = ("_armed", "_channel", "_flushing", "_loop", "_receive", "held", "rank", "waiting")

    def __init__(
        self,
        channel: Channel,
        receive: Callable[[tuple[Any, ...], Sequence[memoryview]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`receive` takes a frame that this rank sent to itself."""
        self._channel = channel
        self._receive = receive
        self._loop = loop
        self._flushing = False
        self._armed = False  # the loop will send what is held
        self.held: dict[int, tuple[Any, ...]] = {}
        """The frame that is held for each rank, one at most."""
        self.rank = channel.rank
        self.waiting: deque[tuple[tuple[Any, ...], Sequence[memoryview], Done | None]] = deque()

    def send(
        self,
        dst: int,
        fields: tuple[Any, ...],
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        if dst == self.rank:
            self.waiting.append((fields, payload, done))
        else:
            if self.held:
                self.let_go(dst)
            self._channel.send(dst, fields, payload, done=done, token=token, urgent=urgent)

    def hold(self, dst: int, fields: tuple[Any, ...]) -> None:
        """Send an urgent frame that may wait a short while for another one."""
        if dst == self.rank or dst in self.held:
            self.send(dst, fields, urgent=True)
            return
        self.held[dst] = fields
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._loop.call_soon, self._turned)

    def let_go(self, dst: int) -> None:
        """Send what is held for `dst`."""
        fields = self.held.pop(dst, None)
        if fields is not None:
            self._channel.send(dst, fields, urgent=True)

    def let_all_go(self) -> None:
        for dst in tuple(self.held):
            self.let_go(dst)

    def _turned(self) -> None:
        self._armed = False
        self.let_all_go()

    def discard(self, dst: int, token: object) -> None:
        # Nothing that is discarded waits here, because `flush` ends every entry into the engine.
        if dst != self.rank:
            self._channel.discard(dst, token)

    def settle(self, dst: int, token: object) -> None:
        """See `Link.settle`."""
        if dst != self.rank:
            self._channel.settle(dst, token)

    def flush(self) -> None:
        """Deliver what this rank sent to itself. Every entry into the engine ends with this."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self.waiting:
                fields, payload, done = self.waiting.popleft()
                self._receive(fields, payload)
                if done is not None:
                    done()
        finally:
            self._flushing = False


# Fields from the network are checked below. A violation is a ProtocolError.


def malformed(fields: Sequence[Any]) -> ProtocolError:
    return ProtocolError(f"malformed point-to-point frame {str(list(fields))[:200]}")


def is_tag(value: Any) -> bool:
    """Return whether `value` is a tag as `as_tag` makes it."""
    kind = type(value)
    if kind is int:
        return bool(MIN_INT <= value <= MAX_INT)
    return kind is str and len(value.encode()) <= MAX_TAG


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def read_eager(fields: Sequence[Any], nbytes: int) -> tuple[MessageTag, bool, int]:
    """Return (tag, wanted, bytes of metadata)."""
    if len(fields) == 4:
        _, tag, wanted, meta = fields
        if (
            is_tag(tag)
            and type(wanted) is bool
            and type(meta) is int
            and 0 < meta <= nbytes <= MAX_EAGER
        ):
            return tag, wanted, meta
    raise malformed(fields)


def read_rts(
    fields: Sequence[Any], nbytes: int
) -> tuple[MessageTag, bool, int, int, int, bytes | Where, int]:
    """Return the fields of RTS, PUSH and AHEAD.

    These are (tag, wanted, id, bytes of metadata, bytes of data, words about devices or the place
    of the data, bytes that go ahead).
    """
    ahead = 0
    if len(fields) == 7 and fields[0] == AHEAD:
        *fields, ahead = fields
    if len(fields) == 6:
        fields = [*fields, b""]
    if len(fields) == 7:
        kind, tag, wanted, sid, meta, data, words = fields
        if (
            is_tag(tag)
            and type(wanted) is bool
            and is_count(sid)
            and is_count(meta)
            and is_count(data)
            and meta > 0
            and nbytes == (meta if meta <= INLINE else 0)
            and (type(words) is bytes or is_where(words, data))
            and (kind == RTS or (data and nbytes and not words))
            and (kind != AHEAD or (is_count(ahead) and 0 < ahead < data))
        ):
            return tag, wanted, sid, meta, data, words, ahead
    raise malformed(fields)


def read_counts(fields: Sequence[Any], count: int, nbytes: int = 0) -> Sequence[int]:
    """Return the `count` non-negative integers of a frame that must have no payload (`nbytes`)."""
    if len(fields) == count + 1 and not nbytes and all(map(is_count, fields)):
        return fields[1:]
    raise malformed(fields)


def read_pull(fields: Sequence[Any], nbytes: int) -> tuple[int, int, int]:
    """Return (id, part, first byte). The first byte is not 0 only for REST."""
    sid, part, *start = read_counts(fields, max(2, len(fields) - 1), nbytes)
    if len(start) == (part == REST) and all(start):
        return sid, part, sum(start)
    raise malformed(fields)


def read_credits(fields: Sequence[Any], nbytes: int) -> list[tuple[MessageTag, int]]:
    pairs = list(zip(fields[1::2], fields[2::2], strict=False))
    if len(fields) % 2 and not nbytes and all(is_tag(t) and is_count(n) for t, n in pairs):
        return pairs
    raise malformed(fields)


def read_tag(fields: Sequence[Any], nbytes: int) -> MessageTag:
    if len(fields) == 2 and not nbytes and is_tag(fields[1]):
        tag: MessageTag = fields[1]
        return tag
    raise malformed(fields)
