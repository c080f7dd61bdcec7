"""What the kernel knows of the other end of a connection, and what that is taken for."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from aiodist.transports.silence import (
    PROBES,
    is_unanswered,
    probe_when_idle,
    round_trip,
    sent_again,
    unacknowledged,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class Sock:
    """A TCP socket of which the kernel says this (see tcp(7), `struct tcp_info`)."""

    family = socket.AF_INET

    def __init__(self, probes: int, unanswered: int, since: int) -> None:
        facts = bytearray(104)
        facts[3] = probes
        struct.pack_into("=I", facts, 24, unanswered)
        struct.pack_into("=I", facts, 56, since)
        self.facts = bytes(facts)

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.facts[:length]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


@pytest.mark.parametrize(
    ("probes", "unanswered", "since", "silent"),
    [
        (0, 0, 900_000, False),  # nothing is to be answered, for however long
        (0, 3, 1_900, False),
        (0, 3, 2_100, True),
        (1, 0, 2_100, True),
        (1, 0, 100, False),  # it answers the probes of its window: it only does not read
    ],
)
def test_who_is_silent(probes: int, unanswered: int, since: int, silent: bool) -> None:
    sock: Any = Sock(probes, unanswered, since)
    assert is_unanswered(sock, 2.0) is silent


def test_a_system_that_says_less_is_believed_to_answer() -> None:
    sock: Any = Sock(1, 1, 900_000)
    sock.facts = sock.facts[:8]
    assert not is_unanswered(sock, 2.0)
    with socket.socket(socket.AF_UNIX) as other_kind:
        assert not is_unanswered(other_kind, 2.0)
        probe_when_idle(other_kind, 2.0)  # there is nothing to probe


def test_what_the_kernel_says_is_read_where_it_is(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(b"x")
    assert pair[1].recv(1) == b"x"
    assert not is_unanswered(pair[0], 60.0)


@pytest.mark.parametrize("seconds", [0.2, 8.0, 60.0])
def test_an_idle_connection_is_lost_after_about_so_many_seconds(
    pair: tuple[socket.socket, socket.socket], seconds: float
) -> None:
    probe_when_idle(pair[0], seconds)

    def option(name: int) -> int:
        return pair[0].getsockopt(socket.IPPROTO_TCP, name)

    idle, pause = option(socket.TCP_KEEPIDLE), option(socket.TCP_KEEPINTVL)
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert option(socket.TCP_KEEPCNT) == PROBES
    # The kernel counts in whole seconds, of which it takes no fewer than one.
    assert idle + PROBES * pause <= max(seconds, 1 + PROBES)
    assert idle + PROBES * pause >= seconds / 2


def test_what_a_peer_has_not_acknowledged() -> None:
    """Here a Unix socket, whose peer has what it has read."""
    one, other = socket.socketpair()
    with one, other:
        assert unacknowledged(one.fileno()) == 0
        one.sendall(b"x" * 100)
        assert unacknowledged(one.fileno())
        other.recv(100)
        assert unacknowledged(one.fileno()) == 0


def test_no_socket_says_nothing(tmp_path: Any) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    assert unacknowledged(fd) is None


@pytest.mark.parametrize(
    ("facts", "trip"),
    [
        (bytes(148) + struct.pack("=I", 20_500), 0.0205),
        (bytes(148) + struct.pack("=I", 2**32 - 1), None),  # nothing was answered yet
        (bytes(148), None),  # of an old kernel
    ],
)
def test_how_far_the_other_end_is(facts: bytes, trip: float | None) -> None:
    sock: Any = Sock(0, 0, 0)
    sock.facts = facts
    assert round_trip(sock) == trip


@pytest.mark.parametrize(
    ("facts", "count"),
    [
        (bytes(100) + struct.pack("=I", 7), 7),
        (bytes(100), 0),  # of a system that says less
    ],
)
def test_how_many_segments_were_sent_again(facts: bytes, count: int) -> None:
    sock: Any = Sock(0, 0, 0)
    sock.facts = facts
    assert sent_again(sock) == count


def test_how_far_this_host_is(pair: tuple[socket.socket, socket.socket]) -> None:
    assert all(0 <= (round_trip(sock) or 0.0) < 60 for sock in pair)
    with socket.socket(socket.AF_UNIX) as other:
        assert round_trip(other) is None
