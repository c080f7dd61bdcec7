"""Frames of point to point: how they look, and the way out to ranks, this one included.

After the kind and the context, the fields of a frame are

====== ==================== =====================================================================
EAGER  [0, tag, wanted, m]  a message; payload: `m` bytes of metadata, then its data
RTS    [1, tag, wanted, id, m, n]  a message of `m` + `n` bytes is there; payload: its metadata, or
                            nothing if this is over `INLINE` bytes. A last field, where there is
                            one, says how to read those of its arrays that are on a device, or
                            where all of its data may be read (`aiodist.p2p.shared`)
PULL   [2, id, part]        send me its metadata (0), or its data: without (1) the arrays that I
                            have read on your device by now, or with all (2); or without any,
                            and you have leave to push one message (3). Or nothing: I have read
                            its data where it lies, and it may be wrong (4), or is right (5);
                            or, where there is a last field, its data from that byte on, for
                            what comes before it was read (6)
DATA   [3, id]              payload: the next bytes of what was pulled
FIN    [4, id]              all data is there, and is right; not after (5)
WITHDRAW [5, id]            the message does not exist any more, whatever came of it
REFUSE [6, id, why]         I have dropped the message: too large (0), not readable (1)
CREDIT [7, tag, amount, …]  these were consumed
WANT   [8, tag]             I wait for this tag: see `aiodist.p2p.credit`
UNWANT [9, tag]             I do not any more
NOWANT [10, tag]            the want was taken back before it was answered
PUSH   [11, tag, wanted, id, m, n]  as RTS, of at most `MOST_PUSHED` bytes of data, which follow
                            without being pulled. Takes leave (3), which is for one such message;
                            where ranks are far, of as much as goes ahead
AHEAD  [12, tag, wanted, id, m, n, p]  as RTS; `p` bytes of its data, but not all, follow without
                            being pulled, and what is pulled is the rest. Costs credit
====== ==================== =====================================================================

The sender of messages sends EAGER, RTS, PUSH, AHEAD, DATA, FIN, WITHDRAW and NOWANT, all in order;
the receiver sends the rest, urgent: these overtake its own messages, but not each other.
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
"""The parts of a message that are pulled. `LEAVE`: as `BODY`, with leave to push another one;
`READ`: none, its data was read; `TAKEN`: none, and nothing more is to be said; `REST`: the data
from a byte on, for what comes before it was read."""

MOST_PUSHED: Final = 1024 * 1024
"""Most bytes of data of a message that is pushed, where ranks are near."""

TOO_LARGE: Final = 0
UNREADABLE: Final = 1
"""Why a message was refused."""

INLINE: Final = 16 * 1024
"""Most bytes of metadata that travel with an RTS."""
MAX_WORDS: Final = 32 * 1024
"""Most bytes of words about devices in an RTS."""

MIN_INT: Final = -(2**63)
MAX_INT: Final = 2**63 - 1
CREDITS: Final = 32
"""Most tags in one CREDIT frame: it stays below the 64 KiB of a header."""


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
        """One frame to another rank: see `Link.send`. Calls back nothing but `done`."""

    def discard(self, dst: int, token: object) -> None:
        """See `Link.discard`."""

    def settle(self, dst: int, token: object) -> None:
        """See `Link.settle`."""

    def error(self, cls: type[AiodistError], message: str, **fields: Any) -> AiodistError:
        """An error that names the group and the epoch."""
        ...

    def lost(self) -> Mapping[int, str]:
        """The ranks that are lost, and why: "connection reset"."""
        ...


class Wire:
    """Sends frames to other ranks through the channel, and to this one through a queue.

    Frames to oneself are handed over by `flush`, never from inside `send`: so the engine is not
    entered while it is at work.

    A frame that nobody waits for yet, as credit and leave, is held back for the next one to its
    rank (`hold`): by itself it would wake a peer that waits for something else, most likely for the
    answer to its message, in vain. It goes before this rank waits in a receive, however, and at the
    latest in the second turn of the loop from now: in the first one the program answers.
    """

    __slots__ = ("_armed", "_channel", "_flushing", "_loop", "_receive", "held", "rank", "waiting")

    def __init__(
        self,
        channel: Channel,
        receive: Callable[[tuple[Any, ...], Sequence[memoryview]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`receive`: takes in a frame that this rank sent to itself."""
        self._channel = channel
        self._receive = receive
        self._loop = loop
        self._flushing = False
        self._armed = False  # the loop will let go of what is held
        self.held: dict[int, tuple[Any, ...]] = {}
        """The frame that is held back, by the rank that it is for: one at most."""
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
        """Send an urgent frame that may wait for another one, a short while."""
        if dst == self.rank or dst in self.held:
            self.send(dst, fields, urgent=True)
            return
        self.held[dst] = fields
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._loop.call_soon, self._turned)

    def let_go(self, dst: int) -> None:
        """Send what is held back for `dst`."""
        fields = self.held.pop(dst, None)
        if fields is not None:
            self._channel.send(dst, fields, urgent=True)

    def let_all_go(self) -> None:
        """Send all that is held back."""
        for dst in tuple(self.held):
            self.let_go(dst)

    def _turned(self) -> None:
        self._armed = False
        self.let_all_go()

    def discard(self, dst: int, token: object) -> None:
        # Nothing that is discarded waits here: `flush` ends every entry into the engine.
        if dst != self.rank:
            self._channel.discard(dst, token)

    def settle(self, dst: int, token: object) -> None:
        """See `Link.settle`."""
        if dst != self.rank:
            self._channel.settle(dst, token)

    def flush(self) -> None:
        """Take in what this rank sent to itself. Ends every entry into the engine."""
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


# What comes from the network is checked here; a violation is a ProtocolError.


def malformed(fields: Sequence[Any]) -> ProtocolError:
    return ProtocolError(f"malformed point-to-point frame {str(list(fields))[:200]}")


def is_tag(value: Any) -> bool:
    """Whether `value` is a tag that `as_tag` gives."""
    kind = type(value)
    if kind is int:
        return bool(MIN_INT <= value <= MAX_INT)
    return kind is str and len(value.encode()) <= MAX_TAG


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def read_eager(fields: Sequence[Any], nbytes: int) -> tuple[MessageTag, bool, int]:
    """(tag, wanted, bytes of metadata)."""
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
    """(tag, wanted, id, bytes of metadata, bytes of data, words about devices or where it is, bytes
    that go ahead), of a PUSH and an AHEAD too."""
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
    """The `count` non-negative integers of a frame that has no payload (`nbytes`)."""
    if len(fields) == count + 1 and not nbytes and all(map(is_count, fields)):
        return fields[1:]
    raise malformed(fields)


def read_pull(fields: Sequence[Any], nbytes: int) -> tuple[int, int, int]:
    """(id, part, its first byte: not 0 if it is the REST)."""
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
