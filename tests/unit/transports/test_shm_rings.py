"""Two rings between two sides: bytes, room, bells, and what a hostile side may say."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from aiodist.errors import ProtocolError
from aiodist.transports import shm_rings
from aiodist.transports.shm_rings import GIVE_BACK, PAGE, PIECE, REWIND, Rings

RING = 256 * 1024


class Side:
    """One side: its rings, the memory that it writes, and the bells that it has rung."""

    def __init__(self, own: bytearray, peer: bytearray) -> None:
        self.words = memoryview(own)[:PAGE].cast("Q")
        self.bells = 0
        self.rings = Rings(memoryview(own), memoryview(peer).toreadonly(), self._bell)

    def _bell(self) -> None:
        self.bells += 1

    def read(self, most: int = RING) -> bytes:
        """Read what is there, up to `most` bytes."""
        rings = self.rings
        data = b""
        while len(data) < most and (have := rings.available()):
            start = (rings.read - rings.origin) % rings.size
            count = min(have, rings.size - start, most - len(data))
            data += rings.incoming[start : start + count]
            rings.taken(count)
        return data


def pair(ring: int = RING) -> tuple[Side, Side]:
    one, other = bytearray(PAGE + ring), bytearray(PAGE + ring)
    return Side(one, other), Side(other, one)


def test_bytes_arrive_in_order() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        a, b = pair()
        noise = memoryview(rng.randbytes(1 << 20))
        sent = came = b""
        while len(sent) < 5 * RING:
            size = rng.choice((1, 20, 3000, PIECE, 100_000))
            at = rng.randrange(len(noise) - size)
            buffers = [noise[at : at + size // 3], noise[at + size // 3 : at + size]]
            if rng.random() < 0.5:
                data = b"".join(buffers)
                sent += data if a.rings.put(data) else b""
            elif a.rings.room():
                wrote = a.rings.write(buffers)
                sent += noise[at : at + wrote]
            if rng.random() < 0.7:
                came += b.read(rng.choice((10, 5000, RING)))
        came += b.read()
        assert came == sent, f"seed {seed}"


def test_buffers_of_any_shape() -> None:
    numbers: Any = memoryview(bytes(range(64))).cast("d", [2, 4])
    empty = memoryview(b"")
    a, b = pair()
    assert a.rings.write([b"x", numbers, empty, memoryview(b"y")]) == 66
    assert b.read() == b"x" + bytes(range(64)) + b"y"


def test_a_full_ring() -> None:
    a, b = pair()
    assert a.rings.write([bytes(RING - 10)]) == RING - 10
    assert a.rings.room() == 10
    assert not a.rings.put(bytes(11))
    assert a.rings.put(bytes(4))
    assert a.rings.write([bytes(100)]) == 6
    assert not a.rings.put(b"x")
    with pytest.raises(BlockingIOError):
        a.rings.write([b"x"])
    assert len(b.read()) == RING
    assert a.rings.room() == RING


def test_a_small_frame_is_not_put_around_the_end() -> None:
    a, b = pair()
    a.rings.write([bytes(RING - 10)])
    b.read(RING - 20)
    assert a.rings.room() > 100
    assert not a.rings.put(bytes(11))
    assert a.rings.write([b"around the end"]) == 14
    assert b.read()[-14:] == b"around the end"


def test_an_empty_ring_is_used_from_its_start() -> None:
    a, b = pair()
    for round_trip in range(50):
        size = 10_000 * (round_trip % 7)
        assert a.rings.put(bytes(size) + b"!")
        assert a.rings._written - a.rings._origin <= REWIND + 60_001
        assert b.read()[-1:] == b"!"
        b.rings.sleep(for_room=False)
        b.rings.wake()
    assert a.rings._origin > 0


def test_a_ring_in_use_is_not_rewound() -> None:
    a, b = pair()
    a.rings.write([bytes(REWIND)])
    a.rings.put(b"on")
    assert a.rings._origin == 0
    b.read(REWIND)
    a.rings.put(b"and on")
    assert a.rings._origin == 0
    assert b.read() == b"onand on"


# ---- bells ----


def test_no_bell_for_who_is_awake() -> None:
    a, b = pair()
    for _ in range(10):
        a.rings.put(b"x")
        b.read()
    assert a.bells == b.bells == 0


def test_one_bell_for_each_sleep() -> None:
    a, b = pair()
    for sleep in range(1, 4):
        assert b.rings.sleep(for_room=False)
        for _ in range(3):
            a.rings.put(b"x")
        assert a.bells == sleep
        b.rings.wake()
        a.rings.put(b"x")
        assert a.bells == sleep
        b.read()


def test_who_has_something_to_read_does_not_sleep() -> None:
    a, b = pair()
    a.rings.put(b"x")
    assert not b.rings.sleep(for_room=False)
    a.rings.put(b"x")
    assert a.bells == 0
    b.read()
    assert b.rings.sleep(for_room=False)


def test_who_cannot_use_what_is_there_sleeps() -> None:
    a, b = pair()
    a.rings.put(b"part of a prefix")
    assert b.rings.available()
    assert b.rings.sleep(for_room=False)
    a.rings.put(b"the rest")
    assert a.bells == 1


def test_a_bell_when_a_quarter_is_free() -> None:
    a, b = pair()
    a.rings.write([bytes(RING)])
    assert a.rings.sleep(for_room=True)
    b.read(RING // 4 - GIVE_BACK)
    assert b.bells == 0
    b.read(GIVE_BACK)
    assert b.bells == 1
    b.read()
    assert b.bells == 1
    a.rings.wake()
    a.rings.write([bytes(RING)])
    b.read()
    assert b.bells == 1


def test_who_has_room_does_not_sleep_for_it() -> None:
    a, b = pair()
    a.rings.write([bytes(RING)])
    b.read(RING // 2)
    assert not a.rings.sleep(for_room=True)


class Between:
    """In place of the fence: something that the other side does right there."""

    def __init__(self, event: Callable[[], object]) -> None:
        self.event = event

    def __enter__(self) -> None:
        self.event()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def test_written_while_the_reader_falls_asleep() -> None:
    a, b = pair()
    b.rings._fence = Between(lambda: a.rings.put(b"x"))
    assert not b.rings.sleep(for_room=False)


def test_asleep_while_the_writer_writes() -> None:
    a, b = pair()
    asleep: list[bool] = []
    a.rings._fence = Between(lambda: asleep.append(b.rings.sleep(for_room=False)))
    a.rings.put(b"x")
    assert a.bells == 1 or asleep == [False]


def test_read_while_the_writer_falls_asleep() -> None:
    a, b = pair()
    a.rings.write([bytes(RING)])
    a.rings._fence = Between(b.read)
    assert not a.rings.sleep(for_room=True)


def test_asleep_while_the_reader_reads() -> None:
    a, b = pair()
    a.rings.write([bytes(RING)])
    asleep: list[bool] = []

    def sleep() -> None:
        if not asleep:
            asleep.append(a.rings.sleep(for_room=True))

    b.rings._fence = Between(sleep)
    b.read()
    assert b.bells == 1 or asleep == [False]


# ---- what the peer says ----


@pytest.mark.parametrize("said", [RING + 1, 1 << 63, (1 << 64) - 1])
def test_more_written_than_a_ring_holds_is_refused(said: int) -> None:
    a, b = pair()
    a.words[shm_rings._WRITTEN] = said
    assert b.rings.has_news()
    with pytest.raises(ProtocolError, match=f"has written {said} bytes"):
        b.rings.available()


def test_less_written_than_was_read_is_refused() -> None:
    a, b = pair()
    a.rings.put(b"abc")
    b.read()
    a.words[shm_rings._WRITTEN] = 2
    with pytest.raises(ProtocolError, match="has written 2 bytes, of which 3 were read"):
        b.rings.available()


@pytest.mark.parametrize("said", [101, RING, (1 << 64) - 1])
def test_more_read_than_was_written_is_refused(said: int) -> None:
    a, b = pair()
    a.rings.put(bytes(100))
    b.words[shm_rings._READ] = said
    with pytest.raises(ProtocolError, match=f"has read {said} bytes of 100"):
        a.rings.write([b"x"])


def test_less_read_than_before_is_refused() -> None:
    a, b = pair()
    for _ in range(2):
        a.rings.write([bytes(RING)])
        b.read()
    b.words[shm_rings._READ] = 5
    with pytest.raises(ProtocolError, match="has read 5 bytes"):
        a.rings.room()


@pytest.mark.parametrize("said", [1, 99, 101, (1 << 64) - 1])
def test_a_start_that_is_not_here_is_refused(said: int) -> None:
    a, b = pair()
    a.rings.put(bytes(100))
    b.read()
    a.words[shm_rings._ORIGIN] = said
    a.rings.put(b"x")
    with pytest.raises(ProtocolError, match=f"after {said} bytes, but 100 were read"):
        b.rings.available()
    a.words[shm_rings._ORIGIN] = 100
    assert b.rings.available() == 1


def test_nonsense_about_sleep_costs_bells_at_most() -> None:
    rng = random.Random(1)
    a, b = pair()
    came = 0
    for _ in range(200):
        b.words[shm_rings._ASLEEP] = rng.choice((0, rng.getrandbits(64)))
        b.words[shm_rings._WANTED] = rng.choice((0, rng.getrandbits(64), rng.randrange(came + 1)))
        a.rings.write([bytes(5000)])
        came += len(b.read())
        b.rings.put(b"x")
        a.read()
    assert came == 200 * 5000


def test_closing_lets_go_of_the_memory() -> None:
    own, peer = bytearray(PAGE + RING), bytearray(PAGE + RING)
    side = Side(own, peer)
    del side.words
    side.rings.put(b"x")
    side.rings.close()
    for memory in (own, peer):
        memory.clear()  # BufferError while there are views of it


class Futexes:
    """In place of the system's: who dozes is told to, and `amid` happens before it would sleep."""

    def __init__(self) -> None:
        self.slept: list[tuple[int, int]] = []
        self.rung: list[int] = []
        self.amid: Callable[[], None] = lambda: None

    def address_of(self, memory: memoryview) -> int:
        return id(memory.obj)

    def wait(self, address: int, seen: int, seconds: float) -> None:
        self.slept.append((address, seen))
        self.amid()

    def ring(self, address: int) -> None:
        self.rung.append(address)


def test_who_dozes_is_woken_by_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    futexes = Futexes()
    monkeypatch.setattr(shm_rings, "futex", futexes)
    a, b = pair()
    a.rings.put(b"before")
    assert b.read() == b"before"

    def amid() -> None:
        a.rings.put(b"one")
        a.rings.put(b"two")  # one ring is enough

    futexes.amid = amid
    b.rings.doze(1.0)
    (address, seen), *more = futexes.slept
    assert not more and seen == 6
    assert futexes.rung == [address]  # where it sleeps is what the other has written
    assert b.read() == b"onetwo"
    a.rings.put(b"three")  # it is awake again
    assert len(futexes.rung) == 1
    assert b.rings.available()
    b.rings.doze(1.0)
    assert futexes.slept[1:] == [(address, 17)]
    assert len(futexes.rung) == 2
    assert not a.bells and not b.bells


def test_who_dozed_is_woken_by_a_bell_when_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    futexes = Futexes()
    monkeypatch.setattr(shm_rings, "futex", futexes)
    a, b = pair()
    b.rings.doze(1.0)
    assert b.rings.sleep(for_room=False)
    a.rings.put(b"x")
    assert (a.bells, futexes.rung) == (1, [])


def test_who_dozes_gives_back_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_rings, "futex", Futexes())
    a, b = pair()
    a.rings.write([bytes(1000)])
    b.read()
    assert a.rings.room() == RING - 1000
    b.rings.doze(1.0)
    assert a.rings.room() == RING


def test_a_piece_with_its_header_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair()
    shown: list[int] = []
    monkeypatch.setattr(Rings, "_show", lambda rings, count: shown.append(count))
    a.rings.write([bytes(100), bytes(PIECE)])
    assert shown == [PIECE + 100]
    b.rings.write([bytes(100), bytes(2 * PIECE)])
    assert shown[1:] == [PIECE, PIECE, 100]
    a, b = pair(16 * PIECE)
    a.rings.write([bytes(100), bytes(8 * PIECE)])
    assert shown[4:] == [2 * PIECE + 25] * 4  # a quarter of all


def test_a_knock_wakes_who_sleeps_once() -> None:
    a, b = pair()
    a.rings.knock()
    assert a.bells == 0
    assert b.rings.sleep(for_room=False)
    for _ in range(2):
        a.rings.knock()
        assert a.bells == 1
    assert a.rings.turns == 0
    b.rings.turned()
    assert (a.rings.turns, b.rings.turns) == (1, 0)
