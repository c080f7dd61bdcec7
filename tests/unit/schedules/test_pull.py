"""Every pull plan, run by the simulator over sizes, lengths, pieces, depths and interleavings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import (
    SIZES,
    Drawn,
    assert_prefixes,
    assert_reduced,
    bounds_of,
    of,
    outcome_of,
    plans_of,
    shapes,
    sizes,
    span,
    uneven,
)

from aiodist.schedules import pull_scan, pull_slices, pull_values, pull_whole
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.plan import (
    OUT,
    SHARED,
    Await,
    Copy,
    Plan,
    Publish,
    Reduce,
    Span,
    X,
)
from aiodist.schedules.pull import joined, moved
from aiodist.testing.plan_simulator import SimulationResult

in_places = pytest.mark.parametrize("in_place", [False, True])
pipelines = pytest.mark.parametrize(
    ("size", "depth"),
    [of(size, d) for size in SIZES for d in ((2, 3, 5) if size < 5 else (2 + size % 4,))],
)


def lengths(size: int) -> list[int]:
    """Empty, fewer units than ranks, even, odd, one and many blocks."""
    if size > 4:
        return [size - 1, 5 * size + 3]
    return sorted({0, 1, size - 1, 6 * size, 13 * size + 3})


def roots(size: int) -> set[int]:
    return {size // 2} if size > 4 else {0, size - 1}


def run(
    plan: Callable[[int], Plan],
    size: int,
    inputs: int | Sequence[int] = 0,
    outputs: int | Sequence[int] = 0,
    **options: Any,
) -> SimulationResult:
    """See `outcome_of`. The simulator has no data race, no lone end, and memory that is written by
    its owner only."""
    plans = plans_of(plan, size)
    for made in plans:
        assert all(isinstance(step, Copy | Reduce | Publish | Await) for step in made.steps)
        assert made.publishes == sum(isinstance(step, Publish) for step in made.steps) > 0
        assert made.scratch == 0
        assert joined(made.steps) == made.steps, "steps that could be fewer"
    return outcome_of(plans, inputs, outputs, **options)


# -- joining copies ---------------------------------------------------------------------------


def test_copies_are_joined_where_both_ends_go_on() -> None:
    def copy(into: int, source: int, length: int, buffer: int = OUT) -> Copy:
        return Copy(Span(buffer, into, into + length), Span(X, source, source + length))

    assert joined([]) == ()
    assert joined([copy(0, 5, 2), copy(2, 7, 3), copy(5, 10, 1)]) == (copy(0, 5, 6),)
    apart = (
        copy(0, 0, 2),
        copy(2, 3, 2),  # a gap where it comes from
        copy(5, 5, 2),  # a gap where it goes
        copy(7, 7, 1, SHARED),  # another memory
        Publish(),
        copy(8, 8, 1, SHARED),
    )
    assert joined(apart) == apart
    empty = Reduce(Span(OUT, 3, 3), (Span(X, 3, 3),))
    assert joined([copy(0, 0, 2), empty, copy(9, 9, 0), copy(2, 2, 2)]) == (copy(0, 0, 4),)


# -- whole values -----------------------------------------------------------------------------


@sizes
@in_places
def test_whole_all_reduce(size: int, in_place: bool) -> None:
    for length in (0, 1, 5):
        plans = [pull_whole.all_reduce(rank, size, length) for rank in range(size)]
        everyone = range(size) if in_place else ()
        outcome = run(plans.__getitem__, size, length, length, in_place=everyone)
        for out in outcome.out:
            assert_reduced(out, range(length), range(size))
        assert len(set(outcome.out)) == 1, "all ranks evaluate one expression"
        assert outcome.rounds <= 1
        assert all(len(plan.steps) == (4 if length else 2) for plan in plans)
        assert all(plan.shared == length for plan in plans)


@sizes
@in_places
def test_whole_reduce(size: int, in_place: bool) -> None:
    for root in roots(size):
        for length in (0, 3):
            outcome = run(
                lambda rank, to=root, n=length: pull_whole.reduce(rank, size, to, n),
                size,
                length,
                [length if rank == root else 0 for rank in range(size)],
                in_place=(root,) if in_place else (),
            )
            assert_reduced(outcome.out[root], range(length), range(size))


@sizes
def test_whole_reduce_scatter(size: int) -> None:
    for bounds in (uneven(size), even_bounds(11 * size + 3, size), (0,) * (size + 1)):
        outcome = run(
            lambda rank, b=bounds: pull_whole.reduce_scatter(rank, size, b),
            size,
            bounds[-1],
            [bounds[rank + 1] - bounds[rank] for rank in range(size)],
        )
        for rank, out in enumerate(outcome.out):
            assert_reduced(out, range(bounds[rank], bounds[rank + 1]), range(size))
            plan = pull_whole.reduce_scatter(rank, size, bounds)
            assert plan.shared == bounds[-1]
            assert len(plan.steps) == 2 + bool(bounds[-1]) + (bounds[rank] < bounds[rank + 1])
        assert outcome.rounds <= 1


@sizes
@in_places
@pytest.mark.parametrize("exclusive", [False, True])
def test_whole_scan(size: int, in_place: bool, exclusive: bool) -> None:
    for length in (0, 3):
        outcome = run(
            lambda rank, n=length: pull_whole.scan(rank, size, n, exclusive),
            size,
            length,
            length,
            in_place=range(size) if in_place else (),
        )
        assert_prefixes(outcome, length, exclusive=exclusive)


@sizes
def test_share(size: int) -> None:
    for cell in (0, 1, 4):
        outcome = run(lambda rank, n=cell: pull_whole.share(rank, size, n), size, cell, size * cell)
        for out in outcome.out:
            assert out == tuple(unit for rank in range(size) for unit in span(rank, X, 0, cell))
    assert len(pull_whole.share(0, size, 0).steps) == 2


# -- reductions by slices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "segment"),
    [(pull_slices.all_reduce, 2), (pull_whole.all_reduce_in_pieces, 3)],
    ids=["slices", "whole, in pieces"],
)
@pipelines
@in_places
@pytest.mark.sample(31)
def test_all_reduce(size: int, in_place: bool, depth: int, plan: Any, segment: int) -> None:
    for length in lengths(size):
        outcome = run(
            lambda rank, n=length: plan(rank, size, n, segment, depth),
            size,
            length,
            length,
            in_place=range(size) if in_place else (),
            seed=length,
        )
        for out in outcome.out:
            assert_reduced(out, range(length), range(size))
        assert len(set(outcome.out)) == 1


def test_what_is_reduced_whole_is_met_for_once_a_piece() -> None:
    for pieces_, steps in ((1, 4), (7, 7 * 4)):
        plan = pull_whole.all_reduce_in_pieces(0, 2, pieces_ * 3, 3, 3)
        assert len(plan.steps) == steps
        assert plan.publishes == pieces_


@pipelines
@pytest.mark.sample(9)
def test_reduce(size: int, depth: int) -> None:
    for root in roots(size):
        for length in lengths(size):
            for in_place in ((), (root,)):
                outcome = run(
                    lambda rank, n=length, to=root: pull_slices.reduce(rank, size, to, n, 3, depth),
                    size,
                    length,
                    [length if rank == root else 0 for rank in range(size)],
                    in_place=in_place,
                    seed=root,
                )
                assert_reduced(outcome.out[root], range(length), range(size))


@pipelines
@pytest.mark.sample(9)
def test_reduce_scatter(size: int, depth: int) -> None:
    for bounds in (uneven(size), even_bounds(11 * size + 3, size), (0,) * (size + 1)):
        for piece in (1, 3, 100):
            slices = [bounds[r + 1] - bounds[r] for r in range(size)]
            outcome = run(
                lambda rank, b=bounds, n=piece: pull_slices.reduce_scatter(rank, size, b, n, depth),
                size,
                bounds[-1],
                slices,
                seed=piece,
            )
            for rank, out in enumerate(outcome.out):
                assert_reduced(out, range(bounds[rank], bounds[rank + 1]), range(size))


@pytest.mark.parametrize("size", [of(size) for size in SIZES[1:]])
def test_slices_take_few_steps(size: int) -> None:
    """A round of an all-reduce: stage in two steps, reduce and show in two, collect."""
    blocks, piece = 10, 3
    for rank in range(size):
        plan = pull_slices.all_reduce(rank, size, (blocks - 1) * size * piece + 2 * size, piece, 3)
        copied = sum(isinstance(step, Copy) for step in plan.steps)
        staging = 1 if rank in (0, size - 1) else 2
        assert copied == blocks * (staging + 1 + (size - 1))
        assert sum(isinstance(step, Reduce) for step in plan.steps) == blocks
        assert plan.publishes == blocks + 1
        assert sum(isinstance(step, Await) for step in plan.steps) == blocks + 1
        assert plan.shared == 3 * size * piece


def test_shared_memory_is_no_more_than_the_array_needs() -> None:
    assert pull_slices.all_reduce(0, 4, 10, 1000, 3).shared == 12
    assert pull_slices.reduce(0, 4, 0, 0, 1000, 3).shared == 0
    assert pull_whole.all_reduce_in_pieces(0, 2, 10, 1000, 3).shared == 10
    assert pull_slices.reduce_scatter(0, 4, (0, 2, 3, 6, 6), 1000, 3).shared == 9
    assert pull_values.all_gather(0, 4, (1, 0, 2, 0), 1000, 3).shared == 2
    assert pull_values.broadcast(0, 4, 0, 10, 1000, 3).shared == 10
    assert pull_scan.scan(0, 4, 10, False, 1000, 3).shared == 10


def test_every_rank_publishes_also_where_there_is_nothing_to_do() -> None:
    for rank in range(3):
        for plan in (
            pull_slices.all_reduce(rank, 3, 0, 4, 2),
            pull_whole.all_reduce_in_pieces(rank, 3, 0, 4, 2),
            pull_slices.reduce(rank, 3, 1, 0, 4, 2),
            pull_slices.reduce_scatter(rank, 3, (0, 0, 0, 0), 4, 2),
            pull_whole.reduce_scatter(rank, 3, (0, 0, 0, 0)),
            pull_values.broadcast(rank, 3, 1, 0, 4, 1),
            pull_values.all_gather(rank, 3, (0, 0, 0), 4, 2),
            pull_values.exchange(rank, 3, (0, 0, 0, 0), (0, 0, 0, 0), 0, 4, 2),
            pull_scan.scan(rank, 3, 0, False, 4, 1),
        ):
            waits = [step for step in plan.steps if isinstance(step, Await)]
            assert [set(wait.peers) for wait in waits] == [{0, 1, 2} - {rank}]
            assert plan.shared == 0


# -- moving values ----------------------------------------------------------------------------


@sizes
@in_places
@pytest.mark.sample(9)
def test_broadcast(size: int, in_place: bool) -> None:
    for depth in (1, 2, 3) if size < 5 else (1 + size % 3,):
        for root in roots(size):
            for length in lengths(size):
                outcome = run(
                    lambda rank, src=root, n=length, d=depth: pull_values.broadcast(
                        rank, size, src, n, 3, d
                    ),
                    size,
                    length,
                    length,
                    in_place=range(size) if in_place else (),
                    seed=depth,
                )
                for rank, out in enumerate(outcome.out):
                    buffer = OUT if rank == root and not in_place else X
                    assert out == span(root, buffer, 0, length)


@pipelines
def test_all_gather(size: int, depth: int) -> None:
    for parts in (
        [(5 * rank + 3) % 11 for rank in range(size)],
        [7] * size,
        [0] * (size - 1) + [20],
        [0] * size,
    ):
        outcome = run(
            lambda rank, n=tuple(parts): pull_values.all_gather(rank, size, n, 2, depth),
            size,
            parts,
            [sum(parts) - part for part in parts],
            seed=depth,
        )
        for rank, out in enumerate(outcome.out):
            assert out == tuple(
                unit for q in range(size) if q != rank for unit in span(q, X, 0, parts[q])
            )


def message(source: int, target: int, size: int) -> int:
    """Units that `source` sends `target`: some none, some several pieces."""
    return (source * 5 + target * 3 + size) % 11


Lengths = Callable[[int, int], int]


def run_exchange(size: int, message: Lengths, piece: int, depth: int, seed: int = 0) -> None:
    sends = [bounds_of(message(a, b) for b in range(size)) for a in range(size)]
    recvs = [bounds_of(message(a, b) for a in range(size)) for b in range(size)]
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    rounds = max((len(pieces(0, message(a, b), piece)) for a, b in pairs), default=0)
    outcome = run(
        lambda rank: pull_values.exchange(
            rank, size, sends[rank], recvs[rank], rounds, piece, depth
        ),
        size,
        [bounds[-1] for bounds in sends],
        [bounds[-1] for bounds in recvs],
        seed=seed,
    )
    for b, out in enumerate(outcome.out):
        assert out == tuple(
            unit for a in range(size) for unit in span(a, X, sends[a][b], sends[a][b + 1])
        )


@pipelines
def test_exchange(size: int, depth: int) -> None:
    for piece in (2, 3, 20):
        run_exchange(size, lambda a, b: message(a, b, size), piece, depth)


@sizes
def test_gather_and_scatter_are_exchanges(size: int) -> None:
    for root in roots(size):
        run_exchange(size, lambda a, b, to=root: 7 if b == to != a else 0, 2, 3)
        run_exchange(size, lambda a, b, to=root: 7 + b if a == to != b else 0, 2, 3)


def test_full_messages_are_staged_in_two_steps() -> None:
    plan = pull_values.exchange(2, 5, (0, 3, 6, 6, 9, 12), (0,) * 6, 1, 3, 2)
    staged = [step for step in plan.steps if isinstance(step, Copy)]
    assert staged == [Copy(Span(SHARED + 2, 0, 12), Span(X, 0, 12))]


# -- prefixes ---------------------------------------------------------------------------------


@sizes
@in_places
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.sample(17)
def test_scan(size: int, in_place: bool, exclusive: bool) -> None:
    for depth in (1, 2, 3) if size < 5 else (1 + size % 3,):
        for length in lengths(size):
            outcome = run(
                lambda rank, n=length, d=depth: pull_scan.scan(rank, size, n, exclusive, 2, d),
                size,
                length,
                length,
                in_place=range(size) if in_place else (),
                seed=depth,
            )
            assert_prefixes(outcome, length, exclusive=exclusive)


# -- all of it, at random ---------------------------------------------------------------------


def everywhere(it: Drawn) -> list[Any]:
    """What an all_reduce in slices gives."""
    outcome = run(
        lambda rank: pull_slices.all_reduce(rank, it.size, it.length, it.segment, it.window),
        it.size, it.length, it.length, in_place=it.in_place, seed=it.seed,
    )  # fmt: skip
    return [*outcome.out]


def any_all_reduce(it: Drawn) -> None:
    for out in everywhere(it):
        assert_reduced(out, range(it.length), range(it.size))


def any_all_reduce_in_pieces(it: Drawn) -> None:
    whole = run(
        lambda rank: pull_whole.all_reduce_in_pieces(
            rank, it.size, it.length, it.segment, it.window
        ),
        it.size, it.length, it.length, in_place=it.in_place, seed=it.seed,
    )  # fmt: skip
    assert [*whole.out] == everywhere(it)


def any_reduce(it: Drawn) -> None:
    there = run(
        lambda rank: pull_slices.reduce(rank, it.size, it.root, it.length, it.segment, it.window),
        it.size, it.length, it.length, in_place=it.in_place, seed=it.seed,
    )  # fmt: skip
    assert_reduced(there.out[it.root], range(it.length), range(it.size))


def any_reduce_scatter(it: Drawn) -> None:
    bounds = bounds_of(it.slices)
    sliced = run(
        lambda rank: pull_slices.reduce_scatter(rank, it.size, bounds, it.segment, it.window),
        it.size, it.length, it.slices, seed=it.seed,
    )  # fmt: skip
    for rank, out in enumerate(sliced.out):
        assert_reduced(out, range(bounds[rank], bounds[rank + 1]), range(it.size))


def any_scan(it: Drawn) -> None:
    exclusive = bool(it.root)
    prefixes = run(
        lambda rank: pull_scan.scan(rank, it.size, it.length, exclusive, it.segment, it.window),
        it.size, it.length, it.length, in_place=it.in_place, seed=it.seed,
    )  # fmt: skip
    assert_prefixes(prefixes, it.length, exclusive=exclusive)


def any_exchange(it: Drawn) -> None:
    def count(a: int, b: int) -> int:
        return it.slices[a] * (a + b) // (it.size + b)

    run_exchange(it.size, count, it.segment, it.window, it.seed)


# Each by itself: all of them in one test could take more than its time on a slow machine.
@pytest.mark.parametrize(
    "check",
    [
        any_all_reduce,
        any_all_reduce_in_pieces,
        any_reduce,
        any_reduce_scatter,
        any_scan,
        any_exchange,
    ],
)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(it=shapes(st.integers(2, 7), longest=30))
def test_any_shape_and_interleaving(check: Callable[[Drawn], None], it: Drawn) -> None:
    check(it)


# -- what they refuse -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        lambda depth: pull_slices.all_reduce(0, 2, 8, 2, depth + 1),
        lambda depth: pull_values.all_gather(0, 2, (8, 8), 2, depth + 1),
        lambda depth: pull_values.broadcast(0, 2, 0, 8, 2, depth),
        lambda depth: pull_scan.scan(0, 2, 8, False, 2, depth),
    ],
)
def test_the_least_depth(plan: Callable[[int], Plan]) -> None:
    plan(1)
    with pytest.raises(ValueError, match=r"at least (one buffer, not 0|two buffers, not 1)"):
        plan(0)


def test_messages_longer_than_agreed() -> None:
    with pytest.raises(ValueError, match="a message of rank 0 has 3 pieces, over 2 rounds"):
        pull_values.exchange(0, 2, (0, 0, 5), (0, 0, 0), 2, 2, 2)
    with pytest.raises(ValueError, match="3 pieces"):
        pull_values.exchange(0, 2, (0, 0, 0), (0, 0, 5), 2, 2, 2)


def test_what_a_rank_shows_and_takes() -> None:
    """What it reads of its own memory is not taken, and what stays with it is not shown."""
    own, other = SHARED + 1, SHARED + 2
    steps = (
        Copy(Span(own, 0, 4), Span(X, 0, 4)),
        Publish(),
        Await((0, 2), 1),
        Reduce(Span(own, 4, 6), (Span(own, 0, 2), Span(other, 0, 2), Span(SHARED, 0, 2)), True),
        Copy(Span(OUT, 0, 3), Span(other, 4, 7)),
        Copy(Span(OUT, 3, 4), Span(own, 4, 5)),
    )
    assert moved(Plan("a plan", 1, 3, steps, eager=False)) == (6, 7)
