"""Scratch of reductions by teams."""

from __future__ import annotations

import pytest

from aiodist.schedules import team_slices


@pytest.mark.parametrize("teams", [((0, 1), (2, 3)), ((0,), (1, 2, 3)), ((0, 2), (1,), (3, 4))])
@pytest.mark.parametrize("lag", [1, 3])
def test_no_rank_has_more_places_than_are_said(
    teams: tuple[tuple[int, ...], ...], lag: int
) -> None:
    size, piece = sum(map(len, teams)), 4
    scratch = [
        team_slices.all_reduce(rank, teams, 100 * size * piece, piece, lag).scratch
        for rank in range(size)
    ]
    assert 0 < max(scratch) <= team_slices.places(teams, lag) * piece
