"""Connections that say that they are parts of a bundle, or do not, or not all of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodist.testing.links import LinkPair, connected
from aiodist.transports import joining, tcp
from aiodist.transports.base import Link
from aiodist.transports.bundled import BundledLink
from aiodist.transports.joining import MAGIC, PARTS, BundleListener
from aiodist.transports.stream import StreamLink
from aiodist.transports.tcp import TcpTransport
from aiodist.wire.address import parse_address
from aiodist.wire.frames import prefix


class FarTcp(TcpTransport):
    def _is_far(self, sock: socket.socket) -> bool:
        return True

    def _wants_bundle(self, sock: socket.socket) -> bool:
        return True


class Listening:
    """A listener and those that connect to it by hand."""

    def __init__(self, listener: BundleListener, links: list[Link]) -> None:
        self.listener = listener
        self.links = links
        to = parse_address(listener.address)
        self._where = (to.host, to.port)
        self._loop = asyncio.get_running_loop()
        self.socks: list[socket.socket] = []

    async def connect(self, said: bytes) -> socket.socket:
        sock = socket.create_connection(self._where)
        self.socks.append(sock)
        sock.setblocking(False)
        await self._loop.sock_sendall(sock, said)
        return sock

    async def said(self, sock: socket.socket) -> bytes:
        """What the listener says; b"": it has closed the connection."""
        async with asyncio.timeout(20):
            try:
                return await self._loop.sock_recv(sock, 10)
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def listening() -> AsyncIterator[Listening]:
    links: list[Link] = []
    listener = await FarTcp().listen(links.append, host="127.0.0.1")
    assert isinstance(listener, BundleListener)
    made = Listening(listener, links)
    try:
        yield made
    finally:
        listener.close()
        for link in links:
            link.close()
        for sock in made.socks:
            sock.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition()` holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it does not come to that")


def part(index: int, name: bytes = b"n" * 16) -> bytes:
    return joining._PART.pack(MAGIC, name, index)


async def test_all_parts_are_one_link() -> None:
    async with connected(FarTcp()) as ends:
        for link in (ends.a, ends.b):
            assert type(link) is BundledLink and len(link._socket.socks) == PARTS
            assert link.open_process() is None and not link.is_unanswered(5)
            link.listen_for(40)
            for sock in link._socket.socks:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20


async def test_a_part_that_breaks_ends_the_link() -> None:
    """Also where the other parts could go on."""
    async with connected(FarTcp()) as ends:
        assert isinstance(ends.a, BundledLink)
        ends.a.send(b"before")
        await ends.until(lambda: bool(ends.at_b.frames))
        ends.a._socket.socks[ends.a._socket._turn].shutdown(socket.SHUT_WR)
        ends.a.send(b"after")
        await ends.over()
        assert ends.at_b.frames == [(b"before", b"")]
        assert isinstance(ends.at_a.ends[0], OSError)
        assert isinstance(ends.at_b.ends[0], OSError)


async def test_an_ordinary_connection_waits_for_its_first_byte() -> None:
    async with listening() as there:
        await there.connect(prefix(b"header", 0))
        await until(lambda: bool(there.links))
        assert type(there.links[0]) is StreamLink
        assert not there.listener._awaited and not len(there.listener._arrivals)


@pytest.mark.parametrize(
    "said",
    [part(PARTS), MAGIC[:1] + bytes(40)],
    ids=["an index too many", "another word"],
)
async def test_what_is_no_part_is_closed(said: bytes) -> None:
    async with listening() as there:
        assert await there.said(await there.connect(said)) == b""
        assert not there.links and not there.listener._awaited


async def test_a_part_that_comes_twice_closes_its_bundle() -> None:
    async with listening() as there:
        socks = [await there.connect(part(index)) for index in (0, 1, 0)]
        assert [await there.said(sock) for sock in socks] == [b"", b"", b""]
        assert not there.listener._awaited and not there.listener._parts


async def test_a_part_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are closed; those of another bundle, and who says nothing, do not help."""
    monkeypatch.setattr(joining, "PATIENCE", 0.1)
    async with listening() as there:
        socks = [await there.connect(part(index)) for index in range(PARTS - 1)]
        socks.append(await there.connect(part(PARTS - 1, b"m" * 16)))
        socks.append(await there.connect(b""))
        assert [await there.said(sock) for sock in socks] == [b""] * len(socks)
        assert not there.links and not there.listener._awaited and not there.listener._parts


async def test_too_many_that_wait_make_room_for_new_ones() -> None:
    async with listening() as there:
        there.listener._arrivals.most = 8  # of one host: half of them
        socks = [await there.connect(part(index)) for index in range(3)]
        await until(lambda: [len(parts) for parts in there.listener._parts.values()] == [3])
        silent = [await there.connect(b"") for _ in range(2)]
        assert [await there.said(sock) for sock in socks] == [b"", b"", b""]
        assert len(there.listener._arrivals) == len(silent)


async def test_who_closes_the_listener_closes_who_waits() -> None:
    async with listening() as there:
        socks = [await there.connect(part(index)) for index in range(2)]
        await until(lambda: [len(parts) for parts in there.listener._parts.values()] == [2])
        there.listener.close()
        assert [await there.said(sock) for sock in socks] == [b"", b""]


async def test_without_files_for_a_bundle_there_is_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who listens closes the parts; who dials makes an ordinary connection."""
    monkeypatch.setattr(joining, "has_room", lambda: False)
    links = []
    arrived = asyncio.Event()

    def accept(link: Link) -> None:
        links.append(link)
        arrived.set()

    listener = await FarTcp().listen(accept, host="127.0.0.1")
    ends = LinkPair()
    link = await FarTcp().dial(listener.address, ends.at_a)
    assert type(link) is StreamLink
    link.send(b"header")
    async with asyncio.timeout(20):
        await arrived.wait()
    assert [type(link) for link in links] == [StreamLink]
    for one in (link, *links):
        one.close()
    listener.close()


async def test_who_listens_and_knows_no_bundles_gets_one_connection() -> None:
    """As who has measured that the peer is near: what it is told is no frame."""
    links: list[Link] = []
    listener = await TcpTransport().listen(links.append, host="127.0.0.1")
    link = await FarTcp().dial(listener.address, LinkPair().at_a)
    assert type(link) is StreamLink
    link.close()
    for one in links:
        one.close()
    listener.close()


def test_bundles_have_a_part_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "most_connections", lambda files_share: 3 * PARTS)

    class Open:
        is_closed = False

    there = [Open(), Open()]
    monkeypatch.setattr(joining, "_bundles", there)
    assert joining.has_room()
    there.append(Open())
    assert not joining.has_room()
    there[0].is_closed = True
    assert joining.has_room()


@pytest.mark.parametrize(
    ("trip", "control", "wanted"),
    [
        (None, b"cubic", False),
        (0.004, b"cubic", False),
        (0.02, b"cubic", True),
        (0.02, b"reno", True),
        (0.02, b"bbr", False),
        (0.02, b"vegas", False),
    ],
)
def test_a_bundle_is_for_who_is_far_and_may_not_use_bbr(
    monkeypatch: pytest.MonkeyPatch, trip: float | None, control: bytes, wanted: bool
) -> None:
    class Denied:
        def getsockopt(self, *_: Any) -> bytes:
            return control + b"\0"

        def setsockopt(self, *_: Any) -> None:
            raise PermissionError

    monkeypatch.setattr(tcp, "round_trip", lambda sock: trip)
    sock: Any = Denied()
    assert TcpTransport()._wants_bundle(sock) is wanted
