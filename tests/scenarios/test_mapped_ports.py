"""Ranks behind mapped ports: peers dial what they advertise, and they listen elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.launching.spawn import free_port
from aiodist.wire.address import parse_address


class Mapping:
    """What a NAT does with a port: whatever connects here is connected to `port` of this host."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Mapping:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
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
        self.connections += 1
        back, there = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_pass_on(reader, there), _pass_on(back, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def own_port(group: aiodist.Group) -> int:
    (own,) = [one for one in group._actor._listeners if one.address.startswith("tcp://")]
    return parse_address(own.address).port


async def test_peers_dial_the_advertised_ports() -> None:
    ports = [free_port(), free_port()]
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        Mapping(ports[0]) as first,
        Mapping(ports[1]) as second,
    ):
        mappings = [first, second]

        async def main(rank: int) -> Any:
            async with aiodist.connect(
                coordinator.address,
                rank=rank,
                size=2,
                transports=("tcp",),
                bind=f"127.0.0.1:{ports[rank]}",
                advertise=f":{mappings[rank].port}",
            ) as group:
                assert own_port(group) == ports[rank]
                assert [member.host for member in group.members] == ["127.0.0.1"] * 2
                x = np.full(100_000, rank + 1.0)
                await group.all_reduce(x)
                return x[0], x[-1]

        assert await asyncio.gather(main(0), main(1)) == [(3.0, 3.0)] * 2
        assert first.connections + second.connections >= 1


async def test_what_is_advertised_is_listened_at_where_nothing_else_is_said() -> None:
    port = free_port()
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        options: dict[str, Any] = {"size": 1, "transports": ("tcp",), "advertise": f"nat:{port}"}
        async with aiodist.connect(coordinator.address, **options) as group:
            assert own_port(group) == port
            assert group.members[0].host == "nat"
            assert f"tcp://nat:{port}" in group._actor.people[0].addresses


async def test_a_port_that_somebody_has_is_named() -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        taken = f"127.0.0.1:{parse_address(coordinator.address).port}"
        with pytest.raises(OSError, match=f"cannot listen for peers at {taken}"):
            await aiodist.connect(coordinator.address, size=1, bind=taken, transports=("tcp",))


@pytest.mark.parametrize("option", ["bind", "advertise"])
async def test_a_port_that_is_none_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: "host:http"}
    with pytest.raises(ValueError, match="port 'http': expected 1 to 65535"):
        await aiodist.connect("tcp://127.0.0.1:1", size=1, **options)
