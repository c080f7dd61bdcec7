"""What strangers try: greetings that were recorded, words that come byte by byte, certificates of
yesterday and of other hosts, crowds that ask to join. And clocks that jump."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from relay import Relay

import aiodist
from aiodist.coordinator import connection
from aiodist.launching.spawn import free_port
from aiodist.links import greeting
from aiodist.membership import group as membership_group
from aiodist.wire import kinds
from aiodist.wire.address import parse_address
from aiodist.wire.codec import encode_message
from aiodist.wire.frames import encode, pack_fields
from aiodist.wire.messages import Hello
from aiodist_server import visits
from aiodist_server.http import serving

TOKEN = "secret"


async def replayed(port: int, said: bytes) -> bytes:
    """What a door answers to it, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    with contextlib.suppress(ConnectionError):
        writer.write(said)
        heard = await reader.read()
    writer.close()
    return heard


async def test_a_recorded_greeting_lets_nobody_in() -> None:
    """All that two ranks said, at the doors of the coordinator and of each other, is said again."""
    ports = [free_port(), free_port()]
    async with contextlib.AsyncExitStack() as stack:
        coordinator = aiodist.Coordinator("tcp://127.0.0.1:0", token=TOKEN)
        door = parse_address((await stack.enter_async_context(coordinator)).address).port
        tap = await stack.enter_async_context(Relay(door))
        taps = [await stack.enter_async_context(Relay(port)) for port in ports]
        groups = await asyncio.gather(
            *[
                stack.enter_async_context(
                    aiodist.connect(
                        f"tcp://127.0.0.1:{tap.port}",
                        rank=rank,
                        size=2,
                        token=TOKEN,
                        transports="tcp",
                        bind=f"127.0.0.1:{ports[rank]}",
                        advertise=f":{taps[rank].port}",
                    )
                )
                for rank in range(2)
            ]
        )
        assert await asyncio.gather(*[one.all_reduce(1) for one in groups]) == [2, 2]
        assert len(tap.recorded) == 2 and taps[0].recorded + taps[1].recorded
        before = coordinator.status()["groups"]
        for port, recorded in [(door, tap.recorded)] + [
            (port, one.recorded) for port, one in zip(ports, taps, strict=True)
        ]:
            for said in recorded:
                heard = await replayed(port, bytes(said))
                assert b"127.0.0.1" not in heard  # no view, no address
        [group] = coordinator.status()["groups"]
        assert [one["id"] for one in group["members"]] == [
            one["id"] for one in before[0]["members"]
        ]
        assert await asyncio.gather(*[one.all_reduce(1) for one in groups]) == [2, 2]


# Words that come slowly.


async def drip(port: int, said: bytes) -> int:
    """Say it byte by byte, so that no silence is long: how much was said when the door closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    closed = asyncio.create_task(reader.read())
    count = 0
    for byte in said:
        if closed.done():
            break
        with contextlib.suppress(ConnectionError):
            writer.write(bytes([byte]))
            count += 1
        await asyncio.wait({closed}, timeout=0.005)
    with contextlib.suppress(ConnectionError):
        await closed
    writer.close()
    return count


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doors wait a tenth of a second, not ten."""
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr(greeting, "HANDSHAKE_TIMEOUT", 0.1)
    monkeypatch.setattr(visits, "REQUEST_SECONDS", 0.1)


@contextlib.asynccontextmanager
async def doors() -> AsyncIterator[dict[str, int]]:
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0", token=TOKEN) as coordinator,
        serving(coordinator, parse_address("tcp://127.0.0.1:0")) as url,
        aiodist.connect(coordinator.address, size=1, token=TOKEN, transports="tcp") as group,
    ):
        [own] = [one for one in group._actor._listeners if one.address.startswith("tcp://")]
        yield {
            "coordinator": parse_address(coordinator.address).port,
            "rank": parse_address(own.address).port,
            "http": int(url.rpartition(":")[2].strip("/")),
        }
        await group.store.set("k", b"v")
        assert await group.all_reduce(1) == 1


SLOW = {
    "coordinator": encode_message(Hello(bytes(32))) * 100,
    "rank": encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, b"x" * 4000)),
    "http": b"GET / HTTP/1.1\r\n" + b"X-More: and more\r\n" * 1000,
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("door", SLOW)
async def test_a_word_that_comes_byte_by_byte_is_not_waited_for(door: str) -> None:
    async with doors() as ports:
        assert await drip(ports[door], SLOW[door]) < len(SLOW[door])


# Certificates.


WRONG = {
    "expired": ("IP:127.0.0.1", -1, "certificate has expired"),
    "of another host": ("DNS:elsewhere.example", 2, "IP address mismatch"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_coordinator_with_a_wrong_certificate_is_refused(what: str, tmp_path: Path) -> None:
    san, days, text = WRONG[what]
    client, server = Authority(tmp_path).contexts("node", mutual=False, san=san, days=days)
    async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=server) as coordinator:
        with pytest.raises(aiodist.JoinError, match=text):
            await aiodist.connect(coordinator.address, size=1, ssl=client, timeout=5.0)
        assert coordinator.status()["groups"] == []


async def test_a_rank_whose_certificate_is_over_is_not_let_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    _, server = authority.contexts("node", mutual=True)
    client, _ = authority.contexts("rank", mutual=True, days=-1)
    async with aiodist.Coordinator("tls://127.0.0.1:0", ssl=server) as coordinator:
        with pytest.raises(aiodist.JoinError):
            await aiodist.connect(coordinator.address, size=1, ssl=client, timeout=1.0)
        assert coordinator.status()["groups"] == []


# Crowds that ask to join.


async def test_joiners_over_the_limit_are_refused_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership_group, "MAX_MEMBERS", 20)
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0", token=TOKEN) as coordinator,
        aiodist.connect(coordinator.address, size=1, token=TOKEN) as group,
    ):
        options: dict[str, Any] = {"group": "crowd", "size": 100, "token": TOKEN, "timeout": 60.0}
        crowd = {asyncio.ensure_future(_joined(coordinator.address, options)) for _ in range(100)}
        waiting, refused = crowd, set[str]()
        while len(waiting) > 20:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= {one.result() for one in done}
        assert refused == {"20 joiners wait already, the limit"}
        assert await group.all_reduce(1) == 1
        await group.store.set("k", b"v")
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


async def _joined(address: str, options: dict[str, Any]) -> str:
    try:
        async with aiodist.connect(address, **options):
            return "joined"
    except aiodist.JoinError as error:
        return str(error).partition(" [")[0]


# Clocks.


@pytest.mark.parametrize("years", [-10, 10])
async def test_the_clock_of_the_host_may_jump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, years: int
) -> None:
    """Leases, deadlines and the ttl of keys go by a clock that does not jump."""
    real = time.time
    async with aiodist.Coordinator("tcp://127.0.0.1:0", state=tmp_path / "state") as coordinator:
        address = coordinator.address
        async with aiodist.connect(address, size=1) as group:
            await group.store.set("kept", b"1", ttl=3600.0)
            monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400.0)
            await group.store.set("also", b"2", ttl=3600.0)
            assert await group.store.get("kept") == b"1"
            assert await group.store.get("also") == b"2"
            assert await group.all_reduce(1) == 1
