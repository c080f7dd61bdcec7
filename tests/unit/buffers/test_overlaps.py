"""Which arrays share memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.buffers.overlaps import Ranges, bounds, same

WHOLE = np.zeros(20, np.uint8)

cuts = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0, 4), (0, 4), True),
        ((0, 4), (0, 5), False),
        ((0, 4), (1, 4), False),
        ((0, 4), (4, 8), False),
    ],
)
def test_the_same_memory(a: tuple[int, int], b: tuple[int, int], expected: bool) -> None:
    assert same(WHOLE[slice(*a)], WHOLE[slice(*b)]) is expected


def test_the_same_memory_as_another_dtype() -> None:
    assert same(WHOLE[:8], WHOLE[:8].view(np.int64))


@given(st.lists(cuts, max_size=6), cuts)
def test_it_is_as_a_set_of_addresses_says(spans: list[list[int]], one: list[int]) -> None:
    addresses = [set(range(*span)) for span in spans]
    ranges = Ranges([WHOLE[slice(*span)] for span in spans])
    assert ranges.overlap == any(a & b for a, b in itertools.combinations(addresses, 2))
    if not ranges.overlap:
        touched = any(each & set(range(*one)) for each in addresses)
        assert ranges.touch(WHOLE[slice(*one)]) == touched


def test_bounds_are_those_of_all_elements():
    x = np.arange(48.0).reshape(8, 6)
    begin = x.ctypes.data
    assert bounds(x) == (begin, begin + x.nbytes)
    assert bounds(x[2:4, 1:3]) == (begin + 13 * 8, begin + 21 * 8)
    assert bounds(x[::-1, ::-2]) == (begin + 8, begin + x.nbytes)
    assert bounds(x[0, 0:1].reshape(())) == (begin, begin + 8)
