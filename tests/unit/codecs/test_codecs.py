"""What each codec loses, and in how many bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.codecs import Codec, ErrorFeedback, bf16, int4, int8, topk
from aiodist.codecs.base import Floats, codec_of
from aiodist.codecs.largest import largest
from aiodist.testing.codecs import coded, decoded


def of_any_bits(seed: int) -> Floats:
    """Some floats: every second array holds those of any bits (NaN is quiet)."""
    noise = np.random.default_rng(seed)
    count = int(noise.choice([0, 1, 2, 5, 63, 64, 300, 700]))
    values = noise.standard_normal(count).astype(np.float32)
    if seed % 2:
        bits = noise.integers(0, 1 << 32, count, np.uint32)
        values = (bits | (np.isnan(bits.view(np.float32)) * np.uint32(1 << 22))).view(np.float32)
        special = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, 3.4e38, 3.39e38], np.float32)
        where = noise.random(count) < noise.choice([0, 0.01, 0.5])
        values[where] = noise.choice(special, np.count_nonzero(where))
    return values


SEEDS = range(100)


def through(codec: Codec, values: Floats) -> Floats:
    return decoded(codec, coded(codec, values), values.size)


@pytest.mark.parametrize(
    ("codec", "share"), [(bf16(), 0.5), (int8(), 0.26), (int4(), 0.14), (topk(0.01), 0.02)]
)
def test_share_of_the_bytes(codec: Codec, share: float) -> None:
    for count in (1 << 16, 1_000_000, 1_000_003):
        assert codec.nbytes(count) <= share * 4 * count + 8


def test_bf16_rounds_to_the_nearest() -> None:
    values = np.concatenate([of_any_bits(seed) for seed in SEEDS])
    there = through(bf16(), values)
    assert np.array_equal(np.isnan(values), np.isnan(there))
    assert not (there.view(np.uint32) & 0xFFFF).any()
    near = np.isfinite(there)
    assert (abs(values[~near & ~np.isnan(values)]) > 3.39e38).all()
    lower = (values.view(np.uint32) & 0xFFFF0000)[near]
    exact, there = values[near].astype(np.float64), there[near]
    off = [abs(exact - bits.view(np.float32)) for bits in (lower, lower + np.uint32(0x10000))]
    assert np.array_equal(abs(exact - there), np.minimum(*off))


@pytest.mark.parametrize("block", [2, 5, 64, 256])
@pytest.mark.parametrize(("kind", "levels"), [(int8, 127), (int4, 7)])
def test_integers_are_off_by_half_a_step_of_their_block(
    kind: type[int8 | int4], levels: int, block: int
) -> None:
    values = np.concatenate([of_any_bits(seed) for seed in SEEDS])
    there = through(kind(block=block), values)
    for start in range(0, values.size, block):
        before = values[start : start + block].astype(np.float64)
        after = there[start : start + block]
        peak = abs(before).max()
        if not np.isfinite(peak):
            assert np.isnan(after).all()
        elif peak < 1e-36:
            assert not after.any()
        else:
            assert (abs(after - before) <= peak / levels * 0.5001).all()


def test_the_largest_floats_do_not_become_infinite() -> None:
    most = np.finfo(np.float32).max
    peaks = most - np.arange(1000) * np.float32(2) ** 104
    values = np.repeat(peaks.astype(np.float32), 2)
    for codec in (int8(block=2), int4(block=2)):
        there = through(codec, values)
        assert np.isfinite(there).all()
        np.testing.assert_allclose(there, values, rtol=1e-6)


@pytest.mark.parametrize("kept", [1, 3, 50, 800])
def test_largest_keeps_those_of_the_largest_magnitude(kept: int) -> None:
    for seed in SEEDS:
        values = of_any_bits(seed)
        places = largest(values, kept)
        magnitudes = np.where(np.isnan(values), np.inf, abs(values))
        assert places.size == min(kept, np.count_nonzero(values))
        assert (np.diff(places) > 0).all()
        rest = np.delete(magnitudes, places)
        if places.size and rest.size:
            assert magnitudes[places].min() >= rest.max()


def test_topk_keeps_at_least_one_value_that_is_not_finite() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for count in (1, 100, 40_000):
            values = np.ones(40_000, np.float32)
            values[-count:] = bad
            there = through(topk(0.01), values)
            assert np.count_nonzero(~np.isfinite(there)) == min(count, 400)


def test_of_equal_values_the_first_are_kept() -> None:
    values = np.tile(np.array([1, -2, 2, 3], np.float32), 1000)
    places = largest(values, 1500)
    assert np.count_nonzero(values[places] == 3) == 1000
    assert places[values[places] != 3].tolist() == [
        place for place in range(1000) if abs(values[place]) == 2
    ]


def test_largest_of_values_that_the_sample_misses() -> None:
    values = np.zeros(1 << 20, np.float32)
    values[:: (1 << 20) >> 14] = 1e-3  # all of the sample
    values[7:2000:2] = np.arange(997) + 1
    assert np.array_equal(np.sort(values[largest(values, 2000)]), np.sort(values)[-2000:])
    values[:: (1 << 20) >> 14] = 100.0  # the sample is larger than the rest
    assert largest(values, 30_000).size == np.count_nonzero(values) == 17_381


@pytest.mark.parametrize("count", [0, 1, 10, 1000, 100_000])
def test_the_sum_of_sparse_arrays_is_coded_without_loss(count: int) -> None:
    noise = np.random.default_rng(4)
    for share in (0.001, 0.01, 0.2, 0.5):
        codec = topk(share)
        parts = [through(codec, noise.standard_normal(count).astype(np.float32)) for _ in range(4)]
        total = np.sum(parts, axis=0, dtype=np.float32)
        of_sum = codec.of_sum(4)
        data = coded(of_sum, total)
        assert np.array_equal(decoded(of_sum, data, count), total)
        assert data.size <= min(4 * count, sum(coded(codec, part).size for part in parts))


def test_places_that_are_none() -> None:
    codec = topk(0.1)
    values = np.arange(100, dtype=np.float32)
    data = coded(codec, values)
    for places in ([3, 3], [5, 4], [0, 100], [0, 2**32 - 1]):
        wrong = data[:16].copy()
        wrong[:8] = np.array(places, "<u4").view(np.uint8)
        with pytest.raises(ValueError, match="16 bytes are not 100 values"):
            codec.decode(wrong, values)
    with pytest.raises(ValueError, match="88 bytes"):
        codec.decode(np.zeros(88, np.uint8), values)


@pytest.mark.parametrize("codec", [bf16(), int8(), int4(), topk(0.02)], ids=str)
def test_error_feedback_loses_nothing_over_time(codec: Codec) -> None:
    noise = np.random.default_rng(5)
    feedback = ErrorFeedback(1000)
    constant = noise.standard_normal(1000).astype(np.float32)
    sent, there, rounds = np.zeros(1000), np.zeros(1000), 200
    for _ in range(rounds):
        values = constant + noise.standard_normal(1000).astype(np.float32) / 10
        sent += values
        out, got = np.empty(codec.nbytes(1000), np.uint8), np.empty(1000, np.float32)
        size = feedback.encode(codec, values, out, got)
        assert np.array_equal(decoded(codec, out[:size], 1000), got)
        there += got
    np.testing.assert_allclose(there + feedback.residual, sent, rtol=0, atol=1e-2)
    once = np.linalg.norm(through(codec, constant) - constant)
    assert np.linalg.norm(there - sent) / rounds < once / 2


def test_feedback_forgets_what_is_not_finite() -> None:
    feedback = ErrorFeedback(4)
    codec = int8(block=2)
    values = np.array([1, np.nan, 3, 4.1], np.float32)
    out = np.empty(codec.nbytes(4), np.uint8)
    feedback.encode(codec, values, out, values)  # `decoded` may be the values
    assert np.isnan(values[:2]).all() and np.isfinite(values[2:]).all()
    assert not feedback.residual[:2].any() and feedback.residual[2] != 0


@pytest.mark.parametrize("block", [0, -1, 40_000, True, 2.5, "8"])
def test_blocks_that_are_none(block: object) -> None:
    for kind in (int8, int4):
        with pytest.raises(ValueError, match="expected an integer from 1 to 32768"):
            kind(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, -0.1, 1.1, True, float("nan"), "all"])
def test_shares_that_are_none(share: object) -> None:
    with pytest.raises(ValueError, match="expected a number above 0, at most 1"):
        topk(share)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [bf16, int8, int4, topk])
def test_arguments_that_are_none(kind: Any) -> None:
    with pytest.raises(ValueError, match="error_feedback='x': expected True or False"):
        kind(error_feedback="x")
    with pytest.raises(ValueError, match="count=-1: expected 0 or more values"):
        kind().nbytes(-1)


def test_names_hold_what_changes_the_bytes() -> None:
    assert aiodist.codecs.int8().name == "int8(block=256)"
    assert int4(64, error_feedback=True).name == "int4(block=64)"
    assert topk(1).name == "topk(share=1.0)"
    assert topk(0.1).of_sum(2).of_sum(3).name == "topk(share=0.1, members=6)"
    assert topk(0.1, error_feedback=True).of_sum(2).error_feedback
    assert bf16().of_sum(2).name == "bf16()"
    assert repr(bf16()) == "aiodist.codecs.bf16()"


def test_a_name_that_cannot_be_told_to_others_is_refused() -> None:
    codec = int8()
    codec.name = "x" * 257
    with pytest.raises(ValueError, match="the name of this codec has 257 characters"):
        codec_of(codec)
