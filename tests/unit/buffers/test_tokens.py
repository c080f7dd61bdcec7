"""Tokens of values: what is packed comes back, and what nobody packs is refused."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest

from aiodist.buffers import tokens
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
