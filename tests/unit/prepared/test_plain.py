"""Values without arrays are shown and read as they are: with the bytes of the ordinary way, and
without trust in what other ranks show."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest
from alike import same
from hypothesis import given
from hypothesis import strategies as st

from aiodist.buffers.encoding import encode
from aiodist.collectives.offers import Offer, pack_offers
from aiodist.collectives.templates import LENGTH
from aiodist.prepared import plain
from aiodist.prepared.exchanged import Exchanged, exchanged_by

WORDS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.complex_numbers(),
    st.text(max_size=9), st.binary(max_size=9),
    st.builds(np.float32, st.floats(width=32)), st.builds(np.int16, st.integers(-9, 9)),
)  # fmt: skip
VALUES = st.recursive(
    WORDS,
    lambda items: st.one_of(
        st.lists(items, max_size=90), st.dictionaries(st.text(max_size=4), items, max_size=5)
    ),
    max_leaves=120,
)
LARGE = 1 << 30


class Nowhere:
    """A group without shared arrays, and without arrays on devices."""

    heap = property(lambda self: self)

    def place_of(self, parts: Any) -> int:
        return 0

    def words(self, room: int) -> bytes:
        return b""


def how(op: str, rank: int, size: int, *args: Any) -> Exchanged:
    exchanged = exchanged_by(op, rank, size, args)
    assert exchanged is not None
    return exchanged


@given(st.lists(VALUES, min_size=1, max_size=3))
def test_what_is_shown_is_what_the_ordinary_way_shows(values: list[Any]) -> None:
    shown = plain.shown(values)
    assert shown is not None
    ordinary = pack_offers(Nowhere(), Nowhere(), [encode(value) for value in values], LARGE)  # type: ignore[arg-type]
    assert shown == len(ordinary).to_bytes(LENGTH, "big") + ordinary


@given(st.lists(VALUES, min_size=2, max_size=3), st.data())
def test_what_is_read_is_what_was_shown(values: list[Any], data: st.DataObject) -> None:
    size = len(values)
    root = data.draw(st.integers(0, size - 1))
    nothing = plain.shown([])
    for rank in range(size):
        one = [plain.shown([value]) for value in values]
        assert same(plain.read(how("all_gather", rank, size, 0, None), one, LARGE), values)  # type: ignore[arg-type]
        of_root = [one[root] if src == root else nothing for src in range(size)]
        found = plain.read(how("broadcast", rank, size, None, root), of_root, LARGE)  # type: ignore[arg-type]
        assert same(found, [] if rank == root else [values[root]])
        slots = [plain.shown(values) if src == root else nothing for src in range(size)]
        found = plain.read(how("scatter", rank, size, None, root, None), slots, LARGE)  # type: ignore[arg-type]
        assert same(found, [values[rank]])


@pytest.mark.parametrize("value", [np.ones(3), [1, np.ones(0)], {"a": [np.ones(2)]}, object()])
def test_other_values_are_left_to_the_ordinary_way(value: Any) -> None:
    assert plain.shown([0, value]) is None


def test_large_values_and_endless_ones_are_left_to_the_ordinary_way() -> None:
    assert plain.shown(["x" * plain.MOST]) is None
    assert plain.shown([[np.float32(1)] * plain.MOST]) is None
    endless: list[Any] = []
    endless.append(endless)
    assert plain.shown([endless]) is None


ARRAY = encode(np.ones(2))
NO_ARRAY = encode([1, 2])


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x90",
        b"\xc1\x01?\x91",  # it wants something
        msgpack.packb([Offer(ARRAY.meta, 16, bytes(16))]),
        msgpack.packb([Offer(ARRAY.meta, 16, None)]),
        msgpack.packb([Offer(encode(np.ones(0)).meta, 0, b"")]),  # an array without bytes
        msgpack.packb([Offer(len(NO_ARRAY.meta), 0, None)]),
        msgpack.packb([Offer(NO_ARRAY.meta, 0, b"", 1)]),
        msgpack.packb([Offer(NO_ARRAY.meta[:-1], 0, b"")]),
        msgpack.packb([Offer(NO_ARRAY.meta, 0, b""), b"words about devices"]),
        msgpack.packb([NO_ARRAY.meta]),
        msgpack.packb({"a": 1}),
        msgpack.packb([[]]),
        msgpack.packb(["text", 0, b"", 0, 0, 0]),
        msgpack.packb([["text", 0, b"", 0, 0, 0]]),
    ],
)
def test_what_else_a_rank_may_show(blob: bytes) -> None:
    mine = plain.shown([1])
    other = len(blob).to_bytes(LENGTH, "big") + blob
    assert plain.read(how("all_gather", 0, 2, 1, None), [mine, other], LARGE) is None  # type: ignore[list-item]
    assert plain.read(how("broadcast", 0, 2, 1, 0), [mine, b"\0\0\0\1?"], LARGE) is None  # type: ignore[list-item]


def test_no_bytes_do_harm() -> None:
    rng = random.Random(0)
    mine = plain.shown([1])
    assert mine is not None
    for _ in range(3000):
        other = bytearray(plain.shown([{"a": [1, "b", 2.5]}]) or b"")
        for _ in range(rng.randrange(1, 5)):
            other[rng.randrange(len(other))] = rng.randrange(256)
        found = plain.read(how("all_gather", 0, 2, 1, None), [mine, bytes(other)], LARGE)
        assert found is None or found[0] == 1


def test_metadata_over_the_limit_is_left_to_the_ordinary_way() -> None:
    blobs = [plain.shown([1]), plain.shown(["x" * 100])]
    assert plain.read(how("all_gather", 0, 2, 1, None), blobs, 50) is None  # type: ignore[arg-type]
    assert plain.read(how("all_gather", 0, 2, 1, None), blobs, 200) == [1, "x" * 100]  # type: ignore[arg-type]
