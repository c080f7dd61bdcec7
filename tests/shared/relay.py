"""A relay of this host: what a NAT does with a port."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """Connects each connection that it accepts to another port of this host. `recorded` has what
    came from the dialling sides, one entry for each connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.recorded: list[bytearray] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        said = bytearray()
        self.recorded.append(said)
        back, there = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(_pass_on(reader, there, said), _pass_on(back, writer, bytearray()))


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytearray
) -> None:
    with contextlib.suppress(ConnectionError):
        try:
            while data := await reader.read(1 << 16):
                said += data
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
