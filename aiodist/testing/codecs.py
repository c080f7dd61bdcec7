"""What every codec must do, as tests. For one of your own::

    class TestMine(CodecConformance):
        def codec(self) -> Codec:
            return MyCodec()

The tests are plain methods; no pytest plugin is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final

import numpy as np

from aiodist.codecs.base import Bytes, Codec, Floats

_COUNTS: Final = (0, 1, 2, 3, 7, 8, 63, 127, 128, 129, 255, 256, 257, 1000, 40_001, 70_000)
_GUARD: Final = 64
"""Bytes and values around what a codec may write, which must stay as they are."""


class CodecConformance(ABC):
    """Subclass it and give `codec`."""

    @abstractmethod
    def codec(self) -> Codec:
        """Return a new codec: the same one at each call."""

    def test_two_of_the_same_have_one_name(self) -> None:
        first, second = self.codec(), self.codec()
        assert first.name and first.name == second.name
        assert first.error_feedback is second.error_feedback

    def test_it_writes_within_its_bytes_and_leaves_the_values(self) -> None:
        codec = self.codec()
        assert codec.nbytes(0) == 0
        for count in _COUNTS:
            values = _noise(count)
            before = values.copy()
            values.setflags(write=False)
            most = codec.nbytes(count)
            around = np.full(most + 2 * _GUARD, 0xA5, np.uint8)
            size = codec.encode(values, around[_GUARD : _GUARD + most])
            assert 0 <= size <= most
            assert (around[:_GUARD] == 0xA5).all() and (around[_GUARD + most :] == 0xA5).all()
            assert np.array_equal(values, before)

    def test_it_writes_every_value_and_leaves_the_bytes(self) -> None:
        codec = self.codec()
        for count in _COUNTS:
            data = coded(codec, _noise(count))
            before = data.copy()
            data.setflags(write=False)
            around = np.full(count + 2 * _GUARD, np.nan, np.float32)
            codec.decode(data, around[_GUARD : _GUARD + count])
            assert np.isfinite(around[_GUARD : _GUARD + count]).all()
            assert np.isnan(around[:_GUARD]).all() and np.isnan(around[_GUARD + count :]).all()
            assert np.array_equal(data, before)

    def test_the_same_values_give_the_same_bytes_whatever_came_between(self) -> None:
        codec = self.codec()
        values = _noise(40_001)
        first = coded(codec, values)
        coded(codec, _noise(129) * 1000)
        assert np.array_equal(coded(codec, values), first)
        assert np.array_equal(coded(self.codec(), values), first)

    def test_the_same_bytes_give_the_same_bits(self) -> None:
        values = _noise(40_001)
        data = coded(self.codec(), values)
        outs = [np.full(values.size, fill, np.float32) for fill in (0, np.inf)]
        for out in outs:
            self.codec().decode(data, out)
        assert outs[0].tobytes() == outs[1].tobytes()

    def test_memory_of_any_alignment(self) -> None:
        codec = self.codec()
        values = _noise(1000)
        data = coded(codec, values)
        shifted = np.empty(codec.nbytes(1000) + 1, np.uint8)[1:]
        size = codec.encode(values, shifted)
        assert np.array_equal(shifted[:size], data)
        out = np.empty(4001, np.uint8)[1:].view(np.float32)
        codec.decode(shifted[:size], out)
        assert np.array_equal(out, decoded(codec, data, 1000))
        assert np.array_equal(coded(codec, _unaligned(values)), data)

    def test_finite_values_stay_finite_and_come_nearer_than_zeros(self) -> None:
        # To be a contraction is what error feedback needs to converge.
        codec = self.codec()
        for count in _COUNTS[1:]:
            for values in (_noise(count), _of_all_sizes(count), _sparse(count)):
                there = decoded(codec, coded(codec, values), count)
                assert np.isfinite(there).all()
                exact = values.astype(np.float64)
                lost = np.linalg.norm(exact - there)
                assert lost <= np.linalg.norm(exact), f"{codec.name} of {count} values"

    def test_zeros_stay_zeros(self) -> None:
        codec = self.codec()
        for count in _COUNTS:
            data = coded(codec, np.zeros(count, np.float32))
            assert not decoded(codec, data, count).any()

    def test_what_is_not_finite_is_not_hidden(self) -> None:
        codec = self.codec()
        for bad in (np.nan, np.inf, -np.inf):
            for place in (0, 128, 999):
                values = _noise(1000)
                values[place] = bad
                there = decoded(codec, coded(codec, values), 1000)
                assert not np.isfinite(there[place])

    def test_bytes_that_are_no_coded_values(self) -> None:
        codec = self.codec()
        noise = np.random.default_rng(1)
        data = coded(codec, _noise(1000))
        damaged = [data[:size] for size in range(0, data.size, max(1, data.size // 50))]
        damaged += [np.concatenate([data, data[:extra]]) for extra in (1, 4, 8, data.size)]
        damaged += [noise.integers(0, 256, data.size, np.uint8) for _ in range(50)]
        for _ in range(50):
            flipped = data.copy()
            flipped[noise.integers(data.size, size=3)] ^= 0xFF
            damaged.append(flipped)
        for each in damaged:
            around = np.full(1000 + 2 * _GUARD, 7, np.float32)
            with suppress(ValueError):  # any other exception fails this test
                codec.decode(each, around[_GUARD : _GUARD + 1000])
            assert (around[:_GUARD] == 7).all() and (around[_GUARD + 1000 :] == 7).all()
        for count in (999, 1001, 0):
            try:
                codec.decode(data, np.empty(count, np.float32))
            except ValueError:
                continue
            assert count, f"{codec.name} takes {data.size} bytes for no values"

    def test_sums_have_a_codec_that_members_can_compare(self) -> None:
        of_three = [self.codec().of_sum(3) for _ in range(2)]
        assert of_three[0].name == of_three[1].name
        parts = [_noise(1000, seed) for seed in range(3)]
        there = [decoded(self.codec(), coded(self.codec(), part), 1000) for part in parts]
        total = there[0] + there[1] + there[2]
        again = decoded(of_three[0], coded(of_three[0], total), 1000)
        assert np.linalg.norm(again - total) <= np.linalg.norm(total)


def coded(codec: Codec, values: Floats) -> Bytes:
    """Return the bytes of `values`."""
    out = np.zeros(codec.nbytes(values.size), np.uint8)
    return out[: codec.encode(values, out)].copy()


def decoded(codec: Codec, data: Bytes, count: int) -> Floats:
    """Return the `count` values of `data`."""
    out = np.full(count, np.nan, np.float32)
    codec.decode(data, out)
    return out


def _noise(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def _of_all_sizes(count: int) -> Floats:
    """From denormal numbers to the largest ones."""
    exponents = np.random.default_rng(2).uniform(-45, 38.5, count)
    values = np.sign(_noise(count)) * np.minimum(10.0**exponents, np.finfo(np.float32).max / 2)
    return values.astype(np.float32)


def _sparse(count: int) -> Floats:
    values = _noise(count)
    values[np.random.default_rng(3).random(count) < 0.9] = 0
    return values


def _unaligned(values: Floats) -> Floats:
    copy: Floats = np.empty(values.nbytes + 1, np.uint8)[1:].view(np.float32)
    copy[:] = values
    return copy
