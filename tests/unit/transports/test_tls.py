"""A link over TLS whose connection breaks: what it counts as sent, and what it still reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from authority import Authority

from aiodist.testing.links import LinkPair, connected
from aiodist.transports import tls
from aiodist.transports.tcp import TcpTransport
from aiodist.transports.tls import TlsContexts, TlsLink

FRAMES = 20


class NarrowSocket(socket.socket):
    """A socket in place of `sock`. It still takes `room` bytes, then raises `error`, and brings few
    bytes at once."""

    def __init__(self, sock: socket.socket, room: int, error: OSError) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)
        self.room = room
        self.error = error

    def send(self, data: Any, flags: int = 0) -> int:
        if not self.room:
            raise self.error
        sent = super().send(data[: self.room], flags)
        self.room -= sent
        return sent

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(min(size, 500), flags)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> TlsContexts:
    return TlsContexts(*Authority(tmp_path_factory.mktemp("ca")).contexts("rank", mutual=True))


class Ends(LinkPair):
    a: TlsLink
    b: TlsLink


@pytest.fixture
async def ends(contexts: TlsContexts) -> AsyncIterator[Any]:
    """Two links that keep what they send, and tell `ends.news` if they are severed."""
    async with connected(TcpTransport(contexts)) as pair:
        for link in (pair.a, pair.b):
            link.keep(lambda *_: pair.news.set())
        pair.a.send(b"first")  # behind the end of the handshake
        pair.b.send(b"first")
        await pair.until(lambda: bool(pair.at_a.frames and pair.at_b.frames))
        yield pair


async def test_frames_that_left_before_the_break_count_as_sent(ends: Ends) -> None:
    link = ends.a
    link._socket = NarrowSocket(link._socket, 10_000, BrokenPipeError())
    link._direct = False  # so that all frames are encrypted in one go
    for _ in range(FRAMES):
        link.send(b"frame", [memoryview(bytes(1000))])
    link.poll()
    await ends.until(lambda: link.is_severed and ends.b.is_severed)
    assert 1 < ends.b.came < FRAMES
    assert link.can_go_on(ends.b.came)


async def test_what_has_come_is_read_though_nothing_can_be_sent(ends: Ends) -> None:
    link = ends.a
    link._stop_reading()
    narrow = link._socket = NarrowSocket(link._socket, 0, BlockingIOError())
    link.send(b"waits for room")
    for _ in range(FRAMES):
        ends.b.send(b"frame", [memoryview(bytes(1000))])
    for _ in iter(lambda: ends.b._underway() or 0, 0):  # until the system of `link` has all
        await asyncio.sleep(0)
    narrow.error = BrokenPipeError()
    link.poll()
    await ends.until(lambda: link.is_severed)
    assert link.came == 1 + FRAMES


async def test_a_handshake_that_no_system_answers_fails(
    contexts: TlsContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may be cut off when it has just accepted. A process that is busy has any time."""
    silent = iter([False, True])
    monkeypatch.setattr(tls, "SILENCE", 0.0)
    monkeypatch.setattr(TlsLink, "is_unanswered", lambda *_: next(silent))
    ends = LinkPair()
    with socket.create_server(("127.0.0.1", 0)) as listening:  # its system accepts, no process
        address = f"tls://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="its system has not answered for 0 s"):
            async with asyncio.timeout(20):
                await TcpTransport(contexts).dial(address, ends.at_a)
    await ends.until(lambda: bool(ends.at_a.ends))


@pytest.mark.parametrize("callback", ["on_frame", "on_payload"])
async def test_an_error_of_the_receiver_is_no_broken_connection(ends: Ends, callback: str) -> None:
    def fail(*_: object) -> None:
        raise error

    error = OSError("the owner of the landing has no room")
    setattr(ends.at_b, callback, fail)
    ends.a.send(b"frame", [memoryview(b"payload")])
    await ends.until(lambda: ends.b.is_severed or bool(ends.at_b.ends))
    assert ends.at_b.ends == [error]
