"""Prepared plans: what they take of memory does not grow with the array."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest

from aiodist.engine.phase import prepared
from aiodist.phases import pulls, teams
from aiodist.schedules import (
    halving_doubling,
    pull_direct,
    pull_scan,
    pull_slices,
    pull_values,
    pull_whole,
    ring,
    team_slices,
    team_values,
)
from aiodist.schedules.choose_reductions import (
    Shape,
    choose_all_reduce,
    choose_reduce,
    choose_reduce_scatter,
    choose_scan,
)
from aiodist.schedules.choose_values import (
    choose_all_gather,
    choose_all_to_all,
    choose_broadcast,
    choose_gather,
    choose_scatter,
)
from aiodist.schedules.cuts import even_bounds
from aiodist.schedules.plan import Plan
from aiodist.schedules.script import LISTED
from aiodist.schedules.selection import SCRATCH_LIMIT

MOST = 2 * 2**20
"""Bytes of a plan, of whatever size the array is."""


def plans(size: int, nbytes: int) -> Iterator[tuple[Callable[..., Plan], tuple[Any, ...]]]:
    """The plans of rank 0 for arrays of `nbytes`, or as much for each of the ranks."""
    length, lengths = nbytes // 4, (nbytes,) * size
    x, bounds = Shape(length, 4, 4), even_bounds(length, size)
    starts = tuple(accumulate(lengths, initial=0))
    for choice in (
        choose_all_reduce(x, size),
        choose_all_reduce(x._replace(sliceable=False), size),
        choose_reduce(x, size, 0),
        choose_reduce_scatter(x, bounds),
        choose_scan(x, size, False),
        choose_broadcast(nbytes, size, 0),
        choose_all_gather(lengths),
        choose_all_gather((*lengths[1:], nbytes // 3)),
        choose_gather(lengths, 0),
        choose_scatter(lengths, 0),
        choose_all_to_all(nbytes, size),
    ):
        yield choice.algorithm, (0, size, *choice.args)
    yield ring.all_reduce, (0, size, length, 2**16)
    yield ring.reduce_scatter, (0, size, bounds, 2**16)
    yield halving_doubling.all_reduce, (0, size, length, 2**16, 2**20)
    yield halving_doubling.reduce, (0, size, 0, length, 2**16, 2**20)

    slices = pulls.piece_for(size, 4, -(-length // size))
    yield pull_slices.all_reduce, (0, size, length, slices, 3)
    yield pull_whole.all_reduce_in_pieces, (0, size, length, pulls.BULK // 12, 3)
    yield pull_slices.reduce, (0, size, 0, length, slices, 3)
    yield pull_slices.reduce_scatter, (0, size, bounds, slices, 3)
    yield pull_direct.all_reduce, (0, size, length, slices)
    yield pull_direct.reduce_scatter, (0, size, bounds, pulls.PAUSE // 4)
    yield pull_direct.take, (0, size, (0,) * size, starts, 0, pulls.PAUSE)
    piece = pulls.piece_for(1, 1, nbytes, 4)
    yield pull_values.broadcast, (1, size, 0, nbytes, piece, 3)
    yield pull_values.all_gather, (0, size, lengths, piece, 3)
    yield pull_scan.scan, (0, size, length, False, piece // 4, 3)
    piece = pulls.piece_for(size - 1, 1, nbytes, 4)
    yield pull_values.exchange, (0, size, starts, starts, -(-nbytes // piece), piece, 3)

    hosts = tuple(range(size // 2)), tuple(range(size // 2, size))
    piece = teams.piece_for(size, 4, -(-length // size), 4)
    yield team_slices.all_reduce, (0, hosts, length, piece)
    yield team_slices.reduce, (0, hosts, 0, length, piece)
    yield team_slices.reduce_scatter, (0, hosts, bounds, piece)
    yield team_values.broadcast, (0, hosts, 0, nbytes, piece)
    yield team_values.all_gather, (0, hosts, lengths, piece)


@pytest.mark.parametrize("size", [2, 8])
def test_steps_in_memory_and_scratch_do_not_grow_with_the_array(size: int) -> None:
    for algorithm, args in plans(size, 2**40):
        made = prepared(algorithm, *args)
        name = made.plan.name
        assert len(made.plan.steps) > 10 * LISTED, name
        assert made.weight <= LISTED + 1, name
        assert name.endswith("whole") or 4 * made.plan.scratch <= SCRATCH_LIMIT, name


def test_the_memory_of_a_plan_does_not_grow_with_the_array() -> None:
    for algorithm, args in plans(3, 2**38):
        tracemalloc.start()
        try:
            made = prepared(algorithm, *args)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken <= MOST, f"{made.plan.name} takes {taken} bytes"
