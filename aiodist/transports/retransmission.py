"""What a link has sent and its peer has not acknowledged: kept, to be sent again over another
connection if this one breaks. No I/O in here.

Frames are counted, from the first one between two members on, over all their connections. A small
frame is kept as it was sent; of a large one only the views of its payload are, as copying it would
cost too much: they are *lent*, and nobody may write there before `settle`. That copies what may be
lost, and lets go of the rest: those frames are *spent*, and cannot be sent again.

Small frames are joined for their write anyway, and kept as they are. A large payload is only lent.
`done` says, as without this, that a frame has left. Before the memory is given back to its user,
`Link.settle` copies what the peer's system has not acknowledged. Within a plan nothing of that is
needed: a plan overwrites what it has sent only after it has received what the peer could not have
sent without it. Nor is it for memory that is never written again (`STEADY`): it is kept as it is.

Acknowledgements are frames of the link itself. The sender asks for one after 512 frames, or after
2 MiB of copies, and the other side answers with its count. So no other frame is longer for it.
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
"""The answer: so many."""

OWN_PAYLOAD: Final = _OWN.size
OWN_SIZE: Final = len(_OWN_PREFIX) + _OWN.size
"""Bytes of a frame of the link: it has no header, and this payload."""

JOINED = 4096
"""Payloads up to this are copied behind their prefix: cheaper than a gathered write."""
MANY = 512
"""So many frames are sent before the peer is asked what has come."""
MUCH = 2 << 20
"""And so many bytes of copies of large ones."""
COPIED = 64 * 1024
"""So much of what is lent is copied whatever the system says of it."""
SLACK = 4096
"""More than the bytes of the link's own frames among those that are on their way."""


def own_frame(code: int, number: int = 0) -> bytes:
    """A frame of the link: ASK, or ACK with its number."""
    return _OWN_PREFIX + _OWN.pack(code, number)


def read_own(data: bytes | bytearray | memoryview, start: int) -> tuple[int, int]:
    """Code and number of the payload of such a frame."""
    code, number = _OWN.unpack_from(data, start)
    return code, number


@dataclass(eq=False, slots=True)
class Lent:
    """A large frame: `views` of its payload are somebody's memory."""

    number: int  # of the frame, over all connections
    head: bytes  # its bytes before the payload
    views: Sequence[memoryview]
    nbytes: int
    token: object  # who gets the memory back; None: nobody, it is ours; STEADY: nobody

    def copy(self, copies: Copies) -> None:
        """Have a copy of the payload, and forget whose it was."""
        self.views = (copies.of(self.views, self.nbytes),)
        self.token = None


class _Waiting(NamedTuple):
    """Somebody who waits until the frames below `upto` have come."""

    upto: int
    done: Done


class RetransmissionBuffer:
    """The frames that were sent and not acknowledged. `acknowledged`: how many were."""

    __slots__ = (
        "_copies", "_fresh", "_lent", "_spent", "_waiting", "acknowledged", "frames", "limit",
    )  # fmt: skip

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies or Copies()  # makes them
        self.acknowledged = 0
        self.frames: deque[bytes | Lent] = deque()  # the oldest first
        self.limit = MANY
        """How long `frames` may become before the peer is to be asked."""
        self._lent: deque[Lent] = deque()  # those of them whose memory somebody wants back
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
                len(frame.head) + frame.nbytes if isinstance(frame, Lent) else len(frame)
                for frame in self.frames
            ]
        )

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for an acknowledgement."""
        return bool(self._waiting)

    def hold(self, data: bytes) -> None:
        """Keep a whole frame that is large, and ours."""
        self.frames.append(data)
        self.count(len(data))

    def lend(self, head: bytes, views: Sequence[memoryview], nbytes: int, token: object) -> None:
        """Keep a large frame: `head` and the payload."""
        lent = Lent(self.sent, head, views, nbytes, token)
        self.frames.append(lent)
        if token is None:
            self.count(nbytes)
        elif token is not STEADY:
            self._lent.append(lent)

    def finished(self, frame: Outgoing) -> None:
        """Keep a frame that has left, of those that were queued."""
        if frame.token is OWN:
            return
        if frame.nbytes > JOINED:
            self.lend(frame.whole_head, frame.whole_views, frame.nbytes, frame.token)
        else:
            self.frames.append(b"".join((frame.whole_head, *frame.whole_views)))

    def count(self, nbytes: int) -> None:
        """So many bytes of a large frame are kept."""
        self._fresh += nbytes
        if self._fresh >= MUCH:
            self.limit = 0

    def asking(self) -> None:
        """The peer is about to be asked."""
        self._fresh = 0
        self.limit = len(self.frames) + MANY

    def acknowledge(self, count: int) -> list[Done]:
        """The peer has `count` frames: whose turn that is. Raises ProtocolError where that cannot
        be."""
        gone = count - self.acknowledged
        frames = self.frames
        if not 0 <= gone <= len(frames):
            raise ProtocolError(
                f"it says that {count} frames have come: {self.acknowledged} to {self.sent} may"
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
        """Whether a peer to whom `came` frames have come can be sent the next one."""
        return max(self.acknowledged, self._spent) <= came <= self.sent

    @property
    def has_lent(self) -> bool:
        """Whether memory of others is read if it comes to that."""
        return bool(self._lent)

    # To copy all that the peer has not acknowledged would be to copy nearly everything, for it is
    # asked only now and then. So the system is asked how many bytes the peer's system has not
    # acknowledged: these are the last ones that were written, and the frames that they belong to
    # are copied. What the peer's system has, its process reads even if the connection breaks. If
    # that was not so (a proxy has acknowledged it, and lost it), the peer's count asks for a spent
    # frame, and the link cannot go on: that is seen, and nothing wrong is sent in its place.

    #
    #     written to the socket:  ──── frame 40 ────┬──── frame 41 ────┬──── frame 42 ────
    #     acknowledged by the peer's system:  ──────────────────┤
    #     `settle`:               spent: never again │ copied: part of it may be lost │ copied
    def settle(self, token: object, underway: int | None) -> None:
        """Do not read the memory of frames with `token` any more. `underway`: so many of the last
        bytes may be lost with the connection; None: nobody knows."""
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
                size = frame.nbytes + len(frame.head) if isinstance(frame, Lent) else len(frame)
                left -= size
                first -= 1
        for lent in mine:
            if lent.number >= first:
                lent.copy(self._copies)
                self.count(lent.nbytes)
            else:
                # Its memory is somebody's own again, so this frame can never be sent again: if the
                # peer should ask for it, `can_go_on` says no.
                lent.views, lent.token = (), None
                self._spent = lent.number + 1
        self._lent = deque([lent for lent in self._lent if lent.token is not None])

    def wait(self, queued: int, done: Done) -> None:
        """Call `done` once all that was sent has come, and `queued` frames more."""
        self._waiting.append(_Waiting(self.sent + queued, done))

    def end(self) -> list[Done]:
        """Nothing will be sent again: who has waited."""
        waiting, self._waiting = self._waiting, []
        self.frames.clear()
        self._lent.clear()
        return [one.done for one in waiting]

    def again(self) -> list[Outgoing]:
        """All that is kept, to be queued for another connection; it is not kept any more."""
        frames: list[Outgoing] = []
        for frame in self.frames:
            if isinstance(frame, Lent):
                frames.append(Outgoing(frame.head, frame.views, frame.nbytes, None, frame.token))
            else:
                frames.append(Outgoing(frame, (), 0, None, None))
        self.frames.clear()
        self._lent.clear()
        self.limit = MANY
        return frames
