"""What a link has sent and its peer has not acknowledged, kept for another connection. No I/O here.

Frames are counted from the first one between two members, over all their connections. A small frame
is kept as it was sent. Copying a large one would cost too much, so only the views of its payload
are kept: they are *lent*, and must not be written before `settle`. That copies what may be lost and
releases the rest: those frames are *spent*, and cannot be sent again.

Small frames are joined for their write anyway. `done` says, as without this, that a frame has left.
Before memory is given back to its user, `Link.settle` copies what the peer's system has not
acknowledged. Within a plan this is not needed: a plan overwrites sent data only after it has
received what the peer could not have sent without it. It is not needed either for memory that is
never written again (`STEADY`).

Acknowledgements are frames of the link itself. The sender asks for one after 512 frames, or after 2
MiB of copies, and the other side answers with its count. So no other frame gets longer.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from aiodist.errors import ProtocolError
from aiodist.transports.base import STEADY, Done
from aiodist.transports.copies import Copies
from aiodist.transports.outbox import Outgoing
from aiodist.wire.frames import prefix

OWN: Final = object()
"""The token of frames of the link itself, which are neither counted nor kept."""

_OWN = struct.Struct(">BQ")
_OWN_PREFIX = prefix(b"", _OWN.size)

ASK: Final = 1
"""A frame of the link: how many of my frames have come?"""
ACK: Final = 2
"""The answer: this many."""

OWN_PAYLOAD: Final = _OWN.size
OWN_SIZE: Final = len(_OWN_PREFIX) + _OWN.size
"""Bytes of a frame of the link: it has no header, and this payload."""

JOINED = 4096
"""Payloads up to this are copied behind their prefix, which is cheaper than a gathered write."""
MANY = 512
"""How many frames are sent before the peer is asked what has come."""
MUCH = 2 << 20
"""How many bytes of copies of large frames are made before that."""
COPIED = 64 * 1024
"""Lent data up to this size is always copied."""
SLACK = 4096
"""More than the bytes of the link's own frames among those on their way."""


def own_frame(code: int, number: int = 0) -> bytes:
    """Make a frame of the link: ASK, or ACK with its number."""
    return _OWN_PREFIX + _OWN.pack(code, number)


def read_own(data: bytes | bytearray | memoryview, start: int) -> tuple[int, int]:
    """Return code and number of the payload of such a frame."""
    code, number = _OWN.unpack_from(data, start)
    return code, number


@dataclass(eq=False, slots=True)
class LentFrame:
    """A large frame: `views` of its payload are memory of its owner."""

    number: int  # of the frame, over all connections
    head: bytes  # its bytes before the payload
    views: Sequence[memoryview]
    nbytes: int
    token: object  # owner of the memory; None: this link; STEADY: it need not be given back

    def copy(self, copies: Copies) -> None:
        """Copy the payload, and forget its owner."""
        self.views = (copies.of(self.views, self.nbytes),)
        self.token = None


class _Waiting(NamedTuple):
    """A wait until the frames below `upto` have come."""

    upto: int
    done: Done


class RetransmissionBuffer:
    """The frames that were sent and not acknowledged. `acknowledged` counts those that were."""

    __slots__ = (
        "_copies", "_fresh", "_lent", "_spent", "_waiting", "acknowledged", "frames", "limit",
    )  # fmt: skip

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies or Copies()  # makes copies
        self.acknowledged = 0
        self.frames: deque[bytes | LentFrame] = deque()  # the oldest first
        self.limit = MANY
        """The length of `frames` at which the peer is asked."""
        self._lent: deque[LentFrame] = deque()  # those of them whose owner wants the memory back
        self._spent = 0  # frames below this number cannot be sent again
        self._waiting: list[_Waiting] = []  # for acknowledgements
        self._fresh = 0  # bytes of copies of large frames since the peer was asked

    @property
    def sent(self) -> int:
        """How many frames were sent."""
        return self.acknowledged + len(self.frames)

    @property
    def nbytes(self) -> int:
        """How many bytes were sent and not acknowledged."""
        return sum(
            [
                len(frame.head) + frame.nbytes if isinstance(frame, LentFrame) else len(frame)
                for frame in self.frames
            ]
        )

    @property
    def is_awaited(self) -> bool:
        """Whether a wait for an acknowledgement is pending."""
        return bool(self._waiting)

    def hold(self, data: bytes) -> None:
        """Keep a whole large frame that is ours."""
        self.frames.append(data)
        self.count(len(data))

    def lend(self, head: bytes, views: Sequence[memoryview], nbytes: int, token: object) -> None:
        """Keep a large frame: `head` and the payload."""
        lent = LentFrame(self.sent, head, views, nbytes, token)
        self.frames.append(lent)
        if token is None:
            self.count(nbytes)
        elif token is not STEADY:
            self._lent.append(lent)

    def finished(self, frame: Outgoing) -> None:
        """Keep a queued frame that has left."""
        if frame.token is OWN:
            return
        if frame.nbytes > JOINED:
            self.lend(frame.whole_head, frame.whole_views, frame.nbytes, frame.token)
        else:
            self.frames.append(b"".join((frame.whole_head, *frame.whole_views)))

    def count(self, nbytes: int) -> None:
        """Count kept bytes of a large frame."""
        self._fresh += nbytes
        if self._fresh >= MUCH:
            self.limit = 0

    def asking(self) -> None:
        """Note that the peer is about to be asked."""
        self._fresh = 0
        self.limit = len(self.frames) + MANY

    def acknowledge(self, count: int) -> list[Done]:
        """Note that the peer has `count` frames. Returns the callbacks of finished waits.

        Raises ProtocolError for an impossible count.
        """
        gone = count - self.acknowledged
        frames = self.frames
        if not 0 <= gone <= len(frames):
            raise ProtocolError(
                f"it says that {count} frames have come: "
                f"expected {self.acknowledged} to {self.sent}"
            )
        for _ in range(gone):
            frames.popleft()
        self.acknowledged = count
        self.limit = len(frames) + MANY
        lent = self._lent
        while lent and lent[0].number < count:
            lent.popleft()
        ready = [one.done for one in self._waiting if one.upto <= count]
        if ready:
            self._waiting = [one for one in self._waiting if one.upto > count]
        return ready

    def can_go_on(self, came: int) -> bool:
        """Tell whether a peer with `came` frames can be sent the next one."""
        return max(self.acknowledged, self._spent) <= came <= self.sent

    @property
    def has_lent(self) -> bool:
        """Whether it may have to read memory of others."""
        return bool(self._lent)

    # Copying all unacknowledged frames would copy nearly everything, because the peer is asked only
    # now and then. So we ask our system how many bytes the peer's system has not acknowledged.
    # These are the last ones written, and their frames are copied. What the peer's system has, its
    # process reads even if the connection breaks. If that is wrong, because a proxy has
    # acknowledged and lost it, the peer's count asks for a spent frame, and the link cannot go on.
    # Nothing wrong is sent.

    # ::
    #
    #     written to the socket:  ──── frame 40 ────┬──── frame 41 ────┬──── frame 42 ────
    #     acknowledged by the peer's system:  ──────────────────┤
    #     `settle`:               spent: never again │ copied: part of it may be lost │ copied
    def settle(self, token: object, underway: int | None) -> None:
        """Stop reading the memory of frames with `token`.

        `underway`: how many of the last bytes may be lost with the connection; None: unknown.
        """
        mine = [lent for lent in self._lent if lent.token == token]
        if not mine:
            return
        first = 0  # of those that may be lost
        if underway is not None and sum([lent.nbytes for lent in mine]) > COPIED:
            first = self.sent
            left = underway + SLACK if underway else 0
            for frame in reversed(self.frames):
                if left <= 0:
                    break
                size = (
                    frame.nbytes + len(frame.head) if isinstance(frame, LentFrame) else len(frame)
                )
                left -= size
                first -= 1
        for lent in mine:
            if lent.number >= first:
                lent.copy(self._copies)
                self.count(lent.nbytes)
            else:
                # Its memory belongs to its owner again, so this frame can never be sent again. If
                # the peer asks for it, `can_go_on` says no.
                lent.views, lent.token = (), None
                self._spent = lent.number + 1
        self._lent = deque([lent for lent in self._lent if lent.token is not None])

    def wait(self, queued: int, done: Done) -> None:
        """Call `done` once all sent frames have come, and `queued` frames more."""
        self._waiting.append(_Waiting(self.sent + queued, done))

    def end(self) -> list[Done]:
        """Drop everything, because nothing will be sent again. Returns the callbacks of waits."""
        waiting, self._waiting = self._waiting, []
        self.frames.clear()
        self._lent.clear()
        return [one.done for one in waiting]

    def again(self) -> list[Outgoing]:
        """Return all kept frames, to queue them for another connection. They are not kept any
        more."""
        frames: list[Outgoing] = []
        for frame in self.frames:
            if isinstance(frame, LentFrame):
                frames.append(Outgoing(frame.head, frame.views, frame.nbytes, None, frame.token))
            else:
                frames.append(Outgoing(frame, (), 0, None, None))
        self.frames.clear()
        self._lent.clear()
        self.limit = MANY
        return frames
