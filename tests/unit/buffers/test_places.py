"""Where results go, and what is read meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aiodist.buffers import places
from aiodist.buffers.encoding import encode

A = np.zeros(40)
M = np.zeros((4, 4))
T = torch.zeros(40)


@pytest.mark.parametrize(
    "fine",
    [
        [A[:4], A[4:8], None],
        [M[:, 0], M[:, 1]],
        [[A[:4], A[:4]], {"a": A[4:8], "b": [A[4:8]]}],
        [A[:0], A[:0]],
        [T[:4], T[4:8]],
        [np.ma.zeros(3), 7, "word", np.float64(3)],
    ],
)
def test_places_that_share_nothing(fine: list[Any]) -> None:
    places.check(fine, "out")


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ([A[:4], A[8:], A[3:6]], r"^out\[0\] and out\[2\] share memory: give each value"),
        ([A, A], r"^out\[0\] and out\[1\] share"),
        ([M[:, 0], M[1]], r"^out\[0\] and out\[1\] share"),
        ([{"a": T[:4]}, {"a": T[3:]}], r"^out\[0\] and out\[1\] share"),
        ([A[9:], [A[:4], A[2:6]]], r"^out: two of its arrays share a part"),
        ([A[9:], [M, M.T]], r"^out: two of its arrays share a part"),
    ],
)
def test_places_that_share_memory(shared: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        places.check(shared, "out")


def test_one_tree() -> None:
    places.check_tree([A, A], "x")
    places.check_tree(A, "x")
    with pytest.raises(ValueError, match=r"^x: two of its arrays share a part"):
        places.check_tree({"a": A, "b": A[1:]}, "x")


def test_leaves() -> None:
    tree = {"a": [1, None, 2.5], "b": ("text", {"c": b"bytes", "d": None}), "e": []}
    assert places.leaves_of(tree) == [1, 2.5, "text", b"bytes"]
    assert places.leaves_of("alone") == ["alone"]
    assert places.leaves_of(None) == []


def test_a_tree_without_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="deep"):
        places.check_tree(loop, "x")


def test_what_meets() -> None:
    assert places.meet([A[:4]], {"a": A[3:]})
    assert not places.meet([A[:4], 7], {"a": A[4:]})
    assert not places.meet(M[:, 0], M[:, 1])
    assert places.meet(T[:4], T.numpy())


class OnCuda(torch.Tensor):
    """Looks as if it were on a GPU: only its addresses may be used."""

    is_cuda = True
    is_cpu = False


def test_what_meets_on_a_gpu() -> None:
    x = torch.zeros(40).as_subclass(OnCuda)
    assert places.meet([x[:4]], {"a": x[3:]})
    assert not places.meet(x[:4], x[4:])
    assert not places.meet(x.reshape(4, 10)[:, 0], x.reshape(4, 10)[:, 1])
    with pytest.raises(ValueError, match=r"^out\[0\] and out\[1\] share"):
        places.check([x[:4], x[3:]], "out")
    found = places.overlapping([[x[:4], x[4:8]]], x, lambda: {0: x[:4], 1: x[6:]}, 0, 0)
    assert len(found) == 1 and found[0].data_ptr() == x[4:].data_ptr()


def copies(values: list[Any], out: list[Any], at: int | None = None) -> list[list[bool]]:
    """Which arrays of `values` have to be copied; ``values[at]`` goes to ``out[at]``."""
    encoded = [encode(value) for value in values]
    given = [each.buffers for each in encoded]
    meta = encoded[at or 0].meta
    found = places.overlapping(given, out, lambda: dict(enumerate(out)), at, at or 0, meta)
    numbers = list(map(id, found))
    assert len(numbers) == sum(id(view) in numbers for value in given for view in value)
    return [[id(view) in numbers for view in value] for value in given]


def test_what_lies_elsewhere_stays() -> None:
    assert copies([A[:4], A[4:8]], [A[8:12], A[12:16]], 0) == [[False], [False]]
    # What is not contiguous was copied anyway.
    assert copies([M[:, 0]], [M[:, 0]]) == [[False]]


def test_what_lies_where_it_goes_stays() -> None:
    assert copies([A[:4], A[4:8]], [A[:4], A[4:8]], 0) == [[False], [True]]
    assert copies([[A[:4], M[0]]], [[A[:4], M[0]]], 0) == [[False, False]]
    empty: Any = A[:0]
    assert copies([[empty, A[:4]]], [[empty, A[:4]]], 0) == [[False]]


def test_keys_may_stand_in_another_order() -> None:
    x, y = A[:4], A[4:8]
    assert copies([{"a": x, "b": y}], [{"a": x, "b": y}], 0) == [[False, False]]
    assert copies([{"a": x, "b": y}], [{"b": x, "a": y}], 0) == [[True, True]]
    assert copies([[{"a": x, "b": y}]], [[{"b": y, "a": x}]], 0) == [[False, False]]


def test_what_is_no_array_does_not_count() -> None:
    x = A[:4]
    assert copies([{"step": 7, "w": x}], [{"step": 0, "w": x}], 0) == [[False]]
    assert copies([[x, 7]], [(torch.from_numpy(x), object())], 0) == [[False]]
    assert copies([[x, 7]], [[x, A[4:8]]], 0) == [[True]]  # it does not fit


@pytest.mark.parametrize(
    "place",
    [A[1:5], A[:3], A[:8:2], A[:4].view(">f8"), [A[9:], A[:4]], M.T],
)
def test_what_lies_where_it_goes_otherwise_is_copied(place: Any) -> None:
    x = M if getattr(place, "base", None) is M else A[:4]
    assert copies([x], [place], 0) == [[True]]


def test_what_lies_in_the_place_of_another_is_copied() -> None:
    assert copies([A[:4]], [A[4:8], A[:4]], 0) == [[True]]
    assert copies([{"a": A[:4], "b": A[4:8]}], [{"a": A[4:8], "b": A[:4]}], 0) == [[True, True]]
    assert copies([A[:4]], [A[2:6]]) == [[True]]
