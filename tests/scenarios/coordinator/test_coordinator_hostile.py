"""Connections that misbehave: each is closed and logged, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aiodist.coordinator import connection as coordinator_connection
from aiodist.coordinator.actor import Coordinator
from aiodist.wire.codec import encode_message
from aiodist.wire.frames import encode, pack_fields, prefix
from aiodist.wire.limits import PROTOCOL_VERSION
from aiodist.wire.messages import (
    Challenge,
    EpochView,
    Failed,
    Failure,
    Hello,
    JoinRequest,
    MemberLost,
    Proof,
    Renew,
    StoreGet,
)

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]

HELLO = encode_message(Hello(bytes(32)))
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "zeros": bytes(64),
    "a long header": prefix(bytes(17), 0),
    "a long payload": prefix(b"", 1025),
    "a header that is no msgpack": encode(b"\xc1"),
    "a body that is no msgpack": encode(pack_fields(1, 0), b"\xc1"),
    "an unknown type": encode(pack_fields(77, 0), b"\x90"),
    "no greeting": encode_message(Renew()),
    "another magic": encode_message(Hello(bytes(32), magic="other")),
    "two greetings": HELLO + HELLO,
    "a flood": HELLO + bytes(5000),
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        str(one.__dict__["reason"])
        for one in caplog.records
        if one.name == "aiodist.coordinator" and one.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_before_the_greeting(
    play: Play, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        members = await site.members(coordinator.address, 2)
        raw = await site.raw(coordinator.address)
        raw.writer.write(data)
        await raw.ended()
        await members[0].store.set("k", b"v")
        assert await members[1].store.get("k") == b"v"
        assert members[0].events.empty()
        assert members[1].events.empty()
        [reason] = warnings(caplog)
        assert reason.startswith("ProtocolError: ")


def test_garbage_after_the_greeting_ends_one_membership(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        other = await site.process(coordinator.address)
        raw = await site.raw(coordinator.address)
        await raw.greet()
        raw.say(JoinRequest(group="g", id="raw", rank=1, size=2))
        await other.join(rank=0)
        raw.writer.write(prefix(pack_fields(1, 0), 2**31))
        await raw.ended()
        event = await other.event()
        assert event == MemberLost(1, (1,), event.reason)
        assert event.reason.startswith("ProtocolError: a payload of 2147483648 bytes, over")
        assert await other.store.get("k") is None


def test_a_member_says_what_members_say(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        raw = await site.raw(coordinator.address)
        await raw.greet()
        raw.say(JoinRequest(group="g", id="raw", size=1))
        assert isinstance(await raw.hear(), EpochView)
        raw.say(Proof(b""))
        await raw.ended()
        assert coordinator.status()["groups"] == []


@pytest.mark.parametrize("has_greeted", [False, True])
def test_nobody_makes_the_coordinator_unpack_a_view(
    play: Play, caplog: pytest.LogCaptureFixture, has_greeted: bool
) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        raw = await site.raw(coordinator.address)
        if has_greeted:
            await raw.greet()
        raw.say(EpochView("g", 1, ()))
        await raw.ended()
        [reason] = warnings(caplog)
        assert "the message EpochView is not expected here" in reason


@pytest.mark.parametrize("seed", range(5))
def test_damaged_streams_never_disturb_the_others(play: Play, seed: int) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        rng = random.Random(seed)
        members = await site.members(coordinator.address, 2)
        good = HELLO + encode_message(Proof(b"")) + encode_message(StoreGet("k"), 3) * 3
        for _ in range(20):
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            raw = await site.raw(coordinator.address)
            cut = rng.randrange(len(data))
            raw.writer.write(bytes(data[:cut]))
            raw.writer.write(bytes(data[cut:]))
            raw.writer.write_eof()
            await raw.ended()
        assert await members[0].store.add("n", 1) == 1
        assert members[0].events.empty()
        assert [len(group["members"]) for group in coordinator.status()["groups"]] == [2]


def test_who_says_nothing_is_not_waited_for(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_connection, "HANDSHAKE_SECONDS", 0.05)

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        member = await site.process(coordinator.address)
        mute = await site.raw(coordinator.address)
        half = await site.raw(coordinator.address)
        half.say(Hello(bytes(32)))
        assert isinstance(await half.hear(), Challenge)
        await mute.ended()
        await half.ended()
        assert warnings(caplog) == ["it did not complete the greeting within 0.05 s"] * 2
        assert await member.join(size=1)


def test_who_does_not_read_is_closed(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_connection, "MAX_BACKLOG", 1024 * 1024)

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        other = await site.process(coordinator.address)
        raw = await site.raw(coordinator.address)
        await raw.greet()
        raw.say(JoinRequest(group="g", id="raw", rank=1, size=2))
        await other.join(rank=0)
        await other.store.set("big", bytes(1024 * 1024))
        for request in range(100):
            raw.say(StoreGet("big"), request)
        event = await other.event()
        assert isinstance(event, MemberLost)
        assert "it does not read" in event.reason
        assert len(await other.store.get("big")) == 1024 * 1024


def test_a_connection_that_is_dropped_while_it_is_made(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = coordinator_connection.Connection.connection_made

    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        def made(
            connection: coordinator_connection.Connection, transport: asyncio.BaseTransport
        ) -> None:
            real(connection, transport)
            for task in coordinator._clients._entrance._adopting:
                task.cancel()

        monkeypatch.setattr(coordinator_connection.Connection, "connection_made", made)
        raw = await site.raw(coordinator.address)
        await raw.ended()
        assert not coordinator._clients._connections
        monkeypatch.setattr(coordinator_connection.Connection, "connection_made", real)
        member = await site.process(coordinator.address)
        assert await member.join(size=1)


def test_another_version_is_told_so(play: Play) -> None:
    @play
    async def scenario(site: Any, coordinator: Coordinator) -> None:
        raw = await site.raw(coordinator.address)
        raw.say(Hello(bytes(32), version=99))
        failed = await raw.hear()
        assert isinstance(failed, Failed)
        assert failed.kind is Failure.VERSION
        assert f"speaks version {PROTOCOL_VERSION} of the protocol, you speak 99" in failed.text
        await raw.ended()


def test_short_nonces_prove_nothing(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        async with Coordinator(token="secret") as coordinator:
            raw = await site.raw(coordinator.address)
            raw.say(Hello(b""))
            await raw.hear()
            raw.say(Proof(bytes(32)))
            failed = await raw.hear()
            assert isinstance(failed, Failed)
            assert failed.kind is Failure.AUTHENTICATION
            await raw.ended()
