"""Tokens of values: what is packed comes back, and what nobody packs is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from aiodist.buffers import encoding, packed_numbers, tokens
from aiodist.errors import ProtocolError


def test_tokens_come_back() -> None:
    sent = [None, True, -3, 2**64 - 1, 1.5, "ü\udc80", b"\0", tokens.container(tokens.LIST, 7)]
    assert tokens.unpack(tokens.pack(sent)) == sent


@pytest.mark.parametrize(
    "meta", [b"", b"\x02\x01", msgpack.packb([1]), b"\x01\x01\x01", b"\x01\x81\x01\x01"]
)
def test_what_is_no_list_of_tokens_is_refused(meta: bytes) -> None:
    with pytest.raises(ProtocolError):
        tokens.unpack(meta)


def test_arrays_and_scalars_are_described_whole() -> None:
    described = tokens.array("numpy", "float32", (2, 3))
    spec = tokens.read_array(described.data)
    assert (spec.kind, spec.name, spec.shape, spec.nbytes) == ("numpy", "float32", (2, 3), 24)
    assert str(spec) == "float32[2,3]"
    one = tokens.scalar("int16", np.int16(-5).tobytes())
    assert tokens.read_scalar(one.data) == -5
    assert tokens.read_complex(tokens.complex_number(1 - 2j).data) == 1 - 2j


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x09\x00float32",  # of no kind
        b"\x00\x01",  # cut short
        struct.pack("<BBq", 0, 1, -1) + b"float32",
        struct.pack("<BB3q", 0, 3, 0, 2**62, 2**62) + b"float32",  # of no byte, and yet too large
        struct.pack("<BBq", 0, 1, 1) + b"bfloat16",  # numpy has none
        struct.pack("<BBq", 1, 1, 1) + b"S3",  # nor has torch
        struct.pack("<BBq", 0, 1, 1) + b"x" * 33,
    ],
)
def test_arrays_that_there_cannot_be_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        tokens.read_array(data)


def test_numbers_of_any_size_keep_their_sign() -> None:
    for value in (2**64, -(2**63) - 1, 255, -256, 0):
        data = tokens.big_int(value).data
        assert int.from_bytes(data, "little", signed=True) == value


def drawn(numbers: random.Random, depth: int = 0) -> Any:
    """A random value."""
    kind = numbers.randrange(9 if depth < 4 else 6)
    if kind < 6:
        ints = (0, 127, 128, -1, 2**63 - 1, -(2**63))
        return (numbers.choice(ints), numbers.random(), np.ones(2), None, True, "text")[kind]
    items = [drawn(numbers, depth + 1) for _ in range(numbers.randrange(4))]
    if kind < 8:
        return (list, tuple)[kind - 6](items)
    keys = numbers.sample(["a", "b", 1, 200, (3, "c"), 2.5, False, ""], len(items))
    return dict(zip(keys, items, strict=True))


def leaves(value: Any) -> Iterator[Any]:
    """The numbers and arrays of a value, without keys."""
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif type(value) in (int, float, np.ndarray):
        yield value


@pytest.mark.parametrize("seed", range(200))
def test_numbers_lie_where_they_are_said_to_be(seed: int) -> None:
    """Other numbers of the same types there give the metadata of a value with these numbers."""
    value = drawn(random.Random(seed))
    meta = encoding.encode(value).meta
    found = tokens.leaves(meta)
    few = len(tokens.unpack(meta)) <= tokens.FEW
    known = [*leaves(value)]
    if not few and any(type(leaf) is not np.ndarray for leaf in known):
        assert found is None
        return
    assert found is not None
    assert len(found) == len(known)
    made = bytearray(meta)
    for where, leaf in zip(found, known, strict=True):
        if isinstance(where, tokens.Number):
            data = meta[where.at : where.at + packed_numbers.WIDTH]
            assert packed_numbers.unpacked(where.kind, data) == leaf
            made[where.at : where.at + packed_numbers.WIDTH] = packed_numbers.packed(leaf) or b""
        else:
            assert where.shape == leaf.shape
    assert made == meta


def test_numbers_whose_length_depends_on_them_lie_nowhere() -> None:
    assert tokens.leaves(encoding.encode([1] * tokens.FEW).meta) is None
    assert tokens.leaves(encoding.encode(2**63).meta) in (None, [])
    assert tokens.leaves(encoding.encode(2**64).meta) == []
