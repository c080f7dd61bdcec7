"""Connections to what is served over HTTP: who stays, and who goes for another one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from idle_time import idle_time

from aiodist_server import visits as module
from aiodist_server.visits import Visits


class Handler(asyncio.Protocol):
    """Who speaks HTTP with one connection."""

    def __init__(self) -> None:
        self.here = asyncio.Event()
        self.gone = asyncio.Event()
        self.heard = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.here.set()

    def data_received(self, data: bytes) -> None:
        self.heard += data
        self.transport.write(b"answer")

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()


class Place:
    """Visits, who attends to them, and the callers."""

    def __init__(self) -> None:
        self.visits = Visits()
        self.visits.serve(self.make)
        self.handlers: list[Handler] = []
        self.callers: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))

    def make(self) -> Handler:
        self.handlers.append(Handler())
        return self.handlers[-1]

    async def called(self) -> tuple[socket.socket, Handler]:
        """Somebody has connected."""
        caller = socket.create_connection(self.listener.getsockname())
        caller.setblocking(False)
        self.callers.append(caller)
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        self.visits.take(sock)
        await self.handlers[-1].here.wait()
        return caller, self.handlers[-1]


@asynccontextmanager
async def opened() -> AsyncIterator[Place]:
    place = Place()
    yield place
    place.listener.close()
    for caller in place.callers:
        caller.close()
    for handler in place.handlers:
        await handler.gone.wait()
    await place.visits.end()
    assert len(place.visits._room) == 0
    assert place.visits._by_handler == {}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with opened() as place:
        yield place


async def test_what_a_visitor_says_and_hears(place: Place) -> None:
    caller, handler = await place.called()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(caller, b"request")
    assert await loop.sock_recv(caller, 100) == b"answer"
    assert handler.heard == b"request"


async def test_who_brings_no_request_goes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.0)
    _, handler = await place.called()
    await handler.gone.wait()


async def test_an_answer_may_take_its_time_and_the_next_request_may_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handler = await place.called()
    visit = place.visits._by_handler[handler]
    answered: Any = object()

    async def answer(request: Any) -> Any:
        assert visit._timer is None
        return answered

    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.0)
    request: Any = SimpleNamespace(protocol=handler)
    assert await place.visits.attend(request, answer) is answered
    await handler.gone.wait()


@idle_time
async def test_a_long_answer_may_be_read_slowly() -> None:
    """Each look sees that the caller has read on. The next request is due after the answer."""
    async with opened() as place:
        loop = asyncio.get_running_loop()
        caller, handler = await place.called()
        left = 1 << 24
        handler.transport.write(bytes(left))
        while left:
            await asyncio.sleep(0.9 * module.REQUEST_SECONDS)
            assert not handler.gone.is_set()
            with suppress(BlockingIOError):
                while True:
                    left -= len(caller.recv(1 << 20))
        await handler.gone.wait()
        began = loop.time()
        _, handler = await place.called()
        handler.transport.write(bytes(1 << 24))
        await handler.gone.wait()
        # The system may have taken some more before the first look.
        assert 0.9 < (loop.time() - began) / module.REQUEST_SECONDS < 2.1


async def test_the_oldest_goes_for_a_new_one(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.visits._room.most = 2  # and one of them for each host
    _, first = await place.called()
    _, second = await place.called()
    await first.gone.wait()
    assert "too many from that host are open for HTTP" in caplog.text
    assert not second.gone.is_set()


async def test_a_request_of_who_is_gone_is_carried_out(place: Place) -> None:
    """It was closed meanwhile, and whoever answers finds that out."""
    request: Any = SimpleNamespace(protocol=Handler())
    answered: Any = object()

    async def answer(request: Any) -> Any:
        return answered

    assert await place.visits.attend(request, answer) is answered
