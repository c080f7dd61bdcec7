"""A shared-memory link: frames that are sent, and looked for, in one piece."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.transports import shm_link, shm_rings
from aiodist.transports.framed import Whole
from aiodist.transports.shm_rings import PIECE, RING, Rings
from aiodist.wire import frames

DATA = bytes(range(250)) * 1000
START = frames.encode(b"announced", b"meta") + frames.prefix(b"data", len(DATA))
END = frames.encode(b"the end")
ALL = START + DATA + END


def whole() -> tuple[Whole, bytearray]:
    into = bytearray(len(DATA))
    return Whole(START, memoryview(into), END), into


async def test_looking_for_frames_in_one_piece(wired: Any) -> None:
    async with wired() as w:
        expected, into = whole()
        assert w.link.look_for_whole(expected) is None
        w.raw.send(ALL + frames.encode(b"next", b"x"))
        assert w.link.look_for_whole(expected) is True
        assert into == DATA
        assert w.link.received_bytes == len(DATA)
        assert not w.seen.headers
        assert w.link.poll()
        assert w.seen.frames == [(b"next", b"x")]


@pytest.mark.parametrize("step", [7, 1000, PIECE])
async def test_they_come_bit_by_bit_and_are_copied_as_they_come(step: int, wired: Any) -> None:
    async with wired() as w:
        expected, into = whole()
        for at in range(0, len(ALL) if step > 7 else len(START) + 70, step):
            w.raw.send(ALL[at : at + step])
            looked = w.link.look_for_whole(expected)
            there = max(0, min(at + step, len(START) + len(DATA)) - len(START))
            assert looked is (True if at + step >= len(ALL) else None)
            if at + step >= len(START):
                assert into == DATA[:there] + bytes(len(DATA) - there)
        if step == 7:  # who gives up leaves all of them to the receiver
            w.raw.send(ALL[at + step :])
            w.link.poll()
            assert w.seen.frames == [(b"announced", b"meta"), (b"data", DATA), (b"the end", b"")]
        else:
            assert not w.seen.headers


async def test_what_comes_first_is_taken_alone(wired: Any) -> None:
    async with wired() as w:
        expected, into = whole()
        w.raw.send(frames.encode(b"credit") + ALL)
        assert [w.link.look_for_whole(expected) for _ in range(2)] == [False, True]
        assert w.seen.frames == [(b"credit", b"")]
        assert into == DATA


async def test_others_go_to_the_receiver(wired: Any) -> None:
    async with wired() as w:
        other = START.replace(b"meta", b"Meta") + DATA + END
        w.raw.send(other)
        expected, into = whole()
        assert w.link.look_for_whole(expected) is False
        assert w.seen.headers == [b"announced", b"data", b"the end"]
        assert into == bytes(len(DATA))
        w.raw.send(START + DATA + frames.encode(b"the EnD"))
        assert w.link.look_for_whole(whole()[0]) is False
        assert w.seen.headers[3:] == [b"announced", b"data", b"the EnD"]


async def test_they_lie_around_the_end_of_the_ring(
    monkeypatch: pytest.MonkeyPatch, wired: Any
) -> None:
    monkeypatch.setattr(Rings, "rewind", lambda self: None)  # never back to the start
    async with wired() as w:
        for _ in range(3 * RING // len(ALL)):
            w.raw.send(ALL)
            expected, into = whole()
            assert w.link.look_for_whole(expected) is True
            assert into == DATA
        assert not w.seen.headers


async def test_garbage_comes_in_their_place(caplog: pytest.LogCaptureFixture, wired: Any) -> None:
    async with wired() as w:
        w.raw.send(b"garbage" * len(START))
        assert w.link.look_for_whole(whole()[0]) is False
        assert w.link.is_closed
        assert w.link.look_for_whole(whole()[0]) is False
        assert isinstance(w.seen.ends[0], ProtocolError)


async def test_a_position_that_cannot_be(caplog: pytest.LogCaptureFixture, wired: Any) -> None:
    async with wired() as w:
        w.raw.words[shm_rings._WRITTEN] = 1 << 40
        assert w.link.look_for_whole(whole()[0]) is False
        assert w.link.is_closed
    async with wired() as w:
        w.raw.words[shm_rings._READ] = 1 << 40
        assert w.link.post_whole((START, memoryview(DATA), END), len(DATA))
        assert w.link.is_closed


async def test_they_are_posted_whole_or_not_at_all(wired: Any, came: Any) -> None:
    async with wired() as w:
        data = bytearray(DATA)
        for _ in range(RING // len(ALL)):
            assert w.link.post_whole((b"", START, memoryview(data), END), len(data))
        assert w.link.sent_bytes == RING // len(ALL) * len(data)
        assert not w.link.post_whole((START, memoryview(data), END), len(data))
        assert w.link.backlog == 0
        data[:] = bytes(len(data))
        assert w.raw.read() == ALL * (RING // len(ALL))
        w.link.send(b"large", [memoryview(bytes(RING))])
        assert w.link.backlog
        w.raw.read()  # there is room, but the rest of another frame goes before
        assert not w.link.post_whole((START, memoryview(data), END), len(data))
        w.raw.bells()
        assert len(await came(w, 1)) and not w.link.backlog


@pytest.mark.parametrize("others", [False, True])
async def test_beside_others_a_sleeper_is_woken_when_all_is_there(
    others: bool, monkeypatch: pytest.MonkeyPatch, wired: Any
) -> None:
    """It would find the first piece of many, and wait again, for a core as well."""
    monkeypatch.setattr(shm_link, "others_compute", lambda: others)
    async with wired() as w:
        assert w.raw.rings.sleep(for_room=False)
        there: list[int] = []
        monkeypatch.setattr(w.link._rings, "_bell", lambda: there.append(w.raw.rings.available()))
        assert w.link.post_whole((START, memoryview(DATA), END), len(DATA))
        assert there == [len(ALL) if others else PIECE]
        w.raw.rings.wake()
        assert w.raw.read() == ALL
