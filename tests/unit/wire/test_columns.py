"""Rows as columns: what is packed comes back, in few bytes, and nothing else gets through."""

from __future__ import annotations

import random
import tracemalloc
import zlib
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiodist.wire.columns import pack_rows, unpack_rows
from aiodist.wire.limits import MAX_METADATA, MAX_REPLY
from aiodist.wire.schema import pack

pieces = st.one_of(
    st.sampled_from(["tcp://", ":", "-", "\0", "\1", "0", "00", "65535", "65536", "10.0.12.7"]),
    st.integers(0, 10**7).map(str),
    st.binary(min_size=5, max_size=50).map(bytes.hex),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
texts = st.lists(pieces, max_size=5).map("".join).filter(lambda text: len(text) <= 200)
values = st.one_of(
    st.integers(-(2**31), 2**31),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 10**12).map(lambda cents: cents / 100),
    texts,
    st.lists(texts, max_size=16).map(tuple),
    st.none(),
    st.dictionaries(texts, st.integers(-(2**63), 2**64 - 1), max_size=2),
)


@st.composite
def tables(draw: st.DrawFn) -> list[list[Any]]:
    """Rows whose columns are of one kind mostly."""
    count = draw(st.integers(0, 6))
    kinds = [
        st.integers(-(2**31), 2**31),
        st.floats(-1e12, 1e12),
        st.integers(0, 10**12).map(lambda cents: cents / 100),
        texts,
        st.lists(texts, max_size=16).map(tuple),
        values,
    ]
    columns = [
        draw(st.lists(draw(st.sampled_from(kinds)), min_size=count, max_size=count))
        for _ in range(draw(st.integers(1, 4)))
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def plain(value: Any) -> Any:
    """As msgpack has it: it knows no tuples."""
    return list(value) if isinstance(value, tuple) else value


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(tables())
def test_what_is_packed_comes_back(rows: list[list[Any]]) -> None:
    assert unpack_rows(pack_rows(rows)) == [[plain(value) for value in row] for row in rows]


def test_the_longest_list_that_metadata_may_have_comes_back() -> None:
    metadata = {"a": [1] * (MAX_METADATA - 6)}
    assert len(pack(metadata)) == MAX_METADATA
    assert unpack_rows(pack_rows([[metadata], [{}]])) == [[metadata], [{}]]


def test_numbers_of_any_size_come_back() -> None:
    rows = [["0 00 7 65535"], ["65536 100000"], ["a1b"], ["0123456789abcdef"], ["0" * 85]]
    assert unpack_rows(pack_rows(rows)) == rows


def members(n: int) -> list[list[Any]]:
    """As ranks of one process are, on TCP."""
    rng = random.Random(1)
    return [
        [
            rank,
            rng.randbytes(16).hex(),
            "10.0.0.1",
            4711,
            {},
            1.7e9 + rank // 10 / 100,
            (f"process:{'ab' * 8}-4711", f"tcp://10.0.0.1:{rng.randrange(32768, 61000)}"),
            15.0,
        ]
        for rank in range(n)
    ]


def test_a_member_takes_little_more_than_its_id_and_port() -> None:
    assert len(pack_rows(members(1000))) < 1000 * (16 + 2 + 1)


@given(tables(), st.integers(0), st.binary(min_size=1, max_size=4))
def test_damage_is_refused_or_gives_other_rows(
    rows: list[list[Any]], at: int, damage: bytes
) -> None:
    data = bytearray(zlib.decompress(pack_rows(rows)))
    at %= len(data)
    data[at : at + len(damage)] = damage
    try:
        assert isinstance(unpack_rows(zlib.compress(data)), list)
    except ValueError as error:
        assert "rows as columns, not" in str(error)


def packed(count: Any, columns: Any) -> bytes:
    return zlib.compress(msgpack.packb([count, columns]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        pack_rows([[1]])[:-1],
        pack_rows([[1]]) + b"more",
        zlib.compress(b"garbage"),
        zlib.compress(msgpack.packb(7)),
        packed(-1, []),
        packed(4097, []),
        packed("x", []),
        packed(1, [7]),
        packed(1, [["unheard of", []]]),
        packed(1, [["numbers", [1, 2]]]),
        packed(1, [["times", None]]),
        packed(1, [["texts", [], [0], b""]]),
        packed(1, [["texts", [7], [0], b""]]),
        packed(1, [["texts", ["\1"], [0], b"1"]]),
        packed(1, [["texts", ["\1"], [0], b"123"]]),
        packed(1, [["texts", ["x" * 300], [0], b""]]),
        packed(1, [["texts", ["x"], [0] * 4097, b""]]),
        packed(1, [["texts", ["x"], [-1], b""]]),
        packed(1, [["lists", [1], [["texts", ["x"], [0], b""]] * 17]]),
        packed(1, [["lists", [1], [["texts", ["x"], [0, 0], b""]]]]),
        packed(1, [["lists", [0], []], ["numbers", []]]),
        packed(2, [["lists", [0], []]]),
    ],
)
def test_what_was_not_packed_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="rows as columns, not"):
        unpack_rows(data)


def test_no_more_is_unpacked_than_a_reply_may_have() -> None:
    packer = zlib.compressobj()
    bomb = b"".join([packer.compress(bytes(2**20)) for _ in range(4 * MAX_REPLY >> 20)])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not one stream of at most"):
            unpack_rows(bomb + packer.flush())
        # What is decompressed comes in parts, which are then joined.
        assert tracemalloc.get_traced_memory()[1] < 2.5 * MAX_REPLY
    finally:
        tracemalloc.stop()
