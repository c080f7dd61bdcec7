"""Sections of arrays: all elements once and in order, in sections of bounded size."""

from __future__ import annotations

import pytest

from aiodist.devices.sections import Cut, cuts


@pytest.mark.parametrize("most", [1, 7, 8, 64, 1000])
@pytest.mark.parametrize(
    ("lengths", "sizes"), [([], []), ([0], [8]), ([5, 0, 9], [8, 4, 2]), ([1], [100]), ([100], [3])]
)
def test_all_is_cut_once_and_in_order(lengths: list[int], sizes: list[int], most: int) -> None:
    sections = cuts(lengths, sizes, most)
    found = [
        (cut.array, at)
        for cut_list in sections
        for cut in cut_list
        for at in range(cut.start, cut.stop)
    ]
    assert found == [(array, at) for array, length in enumerate(lengths) for at in range(length)]
    for section in sections:
        nbytes = sum((cut.stop - cut.start) * sizes[cut.array] for cut in section)
        assert nbytes <= most or (len(section) == 1 and section[0].stop - section[0].start == 1)


def test_small_arrays_share_a_section() -> None:
    assert list(cuts([2, 3], [4, 4], 100)) == [[Cut(0, 0, 2), Cut(1, 0, 3)]]


def test_there_is_one_section_even_of_nothing() -> None:
    assert list(cuts([], [], 8)) == [[]]
