"""The member's end of the connection to the coordinator.

A non-blocking socket instead of an asyncio transport, because two threads write to it: the loop,
and the thread that renews the lease. A lock keeps frames whole. Only the loop reads.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl as tls
import threading
from collections.abc import Callable

from aiodist.errors import ProtocolError
from aiodist.wire.frames import Decoder, Frame
from aiodist.wire.limits import MAX_BODY_BEFORE_WELCOME, MAX_CONTROL_HEADER, MAX_REPLY

READ_BYTES = 256 * 1024

_NOT_NOW = (BlockingIOError, InterruptedError, tls.SSLWantReadError, tls.SSLWantWriteError)


class ControlSocket:
    """Frames over a connected socket.

    The loop calls `on_frame(frame)`, and once `on_closed(error)`, but not after `close`. Both may
    be replaced.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[Exception], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._is_open = True  # read by the lease thread, so changed under the lock
        self.on_frame = on_frame
        self.on_closed = on_closed
        # Makes frames of bytes.
        self._decoder = Decoder(max_header=MAX_CONTROL_HEADER, max_payload=MAX_BODY_BEFORE_WELCOME)
        self._lock = threading.Lock()  # the lease thread sends, too
        self._out = bytearray()  # bytes that the kernel has not taken
        self._loop = asyncio.get_running_loop()  # the loop that reads frames
        self._writing = False  # the loop watches for room
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def welcomed(self) -> None:
        """Take large replies from now on, because the coordinator has shown that it is the right
        one."""
        self._decoder.max_payload = MAX_REPLY

    def give_up_after(self, seconds: float) -> None:
        """Take the coordinator's host for gone if it confirms nothing for so many seconds
        (Linux)."""
        if self._sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):
            self._sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(seconds * 1000), 2**31 - 1)
            )

    def send(self, data: bytes) -> None:
        """Send a whole frame, from the loop. What does not leave now is sent later."""
        if not self._is_open:
            return
        # Held only for one call of the kernel, because the lease thread may wait for it.
        with self._lock:
            self._out += data
            error = self._flush()
        self._after_flush(error)

    def send_from_thread(self, data: bytes) -> bool:
        """Send a whole frame, from any thread. Returns False if the socket is closed."""
        with self._lock:
            if not self._is_open:
                return False
            # Earlier bytes are flushed first. If some are left then, this frame can be left out,
            # because those bytes are a sign of life, too.
            if not self._out:
                self._out += data
            self._flush()
            return True

    def abandon(self) -> None:
        """Close from another thread, because the loop is closed."""
        with self._lock:
            self._is_open = False
            self._sock.close()

    def close(self) -> None:
        """Close at once, after a last attempt to send what is queued. Idempotent."""
        if not self._is_open:
            return
        with self._lock:
            if self._out:
                self._flush()
            self._is_open = False
            self._loop.remove_reader(self._sock.fileno())
            if self._writing:
                self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def detach_after_fork(self) -> None:
        """In a forked child: replace the socket by the null device.

        The lock may be held by a thread that does not exist here, and the loop's selector is shared
        with the parent, so neither is touched.
        """
        if not self._is_open:
            return
        self._is_open = False
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self._sock.fileno())
        os.close(null)

    def _flush(self) -> Exception | None:
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except _NOT_NOW:
                break
            except OSError as error:
                self._out.clear()
                return error
            del self._out[:sent]
        return None

    def _after_flush(self, error: Exception | None) -> None:
        if error is not None:
            # Later, and not inside of `send`, because its caller may be about to wait for the
            # answer.
            self._loop.call_soon(self._last_words, error)
        elif bool(self._out) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._sock.fileno(), self._writable)
            else:
                self._loop.remove_writer(self._sock.fileno())

    def _writable(self) -> None:
        with self._lock:
            error = self._flush()
        self._after_flush(error)

    def _readable(self) -> None:
        # Read all that is there, not once for each event. The coordinator may evict this member and
        # close the connection while bytes of ours are on their way. The system then resets the
        # connection behind the coordinator's last words. uvloop reports both in one event, and then
        # nothing more, because libuv stops watching a socket that has an error. One read would then
        # wait for ever for the end.
        while self._is_open:
            try:
                with self._lock:
                    data = self._sock.recv(READ_BYTES)
            except _NOT_NOW:
                return
            except OSError as error:
                self._fail(error)
                return
            if not data:
                self._fail(ConnectionResetError("the coordinator closed the connection"))
                return
            self._take(data)

    def _last_words(self, error: Exception) -> None:
        """Read what the coordinator said last, and fail, because nothing can be sent any more."""
        self._readable()
        self._fail(error)

    def _take(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if self._is_open:
                    self._handle(frame)
        except ProtocolError as error:
            self._fail(error)

    def _handle(self, frame: Frame) -> None:
        try:
            self.on_frame(frame)
        except ProtocolError:
            raise
        except Exception as error:  # a bug, but callers wait for the frames behind it
            said = {"message": "a message of the coordinator was not handled", "exception": error}
            self._loop.call_exception_handler(said)

    def _fail(self, error: Exception) -> None:
        if self._is_open:
            self.close()
            self.on_closed(error)
