"""Grids: coordinates, and who is beside whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest

from aiodist.topologies.grid import Grid, chosen_dims


class Ranks:
    """A group that is asked for its numbers alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_to_all(self, xs: Any, **options: Any) -> Any:
        raise AssertionError("nothing is sent")

    _forgo = all_to_all


@pytest.mark.parametrize(
    ("size", "dims", "expected"),
    [
        (6, (2, 3), (2, 3)),
        (6, (0, 0), (3, 2)),
        (12, (0, 0), (4, 3)),
        (16, (0, 0, 0), (4, 2, 2)),
        (8, (0, 0, 0), (2, 2, 2)),
        (7, (0, 0), (7, 1)),
        (12, (0, 3, 0), (2, 3, 2)),
        (6, (0, 0, 0), (3, 2, 1)),
        (20, (0, 0, 0), (5, 2, 2)),
        (120, (0, 3, 0, 0), (5, 3, 4, 2)),
        (8, (np.int64(0), np.int8(2)), (4, 2)),
        (1, (), ()),
        (1, (0, 0), (1, 1)),
    ],
)
def test_dims(size: int, dims: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert chosen_dims(size, dims) == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_other_dims_are_more_equal(count: int) -> None:
    for size in range(1, 65):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        every = [
            dims
            for dims in combinations_with_replacement(divisors[::-1], count)
            if math.prod(dims) == size
        ]
        found = chosen_dims(size, (0,) * count)
        assert found in every
        assert found[0] - found[-1] == min(dims[0] - dims[-1] for dims in every)


@pytest.mark.parametrize("dims", [(2.0, 3), ("2", 3), (None, 0), (6, True), 6])
def test_dims_that_are_no_ints(dims: Any) -> None:
    with pytest.raises(TypeError, match=r"^(each of )?dims is a"):
        Grid(Ranks(0, 6), dims)


@pytest.mark.parametrize("dims", [(2, 2), (4, 0), (7,), (-2, -3), (), (12, 0)])
def test_dims_that_do_not_fit(dims: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="dims"):
        Grid(Ranks(0, 6), dims)


def test_coordinates() -> None:
    grids = [Grid(Ranks(rank, 6), (2, 3)) for rank in range(6)]
    assert [grid.coords for grid in grids] == [(a, b) for a in range(2) for b in range(3)]
    assert [grids[0].rank_of(grid.coords) for grid in grids] == list(range(6))
    assert grids[0].rank_of((2, 0)) is None
    assert grids[0].rank_of((0, -1)) is None
    with pytest.raises(ValueError, match="3 coordinates in a grid of 2 axes"):
        grids[0].rank_of((0, 0, 0))
    with pytest.raises(ValueError, match="rank=6 is not a rank of this group of 6"):
        grids[0].coords_of(6)
    with pytest.raises(ValueError, match="axis=2 in a grid of 2 axes"):
        grids[0].shift(2)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda grid: grid.coords_of(0.5), "rank is a rank, an int, not 0.5"),
        (lambda grid: grid.coords_of(True), "rank is a rank, an int, not True"),
        (lambda grid: grid.rank_of((0.5, 0)), "each of coords is an int, not 0.5"),
        (lambda grid: grid.rank_of(1), r"coords is a sequence of ints, such as \(1,\), not 1"),
        (lambda grid: grid.shift(0.0), "axis is an int, not 0.0"),
        (lambda grid: grid.shift(0, "1"), "by is a number of places, an int, not '1'"),
    ],
)
def test_questions_that_name_no_integers(ask: Callable[[Grid], Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"^{words}$"):
        ask(Grid(Ranks(0, 6), (2, 3)))


@pytest.mark.parametrize("periodic", [2, "no", None, (True, 2), ("no", "no")])
def test_periodic_is_bools(periodic: Any) -> None:
    with pytest.raises(TypeError, match=r"^periodic is a bool, or a bool for each of dims, not"):
        Grid(Ranks(0, 6), (2, 3), periodic=periodic)


def test_neighbours() -> None:
    middle = Grid(Ranks(4, 9), (3, 3))
    assert middle.sources == middle.destinations == (1, 7, 3, 5)
    assert middle.shift(1) == (3, 5)
    assert middle.shift(0, -1) == (7, 1)
    assert middle.shift(0, 2) == (None, None)
    corner = Grid(Ranks(0, 9), (3, 3), periodic=(True, False))
    assert corner.sources == (6, 3, None, 1)
    assert corner.shift(0, 4) == (6, 3)
    assert Grid(Ranks(0, 9), (3, 3), periodic=np.True_).periodic == (True, True)
    assert Grid(Ranks(0, 9), (3, 3), periodic=[1, 0]).periodic == (True, False)
    with pytest.raises(ValueError, match="periodic has 1 items"):
        Grid(Ranks(0, 9), (3, 3), periodic=[True])


@pytest.mark.parametrize("dims", [(1,), (2,), (3,), (2, 2), (1, 2, 3)])
def test_what_goes_out_at_one_end_comes_in_at_the_other(dims: tuple[int, ...]) -> None:
    size = math.prod(dims)
    grids = [Grid(Ranks(rank, size), dims, periodic=True) for rank in range(size)]
    for a in grids:
        for b in grids:
            assert len(a._to.get(b._rank, [])) == len(b._from.get(a._rank, []))
            for out, into in zip(a._to.get(b._rank, []), b._from.get(a._rank, []), strict=True):
                assert out ^ 1 == into  # what goes to the one before comes from behind
