"""Several connections as one stream of bytes, for networks that lose packets.

Reno and CUBIC take a lost packet for a full queue, and halve what they have on the way. With eight
connections only one eighth is halved. The stream is cut into chunks. Each has its position in
front, and goes over any connection that has room::

    stream ──> chunk 0 ──> connection 0 ──────────────> 0, 3 ──┐
               chunk 1 ──> connection 1 ── (slow) ────> 1      ├──> by position ──> stream
               chunk 2 ──> connection 2 ──────────────> 2, 4 ──┘

**If little is lost** everything goes over the first connection, because eight would each fill their
share of the queues on the way, and lose packets by that. If the first one goes on losing packets
(`Losses`), all are used from then on. Each side decides this for what it sends.

**Nothing is reordered in memory.** Of a chunk whose turn has not come only the position is read.
The rest stays in the system, which tells the sender when its buffer is full. So early chunks take
no memory of this process, and all bytes are read straight to their place.

**Acknowledgements.** The peer's system has acknowledged the stream up to the oldest chunk that it
has not fully acknowledged on its connection (`unacknowledged`).

**The end.** The stream ends when nothing more can come: all connections have ended, or one in the
middle of a chunk. The link decides whether that end is in order, as with one connection. If one
connection ends, the others have to follow (`PATIENCE`). Otherwise something between the two has
closed it, and what the peer sends over it is lost. A connection that breaks breaks the stream,
after what has come is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiodist.errors import ProtocolError
from aiodist.transports.silence import (
    is_unanswered,
    probe_when_idle,
    round_trip,
    sent_again,
    unacknowledged,
)

CHUNK = 64 * 1024
"""The most bytes of a chunk: a connection takes them at once, and they are few to wait for."""

UNSENT = 2 * CHUNK
"""Bytes that the system takes for a connection before it can send them. With more, chunks would
wait at a slow connection while others are idle."""

PATIENCE = 2.5
"""Seconds in which something has to come after one connection has ended. There are `CHANCES` such
periods in a row, so that a loop that does not turn for long loses only one of them."""

CHANCES = 4

EVENTS = 3
"""How many losses in a row make a bundle use all connections. A single loss may be the end of a
slow start, or full queues; those come seconds apart."""

APART = 4.0
"""Round trips within which all losses count as one."""

AT_LEAST = 0.1
"""The shortest such time, in seconds."""

IN_A_ROW = 10.0
"""After this many of these times without a loss, the count begins anew."""

_HEAD = struct.Struct(">QI")


class Losses:
    """Tells whether a connection goes on losing packets. No I/O here."""

    __slots__ = ("_apart", "_count", "_last", "_lost")

    def __init__(self, trip: float) -> None:
        """`trip` is the round trip in seconds."""
        self._apart = max(AT_LEAST, APART * trip)
        self._lost = 0  # packets, so far
        self._last = -math.inf  # when one was counted
        self._count = 0  # how many in a row

    def look(self, now: float, lost: int) -> bool:
        """Note that `lost` packets were lost until `now`. Returns whether it goes on losing."""
        if lost != self._lost:
            self._lost = lost
            since = now - self._last
            if since >= self._apart:
                self._count = self._count + 1 if since < IN_A_ROW * self._apart else 1
                self._last = now
        return self._count >= EVENTS


class Part:
    """One of the connections."""

    __slots__ = (
        "chunks", "ended", "fd", "got", "head", "joined", "left", "rest", "sock", "watched",
        "written",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        # Receiving.
        self.head = bytearray(_HEAD.size)  # of the chunk that comes
        self.got = 0  # bytes of that
        self.left = 0  # bytes of the chunk that have not been read
        self.ended = False  # nothing more comes
        self.watched = False  # the loop watches for bytes to read
        # Sending.
        self.rest = memoryview(b"")  # of a chunk that was begun
        self.written = 0  # bytes that the system has taken
        # The chunks that the peer's system may not have: the position of the first one's beginning
        # in the stream, and of the last one's end in what is written here.
        self.chunks: deque[tuple[int, int]] = deque()
        self.joined = 0  # chunks that end before this count as a part of the last one

    def note(self, position: int, size: int) -> None:
        """Note that a chunk of `size` bytes begins, before it is written."""
        end = self.written + size
        # Small chunks count as one. It begins with the first and has come with the last.
        if self.chunks and end <= self.joined:
            self.chunks[-1] = (self.chunks[-1][0], end)
        else:
            self.settle()
            self.chunks.append((position, end))
            self.joined = self.written + CHUNK

    def settle(self) -> int | None:
        """Forget what the peer's system has. Returns how many bytes it may not have; None:
        unknown."""
        underway = unacknowledged(self.fd)
        if underway is not None:
            there = self.written - underway
            while self.chunks and self.chunks[0][1] <= there:
                self.chunks.popleft()
        return underway


class Bundle:
    """Connected, non-blocking TCP sockets, which it owns, in place of the one of a `StreamLink`."""

    family = socket.AF_UNSPEC  # options of a single connection make no sense

    def __init__(self, loop: asyncio.AbstractEventLoop, socks: Sequence[socket.socket]) -> None:
        self._loop = loop
        self._parts = [Part(sock) for sock in socks]
        self.is_closed = False
        # Receiving.
        self._position = 0  # of the next byte
        self._current: Part | None = None  # the part with the chunk of that byte
        self._ahead: dict[int, Part] = {}  # parts whose chunk comes later, by its position
        self._over = False  # nothing can be read beyond what has come
        self._failure: OSError | None = None  # why a connection has failed
        self._ending: asyncio.TimerHandle | None = None  # checks whether the others end, too
        self._readable: Callable[[], object] | None = None
        # Sending.
        self._sent = 0  # bytes of the stream
        self._used = 1  # how many of the parts, from the first on
        self._losses = Losses(round_trip(socks[0]) or 0.0)
        self._turn = 0  # the part that is tried first
        self._writable: Callable[[], object] | None = None
        self._flushed: Callable[[], object] = _nothing
        self._broken: Callable[[OSError], object] = _nothing

    @property
    def socks(self) -> list[socket.socket]:
        """Its connections."""
        return [part.sock for part in self._parts]

    def fileno(self) -> int:
        return self._parts[0].fd

    def getpeername(self) -> Any:
        return self._parts[0].sock.getpeername()

    def _use_all(self) -> None:
        """Send over all parts from now on."""
        self._used = len(self._parts)
        option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        for part in self._parts:
            if option is not None:
                # it is gone already, and sending will notice that
                with contextlib.suppress(OSError):
                    part.sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT)
            if self._writable is not None:
                self._loop.add_writer(part.fd, self._room, part)

    def _loses(self) -> bool:
        """Tell whether the first part, alone until now, goes on losing packets."""
        try:
            again = sent_again(self._parts[0].sock)
        except OSError:  # it is gone already
            return False
        return self._losses.look(self._loop.time(), again)

    # ---- sending ----

    def tell(self, flushed: Callable[[], object], broken: Callable[[OSError], object]) -> None:
        """Set the functions to call when begun chunks are out, and when they cannot be sent."""
        self._flushed, self._broken = flushed, broken

    def send(self, data: bytes | memoryview) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send as a socket does: what it takes is sent, some of it maybe later."""
        views = deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
        total = sum(map(len, views))
        start = self._sent
        full = 0  # parts in a row without room
        while full < self._used and self._sent - start < total:
            part = self._parts[self._turn]
            size = min(CHUNK, total - (self._sent - start))
            if not self._begin(part, views, size, fresh=self._sent == start):
                full += 1
                if self._used == 1 and self._loses():
                    self._use_all()
                self._turn = (self._turn + 1) % self._used
                continue
            full = 0
            if size == CHUNK:
                self._turn = (self._turn + 1) % self._used
        if self._sent == start and total:
            raise BlockingIOError
        return self._sent - start

    def _begin(self, part: Part, views: deque[memoryview], size: int, *, fresh: bool) -> bool:
        """Send the next `size` bytes of `views` over `part`. Returns False if it has no room.

        Raises OSError if the part is broken. If something else was just sent (not `fresh`), the
        error is reported instead.
        """
        pieces: list[bytes | memoryview] = [_HEAD.pack(self._sent, size)]
        left = size
        for view in views:
            pieces.append(view[:left])
            left -= len(pieces[-1])
            if not left:
                break
        try:
            if part.rest and not self._push(part):
                return False
            sent = part.sock.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if fresh:
                raise
            # Report it now, because a begun chunk is lost, and there may be nothing more to send.
            self._loop.call_soon(self._broken, error)
            return False
        whole = _HEAD.size + size
        part.note(self._sent, whole)
        part.written += sent
        if sent < whole:
            # Copied, because its owner takes it for sent, and another part would otherwise have to
            # wait.
            part.rest = memoryview(b"".join(pieces))[sent:]
            if self._writable is None:
                self._loop.add_writer(part.fd, self._room, part)
        self._sent += size
        while size:
            taken = min(size, len(views[0]))
            size -= taken
            if taken == len(views[0]):
                views.popleft()
            else:
                views[0] = views[0][taken:]
        return True

    def arm(self, writable: Callable[[], object]) -> None:
        """Make the loop call `writable` while a part has room."""
        self._writable = writable
        for part in self._parts[: self._used]:
            self._loop.add_writer(part.fd, self._room, part)

    def disarm(self) -> None:
        self._writable = None
        for part in self._parts:
            if not part.rest:
                self._loop.remove_writer(part.fd)

    def push(self) -> None:
        """Send begun chunks, as far as there is room."""
        for part in self._parts:
            if part.rest:
                self._room(part)

    def _push(self, part: Part) -> bool:
        """Send the begun chunk of `part`. Returns whether all of it is out. Raises OSError."""
        try:
            sent = part.sock.send(part.rest)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            part.rest = part.rest[:0]  # nothing more leaves there
            self._loop.remove_writer(part.fd)
            raise
        part.written += sent
        part.rest = part.rest[sent:]
        if not part.rest and self._writable is None:
            self._loop.remove_writer(part.fd)
        return not part.rest

    def _room(self, part: Part) -> None:
        if part.rest:
            try:
                if not self._push(part):
                    return
            except OSError as error:
                self._broken(error)
                return
            if not self.has_rest:
                self._flushed()
        if self._writable is not None:
            self._writable()

    @property
    def has_rest(self) -> bool:
        """Whether begun chunks are not sent yet."""
        return any(part.rest for part in self._parts)

    def unacknowledged(self) -> int | None:
        """Return how many bytes of the end of the stream the peer's system may not have."""
        oldest = self._sent
        for part in self._parts:
            if part.settle() is None:
                return None
            if part.chunks:
                oldest = min(oldest, part.chunks[0][0])
        return self._sent - oldest

    # ---- receiving ----

    def watch(self, readable: Callable[[], object]) -> None:
        """Make the loop call `readable` while there is something to read."""
        self._readable = readable
        for part in self._parts:
            if not part.ended and (part.got < _HEAD.size or part is self._current):
                self._watch(part)

    def unwatch(self) -> None:
        for part in self._parts:
            self._leave(part)
        self._readable = None

    def _watch(self, part: Part) -> None:
        if self._readable is not None and not part.watched:
            part.watched = True
            self._loop.add_reader(part.fd, self._readable)

    def _leave(self, part: Part) -> None:
        """Stop watching it, because its data has to wait."""
        if part.watched:
            part.watched = False
            self._loop.remove_reader(part.fd)

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        return bytes(memoryview(data)[: self.recv_into(data)])

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        first, second = views
        count = self.recv_into(first)
        if count == len(first):
            with contextlib.suppress(OSError):  # the next read raises it again
                count += self.recv_into(second)
        return (count,)

    def recv_into(self, view: bytearray | memoryview) -> int:
        count = self._fill(memoryview(view))
        if not count:
            if self._failure is not None:
                raise self._failure
            if not self._over:
                raise BlockingIOError
        elif self._over:
            # A later read must report the end, and maybe nothing else comes.
            self._loop.call_soon(self._call_again)
        return count

    def _fill(self, view: memoryview) -> int:
        """Read the next bytes that have come. Raises ProtocolError."""
        filled = 0
        while filled < len(view):
            part = self._current or self._seek()
            if part is None:
                break
            left = part.left
            into = view[filled : filled + left]
            head = memoryview(part.head) if len(into) == left else None
            try:
                if head is None:
                    count = part.sock.recv_into(into)
                else:
                    count = part.sock.recvmsg_into((into, head))[0]
            except (BlockingIOError, InterruptedError):
                self._seek()  # so that the loop does not call again at once for later chunks
                break
            except OSError as error:
                self._fail(part, error)
                break
            if not count:
                self._end(part, amid=True)
                break
            taken = min(count, left)
            filled += taken
            part.left -= taken
            self._position += taken
            if not part.left:
                self._current = None
                part.got = count - taken
                self._look_at(part)
                if self._current is None:
                    self._take_up(self._ahead.pop(self._position, None))
        return filled

    def _seek(self) -> Part | None:
        """Find the part with the next byte, or read the positions of all chunks that have come."""
        current = self._current
        for part in self._parts:
            if part.got < _HEAD.size and not part.ended:
                self._read_head(part)
                if self._current is not current:
                    return self._current
        # A part that is ahead waits for a chunk that the others cannot bring any more.
        if current is None and all(part.ended or part.got == _HEAD.size for part in self._parts):
            self._over = True
        return None

    def _read_head(self, part: Part) -> None:
        try:
            count = part.sock.recv_into(memoryview(part.head)[part.got :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(part, error)
            return
        if not count:
            self._end(part, amid=part.got > 0)
            return
        part.got += count
        self._look_at(part)

    def _look_at(self, part: Part) -> None:
        """Handle a part that may have shown the position of its next chunk."""
        if part.got < _HEAD.size:
            self._watch(part)
            return
        position, size = _HEAD.unpack(part.head)
        current = self._current
        known = self._position + (0 if current is None else current.left)
        if not 0 < size <= CHUNK or position < known or position in self._ahead:
            raise ProtocolError(f"a chunk of {size} bytes at {position} makes no sense")
        part.left = size
        if current is None and position == known:
            self._take_up(part)
        else:
            self._ahead[position] = part
            self._leave(part)

    def _take_up(self, part: Part | None) -> None:
        if part is not None:
            self._current = part
            self._watch(part)

    def _fail(self, part: Part, error: OSError) -> None:
        """Note that nothing more comes over this part. What the others have brought is still
        read."""
        if self._failure is None:
            self._failure = error
        self._end(part, amid=True)

    def _end(self, part: Part, *, amid: bool) -> None:
        """Note that nothing more comes over `part`. `amid`: it ended inside of a chunk."""
        part.ended = True
        self._leave(part)
        if part is self._current:
            self._current = None
        if amid:
            self._over = True
        elif self._ending is None:
            self._wait_for_others(CHANCES)

    def _wait_for_others(self, chances: int) -> None:
        self._ending = self._loop.call_later(PATIENCE, self._look, self._position, chances - 1)

    def _look(self, position: int, chances: int) -> None:
        """Check whether anything has come since one part ended."""
        if self._position != position:
            self._wait_for_others(CHANCES)
        elif chances:
            self._wait_for_others(chances)
        else:
            self._over = True
            self._call_again()

    def _call_again(self) -> None:
        if self._readable is not None:
            self._readable()

    # ---- the end ----

    def is_unanswered(self, seconds: float) -> bool:
        """Tell whether a part has sent something that was not answered for so long."""
        return any(is_unanswered(part.sock, seconds) for part in self._parts)

    def listen_for(self, seconds: float) -> None:
        """Probe all parts while they are idle. Raises OSError."""
        for part in self._parts:
            probe_when_idle(part.sock, seconds)

    def shutdown(self, how: int) -> None:
        for part in self._parts:
            part.sock.shutdown(how)

    def forget(self) -> None:
        """Remove all callbacks from the loop."""
        self.unwatch()
        if self._ending is not None:
            self._ending.cancel()
        self._writable = None
        for part in self._parts:
            self._loop.remove_writer(part.fd)

    def close(self) -> None:
        """Close the sockets without touching the loop."""
        self.is_closed = True
        for part in self._parts:
            part.sock.close()


def _nothing(*_: object) -> None: ...
