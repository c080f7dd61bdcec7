"""Vectors: several arrays as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.buffers.vector import Vector, align

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def cut(total: Any, sizes: list[int]) -> list[Any]:
    return np.split(total, np.cumsum(sizes)[:-1])


@given(lengths, st.data())
def test_views_and_pieces_are_the_slice(sizes: list[int], data: Any) -> None:
    total = np.arange(sum(sizes), dtype="<i4")
    vector = Vector([part.copy() for part in cut(total, sizes)])
    assert (vector.length, len(vector), vector.nbytes) == (sum(sizes),) * 2 + (4 * sum(sizes),)
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(0, sum(sizes)))
    expected = total[start:stop]
    pieces = vector.pieces(start, stop)
    assert [x for piece in pieces for x in piece] == list(expected)
    assert b"".join(vector.views(start, stop)) == expected.tobytes()
    assert all(len(piece) for piece in pieces)


def test_views_write_to_the_arrays() -> None:
    a, b = np.zeros(2, "f4"), np.zeros(2, "f4")
    vector = Vector([a, b])
    for view in vector.views(1, 3):
        view[:] = np.array([7], "f4").tobytes()
    assert (a.tolist(), b.tolist()) == ([0, 7], [7, 0])


def test_memoryviews_are_bytes() -> None:
    data = bytearray(b"abcdef")
    vector = Vector([memoryview(data)[:2], memoryview(b""), memoryview(data)[2:]])
    assert vector.dtype == np.uint8
    assert b"".join(vector.views(1, 4)) == b"bcd"
    vector.views(0, 1)[0][0] = ord("z")
    assert data[0] == ord("z")


def test_empty_vectors_need_a_dtype() -> None:
    vector = Vector([], "<f8")
    assert (vector.length, vector.itemsize, vector.views(0, 0), vector.pieces(0, 0)) == (
        0,
        8,
        [],
        [],
    )
    assert Vector([np.empty(0, "f4")]).itemsize == 4


@pytest.mark.parametrize(
    "parts", [[np.zeros((2, 2))], [np.zeros(4)[::2]], [np.zeros(2), np.zeros(2, "f4")]]
)
def test_parts_that_do_not_fit(parts: list[Any]) -> None:
    with pytest.raises(ValueError, match="takes flat contiguous arrays"):
        Vector(parts)


@given(st.lists(lengths, min_size=1, max_size=4))
def test_align_cuts_where_any_is_cut(layouts: list[list[int]]) -> None:
    length = min(map(sum, layouts))
    operands = []
    for index, sizes in enumerate(layouts):
        vector = Vector([part + index * 100 for part in cut(np.arange(sum(sizes)), sizes)])
        operands.append(vector.pieces(0, length))
    rows = list(align(operands))
    for index in range(len(layouts)):
        joined = [x - index * 100 for row in rows for x in row[index]]
        assert joined == list(range(length))
    assert all(len({len(piece) for piece in row}) == 1 for row in rows)


@given(lengths, st.data())
def test_a_piece_is_the_slice_where_it_lies_in_one_array(sizes: list[int], data: Any) -> None:
    total = np.arange(sum(sizes), dtype="<i4")
    vector = Vector([part.copy() for part in cut(total, sizes)])
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    piece, pieces = vector.piece(start, stop), vector.pieces(start, stop)
    if piece is not None:
        assert piece.tolist() == total[start:stop].tolist()
    else:
        assert len(pieces) != 1


def test_a_piece_beyond_the_end_of_its_array() -> None:
    vector = Vector([np.zeros(2), np.ones(2)])
    assert vector.piece(1, 3) is None
    assert vector.piece(4, 4) is None
    found = vector.piece(2, 4)
    assert found is not None
    assert found.tolist() == [1, 1]


def test_a_vector_that_is_kept_is_lent_the_next_array() -> None:
    vector = Vector.of(np.arange(3.0))
    assert bytes(vector.views(0, 1)[0]) == np.float64(0).tobytes()
    vector.lend(None)
    assert vector.arrays == []
    other = np.arange(5.0, 8.0)
    vector.lend(other)
    assert vector.pieces(1, 2)[0].tolist() == [6.0]
    assert bytes(vector.views(0, 1)[0]) == np.float64(5).tobytes()


@pytest.mark.parametrize("lengths", [(3,), (2, 3)])
def test_of_no_elements_there_is_no_view(lengths: tuple[int, ...]) -> None:
    vector = Vector([np.zeros(length) for length in lengths])
    assert vector.views(2, 2) == vector.pieces(2, 2) == []
