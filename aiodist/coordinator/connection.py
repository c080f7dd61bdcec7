"""One connection of the coordinator: greeting, limits, framing. Its owner handles the messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import Protocol, cast

from aiodist.coordinator.totals import Totals
from aiodist.errors import AuthenticationError, ProtocolError
from aiodist.transports.sparing import Sparing
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Decoder, Frame
from aiodist.wire.limits import (
    MAX_BODY,
    MAX_BODY_BEFORE_WELCOME,
    MAX_CONTROL_HEADER,
    MAX_REPLY,
    PROTOCOL_VERSION,
)
from aiodist.wire.messages import MAGIC, Challenge, Failed, Failure, Hello, Message, Proof, Welcome
from aiodist.wire.proof import NONCE_BYTES, check_proof, make_proof
from aiodist.wire.returning import Rejoin

HANDSHAKE_SECONDS = 10.0
"""Seconds after which a connection is closed if it has not proved its identity."""

MAX_BACKLOG = 8 * 1024 * 1024
"""A connection is closed if so many bytes wait to be read by it when more is sent."""

CLOSE_SECONDS = 5.0
"""Seconds that a closing connection has to read its last messages."""


TLS_HANDSHAKE = 0x16
TLS_REFUSED = b"\x15\x03\x01\x00\x02\x02\x46"
"""The first byte of a TLS client, and the answer if TLS is not spoken here: a fatal alert,
protocol_version."""

_BUSY = encode_message(
    Failed(
        Failure.BUSY,
        "too many new connections to this coordinator at the same time: try again in a moment",
    )
)


class ConnectionOwner(Protocol):
    token: bytes | None
    name: str
    incarnation: int
    returns: bool
    sparing: Sparing
    totals: Totals

    def opened(self, connection: Connection) -> None: ...

    def welcomed(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, request: int, message: Message) -> None: ...

    def closed(self, connection: Connection, reason: str) -> None: ...


class Connection(asyncio.Protocol):
    """A connection, from accept to close.

    `number` is unique to the owner. `adopting` makes its transport (and TLS, if wanted), until
    `connection_made` is called. Before the greeting is complete, a connection may send two messages
    of little more than 1 KiB each.
    """

    def __init__(self, owner: ConnectionOwner, number: int, sock: socket.socket) -> None:
        """Raises OSError if `sock` is already closed by the peer."""
        self.number = number
        self.host = "127.0.0.1"  # the peer's host; this value is for unix and inproc
        self.peer = f"a local process (#{number})"
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            host, port = sock.getpeername()[:2]
            self.host = str(host).removeprefix("::ffff:")  # the IPv4 address, if it is one
            self.peer = f"{self.host}:{port}"  # with the port
        self.adopting: asyncio.Task[None] | None = None
        self._owner = owner
        # The limits grow with what the peer has proved. Before the greeting it is 1 KiB, because
        # anyone may connect. A member may send 2 MiB, because a compare_set has two values. A
        # member that was asked for its view may send 64 MiB, once.
        self._decoder = Decoder(max_header=MAX_CONTROL_HEADER, max_payload=MAX_BODY_BEFORE_WELCOME)
        self._hello: Hello | None = None  # its first message; None: not yet
        # The proof must include this fresh nonce, so that no old proof can be replayed.
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.is_welcome = False  # whether it may send requests
        self._reason = ""  # why this side ended it; "": it has not
        self._transport: asyncio.Transport  # from `connection_made` on
        # Ends a greeting, and later a close, that takes too long.
        self._deadline: asyncio.TimerHandle

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._too_late)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                if self._transport.is_closing():
                    return
                self._take(frame)
        except (ProtocolError, AuthenticationError) as error:
            # A TLS client begins with a byte that is no frame. Answer with a TLS alert, because its
            # TLS library shows that to the user.
            wants_tls = self._hello is None and data[0] == TLS_HANDSHAKE
            self.fail(f"{type(error).__name__}: {error}", TLS_REFUSED if wants_tls else b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        reason = self._reason or (f"its connection broke: {exc}" if exc else "it disconnected")
        self._owner.closed(self, reason)

    # Called by the owner.

    def send(self, data: bytes) -> None:
        """Send one encoded message, or close the connection if the peer is far behind with
        reading."""
        if self._transport.is_closing():
            return
        # Only earlier bytes count, because a single view may be larger than the limit. Without a
        # limit, a member that does not read would hold as much memory here as others choose to
        # write.
        backlog = self._transport.get_write_buffer_size()
        if backlog > MAX_BACKLOG:
            self.fail(f"it does not read: {backlog} bytes wait for it, the limit is {MAX_BACKLOG}")
        else:
            self._transport.write(data)

    def close(self, reason: str) -> None:
        """Close after the last message is sent, or after a while."""
        self._reason = self._reason or reason
        if not self._transport.is_closing():
            self._transport.close()
            self._deadline.cancel()
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def expect_view(self) -> None:
        """Accept one large message: the view that this member was asked for."""
        # A view may have thousands of members. Other connections keep the smaller limit, because a
        # member must not choose how much memory it takes here.
        self._decoder.max_payload = MAX_REPLY

    def abort(self) -> None:
        self._transport.abort()

    def drop(self) -> None:
        """Close at once, with or without a transport."""
        if self.adopting is not None:
            self.adopting.cancel()
        else:
            self._transport.abort()

    def fail(self, reason: str, answer: bytes = b"") -> None:
        """Close, at once or with a last `answer`, and log the reason."""
        self._reason = self._reason or reason
        if not self.is_welcome:
            self._owner.totals.refused["protocol"] += 1
        self._owner.sparing.warning(
            "of a member" if self.is_welcome else "of a stranger",
            "closing the connection from %s: %s",
            self.peer,
            reason,
            extra={"event": "connection failed", "peer": self.peer, "reason": reason},
        )
        if answer:
            self._transport.write(answer)
            self.close(reason)
        else:
            self._transport.abort()

    def detach_after_fork(self, null: int) -> None:
        """In a forked child, replace the socket by the null device."""
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            os.dup2(null, sock.fileno())

    # The greeting.

    def _take(self, frame: Frame) -> None:
        request, message = decode_message(frame, rows=False)
        if isinstance(message, Rejoin):  # with the view, if it was asked for one
            self._decoder.max_payload = MAX_BODY
        if self.is_welcome:
            self._owner.received(self, request, message)
        elif self._hello is None:
            self._on_hello(message)
        else:
            self._on_proof(self._hello, message)

    def _on_hello(self, message: Message) -> None:
        if not isinstance(message, Hello) or message.magic != MAGIC:
            raise ProtocolError(f"the first message is a greeting, not {type(message).__name__}")
        if message.version != PROTOCOL_VERSION:
            text = (
                f"this coordinator speaks version {PROTOCOL_VERSION} of the protocol, you speak "
                f"{message.version}: install the same aiodist on both sides"
            )
            self.send(encode_message(Failed(Failure.VERSION, text)))
            self._owner.totals.refused["version"] += 1
            self.close(f"it speaks version {message.version} of the protocol")
            return
        self._hello = message
        needed = self._owner.token is not None
        self.send(encode_message(Challenge(self._nonce, needed)))

    def _on_proof(self, hello: Hello, message: Message) -> None:
        if not isinstance(message, Proof):
            raise ProtocolError(f"the second message is a proof, not {type(message).__name__}")
        token = self._owner.token
        mac = b""
        if token is not None:
            if not check_proof(message.mac, token, "member", hello.nonce, self._nonce):
                text = (
                    "this coordinator asks for a token"
                    if not message.mac
                    else "the token is not the one of this coordinator"
                )
                self.send(encode_message(Failed(Failure.AUTHENTICATION, text)))
                reason = "no token" if not message.mac else "a wrong token"
                self._owner.sparing.warning(
                    "refused",
                    "refused %s: %s",
                    self.peer,
                    reason,
                    extra={"event": "authentication failed", "peer": self.peer, "reason": reason},
                )
                self._owner.totals.refused["token"] += 1
                self.close(reason)
                return
            mac = make_proof(token, "coordinator", hello.nonce, self._nonce)
        # Only now may it send more than 1 KiB at a time.
        self.is_welcome = True
        self._deadline.cancel()
        self._decoder.max_payload = MAX_BODY
        owner = self._owner
        owner.welcomed(self)
        welcome = Welcome(self.host, mac, owner.name, owner.incarnation, owner.returns)
        self.send(encode_message(welcome, max_body=MAX_REPLY))

    def _too_late(self) -> None:
        self.fail(f"it did not complete the greeting within {HANDSHAKE_SECONDS:g} s")


def turn_away(sock: socket.socket, *, encrypted: bool) -> None:
    """Close a new connection because there are too many. Say so unless TLS is wanted, because such
    a client reads nothing before its handshake."""
    with sock, contextlib.suppress(OSError):
        if not encrypted:
            sock.send(_BUSY)
            sock.recv(MAX_BODY_BEFORE_WELCOME)  # unread input would discard the answer
