"""Plans that bring an array from some parts to others, held against numpy's indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.schedules.resharding import (
    Box,
    BoxLayout,
    BoxTransfer,
    Unheld,
    Want,
    asked_of,
    blocks,
    intersection,
    nearest_first,
    plan,
    remainder,
    text,
    volume,
)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    intervals = [st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape]
    return st.tuples(*[interval.map(lambda ends: tuple(sorted(ends))) for interval in intervals])


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    found = np.zeros(shape, dtype=int)
    found[at(box)] = 1
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], BoxLayout]:
    shape, size = draw(SHAPES), draw(st.integers(1, 5))
    some = st.none() | boxes(shape)
    held = [draw(some) for _ in range(size)]
    held[draw(st.integers(0, size - 1))] = whole(shape)  # so that nothing is missing
    wanted = [draw(some) for _ in range(size)]
    return shape, BoxLayout(tuple(held), tuple(wanted), 4)


@given(st.data(), SHAPES)
def test_a_box_is_what_it_has_in_common_and_the_remainder(data, shape):
    box, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = intersection(box, other)
    both = mask(shape, box) * mask(shape, other)
    if common is None:
        assert not both.any()
        return
    np.testing.assert_array_equal(mask(shape, common), both)
    parts = sum([mask(shape, part) for part in remainder(box, common)], mask(shape, common))
    np.testing.assert_array_equal(parts, mask(shape, box))  # each element is in one of them
    assert all(volume(part) for part in remainder(box, common))


@given(layouts(), st.data())
def test_every_rank_gets_each_element_once_from_one_that_holds_it(given_layout, data):
    shape, layout = given_layout
    size = len(layout.held)
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    (transfers,) = plan([layout], hosts)
    for dst, wanted in enumerate(layout.wanted):
        got = np.zeros(shape, dtype=int)
        for src, _, box in (one for one in transfers if one.dst == dst):
            held = layout.held[src]
            assert held is not None
            assert intersection(box, held) == box
            got[at(box)] += 1
        expected = np.zeros(shape, dtype=int) if wanted is None else mask(shape, wanted)
        np.testing.assert_array_equal(got, expected)


@given(layouts())
def test_what_crosses_is_what_a_rank_wants_and_does_not_hold(given_layout):
    """The lower bound."""
    shape, layout = given_layout
    (transfers,) = plan([layout], [0] * len(layout.held))
    for dst, (held, wanted) in enumerate(zip(layout.held, layout.wanted, strict=True)):
        lacking = np.zeros(shape) if wanted is None else mask(shape, wanted)
        if held is not None:
            lacking = lacking * (1 - mask(shape, held))
        crossed = sum(volume(one.box) for one in transfers if one.dst == dst != one.src)
        assert crossed == lacking.sum()


def test_rows_to_columns():
    rows = tuple(((2 * rank, 2 * rank + 2), (0, 6)) for rank in range(4))
    columns = tuple(((0, 8), (2 * rank, 2 * rank + 2)) for rank in range(3))
    (transfers,) = plan([BoxLayout(rows, (*columns, None))], [0, 0, 1, 1])
    assert len(transfers) == 12
    assert transfers[1] == BoxTransfer(1, 0, ((2, 4), (0, 2)))


def test_replicas_share_the_sending_and_those_of_the_same_host_go_first():
    everything: Box = ((0, 8),)
    held = (everything, everything, None, None, None, None)
    wanted = (None, None, *[everything] * 4)
    layout = BoxLayout(held, wanted, 4)
    (transfers,) = plan([layout], [0, 0, 0, 0, 0, 0])
    assert sorted(one.src for one in transfers) == [0, 0, 1, 1]
    (transfers,) = plan([layout], [0, 1, 1, 1, 1, 0])
    assert [one.src for one in transfers] == [1, 1, 1, 0]


def test_the_load_counts_over_all_arrays():
    large, small = ((0, 1000),), ((0, 10),)
    layouts = [
        BoxLayout((box, box, None), (None, None, box), 1) for box in (large, small, small, small)
    ]
    first, *others = plan(layouts, [0, 0, 0])
    assert first[0].src == 0
    assert [transfers[0].src for transfers in others] == [1, 1, 1]


def test_what_nobody_holds_is_named():
    with pytest.raises(Unheld, match=r"rank 1 wants \[4:6, 0:3\], which no rank holds") as caught:
        plan([BoxLayout((((0, 4), (0, 3)), None), (None, ((2, 6), (0, 3))))], [0, 0])
    assert (caught.value.rank, caught.value.box) == (1, ((4, 6), (0, 3)))


def test_nothing_is_needed_for_a_part_without_elements():
    assert plan([BoxLayout((None, None), (((3, 3),), None))], [0, 0]) == [[]]


def test_a_scalar_is_one_element():
    assert plan([BoxLayout(((), None), (None, ()))], [0, 0]) == [[BoxTransfer(0, 1, ())]]
    assert text(()) == "[]"


def test_many_arrays_of_one_layout_are_cut_once():
    size = 64
    rows = tuple(((8 * rank, 8 * rank + 8), (0, 64)) for rank in range(size))
    columns = tuple(((0, 512), (rank, rank + 1)) for rank in range(size))
    transfers = plan([BoxLayout(rows, columns)] * 8, range(size))
    assert sum(map(len, transfers)) == 8 * size * size


@given(st.data(), SHAPES, st.integers(1, 40))
def test_blocks_are_stretches_of_memory_in_order(data, shape, most):
    box = data.draw(boxes(shape))
    memory = np.arange(volume(box)).reshape([stop - start for start, stop in box])
    origin = [start for start, _ in box]
    found = [
        memory[tuple(slice(a - at, b - at) for (a, b), at in zip(block, origin, strict=True))]
        for block in blocks(box, most)
    ]
    assert all(block.size <= most for block in found)
    np.testing.assert_array_equal(np.concatenate([b.reshape(-1) for b in found]), memory.ravel())


def test_blocks_are_not_smaller_than_they_need_be():
    assert blocks(((0, 10), (0, 4)), 12) == [
        ((0, 3), (0, 4)),
        ((3, 6), (0, 4)),
        ((6, 9), (0, 4)),
        ((9, 10), (0, 4)),
    ]
    assert blocks(((2, 3), (0, 4)), 3) == [((2, 3), (0, 3)), ((2, 3), (3, 4))]


@given(layouts(), st.data())
def test_who_holds_nothing_takes_each_element_once_from_the_nearest(given_layout, data):
    shape, layout = given_layout
    layout = layout._replace(held=(*layout.held[1:], None))  # some may be missing
    holders = len(layout.held)
    far = tuple(data.draw(st.lists(st.integers(0, 3), min_size=holders, max_size=holders)))
    box = data.draw(boxes(shape))
    want = Want(box, nearest_first(layout.held, far), 4)
    (asked,) = asked_of([want], holders, data.draw(st.integers(0, 7)))
    got = np.zeros(shape, dtype=int)
    nearest = np.full(shape, 9)
    for holder, held in enumerate(layout.held):
        if held is not None:
            nearest[at(held)] = np.minimum(nearest[at(held)], far[holder])
    for src, part in asked:
        got[at(part)] += 1
        if src is None:
            assert (nearest[at(part)] == 9).all()
            continue
        held = layout.held[src]
        assert held is not None
        assert intersection(part, held) == part
        assert (nearest[at(part)] == far[src]).all()
    np.testing.assert_array_equal(got, mask(shape, box))


def test_those_who_are_equally_near_share_the_giving():
    everything: Box = ((0, 8),)
    held = nearest_first((everything,) * 3, (1, 1, 2))
    asked = asked_of([Want(block, held, 4) for block in blocks(everything, 2)], 3, 1)
    assert [src for ((src, _),) in asked] == [1, 0, 1, 0]


def test_parts_of_the_same_host_go_first_whatever_they_are():
    rows = (((0, 4), (0, 4)), ((4, 8), (0, 4)))
    column: Box = ((0, 8), (0, 2))
    (transfers,) = plan(
        [BoxLayout((*rows, column, None), (None, None, None, column))], [0, 0, 1, 1]
    )
    assert transfers == [BoxTransfer(2, 3, column)]
