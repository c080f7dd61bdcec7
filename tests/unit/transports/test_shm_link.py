"""A shared-memory link against raw rings and a raw socket: chunking, garbage, bells, every end."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.testing.links import Ends
from aiodist.transports import shm_link, shm_rings
from aiodist.transports.framed import BYE
from aiodist.transports.shm_link import ShmLink
from aiodist.transports.shm_rings import PAGE, RING, SEGMENT, Rings
from aiodist.wire import frames


class Raw:
    """The other end: rings without a link, and a socket."""

    def __init__(self, own: bytearray, peer: bytearray, sock: socket.socket) -> None:
        self.words = memoryview(own)[:PAGE].cast("Q")
        self.theirs = memoryview(peer)[:PAGE].cast("Q")
        self.rings = Rings(memoryview(own), memoryview(peer), self.bell)
        self.sock = sock

    def bell(self) -> None:
        self.sock.send(b"\0")

    def send(self, data: bytes) -> None:
        """Write what there is room for."""
        assert self.rings.write([data]) == len(data)

    def read(self) -> bytes:
        data = b""
        while have := self.rings.available():
            start = (self.rings.read - self.rings.origin) % RING
            count = min(have, RING - start)
            data += self.rings.incoming[start : start + count]
            self.rings.taken(count)
        return data

    def bells(self) -> int:
        """How many bells came since the last call."""
        try:
            return len(self.sock.recv(1000))
        except BlockingIOError:
            return 0

    @property
    def peer_sleeps(self) -> bool:
        return self.theirs[shm_rings._ASLEEP] != 0


@asynccontextmanager
async def wired(**limits: int) -> AsyncIterator[Any]:
    """`.link`, `.raw` the other end, `.seen` what the link brought."""
    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    own, peer = bytearray(SEGMENT), bytearray(SEGMENT)
    ends = Ends()
    link = ShmLink(
        asyncio.get_running_loop(),
        ours,
        memoryview(own),
        memoryview(peer).toreadonly(),
        peer_name="raw",
        receiver=ends.at_a,
    )
    link.max_payload = limits.get("max_payload", 1 << 26)
    link.max_header = limits.get("max_header", frames.MAX_HEADER)
    link.start()
    raw = Raw(peer, own, theirs)
    try:
        yield SimpleNamespace(link=link, raw=raw, seen=ends.at_a, until=ends.until, ends=ends)
    finally:
        link.close()
        await ends.until(lambda: bool(ends.at_a.ends))
        theirs.close()
    assert len(ends.at_a.ends) == 1
    assert not ends.at_a.mistakes


async def asleep(w: Any, after: int = 0) -> int:
    """Let the loop turn until the link sleeps, after its `after`-th sleep: which sleep it is."""
    for _ in range(10_000):
        sleep: int = w.raw.theirs[shm_rings._ASLEEP]
        if sleep > after:
            return sleep
        await asyncio.sleep(0)
    raise AssertionError("the link does not sleep")


async def came(w: Any, count: int) -> bytes:
    """Read at the other end until `count` bytes have come."""
    data = bytearray()
    for _ in range(10_000):
        data += w.raw.read()
        if len(data) >= count:
            return bytes(data)
        await asyncio.sleep(0)
    raise AssertionError(f"{len(data)} bytes came, not {count}")


# ---- frames ----


async def test_what_is_sent_is_frames() -> None:
    async with wired() as w:
        w.link.send(b"small", [memoryview(b"ab"), memoryview(b"c")])
        w.link.send(b"empty")
        w.link.send(b"large", [memoryview(bytes(9000))])
        assert w.raw.read() == (
            frames.encode(b"small", b"abc")
            + frames.encode(b"empty")
            + frames.encode(b"large", bytes(9000))
        )


async def test_one_byte_at_a_time() -> None:
    sent = [(b"a" * 5, b"payload"), (b"b", b""), (b"c" * 300, b"x" * 20)]
    async with wired() as w:
        for header, payload in sent:
            for byte in frames.encode(header, payload):
                w.raw.send(bytes([byte]))
                w.link.poll()
        assert w.seen.frames == sent


async def test_frames_anywhere_around_the_end_of_the_ring() -> None:
    frame = frames.encode(b"header" * 50, b"payload" * 30)
    async with wired() as w:
        for before in range(0, len(frame) + 20, 7):
            # Fill up to `before` bytes in front of the end, keeping the ring from being rewound.
            offset = (w.raw.rings._written - w.raw.rings._origin) % RING
            gap = RING - offset - before - frames.OVERHEAD - 1
            w.raw.send(frames.prefix(b"f", gap))
            for _ in range(gap // 100_000):
                w.raw.send(bytes(100_000))
                w.link.poll()
            w.raw.send(bytes(gap % 100_000) + frame[:5])
            w.link.poll()
            w.raw.send(frame[5:] + frame)
            while w.link.poll():
                pass
            assert w.seen.headers[-2:] == [b"header" * 50] * 2
            assert w.seen.frames[-1] == w.seen.frames[-2] == (b"header" * 50, b"payload" * 30)


async def test_random_chunks() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        sent = [
            (
                rng.randbytes(rng.choice((1, 50, 400, frames.MAX_HEADER))),
                rng.randbytes(rng.choice((0, 9, 700, 40_000, 300_000))),
            )
            for _ in range(40)
        ]
        stream = b"".join(frames.encode(header, payload) for header, payload in sent)
        async with wired() as w:
            at = 0
            while at < len(stream):
                size = rng.choice((1, 3, 50, 511, 16384, 65536, RING))
                if w.raw.rings.room():
                    at += w.raw.rings.write([stream[at : at + size]])
                if rng.random() < 0.8:
                    w.link.poll()
            while w.link.poll():
                pass
            assert w.seen.frames == sent, f"seed {seed}"


async def test_a_poll_while_a_payload_comes_in() -> None:
    payload = random.Random(1).randbytes(3 * RING)
    stream = frames.encode(b"h", payload) + frames.encode(b"next", b"n")
    async with wired() as w:
        at = 0
        while at < len(stream):
            at += w.raw.rings.write([stream[at:]])
            assert w.link.poll()
        assert w.seen.frames == [(b"h", payload), (b"next", b"n")]


# ---- a peer that breaks the protocol ----


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
        w.raw.send(garbage)
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ProtocolError)
        assert len(w.seen.frames) == (1 if seed % 4 == 1 else 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("word", [shm_rings._WRITTEN, shm_rings._ORIGIN])
async def test_nonsense_about_what_was_written_closes(
    word: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with wired() as w:
        await asleep(w)
        w.raw.words[word] = 1 << 62
        w.raw.send(b"x") if word == shm_rings._ORIGIN else w.raw.bell()
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ProtocolError)
    assert "closing the link to raw: the peer" in caplog.text


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("size", [1, 10_000])
async def test_nonsense_about_what_was_read_closes(
    queued: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with wired() as w:
        large = memoryview(bytes(2 * RING if queued else RING - 100))
        w.link.send(b"h", [large])
        w.raw.words[shm_rings._READ] = 1 << 62
        w.link.send(b"h", [memoryview(bytes(size))] * 100)
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ProtocolError)
        assert w.link.backlog == 0
    assert "has read 4611686018427387904 bytes" in caplog.text


async def test_a_forged_length_allocates_nothing() -> None:
    async with wired(max_payload=1 << 32) as w:
        w.seen.on_frame = lambda header, nbytes: None
        tracemalloc.start()
        try:
            w.raw.send(frames.prefix(b"h", 0xFFFFFFFF))
            block = bytes(65536)
            for _ in range(200):
                w.raw.send(block)
                assert w.link.poll()
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()
        assert w.seen.headers == [b"h"]
        assert not w.seen.frames


# ---- sleep and bells ----


async def test_an_idle_link_sleeps_and_a_bell_wakes_it() -> None:
    async with wired() as w:
        sleep = 0
        for n in range(3):
            sleep = await asleep(w, after=sleep)
            w.raw.send(frames.encode(b"%d" % n))
        await asleep(w, after=sleep)
        assert w.seen.headers == [b"0", b"1", b"2"]


async def test_a_link_that_is_polled_needs_no_bell() -> None:
    async with wired() as w:
        await asleep(w)
        w.link.poll()
        assert not w.raw.peer_sleeps
        for _ in range(5):
            w.raw.send(frames.encode(b"h"))
            w.link.poll()
            w.link.send(b"answer")
        assert len(w.seen.headers) == 5
        with pytest.raises(BlockingIOError):
            w.link._socket.recv(1)
        assert w.raw.bells() == 0


async def test_a_sleeping_peer_gets_one_bell() -> None:
    async with wired() as w:
        for _ in range(2):
            assert w.raw.rings.sleep(for_room=False)
            for _ in range(5):
                w.link.send(b"h")
            assert w.raw.bells() == 1
            w.raw.rings.wake()
            w.raw.read()


async def test_a_peer_that_does_not_hear_bells_blocks_nobody() -> None:
    async with wired() as w:
        sent = 0
        while sent < 100_000:  # more than the socket holds
            w.raw.words[shm_rings._ASLEEP] += 1
            w.link.send(b"h")
            w.raw.read()
            sent += 1
        assert w.link.backlog == 0


async def test_half_a_prefix_does_not_keep_a_link_awake() -> None:
    async with wired() as w:
        sleep = await asleep(w)
        frame = frames.encode(b"header", b"payload")
        w.raw.send(frame[:3])
        await asleep(w, after=sleep)
        assert not w.seen.headers
        w.raw.send(frame[3:])
        await w.until(lambda: bool(w.seen.frames))
        assert w.seen.frames == [(b"header", b"payload")]


async def test_a_link_stays_awake_for_a_while_after_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that comes soon needs no bell; one that does not come costs nothing for long."""
    now = 100.0
    monkeypatch.setattr(shm_link.time, "perf_counter", lambda: now)
    async with wired() as w:
        for moved in (lambda: w.raw.send(frames.encode(b"in")), lambda: w.link.send(b"out")):
            now += 1.0
            sleep = await asleep(w)
            w.link.poll()  # awake
            moved()
            for _ in range(20):
                await asyncio.sleep(0)
                assert not w.raw.peer_sleeps
            now += shm_link.LINGER
            assert await asleep(w, after=sleep) > sleep
        w.raw.bells()


# ---- looking for one frame ----

PREFIX = frames.prefix(b"expected", 5) + b"me"  # and the first bytes of its payload


async def test_looking_for_a_frame() -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        assert w.link.look_for(PREFIX, into) is None
        w.raw.send(PREFIX + b"abc" + frames.encode(b"next", b"x"))
        assert w.link.look_for(PREFIX, into) is True
        assert bytes(into) == b"abc"
        assert not w.seen.headers
        assert w.link.poll()
        assert w.seen.frames == [(b"next", b"x")]


@pytest.mark.parametrize("cut", range(1, len(PREFIX) + 3))
async def test_the_frame_looked_for_comes_in_two_parts(cut: int) -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        data = PREFIX + b"abc"
        w.raw.send(data[:cut])
        first = w.link.look_for(PREFIX, into)
        w.raw.send(data[cut:])
        if cut < len(PREFIX):  # no telling yet what it is
            assert first is False
            w.link.poll()
            assert w.seen.frames == [(b"expected", b"meabc")]
        else:
            assert first is None
            assert w.link.look_for(PREFIX, into) is True
            assert bytes(into) == b"abc"


async def test_what_has_no_payload_is_passed_by_alone() -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        w.raw.send(frames.encode(b"one") + frames.encode(b"two") + PREFIX + b"abc")
        answers = [w.link.look_for(PREFIX, into) for _ in range(3)]
        assert answers == [False, False, True]
        assert w.seen.frames == [(b"one", b""), (b"two", b"")]
        assert bytes(into) == b"abc"


async def test_another_frame_comes_first() -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        for other in (b"unexpected", b"expecteD"):
            w.raw.send(frames.encode(other, b"meabc") + PREFIX + b"abc")
            assert w.link.look_for(PREFIX, into) is False
            assert w.seen.frames[-2:] == [(other, b"meabc"), (b"expected", b"meabc")]
        assert bytes(into) == bytes(3)


async def test_the_frame_looked_for_lies_around_the_end_of_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rings, "rewind", lambda self: None)  # never back to the start
    async with wired() as w:
        into = memoryview(bytearray(1000))
        prefix = frames.prefix(b"expected", 1000)
        found = 0
        for number in range(3 * RING // 1000):
            payload = bytes([number % 256]) * 1000
            w.raw.send(prefix + payload)
            if w.link.look_for(prefix, into):
                found += 1
                assert into == payload
            else:
                assert w.seen.frames[-1] == (b"expected", payload)
        assert len(w.seen.frames) in (2, 3)
        assert found + len(w.seen.frames) == 3 * RING // 1000


async def test_looking_while_a_payload_is_under_way() -> None:
    async with wired() as w:
        large = frames.encode(b"large", bytes(100_000))
        w.raw.send(large[:50_000])
        w.link.poll()
        assert not w.link.is_clear
        assert w.link.look_for(PREFIX, memoryview(bytearray(3))) is False
        w.raw.send(large[50_000:])
        w.link.poll()
        assert len(w.seen.frames) == 1


@pytest.mark.parametrize("what", ["garbage", "words"])
async def test_garbage_comes_while_looking(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async with wired() as w:
        if what == "garbage":
            w.raw.send(b"garbage, more of it than a prefix has")
        else:
            w.raw.words[shm_rings._WRITTEN] = 1 << 40
        assert w.link.look_for(PREFIX, memoryview(bytearray(3))) is False
        assert w.link.is_closed
        assert w.link.look_for(PREFIX, memoryview(bytearray(3))) is False
        (error,) = w.seen.ends
        assert isinstance(error, ProtocolError)


async def test_a_frame_is_posted_whole_or_not_at_all() -> None:
    async with wired() as w:
        data = bytearray(b"abc")
        assert w.link.post(PREFIX, memoryview(data), 5)
        data[:] = b"xyz"
        assert w.raw.read() == PREFIX + b"abc"
        assert w.link.sent_bytes == 5
        large = memoryview(bytearray(RING - 10))
        head = frames.prefix(b"h", len(large))
        assert w.link.post(head, large, len(large))  # the last bytes of it wait
        large[:] = b"x" * len(large)
        assert w.link.backlog
        assert not w.link.post(PREFIX, memoryview(data), 5)
        assert w.link.sent_bytes == 5
        came_now = await came(w, len(head) + len(large))
        assert came_now == head + bytes(len(large))
        assert w.link.sent_bytes == 5 + len(large)
        w.raw.bells()


# ---- room ----


async def test_a_full_ring_waits_for_a_bell() -> None:
    payload = random.Random(3).randbytes(2 * RING)
    gone: list[object] = []
    async with wired() as w:
        w.link.send(b"h", [memoryview(payload)], done=w.ends.done(gone, 1))
        assert w.link.backlog > RING - 100
        await asleep(w)
        expected = frames.encode(b"h", payload)
        assert await came(w, len(expected)) == expected
        await w.until(lambda: bool(gone))


async def test_polling_sends_what_is_queued() -> None:
    payload = random.Random(3).randbytes(3 * RING)
    async with wired() as w:
        w.link.send(b"h", [memoryview(payload)])
        assert not w.link.poll()
        data = b""
        while w.link.backlog:
            data += w.raw.read()
            assert w.link.poll()
        assert data + w.raw.read() == frames.encode(b"h", payload)


async def test_the_loop_gets_its_turn_while_much_arrives() -> None:
    async with wired() as w:
        stream = frames.encode(b"h", bytes(1 << 20)) * 16
        at = largest = last = 0
        async with asyncio.timeout(20):
            while len(w.seen.frames) < 16:
                if w.raw.rings.room():
                    at += w.raw.rings.write([stream[at : at + RING]])
                await asyncio.sleep(0)
                largest = max(largest, w.link.received_bytes - last)
                last = w.link.received_bytes
        assert largest <= 2 << 20


# ---- ends ----


async def test_what_a_dead_peer_sent_is_still_received() -> None:
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


async def test_a_peer_that_dies_with_bells_unheard() -> None:
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
async def test_the_end_amid_a_frame_is_a_broken_connection(before: bytes) -> None:
    async with wired() as w:
        if before:
            w.raw.send(before)
        w.raw.sock.close()
        await w.until(lambda: bool(w.seen.ends))
        assert isinstance(w.seen.ends[0], ConnectionResetError)
        assert not w.seen.frames


async def test_bye_closes_after_the_frames_before_it_and_is_answered() -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"h", b"p") + BYE)
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.frames == [(b"h", b"p")]
        assert w.seen.ends == [None]
        assert w.raw.read() == BYE
        assert w.raw.sock.recv(10) in (b"", b"\0")


async def test_bye_and_then_death_is_an_orderly_end() -> None:
    async with wired() as w:
        w.raw.send(frames.encode(b"h") + BYE)
        w.raw.sock.close()
        await w.until(lambda: bool(w.seen.ends))
        assert w.seen.headers == [b"h"]
        assert w.seen.ends == [None]


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


async def test_finish_sends_bye_last_and_takes_the_peers_end_for_the_end() -> None:
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


async def test_finish_goes_on_sending_after_the_peers_bye() -> None:
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


async def test_finish_when_the_peer_dies_with_data_unsent() -> None:
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


async def test_finish_gives_up_on_a_silent_peer() -> None:
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

    ends = Ends()
    own = bytearray(SEGMENT)
    link = ShmLink(
        Loop(),  # type: ignore[arg-type]
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
