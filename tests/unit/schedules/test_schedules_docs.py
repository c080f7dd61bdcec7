"""The numbers in docs/algorithms.md are those of the plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from aiodist.schedules import (
    chain,
    direct_exchange,
    dissemination,
    recursive_doubling,
    reduce,
    reduce_scatter,
    reduce_scatter_all_gather,
)
from aiodist.schedules.cuts import even_bounds
from aiodist.schedules.plan import Plan
from aiodist.schedules.simulator import simulate

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
SIZE, LENGTH = 8, 64
SLICES = even_bounds(LENGTH, SIZE)

ALGORITHMS: dict[str, Callable[[int], Plan]] = {
    "dissemination.all_gather": lambda r: dissemination.all_gather(r, SIZE),
    "recursive_doubling.all_reduce": lambda r: recursive_doubling.all_reduce(r, SIZE),
    "recursive_doubling.all_reduce_whole": lambda r: recursive_doubling.all_reduce_whole(
        r, SIZE, LENGTH, LENGTH
    ),
    "reduce_scatter_all_gather.all_reduce": lambda r: reduce_scatter_all_gather.all_reduce(
        r, SIZE, LENGTH, LENGTH
    ),
    "reduce_scatter.direct": lambda r: reduce_scatter.direct(r, SIZE, SLICES, LENGTH),
    "reduce_scatter.whole": lambda r: reduce_scatter.whole(r, SIZE, SLICES, LENGTH),
    "reduce.scatter_gather": lambda r: reduce.scatter_gather(r, SIZE, 0, LENGTH, LENGTH),
    "direct_exchange.all_to_all": lambda r: direct_exchange.all_to_all(
        r, SIZE, SLICES, SLICES, LENGTH
    ),
    "chain.broadcast": lambda r: chain.broadcast(r, SIZE, 0, LENGTH, LENGTH),
    "chain.scan": lambda r: chain.scan(r, SIZE, LENGTH, LENGTH, False),
}


def documented() -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^\| `(\w+\.\w+)` \|((?: *\d+ \|)+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: tuple(int(cell) for cell in cells.split("|")[:-1]) for name, cells in rows}


def test_every_algorithm_is_documented() -> None:
    assert set(documented()) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_numbers_are_those_of_the_plans(name: str) -> None:
    plans = [ALGORITHMS[name](rank) for rank in range(SIZE)]
    outcome = simulate(plans, inputs=[LENGTH] * SIZE, outputs=[LENGTH] * SIZE, segment=LENGTH)
    numbers = (
        outcome.rounds,
        max(outcome.frames),
        max(outcome.units),
        max(plan.scratch for plan in plans),
    )
    assert documented()[name] == numbers
