"""Metadata that no peer of good will sends: refused with ProtocolError, and nothing allocated."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.buffers import tokens
from aiodist.buffers.dtypes import MAX_NDIM
from aiodist.buffers.encoding import encode
from aiodist.buffers.values import parse
from aiodist.errors import MessageTooLargeError, ProtocolError

Ext = msgpack.ExtType


def array(
    shape: tuple[int, ...] = (3,), name: bytes = b"float32", kind: int = 0, ndim: int | None = None
) -> Any:
    ndim = len(shape) if ndim is None else ndim
    return Ext(tokens.ARRAY, struct.pack(f"<BB{len(shape)}q", kind, ndim, *shape) + name)


def many(code: int, count: int) -> Any:
    return Ext(code, struct.pack("<I", count))


def test_the_helpers_make_what_encode_makes() -> None:
    value = {"a": [np.zeros(3, "f4")]}
    stream = [many(tokens.DICT, 1), "a", many(tokens.LIST, 1), array()]
    assert tokens.pack(stream) == encode(value).meta


@pytest.mark.parametrize(
    "stream",
    [
        [],
        [1, 2],
        [array(), array()],
        [array((-1,))],
        [array((2**62, 2**62))],
        [array((0, 2**63 - 1, 8))],
        [array((3,), b"object")],
        [array((3,), b"float33")],
        [array((3,), b"V8")],
        [array((3,), b"S0")],
        [array((3,), b"U999999999")],
        [array((3,), b"datetime64[0D]")],
        [array((3,), b"\xff\xfe")],
        [array((3,), b"float32" + b" " * 60)],
        [array((3,), b"")],
        [array((3,), b"bfloat16", kind=0)],
        [array((3,), b"S5", kind=1)],
        [array((3,), kind=3)],
        [array((3,), b"", ndim=4)],
        [array((1,) * (MAX_NDIM + 1))],
        [Ext(tokens.ARRAY, b"")],
        [Ext(tokens.LIST, b"\x01")],
        [Ext(tokens.COMPLEX, b"\x01")],
        [Ext(tokens.SCALAR, b"")],
        [Ext(tokens.SCALAR, b"\x07float32\x00")],
        [Ext(tokens.SCALAR, b"\x08bfloat16\x00\x00")],
        [Ext(tokens.SCALAR, b"\xf0float32")],
        [Ext(99, b"")],
        [msgpack.Timestamp(1, 0)],
        [many(tokens.LIST, 2), 1],
        [many(tokens.LIST, 2**32 - 1)],
        [many(tokens.TUPLE, 0), 1],
        [many(tokens.DICT, 1), "a"],
        [many(tokens.DICT, 2), "a", 1, "a", 2],
        [many(tokens.DICT, 1), many(tokens.LIST, 0), 1],
        [many(tokens.DICT, 1), array(), 1],
        [many(tokens.DICT, 1), many(tokens.TUPLE, 1), many(tokens.DICT, 0), 1],
        [many(tokens.LIST, 1)] * 101 + [1],
    ],
)
def test_forged_tokens(stream: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        parse(tokens.pack(stream), max_bytes=2**62)


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc0",
        b"\x01",
        b"\x02\x01",
        b"\x01\xc1",
        b"\x01\x01\x02",
        b"\x01\x01\xd9",
        b"\xff\x01",
        b"\xa1a\x01",
        b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x01",
        b"\xce\xff\xff\xff\xff\x01",
        b"\x01" + msgpack.packb([1]),
        b"\x01" + msgpack.packb({"a": 1}),
        b"\x01" + b"\x91" * 2000,
        b"\x91\x01",
        b"\x01\xdd\xff\xff\xff\xff",
        b"\x01\xdc\x00\x01\x01",
        b"\x01\xdf\xff\xff\xff\xff",
        b"\x01\xc6\xff\xff\xff\xff",
        b"\x01\xc9\xff\xff\xff\xff\x05",
        b"\x01\xd9\x02\xff\xff",
    ],
)
def test_forged_msgpack(meta: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(meta, max_bytes=2**62)


def test_huge_arrays_are_counted_not_made() -> None:
    meta = tokens.pack([many(tokens.LIST, 2), array((2**40,)), array((2**40, 2**19))])
    with pytest.raises(MessageTooLargeError):
        parse(meta, max_bytes=2**30)


@given(st.binary(max_size=200))
def test_random_bytes(meta: bytes) -> None:
    with contextlib.suppress(ProtocolError, MessageTooLargeError):
        parse(meta, max_bytes=2**20)


SAMPLE = encode({"a": [1, 2.5, (np.zeros((2, 3), "f4"), b"x")], (1, "b"): 2**80, "c": 1j}).meta


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), max_size=4))
def test_bit_rot(changes: list[tuple[int, int]]) -> None:
    meta = bytearray(SAMPLE)
    for at, byte in changes:
        meta[at] = byte
    try:
        incoming = parse(bytes(meta), max_bytes=2**16)
    except (ProtocolError, MessageTooLargeError):
        return
    try:
        incoming.allocate()
    except TypeError:  # a pickle, or a dtype that needs torch
        return
    assert sum(view.nbytes for view in incoming.buffers) == incoming.nbytes
    incoming.finish()


@given(st.integers(0, len(SAMPLE) - 1))
def test_truncation(stop: int) -> None:
    with pytest.raises(ProtocolError):
        parse(SAMPLE[:stop], max_bytes=2**16)
