"""Coordinators and members over real sockets, on loops of both kinds."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from aiodist.control.client import ControlClient
from aiodist.control.events import ControlEvent
from aiodist.control.store import Store
from aiodist.coordinator.actor import Coordinator
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Decoder
from aiodist.wire.messages import EpochView, Hello, JoinRequest, Message, Proof

PATIENCE = 30.0
"""Seconds after which a test that waits for something fails."""


class Process:
    """One client of a coordinator, with what it was told."""

    def __init__(self, client: ControlClient) -> None:
        self.client = client
        self.store = Store(client, timeout=PATIENCE)
        self.events: asyncio.Queue[ControlEvent] = asyncio.Queue()
        self.view: EpochView | None = None
        client.on_event = self.events.put_nowait

    async def join(self, timeout: float = PATIENCE, **fields: Any) -> EpochView:
        fields.setdefault("group", "g")
        fields.setdefault("id", f"id-{id(self):x}")
        if not {"size", "min_size", "max_size"} & set(fields):
            fields["size"] = 2
        self.ask = JoinRequest(**fields)
        self.view = await self.client.join(self.ask, timeout)
        return self.view

    @property
    def rank(self) -> int:
        assert self.view is not None
        return self.view.ranks[self.ask.id]

    async def event(self) -> ControlEvent:
        async with asyncio.timeout(PATIENCE):
            return await self.events.get()


class Raw:
    """A connection that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = Decoder(max_payload=64 * 1024 * 1024)
        self.got: list[Message] = []

    def say(self, message: Message, request: int = 1) -> None:
        self.writer.write(encode_message(message, request))

    async def hear(self) -> Message:
        """The next message. Raises EOFError when the connection was closed instead."""
        async with asyncio.timeout(PATIENCE):
            while not self.got:
                data = await self.reader.read(65536)
                if not data:
                    raise EOFError
                self.got += [decode_message(frame)[1] for frame in self.decoder.feed(data)]
        return self.got.pop(0)

    async def greet(self) -> None:
        self.say(Hello(bytes(32)))
        await self.hear()
        self.say(Proof(b""))
        await self.hear()

    async def ended(self) -> bool:
        """Wait for the other side to close; whatever comes before is dropped."""
        async with asyncio.timeout(PATIENCE):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return True


class Site:
    """Makes clients and cleans up after them."""

    def __init__(self) -> None:
        self.clients: list[ControlClient] = []
        self.raws: list[Raw] = []
        self.servers: list[asyncio.Server] = []
        self.handling: list[Any] = []

    async def process(self, address: str, **options: Any) -> Process:
        options.setdefault("timeout", PATIENCE)
        client = await ControlClient.open(address, **options)
        self.clients.append(client)
        return Process(client)

    async def members(self, address: str, size: int, **fields: Any) -> list[Process]:
        """`size` members of one group, by rank."""
        processes = [await self.process(address) for _ in range(size)]
        await asyncio.gather(
            *(
                process.join(rank=rank, size=size, **fields)
                for rank, process in enumerate(processes)
            )
        )
        return processes

    async def raw(self, address: str) -> Raw:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        raw = Raw(*await asyncio.open_connection(host, int(port)))
        self.raws.append(raw)
        return raw

    async def serve(
        self, handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> str:
        """Start a server that is no coordinator; its address."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.handling.append(asyncio.current_task())
            with contextlib.suppress(OSError):
                await handler(reader, writer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self.servers.append(server)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        for client in self.clients:
            client.close()
            await client.closed()
        for server in self.servers:
            server.close()
        await asyncio.gather(*self.handling)
        for raw in self.raws:
            raw.writer.close()
            with contextlib.suppress(OSError):
                await raw.writer.wait_closed()


Scenario = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture
def play(run: Callable[[Any], Any]) -> Callable[[Scenario], None]:
    """Runs a scenario at once, on a loop of each kind; use it as a decorator. The scenario takes
    a `Site`, and a second argument where it wants a coordinator on a free TCP port."""

    async def whole(scenario: Scenario) -> None:
        site = Site()
        try:
            if len(inspect.signature(scenario).parameters) == 1:
                await scenario(site)
            else:
                async with Coordinator() as coordinator:
                    try:
                        await scenario(site, coordinator)
                    finally:
                        await site.close()
        finally:
            await site.close()

    return lambda scenario: run(whole(scenario))


@pytest.fixture(params=["tcp", "unix", "inproc"])
def any_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address to listen on, of each kind."""
    return {
        "tcp": "tcp://127.0.0.1:0",
        "unix": f"unix://{tmp_path}/s",
        "inproc": "inproc://test",
    }[request.param]
