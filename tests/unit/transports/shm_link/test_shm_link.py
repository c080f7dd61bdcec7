"""A shared-memory link: frames in any pieces, garbage, room."""

from __future__ import annotations

import asyncio
import logging
import random
import tracemalloc
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.transports import shm_rings
from aiodist.transports.link import POLL_BUDGET
from aiodist.transports.shm_rings import RING
from aiodist.wire import frames

# ---- frames ----


async def test_what_is_sent_is_frames(wired: Any) -> None:
    async with wired() as w:
        w.link.send(b"small", [memoryview(b"ab"), memoryview(b"c")])
        w.link.send(b"empty")
        w.link.send(b"large", [memoryview(bytes(9000))])
        assert w.raw.read() == (
            frames.encode(b"small", b"abc")
            + frames.encode(b"empty")
            + frames.encode(b"large", bytes(9000))
        )


async def test_one_byte_at_a_time(wired: Any) -> None:
    sent = [(b"a" * 5, b"payload"), (b"b", b""), (b"c" * 300, b"x" * 20)]
    async with wired() as w:
        for header, payload in sent:
            for byte in frames.encode(header, payload):
                w.raw.send(bytes([byte]))
                w.link.poll()
        assert w.seen.frames == sent


async def test_frames_anywhere_around_the_end_of_the_ring(wired: Any) -> None:
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


async def test_random_chunks(wired: Any) -> None:
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


async def test_a_poll_while_a_payload_comes_in(wired: Any) -> None:
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
    seed: int, caplog: pytest.LogCaptureFixture, wired: Any
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
    word: int, caplog: pytest.LogCaptureFixture, wired: Any, asleep: Any
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
    queued: bool, size: int, caplog: pytest.LogCaptureFixture, wired: Any
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


async def test_a_forged_length_allocates_nothing(wired: Any) -> None:
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


# ---- room ----


async def test_a_full_ring_waits_for_a_bell(wired: Any, asleep: Any, came: Any) -> None:
    payload = random.Random(3).randbytes(2 * RING)
    gone: list[object] = []
    async with wired() as w:
        w.link.send(b"h", [memoryview(payload)], done=w.ends.done(gone, 1))
        assert w.link.backlog > RING - 100
        await asleep(w)
        expected = frames.encode(b"h", payload)
        assert await came(w, len(expected)) == expected
        await w.until(lambda: bool(gone))


async def test_polling_sends_what_is_queued(wired: Any) -> None:
    payload = random.Random(3).randbytes(3 * RING)
    async with wired() as w:
        w.link.send(b"h", [memoryview(payload)])
        assert not w.link.poll()
        data = b""
        while w.link.backlog:
            data += w.raw.read()
            assert w.link.poll()
        assert data + w.raw.read() == frames.encode(b"h", payload)


async def test_the_loop_gets_its_turn_while_much_arrives(wired: Any) -> None:
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


async def test_a_turn_takes_more_of_a_large_payload_that_comes_at_the_same_time(
    wired: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that writes while this side reads is not left alone for each MiB."""
    async with wired() as w:
        data = memoryview(frames.encode(b"h", bytes(6 * POLL_BUDGET)))

        def write() -> None:
            nonlocal data
            data = data[w.raw.rings.write([data]) :]

        rings = w.link._rings
        taken = rings.taken

        def refill(count: int) -> None:
            taken(count)
            if data and w.raw.rings.room():
                write()

        monkeypatch.setattr(rings.__class__, "taken", lambda rings, count: refill(count))
        write()
        assert w.link.poll()
        assert 3 * POLL_BUDGET < rings.read <= 5 * POLL_BUDGET
        while not w.seen.frames:
            w.link.poll()
        assert len(w.seen.frames[0][1]) == 6 * POLL_BUDGET
