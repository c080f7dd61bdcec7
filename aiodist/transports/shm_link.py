"""Links through shared memory: frames in two rings, and a Unix socket for what memory cannot do.

The frames are those of a stream socket, byte for byte, in `Rings`. The socket carries doorbells
(single bytes, to wake a side that sleeps), and its end tells that the peer is gone.

A link that is polled, or whose loop is about to turn, is awake. A frame then costs no system call
on either side. The link falls asleep in a turn of the loop that finds nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import time
from collections.abc import Sequence

from aiodist.buffers.copying import copy
from aiodist.errors import ProtocolError
from aiodist.transports import futex
from aiodist.transports.base import Receiver
from aiodist.transports.framed import MANY, FramedLink, Whole
from aiodist.transports.link import FRAME, POLL_BUDGET
from aiodist.transports.polling import linger, others_compute
from aiodist.transports.processes import open_behind
from aiodist.transports.retransmission import JOINED
from aiodist.transports.shm_rings import PIECE, RING, Rings
from aiodist.wire.frames import MAX_HEADER, OVERHEAD, parse_prefix

AT_ONCE = 512 * 1024
"""Bytes that are taken at once of those that have come. More would leave too little room."""

LARGE = 4
"""How many times as many bytes of large payloads one turn takes, because they are only copied."""

LINGER = 150e-6
"""Seconds without traffic after which a link falls asleep, because an answer often comes sooner
than a wake-up would take."""

WINDOW = 2 * PIECE
"""The most bytes of which frames are taken before the room is given back. More than any prefix
has."""

BRIEF = 8
"""The most frames that one turn of the loop takes. A message that the loop has taken costs its
receive ten times as much as one that is still in the ring. So a rank that is behind can catch
up."""


SPARED = 2
"""Turns in which the loop reads nothing if a call comes next. In the first one, the Work of the
last call is done. In the second one, its task goes on."""


class ShmLink(FramedLink):
    """A link over the segments `own` and `peer` and a non-blocking Unix socket, all of which it
    owns."""

    __slots__ = (
        "_asleep",
        "_bedtime",
        "_brief",
        "_due",
        "_moved",
        "_reading",
        "_rings",
        "_socket",
        "_spared",
        "_spared_at",
        "_turns",
        "pid",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        own: memoryview,
        peer: memoryview,
        *,
        peer_name: str,
        receiver: Receiver | None = None,
        pid: int = 0,
    ) -> None:
        """`pid` is the process at the other end, as the system knows it; 0: unknown."""
        super().__init__(loop, "shm", peer_name, receiver)
        self.pid = pid
        self._socket = sock  # carries bells, and its end tells that the peer is gone
        self._rings = Rings(own, peer, self._ring)  # carry the frames
        self._reading = False  # the loop watches the socket
        self._asleep = False  # the peer has to ring
        self._brief = False  # reading for a turn of the loop, and for no call
        self._spared = 0  # turns in which the loop reads nothing
        self._spared_at = -1  # how much was read when that began
        self._moved = 0  # of the rings, when last looked
        self._bedtime = 0.0  # no sleep before this, on the clock of `perf_counter`
        self._due = False  # `_turn` will be called
        self._turns = 0  # of the peer's loop, when it was asked for a sign

    def start(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket.fileno(), self._readable)
            self._reading = True
            self._stay_awake()

    # ---- sleep and doorbells ----

    def _stay_awake(self) -> None:
        """Stay awake until the loop's next turn, without a bell."""
        if self._asleep:
            self._asleep = False
            self._rings.wake()
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Go on. If there is nothing to do, sleep until a bell."""
        is_spared = self._is_spared()
        self._read_briefly()
        self._spared = max(0, self._spared - 1)
        self._due = False
        if self._closed:
            return
        rings = self._rings
        rings.turned()
        has_moved = rings.moved != self._moved
        if has_moved:
            self._moved = rings.moved
            self._bedtime = time.perf_counter() + LINGER
        # It sleeps after a turn that has read. Else it could sleep on frames that it has seen.
        if (
            has_moved
            or is_spared
            or linger(self._bedtime)
            or not rings.sleep(for_room=bool(self._outbox.backlog))
        ):
            self._stay_awake()
        else:
            self._asleep = True

    def _read_briefly(self) -> None:
        """Read for the loop, and for no call that waits: see `BRIEF`."""
        if self._is_spared():
            return
        read = self._rings.read
        self._brief = True
        try:
            self.poll()
        finally:
            self._brief = False
        if self._spared_at == read:  # no call has read since then
            self._spared_at = self._rings.read

    def _is_spared(self) -> bool:
        """Tell whether the loop leaves what has come to a call."""
        return self._spared > 0 and self._direct

    def leave_to_call(self) -> None:
        # If no call has read since the last time, the loop reads now, because other tasks wait.
        if self._spared_at != self._rings.read:
            self._spared_at = self._rings.read
            self._spared = SPARED

    def knock(self) -> None:
        """Ask the peer's loop for a sign."""
        if not self._closed:
            self._turns = self._rings.turns
            self._rings.knock()

    def answers(self) -> bool:
        """Tell whether the peer's loop has had a turn since then."""
        return not self._closed and self._rings.turns != self._turns

    def _ring(self) -> None:
        """Wake the peer."""
        # A full socket holds enough bells. If the peer is gone, its end tells.
        with contextlib.suppress(OSError):
            self._socket.send(b"\0")

    def _readable(self) -> None:
        """Handle a bell, or the peer's end."""
        try:
            bells = self._socket.recv(512)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it closed, with bells of ours unread
            bells = b""
        if bells:
            self._stay_awake()
            self._read_briefly()
            return
        while self._receive():  # read all that it had written
            pass
        self._end_of_file()

    # ---- sending ----

    def _write_frame(self, head: bytes, payload: Sequence[memoryview], nbytes: int) -> int:
        if nbytes <= JOINED:
            return self._write_one(b"".join((head, *payload)) if nbytes else head)
        self._rings.rewind()
        return self._rings.write((head, *payload))

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        return self._rings.write(buffers)

    def _write_one(self, data: bytes) -> int:
        return len(data) if self._rings.put(data) else self._rings.write((data,))

    def post(self, start: bytes, rest: memoryview, nbytes: int) -> bool:
        # The short way, if there is room, and nothing has to be kept.
        if self._direct and len(rest) <= JOINED:
            try:
                if self._rings.put(b"".join((start, rest))):
                    self._outbox.sent_bytes += nbytes
                    return True
            except ProtocolError as error:
                self._failed(error)
                return True
        return super().post(start, rest, nbytes)

    def post_whole(self, buffers: Sequence[bytes | memoryview], nbytes: int) -> bool:
        if not self._direct:
            return False
        rings = self._rings
        try:
            rings.rewind()
            if rings.room() < sum([len(buffer) for buffer in buffers]):
                return False
            # The peer copies while this side does, if it has a free core. If others want the cores,
            # it would be woken just to find the first of many bytes.
            rings.write(buffers, RING if others_compute() else PIECE)
        except ProtocolError as error:
            self._failed(error)
            return True
        self._outbox.sent_bytes += nbytes
        return True

    @property
    def sent_bytes(self) -> int:
        return self._outbox.sent_bytes + self._rings.sent

    def _arm(self) -> None:
        self._stay_awake()

    def _ask(self) -> None:
        """Do nothing, because shared memory breaks only with the process that reads it."""

    # ---- receiving ----

    @property
    def received_bytes(self) -> int:
        return self._received_bytes + self._rings.received

    @property
    def rings(self) -> Rings:
        """The memory, for the compiled part."""
        return self._rings

    def poll(self) -> bool:
        if self._polling or self._busy:
            return False
        if self._closed:
            return self._receive()
        if self._asleep:
            self._stay_awake()
        moved = self._flush() if self._outbox.backlog else False
        if self._closed or self._rings.has_news():
            return self._receive() or moved
        return moved

    def _read(self) -> bool:
        rings = self._rings
        ring = rings.incoming
        budget = POLL_BUDGET
        came = self._came
        while True:
            have = rings.available()
            if not have:
                break
            start = (rings.read - rings.origin) % rings.size
            count = min(have, rings.size - start)
            if self._to_come:
                count = min(count, self._to_come, AT_ONCE)
                landing = self._landing
                memory = None if landing is None else landing.memory
                if memory is not None:
                    end = self._arrived + count
                    copy(memory[self._arrived : end], ring[start : start + count])
                rings.taken(count)
                landing = self._arrive(count)
                if landing is not None:
                    landing.landed()
                budget -= -(-count // LARGE)
            else:
                window = min(count, WINDOW)
                most = BRIEF if self._brief else MANY
                count = self._parse(ring, ring, start, start + window, most) - start
                if not count and window < have:
                    count = self._parse_wrapped(start, have)
                if not count:
                    break  # the rest of a prefix is to come
                if not self._closed:
                    rings.taken(count)
                budget -= count
                if self._brief and not self._to_come:
                    break
            if self._closed or self._peer_ended or budget <= FRAME * (self._came - came):
                break
            if count == have and have < PIECE and not self._to_come:
                break  # little traffic: the next poll is soon enough
        return budget < POLL_BUDGET

    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        if self._to_come or self._polling or self._closed or self._peer_ended:
            return False
        if self._asleep:
            self._stay_awake()
        rings = self._rings
        start = 0
        try:
            have = rings.available()
            if not have:
                return None
            ring = rings.incoming
            start = (rings.read - rings.origin) % rings.size
            middle = start + len(prefix)
            stop = middle + len(into)
            here = min(start + have, rings.size)
            # As bytes, because these compare twice as fast as views.
            if stop <= rings.size and ring[start:middle].tobytes() == prefix and middle <= here:
                if stop > here:
                    return None
                copy(into, ring[middle:stop])
                rings.taken(stop - start)
                self._received_bytes += len(into)
                return True
        except ProtocolError:
            self._receive()  # finds it again
            return False
        self._take_other(start, here)
        return False

    def look_for_whole(self, whole: Whole, _: object = None) -> bool | None:
        if self._to_come or self._polling or self._closed or self._peer_ended:
            return False
        if self._asleep:
            self._stay_awake()
        rings = self._rings
        first, stop = len(whole.start), len(whole.start) + len(whole.into)
        try:
            have = rings.available()
        except ProtocolError:
            self._receive()  # finds it again
            return False
        if have <= whole.there or (not whole.there and have < first):
            return None
        if not whole.there:
            if not self._lies(0, whole.start):
                self.take_next()
                return False
            whole.there = first
        if whole.there < stop:
            upto = min(have, stop)
            rings.peek(whole.there, whole.into[whole.there - first : upto - first])
            whole.there = upto
        if have < whole.nbytes:
            return None
        if not self._lies(stop, whole.end):
            self._receive()
            return False
        rings.taken(whole.nbytes)
        self._received_bytes += len(whole.into)
        return True

    def take_next(self) -> None:
        """Take what has come: one frame if it has no payload, and else all of it."""
        rings = self._rings
        try:
            have = rings.available()
        except ProtocolError:
            have = 0
        start = (rings.read - rings.origin) % rings.size
        self._take_other(start, min(start + have, rings.size))

    def _lies(self, start: int, expected: bytes) -> bool:
        """Tell whether these bytes have come, from the `start`-th available one on."""
        found = bytearray(len(expected))
        self._rings.peek(start, memoryview(found))
        return found == expected

    def _take_other(self, start: int, stop: int) -> None:
        """Take what came instead of the awaited frame: one frame, if that has no payload."""
        try:
            parsed = parse_prefix(
                self._rings.incoming, start, stop, self.max_header, self.max_payload
            )
        except ProtocolError:
            parsed = None  # `_receive` will find it again
        if parsed is not None and not parsed[1] and parsed[0]:
            self._take_safely(start, start + parsed[2])  # the awaited frame may be behind it
        else:
            self._receive()

    def doze(self, seconds: float) -> bool:
        if self._asleep or self._closed or self._outbox.backlog or not futex.works():
            return False
        self._rings.doze(seconds)
        return True

    def _take(self, start: int, stop: int) -> None:
        self._parse(self._rings.incoming, self._rings.incoming, start, stop)
        if not self._closed:
            self._rings.taken(stop - start)

    def _parse_wrapped(self, start: int, have: int) -> int:
        """Take the frame whose prefix wraps to the start of the ring. Returns how many bytes of
        it."""
        ring = self._rings.incoming
        most = min(have, MAX_HEADER + OVERHEAD)
        joined = b"".join((ring[start:], ring[: most - (len(ring) - start)]))
        return self._parse(joined, memoryview(joined), 0, len(joined))

    # ---- the end ----

    def open_process(self) -> io.FileIO | None:
        return open_behind(self._socket)

    def _release(self) -> None:
        if self._reading and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._reading = False
        self._drop()

    def _drop(self) -> None:
        self._forget()
        self._rings.close()
        self._socket.close()

    def close_in_child(self) -> None:
        """After a fork, in the child: drop its copy of everything, without telling the receiver.

        The loop and the memory are the parent's, too, so they are not touched.
        """
        if self._closed:
            return
        self._closed = self._told = True
        self._drop()
