"""Differences between versions of a chunk."""

from __future__ import annotations

import contextlib
import importlib
import sys
import zlib
from unittest import mock

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodist.channels import differences
from aiodist.channels.differences import FAR, WIDTHS, decode, encode
from aiodist.compiled import core, reason
from aiodist.errors import ProtocolError


def decoded(code, base):
    """The newer version. No byte around it is written, whatever happens."""
    room = np.full(len(base) + 128, 0xA5, np.uint8)
    try:
        decode(code, base, room[64:-64])
    finally:
        assert (room[:64] == 0xA5).all()
        assert (room[-64:] == 0xA5).all()
    return room[64:-64]


def both(base, new, width):
    """The code, once it has brought `new` in both ways."""
    found = encode(base, new, width)
    assert np.array_equal(decoded(found.code, base), new)
    in_place = base.copy()
    decode(found.code, in_place, in_place)
    assert np.array_equal(in_place, new)
    return found


@st.composite
def chunks(draw):
    """Two versions of a chunk, and the width of its elements."""
    width = draw(st.sampled_from(WIDTHS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, 64 * draw(st.integers(1, 64)), np.uint8)
    new = base.copy()
    elements = new.view(f"u{width}")
    share = draw(st.sampled_from([0, 0.001, 0.02, 0.3, 0.5, 0.9, 1]))
    which = rng.random(len(elements)) < share
    most = draw(st.sampled_from([1, 2, 100, 2 ** (8 * width - 1) - 1]))
    elements[which] += rng.integers(-most, most + 1, which.sum()).astype(elements.dtype)
    return base, new, width


@given(chunks())
def test_what_is_coded_comes_back(made):
    base, new, width = made
    found = both(base, new, width)
    differs = base.view(f"u{width}") != new.view(f"u{width}")
    assert found.changed == width * np.count_nonzero(differs)
    assert len(found.code) <= len(new) + 8
    assert (found.code == b"") == (not differs.any())


@pytest.mark.skipif(core is None, reason=reason)
@given(made=chunks(), tail=st.integers(0, 8))
def test_the_compiled_part_gives_the_same_bytes(made, tail):
    base, new, width = made
    base, new = (one[: len(one) - width * tail] for one in (base, new))
    found = encode(base, new, width)
    with mock.patch.object(differences, "core", None):
        assert encode(base, new, width) == found


@given(made=chunks(), width=st.sampled_from(WIDTHS))
def test_the_width_is_a_guess(made, width):
    both(made[0], made[1], width)


@pytest.mark.parametrize(
    "places", [[0], [4095], [FAR - 1], [FAR], [2 * FAR], [0, FAR, FAR + 1, 3 * FAR + 1, 4095]]
)
def test_gaps_of_every_length(places):
    base = np.zeros(8192, np.uint8)
    new = base.copy()
    new.view(np.uint16)[places] = 1
    assert len(both(base, new, 2).code) < 64


@pytest.mark.parametrize("share", [0.005, 0.01, 0.02, 0.05, 0.1])
def test_random_changes_take_at_most_a_quarter_more_than_their_entropy(share):
    rng = np.random.default_rng(1)
    base = rng.integers(0x3C00, 0x3E00, 1 << 18).astype(np.uint16)
    which = rng.random(len(base)) < share
    new = base + (which * rng.choice([1, -1], len(base))).astype(np.uint16)
    found = both(base.view(np.uint8), new.view(np.uint8), 2)
    bits = share - share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert bits * len(base) / 8 < len(found.code) < 1.25 * bits * len(base) / 8


def test_small_changes_of_all_elements():
    rng = np.random.default_rng(1)
    base = rng.normal(0, 1, 1 << 16).astype(np.float32)
    new = (base * (1 + rng.normal(0, 1e-4, len(base)))).astype(np.float32)
    assert len(both(base.view(np.uint8), new.view(np.uint8), 4).code) < 0.5 * base.nbytes


def test_nothing_in_common():
    rng = np.random.default_rng(1)
    base, new = rng.integers(0, 256, (2, 1 << 16), np.uint8)
    found = both(base, new, 2)
    assert len(new) < len(found.code) <= len(new) + 8
    assert found.changed > 0.99 * len(new)


@given(made=chunks(), data=st.data())
def test_damage_stays_in_the_chunk(made, data):
    base, new, width = made
    code = bytearray(encode(base, new, width).code)
    assume(code)
    at = data.draw(st.integers(0, len(code) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "longer"])):
        case "flip":
            code[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del code[at:]
        case "longer":
            code.insert(at, 0)
    with contextlib.suppress(ProtocolError):
        decoded(bytes(code), base)


LONG = zlib.compress(bytes(10**6))[2:-4]
"""What DEFLATE makes of more bytes than there is room for."""


@pytest.mark.parametrize(
    "coded",
    [
        7,
        b"short",
        [],
        [3, 1, b"\0", [b"\1"] * 3],  # no width
        [2, 0, b"", [b"", b""]],
        [2, 33, b"\0" * 33, [b"\1" * 33, b""]],  # more than there are elements
        [2, 1 << 40, b"", [b"", b""]],
        [2, 2, b"\x1f\0", [b"\1\1", b""]],  # the last one is behind the end
        [2, 1, b"\x20", [b"\1", b""]],
        [2, 1, b"\xff", [b"", b""]],  # a gap without an end
        [2, 2, b"\0", [b"\1", b""]],
        [2, 1, b"\0", [b"\1"]],
        [2, 1, b"\0", [b"\1", b"", b""]],
        [2, 1, b"\0", [b"\1\1", b""]],
        [2, 1, b"\0", [[b"\1"], b""]],  # not deflated
        [2, 1, b"\0", [["\1"], b""]],
        [2, 1, -1, [b"\1", b""]],
        [2, 1, None, [b"\1", b""]],
        [2, 1, None, [[LONG[:1000]], [LONG + b"\0"]]],
    ],
)
def test_nonsense_is_refused(coded):
    with pytest.raises(ProtocolError, match="no difference of a chunk of 64 bytes"):
        decoded(msgpack.packb(coded), np.zeros(64, np.uint8))


def test_a_width_that_is_none():
    with pytest.raises(ValueError, match="3"):
        encode(np.zeros(64, np.uint8), np.zeros(64, np.uint8), 3)


@pytest.mark.parametrize("is_installed", [True, False])
def test_two_participants_need_not_have_the_same_library(is_installed, monkeypatch):
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 1 << 16, np.uint8)
    new = base + (rng.random(len(base)) < 0.02).astype(np.uint8)
    code = encode(base, new, 2).code
    if not is_installed:
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
    try:
        importlib.reload(differences)
        assert differences.zlib.__name__ == ("zlib_ng.zlib_ng" if is_installed else "zlib")
        out = np.empty_like(base)
        differences.decode(code, base, out)
        assert np.array_equal(out, new)
        other = differences.encode(base, new, 2).code
    finally:
        monkeypatch.undo()
        importlib.reload(differences)
    assert np.array_equal(decoded(other, base), new)
