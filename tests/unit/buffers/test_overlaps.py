"""Which arrays share memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiodist.buffers import overlaps
from aiodist.buffers.overlaps import Apart, Ranges, alike, bounds, folds, meetings, same, shares

WHOLE = np.zeros(20, np.uint8)

cuts = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0, 4), (0, 4), True),
        ((0, 4), (0, 5), False),
        ((0, 4), (1, 4), False),
        ((0, 4), (4, 8), False),
    ],
)
def test_the_same_memory(a: tuple[int, int], b: tuple[int, int], expected: bool) -> None:
    assert same(WHOLE[slice(*a)], WHOLE[slice(*b)]) is expected


def test_the_same_memory_as_another_dtype() -> None:
    assert same(WHOLE[:8], WHOLE[:8].view(np.int64))


@given(st.lists(cuts, max_size=6), cuts)
def test_it_is_as_a_set_of_addresses_says(spans: list[list[int]], one: list[int]) -> None:
    addresses = [set(range(*span)) for span in spans]
    ranges = Ranges([WHOLE[slice(*span)] for span in spans])
    assert ranges.overlap == any(a & b for a, b in itertools.combinations(addresses, 2))
    if not ranges.overlap:
        touched = any(each & set(range(*one)) for each in addresses)
        assert ranges.touch(WHOLE[slice(*one)]) == touched


def test_bounds_are_those_of_all_elements():
    x = np.arange(48.0).reshape(8, 6)
    begin = x.ctypes.data
    assert bounds(x) == (begin, begin + x.nbytes)
    assert bounds(x[2:4, 1:3]) == (begin + 13 * 8, begin + 21 * 8)
    assert bounds(x[::-1, ::-2]) == (begin + 8, begin + x.nbytes)
    assert bounds(x[0, 0:1].reshape(())) == (begin, begin + 8)


def addresses(x: NDArray[Any]) -> list[int]:
    """Of all bytes of all elements."""
    starts = [
        sum(index * stride for index, stride in zip(at, x.strides, strict=True))
        for at in np.ndindex(x.shape)
    ]
    begin = x.__array_interface__["data"][0]
    return [begin + start + byte for start in starts for byte in range(x.itemsize)]


@st.composite
def views(draw: st.DrawFn) -> NDArray[Any]:
    """A view of `WHOLE` with any strides that stay inside."""
    item = draw(st.sampled_from([1, 2]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(-4, 4)) for _ in shape]
    reaches = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n]
    low, high = sum(min(0, r) for r in reaches), sum(max(0, r) for r in reaches)
    assume(high - low + item <= len(WHOLE))
    start = draw(st.integers(-low, len(WHOLE) - item - high))
    return np.ndarray(shape, f"V{item}", WHOLE.data, start, strides)


@given(views())
def test_an_array_folds_where_an_address_is_there_twice(x: NDArray[Any]) -> None:
    found = addresses(x)
    assert folds(x) == (len(found) != len({*found}))


def test_most_arrays_do_not_fold() -> None:
    x = np.zeros((4, 6))
    for one in (x, x.T, x[::2, ::-2], x[:, 1], x[0, 0, ...]):
        assert not folds(one)
    assert folds(np.broadcast_to(x[0], (3, 6)))
    # No dimension steps over the others, and yet no element is there twice.
    assert not folds(np.lib.stride_tricks.as_strided(x, (2, 3), (24, 16)))
    assert folds(np.lib.stride_tricks.as_strided(x, (2, 4), (48, 16)))


@pytest.mark.parametrize(
    ("shape", "strides"), [((9, 9), (0, 0)), ((2, 4), (0, 4)), ((8, 4), (2, 1))]
)
def test_expanded_arrays_and_windows_need_no_table_of_addresses(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], strides: tuple[int, int]
) -> None:
    x = np.ndarray(shape, np.uint8, WHOLE.data, 0, strides)
    monkeypatch.setattr(overlaps, "np", None)  # it would make the table
    assert folds(x)


@given(st.lists(views(), max_size=4), st.lists(views(), max_size=3))
def test_meetings_are_as_sets_of_addresses_say(
    written: list[NDArray[Any]], read: list[NDArray[Any]]
) -> None:
    sets = [{*addresses(x)} for x in (*written, *read)]
    pairs = itertools.combinations(range(len(sets)), 2)
    expected = {(a, b) for a, b in pairs if sets[a] & sets[b] and a < len(written)}
    assert {*meetings(written, read)} == expected


def test_what_is_too_hard_to_say_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "MOST_WORK", 1)
    x = np.zeros(192_163_377, np.uint8)  # nobody looks at it, so it takes no memory
    a = np.lib.stride_tricks.as_strided(x, (1049, 1049, 1049), (36674, 61119, 85569))
    b = np.lib.stride_tricks.as_strided(x[64_023_025:], (1049, 1049, 1), (12223, 12224, 1))
    assert shares(a, b)
    assert not shares(x[:9], x[9:])


def test_arrays_that_are_alike() -> None:
    x = np.zeros((2, 2))
    assert alike(x, x[:])
    for other in (x.copy(), x.T, x[:1], x.view("i8"), x.reshape(-1)):
        assert not alike(x, other)


def apart(known: Apart, values: list[Any]) -> bool:
    return known.are(values, [np.asarray(value).reshape(-1) for value in values])


def test_arrays_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Apart()
    x, y = np.zeros(4), np.zeros(4)
    assert not apart(known, [x, x])
    assert apart(known, [x, y])
    monkeypatch.setattr(overlaps, "combinations", None)  # there is no need to look
    assert apart(known, [x, y])
    monkeypatch.undo()
    assert not apart(known, [x, x[:]])
    assert apart(known, [y, x])


@pytest.mark.parametrize("count", [overlaps.FEW, overlaps.FEW + 1])
def test_few_arrays_and_many(count: int) -> None:
    known = Apart()
    x = np.zeros((count, 2))
    assert not apart(known, [*x[1:], x[1, 1:]])
    assert apart(known, [*x])
    assert apart(known, [*x[:, :0], x[0]])


def test_an_array_that_is_gone_is_not_taken_for_another() -> None:
    known = Apart()
    x, y = np.zeros(4), [np.zeros(4)]
    assert apart(known, [x, y[0]])
    y.clear()
    # The next array of that size mostly gets the number of the one that is gone.
    y.append(x[:])
    assert not apart(known, [x, y[0]])
    assert known._known is None


def test_a_tensor_that_gets_another_memory() -> None:
    known = Apart()
    x, y = torch.zeros(4), torch.zeros(4)
    assert apart(known, [x, y])
    assert apart(known, [x, y])
    y.data = x.data
    assert not apart(known, [x, y])
