"""Ranks behind mapped ports: peers dial what they advertise, and they listen elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from relay import Relay

import aiodist
from aiodist.launching.spawn import free_port
from aiodist.wire.address import parse_address


def own_port(group: aiodist.Group) -> int:
    (own,) = [one for one in group._actor._listeners if one.address.startswith("tcp://")]
    return parse_address(own.address).port


async def test_peers_dial_the_advertised_ports() -> None:
    ports = [free_port(), free_port()]
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        Relay(ports[0]) as first,
        Relay(ports[1]) as second,
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
        assert len(first.recorded) + len(second.recorded) >= 1


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
