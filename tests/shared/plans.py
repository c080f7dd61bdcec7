"""Running plans of all ranks in the simulator, and looking at what came out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from aiodist.schedules.plan import OUT, Plan, X
from aiodist.schedules.teams import Teams
from aiodist.testing.plan_simulator import (
    Reduced,
    SimulationResult,
    Unit,
    Value,
    contributors,
    simulate,
)

SIZES = range(1, 18)


def of(size: int, *more: int) -> Any:
    """What is shown of the sizes up to 9, and of 12, is left to `make test-all` for others: there
    are powers of two among them, numbers beside those, and what is far from any."""
    return pytest.param(size, *more, marks=() if size < 10 or size == 12 else pytest.mark.long)


sizes = pytest.mark.parametrize("size", [of(size) for size in SIZES])
windows = pytest.mark.parametrize(
    ("size", "window"),
    [of(size, w) for size in SIZES for w in ((1, 2, 3, 4, 7) if size < 5 else (2 + size % 3,))],
)


def lengths(size: int) -> list[int]:
    """Empty, fewer units than ranks, even, odd, one and several segments a rank."""
    if size > 4:
        return [size - 1, 2 * size + 1]
    return sorted({0, 1, size - 1, size, 2 * size + 1, 5 * size + 3})


def roots(size: int) -> set[int]:
    return {size // 2} if size > 4 else {0, size // 2, size - 1}


class Drawn(NamedTuple):
    """A collective at random: ranks, units of a segment, segments of a window, units of each slice,
    the root, a seed for the order of steps, and who has its result in the place of its input."""

    size: int
    segment: int
    window: int
    slices: list[int]
    root: int
    seed: int
    in_place: Sequence[int]

    @property
    def length(self) -> int:
        return sum(self.slices)


@st.composite
def shapes(draw: st.DrawFn, windows: st.SearchStrategy[int], longest: int) -> Drawn:
    """Those with such `windows`, and slices of so many units at most."""
    size = draw(st.integers(1, 7))
    root = draw(st.integers(0, size - 1))
    return Drawn(
        size,
        draw(st.integers(1, 5)),
        draw(windows),
        draw(st.lists(st.integers(0, longest), min_size=size, max_size=size)),
        root,
        draw(st.integers(0, 2**32)),
        draw(st.sampled_from([(), (root,), range(size)])),
    )


def plans_of(plan: Callable[[int], Plan], size: int) -> list[Plan]:
    """Those of all ranks, by rank."""
    plans = [plan(rank) for rank in range(size)]
    assert plans == [plan(rank) for rank in range(size)], "plans must be pure"
    return plans


def run(
    plan: Callable[[int], Plan],
    size: int,
    inputs: int | Sequence[int] = 0,
    outputs: int | Sequence[int] = 0,
    **options: Any,
) -> SimulationResult:
    """See `outcome_of`."""
    return outcome_of(plans_of(plan, size), inputs, outputs, **options)


def everywhere(
    plan: Callable[..., Plan],
    size: int,
    length: int,
    *args: Any,
    in_place: bool = False,
    **options: Any,
) -> tuple[list[Plan], SimulationResult]:
    """``plan(rank, size, length, *args)`` of all ranks, which have so many units and get as many,
    and what comes of it."""
    plans = plans_of(lambda rank: plan(rank, size, length, *args), size)
    places = range(size) if in_place else ()
    return plans, outcome_of(plans, length, length, in_place=places, **options)


def at_root(
    plan: Callable[..., Plan], size: int, root: int, length: int, *args: Any, **options: Any
) -> tuple[list[Plan], SimulationResult]:
    """``plan(rank, size, root, length, *args)`` of all ranks, which have so many units, of whom
    `root` gets as many, and what comes of it."""
    plans = plans_of(lambda rank: plan(rank, size, root, length, *args), size)
    outputs = [length if rank == root else 0 for rank in range(size)]
    return plans, outcome_of(plans, length, outputs, **options)


def to_slices(
    plan: Callable[..., Plan], bounds: Sequence[int], *args: Any, **options: Any
) -> tuple[list[Plan], SimulationResult]:
    """``plan(rank, size, bounds, *args)`` of all ranks, which have the same number of units, of
    which each gets its slice, and what comes of it."""
    size = len(bounds) - 1
    plans = plans_of(lambda rank: plan(rank, size, bounds, *args), size)
    slices = [stop - start for start, stop in pairwise(bounds)]
    return plans, outcome_of(plans, bounds[-1], slices, **options)


def outcome_of(
    plans: Sequence[Plan],
    inputs: int | Sequence[int] = 0,
    outputs: int | Sequence[int] = 0,
    *,
    in_place: Collection[int] = (),
    segment: int | None = None,
    seed: int = 0,
    teams: Teams | None = None,
) -> SimulationResult:
    """The outcome, which must not depend on the interleaving: of a few ranks, as early and as late
    as can be, and one at random; of many, one at random."""
    size, shuffled = len(plans), Random(seed).randrange
    outcomes = {
        simulate(
            plans,
            inputs=[inputs] * size if isinstance(inputs, int) else inputs,
            outputs=[outputs] * size if isinstance(outputs, int) else outputs,
            in_place=in_place,
            segment=segment,
            order=order,
            teams=teams,
        )
        for order in ([lambda n: 0, lambda n: n - 1, shuffled] if size < 5 else [shuffled])
    }
    assert len(outcomes) == 1
    return outcomes.pop()


def assert_reduced(values: Iterable[Value], units: Iterable[int], ranks: Iterable[int]) -> None:
    """`values` are the final reductions of `units` of X of `ranks`, in this order."""
    found, expected, order = list(values), list(units), list(ranks)
    assert len(found) == len(expected)
    for value, unit in zip(found, expected, strict=True):
        assert isinstance(value, Reduced)
        assert value.final
        assert contributors(value) == tuple(Unit(rank, X, unit) for rank in order)


def assert_all_reduced(outcome: SimulationResult, length: int) -> None:
    """All ranks have the same reduction of so many units of all, bit for bit."""
    size = len(outcome.out)
    for out in outcome.out:
        assert_reduced(out, range(length), range(size))
    assert len(set(outcome.out)) == 1, "all ranks have the same bits"


def assert_prefixes(outcome: SimulationResult, length: int, *, exclusive: bool) -> None:
    """Each rank has the reduction of the units of those before it, and of its own, unless
    `exclusive`: then rank 0 has its own."""
    for rank, out in enumerate(outcome.out):
        if exclusive and rank == 0:
            assert out == span(0, X, 0, length)
        else:
            assert_reduced(out, range(length), range(rank if exclusive else rank + 1))


def broadcast(
    plan: Callable[..., Plan], size: int, root: int, length: int, segment: int, *, in_place: bool
) -> tuple[list[Plan], SimulationResult]:
    """``plan(rank, size, root, length, segment)`` of all ranks, which all get what `root` has, and
    what comes of it."""
    plans, outcome = everywhere(
        lambda rank, size, length: plan(rank, size, root, length, segment),
        size,
        length,
        in_place=in_place,
        segment=segment,
    )
    for rank, out in enumerate(outcome.out):
        assert out == span(root, OUT if rank == root and not in_place else X, 0, length)
    return plans, outcome


def span(rank: int, buffer: int, start: int, stop: int) -> tuple[Unit, ...]:
    return tuple(Unit(rank, buffer, at) for at in range(start, stop))


def bounds_of(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def uneven(size: int) -> tuple[int, ...]:
    """Bounds of slices of 0 to 4 units."""
    return bounds_of((3 * rank + 2) % 5 for rank in range(size))
