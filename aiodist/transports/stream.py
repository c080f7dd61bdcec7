"""Links over stream sockets (TCP and Unix): frames gathered into writes, payloads read in place.

The sockets are our own, non-blocking, watched by the loop's `add_reader` and `add_writer`. A small
frame is one `send` of joined bytes. Prefixes are read into a small scratch buffer. Payloads are
read straight into the memory of their landing, and the same call reads the beginning of the next
frame into the scratch.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
from collections.abc import Sequence

from aiodist.transports.base import Receiver
from aiodist.transports.lasting import LastingLink
from aiodist.transports.link import FRAME, POLL_BUDGET
from aiodist.transports.outbox import MOST_BUFFERS
from aiodist.transports.processes import open_behind
from aiodist.transports.retransmission import JOINED
from aiodist.transports.silence import is_unanswered, probe_when_idle, unacknowledged
from aiodist.wire.frames import MAX_HEADER, OVERHEAD

SCRATCH = 16 * 1024
"""Bytes read at once if the next frame is not known yet."""

LOOKAHEAD = 512
"""Bytes taken beyond a payload under way: the next prefix, and few payload bytes to copy."""

READ = 256 * 1024
"""The most payload bytes of one read."""

ENOUGH = 256 * 1024
"""Bytes of a payload that have to come before the loop is woken for it, if more are to come. Each
wake-up costs as much as some ten KiB."""

NEVER = 0
"""Instead of that: this system, or this kind of socket, has no such setting."""


class StreamLink(LastingLink):
    """A link over a connected, non-blocking stream socket, which it owns."""

    __slots__ = (
        "_armed", "_enough", "_fd", "_held", "_reading", "_scratch", "_scratch_view", "_socket",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        kind: str,
        peer_name: str,
        receiver: Receiver | None = None,
    ) -> None:
        super().__init__(loop, kind, peer_name, receiver)
        self._socket = sock  # none of its calls blocks
        self._fd = sock.fileno()  # its number, for the loop
        self._reading = False  # the loop watches for bytes to read
        self._armed = False  # the loop watches for room to write
        # How many bytes make it readable for the loop.
        self._enough = 1 if _can_wait_for_more(sock) else NEVER
        # Empty while a payload is under way.
        self._scratch = bytearray(SCRATCH)
        self._scratch_view = memoryview(self._scratch)  # made once: a slice of it costs no copy
        self._held = 0  # bytes of an incomplete prefix at the start of the scratch

    def start(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._fd, self._receive)
            self._reading = True

    # ---- sending ----

    def _write_frame(self, head: bytes, payload: Sequence[memoryview], nbytes: int) -> int:
        if nbytes > JOINED:
            return self._write((head, *payload[:MOST_BUFFERS]))
        data = b"".join((head, *payload)) if nbytes else head
        sent = self._write_one(data)
        self._sent_whole(data, sent)
        return sent

    def _sent_whole(self, data: bytes, sent: int) -> None:
        """Keep a small frame if all of it was sent."""
        kept = self._kept
        if kept is not None and sent == len(data):
            frames = kept.frames
            frames.append(data)
            if len(frames) > kept.limit:
                self._ask()

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        return self._socket.sendmsg(buffers)

    def _write_one(self, data: bytes) -> int:
        """Do what `_write` does with one buffer, faster."""
        return self._socket.send(data)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        self._flush()
        # Only disarmed here, because `poll` may have sent all, and more may be queued before the
        # next turn.
        if self._armed and not self._outbox.backlog:
            self._disarm()

    def _disarm(self) -> None:
        self._armed = False
        self._loop.remove_writer(self._fd)

    def _all_sent(self) -> None:
        super()._all_sent()
        if not self._closed:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._cannot_send(error)

    # ---- receiving ----

    def _read(self) -> bool:
        sock = self._socket
        budget = POLL_BUDGET
        came = self._came
        while True:
            landing = self._landing
            memory = None if landing is None else landing.memory
            rest = self._to_come
            held = self._held
            try:
                if memory is None:
                    # As little as possible of what may be a payload, because it is copied from
                    # there.
                    room = min(SCRATCH, len(self._scratch) - held)
                    count = sock.recv_into(self._scratch_view[held : held + room])
                elif rest > READ:
                    room = rest = READ
                    count = sock.recv_into(memory[self._arrived : self._arrived + READ])
                else:
                    # The end of this payload goes to its place, and the next frames to the scratch,
                    # in one system call.
                    room = rest + LOOKAHEAD
                    count = sock.recvmsg_into(
                        (memory[self._arrived :], self._scratch_view[:LOOKAHEAD])
                    )[0]
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._lost(self._broken or error)
                return True
            if not count:
                self._end_of_file()
                return True
            budget -= count
            taken = min(rest, count)
            if taken:
                landing = self._arrive(taken)
                if landing is not None:
                    landing.landed()
            start, stop = (0, count - taken) if memory is not None else (taken, held + count)
            if start < stop:
                self._held = 0
                start = self._parse(self._scratch, self._scratch_view, start, stop)
                self._keep_start(start, stop)
            # Less than there was room for: the socket is empty, and later bytes make it readable
            # again.
            if self._closed or self._peer_ended or count < room:
                break
            if budget <= FRAME * (self._came - came):
                break
        if self._to_come > JOINED or self._enough > 1:
            self._wait_for_enough()
        return budget < POLL_BUDGET

    def _wait_for_enough(self) -> None:
        """Make the loop wake for this payload only when more than a few packets have come."""
        # Never more than the rest of this frame, because nothing may follow.
        enough = max(1, min(self._to_come, ENOUGH))
        if self._enough not in (enough, NEVER) and not (self._closed or self._severed):
            self._enough = enough
            with contextlib.suppress(OSError):  # the connection is gone, so it is readable
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        if self._to_come or self._polling or self._closed or self._peer_ended or self._again:
            return False
        held = self._held
        size = len(prefix) + len(into)
        if len(self._scratch) < size + LOOKAHEAD:
            self._grow(size + LOOKAHEAD)
        try:
            if held:
                count = self._socket.recv_into(self._scratch_view[held:])
            else:
                count = self._socket.recv_into(self._scratch)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self._lost(self._broken or error)
            return False
        if not count:
            self._receive()  # which will find the end again
            return False
        held += count
        found = held >= len(prefix) and self._scratch.startswith(prefix)
        if found and held < size:
            self._held = held
            return None
        self._held = 0
        if found:
            into[:] = self._scratch_view[len(prefix) : size]
            self._came += 1
            self._received_bytes += len(into)
            if held > size:
                self._take_safely(size, held)
        else:
            self._take_safely(0, held)
        return found

    def _grow(self, size: int) -> None:
        """Make the scratch larger, and keep its content."""
        grown = bytearray(size)
        grown[: self._held] = self._scratch_view[: self._held]
        self._scratch = grown
        self._scratch_view = memoryview(grown)

    def _take(self, start: int, stop: int) -> None:
        """Take the frames in ``scratch[start:stop]``, and keep an incomplete prefix for later."""
        self._keep_start(self._parse(self._scratch, self._scratch_view, start, stop), stop)

    def _keep_start(self, start: int, stop: int) -> None:
        """Keep the start of a prefix that ``scratch[start:stop]`` may have."""
        if start == stop or self._closed or self._peer_ended:
            return
        self._held = held = stop - start
        if start:
            self._scratch[:held] = self._scratch[start:stop]
        if held == len(self._scratch):  # a header longer than the scratch, within the limits
            self._grow(MAX_HEADER + OVERHEAD)

    def _underway(self) -> int | None:
        return unacknowledged(self._fd)

    def _on_the_way(self) -> int | None:
        # A Unix socket gives its data straight to the peer, which may not have read it yet.
        return 0 if self.kind == "unix" else self._underway()

    # ---- the end ----

    def open_process(self) -> io.FileIO | None:
        return open_behind(self._socket)

    def listen_for(self, seconds: float) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            probe_when_idle(self._socket, seconds)

    def is_unanswered(self, seconds: float) -> bool:
        return not (self._closed or self._severed) and is_unanswered(self._socket, seconds)

    def _bye(self, nbytes: int, more: int) -> None:
        self._stop_reading()
        super()._bye(nbytes, more)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _release(self) -> None:
        self._disconnect()
        self._forget()
        self._stop_keeping()

    def _disconnect(self) -> None:
        if not self._loop.is_closed():
            self._stop_reading()
            if self._armed:
                self._disarm()
        self._armed = False
        self._socket.close()

    def close_in_child(self) -> None:
        """After a fork, in the child: close its copy of the socket, without telling the receiver.

        The loop's epoll is the parent's, too, so the loop is not touched.
        """
        if self._closed:
            return
        self._closed = self._told = True
        self._forget()
        self._socket.close()


def _can_wait_for_more(sock: socket.socket) -> bool:
    """Tell whether the system can wake a reader only for so many bytes.

    Linux can for TCP, and wakes it sooner if the buffer is full.
    """
    return sys.platform == "linux" and sock.family in (socket.AF_INET, socket.AF_INET6)
