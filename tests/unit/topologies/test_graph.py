"""Graphs: the ranks that a program names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist.topologies.graph import Graph


class Named:
    """A group that is asked for its numbers alone."""

    rank, size = 0, 3

    def all_to_all(self, xs: Any, **options: Any) -> Any:
        raise AssertionError("nothing is sent")

    _forgo = all_to_all


@pytest.mark.parametrize(
    ("ranks", "error", "words"),
    [
        ([3], ValueError, "each of sources=3 is not a rank of this group of 3"),
        ([0, -1], ValueError, "each of sources=-1 is not a rank"),
        ([True], TypeError, "each of sources is a rank, an int, not True"),
        ([0.0], TypeError, "each of sources is a rank, an int, not 0.0"),
        (["0"], TypeError, "each of sources is a rank, an int, not '0'"),
        (1, TypeError, r"sources is a sequence of ranks, such as \[1\], not 1"),
    ],
)
def test_neighbours_that_are_no_ranks(ranks: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        Graph(Named(), ranks)
    with pytest.raises(error, match=f"^{words.replace('sources', 'destinations')}"):
        Graph(Named(), [0], ranks)


def test_ranks_of_numpy_become_ints() -> None:
    graph = Graph(Named(), np.arange(2), (rank for rank in [2]))
    assert (graph.sources, graph.destinations) == ((0, 1), (2,))
    assert {type(rank) for rank in graph.sources} == {int}
    once = Graph(Named(), (rank for rank in [1, 2]))
    assert once.destinations == once.sources == (1, 2)
