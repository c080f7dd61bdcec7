"""Bytes of msgpack that claim more than they hold, or are nested deeply: every reader of bytes from
others refuses them, and every listener closes the connection and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostile import Wire, show_token

import aiodist
from aiodist.buffers import values
from aiodist.channels import differences, directory, slices
from aiodist.collectives import offers
from aiodist.errors import ProtocolError
from aiodist.membership.records import decode_records
from aiodist.wire import channels, kinds
from aiodist.wire.codec import decode_message
from aiodist.wire.frames import Frame, encode, pack_fields, unpack_fields
from aiodist.wire.messages import JoinRequest, StoreSet

BOMBS = {
    "an array of four billion": b"\xdd" + b"\xff" * 4,
    "a map of four billion": b"\xdf" + b"\xff" * 4,
    "a text of four billion": b"\xdb" + b"\xff" * 4,
    "bytes of four billion": b"\xc6" + b"\xff" * 4,
    "an extension of four billion": b"\xc9" + b"\xff" * 4 + b"\x01",
    "arrays, 60000 deep": b"\x91" * 60_000,
    "arrays, 900 deep": b"\x91" * 900 + b"\xc0",
    "maps, 900 deep": b"\x81\x01" * 900 + b"\xc0",
    "large arrays, each in the one before": (b"\xdd" + b"\x00\xff\xff\xff") * 900,
    "many empty arrays": b"\xdc\x7f\xff" + b"\x90" * 0x7FFF,
    "a time": b"\xd6\xff" + b"\xff" * 4,
    "a time that is none": b"\xc7\x03\xff" + b"\xff" * 3,
    "keys that are arrays": b"\x81\x91\x01\x01",
    "texts that are none": b"\x91\xa2\xff\xff",
    "infinity": b"\x92\xcb\x7f\xf0" + bytes(6) + b"\xcb\x7f\xf8" + bytes(6),
    "nothing": b"",
}
"""Each of at most 64 KiB."""


def body_of(cls: Any) -> Callable[[bytes], object]:
    return lambda bomb: decode_message(Frame(pack_fields(cls.code, 1), bomb))


READERS: dict[str, Callable[[bytes], object]] = {
    "headers": unpack_fields,
    "requests to join": body_of(JoinRequest),
    "requests to the store": body_of(StoreSet),
    "metadata of values": values.parse,
    "offers of a collective": lambda bomb: offers.unpack(bomb, 2, 1),
    "differences of weights": lambda bomb: differences.decode(
        bomb, np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    ),
    "slices of weights": slices.unpacked_want,
    "releases of weights": directory.published,
    "records of participants": lambda bomb: directory.unpacked(directory.Release, bomb),
    "what participants say": channels.said_in,
    "ids of publishers": channels.publishers_in,
    "what was published": lambda bomb: channels.published(None, bomb),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_readers_refuse_bombs_or_read_them_whole(
    read: Callable[[bytes], object], bomb: bytes
) -> None:
    with contextlib.suppress(ProtocolError):
        read(bomb)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_records_of_a_state_file_are_refused_or_read(bomb: bytes) -> None:
    with contextlib.suppress(ValueError):
        list(decode_records(bomb))


# Listeners.

TOKEN = b"secret"


def ended(wire: Wire) -> bool:
    """Wait until the other side has closed. Raises OSError if it does not."""
    with contextlib.suppress(ConnectionError):
        while not wire.ended:
            wire.frame()
    return True


def at(address: str) -> Wire:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return Wire(socket.create_connection((host, int(port)), timeout=10))


def throw(address: str, frame: bytes, *, greets: bool) -> bool:
    """Connect, send one frame, and wait for the end."""
    wire = at(address)
    try:
        with contextlib.suppress(ConnectionError):
            if greets:
                show_token(wire, TOKEN)
            wire.send(frame)
        return ended(wire)
    finally:
        wire.sock.close()


@pytest.mark.parametrize("greets", [False, True], ids=["strangers", "with the token"])
def test_a_coordinator_closes_the_connection_and_serves_the_others(run: Any, greets: bool) -> None:
    async def main() -> None:
        async with aiodist.Coordinator("tcp://127.0.0.1:0", token=TOKEN) as coordinator:
            where = coordinator.address
            async with aiodist.connect(where, rank=0, size=1, token=TOKEN) as group:
                for bomb in BOMBS.values():
                    frames = [encode(pack_fields(JoinRequest.code, 1), bomb)]
                    if greets or len(bomb) < 4096:
                        frames.append(encode(bomb))
                    for frame in frames:
                        assert await asyncio.to_thread(throw, where, frame, greets=greets)
                await group.store.set("k", b"v")
                assert await group.store.get("k") == b"v"
                assert await group.all_reduce(1) == 1

    run(main())


def test_a_rank_closes_the_connection_of_a_stranger(run: Any) -> None:
    async def main() -> None:
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            [where] = [
                one for one in ranks[0]._actor.view.members[0].addresses if one.startswith("tcp://")
            ]
            for bomb in BOMBS.values():
                if len(bomb) < 4096:
                    assert await asyncio.to_thread(throw, where, encode(bomb), greets=False)
            assert await asyncio.gather(*[one.all_reduce(1) for one in ranks]) == [2, 2]

    run(main())


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("place", ["header", "tag", "payload"])
@pytest.mark.sample(23)
def test_a_member_that_sends_one_is_lost_to_the_rank_that_got_it(
    run: Any, no_ruling: None, bomb: bytes, place: str
) -> None:
    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[one.barrier() for one in ranks])
            pending = ranks[0].recv(src=1)
            link = ranks[1]._actor.endpoint.peer(0).link
            assert link is not None
            context = ranks[0]._context.id
            if place == "header":
                link.send(bomb[:60_000] or b"\xc1")
            elif place == "tag":
                start = pack_fields(kinds.KNOCK, context, 0, 0)
                link.send(start[:-2] + (bomb[:60_000] or b"\xc1") + b"\x00")
            else:
                link.send(
                    pack_fields(kinds.MESSAGE, context, None, 9, 0, bomb), (memoryview(bomb),)
                )
                link.send(pack_fields(99, context))  # ends it, if that did not
            with pytest.raises(aiodist.PeerLostError, match="rank 1"):
                await pending
            sent = ranks[2].send("hello", 0)
            assert await ranks[0].recv(src=2) == "hello"
            await sent

    run(main())
