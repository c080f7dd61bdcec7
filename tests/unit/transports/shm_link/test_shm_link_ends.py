"""A shared-memory link: every way to end."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.testing.links import LinkPair
from aiodist.transports.framed import BYE
from aiodist.transports.shm_link import ShmLink
from aiodist.transports.shm_rings import RING, SEGMENT
from aiodist.wire import frames


async def test_what_a_dead_peer_sent_is_still_received(wired: Any, asleep: Any) -> None:
    payload = random.Random(4).randbytes(RING - 500)
    async with wired() as w:
        await asleep(w)
        w.raw.send(frames.encode(b"last words", payload) + frames.encode(b"!"))
        w.raw.sock.close()
        w.link.send(b"to the dead")
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.frames == [(b"last words", payload), (b"!", b"")]
        assert isinstance(w.seen.ends[0], ConnectionResetError)
        assert "raw closed the connection" in str(w.seen.ends[0])


async def test_a_peer_that_dies_with_bells_unheard(wired: Any, asleep: Any) -> None:
    async with wired() as w:
        await asleep(w)
        assert w.raw.rings.sleep(for_room=False)
        w.link.send(b"ring")
        w.raw.send(frames.encode(b"last words"))
        w.raw.sock.close()  # ECONNRESET
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.headers == [b"last words"]
        assert isinstance(w.seen.ends[0], ConnectionResetError)


@pytest.mark.parametrize("before", [b"", b"\x92", frames.prefix(b"h", 100) + b"x"])
async def test_the_end_amid_a_frame_is_a_broken_connection(before: bytes, wired: Any) -> None:
    async with wired() as w:
        if before:
            w.raw.send(before)
        w.raw.sock.close()
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ConnectionResetError)
        assert not w.seen.frames


async def test_bye_closes_after_the_frames_before_it_and_is_answered(wired: Any) -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"h", b"p") + BYE)
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.frames == [(b"h", b"p")]
        assert w.seen.ends == [None]
        assert w.raw.read() == BYE
        assert w.raw.sock.recv(10) in (b"", b"\0")


async def test_bye_and_then_death_is_an_orderly_end(wired: Any) -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"h") + BYE)
        w.raw.sock.close()
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.headers == [b"h"]
        assert w.seen.ends == [None]


async def test_bye_while_much_is_queued(wired: Any) -> None:
    async with wired() as w:
        w.link.send(b"large", [memoryview(bytes(1 << 24))])
        w.raw.send(BYE)
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.ends == [None]


@pytest.mark.parametrize("after", [b"x", BYE, frames.encode(b"h")])
async def test_bytes_after_bye_break_the_protocol(after: bytes, wired: Any) -> None:
    async with wired() as w:
        w.raw.send(BYE + after)
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ProtocolError)


async def test_finish_sends_bye_last_and_takes_the_peers_end_for_the_end(wired: Any) -> None:
    async with wired() as w:
        w.link.send(b"h", [memoryview(b"p")])
        finishing = asyncio.ensure_future(w.link.finish(20.0))
        await asyncio.sleep(0)
        assert w.raw.read() == frames.encode(b"h", b"p") + BYE
        w.raw.send(frames.encode(b"late", b"but heard"))
        w.raw.bell()
        await w.until(lambda: bool(w.seen.frames))
        w.raw.sock.close()
        await finishing
        assert w.seen.ends == [None]
        assert w.seen.frames == [(b"late", b"but heard")]


async def test_finish_goes_on_sending_after_the_peers_bye(wired: Any, came: Any) -> None:
    payload = random.Random(2).randbytes(1 << 22)
    expected = frames.encode(b"h", payload) + BYE
    async with wired() as w:
        w.link.send(b"h", [memoryview(payload)])
        finishing = asyncio.ensure_future(w.link.finish(20.0))
        await asyncio.sleep(0)
        w.raw.send(BYE)
        assert await came(w, len(expected)) == expected
        await finishing
        assert w.seen.ends == [None]


async def test_finish_when_the_peer_dies_with_data_unsent(wired: Any, asleep: Any) -> None:
    for bye in (b"", BYE):
        async with wired() as w:
            w.link.send(b"large", [memoryview(bytes(1 << 24))])
            finishing = asyncio.ensure_future(w.link.finish(20.0))
            await asyncio.sleep(0)
            if bye:
                w.raw.send(bye)
                await asleep(w)
            w.raw.sock.close()
            await finishing
            assert isinstance(w.seen.ends[0], ConnectionResetError)


async def test_finish_gives_up_on_a_silent_peer(wired: Any) -> None:
    async with wired() as w:
        await w.link.finish(0.0)
        assert isinstance(w.seen.ends[0], TimeoutError)
        assert "raw did not end" in str(w.seen.ends[0])


async def test_closing_before_the_start() -> None:
    theirs, ours = socket.socketpair()
    memory = memoryview(bytearray(SEGMENT))
    link = ShmLink(asyncio.get_running_loop(), ours, memory, memory, peer_name="raw")
    assert "shm to raw open" in repr(link)
    assert link.max_header == link.max_payload == frames.MAX_HEADER_BEFORE_HELLO
    link.close()
    link.start()
    assert link.poll()
    assert theirs.recv(1) == b""
    theirs.close()


async def test_closing_in_a_forked_child_leaves_the_loop_and_the_memory_alone() -> None:
    theirs, ours = socket.socketpair()
    touched: list[str] = []

    class Loop:
        def __getattr__(self, name: str) -> Any:
            touched.append(name)
            raise AssertionError(name)

    ends = LinkPair()
    own = bytearray(SEGMENT)
    link = ShmLink(
        Loop(),
        ours,
        memoryview(own),
        memoryview(bytes(SEGMENT)),
        peer_name="raw",
        receiver=ends.at_a,
    )
    link.send(b"h")
    link._asleep = True
    before = bytes(own)
    link.close_in_child()
    link.close_in_child()
    link.send(b"h")
    link.close()
    assert not link.poll()
    assert link.is_closed
    assert theirs.recv(1) == b""
    theirs.close()
    assert not touched
    assert not ends.at_a.ends
    assert bytes(own) == before
