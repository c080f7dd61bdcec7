"""Where connections come in to the coordinator: each is let in, or closed, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aiodist.coordinator.connection import Connection
from aiodist.coordinator.entrance import Entrance
from aiodist.coordinator.listening import bind_unix
from aiodist.coordinator.totals import Totals
from aiodist.transports import inproc_names
from aiodist.transports.sparing import Sparing
from aiodist.wire.address import Address, parse_address


class Owner:
    """Hears of connections that have a transport."""

    def __init__(self) -> None:
        self.token: bytes | None = None
        self.name, self.incarnation, self.returns = "one", 1, True
        self.sparing = Sparing(logging.getLogger("aiodist.coordinator"))
        self.totals = Totals()
        self.there: list[Connection] = []
        self.came = asyncio.Event()
        self.went = asyncio.Event()

    def opened(self, connection: Connection) -> None:
        connection.adopting = None
        self.there.append(connection)
        self.came.set()

    def welcomed(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, request: int, message: Any) -> None: ...

    def closed(self, connection: Connection, reason: str) -> None:
        self.there.remove(connection)
        self.went.set()


class Place:
    """An entrance, its owner, and what the loop is told of that nobody foresaw."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.entrance = Entrance(self.owner, None, itertools.count(1))
        self.loop = asyncio.get_running_loop()
        self.told: list[BaseException] = []
        self.loop.set_exception_handler(lambda _, what: self.told.append(what["exception"]))

    async def open(self, address: str) -> Address:
        return await self.entrance.open(parse_address(address))

    async def called(self) -> socket.socket:
        """The other end of a connection that has come here."""
        if self.entrance._at is None:
            await self.open("inproc://entrance")
        ours, theirs = socket.socketpair()
        self.entrance._take(theirs)
        return ours

    def make_fail(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        """No connection gets a transport."""

        async def connect_accepted_socket(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(self.loop, "connect_accepted_socket", connect_accepted_socket)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    yield place
    place.entrance.shut()
    await place.entrance.clear()


async def ended(sock: socket.socket) -> bool:
    """Whether the other side closes `sock` without a word."""
    sock.setblocking(False)
    with sock:
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "inproc://entrance-test"])
async def test_who_connects_is_the_owners_until_it_goes(place: Place, address: str) -> None:
    at = await place.open(address)
    if at.scheme == "inproc":
        sock = inproc_names.connect(at.host)
    else:
        assert at.port != 0
        sock = socket.create_connection((at.host, at.port))
    with sock:
        await place.owner.came.wait()
        (connection,) = place.owner.there
        assert connection.host == "127.0.0.1"
        assert len(place.entrance._unproven) == 1
        place.entrance.let_in(connection)
        assert len(place.entrance._unproven) == 0
    await place.owner.went.wait()


async def test_a_socket_file_goes_with_its_listener(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    await place.open(f"unix://{path}")
    assert path.exists()
    place.entrance.shut()
    assert not path.exists()
    place.entrance.shut()


async def test_the_socket_file_of_another_one_stays(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    await place.open(f"unix://{path}")
    path.unlink()  # an operator cleans up, and another coordinator starts there
    with bind_unix(str(path)):
        place.entrance.shut()
        assert path.exists()


async def test_nobody_comes_in_any_more(place: Place) -> None:
    await place.open("inproc://entrance-shut")
    early = inproc_names.connect("entrance-shut")  # taken in a moment later
    place.entrance.shut()
    with pytest.raises(OSError, match="entrance-shut"):
        inproc_names.connect("entrance-shut")
    assert await ended(early)


async def test_a_connection_that_breaks_at_once_is_let_go(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.make_fail(monkeypatch, ConnectionResetError("gone"))
    assert await ended(await place.called())
    assert (len(place.entrance._unproven), place.told) == (0, [])


@pytest.mark.parametrize(
    ("error", "told"),
    [(ssl.SSLCertVerificationError("it has expired"), 1), (ssl.SSLEOFError("it went"), 0)],
)
async def test_the_log_says_why_tls_was_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception, told: int,
) -> None:  # fmt: skip
    place.make_fail(monkeypatch, error)
    assert await ended(await place.called())
    assert [one.args[1] for one in caplog.records] == [error] * told


async def test_what_nobody_foresaw_is_told_and_keeps_no_connection(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = LookupError("what is that?")
    place.make_fail(monkeypatch, error)
    assert await ended(await place.called())
    assert (len(place.entrance._unproven), place.told) == (0, [error])


async def test_who_has_no_transport_yet_is_turned_away_at_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def for_ever(*_: Any, **__: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(place.loop, "connect_accepted_socket", for_ever)
    ours = await place.called()
    await begun.wait()
    await place.entrance.clear()
    assert await ended(ours)
    assert len(place.entrance._unproven) == 0


async def test_who_comes_where_all_places_are_new_is_to_come_again(place: Place) -> None:
    place.entrance._unproven.most = 1
    with await place.called(), await place.called() as second:
        second.setblocking(False)
        assert b"try again" in await place.loop.sock_recv(second, 4096)
        await place.owner.came.wait()
    await place.owner.went.wait()


def mode_in_child(entrance: Entrance, sock: socket.socket) -> int:
    """What kind of file a forked child has instead of `sock`."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        entrance.close_in_child(os.open(os.devnull, os.O_RDWR))
        os.write(writing, b"%d" % os.fstat(sock.fileno()).st_mode)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        mode = int(pipe.read())
    os.waitpid(child, 0)
    return mode


async def test_a_forked_child_gives_up_connections_without_a_transport() -> None:
    """Else a client whose TLS handshake was under way would wait for the child."""
    place = Place()
    await place.open("inproc://at-the-fork")
    ours, theirs = socket.socketpair()
    place.entrance._take(theirs)
    assert stat.S_ISCHR(mode_in_child(place.entrance, theirs))
    place.entrance.shut()
    await place.entrance.clear()
    with ours:
        assert ours.recv(1) == b""
