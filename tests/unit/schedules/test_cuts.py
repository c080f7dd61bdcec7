"""How lengths are cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.schedules.cuts import even_bounds, pieces


@given(st.integers(0, 100), st.integers(1, 20))
def test_slices_are_those_of_numpy(length: int, size: int) -> None:
    bounds = even_bounds(length, size)
    found = [np.arange(length)[a:b] for a, b in pairwise(bounds)]
    for ours, theirs in zip(found, np.array_split(np.arange(length), size), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(st.integers(0, 20), st.integers(0, 60), st.integers(1, 30))
def test_pieces_cover_it_in_order(start: int, length: int, segment: int) -> None:
    found = [*pieces(start, start + length, segment)]
    assert [unit for cut in found for unit in range(*cut)] == list(range(start, start + length))
    assert all(stop - at == segment for at, stop in found[:-1])
    assert all(0 < stop - at <= segment for at, stop in found)


@pytest.mark.parametrize("segment", [0, -1])
def test_a_piece_has_at_least_one_unit(segment: int) -> None:
    with pytest.raises(ValueError, match=f"at least one unit, not {segment}"):
        pieces(0, 1, segment)
