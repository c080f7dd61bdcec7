"""Two rings of bytes between two processes of a host, one each way. No I/O here.

Each side has a segment that it alone writes and the other maps to read: a page of 64-bit words,
then the ring of what it sends. The reader of a ring keeps its position in its own segment. So each
word has one writer, and there are no locks. Positions count all bytes so far and never wrap; only
their place in the ring does::

    segment of A, which B reads             segment of B, which A reads
    ┌──────────────────────────────┐        ┌──────────────────────────────┐
    │ written: 5000   read: 700    │        │ written: 900    read: 4200   │
    ├──────────────────────────────┤        ├──────────────────────────────┤
    │ ring: what A sends to B      │        │ ring: what B sends to A      │
    └──────────────────────────────┘        └──────────────────────────────┘

    B has 5000 - 4200 = 800 bytes to read; A has 900 - 700 = 200. Of the ring of A, all is free
    but those 800 bytes.

Order: bytes first, then the position that shows them (plain stores, in order on x86-64; see
`aiodist.buffers.segment`). A side that goes to sleep notes that in a word, then reads the other's
position once more. A side that moves a position reads that word afterwards. Both have a full fence
between store and load, so at least one sees the other's store. So neither sleeps on bytes, or on
room, that is there.

Python has no instruction for a fence. But taking a free lock and releasing it is an atomic exchange
of the processor, which on x86-64 is a full fence. `_fence` is such a lock, without contention.

**Nothing that the peer writes is trusted.** Its words are checked each time, and an impossible
position (more bytes than the ring has, fewer than before) closes the link. A peer can write wrong
bytes into its own ring, which it could send anyway, and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from aiodist.buffers.copying import copy, share
from aiodist.compiled import core
from aiodist.errors import ProtocolError
from aiodist.transports import futex

PAGE = 4096
"""Bytes of the words before the ring."""

RING = 1024 * 1024 + 64 * 1024
"""Bytes of a ring: a data frame of the largest size, and what else belongs to a message. So a whole
message goes in at once, and its sender does not wait."""

SEGMENT = PAGE + RING
"""Bytes of a segment."""

PIECE = 64 * 1024
"""Bytes after which a writer shows what it has copied, so that the other side copies at the same
time. For a large message, whose reader is behind, it shows more: a quarter of what it writes."""

GIVE_BACK = 32 * 1024
"""Bytes after which a reader gives back the room, because each time costs both sides a cache
line."""

REWIND = 64 * 1024
"""If the ring is empty at this position or beyond, the writer goes back to its start. Little
traffic then stays within few cache lines and pages, and large payloads seldom wrap. The compiled
part goes on to the end with 32 KiB and more, because memory that the peer has just read takes
longer to write (`aiodist.shared_memory.board.ROUND`)."""

# Words of a segment's first page. What sending writes is more than a cache line (and the one that
# processors fetch with it) apart from what receiving writes.
_WRITTEN = 0
"""Bytes that the owner has written to its ring."""
_ORIGIN = 1
"""How many it had written when it last began at the ring's first byte, the ring being empty."""
_READ = 16
"""Bytes that the owner has read from the peer's ring."""
_ASLEEP = 17
"""Not 0: the owner sleeps, for the n-th time. 2 n: until a bell. 2 n + 1: until the peer rings at
the word of what it has written (it dozes)."""
_TURNS = 19
"""How many turns of its loop the owner was awake in."""
_WANTED = 18
"""Not 0: the owner waits for room, until the peer has read so many bytes."""
_CORE = 20
"""1 + the core on which the owner last waited within a call. 0: not known. The compiled part writes
it."""
_THREAD = 21
"""The thread of the owner's loop, by its number in the system."""


class RingState:
    """What one side of a link knows of both rings. The compiled part has the same, and uses it."""

    __slots__ = (
        "_given", "_granted", "_limit", "_origin", "_rung", "_seen", "_sleeps", "_written",
        "origin", "read", "received", "sent",
    )  # fmt: skip

    read: int
    """Bytes that were read. The next one is at ``incoming[(read - origin) % size]``."""
    origin: int
    """The peer's origin, as far as read."""
    sent: int
    """Payload bytes that the compiled part has written."""
    received: int
    """Payload bytes that the compiled part has read."""
    _written: int
    _origin: int
    """Bytes written when it last went back to the start of the ring."""
    _limit: int
    """The end of the room that was seen last."""
    _rung: int
    """The peer's sleep that a bell has ended."""
    _seen: int
    """Bytes that had come when last looked."""
    _given: int
    """Bytes that the peer knows to be read."""
    _granted: int
    """The peer's wait for room that a bell has ended."""
    _sleeps: int

    def attach(self, own: memoryview, peer: memoryview) -> None:
        """Let the compiled part use these segments, if there is one."""

    def detach(self) -> None:
        """Let it use them no more."""


if TYPE_CHECKING:
    CoreRings: TypeAlias = RingState
else:
    CoreRings = RingState if core is None else core.Rings


class Rings(CoreRings):
    """The rings of one link, seen from one side: out of `own` memory, in from the `peer`'s.

    Both are segments of the same size. `bell()` is called when the peer must be woken.
    """

    __slots__ = (
        "_bell", "_doorstep", "_fence", "_out", "_own", "_peer", "_threshold", "_turns", "incoming",
        "size",
    )  # fmt: skip

    def __init__(self, own: memoryview, peer: memoryview, bell: Callable[[], None]) -> None:
        self._own = own[:PAGE].cast("Q")
        self._peer = peer[:PAGE].cast("Q")
        self._out = own[PAGE:]  # the own ring
        self.incoming = peer[PAGE:]
        """The peer's ring."""
        self.size = len(self._out)  # bytes of each ring
        self._bell = bell
        self._fence = threading.Lock()  # never contended, see the module
        self._written = self._origin = self._rung = 0
        self._limit = self.size
        self.read = self.origin = self._seen = self._given = self._granted = 0
        self._sleeps = self._turns = 0
        self.sent = self.received = 0
        self._own[_THREAD] = threading.get_native_id()
        self.attach(own, peer)
        # The words at which the peer and this side doze: what each has written.
        self._doorstep = futex.address_of(own)
        self._threshold = futex.address_of(peer)

    # ---- out ----

    def room(self) -> int:
        """Return how many bytes can be written now."""
        pending = self._written - self._peer[_READ]
        if not 0 <= pending <= self.size:
            raise ProtocolError(
                f"the peer says it has read {self._written - pending} bytes of {self._written}"
                f" in a ring of {self.size}"
            )
        self._limit = self._written + self.size - pending
        return self.size - pending

    def rewind(self) -> None:
        """Go on at the start of the ring if that is better."""
        if self._written - self._origin >= REWIND and self._peer[_READ] == self._written:
            self._origin = self._own[_ORIGIN] = self._written  # shown with the next bytes

    def put(self, data: bytes) -> bool:
        """Write a small frame, if there is room for all of it in one place."""
        if self._written - self._origin >= REWIND:
            self.rewind()
        at = (self._written - self._origin) % self.size
        end = at + len(data)
        if end > self.size or (len(data) > self._limit - self._written and len(data) > self.room()):
            return False
        self._out[at:end] = data
        self._show(len(data))
        return True

    def write(self, buffers: Sequence[bytes | memoryview], step: int | None = None) -> int:
        """Write as much of `buffers` as there is room for. Returns how many bytes.

        Raises BlockingIOError if there is no room. `step`: after how many bytes the peer may see
        them; None: after a quarter of all.
        """
        room = left = self.room()
        if not room:
            raise BlockingIOError("the ring is full")
        total = sum([memoryview(buffer).nbytes for buffer in buffers])
        if total <= PIECE + PAGE:
            step = total  # a piece with its header
        elif step is None:
            step = max(PIECE, total // 4)
        at = (self._written - self._origin) % self.size
        hidden = 0
        for buffer in buffers:
            view = memoryview(buffer)
            if not view.nbytes:
                continue
            view = view.cast("B")
            while view and left:
                count = min(len(view), left, self.size - at, step - hidden)
                share(self._out[at : at + count], view[:count])
                view = view[count:]
                at = (at + count) % self.size
                left -= count
                hidden += count
                if hidden == step:
                    self._show(hidden)
                    hidden = 0
        if hidden:
            self._show(hidden)
        return room - left

    def _show(self, count: int) -> None:
        """Let the peer see `count` more bytes."""
        self._written += count
        self._own[_WRITTEN] = self._written
        with self._fence:
            pass
        self._wake_peer()

    def _wake_peer(self) -> None:
        asleep = self._peer[_ASLEEP]
        if asleep and asleep != self._rung:
            self._rung = asleep
            if asleep & 1:
                futex.ring(self._doorstep)
            else:
                self._bell()

    # ---- in ----

    @property
    def moved(self) -> int:
        """How many bytes went either way so far."""
        return self._written + self.read

    def has_news(self) -> bool:
        """Tell whether there are unread bytes, or the peer's words make no sense."""
        return self._peer[_WRITTEN] != self.read

    def goes_on_with(self, start: bytes) -> bool:
        """Tell whether the unread bytes begin with these. Raises ProtocolError."""
        have = self.available()
        at = (self.read - self.origin) % self.size
        return have >= len(start) and self.incoming[at : at + len(start)].tobytes() == start

    def available(self) -> int:
        """Return how many bytes can be read now."""
        self._seen = self._peer[_WRITTEN]
        have = self._seen - self.read
        if not 0 <= have <= self.size:
            raise ProtocolError(
                f"the peer says it has written {self._seen} bytes, of which {self.read} were read,"
                f" in a ring of {self.size}"
            )
        origin = self._peer[_ORIGIN]
        if have and origin != self.origin:
            if origin != self.read:
                raise ProtocolError(
                    f"the peer started anew after {origin} bytes, but {self.read} were read"
                )
            self.origin = origin
        return have

    def peek(self, start: int, into: memoryview) -> None:
        """Copy available bytes from the `start`-th on, without taking them."""
        at = (self.read - self.origin + start) % self.size
        here = min(len(into), self.size - at)
        copy(into[:here], self.incoming[at : at + here])
        if here < len(into):
            copy(into[here:], self.incoming[: len(into) - here])

    def taken(self, count: int) -> None:
        """Note that `count` available bytes were read, so that the peer may overwrite them,
        soon."""
        self.read += count
        if self.read - self._given < GIVE_BACK:
            return
        self._given = self._own[_READ] = self.read
        with self._fence:
            pass
        wanted = self._peer[_WANTED]
        if wanted and wanted != self._granted and wanted <= self.read:
            self._granted = wanted
            self._bell()

    # ---- sleep ----

    def sleep(self, for_room: bool) -> bool:
        """Ask the peer to ring after it has written, and with `for_room` when a quarter of the ring
        is free.

        Returns False, and stays awake, if that has happened already.
        """
        # No bell for what is given back here: it is less than a quarter, so a peer that waits for a
        # quarter has had its bell.
        self._given = self._own[_READ] = self.read
        self._sleeps += 2
        self._own[_ASLEEP] = self._sleeps
        wanted = self._written - self.size * 3 // 4 if for_room else 0
        self._own[_WANTED] = wanted
        with self._fence:
            pass
        if self._peer[_WRITTEN] != self._seen or (for_room and self._peer[_READ] >= wanted):
            self.wake()
            return False
        return True

    def doze(self, seconds: float) -> None:
        """Sleep within the call until more bytes have come, at most `seconds`. Only if
        `futex.works`."""
        self._given = self._own[_READ] = self.read  # as in `sleep`
        self._sleeps += 2
        self._own[_ASLEEP] = self._sleeps + 1
        # The fence is in the kernel, which compares what is written with what was seen.
        futex.wait(self._threshold, self._seen, seconds)
        self._own[_ASLEEP] = 0

    def turned(self) -> None:
        """Note that the loop has had a turn."""
        self._turns += 1
        self._own[_TURNS] = self._turns

    @property
    def turns(self) -> int:
        """How many turns the peer's loop has had while it was awake."""
        return self._peer[_TURNS]

    def knock(self) -> None:
        """Wake the peer, if it sleeps, so that its loop has a turn."""
        with self._fence:
            pass
        self._wake_peer()

    def wake(self) -> None:
        """Tell the peer that no bell is needed now."""
        self._own[_ASLEEP] = 0
        self._own[_WANTED] = 0

    def close(self) -> None:
        """Release the memory. Nothing else may be called afterwards."""
        self.detach()
        for view in (self._own, self._peer, self._out, self.incoming):
            view.release()  # tracebacks of errors may hold on to the views
