"""Blobs in one piece of memory, until one of them has an unexpected length."""

from __future__ import annotations

from aiodist.prepared.link_values import Laid, LaidBlobs
from aiodist.schedules.plan import OUT, Span

MINE, FIRST, BOTH = ((Span(OUT, 0, 1),), (Span(OUT, 1, 2),), (Span(OUT, 2, 4),))
SENT = (Span(OUT, 0, 2),)


def packed(*blobs: bytes) -> bytes:
    return b"".join(len(blob).to_bytes(4, "big") + blob for blob in blobs)


def made() -> tuple[LaidBlobs[Laid], memoryview]:
    """Make the blobs of rank 0 of four, with three bytes each. The first frame has come."""
    arena = memoryview(bytearray(packed(b"own", b"one", b"---", b"---")))
    cuts = [(arena[14:18], arena[14:18].tobytes())]
    frames = {MINE: (arena[:7], []), FIRST: (arena[7:14], []), BOTH: (arena[14:], cuts)}
    frames[SENT] = arena[:14], [(arena[:4], arena[:4].tobytes())]
    return LaidBlobs(0, 4, Laid([], frames, arena[:7], []), [FIRST]), arena


def comes(memory: LaidBlobs[Laid], data: bytes) -> None:
    memory.incoming(BOTH, len(data))[:] = data
    memory.arrived(BOTH)


def test_what_has_the_known_length_stays_where_it_is() -> None:
    memory, arena = made()
    assert [*memory.outgoing(SENT)] == [arena[:14]]
    comes(memory, packed(b"two", b"tri"))
    assert memory.is_laid
    assert arena == packed(b"own", b"one", b"two", b"tri")
    memory.part()
    memory.part()  # has no effect the second time
    arena[:] = bytes(len(arena))  # the next call uses the arena
    assert memory.blobs == [b"own", b"one", b"two", b"tri"]


def test_another_length_has_them_part() -> None:
    memory, arena = made()
    comes(memory, packed(b"longer", b"tri"))
    assert not memory.is_laid
    arena[:] = bytes(len(arena))
    assert memory.blobs == [b"own", b"one", b"longer", b"tri"]
    assert memory.outgoing(SENT) == (packed(b"own", b"one"),)


def test_blobs_that_are_as_long_together_but_not_each_have_them_part() -> None:
    memory, arena = made()
    comes(memory, packed(b"more", b"to"))
    assert not memory.is_laid
    arena[:] = bytes(len(arena))
    assert memory.blobs == [b"own", b"one", b"more", b"to"]


def test_one_that_was_coming_is_read_from_its_place() -> None:
    memory, _ = made()
    place = memory.incoming(BOTH, 14)
    memory.part()  # because of a frame of another rank
    place[:] = packed(b"two", b"tri")
    memory.arrived(BOTH)
    assert memory.blobs == [b"own", b"one", b"two", b"tri"]
