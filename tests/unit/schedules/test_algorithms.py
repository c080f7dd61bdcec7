"""Every algorithm, run by the simulator over sizes, lengths, windows and interleavings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import (
    Drawn,
    assert_all_reduced,
    assert_prefixes,
    assert_reduced,
    at_root,
    bounds_of,
    broadcast,
    everywhere,
    lengths,
    roots,
    run,
    shapes,
    sizes,
    span,
    to_slices,
    uneven,
    windows,
)

from aiodist.schedules import (
    chain,
    direct_exchange,
    dissemination,
    recursive_doubling,
    reduce,
    reduce_scatter,
    reduce_scatter_all_gather,
)
from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.plan import OUT, Plan, Recv, Reduce, Send, X
from aiodist.testing.plan_simulator import Unit

# -- whole values -----------------------------------------------------------------------------


@sizes
def test_dissemination(size: int) -> None:
    outcome = run(lambda rank: dissemination.all_gather(rank, size), size, outputs=size)
    for out in outcome.out:
        assert out == tuple(Unit(rank, OUT, rank) for rank in range(size))
    assert outcome.rounds == (size - 1).bit_length()
    assert set(outcome.frames) == {outcome.rounds}
    assert set(outcome.units) == {size - 1}


@sizes
def test_dissemination_is_a_barrier(size: int) -> None:
    assert_barrier([dissemination.all_gather(rank, size) for rank in range(size)])


@sizes
def test_direct_sharing(size: int) -> None:
    """In one round, with one frame for all others."""
    plans = [direct_exchange.share(rank, size) for rank in range(size)]
    outcome = run(lambda rank: plans[rank], size, outputs=size)
    for out in outcome.out:
        assert out == tuple(Unit(rank, OUT, rank) for rank in range(size))
    assert outcome.rounds == (size > 1)
    assert set(outcome.frames) == set(outcome.units) == {size - 1}
    for plan in plans:
        assert len({step.spans for step in plan.steps if isinstance(step, Send)}) == (size > 1)
    assert_barrier(plans)


@sizes
def test_recursive_doubling_is_a_barrier(size: int) -> None:
    assert_barrier([recursive_doubling.all_reduce(rank, size) for rank in range(size)])


def assert_barrier(plans: list[Plan]) -> None:
    """While one rank does nothing, no other comes to its end."""
    for slow in range(len(plans)):
        sent: Counter[tuple[int, int]] = Counter()
        left = {plan.rank: list(plan.steps) for plan in plans if plan.rank != slow}
        moved = True
        while moved:
            moved = False
            for rank, steps in left.items():
                while steps:
                    step = steps[0]
                    if isinstance(step, Send):
                        sent[rank, step.peer] += 1
                    elif isinstance(step, Recv):
                        if not sent[step.peer, rank]:
                            break
                        sent[step.peer, rank] -= 1
                    steps.pop(0)
                    moved = True
        assert all(left.values())


@sizes
@pytest.mark.parametrize("in_place", [False, True])
def test_recursive_doubling(size: int, in_place: bool) -> None:
    outcome = run(
        lambda rank: recursive_doubling.all_reduce(rank, size),
        size,
        1,
        1,
        in_place=range(size) if in_place else (),
    )
    assert_all_reduced(outcome, 1)
    if size & (size - 1) == 0:
        assert outcome.rounds == max(outcome.frames) == size.bit_length() - 1
    else:
        assert outcome.rounds <= size.bit_length() + 1
        assert max(outcome.frames) == size.bit_length()


@sizes
@pytest.mark.parametrize("in_place", [False, True])
def test_direct_exchange_of_whole_values(size: int, in_place: bool) -> None:
    """In one round, and as one expression of operands in the order of the ranks."""
    outcome = run(
        lambda rank: direct_exchange.all_reduce(rank, size),
        size,
        1,
        1,
        in_place=range(size) if in_place else (),
    )
    for out in outcome.out:
        assert_reduced(out, [0], range(size))
    assert len(set(outcome.out)) == 1
    assert outcome.rounds == (size > 1)
    assert max(outcome.frames) == size - 1


@sizes
@pytest.mark.parametrize("in_place", [False, True])
def test_recursive_doubling_of_large_wholes(size: int, in_place: bool) -> None:
    for length, ahead in product(lengths(size), (4, 1000)):
        make = recursive_doubling.all_reduce_whole
        plans, outcome = everywhere(make, size, length, 3, ahead, in_place=in_place, segment=3)
        assert_all_reduced(outcome, length)
        for plan in plans:
            assert plan.scratch <= length
            assert all(s.into.length == length for s in plan.steps if isinstance(s, Reduce))
        assert max(outcome.units) <= length * ((size - 1).bit_length() + 1)


# -- reductions by slices ---------------------------------------------------------------------


@windows
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_all_gather(size: int, in_place: bool, window: int) -> None:
    for length in lengths(size):
        make = reduce_scatter_all_gather.all_reduce
        _, outcome = everywhere(
            make, size, length, 2, window, in_place=in_place, segment=2, seed=length
        )
        assert_all_reduced(outcome, length)
        if length % size == 0:
            assert set(outcome.units) == {2 * (size - 1) * length // size}
        if size == length > 1:
            assert outcome.rounds == 2


@windows
def test_reduce_scatter(size: int, window: int) -> None:
    for bounds in (uneven(size), even_bounds(5 * size + 3, size)):
        for plan, *args in ((reduce_scatter.direct, window), (reduce_scatter.whole,)):
            _, outcome = to_slices(plan, bounds, 2, *args, segment=2)
            for rank, out in enumerate(outcome.out):
                assert_reduced(out, range(bounds[rank], bounds[rank + 1]), range(size))
                assert outcome.units[rank] == bounds[-1] - len(out)
            assert (
                outcome.rounds == 0 or window == 1 or outcome.rounds <= max(map(len, outcome.out))
            )


@sizes
def test_whole_slots_are_reduced_at_once(size: int) -> None:
    bounds = uneven(size)
    for rank in range(size):
        plan = reduce_scatter.whole(rank, size, bounds, 2)
        assert [len(s.operands) for s in plan.steps if isinstance(s, Reduce)] == [size]


@windows
@pytest.mark.sample(13)
def test_reduce(size: int, window: int) -> None:
    for root in roots(size):
        for length in lengths(size):
            for in_place in ((), (root,)):
                make = reduce.scatter_gather
                _, outcome = at_root(
                    make, size, root, length, 1, window, in_place=in_place, segment=1, seed=root
                )
                assert_reduced(outcome.out[root], range(length), range(size))
                assert all(n <= length for n in outcome.units)
                if length % size == 0:
                    assert outcome.units[root] == (size - 1) * length // size


@sizes
def test_scratch_is_bounded_by_the_window_not_by_the_array(size: int) -> None:
    segment, window, length = 3, 4, 50 * size
    for rank in range(size):
        everyone = reduce_scatter_all_gather.all_reduce(rank, size, length, segment, window)
        assert everyone.scratch == (size - 1) * window * segment
        slices = reduce_scatter.direct(rank, size, even_bounds(length, size), segment, window)
        assert slices.scratch == (size - 1) * window * segment
        one = reduce.scatter_gather(rank, size, 0, length, segment, window)
        ring = window * segment if rank else 0
        assert one.scratch == (size - 1) * window * segment + ring


def test_windows_have_at_least_one_segment() -> None:
    with pytest.raises(ValueError, match="at least one segment, not 0"):
        reduce_scatter_all_gather.all_reduce(0, 2, 4, 1, 0)
    with pytest.raises(ValueError, match="at least one segment, not 0"):
        chain.scan(0, 2, 4, 1, False, window=0)


# -- exchanges --------------------------------------------------------------------------------


def message(source: int, target: int, size: int) -> int:
    """Units that `source` sends `target`: some none, some several segments."""
    return (source * 5 + target * 3 + size) % 7


@sizes
@pytest.mark.parametrize("ahead", [4, 1000])
def test_all_to_all(size: int, ahead: int) -> None:
    sends = [bounds_of(message(a, b, size) for b in range(size)) for a in range(size)]
    recvs = [bounds_of(message(a, b, size) for a in range(size)) for b in range(size)]
    outcome = run(
        lambda rank: direct_exchange.all_to_all(rank, size, sends[rank], recvs[rank], 2, ahead),
        size,
        [bounds[-1] for bounds in sends],
        [bounds[-1] for bounds in recvs],
        segment=2,
    )
    for b, out in enumerate(outcome.out):
        assert out == tuple(
            unit for a in range(size) for unit in span(a, X, sends[a][b], sends[a][b + 1])
        )
        assert outcome.units[b] == sends[b][-1] - message(b, b, size)
    assert outcome.rounds <= 1


def test_exchanges_start_with_different_targets() -> None:
    size = 5
    bounds = even_bounds(20, size)
    firsts = [direct_exchange.all_to_all(rank, size, bounds, bounds, 2) for rank in range(size)]
    targets = [next(s.peer for s in p.steps if isinstance(s, Send)) for p in firsts]
    assert sorted(targets) == list(range(size))


# -- chains -----------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("in_place", [False, True])
def test_broadcast(size: int, in_place: bool) -> None:
    for root in roots(size):
        for length in lengths(size):
            _, outcome = broadcast(chain.broadcast, size, root, length, 3, in_place=in_place)
            assert sorted(outcome.units) == [0] + [length] * (size - 1)
            assert outcome.rounds == (size - 1 if length else 0)


@sizes
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.sample(31)
def test_scan(size: int, in_place: bool, exclusive: bool, whole: bool) -> None:
    for window in (1, 2, 4) if size < 5 else (2,):
        for length in lengths(size):
            make = partial(chain.scan, whole=whole, window=window)
            plans, outcome = everywhere(
                make, size, length, 2, exclusive, in_place=in_place, segment=2, seed=window
            )
            assert_prefixes(outcome, length, exclusive=exclusive)
            assert outcome.units == (length,) * (size - 1) + (0,)
            if whole:
                assert all(
                    s.into.length == length
                    for plan in plans
                    for s in plan.steps
                    if isinstance(s, Reduce)
                )
            else:
                assert all(plan.scratch <= (2 * window + 1) * 2 for plan in plans)


# -- all of it, at random ---------------------------------------------------------------------


def any_all_reduce(it: Drawn) -> None:
    plan = reduce_scatter_all_gather.all_reduce
    everywhere = run(
        lambda rank: plan(rank, it.size, it.length, it.segment, it.window),
        it.size, it.length, it.length, in_place=it.in_place, segment=it.segment, seed=it.seed,
    )  # fmt: skip
    for out in everywhere.out:
        assert_reduced(out, range(it.length), range(it.size))


def any_reduce(it: Drawn) -> None:
    there = run(
        lambda rank: reduce.scatter_gather(
            rank, it.size, it.root, it.length, it.segment, it.window
        ),
        it.size, it.length, [it.length if rank == it.root else 0 for rank in range(it.size)],
        in_place=[rank for rank in it.in_place if rank == it.root],
        segment=it.segment, seed=it.seed,
    )  # fmt: skip
    assert_reduced(there.out[it.root], range(it.length), range(it.size))


def any_reduce_scatter(it: Drawn) -> None:
    bounds = bounds_of(it.slices)
    apart = run(
        lambda rank: reduce_scatter.direct(rank, it.size, bounds, it.segment, it.window),
        it.size, it.length, it.slices, segment=it.segment, seed=it.seed,
    )  # fmt: skip
    for rank, out in enumerate(apart.out):
        assert_reduced(out, range(bounds[rank], bounds[rank + 1]), range(it.size))


def any_scan(it: Drawn) -> None:
    prefixes = run(
        lambda rank: chain.scan(rank, it.size, it.length, it.segment, False, window=it.window),
        it.size, it.length, it.length, in_place=it.in_place, segment=it.segment, seed=it.seed,
    )  # fmt: skip
    for rank, out in enumerate(prefixes.out):
        assert_reduced(out, range(it.length), range(rank + 1))


# Each by itself: all of them in one test could take more than its time on a slow machine.
@pytest.mark.parametrize("check", [any_all_reduce, any_reduce, any_reduce_scatter, any_scan])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(it=shapes(st.integers(1, 6), longest=9))
def test_any_shape_and_interleaving(check: Callable[[Drawn], None], it: Drawn) -> None:
    check(it)


# -- cuts -------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(length=st.integers(0, 200), size=st.integers(1, 20))
def test_even_bounds_cut_as_array_split_does(length: int, size: int) -> None:
    np = pytest.importorskip("numpy")
    parts = np.array_split(np.arange(length), size)
    assert even_bounds(length, size) == bounds_of(len(part) for part in parts)


def test_pieces() -> None:
    assert [*pieces(3, 10, 3)] == [(3, 6), (6, 9), (9, 10)]
    assert not pieces(3, 3, 3)
    with pytest.raises(ValueError, match="at least one unit, not 0"):
        pieces(0, 4, 0)


def test_a_large_plan_is_made_quickly_enough_to_be_of_no_weight() -> None:
    plan = reduce_scatter_all_gather.all_reduce(0, 4, 1 << 24, 1 << 16)
    # 64 segments a slice: to three peers, pieces and results; as much back; a reduction each; and
    # a grant for every second pair of frames.
    assert len(plan.steps) == 64 * 3 * 4 + 64 + 96
