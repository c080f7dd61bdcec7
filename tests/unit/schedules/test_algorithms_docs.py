"""The numbers in docs/algorithms.md are those of the plans."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from aiodist.schedules import (
    bruck,
    chain,
    direct_exchange,
    dissemination,
    halving_doubling,
    prefixes,
    pull_scan,
    pull_slices,
    pull_values,
    pull_whole,
    recursive_doubling,
    reduce,
    reduce_scatter,
    reduce_scatter_all_gather,
    ring,
    spread,
    star,
    team_slices,
    team_values,
    team_whole,
    tree,
)
from aiodist.schedules.cuts import even_bounds
from aiodist.schedules.plan import Await, Copy, Grant, Plan, Recv, Reduce, Send
from aiodist.schedules.selection import SCRATCH_LIMIT, Choice
from aiodist.testing.plan_simulator import simulate

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
SIZE, LENGTH = 8, 64
SLICES = even_bounds(LENGTH, SIZE)
PART = LENGTH // SIZE
PARTS = (PART,) * SIZE

ALGORITHMS: dict[str, Callable[[int], Plan]] = {
    "dissemination.all_gather": lambda r: dissemination.all_gather(r, SIZE),
    "star.all_gather": lambda r: star.all_gather(r, SIZE),
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
    "direct_exchange.all_reduce": lambda r: direct_exchange.all_reduce(r, SIZE),
    "direct_exchange.share": lambda r: direct_exchange.share(r, SIZE),
    "direct_exchange.all_to_all": lambda r: direct_exchange.all_to_all(
        r, SIZE, SLICES, SLICES, LENGTH
    ),
    "halving_doubling.all_reduce": lambda r: halving_doubling.all_reduce(
        r, SIZE, LENGTH, LENGTH, LENGTH
    ),
    "halving_doubling.reduce": lambda r: halving_doubling.reduce(
        r, SIZE, 0, LENGTH, LENGTH, LENGTH
    ),
    "halving_doubling.reduce_scatter": lambda r: halving_doubling.reduce_scatter(
        r, SIZE, SLICES, LENGTH
    ),
    "ring.all_reduce": lambda r: ring.all_reduce(r, SIZE, LENGTH, LENGTH),
    "ring.reduce_scatter": lambda r: ring.reduce_scatter(r, SIZE, SLICES, LENGTH),
    "direct_exchange.uniform": lambda r: direct_exchange.uniform(r, SIZE, PART, LENGTH),
    "direct_exchange.all_gather": lambda r: direct_exchange.all_gather(r, SIZE, PARTS, LENGTH),
    "direct_exchange.gather": lambda r: direct_exchange.gather(r, SIZE, 0, PARTS, LENGTH),
    "direct_exchange.scatter": lambda r: direct_exchange.scatter(r, SIZE, 0, PARTS, LENGTH),
    "bruck.all_gather": lambda r: bruck.all_gather(r, SIZE, PARTS, LENGTH),
    "bruck.all_to_all": lambda r: bruck.all_to_all(r, SIZE, PART, LENGTH),
    "tree.broadcast": lambda r: tree.broadcast(r, SIZE, 0, LENGTH, LENGTH),
    "tree.gather": lambda r: tree.gather(r, SIZE, 0, PARTS, LENGTH),
    "tree.scatter": lambda r: tree.scatter(r, SIZE, 0, PARTS, LENGTH),
    "spread.straight": lambda r: spread.straight(r, SIZE, 0, LENGTH, LENGTH),
    "spread.tree": lambda r: spread.tree(r, SIZE, 0, LENGTH, LENGTH),
    "prefixes.scan": lambda r: prefixes.scan(r, SIZE, LENGTH, LENGTH, False),
    "chain.broadcast": lambda r: chain.broadcast(r, SIZE, 0, LENGTH, LENGTH),
    "chain.scan": lambda r: chain.scan(r, SIZE, LENGTH, LENGTH, False),
}


PULLS: dict[str, Callable[[int], Plan]] = {
    "pull_whole.all_reduce": lambda r: pull_whole.all_reduce(r, SIZE, LENGTH),
    "pull_whole.all_reduce_in_pieces": lambda r: pull_whole.all_reduce_in_pieces(
        r, SIZE, LENGTH, 16, 2
    ),
    "pull_whole.reduce": lambda r: pull_whole.reduce(r, SIZE, 0, LENGTH),
    "pull_whole.reduce_scatter": lambda r: pull_whole.reduce_scatter(r, SIZE, SLICES),
    "pull_whole.scan": lambda r: pull_whole.scan(r, SIZE, LENGTH, False),
    "pull_whole.share": lambda r: pull_whole.share(r, SIZE, 8),
    "pull_slices.all_reduce": lambda r: pull_slices.all_reduce(r, SIZE, LENGTH, 2, 2),
    "pull_slices.reduce": lambda r: pull_slices.reduce(r, SIZE, 0, LENGTH, 2, 2),
    "pull_slices.reduce_scatter": lambda r: pull_slices.reduce_scatter(r, SIZE, SLICES, 2, 2),
    "pull_values.broadcast": lambda r: pull_values.broadcast(r, SIZE, 0, LENGTH, 16, 2),
    "pull_values.all_gather": lambda r: pull_values.all_gather(r, SIZE, (8,) * SIZE, 2, 2),
    "pull_values.exchange": lambda r: pull_values.exchange(r, SIZE, SLICES, SLICES, 4, 2, 2),
    "pull_scan.scan": lambda r: pull_scan.scan(r, SIZE, LENGTH, False, 16, 2),
}


HOSTS = ((0, 1, 2, 3), (4, 5, 6, 7))

MIXED: dict[str, Callable[[int], Plan]] = {
    "team_whole.share": lambda r: team_whole.share(r, HOSTS),
    "team_whole.all_reduce": lambda r: team_whole.all_reduce(r, HOSTS, LENGTH),
    "team_whole.reduce": lambda r: team_whole.reduce(r, HOSTS, 0, LENGTH),
    "team_whole.broadcast": lambda r: team_whole.broadcast(r, HOSTS, 0, LENGTH),
    "team_slices.all_reduce": lambda r: team_slices.all_reduce(r, HOSTS, LENGTH, 2),
    "team_slices.reduce": lambda r: team_slices.reduce(r, HOSTS, 0, LENGTH, 2),
    "team_slices.reduce_scatter": lambda r: team_slices.reduce_scatter(r, HOSTS, SLICES, 2),
    "team_values.broadcast": lambda r: team_values.broadcast(r, HOSTS, 0, LENGTH, 4),
    "team_values.all_gather": lambda r: team_values.all_gather(r, HOSTS, (8,) * SIZE, 2),
}


def documented() -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^\| `(\w+\.\w+)` \|((?: *\d+ \|)+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: tuple(int(cell) for cell in cells.split("|")[:-1]) for name, cells in rows}


def test_every_algorithm_is_documented() -> None:
    assert set(documented()) == {*ALGORITHMS, *PULLS, *MIXED}


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


@pytest.mark.parametrize("name", PULLS)
def test_the_numbers_are_those_of_the_pull_plans(name: str) -> None:
    plans = [PULLS[name](rank) for rank in range(SIZE)]
    outcome = simulate(plans, inputs=[LENGTH] * SIZE, outputs=[LENGTH] * SIZE)
    numbers = (
        outcome.rounds,
        max(len(plan.steps) for plan in plans),
        plans[0].publishes,
        max(sum(isinstance(step, Await) for step in plan.steps) for plan in plans),
        max(map(copied, plans)),
        max(map(reduced, plans)),
        plans[0].shared,
    )
    assert documented()[name] == numbers


@pytest.mark.parametrize("name", MIXED)
def test_the_numbers_are_those_of_the_mixed_plans(name: str) -> None:
    plans = [MIXED[name](rank) for rank in range(SIZE)]
    outcome = simulate(
        plans, inputs=[LENGTH] * SIZE, outputs=[LENGTH] * SIZE, segment=LENGTH, teams=HOSTS
    )
    numbers = (
        outcome.rounds,
        max(outcome.frames),
        sum(outcome.units),
        plans[0].publishes,
        max(map(copied, plans)),
        max(map(reduced, plans)),
        plans[0].shared,
        max(plan.scratch for plan in plans),
    )
    assert documented()[name] == numbers


def table() -> ModuleType:
    """docs/choices.py, which writes the table of what is chosen."""
    spec = importlib.util.spec_from_file_location("choices", PAGE.parent / "choices.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [2, 8, pytest.param(128, marks=pytest.mark.long)])
def test_the_table_of_choices_says_what_the_plans_do(size: int) -> None:
    wrong: list[tuple[object, ...]] = []
    for operation, (sizes, choose) in table().OPERATIONS.items():
        for name, nbytes in sizes.items():
            chosen: Choice = choose(nbytes, size)
            plans = [chosen.algorithm(rank, size, *chosen.args) for rank in range(size)]
            found = (
                max(max(count(plan, Send), count(plan, Recv)) for plan in plans),
                max(count(plan, Grant) for plan in plans),
                max(map(connections, plans)),
            )
            tally = chosen.tally
            said = tally.frames, tally.grants, tally.connections
            if found != said or max(plan.scratch for plan in plans) > SCRATCH_LIMIT:
                wrong.append((operation, name, chosen.name, found, said))
    assert not wrong


def count(plan: Plan, kind: type) -> int:
    return sum(isinstance(step, kind) for step in plan.steps)


def connections(plan: Plan) -> int:
    return len({step.peer for step in plan.steps if isinstance(step, Send | Recv)})


def copied(plan: Plan) -> int:
    return sum(step.into.length for step in plan.steps if isinstance(step, Copy))


def reduced(plan: Plan) -> int:
    """Units of operands."""
    return sum(
        operand.length
        for step in plan.steps
        if isinstance(step, Reduce)
        for operand in step.operands
    )
