"""The cost model and what is chosen by it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.schedules import cost, recursive_doubling
from aiodist.schedules.plan import Send
from aiodist.schedules.selection import (
    EAGER_LIMIT,
    SEGMENT_LEAST,
    SEGMENT_LIMIT,
    choose_all_reduce,
    choose_reduce,
    choose_scan,
    segment_for,
)
from aiodist.wire.frames import MAX_PAYLOAD

KIB = 1024


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 17, 64])
def test_small_values_go_whole_and_large_ones_in_slices(size: int) -> None:
    for sliceable in (False, True):
        for nbytes in (0, 1, 8, KIB):
            assert choose_all_reduce(nbytes, size, sliceable) == "recursive_doubling"
            assert choose_reduce(nbytes, size, sliceable) == "recursive_doubling"
    for nbytes in (EAGER_LIMIT + 1, 64 * KIB * KIB):
        assert choose_all_reduce(nbytes, size, sliceable=True) == "reduce_scatter_all_gather"
        assert choose_all_reduce(nbytes, size, sliceable=False) == "whole"
        assert choose_reduce(nbytes, size, sliceable=True) == "scatter_gather"
        assert choose_reduce(nbytes, size, sliceable=False) == "whole"


def test_the_model_decides_below_the_limit() -> None:
    # Five ranks need four rounds of the whole value: slices are ahead sooner.
    quick = cost.ONE_HOST_TCP._replace(frame=10e-6)
    assert choose_all_reduce(48 * KIB, 5, True, quick) == "reduce_scatter_all_gather"
    assert choose_reduce(48 * KIB, 5, True, quick) == "scatter_gather"
    assert choose_all_reduce(48 * KIB, 5, False, quick) == "recursive_doubling"
    assert choose_all_reduce(48 * KIB, 8, True, quick) == "recursive_doubling"
    slow = cost.ONE_HOST_TCP._replace(alpha=1.0)
    assert choose_all_reduce(48 * KIB, 4, True, slow) == "recursive_doubling"
    thin = cost.ONE_HOST_TCP._replace(beta=1.0)
    assert choose_all_reduce(48 * KIB, 4, True, thin) == "reduce_scatter_all_gather"


@settings(derandomize=True)
@given(size=st.integers(1, 200), nbytes=st.integers(0, EAGER_LIMIT - 1))
def test_more_bytes_never_lead_back_to_whole_values(size: int, nbytes: int) -> None:
    if choose_all_reduce(nbytes, size, sliceable=True) != "recursive_doubling":
        assert choose_all_reduce(nbytes + 1, size, sliceable=True) != "recursive_doubling"


def test_costs() -> None:
    network = cost.Network(alpha=1.0, beta=0.01, gamma=0.001, frame=0.1)
    assert cost.recursive_doubling(100, 1, network) == 0
    assert cost.recursive_doubling(100, 4, network) == pytest.approx(2 * (1 + 1 + 0.1))
    assert cost.recursive_doubling(100, 5, network) == pytest.approx(4 * (1 + 1 + 0.1))
    # Two rounds; to three peers two more frames in each, and three grants; 3/4 of the bytes.
    assert cost.reduce_scatter_all_gather(100, 4, network) == pytest.approx(
        2 + 0.1 * (2 * 2 + 3) + 75 * (2 * 0.01 + 0.001)
    )


@pytest.mark.parametrize("size", range(1, 40))
def test_the_rounds_of_the_model_are_those_of_the_plan(size: int) -> None:
    plans = [recursive_doubling.all_reduce(rank, size) for rank in range(size)]
    frames = max(sum(isinstance(step, Send) for step in plan.steps) for plan in plans)
    # The rank that stands in for a neighbour receives once more than it sends.
    folded = size & (size - 1) != 0
    assert cost.doubling_rounds(size) == frames + folded


def test_scans_share_what_is_small_in_all() -> None:
    assert choose_scan(16 * KIB, 4) == "gather"
    assert choose_scan(16 * KIB + 1, 4) == "chain"
    assert choose_scan(0, 1000) == "gather"


@settings(derandomize=True)
@given(nbytes=st.integers(0, 1 << 40), itemsize=st.integers(1, SEGMENT_LIMIT))
def test_a_segment_fits_into_a_frame(nbytes: int, itemsize: int) -> None:
    segment = segment_for(nbytes, itemsize)
    assert segment >= 1
    assert segment * itemsize <= SEGMENT_LIMIT == MAX_PAYLOAD
    if itemsize <= SEGMENT_LEAST:
        assert segment * itemsize > SEGMENT_LEAST - itemsize


def test_segments_grow_with_the_stream() -> None:
    found = [segment_for(nbytes, 4) * 4 for nbytes in (0, 64 * KIB, 512 * KIB, 1 << 22, 1 << 30)]
    assert found == [16 * KIB, 64 * KIB, 256 * KIB, 256 * KIB, 256 * KIB]
    assert segment_for(1 << 30, 3) == 256 * KIB // 3


@pytest.mark.parametrize("itemsize", [0, SEGMENT_LIMIT + 1])
def test_units_that_no_frame_can_hold(itemsize: int) -> None:
    with pytest.raises(ValueError, match=f"not {itemsize}: no frame could hold one"):
        segment_for(100, itemsize)


def test_eager_values_fit_into_a_frame_in_a_wider_accumulator() -> None:
    assert EAGER_LIMIT * 4 <= MAX_PAYLOAD
