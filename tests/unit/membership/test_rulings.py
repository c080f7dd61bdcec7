"""Whom a broken link costs the membership."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.membership.rulings import losers


@given(
    st.integers(2, 6).flatmap(lambda n: st.sets(st.sampled_from(list(combinations(range(n), 2)))))
)
def test_whoever_stays_can_reach_each_other(broken: set[tuple[int, int]]) -> None:
    gone = losers(broken, lambda rank: rank)
    assert not [pair for pair in broken if not {*gone} & {*pair}]
    assert len(gone) == len({*gone}) <= len(broken)


@pytest.mark.parametrize(
    ("broken", "gone"),
    [
        ([], []),
        ([("a", "b")], ["b"]),
        ([("b", "a"), ("a", "b")], ["b"]),  # one link, which both report
        ([("a", "b"), ("a", "c")], ["a"]),  # whoever has the most broken links
        ([("a", "b"), ("c", "d")], ["d", "b"]),
        ([("a", "b"), ("b", "c"), ("c", "a")], ["c", "b"]),
    ],
)
def test_the_most_broken_links_first_and_then_the_highest_rank(
    broken: list[tuple[str, str]], gone: list[str]
) -> None:
    assert losers(broken, "abcd".index) == gone
