"""A stream link against a raw socket: chunking, garbage, every way to end."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.testing.links import LinkPair
from aiodist.transports.base import Link
from aiodist.transports.framed import BYE
from aiodist.transports.stream import ENOUGH, StreamLink
from aiodist.wire import frames


def over_loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


@asynccontextmanager
async def wired(tcp: bool = False, **limits: int) -> AsyncIterator[Any]:
    """`.link` over one end of a socket pair, `.raw` the other, `.seen` what the link brought."""
    raw, sock = over_loopback() if tcp else socket.socketpair()
    raw.setblocking(False)
    sock.setblocking(False)
    ends = LinkPair()
    link = StreamLink(
        asyncio.get_running_loop(), sock, kind="unix", peer_name="raw", receiver=ends.at_a
    )
    link.max_payload = limits.get("max_payload", 1 << 20)
    link.max_header = limits.get("max_header", frames.MAX_HEADER)
    link.start()
    try:
        yield SimpleNamespace(
            link=link, raw=raw, sock=sock, seen=ends.at_a, until=ends.until, ends=ends
        )
    finally:
        link.close()
        await ends.until(lambda: bool(ends.at_a.ends))
        raw.close()
    assert len(ends.at_a.ends) == 1
    assert not ends.at_a.mistakes


async def read(raw: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    async with asyncio.timeout(20):
        while len(data) < count:
            chunk = await loop.sock_recv(raw, count - len(data))
            if not chunk:
                break
            data += chunk
    return data


async def test_what_is_sent_is_frames() -> None:
    async with wired() as w:
        w.link.send(b"small", [memoryview(b"ab"), memoryview(b"c")])
        w.link.send(b"empty")
        w.link.send(b"large", [memoryview(bytes(9000))])
        expected = (
            frames.encode(b"small", b"abc")
            + frames.encode(b"empty")
            + frames.encode(b"large", bytes(9000))
        )
        assert await read(w.raw, len(expected)) == expected


async def test_one_byte_at_a_time() -> None:
    sent = [(b"a" * 5, b"payload"), (b"b", b""), (b"c" * 300, b"x" * 20)]
    async with wired() as w:
        for header, payload in sent:
            for byte in frames.encode(header, payload):
                w.raw.send(bytes([byte]))
                w.link.poll()
        assert w.seen.frames == sent


async def test_random_chunks() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        sent = [
            (rng.randbytes(rng.randrange(1, 400)), rng.randbytes(rng.choice((0, 9, 700, 40_000))))
            for _ in range(12)
        ]
        stream = b"".join(frames.encode(header, payload) for header, payload in sent)
        async with wired() as w:
            at = 0
            while at < len(stream):
                size = rng.choice((1, 3, 50, 511, 512, 513, 16384, 30_000))
                at += w.raw.send(stream[at : at + size])
                while w.link.poll():
                    pass
            assert w.seen.frames == sent, f"seed {seed}"


async def test_a_payload_longer_than_one_read() -> None:
    payload = random.Random(1).randbytes(1_000_000)
    stream = frames.encode(b"h", payload) + frames.encode(b"next", b"n")
    async with wired() as w:
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(w.raw, stream))
        await w.until(lambda: len(w.seen.frames) == 2)
        await sending
        assert w.seen.frames == [(b"h", payload), (b"next", b"n")]


@pytest.mark.parametrize("seed", range(40))
async def test_garbage_closes_with_protocol_error(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    good = frames.encode(b"header", b"payload")
    garbage = rng.randbytes(rng.randrange(4, 3000))
    if seed % 4 == 1:  # begins well
        garbage = good + garbage
    elif seed % 4 == 2:  # the right start, then random lengths
        garbage = b"\x92\xc5" + garbage
    elif seed % 4 == 3:  # one byte of a prefix is wrong
        wrong = bytearray(good)
        at = rng.choice((0, 1, 10))
        wrong[at] ^= rng.randrange(1, 256)
        garbage = bytes(wrong)
    async with wired(max_header=16, max_payload=64) as w:
        tracemalloc.start()
        try:
            w.raw.send(garbage)
            await w.until(lambda: bool(w.seen.ends))
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()
        assert isinstance(w.seen.ends[0], ProtocolError)
        assert len(w.seen.frames) == (1 if seed % 4 == 1 else 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_forged_length_allocates_nothing() -> None:
    async with wired(max_payload=1 << 32) as w:
        w.seen.on_frame = lambda header, nbytes: None
        tracemalloc.start()
        try:
            w.raw.send(frames.prefix(b"h", 0xFFFFFFFF))
            for _ in range(200):
                w.raw.send(bytes(65536))
                assert w.link.poll()
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()
        assert w.seen.headers == [b"h"]
        assert not w.seen.frames


async def test_end_of_file_without_bye_is_a_broken_connection() -> None:
    for before in (b"", frames.encode(b"h", b"p"), b"\x92", frames.prefix(b"h", 100) + b"x"):
        async with wired() as w:
            if before:
                w.raw.send(before)
            w.raw.close()
            await w.until(lambda: bool(w.seen.ends))
            assert isinstance(w.seen.ends[0], ConnectionResetError)
            assert "raw closed the connection" in str(w.seen.ends[0])


async def test_bye_closes_after_the_frames_before_it_and_is_answered() -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"h", b"p") + BYE)
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.frames == [(b"h", b"p")]
        assert w.seen.ends == [None]
        assert await read(w.raw, 100) == BYE


async def test_bye_while_much_is_queued() -> None:
    async with wired() as w:
        w.link.send(b"large", [memoryview(bytes(1 << 24))])
        w.raw.send(BYE)
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.ends == [None]


@pytest.mark.parametrize("after", [b"x", BYE, frames.encode(b"h")])
async def test_bytes_after_bye_break_the_protocol(after: bytes) -> None:
    async with wired() as w:
        w.raw.send(BYE + after)
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ProtocolError)


async def test_a_bye_with_payload_breaks_the_protocol() -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"", b"x"))
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ProtocolError)


async def test_finish_sends_bye_last_and_takes_end_of_file_for_the_end() -> None:
    async with wired() as w:
        w.link.send(b"h", [memoryview(b"p")])
        finishing = asyncio.ensure_future(w.link.finish(20.0))
        assert await read(w.raw, 100) == frames.encode(b"h", b"p") + BYE  # and end of file
        w.raw.send(frames.encode(b"late", b"but heard"))
        await w.until(lambda: bool(w.seen.frames))
        w.raw.close()
        await finishing
        assert w.seen.ends == [None]
        assert w.seen.frames == [(b"late", b"but heard")]


async def test_finish_goes_on_sending_after_the_peers_bye() -> None:
    payload = random.Random(2).randbytes(1 << 22)
    async with wired() as w:
        w.link.send(b"h", [memoryview(payload)])
        finishing = asyncio.ensure_future(w.link.finish(20.0))
        w.raw.send(BYE)
        expected = frames.encode(b"h", payload) + BYE
        assert await read(w.raw, len(expected)) == expected
        await finishing
        assert w.seen.ends == [None]


async def test_finish_gives_up_on_a_silent_peer() -> None:
    async with wired() as w:
        await w.link.finish(0.0)
        assert isinstance(w.seen.ends[0], TimeoutError)
        assert "raw did not end" in str(w.seen.ends[0])


async def test_finish_when_the_peer_dies_with_data_unsent() -> None:
    async with wired() as w:
        w.link.send(b"large", [memoryview(bytes(1 << 24))])
        finishing = asyncio.ensure_future(w.link.finish(20.0))
        await asyncio.sleep(0)
        w.raw.close()
        await finishing
        assert isinstance(w.seen.ends[0], OSError)


async def test_what_a_dead_peer_sent_is_still_received() -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"last words", b"!"))
        w.raw.close()
        w.link.send(b"to the dead")  # fails, here
        assert not w.link.is_closed
        w.link.send(b"and again")
        assert w.link.backlog == 0
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.frames == [(b"last words", b"!")]
        assert isinstance(w.seen.ends[0], BrokenPipeError)


async def test_broken_while_much_is_queued() -> None:
    async with wired() as w:
        calls: list[object] = []
        w.link.send(b"large", [memoryview(bytes(1 << 24))], done=w.ends.done(calls, 1))
        w.raw.send(frames.encode(b"last words"))
        w.raw.close()
        w.link.poll()
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.headers == [b"last words"]
        assert isinstance(w.seen.ends[0], OSError)
        assert not calls


async def test_urgent_goes_right_behind_the_frame_under_way() -> None:
    large = bytes(1 << 22)
    async with wired() as w:
        for name in (b"1", b"2"):
            w.link.send(name, [memoryview(large)])
        w.link.send(b"!", urgent=True)
        expected = frames.encode(b"1", large) + frames.encode(b"!") + frames.encode(b"2", large)
        assert await read(w.raw, len(expected)) == expected


async def test_memory_that_is_changed_after_the_first_bytes() -> None:
    async with wired() as w:
        w.raw.send(frames.prefix(b"h", 100) + b"x" * 10)
        w.link.poll()
        new = bytearray(100)
        w.seen.landing.memory = memoryview(new)
        w.raw.send(b"y" * 90)
        w.link.poll()
        assert bytes(new) == bytes(10) + b"y" * 90
        assert len(w.seen.frames) == 1


async def test_a_skipped_rest_with_the_prefix_of_the_next_frame_behind() -> None:
    async with wired() as w:
        w.raw.send(frames.prefix(b"h", 100_000) + b"x" * 50_000)
        while w.link.poll():
            pass
        w.seen.landing.memory = None
        w.raw.send(b"y" * 50_000 + frames.encode(b"next", b"n")[:7])
        while w.link.poll():
            pass
        w.raw.send(frames.encode(b"next", b"n")[7:])
        w.link.poll()
        assert w.seen.frames == [(b"next", b"n")]
        assert w.link.received_bytes == 100_001


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_landing_outlives_the_connection(is_wanted: bool) -> None:
    """The rest of a payload comes over another one: from its start, to where it is wanted by then,
    or nowhere."""
    async with wired() as first, wired() as second:
        old, new = first.link, second.link
        old.keep(lambda link, error: None)
        new.keep(lambda link, error: None)
        first.raw.send(frames.encode(b"h", b"x" * 100)[:60])
        old.poll()
        assert not first.seen.frames
        landing = first.seen.landing
        before = landing.memory
        old.sever()
        memory = bytearray(100)
        landing.memory = memoryview(memory) if is_wanted else None
        held = bytes(before)
        new.receiver = first.seen
        new.adopt(old, 0)
        second.raw.send(frames.encode(b"h", b"y" * 100) + frames.encode(b"next", b"n"))
        new.poll()
        assert first.seen.headers == [b"h", b"next"], "its header was given away again"
        assert first.seen.frames[-1:] == [(b"next", b"n")]
        assert len(first.seen.frames) == 1 + is_wanted
        assert bytes(memory) == (b"y" if is_wanted else b"\0") * 100
        assert bytes(before) == held
        new.receiver = second.seen
        first.seen.ends.append(None)  # of the old link nobody is told any more


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not wait for more")
async def test_the_loop_is_woken_for_much_of_a_payload_and_never_waits_for_what_is_behind_it() -> (
    None
):
    async with wired(tcp=True) as w:

        async def until_woken_for(nbytes: int) -> None:
            # The kernel tells nobody.
            while w.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != nbytes:  # noqa: ASYNC110
                await asyncio.sleep(0)

        loop = asyncio.get_running_loop()
        payload = random.Random(1).randbytes(1 << 20)
        data = frames.encode(b"much", payload)
        begun = ENOUGH + 20_000
        await loop.sock_sendall(w.raw, data[:begun])
        await until_woken_for(ENOUGH)
        await loop.sock_sendall(w.raw, data[begun:-100])
        await until_woken_for(100)
        await loop.sock_sendall(w.raw, data[-100:])
        await w.until(lambda: w.seen.frames == [(b"much", payload)])
        await until_woken_for(1)
        await loop.sock_sendall(w.raw, frames.encode(b"little", b"x"))
        await w.until(lambda: len(w.seen.frames) == 2)
        # What breaks amid a payload is seen, however little has come.
        await loop.sock_sendall(w.raw, data[:50_000])
        await until_woken_for(ENOUGH)
        w.raw.close()
        await w.until(lambda: bool(w.seen.ends))


async def test_the_loop_gets_its_turn_while_much_arrives() -> None:
    loop = asyncio.get_running_loop()
    async with wired() as w:
        block = bytes(1 << 20)
        stream = frames.encode(b"h", block) * 16
        sending = asyncio.ensure_future(loop.sock_sendall(w.raw, stream))
        turns = 0
        largest = last = 0
        while len(w.seen.frames) < 16:
            await asyncio.sleep(0)
            turns += 1
            largest = max(largest, w.link.received_bytes - last)
            last = w.link.received_bytes
        await sending
        assert largest <= 2 << 20


async def test_closing_in_a_forked_child_leaves_the_loop_alone() -> None:
    raw, sock = socket.socketpair()
    touched: list[str] = []

    class Loop:
        def __getattr__(self, name: str) -> Any:
            touched.append(name)
            raise AssertionError(name)

    ends = LinkPair()
    link = StreamLink(
        Loop(),
        sock,
        kind="unix",
        peer_name="raw",
        receiver=ends.at_a,
    )
    link.close_in_child()
    link.close_in_child()
    link.send(b"h")
    link.close()
    assert not link.poll()
    assert link.is_closed
    assert raw.recv(1) == b""
    raw.close()
    assert not touched
    assert not ends.at_a.ends


async def test_nobody_receives_on_a_link_without_receiver() -> None:
    raw, sock = socket.socketpair()
    sock.setblocking(False)
    link = StreamLink(asyncio.get_running_loop(), sock, kind="unix", peer_name="raw")
    link.start()
    raw.send(frames.encode(b"h"))
    assert link.poll()
    assert link.is_closed
    raw.close()


async def test_limits_before_hello_are_small() -> None:
    raw, sock = socket.socketpair()
    sock.setblocking(False)
    link = StreamLink(asyncio.get_running_loop(), sock, kind="unix", peer_name="raw")
    assert link.max_header == link.max_payload == frames.MAX_HEADER_BEFORE_HELLO
    assert "unix to raw open" in repr(link)
    link.close()
    raw.close()


async def test_an_error_in_closed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Careless:
        def frame(self, link: Link, header: bytes, nbytes: int) -> None:
            return None

        def closed(self, link: Link, error: BaseException | None) -> None:
            raise LookupError("a mistake")

    raw, sock = socket.socketpair()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    link = StreamLink(loop, sock, kind="unix", peer_name="raw", receiver=Careless())
    link.close()
    await link.finish(20.0)
    assert "failed in closed()" in caplog.text
    raw.close()


PREFIX = frames.prefix(b"expected", 3)


def found(w: Any, into: memoryview, prefix: bytes = PREFIX) -> bool:
    """Look until something has come, which has been sent."""
    while (answer := w.link.look_for(prefix, into)) is None:
        pass
    return bool(answer)


async def test_looking_for_a_frame() -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        assert w.link.look_for(PREFIX, into) is None
        w.raw.send(PREFIX + b"abc")
        assert found(w, into)
        assert bytes(into) == b"abc"
        assert w.link.received_bytes == 3
        assert not w.seen.headers


@pytest.mark.parametrize("cut", range(len(PREFIX), len(PREFIX) + 3))
async def test_the_frame_comes_in_two_parts(cut: int) -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        data = PREFIX + b"abc" + frames.encode(b"next", b"x")
        w.raw.send(data[:cut])
        assert w.link.look_for(PREFIX, into) is None
        w.raw.send(data[cut:])
        assert found(w, into)
        assert bytes(into) == b"abc"
        assert w.seen.frames == [(b"next", b"x")]


@pytest.mark.parametrize("cut", [1, 5, len(PREFIX), len(PREFIX) + 1])
async def test_a_part_that_was_looked_at_is_not_lost(cut: int) -> None:
    async with wired() as w:
        data = PREFIX + b"abc"
        w.raw.send(data[:cut])
        w.link.look_for(PREFIX, memoryview(bytearray(3)))
        w.raw.send(data[cut:])
        await w.until(lambda: w.seen.frames == [(b"expected", b"abc")])


async def test_something_else_comes_first() -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        for other in (b"unexpected", b"expecteD"):
            w.raw.send(frames.encode(other, b"xyz") + PREFIX + b"abc")
            assert not found(w, into)
            assert w.seen.frames[-2:] == [(other, b"xyz"), (b"expected", b"abc")]
        assert bytes(into) == bytes(3)


async def test_a_payload_under_way_is_not_disturbed() -> None:
    async with wired() as w:
        large = frames.encode(b"large", bytes(100_000))
        w.raw.send(large[:50_000])
        await w.until(lambda: w.seen.headers == [b"large"])
        assert not w.link.is_clear
        assert w.link.look_for(PREFIX, memoryview(bytearray(3))) is False
        await asyncio.get_running_loop().sock_sendall(w.raw, large[50_000:])
        await w.until(lambda: len(w.seen.frames) == 1)


async def test_a_frame_larger_than_the_scratch_is_found() -> None:
    async with wired() as w:
        payload = bytes(range(250)) * 250
        prefix = frames.prefix(b"large", len(payload))
        into = memoryview(bytearray(len(payload)))
        w.raw.send(prefix + payload)
        assert found(w, into, prefix)
        assert into == payload


@pytest.mark.parametrize("before", [b"", PREFIX, frames.encode(b"other")])
async def test_the_end_comes_while_looking(before: bytes) -> None:
    async with wired() as w:
        w.raw.send(before)
        w.raw.close()
        into = memoryview(bytearray(3))
        while w.link.look_for(PREFIX, into) is not False or not w.link.is_closed:
            pass
        (error,) = w.seen.ends
        assert isinstance(error, ConnectionResetError)


async def test_garbage_comes_while_looking(caplog: pytest.LogCaptureFixture) -> None:
    async with wired() as w:
        w.raw.send(b"GET / HTTP/1.1\r\n\r\n")
        assert not found(w, memoryview(bytearray(3)))
        assert isinstance(w.seen.ends[0], ProtocolError)


async def test_a_copy_is_sent_of_what_is_altered_at_once() -> None:
    async with wired() as w:
        payload = bytearray(50_000)
        expected = b""
        assert w.link.is_clear
        while not w.link.backlog:
            expected += frames.encode(b"h", bytes(payload))
            w.link.send_copy(frames.prefix(b"h", len(payload)), memoryview(payload))
            payload[:] = bytes([payload[0] + 1]) * len(payload)
        assert not w.link.is_clear
        expected += frames.encode(b"h", bytes(payload))
        w.link.send_copy(frames.prefix(b"h", len(payload)), memoryview(payload))
        payload[:] = bytes(len(payload))
        assert await read(w.raw, len(expected)) == expected
        await w.until(lambda: w.link.is_clear)
        assert w.link.sent_bytes == len(expected) - len(frames.prefix(b"h", 0)) * (
            len(expected) // 50_000
        )


async def test_a_copy_to_nobody() -> None:
    async with wired() as w:
        w.raw.close()
        for _ in range(3):
            w.link.send_copy(PREFIX, memoryview(b"abc"))
        await w.until(lambda: bool(w.seen.ends))
        w.link.send_copy(PREFIX, memoryview(b"abc"))
        assert not w.link.backlog
