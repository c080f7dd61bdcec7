"""The cost model and what is chosen by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from survey import Survey, survey

from aiodist.schedules import costs, recursive_doubling
from aiodist.schedules.choose_reductions import (
    Shape,
    choose_all_reduce,
    choose_reduce,
    choose_reduce_scatter,
    choose_scan,
    goes_whole,
    is_gathered,
)
from aiodist.schedules.choose_values import (
    choose_all_gather,
    choose_all_to_all,
    choose_broadcast,
    choose_gather,
    choose_scatter,
    choose_share,
)
from aiodist.schedules.cuts import AHEAD, WINDOW
from aiodist.schedules.plan import Send
from aiodist.schedules.selection import (
    EAGER_LIMIT,
    FRAME_LIMIT,
    SCRATCH_LIMIT,
    SEGMENT_LEAST,
    SEGMENT_LIMIT,
    Choice,
    ahead_for,
    segment_for,
    shared_segment,
    window_for,
)
from aiodist.testing.plan_simulator import simulate
from aiodist.wire.frames import MAX_PAYLOAD

KIB = 1024
MIB = KIB * KIB
FREE = costs.Costs(0, 0, 0, 0, 0, 0)


def test_costs() -> None:
    prices = costs.Costs(alpha=1e5, frame=1e4, grant=1e3, connection=100, beta=10, gamma=1)
    tally = costs.Tally(2, 5, 3, 4, 6, 7, scratch=99)
    assert tally.seconds(prices) == 2e5 + 3 * 1e4 + 3 * 1e3 + 4 * 100 + 60 + 7
    assert tally._replace(frames=0).seconds(FREE) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 17, 64])
def test_small_values_go_whole(size: int) -> None:
    for sliceable in (False, True):
        for nbytes in (0, 1, 8, KIB):
            assert goes_whole(nbytes, size, sliceable)
        assert not goes_whole(EAGER_LIMIT + 1, size, sliceable)
    assert goes_whole(EAGER_LIMIT, size, sliceable=False)


def test_the_model_decides_below_the_limit() -> None:
    thin = costs.ONE_HOST_TCP._replace(beta=1.0)
    assert not goes_whole(48 * KIB, 4, True, thin)
    assert goes_whole(48 * KIB, 4, False, thin)
    slow = costs.ONE_HOST_TCP._replace(alpha=1.0)
    assert goes_whole(48 * KIB, 4, True, slow)


@pytest.mark.parametrize("size", range(1, 40))
def test_a_whole_value_takes_as_many_frames_as_the_plan_has(size: int) -> None:
    plans = [recursive_doubling.all_reduce(rank, size) for rank in range(size)]
    frames = max(sum(isinstance(step, Send) for step in plan.steps) for plan in plans)
    priced = FREE._replace(beta=1.0, alpha=1e-9)
    # The rank that stands in for a neighbour receives once more than it sends.
    folded = size & (size - 1) != 0
    limit = 2 * (size - 1) / size / (frames + folded) if size > 1 else 1
    assert goes_whole(KIB, size, True, priced) is (limit >= 1)


def array(nbytes: int, **options: bool) -> Shape:
    return Shape(nbytes // 4, 4, 4, **options)


def test_operators_that_must_see_whole_arrays_do() -> None:
    x = array(MIB, sliceable=False)
    assert choose_all_reduce(x, 8).name == "recursive_doubling.all_reduce_whole"
    assert choose_reduce(x, 8, 3).name == "recursive_doubling.all_reduce_whole"
    bounds = tuple(range(0, MIB // 4 + 1, MIB // 32))
    assert choose_reduce_scatter(x, bounds).name == "reduce_scatter.whole"
    assert choose_scan(array(64 * MIB, sliceable=False), 8, False).args[3] is True


def test_few_ranks_exchange_directly_and_many_do_not() -> None:
    for nbytes in (EAGER_LIMIT + 8, MIB, 64 * MIB):
        chosen = choose_all_reduce(array(nbytes), 2)
        assert chosen.tally.connections == 1
        for size in (128, 1024):
            chosen = choose_all_reduce(array(nbytes), size)
            assert chosen.tally.connections <= size.bit_length()
            assert chosen.tally.grants <= 256
    many = choose_all_reduce(array(64 * MIB), 1024).tally
    assert many.frames <= 700 < 2046


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_large_slices_go_around_a_ring_in_large_frames(size: int) -> None:
    """What travels as it is does: of float16 twice as many bytes would, as they add up wider."""
    name = "ring.all_reduce"
    for slices in (MIB // 2, MIB, 4 * MIB):
        chosen = choose_all_reduce(array(slices * size), size)
        assert chosen.name == name
        assert chosen.tally.frames == 2 * (size - 1) * max(1, slices // MIB)
        halves = Shape(slices * size // 2, 2, 4)
        assert "ring" not in choose_all_reduce(halves, size).name
    assert choose_all_reduce(array(MIB // 4 * size), size).name != name


def test_an_order_that_matters_does_not_go_around_a_ring() -> None:
    chatty = costs.ONE_HOST_TCP._replace(connection=10.0, beta=1e-3)
    bounds = tuple(range(0, 49 * KIB, KIB))
    x = Shape(48 * KIB, 4, 4)
    assert choose_all_reduce(x, 48, chatty).name == "ring.all_reduce"
    assert choose_reduce_scatter(x, bounds, chatty).name == "ring.reduce_scatter"
    ordered = x._replace(commutative=False)
    assert "ring" not in choose_all_reduce(ordered, 48, chatty).name
    assert "ring" not in choose_reduce_scatter(ordered, bounds, chatty).name


@settings(derandomize=True, deadline=None)
@given(
    size=st.integers(1, 5000),
    length=st.integers(0, 1 << 34),
    wide=st.sampled_from([1, 2, 4]),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    commutative=st.booleans(),
)
def test_scratch_is_capped_whatever_the_array(
    size: int, length: int, wide: int, itemsize: int, commutative: bool
) -> None:
    x = Shape(length, itemsize, itemsize * wide, commutative=commutative)
    bounds = tuple(length * at // size for at in range(size + 1))
    for chosen in (
        choose_all_reduce(x, size),
        choose_reduce(x, size, 0),
        choose_reduce_scatter(x, bounds),
        choose_scan(x, size, False),
        choose_gather((length // size,) * size, 0),
        choose_scatter((length // size,) * size, 0),
        choose_all_to_all(length // size, size),
    ):
        assert chosen.tally.scratch <= SCRATCH_LIMIT, chosen.name


def chosen_of_all() -> Iterator[tuple[str, int, Choice, Callable[[int], list[int]]]]:
    """What is chosen for arrays of several sizes, and the units of X and OUT of a rank."""
    for size in (2, 3, 5, 8, 13, 64):
        for nbytes in ((EAGER_LIMIT // size + 8) * size, MIB // size * size):
            if nbytes * size > 16 * MIB:
                continue
            x = Shape(nbytes, 1, 1)
            bounds = tuple(accumulate([nbytes // size] * size, initial=0))
            parts = (nbytes // size,) * size
            at_root = (0, *parts[1:])
            rest = nbytes - nbytes // size

            def same(rank: int, n: int = nbytes) -> list[int]:
                return [n, n]

            yield "all_reduce", size, choose_all_reduce(x, size), same
            yield "reduce", size, choose_reduce(x, size, 0), same
            yield "scan", size, choose_scan(x, size, False), same
            yield "broadcast", size, choose_broadcast(nbytes, size, 0), same
            yield "reduce_scatter", size, choose_reduce_scatter(x, bounds), same
            part = [parts[0], rest]
            yield "all_gather", size, choose_all_gather(parts), lambda rank, p=part: p
            yield "gather", size, choose_gather(at_root, 0), lambda rank, p=part: p
            yield "scatter", size, choose_scatter(at_root, 0), lambda rank, p=part: p[::-1]
            yield "all_to_all", size, choose_all_to_all(parts[0], size), lambda rank, n=rest: [n, n]


def test_every_choice_is_right_and_costs_what_was_expected() -> None:
    for op, size, chosen, units in chosen_of_all():
        counted = surveyed(chosen, size, units)
        tally = chosen.tally
        what = (op, size, chosen.name, counted[2:], tally)
        assert_right(op, size, counted)
        assert counted.scratch <= tally.scratch, what
        assert counted.connections <= tally.connections, what
        assert counted.grants <= tally.grants * 1.1 + 1, what
        assert counted.rounds <= max(tally.rounds, counted.frames), what
        assert 0.8 * tally.frames - 2 <= counted.frames <= 1.25 * tally.frames + 2, what


def surveyed(chosen: Choice, size: int, units: Callable[[int], list[int]]) -> Survey:
    lengths = [units(rank) for rank in range(size)]
    return survey(
        lambda rank: chosen.algorithm(rank, size, *chosen.args),
        [n for n, _ in lengths],
        [n for _, n in lengths],
    )


def assert_right(op: str, size: int, found: Survey) -> None:
    x, out = found.x, found.out
    if op in ("all_reduce", "reduce"):
        total = sum(x[1:], start=x[0])
        for rank in range(size if op == "all_reduce" else 1):
            assert np.array_equal(out[rank], total)
    elif op == "scan":
        for rank in range(size):
            assert np.array_equal(out[rank], sum(x[1 : rank + 1], start=x[0]))
    elif op == "reduce_scatter":
        parts = np.array_split(sum(x[1:], start=x[0]), size)
        for rank in range(size):
            assert np.array_equal(out[rank][: len(parts[rank])], parts[rank])
    elif op == "broadcast":
        assert all(np.array_equal(out[rank], x[0]) for rank in range(1, size))
    elif op in ("all_gather", "gather"):
        for rank in range(size if op == "all_gather" else 1):
            assert np.array_equal(out[rank], np.concatenate([*x[:rank], *x[rank + 1 :]]))
    elif op == "scatter":
        for rank, part in enumerate(np.array_split(x[0], size - 1), 1):
            assert np.array_equal(out[rank][: len(part)], part)
    else:
        for rank in range(size):
            sent = [np.array_split(x[src], size - 1) for src in range(size)]
            mine = [sent[src][rank - (rank > src)] for src in range(size) if src != rank]
            assert np.array_equal(out[rank], np.concatenate(mine))


def test_few_ranks_share_words_by_way_of_one() -> None:
    names = {size: choose_share(size).name for size in (1, 2, 3, 8, 16, 32, 1024)}
    hub = {size for size, name in names.items() if name == "star.all_gather"}
    assert hub == {3, 8, 16}
    assert {names[size] for size in names.keys() - hub} == {"dissemination.all_gather"}
    far = costs.ONE_HOST_TCP._replace(trip=0.02)
    assert choose_share(8, far).name == "direct_exchange.share"
    assert choose_share(32, far).name == "dissemination.all_gather"


def test_few_ranks_that_are_far_broadcast_straight_to_each_other() -> None:
    far = costs.ONE_HOST_TCP._replace(trip=0.02)
    names = {size: choose_broadcast(8 * MIB, size, 0, far).name for size in (2, 3, 16, 17)}
    assert {size for size, name in names.items() if name == "spread.straight"} == {3, 16}
    # What is so large that hops hardly count goes along a chain, in pieces that fill it soon.
    along = choose_broadcast(64 * MIB, 4, 0, far)
    assert (along.name, along.args[-1]) == ("chain.broadcast", 256 * KIB)
    assert choose_broadcast(64 * MIB, 3, 0).name == "chain.broadcast"


@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_sharing_costs_what_was_expected(size: int) -> None:
    chosen = choose_share(size)
    plans = [chosen.algorithm(rank, size) for rank in range(size)]
    found = simulate(plans, inputs=[0] * size, outputs=[size] * size)
    assert found.rounds == chosen.tally.rounds
    assert max(found.frames) == chosen.tally.frames


def test_one_rank_broadcasts_to_nobody() -> None:
    chosen = choose_broadcast(MIB, 1, 0)
    assert chosen.algorithm(0, 1, *chosen.args).steps == ()


def test_scans_share_what_is_small_in_all() -> None:
    assert is_gathered(16 * KIB, 4)
    assert not is_gathered(16 * KIB + 1, 4)
    assert is_gathered(0, 1000)


@settings(derandomize=True, deadline=None)
@given(nbytes=st.integers(0, 1 << 40), itemsize=st.integers(1, SEGMENT_LIMIT))
def test_a_segment_fits_into_a_frame(nbytes: int, itemsize: int) -> None:
    segment = segment_for(nbytes, itemsize)
    assert segment >= 1
    assert segment * itemsize <= SEGMENT_LIMIT < FRAME_LIMIT == MAX_PAYLOAD
    if itemsize <= SEGMENT_LEAST:
        assert segment * itemsize > SEGMENT_LEAST - itemsize


def test_segments_grow_with_the_stream() -> None:
    found = [segment_for(nbytes, 4) * 4 for nbytes in (0, 64 * KIB, 512 * KIB, 1 << 22, 1 << 30)]
    assert found == [16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, 512 * KIB]
    assert segment_for(1 << 30, 3) == 512 * KIB // 3
    assert segment_for(1 << 30, 1, most=FRAME_LIMIT) == FRAME_LIMIT


def test_segments_of_many_streams_share_their_room() -> None:
    assert shared_segment(1 << 30, 4, 8) == segment_for(1 << 30, 4)
    assert shared_segment(1 << 30, 4, 1024) * 4 * 4 * 1024 == SCRATCH_LIMIT


@pytest.mark.parametrize("itemsize", [0, SEGMENT_LIMIT + 1])
def test_units_that_no_frame_can_hold(itemsize: int) -> None:
    with pytest.raises(ValueError, match=f"not {itemsize}: no frame could hold one"):
        segment_for(100, itemsize)


def test_eager_values_fit_into_a_frame_in_a_wider_accumulator() -> None:
    assert EAGER_LIMIT * 4 <= MAX_PAYLOAD


FLOATS = Shape(1 << 20, 4, 4)
WHOLE = FLOATS._replace(sliceable=False)


@pytest.mark.parametrize(
    "choose",
    [
        lambda prices: choose_all_reduce(FLOATS, 4, prices),
        lambda prices: choose_all_reduce(FLOATS, 64, prices),
        lambda prices: choose_all_reduce(WHOLE, 4, prices),
        lambda prices: choose_reduce(FLOATS, 4, 0, prices),
        lambda prices: choose_reduce_scatter(FLOATS, _even(4), prices),
        lambda prices: choose_reduce_scatter(FLOATS, _even(64), prices),
        lambda prices: choose_reduce_scatter(WHOLE, _even(4), prices),
        lambda prices: choose_scan(FLOATS, 4, False, prices),
    ],
)
def test_where_frames_cost_little_segments_are_short(
    choose: Callable[[costs.Costs], Choice],
) -> None:
    """Of whatever is chosen: with all else the same, a segment fills a pipeline sooner."""
    usual = choose(costs.ONE_HOST_TCP)
    light = choose(costs.ONE_HOST_TCP._replace(frame=1e-9))
    assert usual.tally.frames < light.tally.frames


def _even(size: int) -> tuple[int, ...]:
    return tuple(range(0, FLOATS.length + 1, FLOATS.length // size))


# -- ranks that are far from each other -------------------------------------------------------

NEAR = costs.ONE_HOST_TCP


def far(trip: float) -> costs.Costs:
    return NEAR._replace(trip=trip)


def test_windows_fill_the_way_there_and_back() -> None:
    width = 256 * KIB
    assert [window_for(width, 1, far(trip)) for trip in (0, 1e-4, 8e-4)] == [WINDOW] * 3
    assert window_for(width, 1, far(0.01)) == -(-far(0.01).way // width) == 48
    assert window_for(width, 4, far(0.01)) == 12  # of each, and as much in all
    assert ahead_for(width, far(8e-4)) == ahead_for(width) == AHEAD
    assert ahead_for(width, far(0.1)) == 477


@pytest.mark.parametrize("streams", [0, 1, 3, 15, 16])
@pytest.mark.parametrize("width", [0, 1, 64 * KIB, 256 * KIB])
def test_windows_have_room_in_scratch(width: int, streams: int) -> None:
    for trip in (0.01, 0.1, costs.MOST):
        window = window_for(width, streams, far(trip))
        assert window == WINDOW or window * width * streams <= SCRATCH_LIMIT


def test_no_distance_changes_the_bits_of_a_reduction() -> None:
    """Other plans would reduce in another order."""
    rng = Random(1)
    for _ in range(3000):
        times = [price * rng.choice((0.25, 0.5, 1, 2, 4)) for price in NEAR[:6]]
        size, nbytes = rng.randint(2, 20), int(2 ** rng.uniform(9, 29))
        x = array(nbytes)._replace(commutative=rng.random() < 0.5)
        weights = [rng.random() ** rng.choice((0, 1, 6)) for _ in range(size)]
        ends = [int(x.length * sum(weights[:k]) / sum(weights)) for k in range(size)]
        found = set()
        for trip in (0.0, 0.002, 0.1):
            prices = costs.Costs(*times, trip)
            whole = choose_all_reduce(x, size, prices)
            # `_direct` reduces in the order of the ring if its last argument is true.
            around = whole.name.startswith("ring") or whole.args[-1] is True
            chosen = (
                choose_reduce(x, size, 0, prices),
                choose_reduce_scatter(x, (*ends, x.length), prices),
                choose_scan(x, size, False, prices),
            )
            names = "ring" if around else whole.name, *(choice.name for choice in chosen)
            found.add((goes_whole(nbytes, size, True, prices), *names))
        assert len(found) == 1


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [MIB, 64 * MIB])
def test_far_ranks_go_by_the_same_algorithms_with_other_windows(size: int, nbytes: int) -> None:
    """Near ones have the windows that plans have where nothing is said."""
    x = array(nbytes)
    bounds = tuple(range(0, nbytes // 4 + 1, nbytes // 4 // size))
    choosers: list[Callable[[costs.Costs], Choice]] = [
        lambda prices: choose_reduce(x, size, 0, prices),
        lambda prices: choose_reduce_scatter(x, (*bounds[:size], nbytes // 4), prices),
        lambda prices: choose_scan(x, size, False, prices),
        lambda prices: choose_all_gather((nbytes,) * size, prices),
        lambda prices: choose_all_to_all(nbytes // size, size, prices),
    ]
    widened = 0
    for choose in choosers:
        near, apart = choose(NEAR), choose(far(0.1))
        assert near.name == apart.name
        plan = near.algorithm(0, size, *near.args)
        if near.args != apart.args:
            widened += 1
            assert apart.args[:-1] == near.args[:-1] and apart.args[-1] > near.args[-1]
            assert plan == near.algorithm(0, size, *near.args[:-1])
            assert apart.algorithm(0, size, *apart.args).scratch * 4 <= SCRATCH_LIMIT
        assert apart.tally.scratch <= SCRATCH_LIMIT
    assert widened >= 2


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16, 128])
@pytest.mark.parametrize("nbytes", [128 * KIB, MIB, 64 * MIB])
@pytest.mark.parametrize("commutative", [False, True])
def test_far_ranks_reduce_in_the_same_order(size: int, nbytes: int, commutative: bool) -> None:
    """How far they are is measured, and not the same in each run: the bits of results are."""
    x = array(nbytes)._replace(commutative=commutative)
    near, apart = choose_all_reduce(x, size, NEAR), choose_all_reduce(x, size, far(0.1))
    assert "ring" not in apart.name
    if near.name == "halving_doubling.all_reduce":
        assert apart == near
        return
    around = near.name == "ring.all_reduce"
    assert apart.name == "reduce_scatter_all_gather.all_reduce"
    assert apart.args[-1] is around
    assert apart.args[-2] > WINDOW or apart.tally.scratch * 2 > SCRATCH_LIMIT or not around
    assert apart.tally.scratch <= SCRATCH_LIMIT
    if not around:
        assert near.name == apart.name and near.args[-1] is False


@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_far_ranks_take_the_same_plans_for_other_reductions(size: int, itemsize: int) -> None:
    for length in [(1 << power) + more for power in range(8, 23) for more in (0, 5)]:
        x = Shape(length, itemsize, itemsize)
        bounds = tuple([length * rank // size for rank in range(size + 1)])
        for choose in (
            lambda prices, x=x: choose_reduce(x, size, 0, prices),
            lambda prices, x=x, bounds=bounds: choose_reduce_scatter(x, bounds, prices),
            lambda prices, x=x: choose_scan(x, size, False, prices),
        ):
            names = {choose(far(trip)).name for trip in (0.0, 0.002, 0.005, 0.1)}
            assert len(names) == 1, (length, names)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("nbytes", [128 * KIB, MIB, 64 * MIB])
def test_plans_that_combine_one_by_one(size: int, nbytes: int) -> None:
    x = array(nbytes)._replace(ordered=True)
    bounds = tuple([x.length * rank // size for rank in range(size + 1)])
    for prices in (NEAR, far(0.1)):
        all_reduce = choose_all_reduce(x, size, prices)
        assert all_reduce.name == "reduce_scatter_all_gather.all_reduce"
        assert all_reduce.args[-1] is False  # not in the order of a ring
        assert choose_reduce(x, size, 0, prices).name == "reduce.scatter_gather"
        assert choose_reduce_scatter(x, bounds, prices).name == "reduce_scatter.direct"
        assert choose_scan(x, size, True, prices).name == "chain.scan"
