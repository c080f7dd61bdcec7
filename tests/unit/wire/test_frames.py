"""Frames: any chunking gives the same frames, and garbage is refused before it costs anything."""

from __future__ import annotations

from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.errors import ProtocolError
from aiodist.wire.frames import (
    MAX_HEADER,
    OVERHEAD,
    Decoder,
    Frame,
    Stencil,
    encode,
    pack_fields,
    parse_prefix,
    prefix,
    unpack_fields,
)

frames = st.lists(st.builds(Frame, st.binary(max_size=300), st.binary(max_size=300)), max_size=6)


def fed(data: bytes, cuts: list[int], decoder: Decoder) -> list[Frame]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    found: list[Frame] = []
    for start, stop in pairwise(edges):
        found += decoder.feed(data[start:stop])
    return found


@given(frames, st.lists(st.integers(0, 10_000), max_size=20))
def test_any_chunking_gives_the_same_frames(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(encode(*frame) for frame in sent)
    decoder = Decoder()
    assert fed(data, cuts, decoder) == sent
    assert len(decoder._data) == 0


@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000), max_size=5))
def test_garbage_gives_frames_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    decoder = Decoder(max_payload=64)
    try:
        for frame in fed(data, cuts, decoder):
            assert len(frame.payload) <= 64
    except ProtocolError:
        pass
    assert len(decoder._data) <= len(data)


def test_a_frame_is_valid_msgpack() -> None:
    assert msgpack.unpackb(encode(b"head", b"payload")) == [b"head", b"payload"]


def test_an_incomplete_frame_is_kept() -> None:
    decoder = Decoder()
    data = encode(b"head", b"payload")
    assert decoder.feed(data[:-1]) == []
    assert len(decoder._data) == len(data) - 1
    assert decoder.feed(data[-1:]) == [Frame(b"head", b"payload")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"G", "starts with 0x92, not 0x47"),
        (b"GET / HTTP/1.1", "starts with 0x92 0xc5"),
        (b"\x92\xc4\x00\x00", "starts with 0x92 0xc5"),
        (b"\x92\xc5\x00\x09" + b"h" * 9 + b"\xc6\x00\x00\x00\x00", "a header of 9 bytes"),
        (b"\x92\xc5\x00\x01h\xc5\x00\x00\x00\x00", "a payload starts with 0xc6, not 0xc5"),
        (b"\x92\xc5\x00\x01h\xc6\xff\xff\xff\xff", "a payload of 4294967295 bytes"),
    ],
)
def test_what_is_no_frame_is_refused_at_once(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Decoder(max_header=8, max_payload=8).feed(data)


def test_a_header_has_to_fit_into_16_bits() -> None:
    assert len(prefix(bytes(MAX_HEADER), 0)) == MAX_HEADER + OVERHEAD
    with pytest.raises(ProtocolError, match="65536 bytes is over"):
        prefix(bytes(MAX_HEADER + 1), 0)


def test_a_prefix_is_read_without_its_payload() -> None:
    data = prefix(b"head", 5)
    assert parse_prefix(data, 0, 0, 16, 16) is None
    assert parse_prefix(data, 0, 3, 16, 16) is None
    assert parse_prefix(data, 0, len(data) - 1, 16, 16) is None
    assert parse_prefix(data, 0, len(data), 16, 16) == (b"head", 5, len(data))


def test_fields_survive() -> None:
    assert unpack_fields(pack_fields(1, "two", b"3", None, [4.0])) == [1, "two", b"3", None, [4.0]]


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x93\x01", b"\x01", b"\x80", msgpack.packb([msgpack.ExtType(5, b"")])],
)
def test_a_header_that_is_no_array_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_fields(data)


@pytest.mark.parametrize(
    "number", [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1]
)
def test_a_stencil_gives_the_prefix(number: int) -> None:
    stencil = Stencil((3, b"context", None), (0, b"call"), 300)
    header = pack_fields(3, b"context", None, number, 0, b"call")
    assert stencil.fill(number) == prefix(header, 300)
