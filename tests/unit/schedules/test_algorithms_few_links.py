"""The algorithms that need few connections, or few frames: every number of ranks to 17, lengths,
blocks and interleavings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
from plans import (
    assert_all_reduced,
    assert_prefixes,
    assert_reduced,
    at_root,
    bounds_of,
    broadcast,
    everywhere,
    lengths,
    outcome_of,
    plans_of,
    roots,
    run,
    sizes,
    span,
    to_slices,
    uneven,
)

from aiodist.schedules import (
    bruck,
    choose_reductions,
    direct_exchange,
    halving_doubling,
    prefixes,
    reduce_scatter_all_gather,
    ring,
    spread,
    tree,
)
from aiodist.schedules.costs import ONE_HOST_TCP
from aiodist.schedules.cuts import even_bounds
from aiodist.schedules.frames import packed
from aiodist.schedules.plan import OUT, Plan, Recv, Reduce, Send, Span, X
from aiodist.testing.plan_simulator import Reduced, Value, contributors

in_places = pytest.mark.parametrize("in_place", [False, True])


def peers(plan: Plan) -> int:
    return len({step.peer for step in plan.steps if isinstance(step, Send | Recv)})


# -- reductions -------------------------------------------------------------------------------


@sizes
@in_places
@pytest.mark.sample(9)
def test_halving_doubling(size: int, in_place: bool) -> None:
    for length in lengths(size):
        for block in (5, 8, 100) if size < 6 else (9,):
            make = halving_doubling.all_reduce
            plans, outcome = everywhere(
                make, size, length, 3, block, in_place=in_place, segment=3, seed=block
            )
            assert_all_reduced(outcome, length)
            assert max(map(peers, plans)) <= (size - 1).bit_length()
            assert max(plan.scratch for plan in plans) <= 2 * block + size.bit_length()


@sizes
def test_halving_doubling_to_one_rank(size: int) -> None:
    for root in roots(size) | {size - 1}:
        for length in lengths(size)[-2:]:
            for block in (5, 100) if size < 6 else (9,):
                places = (root,) if length % 2 else ()
                make = halving_doubling.reduce
                plans, outcome = at_root(
                    make, size, root, length, 3, block, in_place=places, segment=3, seed=block
                )
                assert_reduced(outcome.out[root], range(length), range(size))
                assert max(plan.scratch for plan in plans) <= 3 * block + size.bit_length()


@sizes
def test_many_frames_of_each_block_go_to_one_rank(size: int) -> None:
    """More than a rank sends before it receives the first one."""
    for root in roots(size):
        _, outcome = at_root(halving_doubling.reduce, size, root, 31, 1, 14, segment=1)
        assert_reduced(outcome.out[root], range(31), range(size))


@sizes
def test_halving_to_slices(size: int) -> None:
    for bounds in (uneven(size), even_bounds(5 * size + 3, size)):
        plans, outcome = to_slices(halving_doubling.reduce_scatter, bounds, 2, segment=2)
        for rank, out in enumerate(outcome.out):
            assert_reduced(out, range(bounds[rank], bounds[rank + 1]), range(size))
        assert max(map(peers, plans)) <= size.bit_length() + 2
        shape = choose_reductions.Shape(bounds[-1], 1, 1)
        choice = choose_reductions._halving_slices(shape, bounds, ONE_HOST_TCP)
        assert max(plan.scratch for plan in plans) <= choice.tally.scratch
        reckoned = [choice.algorithm(rank, size, *choice.args) for rank in range(size)]
        for kind in (Send, Recv):
            most = max(sum(isinstance(step, kind) for step in plan.steps) for plan in reckoned)
            assert most <= choice.tally.frames


def assert_reduced_around(values: Iterable[Value], units: Iterable[int], size: int) -> None:
    """`values` are the final reductions of `units` of X of all ranks, cyclically from one on."""
    for value, unit in zip(values, units, strict=True):
        assert isinstance(value, Reduced)
        assert value.final
        found = contributors(value)
        assert {(part.buffer, part.at) for part in found} == {(X, unit)}
        first = found[0].rank
        assert [part.rank for part in found] == [(first + at) % size for at in range(size)]


@sizes
@in_places
def test_ring(size: int, in_place: bool) -> None:
    for length in lengths(size):
        for depth in (1, 2, 3) if size < 6 else (2,):
            plans, outcome = everywhere(
                ring.all_reduce, size, length, 3, depth, in_place=in_place, segment=3, seed=depth
            )
            for out in outcome.out:
                assert_reduced_around(out, range(length), size)
            assert len(set(outcome.out)) <= 1, "all ranks have the same bits"
            assert max(map(peers, plans)) <= 2
            assert max(plan.scratch for plan in plans) <= (4 * depth + 1) * 3


@sizes
def test_the_same_order_as_around_a_ring_without_one(size: int) -> None:
    """So far ranks, which exchange directly, come to the same bits as near ones."""
    for length in lengths(size):
        _, ringed = everywhere(ring.all_reduce, size, length, 3, segment=3)
        make = partial(reduce_scatter_all_gather.all_reduce, around=True)
        _, direct = everywhere(make, size, length, 2, segment=2)
        orders = [[contributors(value) for value in found.out[0]] for found in (ringed, direct)]
        assert orders[0] == orders[1]


@sizes
def test_ring_to_slices(size: int) -> None:
    for bounds in (uneven(size), even_bounds(5 * size + 3, size)):
        plans, outcome = to_slices(ring.reduce_scatter, bounds, 2, segment=2)
        for rank, out in enumerate(outcome.out):
            assert_reduced_around(out, range(bounds[rank], bounds[rank + 1]), size)
        assert max(map(peers, plans)) <= 2


def test_something_is_on_its_way_around_a_ring() -> None:
    with pytest.raises(ValueError, match="at least one segment is on its way, not 0"):
        ring.all_reduce(0, 2, 4, 1, 0)


def test_a_ring_of_many_frames_keeps_its_scratch() -> None:
    plans, outcome = everywhere(ring.all_reduce, 3, 90, 2, segment=2)
    assert set(outcome.frames) == {2 * 2 * 15}
    assert {plan.scratch for plan in plans} == {18}


@sizes
@in_places
@pytest.mark.parametrize("exclusive", [False, True])
def test_prefixes(size: int, in_place: bool, exclusive: bool) -> None:
    for length in (0, 1, 5):
        plans, outcome = everywhere(
            prefixes.scan, size, length, 2, exclusive, in_place=in_place, segment=2
        )
        assert_prefixes(outcome, length, exclusive=exclusive)
        rounds = (size - 1).bit_length()
        assert outcome.rounds <= rounds
        for plan in plans:
            assert plan.scratch <= (3 * rounds + 1) * length
            assert all(s.into.length == length for s in plan.steps if isinstance(s, Reduce))


# -- values -----------------------------------------------------------------------------------


@sizes
@in_places
@pytest.mark.parametrize("algorithm", [tree.broadcast, spread.tree, spread.straight])
@pytest.mark.sample(25)
def test_broadcasts(algorithm: Callable[..., Plan], size: int, in_place: bool) -> None:
    rounds = (size - 1).bit_length()
    for root in roots(size) | {size - 1}:
        for length in lengths(size):
            plans, outcome = broadcast(algorithm, size, root, length, 3, in_place=in_place)
            if algorithm is tree.broadcast:
                assert outcome.rounds <= rounds
                assert max(map(peers, plans)) == (rounds if length else 0)
            elif algorithm is spread.straight:
                assert outcome.rounds <= 2
                assert outcome.units[root] == (length if size > 1 else 0)
            else:
                assert max(map(peers, plans)) <= 2 * rounds
            assert sum(outcome.units) == (size - 1) * length, "nothing is sent twice to one rank"


def others(size: int, rank: int, parts: list[int]) -> tuple[object, ...]:
    """The parts of all ranks but one, as all_gather has them."""
    return tuple(unit for src in range(size) if src != rank for unit in span(src, X, 0, parts[src]))


@sizes
@pytest.mark.parametrize("algorithm", [bruck.all_gather, direct_exchange.all_gather])
def test_all_gathers(algorithm: Callable[..., Plan], size: int) -> None:
    parts = [(3 * rank + 2) % 5 for rank in range(size)]
    outcome = run(
        lambda rank: algorithm(rank, size, parts, 4),
        size,
        parts,
        [sum(parts) - part for part in parts],
        segment=4,
    )
    for rank, out in enumerate(outcome.out):
        assert out == others(size, rank, parts)
    assert outcome.rounds <= (size - 1).bit_length()


@sizes
@pytest.mark.parametrize("algorithm", [tree.gather, direct_exchange.gather])
def test_gathers(algorithm: Callable[..., Plan], size: int) -> None:
    parts = [(3 * rank + 2) % 5 for rank in range(size)]
    for root in roots(size) | {size - 1}:
        total = sum(parts) - parts[root]
        outcome = run(
            lambda rank, to=root: algorithm(rank, size, to, parts, 4),
            size,
            parts,
            [total if rank == root else 0 for rank in range(size)],
            segment=4,
        )
        assert outcome.out[root] == others(size, root, parts)


@sizes
@pytest.mark.parametrize("algorithm", [tree.scatter, direct_exchange.scatter])
def test_scatters(algorithm: Callable[..., Plan], size: int) -> None:
    parts = [(3 * rank + 2) % 5 for rank in range(size)]
    for root in roots(size) | {size - 1}:
        bounds = bounds_of(0 if rank == root else part for rank, part in enumerate(parts))
        outcome = run(
            lambda rank, src=root: algorithm(rank, size, src, parts, 4),
            size,
            [bounds[-1] if rank == root else 0 for rank in range(size)],
            [0 if rank == root else parts[rank] for rank in range(size)],
            segment=4,
        )
        for rank in range(size):
            if rank != root:
                assert outcome.out[rank] == span(root, X, bounds[rank], bounds[rank + 1])


@sizes
@pytest.mark.parametrize("algorithm", [bruck.all_to_all, direct_exchange.uniform])
def test_uniform_exchanges(algorithm: Callable[..., Plan], size: int) -> None:
    length = 3
    plans = plans_of(lambda rank: algorithm(rank, size, length, 4), size)
    room = length * (size - 1)
    outcome = outcome_of(plans, room, room, segment=4)
    for rank, out in enumerate(outcome.out):
        expected = []
        for src in range(size):
            if src != rank:
                at = (rank - (rank > src)) * length
                expected += span(src, X, at, at + length)
        assert list(out) == expected
    assert max(plan.scratch for plan in plans) <= (size - 1).bit_length() * (size // 2) * length


# -- building blocks --------------------------------------------------------------------------


def test_small_spans_share_a_frame_and_large_ones_are_cut() -> None:
    spans = [Span(X, 0, 2), Span(X, 4, 4), Span(OUT, 0, 5), Span(X, 9, 10)]
    assert [*packed(spans, 3)] == [
        (Span(X, 0, 2), Span(OUT, 0, 1)),
        (Span(OUT, 1, 4),),
        (Span(OUT, 4, 5), Span(X, 9, 10)),
    ]
    assert [*packed([], 3)] == []


@pytest.mark.parametrize("size", [2, 5, 8, 13])
def test_trees(size: int) -> None:
    for v in range(size):
        below = tree.children(v, size)
        assert all(tree.parent(child) == v for child in below)
        assert tree.below(v, size) == 1 + sum(tree.below(child, size) for child in below)
