"""One connection of the coordinator: greeting, limits, framing. What it says is for its owner."""

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
"""A connection that has not said and proved who it is by then is closed."""

MAX_BACKLOG = 8 * 1024 * 1024
"""A connection that has so many bytes still to read when more is sent to it is closed."""

CLOSE_SECONDS = 5.0
"""How long a connection that is being closed may take to read its last messages."""


TLS_HANDSHAKE = 0x16
TLS_REFUSED = b"\x15\x03\x01\x00\x02\x02\x46"
"""The first byte of who wants to speak TLS, and what tells it that this is not spoken here: a fatal
alert, protocol_version."""

_BUSY = encode_message(
    Failed(
        Failure.BUSY,
        "too many connect to this coordinator at the same time and do not say who they are yet: "
        "come again in a moment",
    )
)


class Owner(Protocol):
    """Who the connections belong to."""

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
    """From accept to close. `number` is unique to the owner; `adopting` is what makes a transport
    for it (and TLS, where asked for), until `connection_made` is called.

    Before it is let in, a connection may say two things, of little more than 1 KiB each.
    """

    def __init__(self, owner: Owner, number: int, sock: socket.socket) -> None:
        """Raises OSError where `sock` is gone already."""
        self.number = number
        self.host = "127.0.0.1"  # where the other end is; this for unix and inproc
        self.peer = f"a local process (#{number})"
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            host, port = sock.getpeername()[:2]
            self.host = str(host).removeprefix("::ffff:")  # the IPv4 address where it is one
            self.peer = f"{self.host}:{port}"  # with the port
        self.adopting: asyncio.Task[None] | None = None
        self._owner = owner
        # Before the greeting it may say 1 KiB at a time, for anybody may connect; a member 2 MiB,
        # as a compare_set has two values; and a view, 64 MiB, who was asked for it, once.
        # Its limits grow with what the other end has shown.
        self._decoder = Decoder(max_header=MAX_CONTROL_HEADER, max_payload=MAX_BODY_BEFORE_WELCOME)
        self._hello: Hello | None = None  # what it said first; None: nothing yet
        # What its proof must be made of: fresh, so that no old proof will do.
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.is_welcome = False  # it has shown that it may ask
        self._reason = ""  # why it ends, by whoever ends it first; "": nobody here has
        self._transport: asyncio.Transport  # from `connection_made` on
        # Ends a greeting, and later a close, that takes too long.
        self._deadline: asyncio.TimerHandle

    # What the loop calls.

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
            # Who speaks TLS to a listener without it begins with a byte that is no frame. It is
            # answered by an alert of TLS, as its library shows that to the user; an error of ours
            # it could not read.
            wants_tls = self._hello is None and data[0] == TLS_HANDSHAKE
            self.fail(f"{type(error).__name__}: {error}", TLS_REFUSED if wants_tls else b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        reason = self._reason or (f"its connection broke: {exc}" if exc else "it disconnected")
        self._owner.closed(self, reason)

    # What the owner calls.

    def send(self, data: bytes) -> None:
        """Send one encoded message, unless the other side is far behind with reading."""
        if self._transport.is_closing():
            return
        # What was there before this message counts, not the message: a single view may be larger.
        # A member that does not read would otherwise hold as much of the coordinator's memory as
        # others choose to write.
        backlog = self._transport.get_write_buffer_size()
        if backlog > MAX_BACKLOG:
            self.fail(f"it does not read: {backlog} bytes wait for it, the limit is {MAX_BACKLOG}")
        else:
            self._transport.write(data)

    def close(self, reason: str) -> None:
        """Close once what was sent is out, or after a while."""
        self._reason = self._reason or reason
        if not self._transport.is_closing():
            self._transport.close()
            self._deadline.cancel()
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def expect_view(self) -> None:
        """The member was asked for its view: take it, whatever its size, and that message only."""
        # A view may have thousands of members. Who was not asked stays within the smaller limit: a
        # member must not choose how much of the memory here it takes.
        self._decoder.max_payload = MAX_REPLY

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def drop(self) -> None:
        """Close at once, adopted or not."""
        if self.adopting is not None:
            self.adopting.cancel()
        else:
            self._transport.abort()

    def fail(self, reason: str, answer: bytes = b"") -> None:
        """Close, at once or with a last `answer`, and say why in the log."""
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
        """In a forked child: put the null device in the place of the socket."""
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            os.dup2(null, sock.fileno())

    # The greeting.

    def _take(self, frame: Frame) -> None:
        request, message = decode_message(frame, rows=False)
        if isinstance(message, Rejoin):  # with the view, if it was to bring one
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
        # Only now may it say more than 1 KiB at a time.
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
    """Close a new connection for which there is no place, and say so where that can be said: who
    wants TLS understands nothing before its handshake."""
    with sock, contextlib.suppress(OSError):
        if not encrypted:
            sock.send(_BUSY)
            sock.recv(MAX_BODY_BEFORE_WELCOME)  # what lies unread would take the answer away
