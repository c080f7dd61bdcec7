"""Links over TLS: TCP, encrypted, with certificates on each side if the contexts ask for them.

OpenSSL works on buffers here, and not on the socket. On the socket it would ask to write the same
bytes again, so that a frame that was half encrypted could be neither overtaken nor dropped. At most
`RECORDS` bytes are encrypted ahead of what the socket takes::

    frames ─> outbox ─> OpenSSL ─> _outgoing ─> _cipher ─> socket
    frames <─ framing <─ OpenSSL <─ _incoming <─────────── socket
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple, cast

from aiodist.transports.base import Receiver
from aiodist.transports.link import FRAME, POLL_BUDGET
from aiodist.transports.stream import SCRATCH, StreamLink

RECORDS = 256 * 1024
"""Bytes that are encrypted, or read from the socket, at once."""

SILENCE = 10.0
"""Seconds without an answer of the peer's system after which a handshake has failed."""

_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsContexts(NamedTuple):
    """The TLS contexts of this rank: to connect, and to be connected to."""

    client: ssl.SSLContext
    server: ssl.SSLContext


class TlsLink(StreamLink):
    """A link over a connected, non-blocking TCP socket, which it owns.

    What is sent before the handshake is done waits for it.
    """

    __slots__ = ("_cipher", "_incoming", "_outgoing", "_ready", "_shaken", "_tls")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        peer_name: str,
        receiver: Receiver | None,
        server_hostname: str | None,
    ) -> None:
        """`server_hostname` is the name that it connects to; None: it was connected to."""
        super().__init__(loop, sock, kind="tcp", peer_name=peer_name, receiver=receiver)
        self._incoming = ssl.MemoryBIO()  # bytes of the socket, not yet decrypted
        self._outgoing = ssl.MemoryBIO()  # encrypted bytes for the socket
        # Between these two, without I/O of its own.
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._cipher = b""  # encrypted, and not sent yet
        self._shaken = False  # the handshake is done
        self._ready: asyncio.Future[None] = loop.create_future()  # for `ready`
        self._direct = False  # everything goes through the outbox until then

    async def ready(self) -> None:
        """Wait for the handshake. Raises OSError if it failed, or if the peer's system is silent.

        There is no deadline for the peer's process, because it may be busy.
        """
        # If this is cancelled, `wait` leaves the future to the link, which may complete it in this
        # turn.
        while not (await asyncio.wait({self._ready}, timeout=SILENCE))[0]:
            if self.is_unanswered(SILENCE):
                self.close(TimeoutError(f"its system has not answered for {SILENCE:g} s"))
        self._ready.result()

    def start(self) -> None:
        super().start()
        if not self._closed:
            self._shake()

    def _shake(self) -> None:
        """Do the handshake, as far as it goes."""
        failure: OSError | None = None
        try:
            self._tls.do_handshake()
        except _WAIT:
            pass
        except OSError as error:
            failure = error
        else:
            self._shaken = True
            self._ready.set_result(None)
        # Also after a failure, because an alert tells the peer why.
        self._push()
        if failure is not None:
            self._cannot_shake(failure)
        elif self._shaken:
            self._flush()

    def _cannot_shake(self, error: OSError) -> None:
        failure = ConnectionError(f"no TLS connection with {self._peer_name}: {error}")
        failure.__cause__ = error
        self.close(failure)

    def _release(self) -> None:
        super()._release()
        if not self._ready.done() and not self._loop.is_closed():
            gone = ConnectionResetError("it was closed amid the TLS handshake")
            self._ready.set_exception(self._error or gone)
            self._ready.exception()  # marks it as retrieved

    # ---- sending ----

    def _push(self) -> bool:
        """Send encrypted bytes. Returns whether all are out."""
        while True:
            if not self._cipher:
                self._cipher = self._outgoing.read(RECORDS)
                if not self._cipher:
                    return True
            try:
                sent = self._socket.send(self._cipher)
            except (BlockingIOError, InterruptedError):
                self._arm()
                return False
            except OSError as error:
                # The loop handles it, because the caller has yet to count what was encrypted: the
                # peer may have some of it. And what has come is still read.
                self._loop.call_soon(self._cannot_send, error)
                return False
            self._cipher = self._cipher[sent:]

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        # Nothing is encrypted until the socket has taken earlier bytes. Encrypted bytes cannot be
        # removed from the stream, and would be a second queue without a bound.
        if not self._shaken or not self._push():
            raise BlockingIOError
        taken = 0
        for buffer in buffers:
            view = memoryview(buffer)[: RECORDS - taken]
            while view:
                count = self._tls.write(view)
                taken += count
                view = view[count:]
            if taken == RECORDS:
                break
        self._push()
        return taken

    def _write_one(self, data: bytes) -> int:
        return self._write((data,))

    def _writable(self) -> None:
        if self._push() and self._shaken:
            self._flush()
        if self._armed and not self._cipher and not (self._shaken and self._outbox.backlog):
            self._disarm()

    def _arm(self) -> None:
        # During the handshake, with nothing to send, the socket has room and the loop would call
        # without end. In that case we wait for the peer.
        if self._shaken or self._cipher:
            super()._arm()

    @property
    def _is_out(self) -> bool:
        return super()._is_out and not self._cipher

    def _underway(self) -> int | None:
        # Encrypted, it is more.
        sent = super()._underway()
        return None if sent is None else sent + len(self._cipher) + self._outgoing.pending

    # ---- receiving ----

    def _read(self) -> bool:
        budget = POLL_BUDGET
        came = self._came
        while budget > FRAME * (self._came - came):
            try:
                data = self._socket.recv(RECORDS)
            except (BlockingIOError, InterruptedError):
                return budget < POLL_BUDGET
            except OSError as error:
                self._lost(self._broken or error)
                return True
            if not data:
                self._end_of_file()
                return True
            budget -= len(data)
            self._incoming.write(data)
            self._decrypt()
            if self._closed or self._peer_ended:
                return True
        return True

    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        # The socket has records instead of frames. So the receiver gets what is in them.
        return False if self.poll() else None

    def _read_into(self, view: memoryview) -> int:
        return cast(int, self._tls.read(len(view), view))

    def _decrypt(self) -> None:
        """Take in all that has come."""
        if not self._shaken:
            self._shake()
            if not self._shaken:
                return
        while not (self._closed or self._peer_ended):
            rest, landing, held = self._to_come, self._landing, self._held
            memory = None if landing is None else landing.memory
            if not rest:
                into = self._scratch_view[held:]
            elif memory is None:
                into = self._scratch_view[: min(rest, SCRATCH)]
            else:
                into = memory[self._arrived :]
            # Only this reads from the connection. An OSError of the receiver is none of it.
            try:
                count = self._read_into(into)
            except _WAIT:
                break
            except ssl.SSLZeroReturnError:
                self._end_of_file()
                return
            except OSError as error:
                self._lost(error)
                return
            if rest:
                landing = self._arrive(count)
                if landing is not None:
                    landing.landed()
            else:
                self._held = 0
                self._take(0, held + count)
        self._push()
