"""A shared-memory link: sleep and bells, and looking for one frame."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.transports import polling, shm_link, shm_rings
from aiodist.transports.shm_rings import RING, Rings
from aiodist.wire import frames

# ---- sleep and bells ----


async def test_an_idle_link_sleeps_and_a_bell_wakes_it(wired: Any, asleep: Any) -> None:
    async with wired() as w:
        sleep = 0
        for n in range(3):
            sleep = await asleep(w, after=sleep)
            w.raw.send(frames.encode(b"%d" % n))
        await asleep(w, after=sleep)
        assert w.seen.headers == [b"0", b"1", b"2"]


async def test_a_link_that_leaves_what_came_to_a_call_reads_it_before_it_sleeps(
    wired: Any, asleep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_link, "LINGER", 0.0)
    async with wired() as w:
        sleep = await asleep(w)
        w.raw.send(b"".join(frames.encode(b"%d" % n) for n in range(20)))
        for _ in range(10_000):
            if w.seen.headers:
                break
            await asyncio.sleep(0)
        assert 0 < len(w.seen.headers) < 20  # the link has seen that there are more
        w.link.send(b"answer")
        w.link.leave_to_call()
        await asleep(w, after=sleep)
        assert len(w.seen.headers) == 20


async def test_a_turn_of_the_loop_is_the_sign_that_a_knock_asks_for(
    wired: Any, asleep: Any
) -> None:
    async with wired() as w:
        await asleep(w)
        before = w.raw.rings.turns
        w.raw.rings.knock()
        assert w.raw.rings.turns == before  # its program computes
        for _ in range(10):
            await asyncio.sleep(0)
        assert w.raw.rings.turns > before
        w.link.knock()
        assert not w.link.answers()
        w.raw.rings.turned()
        assert w.link.answers() and w.link.answers()
        w.link.knock()
        assert not w.link.answers()
        w.raw.rings.turned()
        w.link.close()
        w.link.knock()
        assert not w.link.answers()


async def test_a_link_that_is_polled_needs_no_bell(wired: Any, asleep: Any) -> None:
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


async def test_a_turn_of_the_loop_takes_few_frames_and_a_poll_takes_all(wired: Any) -> None:
    """A receive takes those that are left in the ring without the loop."""
    async with wired() as w:
        for number in range(5 * shm_link.BRIEF):
            w.raw.send(frames.encode(b"%d" % number, b"x" * (number % 3)))
        counts = [0]
        while counts[-1] < 3 * shm_link.BRIEF:
            await asyncio.sleep(0)
            counts.append(len(w.seen.headers))
        steps = [now - before for before, now in itertools.pairwise(counts)]
        assert max(steps) <= shm_link.BRIEF
        w.link.poll()
        assert w.seen.headers == [b"%d" % number for number in range(5 * shm_link.BRIEF)]


async def test_a_sleeping_peer_gets_one_bell(wired: Any) -> None:
    async with wired() as w:
        for _ in range(2):
            assert w.raw.rings.sleep(for_room=False)
            for _ in range(5):
                w.link.send(b"h")
            assert w.raw.bells() == 1
            w.raw.rings.wake()
            w.raw.read()


async def test_a_peer_that_does_not_hear_bells_blocks_nobody(wired: Any) -> None:
    async with wired() as w:
        sent = 0
        while sent < 100_000:  # more than the socket holds
            w.raw.words[shm_rings._ASLEEP] += 1
            w.link.send(b"h")
            w.raw.read()
            sent += 1
        assert w.link.backlog == 0


async def test_half_a_prefix_does_not_keep_a_link_awake(wired: Any, asleep: Any) -> None:
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
    monkeypatch: pytest.MonkeyPatch, wired: Any, asleep: Any
) -> None:
    """An answer that comes soon needs no bell; one that does not come costs nothing for long."""
    now = 100.0
    monkeypatch.setattr(shm_link.time, "perf_counter", lambda: now)
    monkeypatch.setattr(polling, "_clock", lambda: now)
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


async def test_looking_for_a_frame(wired: Any) -> None:
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
async def test_the_frame_looked_for_comes_in_two_parts(cut: int, wired: Any) -> None:
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


async def test_what_has_no_payload_is_passed_by_alone(wired: Any) -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        w.raw.send(frames.encode(b"one") + frames.encode(b"two") + PREFIX + b"abc")
        answers = [w.link.look_for(PREFIX, into) for _ in range(3)]
        assert answers == [False, False, True]
        assert w.seen.frames == [(b"one", b""), (b"two", b"")]
        assert bytes(into) == b"abc"


async def test_another_frame_comes_first(wired: Any) -> None:
    async with wired() as w:
        into = memoryview(bytearray(3))
        for other in (b"unexpected", b"expecteD"):
            w.raw.send(frames.encode(other, b"meabc") + PREFIX + b"abc")
            assert w.link.look_for(PREFIX, into) is False
            assert w.seen.frames[-2:] == [(other, b"meabc"), (b"expected", b"meabc")]
        assert bytes(into) == bytes(3)


async def test_the_frame_looked_for_lies_around_the_end_of_the_ring(
    monkeypatch: pytest.MonkeyPatch, wired: Any
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


async def test_looking_while_a_payload_is_under_way(wired: Any) -> None:
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
async def test_garbage_comes_while_looking(
    what: str, caplog: pytest.LogCaptureFixture, wired: Any
) -> None:
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


async def test_a_frame_is_posted_whole_or_not_at_all(wired: Any, came: Any) -> None:
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
