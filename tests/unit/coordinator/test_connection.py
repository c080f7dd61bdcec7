"""One connection of the coordinator: what it takes from whom."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.coordinator.connection import MAX_BACKLOG, TLS_REFUSED, Connection
from aiodist.coordinator.totals import Totals
from aiodist.transports.sparing import Sparing
from aiodist.wire.codec import encode_message
from aiodist.wire.frames import OVERHEAD, prefix
from aiodist.wire.limits import MAX_BODY, MAX_BODY_BEFORE_WELCOME
from aiodist.wire.messages import Hello, JoinRequest, Message, Proof, Renew
from aiodist.wire.returning import Rejoin


class Transport:
    """Remembers what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.backlog = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return self.backlog

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


class Owner:
    def __init__(self) -> None:
        self.token: bytes | None = None
        self.name, self.incarnation, self.returns = "one", 1, True
        self.sparing = Sparing(logging.getLogger("aiodist.coordinator"))
        self.totals = Totals()
        self.messages: list[Message] = []

    def opened(self, connection: Connection) -> None: ...

    def welcomed(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, request: int, message: Message) -> None:
        self.messages.append(message)

    def closed(self, connection: Connection, reason: str) -> None: ...


@pytest.fixture
async def made() -> Any:
    ours, theirs = socket.socketpair()
    made = SimpleNamespace(owner=Owner(), transport=Transport())
    made.connection = Connection(made.owner, 7, ours)
    made.connection.connection_made(made.transport)
    yield made
    made.connection.connection_lost(None)
    ours.close()
    theirs.close()


def welcome(made: Any) -> None:
    for message in (Hello(bytes(32)), Proof(b"")):
        made.connection.data_received(encode_message(message))
    assert not made.transport.closed


def announced(nbytes: int) -> bytes:
    """What comes before so many bytes of a message."""
    return prefix(b"\x92\x10\x00", nbytes)


async def test_a_stranger_may_say_little(made: Any) -> None:
    made.connection.data_received(announced(MAX_BODY_BEFORE_WELCOME + 1))
    assert made.transport.closed


async def test_a_member_may_say_more_and_no_view(made: Any) -> None:
    welcome(made)
    made.connection.data_received(announced(MAX_BODY) + bytes(OVERHEAD))
    assert not made.transport.closed
    made.connection.data_received(bytes(MAX_BODY))
    assert made.transport.closed  # that was no message


async def test_a_view_is_taken_once_it_was_asked_for(made: Any) -> None:
    welcome(made)
    rejoin = Rejoin(JoinRequest(group="g", id="a", size=1), 0, 1, bytes(16), (), ())
    made.connection.expect_view()
    # A sign of life may come first: the thread that renews leases knows nothing of views.
    made.connection.data_received(encode_message(Renew()) + encode_message(rejoin, 1))
    assert made.owner.messages == [Renew(), rejoin]
    made.connection.data_received(announced(MAX_BODY + 1))
    assert made.transport.closed


async def test_until_it_has_come_a_view_may_be_large(made: Any) -> None:
    welcome(made)
    made.connection.expect_view()
    made.connection.data_received(encode_message(Renew()))
    made.connection.data_received(announced(MAX_BODY + 1))
    assert not made.transport.closed


async def test_who_does_not_read_is_closed(made: Any) -> None:
    welcome(made)
    sent = len(made.transport.sent)
    made.transport.backlog = MAX_BACKLOG
    made.connection.send(b"still")
    made.transport.backlog += 1
    made.connection.send(b"no more")
    assert made.transport.sent[sent:] == [b"still"]
    assert made.transport.closed


async def test_who_speaks_tls_is_told_so_in_its_own_words(made: Any) -> None:
    made.connection.data_received(b"\x16\x03\x01")
    assert made.transport.sent == [TLS_REFUSED]


async def test_a_greeting_that_takes_too_long_ends(made: Any) -> None:
    loop = asyncio.get_running_loop()
    assert made.connection._deadline.when() > loop.time()
    made.connection._too_late()
    assert made.transport.closed
